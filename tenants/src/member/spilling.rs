//! A process that stands paused gives host memory to others: its saved contents go to a file, a step at a time, on the worker
//! thread, so that no step of a pause or resume comes between.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::Spilled;
use vmm_pool::driver::Driver;

use super::Member;
use super::failures::pool_failure;
use crate::wire::{MemberState, Reply, SpillProgress, SpillStep};

/// How long one step lasts at most: the worker thread does nothing else meanwhile. The asking process waits for longer.
pub(crate) const STEP_TIME: Duration = Duration::from_mins(1);

impl<D: Driver> Member<D> {
    /// Does one step, unless nobody waits for it any more, and answers for it.
    pub(super) fn run_spill(&self, step: SpillStep, is_called_off: &AtomicBool) -> Reply {
        let (state, changed_at) = {
            let status = self.status();
            (status.state, status.changed_at)
        };
        let rests_ms = u64::try_from(changed_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let limits = (self.config.host_limits)();
        let said = SpillProgress { rests_ms, limits, ..SpillProgress::default() };
        let may_move = self.config.spills
            && state == MemberState::Paused
            && !(self.config.is_in_memory)(&self.pool.file_dir());
        if !may_move {
            return Reply::Spilled(Box::new(said));
        }
        if step.most_bytes == 0 {
            let left_bytes = self.pool.movable_bytes();
            return Reply::Spilled(Box::new(SpillProgress { left_bytes, ..said }));
        }
        let is_called_off = || is_called_off.load(Ordering::Relaxed);
        let until = Instant::now() + STEP_TIME;
        match self.pool.spill_unless(step.most_bytes, until, &is_called_off) {
            Ok(Spilled { moved_bytes, given_back_bytes, left_bytes }) => {
                tracing::info!(
                    moved_bytes,
                    given_back_bytes,
                    left_bytes,
                    "contents moved to a file"
                );
                let done = SpillProgress { left_bytes, given_back_bytes, ..said };
                Reply::Spilled(Box::new(done))
            }
            Err(error) => {
                let failure = pool_failure(&error);
                self.note(format!(
                    "saved contents were to go to a file to make room, and stay in host memory: {failure}"
                ));
                self.refuse(failure)
            }
        }
    }
}
