//! The needs of a resume: its memory, the free memory, the devices that are too full and the holders of their memory. Also the
//! memory that a pause releases. A coordinator that leads asks its members. Another one asks a tenant without a lock, and also
//! whether the tenant's devices have anything left to do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vmm_pool::DeviceReport;

use super::cast::{Cast, Everybody, OnFailure, StepResult};
use super::conversation::{Inquiry, Next, Wait};
use super::coordinator::Coordinator;
use super::figures::{DeviceShortage, Holder, ProcessBytes};
use super::options::Options;
use super::peers::{Peers, gone};
use super::report::{MemberFailure, Step, TenantStats};
use super::trouble::Trouble;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::RunDir;
use sublet_protocol::scope::Scope;
use sublet_protocol::time::millis;
use sublet_protocol::transport::is_stopped;
use sublet_protocol::wire::{
    DeviceDelta, FailureKind, Idleness, LookIdle, MemberState, MemberStats, Needed, Needs, Phase,
    Stats,
};

/// The time within which members must report the needs of a resume, unless the options say otherwise.
pub(super) const NEEDS_TIMEOUT: Duration = Duration::from_mins(1);

/// One GPU of a tenant that is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeed {
    /// The bytes that a resume of all processes of the tenant needs there.
    pub needed_bytes: u64,
    /// The bytes free there.
    pub free_bytes: u64,
    /// All bytes of the GPU.
    pub total_bytes: u64,
}

impl Coordinator {
    /// Returns the memory that a resume in the scope of the options would need on each GPU, by the GPU's machine-wide name.
    /// Processes that do not answer are left out. With `all_devices` the answer also has the free memory of all other GPUs that
    /// the tenant's processes use. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::RunDir`].
    pub fn needs(&self, all_devices: bool) -> Result<BTreeMap<String, DeviceNeed>, Trouble> {
        let Everybody { mut peers, .. } = self.connect_to(&self.dir()?, Step::Stats)?;
        let timeout = self.options.timeout.unwrap_or(NEEDS_TIMEOUT);
        let question =
            Needs { scope: self.options.scope.clone(), timeout_ms: millis(timeout), all_devices };
        let mut needs: BTreeMap<String, DeviceNeed> = BTreeMap::new();
        let (members, interrupt) = (peers.all(), self.options.interrupt.as_ref());
        peers.converse(&members, Inquiry::of(question, timeout, interrupt), |_, _, said| {
            // A process that does not answer is left out here; the resume names it.
            for device in said.unwrap_or_default().devices {
                let need = needs.entry(device.uuid).or_default();
                need.needed_bytes = need.needed_bytes.saturating_add(device.bytes);
                need.free_bytes = need.free_bytes.max(device.free_bytes);
                need.total_bytes = device.total_bytes;
            }
            Next::Done
        });
        Ok(needs)
    }

    /// Asks each process whether its devices have anything left to do, and returns the answers. A process looks only if it has
    /// launched nothing for `quiet_us`. The look holds up its calls for some milliseconds. Takes no lock.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::RunDir`].
    pub fn look_idle(&self, quiet_us: u64) -> Result<Vec<Idleness>, Trouble> {
        let Everybody { mut peers, .. } = self.connect_to(&self.dir()?, Step::Stats)?;
        let (mut all, members) = (Vec::new(), peers.all());
        peers.converse(&members, self.inquiry(LookIdle { quiet_us }), |_, _, said| {
            all.extend(said.ok());
            Next::Done
        });
        Ok(all)
    }
}

/// Refuses if the devices cannot hold `members`.
pub(super) fn refuse_shortage(
    cast: &mut Cast<'_>,
    scope: &Scope,
    members: &[usize],
) -> Result<(), Vec<MemberFailure>> {
    let needs = needs(cast, scope, members).done;
    let short = short_devices(needs.iter().flat_map(|(_, needed)| &needed.devices));
    let (Some(shortage), Some(&index)) = (short.first(), members.first()) else {
        return Ok(());
    };
    let kind = FailureKind::OutOfDeviceMemory { missing_bytes: shortage.missing_bytes() };
    let (who, step) = (cast.peers.who(index), Step::Phase(Phase::Create));
    Err(vec![MemberFailure::new(who, step, kind, "its tenant does not fit")])
}

