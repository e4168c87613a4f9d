//! What goes wrong.

use std::sync::mpsc::channel;
use std::time::Duration;

use fastrand::Rng;
use nix::sys::signal::Signal;
use sublet_tests::{Outcome, Trouble};
use tenants::wire::Action;
use vmm_pool::driver::sim::SimDriver;
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _, DriverCode, DriverOp};

use super::Script;
use super::scarcity::Scarcity;
use crate::coordinate::{CALLS, Fails, Request, Verdict, Way};
use crate::orders::{HostRoom, Order};
use crate::process::Worker;
use crate::tally::Tally;
use crate::world::World;

/// One thing that goes wrong during a command. Workers are named by their numbers.
#[derive(Clone, Debug)]
pub(super) enum Mishap {
    /// Nothing.
    None,
    /// Calls of a worker fail.
    Faults { worker: u64, rules: String },
    /// From one call on, the driver refuses everything.
    ContextLost { worker: u64, rules: String },
    /// There is no host memory to be had.
    NoHostMemory { worker: u64 },
    /// A worker is killed after some time.
    WorkerKilled { worker: u64, after: Duration, kernels_give_up_at_once: bool },
    /// The coordinator is killed after some time, and perhaps a worker right behind.
    CoordinatorKilled { after: Duration, with: Option<u64> },
    /// The command is called off after some time.
    CalledOff { after: Duration },
    /// The command gets a signal after some time.
    Interrupted { after: Duration, signal: Signal },
    /// A worker, which handles it, gets a signal after some time.
    Signalled { worker: u64, after: Duration },
    /// A worker can open only so many more descriptors.
    TableFull { worker: u64, spare: usize },
    /// A process that does not run under Sublet has taken what is free of a device.
    Stranger { device: usize },
    /// A worker is stopped after some time and goes on later. Perhaps the coordinator is killed at some instant.
    Stopped { worker: u64, after: Duration, lasting: Duration, killed: Option<Duration> },
    /// A second command of the same tenant begins after some time.
    SecondCommand { after: Duration, action: Action },
    /// The run directory is removed after some time, perhaps with a second command behind that.
    RunDirGone { after: Duration, second: Option<(Duration, Action)> },
    /// The socket of a worker loses its name right before the command.
    NameGone { worker: u64 },
    /// A call of the driver's about another process fails, behind so many that do not.
    CheckpointFails { call: &'static str, behind: u64 },
    /// The tenant's directory holds more sockets of dead processes than a tenant may have processes.
    DeadSockets { tenant: usize },
}

impl Mishap {
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// What is to fail of the driver's calls about other processes.
    pub(super) fn fails(&self) -> Option<Fails> {
        if let Self::CheckpointFails { call, behind } = self {
            return Some(Fails::behind(call, *behind));
        }
        None
    }

    pub(super) fn loses_context_of(&self, number: u64) -> bool {
        matches!(self, Self::ContextLost { worker, .. } if *worker == number)
    }

    /// In the account of refusals.
    pub(super) fn cause(&self) -> &'static str {
        match self {
            Self::None => "no reason",
            Self::Faults { .. } => "a driver call failed",
            Self::ContextLost { .. } => "a context was lost",
            Self::NoHostMemory { .. } => "no host memory",
            Self::WorkerKilled { .. } | Self::CoordinatorKilled { .. } => "a process was killed",
            Self::CalledOff { .. } | Self::Interrupted { .. } => "called off",
            Self::Signalled { .. } => "a process got a signal",
            Self::TableFull { .. } => "no descriptors",
            Self::Stranger { .. } => "no device memory, taken from outside",
            Self::Stopped { .. } => "a process was stopped",
            Self::SecondCommand { .. } => "a second command",
            Self::RunDirGone { .. } => "the run directory was removed",
            Self::NameGone { .. } => "a socket had no name",
            Self::CheckpointFails { .. } => "a call of the driver's about another process failed",
            Self::DeadSockets { .. } => "sockets of dead processes",
        }
    }
}

/// Device memory of a process that does not run under Sublet; given back when dropped.
pub(super) struct Stranger {
    _driver: SimDriver,
}

