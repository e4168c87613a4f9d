//! Host memory for the next pause: allocated while the application runs, and freed when the machine is short of memory.
//!
//! A thread of low priority does both, one chunk at a time, as long as there is work. Between two chunks it checks whether the
//! process runs, how much may be held, and whether it was called off.
//!
//! Lock order: `state` is a leaf.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use vmm_pool::driver::{Driver, DriverOp};
use vmm_pool::sync::lock;
use vmm_pool::{BroughtIn, HostDemand, HostStanding, Pool, PoolError, threads};

use crate::desk::Worker;
use crate::figures::HostFigure;
use crate::pressure::Pressure;
use crate::settings::Settings;
use sublet_member::{Desk, JoinError, Keeping, Member, MemberConfig, PID, Presence, pool_failure};
use sublet_protocol::host_memory::{HostNeed, LimitKind};
use sublet_protocol::run_dir::pause_thread;
use sublet_protocol::time::micros;
use sublet_protocol::wire::{Failure, FailureKind, HostProgress, HostStage, HostStep};

/// The time after which a process that prepares automatically tries again, if the last try ended early.
const AGAIN_AFTER: Duration = Duration::from_mins(1);
/// The time between two tries while a pause or resume is under way.
const REST: Duration = Duration::from_millis(50);
/// The longest time for which the end of the process waits for a driver call of ours.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// A lower priority: the application comes first. At the lowest one this thread had no processor for a minute next to 16 busy
/// processes, and the process did not answer for five seconds.
const NICE: i32 = 5;

/// The state of this process's preparation. See the documentation of this module.
#[derive(Debug)]
struct Prefault<D: Driver> {
    pool: Arc<Pool<D>>,
    presence: Arc<Presence>,
    settings: Settings,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The goal, while a thread allocates memory.
    goal: Option<Goal>,
    gives_back: bool,
    progress: HostProgress,
    calm: Calm,
    pressure: Pressure,
}

/// The host memory that is being allocated.
#[derive(Clone, Copy, Debug)]
struct Goal {
    most_bytes: u64,
    begun: Instant,
}

/// The state between two looks of a process that prepares automatically.
#[derive(Debug, Default)]
struct Calm {
    wanted_bytes: u64,
    not_before: Option<Instant>,
}

/// Joins the tenant, as [`Member::join`] does, and adds the services of this crate.
///
/// # Errors
/// [`JoinError`]; nothing is left behind.
pub fn join<D: Driver>(
    config: MemberConfig,
    settings: Settings,
    driver: Arc<D>,
) -> Result<Arc<Member<D>>, JoinError> {
    Member::join_with(config, driver, |pool, presence| {
        pool.host_memory().make_files_by(sublet_disk::file);
        Some(Arc::new(Prefault { pool, presence, settings, state: Mutex::default() }))
    })
}

impl<D: Driver> Keeping<D> for Prefault<D> {
    fn host(self: Arc<Self>, step: HostStep) -> HostProgress {
        match step {
            HostStep::Need => return self.need(),
            HostStep::Look => {}
            HostStep::Begin => self.bring_in(u64::MAX),
            // The thread ends before its next chunk.
            HostStep::CallOff => {
                lock(&self.state).goal.iter_mut().for_each(|goal| goal.most_bytes = 0);
            }
        }
        self.progress()
    }

    /// Frees idle memory if the machine is short of it. Begins to allocate without a request if the missing size has been the
    /// same for a while.
    fn look(self: Arc<Self>) {
        if self.pool.host_memory().holds_idle_memory() {
            let figures = self.figures();
            let is_short = lock(&self.state).pressure.look(&figures).is_some();
            if is_short {
                self.give_back();
            }
        }
        let Some(most_bytes) = self.settings.prepares_up_to else { return };
        let may_begin = self.pool.gate().is_open() && !self.pool.copies().is_given_back();
        let standing = self.pool.host_memory().standing();
        if lock(&self.state).calm.is_due(standing, most_bytes) && may_begin {
            self.bring_in(most_bytes);
        }
    }

    fn end(&self) {
        self.pool.host_memory().stop(END_TIMEOUT);
    }

    fn desk(&self, member: &Arc<Member<D>>) -> Box<dyn Desk> {
        Box::new(Worker { member: Arc::clone(member), settings: self.settings, saving: None })
    }
}

impl<D: Driver> Prefault<D> {
    /// Returns the progress so far. Does not block.
    fn progress(&self) -> HostProgress {
        let HostStanding { held_bytes, wanted_bytes, .. } = self.pool.host_memory().standing();
        HostProgress { held_bytes, wanted_bytes, ..lock(&self.state).progress.clone() }
    }

