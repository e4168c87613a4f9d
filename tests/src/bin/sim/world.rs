//! The simulated machine: a node whose devices cannot hold all tenants together, and the tenants' processes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use sublet_tests::{Outcome, Trouble};
use tempfile::TempDir;
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::wire::{MemberState, MemberStats};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, ProcessState};

use crate::coordinate::Desk;
use crate::orders::{Answer, Deal, Generation, Item, Order, Worked};
use crate::process::Worker;
use crate::tally::{Footprint, Tally};
use crate::trade::Market;
use crate::usage::{Usage, device_memory_of};
use crate::worker::{Board, Charter};

pub(crate) const DEVICES: usize = 4;
const DEVICE_UNITS: u64 = 16;
/// Processes with contents to keep, each of which takes a chunk of 256 MiB of host memory.
const KEEPERS_MAX: usize = 8;
/// With more processes than this each uses one device.
const CROWD_OF_SMALL: usize = 12;
/// Why what the driver would not take back stays.
const DEFERRED: &str = "would not take it back";
/// Why memory stays whose owner has let it go.
const LET_GO: &str = "let go by its owner";
/// How long what follows from an answer may lag behind it: descriptors are closed after the answer is out.
const SETTLE_TIMEOUT: Duration = Duration::from_mins(5);

/// The processes that are paused and resumed together.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) name: TenantName,
    pub(crate) workers: Vec<Worker>,
    pub(crate) is_paused: bool,
    /// Somebody has died since the communicators were made.
    pub(crate) is_broken: bool,
    /// Memory of a dead process may have been imported by one that lives.
    pub(crate) has_orphans: bool,
    pub(crate) steps: u64,
    /// What its processes offer each other.
    pub(crate) market: Market,
    board: Option<(Board, PathBuf)>,
}

impl Tenant {
    /// Has kernels that wait for a dead rank give up.
    pub(crate) fn abort(&mut self) -> Outcome {
        self.is_broken = true;
        match &self.board {
            Some((board, _)) => board.abort(),
            None => Ok(()),
        }
    }
}

/// What a tenant's processes say of themselves.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) states: BTreeMap<u32, MemberState>,
    pub(crate) members: Vec<MemberStats>,
}

impl Standing {
    pub(crate) fn all_are(&self, state: MemberState) -> bool {
        self.states.values().all(|found| *found == state)
    }

    /// Has one of them memory of this tag?
    pub(crate) fn has_tag(&self, tag: &str) -> bool {
        let rows = self.members.iter().flat_map(|member| &member.member.tags);
        rows.into_iter().any(|row| row.tag == tag)
    }

    /// Bytes that the driver would not take back.
    fn deferred_bytes(&self) -> Vec<u64> {
        let rows = self.members.iter().flat_map(|member| &member.pool.devices);
        let deferred = |ordinal| -> u64 {
            let on = rows.clone().filter(move |row| row.device.0 == ordinal);
            let pinned = on.flat_map(|device| &device.pinned);
            pinned.filter(|row| row.reason.contains(DEFERRED)).map(|row| row.bytes).sum()
        };
        (0..).map(deferred).take(DEVICES).collect()
    }

    /// Bytes that stay on devices, in the words of `reason`.
    fn bytes_for(&self, pid: u32, reason: impl Fn(&str) -> bool) -> u64 {
        let member = self.members.iter().filter(|member| member.member.pid == pid);
        let rows = member.flat_map(|member| &member.pool.devices).flat_map(|row| &row.pinned);
        rows.filter(|row| reason(&row.reason)).map(|row| row.bytes).sum()
    }
}

/// See the head of this module.
pub(crate) struct World {
    pub(crate) tenants: Vec<Tenant>,
    pub(crate) desk: Desk,
    pub(crate) random: Rng,
    pub(crate) tally: Tally,
    observer: SimDriver,
    workers_made: u64,
    /// Processes that did not end by themselves.
    pub(crate) deaths: u64,
    generations: u64,
    /// Last, so that the directory goes after all that uses it.
    dir: TempDir,
}

