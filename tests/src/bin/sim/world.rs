//! The simulated machine: a node whose devices cannot hold all tenants at once, and the tenants' processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use sublet_tests::{Outcome, Trouble};
use tempfile::TempDir;
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::wire::{MemberState, MemberStats};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::{DeviceReport, PinnedBytes};

use crate::coordinate::Desk;
use crate::orders::{Generation, Order};
use crate::process::Worker;
use crate::tally::{Footprint, Tally};
use crate::usage::Usage;
use crate::worker::{Board, Charter};

pub(crate) const DEVICES: usize = 4;
const DEVICE_UNITS: u64 = 12;
/// Processes with contents to keep, each of which takes a chunk of 256 MiB of host memory.
const KEEPERS_MAX: usize = 12;
/// How long what follows from an answer may lag behind it: descriptors are closed after the answer is out.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Is memory of dead processes in a sum?
#[derive(Clone, Copy, Debug)]
enum Orphans {
    /// Of a paused tenant: only what the driver would not unmap.
    Counted,
    /// Of an active one, whose processes list all of it in their accounts.
    LeftOut,
}

/// What a tenant's processes say of themselves.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) states: BTreeMap<u32, MemberState>,
    members: Vec<MemberStats>,
}

impl Standing {
    pub(crate) fn all_are(&self, state: MemberState) -> bool {
        self.states.values().all(|found| *found == state)
    }

    /// Bytes by device that the processes need when they are active.
    pub(crate) fn needed_bytes(&self) -> Vec<u64> {
        self.bytes(DeviceReport::own_bytes)
    }

    /// Bytes by device that they hold now, what the driver would not take back included. Memory of dead
    /// processes counts only where `orphans` says so.
    fn resident_bytes(&self, orphans: Orphans) -> Vec<u64> {
        self.bytes(|device| {
            let counts = |row: &&PinnedBytes| match orphans {
                Orphans::Counted => true,
                Orphans::LeftOut => !row.reason.contains("process that has ended"),
            };
            let strays: u64 = device.pinned.iter().filter(counts).map(|row| row.bytes).sum();
            device.resident_bytes() + strays
        })
    }

    fn bytes(&self, of: impl Fn(&DeviceReport) -> u64) -> Vec<u64> {
        let rows = self.members.iter().flat_map(|member| &member.pool.devices);
        let on = |ordinal| rows.clone().filter(move |row| row.device.0 == ordinal);
        (0..).map(|ordinal| on(ordinal).map(&of).sum()).take(DEVICES).collect()
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
            board: None,
        };
        Ok(Self {
            tenants: names.map(|name| name.map(tenant)).collect::<Result<_, _>>()?,
            desk: Desk { run_dir, run_dir_path, sublet },
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
        let is_veteran = tenant == 0 && self.tenants[0].workers.is_empty();
        let charter = Charter {
            node: self.dir.path().join("node"),
            run_dir: self.desk.run_dir_path.clone(),
            tenant: self.tenants[tenant].name.to_string(),
            number,
            device: self.random.i32(0..4),
            // Together more than the devices hold, so that tenants must take turns.
            units_max: (all_units * 3 / 2 / crowd as u64).clamp(1, 6),
            is_keeper: is_veteran || (keepers < KEEPERS_MAX && self.random.u8(..3) == 0),
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

    /// A process of an active tenant at rest frees all and ends.
    pub(crate) fn leave(&mut self, tenant: usize, index: usize) -> Outcome {
        let tenant = &mut self.tenants[tenant];
        let worker = tenant.workers.remove(index);
        let owner = worker.number;
        for other in &mut tenant.workers {
            other.obey(&Order::DropImports { owner })?;
        }
        worker.leave()?;
        tenant.is_broken = true;
        self.tally.left += 1;
        Ok(())
    }

    /// A process is dead: its peers are told, and kernels that wait for it give up.
    pub(crate) fn bury(&mut self, tenant: usize, index: usize) -> Outcome {
        let tenant = &mut self.tenants[tenant];
        let mut worker = tenant.workers.remove(index);
        worker.kill()?;
        self.deaths += 1;
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

    /// What the processes of a tenant say, once each is in a state of rest.
    pub(crate) fn standing(&self, index: usize) -> Outcome<Standing> {
        let tenant = &self.tenants[index];
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let coordinator = self.questioner(index);
        loop {
            let members = coordinator.stats()?.members;
            let states = members.iter().map(|m| (m.member.pid, m.member.state)).collect();
            let standing = Standing { states, members };
            let pids = tenant.workers.iter().map(Worker::pid);
            let answered = pids.clone().all(|pid| standing.states.contains_key(&pid));
            let at_rest = standing.states.values().all(|state| match state {
                MemberState::Active | MemberState::Paused | MemberState::Faulted => true,
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

    /// Compares the bytes in use on every device with what all processes say they hold.
    pub(crate) fn compare_devices(&self) -> Outcome {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let (mut wanted, mut used) = (vec![0; DEVICES], vec![0; DEVICES]);
            let mut orphans = BTreeMap::new();
            for index in 0..self.tenants.len() {
                let tenant = &self.tenants[index];
                if tenant.workers.is_empty() {
                    continue;
                }
                let orphans_in = if tenant.is_paused { Orphans::Counted } else { Orphans::LeftOut };
                let resident = self.standing(index)?.resident_bytes(orphans_in);
                wanted.iter_mut().zip(resident).for_each(|(sum, bytes)| *sum += bytes);
                if !tenant.is_paused {
                    let accounts = tenant.workers.iter().map(|worker| &worker.account);
                    let found = accounts.flat_map(|account| &account.orphans);
                    orphans.extend(found.map(|(id, device, bytes)| (*id, (*device, *bytes))));
                }
            }
            for (device, bytes) in orphans.values() {
                wanted[usize::try_from(*device)?] += bytes;
            }
            for (device, used) in used.iter_mut().enumerate() {
                let info = self.memory(device)?;
                *used = info.total_bytes - info.free_bytes;
            }
            if used == wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Trouble::new(format!(
                    "devices hold {used:?} bytes, and all processes together {wanted:?}"
                )));
            }
            look_again_later();
        }
    }

    /// What this process and its files take now.
    pub(crate) fn footprint(&self) -> Outcome<Footprint> {
        Ok(Footprint {
            own: Usage::now(0)?,
            shared_entries: entries(&self.dir.path().join("node"))?,
            run_entries: entries(&self.desk.run_dir_path)?,
        })
    }
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