    /// Returns the progress, with the missing memory and the limits on it.
    fn need(&self) -> HostProgress {
        let progress = self.progress();
        let HostProgress { held_bytes, wanted_bytes, .. } = progress;
        let grow_bytes = wanted_bytes.saturating_sub(held_bytes);
        let demand = HostDemand {
            saved_bytes: wanted_bytes,
            held_bytes,
            grow_bytes,
            grow_with_needed_bytes: grow_bytes,
            grow_with_all_bytes: grow_bytes,
            ..HostDemand::default()
        };
        let need = HostNeed { demand, limits: (self.presence.config().host_limits)() };
        HostProgress { need: Some(need), ..progress }
    }

    /// Starts a thread that allocates host memory of the next pause, up to `most_bytes`.
    fn bring_in(self: &Arc<Self>, most_bytes: u64) {
        {
            let mut state = lock(&self.state);
            let before = state.goal;
            if before.is_some_and(|goal| goal.most_bytes >= most_bytes) {
                return;
            }
            state.goal = Some(Goal { most_bytes, begun: Instant::now() });
            state.progress = HostProgress { stage: HostStage::Grows, ..HostProgress::default() };
            if before.is_some() {
                return;
            }
        }
        self.spawn(|own| while !own.presence.has_left() && own.bring_one_in() {});
    }

    /// Starts a thread that frees idle host memory while the machine is short of it.
    fn give_back(self: &Arc<Self>) {
        if !std::mem::replace(&mut lock(&self.state).gives_back, true) {
            self.spawn(Self::give_idle_memory_back);
        }
    }

    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        let (prefault, after_panic) = (Arc::clone(self), Arc::clone(self));
        let work = move || {
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "host memory comes and goes at the application's own priority");
            }
            work(&prefault);
        };
        let thread = threads::spawn("sublet-prefault", work, move |text| {
            after_panic.has_ended(format_args!(
                "Sublet failed inside, bringing host memory in ({text}): report this, or pause without it"
            ));
        });
        if let Err(error) = thread {
            self.has_ended(format_args!(
                "no thread to bring host memory in with ({error}): raise its limit of threads (ulimit -u), or pause \
                 without it"
            ));
        }
    }

    /// Notes the failure: the thread could not start, or has ended.
    fn has_ended(&self, why: fmt::Arguments<'_>) {
        let failure = FailureKind::OutOfHostMemory.because(format!("process {PID}: {why}"));
        let mut state = lock(&self.state);
        (state.goal, state.gives_back) = (None, false);
        state.progress.stage = HostStage::Stopped(failure);
    }

    /// Allocates one missing chunk, within the limits. Returns false if that was the last.
    fn bring_one_in(&self) -> bool {
        let Some(goal) = lock(&self.state).goal else { return false };
        let host = self.pool.host_memory();
        let room = self.room(host.standing().held_bytes);
        let most_bytes = room.as_ref().map_or(u64::MAX, |(most_bytes, _)| *most_bytes);
        let came = host.bring_in(self.pool.gate(), most_bytes.min(goal.most_bytes));
        if goal.most_bytes > 0 && matches!(came, Ok(BroughtIn::NotNow)) {
            lock(&self.state).progress.stage = HostStage::Waits;
            pause_thread(REST);
            return true;
        }
        let HostStanding { held_bytes, wanted_bytes, .. } = host.standing();
        let is_short = held_bytes < wanted_bytes && goal.most_bytes >= most_bytes;
        let mut state = lock(&self.state);
        state.progress.elapsed_us = micros(goal.begun.elapsed());
        let failure = match came {
            Ok(BroughtIn::Chunk { size_bytes, log }) => {
                let progress = &mut state.progress;
                progress.stage = HostStage::Grows;
                progress.brought_in_bytes += size_bytes;
                progress.touching_us += log.spent_us("touch host memory");
                progress.pinning_us += log.spent_us("pin host memory");
                return true;
            }
            Ok(_) => room.filter(|_| is_short).map(|room| refusal(&room, wanted_bytes)),
            Err(error) => Some(refusal_of(&error)),
        };
        if state.goal.is_some_and(|now| now.most_bytes > goal.most_bytes) {
            // More was requested meanwhile.
            return true;
        }
        state.goal = None;
        state.calm.not_before = failure.as_ref().map(|_| Instant::now() + AGAIN_AFTER);
        state.progress.stage = failure.map_or(HostStage::Rests, HostStage::Stopped);
        false
    }

    fn figures(&self) -> Vec<HostFigure> {
        self.settings.host_figures.map_or_else(Vec::new, |figures| figures())
    }

    /// Returns the lowest limit on the bytes that may be held now, with its kind; none without a limit. `held_bytes` are held
    /// already.
    fn room(&self, held_bytes: u64) -> Option<(u64, LimitKind)> {
        let limits = (self.presence.config().host_limits)().into_iter();
        let configured = limits.filter(|limit| limit.kind == LimitKind::Configured);
        // The limit is the whole tenant's, and another process may need as much.
        let share = configured.map(|limit| (limit.bytes / self.presence.members(), limit.kind));
        let figures = self.figures().into_iter().map(|figure: HostFigure| {
            (held_bytes.saturating_add(figure.spare_bytes()), figure.kind)
        });
        share.chain(figures).min_by_key(|(most_bytes, _)| *most_bytes)
    }

    /// Frees idle host memory, chunk by chunk, while the machine is short of it.
    fn give_idle_memory_back(&self) {
        let (host, mut given_bytes) = (self.pool.host_memory(), 0);
        loop {
            let given = host.give_idle_chunk_back(self.pool.gate()).unwrap_or_else(|error| {
                tracing::error!(%error, "host memory stays for the next pause");
                0
            });
            given_bytes += given;
            let figures = self.figures();
            if given == 0 || figures.iter().all(|figure| figure.spare_bytes() > 0) {
                break;
            }
        }
        lock(&self.state).gives_back = false;
        if given_bytes > 0 {
            tracing::warn!(
                given_bytes,
                "host memory is short: idle pinned memory was given back, and the next pause brings it in again"
            );
        }
    }
}