impl World {
    pub(crate) fn new(seed: u64, tenants: usize, sublet: Option<PathBuf>) -> Outcome<Self> {
        let dir = tempfile::Builder::new().prefix("sublet-sim-run-").tempdir_in("/dev/shm")?;
        let capacities = [DEVICE_UNITS * GRANULARITY_BYTES; DEVICES];
        let node = SimNode::create(dir.path().join("node"), &capacities)?;
        let run_dir_path = dir.path().join("run");
        let run_dir = RunDir::open(Some(run_dir_path.clone()), None)?;
        let names = (0..tenants).map(|index| TenantName::new(&format!("tenant{index}")));
        let tenant = |name| Tenant {
            name,
            workers: Vec::new(),
            is_paused: false,
            is_broken: false,
            has_orphans: false,
            steps: 0,
            market: Market::default(),
            board: None,
        };
        Ok(Self {
            tenants: names.map(|name| name.map(tenant)).collect::<Result<_, _>>()?,
            desk: Desk { run_dir, run_dir_path, node: dir.path().join("node"), sublet },
            random: Rng::with_seed(seed),
            tally: Tally::default(),
            observer: SimDriver::new(node, SimOptions::default()),
            workers_made: 0,
            deaths: 0,
            generations: 0,
            dir,
        })
    }

    pub(crate) fn processes(&self) -> usize {
        self.tenants.iter().map(|tenant| tenant.workers.len()).sum()
    }

    /// The worker of this number, while it lives.
    pub(crate) fn worker(&mut self, number: u64) -> Option<&mut Worker> {
        let tenants = self.tenants.iter_mut();
        tenants.flat_map(|tenant| &mut tenant.workers).find(|worker| worker.number == number)
    }

    /// The tenant of a worker that lives.
    pub(crate) fn tenant_of(&self, number: u64) -> Option<usize> {
        let has_it = |tenant: &Tenant| tenant.workers.iter().any(|w| w.number == number);
        self.tenants.iter().position(has_it)
    }

    /// A driver of a process that does not run under Sublet.
    pub(crate) fn stranger(&self) -> SimDriver {
        SimDriver::new(self.observer.node().clone(), SimOptions::default())
    }

    /// Starts a process of a tenant that is active and at rest.
    pub(crate) fn join(&mut self, tenant: usize, crowd: usize) -> Outcome<u64> {
        self.workers_made += 1;
        let number = self.workers_made;
        let workers = self.tenants.iter().flat_map(|tenant| &tenant.workers);
        let keepers = workers.filter(|worker| worker.is_keeper).count();
        let all_units = DEVICE_UNITS * DEVICES as u64;
        // Most use one device, as a rank does.
        let mut devices: Vec<i32> = (0..i32::try_from(DEVICES)?).collect();
        self.random.shuffle(&mut devices);
        let most = if crowd <= CROWD_OF_SMALL { self.random.usize(1..=2 * DEVICES) } else { 1 };
        devices.truncate(if most > DEVICES { 1 } else { most });
        let is_veteran = tenant == 0 && self.tenants[0].workers.is_empty();
        let charter = Charter {
            node: self.dir.path().join("node"),
            run_dir: self.desk.run_dir_path.clone(),
            tenant: self.tenants[tenant].name.to_string(),
            number,
            devices,
            // Together more than the devices hold, so that tenants must take turns.
            units_max: (all_units * 3 / 2 / crowd as u64).clamp(1, 6),
            is_keeper: is_veteran || (keepers < KEEPERS_MAX && self.random.bool()),
            seed: self.random.u64(..),
        };
        let worker = Worker::start(&charter, is_veteran)?;
        let tenant = &mut self.tenants[tenant];
        tenant.workers.push(worker);
        tenant.is_broken = true;
        self.tally.joined += 1;
        self.tally.processes_max = self.tally.processes_max.max(self.processes());
        Ok(number)
    }

