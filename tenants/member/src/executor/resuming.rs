//! The work of a process in the phases of a resume. It runs on the worker thread, like the work in `phases.rs`.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{
    Aside, Away, Failed, FromOffloaded, FromOpen, Moved, PoolError, Returning, Selection, Shut,
    StepLog, UninheritedFd,
};

use super::Executor;
use super::reports::{PhaseResult, deltas, known, report, staged};
use super::selection::Resumed;
use crate::failures::{PID, faulted, frozen, import_failure, pool_failure, wrong_state};
use crate::progress::Progress;
use crate::sharing::Missing;
use sublet_protocol::descriptors::free_descriptors;
use sublet_protocol::phase::{Action, Window};
use sublet_protocol::scope::Scope;
use sublet_protocol::state::Event;
use sublet_protocol::wire::{Failure, MemberState, Needed, PhaseReport, Reply};

impl<D: Driver> Executor<D> {
    /// Closes the gate for a resume of `scope`.
    pub(super) fn begin_resume(
        &mut self,
        scope: &Scope,
        deadline: Instant,
    ) -> Result<Resume<D>, Failure> {
        let resume = match self.resumed(scope) {
            Resumed::Aside(aside) => {
                self.lifecycle.expect(MemberState::Active)?;
                let shut = self.shut(deadline)?;
                self.lifecycle.transition(Event::TagResumeBegun)?;
                Resume::Aside(shut, aside)
            }
            Resumed::Away(away) => {
                self.lifecycle.expect(MemberState::Paused)?;
                let shut = self.shut(deadline)?;
                self.lifecycle.transition(Event::ResumeBegun)?;
                Resume::Away(shut, away)
            }
        };
        self.member.phase_log.begin(Action::Resume);
        Ok(resume)
    }

    pub(super) fn create(&mut self, scope: &Scope, deadline: Instant) -> PhaseResult {
        self.refuse_shared(scope)?;
        let selection = self.resumed(scope).into();
        let resume = self.begin_resume(scope, deadline)?;
        let taken = self.pool.holdings().offloaded_bytes(&selection);
        let created = match resume {
            Resume::Aside(shut, aside) => shut.create_own(aside),
            Resume::Away(shut, away) => shut.create_own(away),
        };
        match created {
            Ok((arriving, log)) => {
                self.progress = Progress::Arriving(arriving, 0);
                Ok(PhaseReport { devices: deltas(&self.pool, taken), ..report(log) })
            }
            Err(Failed { state, error }) => {
                // No memory was allocated. The process stays as before, so that the same resume can be tried later.
                self.lifecycle.transition(undone_resume(&selection))?;
                self.progress = Progress::Rest(state.end());
                Err(pool_failure(&error))
            }
        }
    }

    pub(super) fn restore(&mut self) -> PhaseResult {
        self.lifecycle.expect(MemberState::Restoring)?;
        let (arriving, _) = self.next_of(Progress::into_arriving)?;
        let restored = arriving.restore_rest(free_descriptors() / 4);
        let (returning, moved) =
            restored.map_err(|failed| self.put_back(failed, Progress::Returning))?;
        self.progress = Progress::Returning(returning);
        // All memory was created by then, unless the resume goes by stages.
        let bytes = if moved.log.bytes == 0 { moved.copied_bytes } else { moved.log.bytes };
        Ok(PhaseReport { bytes, ..staged(&self.pool, moved, BTreeMap::new()) })
    }

    fn take_returning(&mut self) -> Result<Returning<D>, Failure> {
        self.lifecycle.expect(MemberState::Restoring)?;
        self.next_of(Progress::into_returning)
    }

    /// Imports peers' memory. Memory that no process has any more is left out, or refuses the resume.
    pub(super) fn import(&mut self, without_lost: bool, deadline: Instant) -> PhaseResult {
        self.lifecycle.expect(MemberState::Restoring)?;
        let member = Arc::clone(&self.member);
        let (sharers, notes) = (member.sharing.sharers(), &member.notes);
        let mut said = if without_lost { sharers.leave_lost_out(notes) } else { Vec::new() };
        let (log, missing) = self.fetch_imports(deadline)?;
        for missing in missing {
            if !without_lost {
                return Err(import_failure(&missing.into()));
            }
            said.push(sharers.leave_missing_out(&missing, notes));
        }
        let mut report = self.map_imports(log)?;
        report.notes.extend(said);
        Ok(report)
    }

    fn fetch_imports(&mut self, deadline: Instant) -> Result<(StepLog, Vec<Missing>), Failure> {
        let mut returning = self.take_returning()?;
        let fetched =
            self.member.sharing.import_again(&mut returning, &self.member.calling_off, deadline);
        self.progress = Progress::Returning(returning);
        fetched.map_err(|error| import_failure(&error))
    }

    /// Maps imports. After it the gate can open.
    fn map_imports(&mut self, mut log: StepLog) -> PhaseResult {
        let mapped = self.take_returning()?.map_imports();
        let (restored, mapped) =
            mapped.map_err(|failed| self.put_back(failed, Progress::Returning))?;
        self.progress = Progress::Restored(restored);
        log.add(mapped);
        Ok(report(log))
    }