/// The device memory that a resume of each of `members` needs, and the free device memory.
pub fn needs(cast: &mut Cast<'_>, scope: &Scope, members: &[usize]) -> StepResult<Needed> {
    let timeout = cast.options.timeout.unwrap_or(NEEDS_TIMEOUT);
    let question = Needs { scope: scope.clone(), timeout_ms: millis(timeout), all_devices: false };
    cast.step(&question, members, timeout, OnFailure::WaitForAll)
}

// Devices that are too full.

/// The time limit for other tenants' processes, which only report their memory.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(1);

/// The devices on which all members together need more memory than is free. Members that released last saw the most free
/// memory.
pub fn short_devices<'a>(needs: impl IntoIterator<Item = &'a DeviceDelta>) -> Vec<DeviceShortage> {
    let mut devices: BTreeMap<&str, DeviceShortage> = BTreeMap::new();
    for need in needs {
        let device = devices.entry(&need.uuid).or_insert_with(|| DeviceShortage {
            uuid: need.uuid.clone(),
            needed_bytes: 0,
            free_bytes: 0,
            total_bytes: need.total_bytes,
            holders: Vec::new(),
            outside_bytes: 0,
            own_processes: Vec::new(),
        });
        device.needed_bytes = device.needed_bytes.saturating_add(need.bytes);
        device.free_bytes = device.free_bytes.max(need.free_bytes);
    }
    devices.into_values().filter(|device| device.missing_bytes() > 0).collect()
}

/// A tenant, and the memory on each device, up to so many bytes, that it will release and that counts as free already.
pub(super) type Gives<'a> = (&'a TenantName, &'a BTreeMap<String, u64>);

/// Finds the tenants that hold the devices of `shortages`. `tenant` itself is included, since a pause may have left some of its
/// memory in place. A tenant that does not answer counts as outside.
pub(super) fn name_holders(
    shortages: &mut [DeviceShortage],
    tenant: &TenantName,
    run_dir: &RunDir,
    gives: Option<Gives<'_>>,
) {
    if shortages.is_empty() {
        return;
    }
    let names = run_dir.tenants().unwrap_or_default();
    let options = Options { contact_timeout: HOLDER_TIMEOUT, ..Options::default() };
    let coordinator = |name| Coordinator::new(run_dir.clone(), name, options.clone());
    let others: Vec<_> = names.into_iter().map(coordinator).collect();
    let others = Holdings::of_all(&others.iter().collect::<Vec<_>>()).into_iter();
    let others: Vec<TenantStats> = others.filter_map(|found| found.stats.ok()).collect();
    for shortage in shortages {
        let own = others.iter().filter(|stats| stats.tenant == tenant.as_str());
        shortage.own_processes = own.flat_map(|stats| by_process(stats, &shortage.uuid)).collect();
        let held = others.iter().filter_map(|stats| {
            let given = gives.filter(|(tenant, _)| tenant.as_str() == stats.tenant);
            let given = given.and_then(|(_, bytes)| bytes.get(&shortage.uuid)).copied();
            let bytes = held_on(stats, &shortage.uuid).saturating_sub(given.unwrap_or(0));
            let active =
                stats.members.iter().any(|member| member.member.state == MemberState::Active);
            let gives_bytes = given_on(stats, &shortage.uuid).min(bytes);
            (bytes > 0).then(|| Holder { tenant: stats.tenant.clone(), active, bytes, gives_bytes })
        });
        shortage.holders = held.collect();
        shortage.holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let known = shortage.holders.iter().map(|holder| holder.bytes).sum();
        let used_bytes = shortage.total_bytes.saturating_sub(shortage.free_bytes);
        shortage.outside_bytes = used_bytes.saturating_sub(known);
    }
}

/// Returns the processes of a tenant that have memory on a device, on it or off it.
pub fn by_process(stats: &TenantStats, uuid: &str) -> Vec<ProcessBytes> {
    let of = |member: &MemberStats| {
        let rows = member.pool.devices.iter().filter(|row| row.uuid == uuid);
        let bytes = rows.map(DeviceReport::own_bytes).sum();
        (bytes > 0).then_some(ProcessBytes { pid: member.member.pid, bytes })
    };
    stats.members.iter().filter_map(of).collect()
}

/// Bytes of a tenant on one device that a pause of the tenant releases.
fn given_on(stats: &TenantStats, uuid: &str) -> u64 {
    let is_active = |member: &&MemberStats| member.member.state == MemberState::Active;
    let devices = stats.members.iter().filter(is_active).flat_map(|member| &member.pool.devices);
    let classes = devices.filter(|row| row.uuid == uuid).flat_map(|row| &row.classes);
    classes.map(|class| class.resident_bytes.saturating_sub(class.pinned_bytes)).sum()
}

