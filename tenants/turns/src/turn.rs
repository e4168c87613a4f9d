//! A turn of the calling process. During a turn its tenant has its GPUs, except while other tenants have theirs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::sync::lock;

use super::gather::{Displaced, write_down};
use super::queue::{CallsOff, Queue, never};
use super::{SwitchOptions, Switched};
use crate::clock::now_us;
use crate::decision::history::History;
use crate::decision::scene::Wish;
use tenants::coordinator::Trouble;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

/// The interval at which a process in its turn checks whether its tenant was paused for another.
const LOOK: Duration = Duration::from_millis(20);
/// The interval at which a process checks that its files in the run directory still exist.
pub(super) const KEPT_EVERY: Duration = Duration::from_secs(3);
/// The time for which a process rests after it could not resume its tenant.
pub(super) const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// The longest such time. The time doubles after each further failure, because others were paused in vain each time.
pub(super) const AFTER_FAILURE_MAX: Duration = Duration::from_mins(1);
/// The longest time for which the end of a turn waits for the turn's thread.
const END_WAIT: Duration = Duration::from_secs(2);
/// The time for which that thread waits for its tenant to get its GPUs again: as long as the turn lasts.
const FOREVER: Duration = Duration::MAX;

/// A turn. It ends when this value is dropped, or with the process. It belongs to the process that began it: a drop in a forked
/// child does nothing.
#[derive(Debug)]
pub struct Turn {
    shared: Arc<TurnCell>,
    pid: u32,
}

#[derive(Debug)]
struct TurnCell {
    state: Mutex<TurnQueue>,
    changed: Condvar,
}

#[derive(Debug)]
struct TurnQueue {
    is_over: bool,
    /// None while the thread that resumes the tenant waits with it.
    queue: Option<Queue>,
}

impl Turn {
    /// Begins a turn. Waits until `tenant` has its GPUs, or until it may pause the tenants that block it, and pauses them.
    /// Blocks.
    ///
    /// `is_paused` says whether the calling process is paused. It is called repeatedly, also on another thread. The options'
    /// `asks` applies to the wait before the turn begins.
    ///
    /// During the turn, a thread of this process resumes the tenant after it was paused for another. A tenant that was paused by
    /// name stays paused.
    ///
    /// # Errors
    /// [`Trouble`]; there is no turn then.
    pub fn begin(
        run_dir: &RunDir,
        tenant: &TenantName,
        options: &SwitchOptions,
        is_paused: fn() -> bool,
    ) -> Result<(Self, Switched), Trouble> {
        let calls_off = CallsOff { interrupt: None, asks: options.asks, is_over: &never };
        let mut queue = Queue::enter(run_dir, tenant, Wish::Turn, options.wait, calls_off)?;
        queue.is_paused = is_paused;
        let switched = queue.wait_and_go(options, &never, &mut |_| {})?;
        queue.deadline = std::time::Instant::now().checked_add(FOREVER);
        let state = Mutex::new(TurnQueue { is_over: false, queue: Some(queue) });
        let shared = Arc::new(TurnCell { state, changed: Condvar::new() });
        let watched = Arc::clone(&shared);
        let options = SwitchOptions { asks: None, ..options.clone() };
        let watch =
            TurnThread { run_dir: run_dir.clone(), tenant: tenant.clone(), options, is_paused };
        let watch = move || {
            watch.run(&watched);
            watch.write_down();
        };
        let thread = vmm_pool::threads::spawn("sublet-turn", watch, |_| {});
        if let Err(error) = thread {
            tracing::warn!(%error, "nobody brings this tenant back when others have it paused for theirs");
        }
        Ok((Self { shared, pid: std::process::id() }, switched))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // The thread that holds the state at times does not exist in the child.
            return;
        }
        let mut state = lock(&self.shared.state);
        state.is_over = true;
        self.shared.changed.notify_all();
        // When this returns, the turn has no claim. If the thread holds the queue for longer, the thread ends the claim.
        let is_away = |state: &mut TurnQueue| state.queue.is_none();
        let waited = self.shared.changed.wait_timeout_while(state, END_WAIT, is_away);
        let queue = waited.unwrap_or_else(PoisonError::into_inner).0.queue.take();
        drop(queue);
    }
}