    /// Takes the board away of a tenant whose processes have all ended.
    pub(crate) fn clear_board(&mut self, tenant: usize) -> Outcome {
        if let Some((_, path)) = self.tenants[tenant].board.take() {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }

    /// A process of an active tenant at rest frees all and ends; its peers have let go of what they had from it
    /// before, or keep it.
    pub(crate) fn leave(&mut self, tenant: usize, index: usize, is_dropped: bool) -> Outcome {
        let tenant = &mut self.tenants[tenant];
        let worker = tenant.workers.remove(index);
        let owner = worker.number;
        for other in &mut tenant.workers {
            if is_dropped {
                other.deal(Deal::DropImports { owner })?;
            } else {
                other.obey(&Order::Ended { owner })?;
            }
        }
        let (away, open) = (tenant.market.away_tags(), tenant.market.open_ids(owner));
        worker.leave(away, open)?;
        tenant.has_orphans |= !is_dropped;
        tenant.is_broken = true;
        self.tally.left += 1;
        Ok(())
    }

    /// Reads all answers that are outstanding, and enters what they say. The tenant is active.
    pub(crate) fn hear(&mut self, tenant: usize) -> Outcome {
        let tenant = &mut self.tenants[tenant];
        for index in 0..tenant.workers.len() {
            let answers = tenant.workers[index].answers()?;
            let number = tenant.workers[index].number;
            for answer in answers {
                if let Answer::Worked(Worked { launches, changes, .. }) = answer {
                    self.tally.launches += launches;
                    self.tally.changes += changes;
                } else {
                    tenant.market.enter(number, answer, &mut self.tally)?;
                }
            }
        }
        tenant.market.settle(&mut tenant.workers)
    }

    /// Compares all that the processes of an active tenant at rest can reach.
    pub(crate) fn check(&mut self, tenant: usize) -> Outcome {
        self.hear(tenant)?;
        let tenant = &mut self.tenants[tenant];
        let mut orphans = 0;
        for worker in &mut tenant.workers {
            let open = tenant.market.open_ids(worker.number);
            let account = worker.check(&tenant.market.away_tags(), &open)?;
            self.tally.checked_bytes += account.checked_bytes;
            self.tally.lost_imports += account.lost;
            self.tally.slabs += account.slabs;
            self.tally.cells += account.cells;
            for (name, count) in &account.paged {
                Tally::count(&mut self.tally.paged, name.as_str(), *count);
            }
            orphans += account.orphans;
        }
        tenant.has_orphans = orphans > 0;
        Ok(())
    }

    /// A process is dead: its peers are told, and kernels that wait for it give up.
    pub(crate) fn bury(&mut self, tenant: usize, index: usize) -> Outcome {
        let tenant = &mut self.tenants[tenant];
        let mut worker = tenant.workers.remove(index);
        worker.kill()?;
        self.deaths += 1;
        tenant.market.taker_died(worker.number);
        tenant.abort()?;
        tenant.has_orphans = true;
        for other in &mut tenant.workers {
            other.send(&Order::Ended { owner: worker.number })?;
        }
        Ok(())
    }

    /// New communicators over the living processes of an active tenant at rest.
    pub(crate) fn regroup(&mut self, tenant: usize) -> Outcome {
        self.generations += 1;
        let path = self.dir.path().join(format!("board{}", self.generations));
        let board = Board::create(&path)?;
        let tenant = &mut self.tenants[tenant];
        let ranks = u32::try_from(tenant.workers.len())?;
        let number = self.generations;
        for (rank, worker) in (0..).zip(&mut tenant.workers) {
            let generation = Generation { number, board: path.clone(), rank, ranks };
            worker.send(&Order::Communicate(generation))?;
        }
        for worker in &mut tenant.workers {
            worker.answers()?;
        }
        if let Some((_, old)) = tenant.board.replace((board, path)) {
            std::fs::remove_file(old)?;
        }
        tenant.is_broken = false;
        Ok(())
    }

    /// The processes of a tenant that have lost something.
    pub(crate) fn faulted(&self, tenant: usize) -> Outcome<Vec<u32>> {
        if self.tenants[tenant].workers.is_empty() {
            return Ok(Vec::new());
        }
        let members = self.questioner(tenant).stats()?.members;
        let faulted = members.iter().filter(|m| m.member.state == MemberState::Faulted);
        Ok(faulted.map(|member| member.member.pid).collect())
    }

    fn questioner(&self, tenant: usize) -> Coordinator {
        let name = self.tenants[tenant].name.clone();
        Coordinator::new(self.desk.run_dir.clone(), name, Options::default())
    }

    /// Waits until each process of a tenant can be reached.
    pub(crate) fn until_all_answer(&self, index: usize) -> Outcome {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let coordinator = self.questioner(index);
        let wanted: BTreeSet<u32> = self.tenants[index].workers.iter().map(Worker::pid).collect();
        loop {
            let stats = if wanted.is_empty() { return Ok(()) } else { coordinator.stats() };
            let found = stats.as_ref().map(|stats| {
                stats.members.iter().map(|member| member.member.pid).collect::<BTreeSet<_>>()
            });
            if found.is_ok_and(|found| found == wanted) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Trouble::new(format!("{wanted:?} cannot be reached: {stats:?}")));
            }
            look_again_later();
        }
    }

    /// What the processes of a tenant say, once each is in a state of rest.
    pub(crate) fn standing(&self, index: usize) -> Outcome<Standing> {
        let tenant = &self.tenants[index];
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let coordinator = self.questioner(index);
        loop {
            let members = coordinator.stats()?.members;
            // One that stands deep is paused, and so are some of a tenant whose deep pause failed for others.
            let shown =
                |state| if state == MemberState::Deep { MemberState::Paused } else { state };
            let states = members.iter().map(|m| (m.member.pid, shown(m.member.state))).collect();
            let standing = Standing { states, members };
            let pids = tenant.workers.iter().map(Worker::pid);
            let answered = pids.clone().all(|pid| standing.states.contains_key(&pid));
            let at_rest = standing.states.values().all(|state| match state {
                MemberState::Active
                | MemberState::Paused
                | MemberState::Deep
                | MemberState::Faulted => true,
                MemberState::Offloading | MemberState::Restoring => false,
            });
            let held = standing
                .members
                .iter()
                .any(|member| member.member.state == MemberState::Active && member.member.held);
            if answered && at_rest && !held && standing.states.len() == pids.len() {
                return Ok(standing);
            }
            if Instant::now() > deadline {
                return Err(Trouble::new(format!("not at rest: {:?}", standing.states)));
            }
            look_again_later();
        }
    }

    /// Bytes that nobody holds, by device.
    pub(crate) fn free_bytes(&self) -> Outcome<Vec<u64>> {
        (0..DEVICES).map(|device| Ok(self.memory(device)?.free_bytes)).collect()
    }

    fn memory(&self, device: usize) -> Outcome<vmm_pool::driver::MemoryInfo> {
        let ordinal = DeviceOrdinal(i32::try_from(device)?);
        let core = self.observer.core();
        core.ensure_context(ordinal)
            .and_then(|()| core.memory_of(ordinal))
            .map_err(|code| Trouble::new(format!("the observer was refused with {code}")))
    }

    /// Compares the bytes in use on every device with what all processes have on record.
    pub(crate) fn compare_devices(&mut self) -> Outcome {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let (mut wanted, mut deferred) = (vec![0; DEVICES], vec![0; DEVICES]);
            // One allocation may be held by many.
            let mut resident: BTreeMap<u128, (usize, u64)> = BTreeMap::new();
            let mut wrong = None;
            for index in 0..self.tenants.len() {
                if self.tenants[index].workers.is_empty() {
                    continue;
                }
                let standing = self.standing(index)?;
                let left = standing.deferred_bytes();
                deferred.iter_mut().zip(left).for_each(|(sum, bytes)| *sum += bytes);
                let items = self.items(index)?;
                for item in items.iter().flat_map(|(_, items)| items).filter(|i| i.is_resident) {
                    resident.insert(item.id, (usize::try_from(item.device)?, item.bytes));
                }
                // What the driver would not unmap is in the notes alone.
                let found = &self.tenants[index];
                if found.is_paused && !found.market.is_troubled {
                    wrong = wrong.or_else(|| unexplained(&standing, &items));
                }
            }
            for (device, bytes) in resident.values() {
                wanted[*device] += bytes;
            }
            let mut used = vec![0; DEVICES];
            for (device, used) in used.iter_mut().enumerate() {
                let info = self.memory(device)?;
                *used = info.total_bytes - info.free_bytes;
            }
            // What is deferred may be a handle of memory that somebody has on record, and holds nothing more then.
            let most = wanted.iter().zip(&deferred).map(|(wanted, deferred)| wanted + deferred);
            let fits = wanted.iter().zip(most).zip(&used);
            let is_right =
                fits.into_iter().all(|((least, most), used)| (*least..=most).contains(used));
            if is_right && wrong.is_none() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let wrong = wrong.unwrap_or_default();
                let told = self.told_of_memory()?;
                return Err(Trouble::new(format!(
                    "devices hold {used:?} bytes, and all processes together {wanted:?} and {deferred:?} that the \
                     driver would not take back; {wrong}{told}"
                )));
            }
            look_again_later();
        }
    }

    /// Who holds which device memory, and what is on record for it, for an error.
    fn told_of_memory(&mut self) -> Outcome<String> {
        let mut told = String::new();
        for index in 0..self.tenants.len() {
            for (pid, items) in self.items(index)? {
                let name = &self.tenants[index].name;
                let held = device_memory_of(pid);
                write!(told, "\n  process {pid} of {name} holds {held:?}; on record: {items:?}")?;
            }
        }
        Ok(told)
    }

    /// What the processes of a tenant have on record, by process id.
    fn items(&mut self, tenant: usize) -> Outcome<Vec<(u32, Vec<Item>)>> {
        let node = self.observer.core().node();
        let workers = self.tenants[tenant].workers.iter_mut();
        workers
            .map(|worker| {
                let mut items = worker.inventory()?;
                if node.process_state(worker.pid()) == Ok(ProcessState::Checkpointed) {
                    // What a pause left there the driver has taken.
                    for item in &mut items {
                        item.is_resident = false;
                    }
                }
                Ok((worker.pid(), items))
            })
            .collect()
    }

    /// Bytes by device that the processes of a paused tenant need at most to run again.
    pub(crate) fn needed_bytes(&mut self, tenant: usize) -> Outcome<Vec<u64>> {
        let mut needed = vec![0; DEVICES];
        let items = self.items(tenant)?;
        for item in items.iter().flat_map(|(_, items)| items) {
            if item.is_own && !item.is_resident && !item.is_away_by_turns {
                needed[usize::try_from(item.device)?] += item.bytes;
            }
        }
        Ok(needed)
    }

    /// What this process and its files take now.
    pub(crate) fn footprint(&self) -> Outcome<Footprint> {
        self.observer.core().node().sweep_processes();
        Ok(Footprint {
            own: Usage::now(0)?,
            shared_entries: entries(&self.dir.path().join("node"))?,
            run_entries: entries(&self.desk.run_dir_path)?,
        })
    }
}