/// Returns the failure for more than `most_bytes` held ahead of a pause.
fn refusal((most_bytes, kind): &(u64, LimitKind), wanted_bytes: u64) -> Failure {
    let next = match kind {
        LimitKind::Configured => "raise it: each process of the tenant has its share",
        LimitKind::Available | LimitKind::ControlGroup { .. } => kind.advice(),
    };
    // `sublet prepare` leaves a tenth of the host memory free, so it prepared less than a pause needs. The job runs
    // on. The pause itself may still fit.
    FailureKind::OutOfHostMemory.because(format!(
        "process {PID}: {wanted_bytes} bytes of host memory are wanted for a pause, and no more than {most_bytes} are held \
         ahead of it, a reserve set aside, because of {kind}: {next}"
    ))
}

impl Calm {
    /// Is the missing size the same as at the last look, and the last try not too recent?
    fn is_due(&mut self, standing: HostStanding, most_bytes: u64) -> bool {
        let HostStanding { held_bytes, wanted_bytes, next_bytes } = standing;
        let is_calm = std::mem::replace(&mut self.wanted_bytes, wanted_bytes) == wanted_bytes;
        let is_missing = next_bytes > 0 && held_bytes.saturating_add(next_bytes) <= most_bytes;
        is_calm && is_missing && self.not_before.is_none_or(|time| Instant::now() >= time)
    }
}

/// Returns the reason why a chunk could not be allocated, and the limit behind it.
fn refusal_of(error: &PoolError) -> Failure {
    let mut failure = pool_failure(error);
    if let PoolError::Driver { source, .. } = error
        && source.op == DriverOp::HostRegister
        && let Ok((soft_bytes, _)) = getrlimit(Resource::RLIMIT_MEMLOCK)
        && soft_bytes != u64::MAX
    {
        failure.message = format!(
            "{}; RLIMIT_MEMLOCK is {soft_bytes} bytes here: raise it (ulimit -l) if the driver goes by it",
            failure.message
        );
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = vmm_pool::HOST_CHUNK_BYTES;

    #[test]
    fn what_grows_is_left_alone_until_it_is_the_same_twice() {
        let mut calm = Calm::default();
        let standing = |held_bytes, wanted_bytes| {
            let next_bytes = if held_bytes < wanted_bytes { CHUNK } else { 0 };
            HostStanding { held_bytes, wanted_bytes, next_bytes }
        };
        let due = [CHUNK, 2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK]
            .map(|wanted_bytes| calm.is_due(standing(0, wanted_bytes), u64::MAX));
        assert_eq!(due, [false, false, true, false, true]);
        assert!(!calm.is_due(standing(3 * CHUNK, 3 * CHUNK), u64::MAX), "all is there");
        assert!(!calm.is_due(standing(2 * CHUNK, 3 * CHUNK), 3 * CHUNK - 1), "the bound");
        assert!(calm.is_due(standing(2 * CHUNK, 3 * CHUNK), 3 * CHUNK));
        calm.not_before = Some(Instant::now() + AGAIN_AFTER);
        assert!(!calm.is_due(standing(2 * CHUNK, 3 * CHUNK), u64::MAX), "refused a moment ago");
    }

    #[test]
    fn refusals_name_the_limit_and_the_next_step() {
        let text = refusal(&(7, LimitKind::Configured), 9).message;
        assert!(
            text.contains("9 bytes") && text.contains("SUBLET_HOST_BYTES_MAX: raise it"),
            "{text}"
        );
    }
}