impl Stranger {
    pub(super) fn fill(world: &World, device: usize) -> Outcome<Self> {
        let driver = world.stranger();
        let free_bytes = world.free_bytes()?[device];
        if free_bytes > 0 {
            let ordinal = DeviceOrdinal(i32::try_from(device)?);
            match driver.create(free_bytes, &AllocationProp::pinned_on(ordinal)) {
                // Where the tenant runs, it may have taken some of that meanwhile.
                Err(error) if error.code == DriverCode::OUT_OF_MEMORY => {}
                created => drop(created?),
            }
        }
        Ok(Self { _driver: driver })
    }
}

/// The call that a rule is about, for the account; which of two failed is not known.
pub(super) fn symbol(rules: &str) -> &str {
    match rules.split_once(':') {
        _ if rules.contains(',') => "of one of two rules",
        Some(("*", _)) | None => "the nth of any",
        Some((symbol, _)) => symbol,
    }
}

#[expect(clippy::disallowed_methods, reason = "a random instant is what the simulation is about")]
pub(crate) fn let_time_pass(time: Duration) {
    std::thread::sleep(time);
}

fn random_rule(random: &mut Rng) -> String {
    let code = if random.u8(..4) == 0 { DriverCode::OUT_OF_MEMORY } else { DriverCode::UNKNOWN };
    if random.bool() {
        return format!("*:{}:{}", random.u64(1..80), code.0);
    }
    let op = DriverOp::ALL[random.usize(..DriverOp::ALL.len())];
    format!("{}:{}:{}", op.symbol(), random.u64(1..4), code.0)
}

/// One that ends a command, and that a worker handles.
pub(super) fn any_signal(random: &mut Rng) -> Signal {
    if random.bool() { Signal::SIGINT } else { Signal::SIGTERM }
}

/// One that makes room for others fails, or dies.
fn mishap_of_giver(workers: &[Worker], random: &mut Rng) -> Option<Mishap> {
    let keepers = workers.iter().filter(|worker| worker.is_keeper);
    let worker = random.choice(keepers.collect::<Vec<_>>())?;
    match random.u8(..3) {
        0 => Some(Mishap::Faults { worker: worker.number, rules: random_rule(random) }),
        1 if !worker.is_veteran => Some(Mishap::WorkerKilled {
            worker: worker.number,
            after: Duration::from_micros(random.u64(..60_000)),
            kernels_give_up_at_once: true,
        }),
        _ => None,
    }
}

impl Script {
    /// Something that goes wrong in a command for `tenant`, or in one that makes room for it, or nothing.
    pub(super) fn choose_mishap(
        &mut self,
        tenant: usize,
        action: Action,
        scarcity: Option<&Scarcity>,
    ) -> Mishap {
        let world = &mut self.world;
        if let Some(giver) = scarcity.and_then(|scarcity| world.random.choice(&scarcity.givers))
            && world.random.bool()
            && let Some(mishap) = mishap_of_giver(&world.tenants[*giver].workers, &mut world.random)
        {
            return mishap;
        }
        let workers = &world.tenants[tenant].workers;
        let random = &mut world.random;
        let any = workers[random.usize(..workers.len())].number;
        let mortals: Vec<u64> =
            workers.iter().filter(|w| !w.is_veteran).map(|w| w.number).collect();
        let mortal = random.choice(mortals);
        // From before the first message to after the last.
        let after = Duration::from_micros(random.u64(..40_000));
        match (random.u8(..100), mortal) {
            (0..14, _) => Mishap::Faults { worker: any, rules: random_rule(random) },
            (14..18, _) => {
                let rules = format!("{},{}", random_rule(random), random_rule(random));
                Mishap::Faults { worker: any, rules }
            }
            (18..24, Some(worker)) => {
                let kernels_give_up_at_once = random.bool();
                Mishap::WorkerKilled { worker, after, kernels_give_up_at_once }
            }
            (24..31, mortal) => {
                let with = mortal.filter(|_| random.u8(..6) == 0);
                Mishap::CoordinatorKilled { after, with }
            }
            (31..35, _) => Mishap::CalledOff { after },
            (35..38, _) if action == Action::Pause => Mishap::NoHostMemory { worker: any },
            (35..39, _) if action == Action::Resume => {
                Mishap::Stranger { device: random.usize(..crate::world::DEVICES) }
            }
            (39, Some(worker)) if action == Action::Resume => {
                let code = DriverCode::ILLEGAL_ADDRESS.0;
                Mishap::ContextLost { worker, rules: format!("*:{}+:{code}", random.u64(1..40)) }
            }
            (40..45, _) => {
                // Now and then for longer than anybody waits for an answer.
                let lasting_ms = if random.u8(..12) == 0 { 7_000 } else { random.u64(..300) };
                let lasting = Duration::from_millis(lasting_ms);
                let killed = random.bool().then(|| Duration::from_micros(random.u64(..40_000)));
                Mishap::Stopped { worker: any, after, lasting, killed }
            }
            (45..47, _) => Mishap::RunDirGone { after, second: None },
            (47, _) => Mishap::NameGone { worker: any },
            (48, _) => Mishap::DeadSockets { tenant },
            (58, _) => Mishap::Interrupted { after, signal: any_signal(random) },
            (59..61, _) => Mishap::Signalled { worker: any, after },
            (61..63, _) => Mishap::TableFull { worker: any, spare: random.usize(..8) },
            (49..58, _) => {
                let calls = if action == Action::Pause { &CALLS[..2] } else { &CALLS[2..] };
                let call = calls[random.usize(..calls.len())];
                Mishap::CheckpointFails { call, behind: random.u64(..2) }
            }
            _ => Mishap::None,
        }
    }

