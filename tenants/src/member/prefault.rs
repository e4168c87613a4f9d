//! Host memory for the next pause, brought in while the application runs, and given back when the machine is short.
//!
//! One thread does both, of low priority, which begins when it is first wanted and takes one chunk at a time: between two
//! it looks whether the process runs, how much may be taken, and whether somebody has called it off.
//!
//! Lock order: `state` is a leaf.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use vmm_pool::driver::{Driver, DriverOp};
use vmm_pool::sync::lock;
use vmm_pool::{BroughtIn, HostDemand, HostStanding, Pool, PoolError, StepLog};

use super::agent::Waker;
use super::failures::{PID, pool_failure};
use super::{Lifecycle, Presence};
use crate::host_memory::{HostFigure, HostNeed, LimitKind};
use crate::time::micros;
use crate::wire::{Failure, FailureKind, HostProgress, HostStage, MemberState};

/// The interval at which a process that prepares by itself looks at what is missing. An amount that is the same twice
/// is brought in.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// When it has come to an end before all was there, it tries again after this long.
const AGAIN_AFTER: Duration = Duration::from_mins(1);
/// Between two tries while a pause or resume is under way, or the arena is in use.
const REST: Duration = Duration::from_millis(50);
/// The longest time that the process's end waits for a driver call of ours.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// The lowest priority: the application comes first.
const NICE: i32 = 19;

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Prefault<D: Driver> {
    pool: Arc<Pool<D>>,
    presence: Arc<Presence>,
    lifecycle: Arc<Lifecycle>,
    waker: Waker,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    has_thread: bool,
    /// Somebody has requested it: up to how much, in bytes.
    asked: Option<u64>,
    /// The machine is short: what is idle goes back.
    is_short: bool,
    progress: HostProgress,
}

/// The next task of the thread.
#[derive(Debug)]
enum Task {
    BringIn(Run),
    GiveBack,
}

/// Host memory is brought in.
#[derive(Debug)]
struct Run {
    most_bytes: u64,
    begun: Instant,
    /// Somebody has requested it, and may call it off.
    is_asked: bool,
}

/// The state of a process that prepares by itself, between two looks.
#[derive(Debug, Default)]
struct Calm {
    wanted_bytes: u64,
    not_before: Option<Instant>,
}

impl State {
    /// `run` is over. The next one tells those that have requested more meanwhile.
    fn end(&mut self, run: &Run, stage: HostStage) {
        let done_bytes = if run.is_asked { run.most_bytes } else { 0 };
        if self.asked.is_some_and(|most_bytes| most_bytes > done_bytes) {
            return;
        }
        self.asked = None;
        self.progress.elapsed_us = micros(run.begun.elapsed());
        self.progress.stage = stage;
    }
}

