//! A deep pause. The process is told before its contexts leave the devices, and after they are restored. Between the two it
//! makes no driver call, since the coordinator has the driver block such calls: [`Progress::Frozen`] has nothing to call the
//! driver with.

use std::time::Duration;

use vmm_pool::Failed;
use vmm_pool::driver::Driver;

use super::Executor;
use super::participants::unfreezable;
use super::reports::{PhaseResult, report};
use crate::failures::{PID, wrong_state};
use crate::progress::Progress;
use sublet_protocol::state::Event;
use sublet_protocol::wire::{FailureKind, MemberState, PhaseReport};

/// The longest time that a freeze waits for a call that pins host memory for the next pause.
const PINNING_TIMEOUT: Duration = Duration::from_secs(10);

impl<D: Driver> Executor<D> {
    /// Prepares the paused process for the loss of its contexts. A process that was told before is ready.
    pub(super) fn freeze(&mut self) -> PhaseResult {
        if self.lifecycle.state() == MemberState::Deep {
            return Ok(PhaseReport::default());
        }
        self.lifecycle.expect(MemberState::Paused)?;
        if self.stood_without_tags() {
            // Sublet takes the CUDA context of a process away only after all of its memory. Here only a tag is
            // paused. Resume the tenant, then run `sublet pause TENANT --deep`.
            return Err(wrong_state(format!(
                "process {PID} is paused by tag, and its other memory is on the GPU"
            )));
        }
        unfreezable(&self.member).map_or(Ok(()), Err)?;
        // A report needs the devices' names, and the driver answers no call after this.
        drop(self.pool.report());
        let keeper = self.take_keeper()?;
        match keeper.freeze(PINNING_TIMEOUT) {
            Ok((frozen, log)) => {
                self.lifecycle.transition(Event::Frozen)?;
                self.progress = Progress::Frozen(frozen);
                Ok(report(log))
            }
            Err(Failed { state, error }) => {
                self.progress = Progress::Rest(*state);
                // The CUDA context of the process is still on the GPU; the reason follows. The tenant stays paused,
                // with its contents. `sublet pause TENANT --deep` tries again.
                Err(FailureKind::NotNow.because(format!("process {PID} was not frozen: {error}")))
            }
        }
    }

    /// Ends the freeze: the contexts are restored, or never left.
    pub(super) fn thaw(&mut self) -> PhaseResult {
        if self.lifecycle.state() == MemberState::Paused {
            return Ok(PhaseReport::default());
        }
        self.lifecycle.expect(MemberState::Deep)?;
        let frozen = self.next_of(Progress::into_frozen)?;
        let (keeper, log) = frozen.thaw();
        self.progress = Progress::Rest(keeper);
        self.lifecycle.transition(Event::Thawed)?;
        Ok(report(log))
    }
}