/// Memory of a paused tenant that is on a device, and that its process gives no reason for, or a wrong one.
fn unexplained(standing: &Standing, items: &[(u32, Vec<Item>)]) -> Option<String> {
    let all = items.iter().flat_map(|(_, items)| items);
    let owned: BTreeSet<u128> = all.filter(|item| item.is_own).map(|item| item.id).collect();
    for (pid, items) in items {
        let resident = items.iter().filter(|item| item.is_resident);
        let bytes: u64 = resident.clone().map(|item| item.bytes).sum();
        let said = standing.bytes_for(*pid, |reason| !reason.contains(DEFERRED));
        let ownerless = resident.filter(|item| !item.is_own && !owned.contains(&item.id));
        let ownerless: u64 = ownerless.map(|item| item.bytes).sum();
        let let_go = standing.bytes_for(*pid, |reason| reason.contains(LET_GO));
        if bytes != said || let_go > ownerless {
            return Some(format!(
                "process {pid} is paused and has {bytes} bytes on devices, {said} with a reason, {let_go} as let go \
                 by their owner, of {ownerless} without one: {:?}",
                items.iter().filter(|item| item.is_resident).collect::<Vec<_>>()
            ));
        }
    }
    None
}

/// How many files and directories there are below `path`.
fn entries(path: &std::path::Path) -> Outcome<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            count += entries(&entry.path())?;
        }
    }
    Ok(count)
}

#[expect(clippy::disallowed_methods, reason = "what other processes do last gives no event")]
fn look_again_later() {
    std::thread::sleep(Duration::from_millis(1));
}