    /// Asks, and kills whom the mishap says on the way.
    pub(super) fn ask(
        &mut self,
        tenant: usize,
        way: Way,
        request: &Request,
        mishap: &Mishap,
    ) -> Outcome<Verdict> {
        let place = match request.action {
            _ if request.swap.is_some() => "a swap",
            Action::Pause => "a pause",
            Action::Resume => "a resume",
        };
        let by = match way {
            Way::ChildKilledAfter(_) => "a child to be killed",
            Way::CalledOffAfter(_) => "the library, called off",
            Way::InterruptedAfter(..) if self.world.desk.sublet.is_some() => {
                "the command, interrupted"
            }
            Way::Command if self.world.desk.sublet.is_some() => "the command",
            Way::Library | Way::Command | Way::InterruptedAfter(..) => "the library",
        };
        Tally::count(&mut self.world.tally.commands, by, 1);
        match mishap {
            Mishap::WorkerKilled { worker, after, kernels_give_up_at_once } => {
                let give_up = *kernels_give_up_at_once;
                self.ask_and_kill(tenant, request, *worker, (*after, give_up), place)
            }
            Mishap::CoordinatorKilled { with, .. } => {
                let verdict = self.world.desk.ask(way, request)?;
                if matches!(verdict, Verdict::Killed) {
                    Tally::count(&mut self.world.tally.kills, format!("coordinator of {place}"), 1);
                }
                if let Some(worker) = with {
                    let name = format!("worker right behind a coordinator of {place}");
                    self.kill(*worker, &name)?;
                }
                Ok(verdict)
            }
            Mishap::Stopped { .. }
            | Mishap::Signalled { .. }
            | Mishap::SecondCommand { .. }
            | Mishap::RunDirGone { .. } => self.ask_beside(tenant, way, request, mishap),
            Mishap::None
            | Mishap::Faults { .. }
            | Mishap::ContextLost { .. }
            | Mishap::NoHostMemory { .. }
            | Mishap::CheckpointFails { .. }
            | Mishap::CalledOff { .. }
            | Mishap::Interrupted { .. }
            | Mishap::TableFull { .. }
            | Mishap::DeadSockets { .. }
            | Mishap::NameGone { .. }
            | Mishap::Stranger { .. } => self.world.desk.ask(way, request),
        }
    }