impl<D: Driver> Prefault<D> {
    pub(super) fn new(
        pool: Arc<Pool<D>>,
        presence: Arc<Presence>,
        lifecycle: Arc<Lifecycle>,
        waker: Waker,
    ) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { pool, presence, lifecycle, waker, state, changed }
    }

    /// Returns the progress so far. Waits for nothing.
    pub(super) fn progress(&self) -> HostProgress {
        let HostStanding { held_bytes, wanted_bytes, .. } = self.pool.host_memory().standing();
        let progress = lock(&self.state).progress.clone();
        HostProgress { held_bytes, wanted_bytes, need: None, ..progress }
    }

    /// Returns the progress, with the need for memory that is missing and the limits on it.
    pub(super) fn need(&self) -> HostProgress {
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

    /// Has host memory brought in, up to `most_bytes`, on a thread of its own.
    pub(super) fn begin(self: &Arc<Self>, most_bytes: u64) {
        {
            let mut state = lock(&self.state);
            if state.asked.is_none() {
                state.progress =
                    HostProgress { stage: HostStage::Grows, ..HostProgress::default() };
            }
            state.asked = Some(most_bytes);
        }
        self.changed.notify_all();
        self.start();
    }

    /// Ends what [`Prefault::begin`] has begun, at the next chunk.
    pub(super) fn call_off(&self) {
        lock(&self.state).asked = None;
    }

    /// Sees that there is a thread.
    pub(super) fn start(self: &Arc<Self>) {
        if std::mem::replace(&mut lock(&self.state).has_thread, true) {
            return;
        }
        let (prefault, after_panic) = (Arc::clone(self), Arc::clone(self));
        let thread = vmm_pool::threads::spawn(
            "sublet-ahead",
            move || prefault.run(),
            move |text| {
                let why = format!("Sublet failed inside, bringing host memory in ({text})");
                after_panic.has_ended(&format!("{why}: report this, or pause without it"));
            },
        );
        if let Err(error) = thread {
            self.has_ended(&format!(
                "no thread to bring host memory in with ({error}): raise its limit of threads (ulimit -u), or pause \
                 without it"
            ));
        }
    }

    /// There is no thread for it, or no more.
    fn has_ended(&self, why: &str) {
        {
            let mut state = lock(&self.state);
            state.has_thread = false;
            state.asked = None;
            state.progress.stage = HostStage::Stopped(
                FailureKind::OutOfHostMemory.because(format!("process {PID}: {why}")),
            );
        }
        self.waker.wake();
    }

    /// Has idle host memory given back, as long as the machine is short.
    pub(super) fn begin_giving_back(self: &Arc<Self>) {
        lock(&self.state).is_short = true;
        self.changed.notify_all();
        self.start();
    }

    /// The process ends: waits a bounded time for the driver call that is under way.
    pub(super) fn end(&self) {
        self.pool.host_memory().stop(END_TIMEOUT);
        self.changed.notify_all();
    }

    fn run(&self) {
        if let Err(error) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!(%error, "host memory is brought in at the application's own priority");
        }
        let mut calm = Calm::default();
        while let Some(task) = self.next_task(&mut calm) {
            let Task::BringIn(run) = task else {
                self.give_idle_memory_back();
                continue;
            };
            let stage = self.bring_all_in(&run);
            if matches!(stage, HostStage::Stopped(_)) {
                calm.not_before = Some(Instant::now() + AGAIN_AFTER);
            }
            lock(&self.state).end(&run, stage);
            self.waker.wake();
        }
    }

    /// Waits for something to do; none when the process ends.
    fn next_task(&self, calm: &mut Calm) -> Option<Task> {
        let bring_in = |most_bytes, is_asked| {
            Task::BringIn(Run { most_bytes, begun: Instant::now(), is_asked })
        };
        let prepares_up_to = self.presence.config().prepares_up_to;
        loop {
            if self.pool.host_memory().has_stopped() {
                return None;
            }
            if std::mem::take(&mut lock(&self.state).is_short) {
                return Some(Task::GiveBack);
            }
            if let Some(most_bytes) = lock(&self.state).asked {
                return Some(bring_in(most_bytes, true));
            }
            if let Some(most_bytes) = prepares_up_to
                && calm.is_due(self.pool.host_memory().standing(), most_bytes)
                && self.lifecycle.state() == MemberState::Active
                && !self.pool.copies().is_given_back()
            {
                lock(&self.state).progress =
                    HostProgress { stage: HostStage::Grows, ..HostProgress::default() };
                return Some(bring_in(most_bytes, false));
            }
            let state = lock(&self.state);
            if state.asked.is_none() && !state.is_short && !self.pool.host_memory().has_stopped() {
                let rest = if prepares_up_to.is_some() { LOOK_EVERY } else { AGAIN_AFTER };
                drop(self.changed.wait_timeout(state, rest));
            }
        }
    }

    /// Brings in what is missing, as far as it may.
    fn bring_all_in(&self, run: &Run) -> HostStage {
        let host = self.pool.host_memory();
        loop {
            if self.pool.host_memory().has_stopped()
                || (run.is_asked && lock(&self.state).asked.is_none())
            {
                return HostStage::Rests;
            }
            if !matches!(self.lifecycle.state(), MemberState::Active | MemberState::Paused) {
                lock(&self.state).progress.stage = HostStage::Waits;
                self.lifecycle.rest(REST);
                continue;
            }
            let room = self.room(host.standing().held_bytes);
            let most_bytes = room.as_ref().map_or(u64::MAX, |room| room.most_bytes);
            match host.bring_in(self.pool.gate(), most_bytes.min(run.most_bytes)) {
                Ok(BroughtIn::Chunk { size_bytes, log }) => self.note_chunk(run, size_bytes, &log),
                Ok(BroughtIn::Enough) => {
                    let HostStanding { held_bytes, wanted_bytes, .. } = host.standing();
                    let is_all = held_bytes >= wanted_bytes || run.most_bytes < most_bytes;
                    return match room {
                        Some(room) if !is_all => HostStage::Stopped(room.refusal(wanted_bytes)),
                        Some(_) | None => HostStage::Rests,
                    };
                }
                Ok(BroughtIn::NotNow) => self.lifecycle.rest(REST),
                Err(error) => return HostStage::Stopped(refusal_of(&error)),
            }
        }
    }

    fn note_chunk(&self, run: &Run, size_bytes: u64, log: &StepLog) {
        let spent = |name| {
            let steps = log.steps.iter().filter(|step| step.name == name);
            steps.map(|step| step.elapsed_us).sum::<u64>()
        };
        {
            let progress = &mut lock(&self.state).progress;
            progress.stage = HostStage::Grows;
            progress.brought_in_bytes += size_bytes;
            progress.elapsed_us = micros(run.begun.elapsed());
            progress.touching_us += spent("touch host memory");
            progress.pinning_us += spent("pin host memory");
        }
        self.waker.wake();
    }

    /// Up to how much may be held now, by what limits it most; none without a limit. `held_bytes` are held.
    fn room(&self, held_bytes: u64) -> Option<Room> {
        let config = self.presence.config();
        let limits = (config.host_limits)().into_iter().map(|limit| {
            let most_bytes = match limit.kind {
                // It is the whole tenant's, and another process may need as much.
                LimitKind::Configured => limit.bytes / self.presence.members(),
                LimitKind::Available | LimitKind::ControlGroup { .. } => {
                    held_bytes.saturating_add(limit.bytes)
                }
            };
            Room { most_bytes, kind: limit.kind }
        });
        let figures = (config.host_figures)().into_iter().map(|figure: HostFigure| Room {
            most_bytes: held_bytes.saturating_add(figure.spare_bytes()),
            kind: figure.kind,
        });
        limits.chain(figures).min_by_key(|room| room.most_bytes)
    }

    /// Gives one chunk after the other of idle host memory back while the machine is short.
    fn give_idle_memory_back(&self) {
        let mut given_bytes = 0;
        while matches!(self.lifecycle.state(), MemberState::Active | MemberState::Paused)
            && !self.pool.host_memory().has_stopped()
        {
            match self.pool.host_memory().give_idle_chunk_back(self.pool.gate()) {
                Ok(0) => break,
                Ok(bytes) => given_bytes += bytes,
                Err(error) => {
                    tracing::error!(%error, "host memory stays for the next pause");
                    break;
                }
            }
            let figures = (self.presence.config().host_figures)();
            if figures.iter().all(|figure| figure.spare_bytes() > 0) {
                break;
            }
        }
        if given_bytes > 0 {
            tracing::warn!(
                given_bytes,
                "host memory is short: idle pinned memory was given back, and the next pause brings it in again"
            );
        }
    }
}