    pub(super) fn activate(&mut self) -> PhaseResult {
        self.lifecycle.expect(MemberState::Restoring)?;
        let restored = self.next_of(Progress::into_restored)?;
        let selection = restored.selection().clone();
        let (done, spare) = restored.commit();
        // Before others see the process as active.
        self.lifecycle.stand_without(None);
        self.lifecycle.transition(Event::Resumed)?;
        if !matches!(selection, Selection::SetAside(..)) {
            self.member.asking.note_done(Action::Resume);
        }
        self.progress = Progress::Rest(done.end());
        self.nccl_follows(&selection);
        self.member.cut.release();
        self.spare.extend(spare.into_iter().map(UninheritedFd::from));
        Ok(PhaseReport::default())
    }

    pub(super) fn abort_resume(&mut self) -> PhaseResult {
        let (selection, undone) = match mem::take(&mut self.progress) {
            Progress::Returning(returning) => (returning.selection().clone(), returning.undo()),
            Progress::Arriving(arriving, _) => (arriving.selection().clone(), arriving.undo()),
            Progress::Restored(restored) => (restored.selection().clone(), restored.undo()),
            progress @ (Progress::Taken
            | Progress::Rest(_)
            | Progress::Draining(..)
            | Progress::Quiesced(..)
            | Progress::Leaving(_)
            | Progress::Prepared(_)
            | Progress::Departing(..)
            | Progress::Frozen(_)
            | Progress::Released(..)) => return Err(self.out_of_turn(progress)),
        };
        let (done, log) = undone.map_err(|failed| self.put_back(failed, Progress::Returning))?;
        self.lifecycle.transition(undone_resume(&selection))?;
        self.progress = Progress::Rest(done.end());
        Ok(report(log))
    }

    /// Restores as much memory as the window allows. The first window closes the gate.
    pub(super) fn restore_window(
        &mut self,
        scope: &Scope,
        window: &Window,
        deadline: Instant,
    ) -> PhaseResult {
        let mut arriving = if window.stage == 0 {
            match self.begin_resume(scope, deadline)? {
                Resume::Aside(shut, aside) => shut.arrive(aside),
                Resume::Away(shut, away) => shut.arrive(away),
            }
        } else {
            self.lifecycle.expect(MemberState::Restoring)?;
            let (arriving, next) = self.next_of(Progress::into_arriving)?;
            if next != window.stage {
                return Err(self.out_of_turn(Progress::Arriving(arriving, next)));
            }
            arriving
        };
        let moved = match arriving.restore_stage(&known(&self.pool, window)) {
            // Others have used the free memory. The restore is tried again when more memory of the first tenant was released.
            Err(error @ PoolError::OutOfDeviceMemory { .. }) => {
                let notes = vec![format!("comes when more of the first tenant has left: {error}")];
                Ok(Moved { log: StepLog { notes, ..StepLog::default() }, ..Moved::default() })
            }
            moved => moved,
        };
        let left = arriving.left();
        self.progress = Progress::Arriving(arriving, window.stage.saturating_add(1));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(staged(&self.pool, moved, left))
    }

    /// Reports the memory that a resume of `scope` would need on each device, and the free memory there. Refuses if the
    /// tenant's budget has too little left for it.
    pub(super) fn run_needs(&self, scope: &Scope, all_devices: bool) -> Reply {
        match self.lifecycle.state() {
            MemberState::Active | MemberState::Paused => {
                let selection = self.resumed(scope).into();
                if let Err(error) = self.pool.check_budget(&selection) {
                    return Reply::Failed(pool_failure(&error));
                }
                let mut away = self.pool.holdings().offloaded_bytes(&selection);
                if all_devices {
                    let driver = self.pool.driver();
                    let devices = (0..driver.device_count().unwrap_or(0)).map(DeviceOrdinal);
                    let used = |device: &DeviceOrdinal| driver.has_primary_context(*device);
                    for device in devices.filter(|device| used(device) == Ok(true)) {
                        away.entry(device).or_default();
                    }
                }
                let largest_bytes = self.pool.holdings().largest_offloaded_bytes(&selection);
                Reply::Needs(Needed { devices: deltas(&self.pool, away), largest_bytes })
            }
            MemberState::Faulted => Reply::Failed(faulted()),
            MemberState::Deep => Reply::Failed(frozen(self.member.presence.tenant())),
            state @ (MemberState::Offloading | MemberState::Restoring) => {
                // The process is being paused or resumed, so the size of a resume is not known. Nothing was changed.
                // Try again.
                Reply::Failed(wrong_state(format!(
                    "process {PID} is {state:?}: what a resume needs is known when it runs or is paused"
                )))
            }
        }
    }
}

/// A resume that has closed the gate.
pub(super) enum Resume<D: Driver> {
    /// The resume of a process that runs.
    Aside(Shut<D, FromOpen>, Aside),
    /// The resume of a process whose memory is released.
    Away(Shut<D, FromOffloaded>, Away),
}

/// The event that undoes a resume of `selection`.
fn undone_resume(selection: &Selection) -> Event {
    if matches!(selection, Selection::SetAside(..)) {
        Event::TagResumeUndone
    } else {
        Event::ResumeUndone
    }
}