/// Bytes of a tenant on one device, including those that its pool only counts.
fn held_on(stats: &TenantStats, uuid: &str) -> u64 {
    let devices = stats.members.iter().flat_map(|member| &member.pool.devices);
    let bytes = devices.filter(|row| row.uuid == uuid).map(|row| {
        let stays: u64 = row.pinned.iter().map(|pinned| pinned.bytes).sum();
        let in_classes: u64 = row.classes.iter().map(|class| class.pinned_bytes).sum();
        row.resident_bytes() + stays.saturating_sub(in_classes)
    });
    bytes.sum()
}

// The memory of several tenants' processes. All are asked simultaneously, so that all silent processes cost no more time than
// one.

/// The share of the answer time that all connections together may use. A process that accepts no connection must leave time for
/// the others.
const CONNECT_SHARE: u32 = 4;

/// The figures of one tenant, and whether a process was silent.
#[derive(Debug)]
pub struct Holdings {
    /// The figures, as [`Coordinator::stats`] returns them.
    pub stats: Result<TenantStats, Trouble>,
    /// Is there a live process that has not answered?
    pub is_silent: bool,
    /// Did the call wait for such a process until its time was up?
    pub is_overdue: bool,
}

impl Holdings {
    /// Asks the tenants of all these coordinators. Blocks as long as the slowest of them.
    pub fn of_all(all: &[&Coordinator]) -> Vec<Self> {
        let began = Instant::now();
        let asked = all.iter().map(|coordinator| coordinator.ask_stats(began));
        let (mut peers, mut found): (Vec<_>, Vec<_>) = asked.unzip();
        let mut each: Vec<&mut Peers> = peers.iter_mut().collect();
        Peers::gather(&mut each, Wait::Others, None, |each, position, answer| {
            let index = answer.peer;
            let who = each[position].who(index);
            let is_overdue = each[position].is_overdue(index);
            found[position].is_silent |= is_overdue;
            found[position].is_overdue |= is_overdue;
            if let Ok(stats) = &mut found[position].stats {
                match answer.to(&Stats) {
                    Ok(mut member) => {
                        // The kernel's id is valid in our namespace, and the member's own id may not be.
                        member.member.pid = who.pid.unwrap_or(member.member.pid);
                        stats.members.push(member);
                    }
                    Err(failure) => stats.failures.push(failure),
                }
            }
            Wait::Others
        });
        for stats in found.iter_mut().filter_map(|found| found.stats.as_mut().ok()) {
            stats.members.sort_by_key(|stats| stats.member.pid);
        }
        found
    }
}

impl Coordinator {
    /// Returns the memory of every process of the tenant. Takes no lock. Removes sockets of dead processes, and changes nothing
    /// else. Members that do not answer are listed; they are no error.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::NoProcess`], [`Trouble::RunDir`].
    pub fn stats(&self) -> Result<TenantStats, Trouble> {
        Holdings::of_all(&[self]).remove(0).stats
    }

    /// Asks all processes that can answer.
    fn ask_stats(&self, began: Instant) -> (Peers, Holdings) {
        let (peers, stats, is_silent) = match self.try_ask_stats(began) {
            Ok((peers, stats, is_silent)) => (peers, Ok(stats), is_silent),
            Err(error) => (Peers::default(), Err(error), false),
        };
        (peers, Holdings { stats, is_silent, is_overdue: false })
    }

    fn try_ask_stats(&self, began: Instant) -> Result<(Peers, TenantStats, bool), Trouble> {
        let dir = self.dir()?;
        let timeout = self.options.contact_timeout;
        let connected = Everybody::connect(&dir, Step::Stats, began + timeout / CONNECT_SHARE);
        dir.remove_stale()?;
        let Everybody { mut peers, failures } = connected?;
        let mut is_silent = !failures.is_empty();
        let (tenant, members, budgets) = (self.tenant.to_string(), Vec::new(), Vec::new());
        let mut stats = TenantStats { tenant, members, budgets, failures };
        for index in peers.all() {
            let who = peers.who(index);
            if let Some(pid) = who.pid.filter(|pid| is_stopped(*pid)) {
                is_silent = true;
                let message = format!("it is stopped (SIGSTOP): `kill -CONT {pid}` continues it");
                stats.failures.push(gone(who, Step::Stats, message));
            } else {
                stats.failures.extend(peers.ask(index, &Stats, timeout).err());
            }
        }
        Ok((peers, stats, is_silent))
    }
}
