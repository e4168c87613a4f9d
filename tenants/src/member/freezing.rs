//! A deep pause: the process learns that its contexts leave, before they do, and that they are back. Between the two it calls the driver for
//! nothing, since the coordinator has the driver hold such calls back: [`Progress::Frozen`] has nothing to call it with.

use std::time::Duration;

use vmm_pool::driver::Driver;
use vmm_pool::{Failed, Unfreezable};

use super::Member;
use super::failures::wrong_state;
use super::phases::report;
use super::progress::Progress;
use crate::state::Event;
use crate::wire::{Failure, FailureKind, MemberState, PhaseReport};

/// How long to freeze waits for a call that pins host memory for the next pause.
const PINNING_TIMEOUT: Duration = Duration::from_secs(10);

impl<D: Driver> Member<D> {
    /// The process stands paused, and its contexts are to leave. One that was told before is ready.
    pub(super) fn freeze(&self) -> Result<PhaseReport, Failure> {
        if self.lifecycle.state() == MemberState::Deep {
            return Ok(PhaseReport::default());
        }
        self.lifecycle.expect(MemberState::Paused)?;
        if self.stood_without_tags() {
            let own = std::process::id();
            return Err(wrong_state(format!(
                "process {own} is paused by tag, and its other memory is on the GPU"
            )));
        }
        self.refuse_unfreezable()?;
        // A report needs the devices' names, and the driver answers nobody from here on.
        drop(self.pool.report());
        let keeper = self.take_keeper()?;
        match keeper.freeze(PINNING_TIMEOUT) {
            Ok((frozen, log)) => {
                self.lifecycle.transition(Event::Frozen)?;
                self.set_progress(Progress::Frozen(frozen));
                Ok(report(log))
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Rest(*state));
                let own = std::process::id();
                let kind = FailureKind::NotNow;
                Err(Failure { kind, message: format!("process {own} was not frozen: {error}") })
            }
        }
    }

    /// The contexts are back, or never left.
    pub(super) fn thaw(&self) -> Result<PhaseReport, Failure> {
        if self.lifecycle.state() == MemberState::Paused {
            return Ok(PhaseReport::default());
        }
        self.lifecycle.expect(MemberState::Deep)?;
        let frozen = self.next_of(Progress::into_frozen)?;
        let (keeper, log) = frozen.thaw();
        self.set_progress(Progress::Rest(keeper));
        self.lifecycle.transition(Event::Thawed)?;
        Ok(report(log))
    }

    /// Refuses a deep pause where the driver could not bring the process's contexts back: that would cost the job.
    pub(super) fn refuse_unfreezable(&self) -> Result<(), Failure> {
        let Unfreezable { host_bytes, imported_bytes, registered_bytes } = self.pool.unfreezable();
        let why = if host_bytes > 0 {
            Some(format!(
                "it holds {host_bytes} bytes of host memory of the driver's allocator (NCCL does, unless NCCL_CUMEM_HOST_ENABLE=0 is \
                 set when the job starts)"
            ))
        } else if imported_bytes > 0 {
            Some(format!(
                "it holds {imported_bytes} bytes that were imported from a process outside its tenant, or that their owner has let go"
            ))
        } else if registered_bytes > 0 {
            Some(format!("{registered_bytes} bytes are registered with a network card"))
        } else {
            (self.config.unfreezable)()
        };
        why.map_or(Ok(()), |why| {
            Err(wrong_state(format!(
                "the driver could not bring process {} back from a deep pause: {why}; a pause without --deep frees its memory",
                std::process::id()
            )))
        })
    }
}
