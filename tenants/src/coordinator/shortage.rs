//! Which devices are too full for a resume, and who holds them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::{Coordinator, Holdings, Options, TenantStats};
use crate::identity::TenantName;
use crate::run_dir::RunDir;
use crate::size::Size;
use crate::wire::{DeviceDelta, MemberState};

/// For the answers of other tenants' processes: they are only asked who holds what.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(1);

/// A device that cannot hold what a tenant had there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceShortage {
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// Bytes that all processes of the tenant need there.
    pub needed_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
    /// Tenants with memory there, largest first; this one too, where a pause left some in place.
    pub holders: Vec<Holder>,
    /// What is neither free nor any tenant's: contexts, and processes that do not run under Sublet.
    pub outside_bytes: u64,
}

/// A tenant that has memory on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Holder {
    /// Its name.
    pub tenant: String,
    /// Does it run? A paused tenant can hold memory that a pause leaves in place.
    pub active: bool,
    /// How much.
    pub bytes: u64,
}

impl DeviceShortage {
    /// How much more must be free.
    pub fn missing_bytes(&self) -> u64 {
        self.needed_bytes.saturating_sub(self.free_bytes)
    }
}

impl fmt::Display for DeviceShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uuid, needed_bytes, free_bytes, outside_bytes, .. } = self;
        let [free, needed, missing, outside] =
            [*free_bytes, *needed_bytes, self.missing_bytes(), *outside_bytes].map(Size);
        write!(f, "{uuid} has {free} free and {needed} are needed, {missing} more: ")?;
        let holders = self.holders.iter().map(|Holder { tenant, active, bytes }| {
            let state = if *active { "active" } else { "paused" };
            format!("tenant '{tenant}' holds {} ({state})", Size(*bytes))
        });
        let mut holders: Vec<_> = holders.collect();
        if *outside_bytes > 0 || holders.is_empty() {
            holders.push(format!("{outside} are outside Sublet"));
        }
        f.write_str(&holders.join(", "))
    }
}

/// The devices on which the needs of all members together exceed what is free. Members that released last
/// saw most of it free.
pub(super) fn short_devices<'a>(
    needs: impl IntoIterator<Item = &'a DeviceDelta>,
) -> Vec<DeviceShortage> {
    let mut devices: BTreeMap<&str, DeviceShortage> = BTreeMap::new();
    for need in needs {
        let device = devices.entry(&need.uuid).or_insert_with(|| DeviceShortage {
            uuid: need.uuid.clone(),
            needed_bytes: 0,
            free_bytes: 0,
            total_bytes: need.total_bytes,
            holders: Vec::new(),
            outside_bytes: 0,
        });
        device.needed_bytes = device.needed_bytes.saturating_add(need.bytes);
        device.free_bytes = device.free_bytes.max(need.free_bytes);
    }
    devices.into_values().filter(|device| device.missing_bytes() > 0).collect()
}

/// A tenant whose memory on each device, up to so much, counts as free already.
pub(super) type Gives<'a> = (&'a TenantName, &'a BTreeMap<String, u64>);

/// Finds out who holds `shortages`, the tenant itself too, which may have what a pause left in place. A tenant that does
/// not answer counts as outside.
pub(super) fn name_holders(
    shortages: &mut [DeviceShortage],
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
        let held = others.iter().filter_map(|stats| {
            let given = gives.filter(|(tenant, _)| tenant.as_str() == stats.tenant);
            let given = given.and_then(|(_, bytes)| bytes.get(&shortage.uuid)).copied();
            let bytes = held_on(stats, &shortage.uuid).saturating_sub(given.unwrap_or(0));
            let active =
                stats.members.iter().any(|member| member.member.state == MemberState::Active);
            (bytes > 0).then(|| Holder { tenant: stats.tenant.clone(), active, bytes })
        });
        shortage.holders = held.collect();
        shortage.holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let known = shortage.holders.iter().map(|holder| holder.bytes).sum();
        let used_bytes = shortage.total_bytes.saturating_sub(shortage.free_bytes);
        shortage.outside_bytes = used_bytes.saturating_sub(known);
    }
}

/// Bytes of a tenant on one device, with what its pool only counts.
fn held_on(stats: &TenantStats, uuid: &str) -> u64 {
    let devices = stats.members.iter().flat_map(|member| &member.pool.devices);
    let bytes = devices.filter(|row| row.uuid == uuid).map(|row| {
        let stays: u64 = row.pinned.iter().map(|pinned| pinned.bytes).sum();
        let in_classes: u64 = row.classes.iter().map(|class| class.pinned_bytes).sum();
        row.resident_bytes() + stays.saturating_sub(in_classes)
    });
    bytes.sum()
}