    fn ask_and_kill(
        &mut self,
        tenant: usize,
        request: &Request,
        worker: u64,
        (after, give_up): (Duration, bool),
        place: &str,
    ) -> Outcome<Verdict> {
        let is_giver = self.world.tenant_of(worker).is_some_and(|found| found != tenant);
        let victim = if is_giver { "worker of a third tenant" } else { "worker" };
        let desk = self.world.desk.clone();
        let (ended, end) = channel();
        std::thread::scope(|scope| {
            let asking = scope.spawn(move || {
                let verdict = desk.ask(Way::Library, request);
                // Nobody listens any more when the time was up.
                ended.send(()).ok();
                verdict
            });
            let name = match end.recv_timeout(after) {
                Ok(()) => format!("{victim} behind {place}"),
                Err(_) => format!("{victim} in {place}"),
            };
            if give_up {
                self.kill(worker, &name)?;
            } else if let Some(victim) = self.world.worker(worker) {
                victim.kill()?;
            }
            let verdict =
                asking.join().map_err(|_| Trouble::new("the thread that asks panicked"))?;
            if !give_up {
                self.kill(worker, &name)?;
            }
            verdict
        })
    }

    /// Lets what must be there before the command go wrong.
    pub(super) fn prepare(&mut self, mishap: &Mishap) -> Outcome<Option<Stranger>> {
        match mishap {
            Mishap::Stranger { device } => Stranger::fill(&self.world, *device).map(Some),
            Mishap::Faults { worker, rules } | Mishap::ContextLost { worker, rules } => {
                let rules = rules.clone();
                self.aside(*worker, &Order::Fail { rules })?;
                Ok(None)
            }
            Mishap::NoHostMemory { worker } => {
                self.aside(*worker, &Order::HostLimit { room: HostRoom::Nothing })?;
                Ok(None)
            }
            Mishap::TableFull { worker, spare } => {
                let spare = Some(*spare);
                self.aside(*worker, &Order::TableLimit { spare })?;
                Ok(None)
            }
            Mishap::DeadSockets { tenant } => self.leave_dead_sockets(*tenant).map(|()| None),
            Mishap::NameGone { worker } => self.remove_name(*worker).map(|()| None),
            Mishap::None
            | Mishap::CheckpointFails { .. }
            | Mishap::CalledOff { .. }
            | Mishap::Interrupted { .. }
            | Mishap::WorkerKilled { .. }
            | Mishap::Stopped { .. }
            | Mishap::Signalled { .. }
            | Mishap::SecondCommand { .. }
            | Mishap::RunDirGone { .. }
            | Mishap::CoordinatorKilled { .. } => Ok(None),
        }
    }

    fn aside(&mut self, worker: u64, order: &Order) -> Outcome {
        match self.world.worker(worker) {
            Some(worker) => worker.obey(order).map(drop),
            None => Ok(()),
        }
    }

    /// Nothing fails any more; says how many calls did.
    pub(super) fn clear(&mut self, mishap: &Mishap) -> Outcome<u64> {
        match mishap {
            Mishap::Faults { worker, rules } | Mishap::ContextLost { worker, rules } => {
                if let Some(worker) = self.world.worker(*worker) {
                    let fired = worker.fail_no_more()?;
                    Tally::count(&mut self.world.tally.faults, symbol(rules), fired);
                    return Ok(fired);
                }
                Ok(0)
            }
            Mishap::NoHostMemory { worker } => {
                self.aside(*worker, &Order::HostLimit { room: HostRoom::Plenty }).map(|()| 0)
            }
            Mishap::TableFull { worker, .. } => {
                self.aside(*worker, &Order::TableLimit { spare: None }).map(|()| 0)
            }
            Mishap::RunDirGone { .. } | Mishap::NameGone { .. } => {
                self.end_rivals(mishap).map(|()| 0)
            }
            Mishap::None
            | Mishap::CheckpointFails { .. }
            | Mishap::Stranger { .. }
            | Mishap::CalledOff { .. }
            | Mishap::Interrupted { .. }
            | Mishap::WorkerKilled { .. }
            | Mishap::Stopped { .. }
            | Mishap::Signalled { .. }
            | Mishap::SecondCommand { .. }
            | Mishap::DeadSockets { .. }
            | Mishap::CoordinatorKilled { .. } => Ok(0),
        }
    }

    /// Kills a worker and has its peers told.
    pub(super) fn kill(&mut self, worker: u64, place: &str) -> Outcome {
        let Some(tenant) = self.world.tenant_of(worker) else { return Ok(()) };
        let workers = &self.world.tenants[tenant].workers;
        if let Some(index) = workers.iter().position(|found| found.number == worker) {
            self.world.bury(tenant, index)?;
            Tally::count(&mut self.world.tally.kills, place, 1);
        }
        Ok(())
    }
}