/// The data of the thread of a turn.
struct TurnThread {
    run_dir: RunDir,
    tenant: TenantName,
    options: SwitchOptions,
    /// Called repeatedly.
    is_paused: fn() -> bool,
}

impl TurnThread {
    fn run(&self, shared: &TurnCell) {
        let (mut pause, mut after_failure) = (LOOK, AFTER_FAILURE);
        let mut kept_at = Instant::now();
        loop {
            let state = lock(&shared.state);
            let waited = shared.changed.wait_timeout_while(state, pause, |state| !state.is_over);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if state.is_over {
                return;
            }
            pause = LOOK;
            // A defect must not end the watch or the turn: nothing would resume the tenant.
            let is_paused = catch_unwind(self.is_paused).unwrap_or(false);
            let is_kept = kept_at.elapsed() < KEPT_EVERY;
            let Some(mut queue) = state.queue.take() else { return };
            if !is_paused {
                queue.displaced = Displaced::default();
            }
            if !is_paused && is_kept {
                state.queue = Some(queue);
                continue;
            }
            drop(state);
            if !is_kept {
                kept_at = Instant::now();
            }
            let acts = || {
                if !is_kept {
                    self.keep(&mut queue, shared);
                }
                let is_away = is_paused && queue.displaced.look(&self.run_dir, &self.tenant);
                is_away.then(|| self.comes_back(&mut queue, shared))
            };
            match catch_unwind(AssertUnwindSafe(acts)) {
                Ok(None) => {}
                Ok(Some(true)) => after_failure = AFTER_FAILURE,
                Ok(Some(false)) | Err(_) => {
                    pause = after_failure;
                    after_failure = (after_failure * 2).min(AFTER_FAILURE_MAX);
                }
            }
            lock(&shared.state).queue = Some(queue);
            shared.changed.notify_all();
        }
    }

    /// Keeps the turn visible to others, also if the run directory was removed meanwhile.
    fn keep(&self, queue: &mut Queue, shared: &TurnCell) {
        let is_over = || lock(&shared.state).is_over;
        if let Err(error) = queue.keep_claim(CallsOff::when(&is_over)) {
            tracing::debug!(tenant = %self.tenant, %error, "a claim to a turn was not made again yet");
        }
        self.write_down();
    }

    /// Notes in the history that its tenant takes turns, if the history was lost with its directory. Without that, it would block
    /// tenants of lower classes for ever after its turn.
    fn write_down(&self) {
        let began = |history: &mut History| history.began_turn(&self.tenant, false, now_us());
        if let Err(error) = write_down(&self.run_dir, &self.tenant, began) {
            tracing::debug!(tenant = %self.tenant, %error, "a turn is not written down yet");
        }
    }

    fn comes_back(&self, queue: &mut Queue, shared: &TurnCell) -> bool {
        let is_over = || lock(&shared.state).is_over;
        queue.has_told = false;
        let went = queue
            .say(true)
            .map_err(Trouble::from)
            .and_then(|()| queue.wait_and_go(&self.options, &is_over, &mut |_| {}));
        if let Err(error) = &went {
            tracing::info!(tenant = %self.tenant, %error, "a turn was not brought back yet");
            if let Err(error) = queue.say(false) {
                tracing::warn!(%error, "a claim to a turn was not changed");
            }
        }
        went.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child has a copy of the turn, and of a lock that a thread of its parent may have.
    #[test]
    fn a_turn_is_not_touched_at_its_end_in_a_forked_child() {
        let state = Mutex::new(TurnQueue { is_over: false, queue: None });
        let shared = Arc::new(TurnCell { state, changed: Condvar::new() });
        let parent = std::process::id() + 1;
        drop(Turn { shared: Arc::clone(&shared), pid: parent });
        assert!(!lock(&shared.state).is_over);
        drop(Turn { shared: Arc::clone(&shared), pid: std::process::id() });
        assert!(lock(&shared.state).is_over);
    }
}