/// The most host memory that may be held, and the limit that it comes from.
#[derive(Debug)]
struct Room {
    most_bytes: u64,
    kind: LimitKind,
}

impl Room {
    fn refusal(&self, wanted_bytes: u64) -> Failure {
        let next = match &self.kind {
            LimitKind::Configured => "raise it: each process of the tenant has its share",
            kind @ (LimitKind::Available | LimitKind::ControlGroup { .. }) => kind.advice(),
        };
        FailureKind::OutOfHostMemory.because(format!(
                "process {PID}: {wanted_bytes} bytes of host memory are wanted for a pause, and no more than {} are held \
                 ahead of it, a reserve set aside, because of {}: {next}",
                self.most_bytes, self.kind
            ))
    }
}

impl Calm {
    /// Is as much missing as at the last look, and no try too recent?
    fn is_due(&mut self, standing: HostStanding, most_bytes: u64) -> bool {
        let HostStanding { held_bytes, wanted_bytes, next_bytes } = standing;
        let is_calm = std::mem::replace(&mut self.wanted_bytes, wanted_bytes) == wanted_bytes;
        let is_missing = next_bytes > 0 && held_bytes.saturating_add(next_bytes) <= most_bytes;
        is_calm && is_missing && self.not_before.is_none_or(|time| Instant::now() >= time)
    }
}

/// Why a chunk did not come in, and what limits that may be.
fn refusal_of(error: &PoolError) -> Failure {
    let failure = pool_failure(error);
    let is_of_pinning = matches!(
        error,
        PoolError::Driver { source, .. } if source.op == DriverOp::HostRegister
    );
    let Ok((soft_bytes, _)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return failure;
    };
    if !is_of_pinning || soft_bytes == u64::MAX {
        return failure;
    }
    let message = format!(
        "{}; RLIMIT_MEMLOCK is {soft_bytes} bytes here: raise it (ulimit -l) if the driver goes by it",
        failure.message
    );
    Failure { message, ..failure }
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
        let room = Room { most_bytes: 7, kind: LimitKind::Configured };
        let text = room.refusal(9).message;
        assert!(
            text.contains("9 bytes") && text.contains("SUBLET_HOST_BYTES_MAX: raise it"),
            "{text}"
        );
    }
}
