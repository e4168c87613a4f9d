//! What a process does in each phase. Runs on the worker thread, one phase at a time.

use std::collections::BTreeMap;
use std::time::Instant;

use vmm_pool::driver::{DeviceOrdinal, Driver, RawContext};
use vmm_pool::{Selection, StepLog};

use super::failures::{
    drain_called_off, drain_failed, drain_timeout, failed_inside, faulted, import_failure,
    not_undone_yet, pool_failure, wrong_state,
};
use super::fetch::free_descriptors;
use super::{Member, Progress, Status};
use crate::cut::{Limits, Seen};
use crate::host_memory::HostNeed;
use crate::phase::{Action, Stage};
use crate::references::{References, Stay};
use crate::scope::Scope;
use crate::state::Event;
use crate::wire::{
    DeviceDelta, Failure, FailureKind, MemberState, Order, Phase, PhaseReport, Reply,
};
use vmm_pool::gate::StillInside;

impl<D: Driver> Member<D> {
    /// Takes the phase that `order` asks for, and answers for it.
    pub(super) fn run_phase(&self, order: &Order, deadline: Instant) -> Reply {
        let (phase, begin) = (order.phase(), Instant::now());
        let outcome = match order {
            Order::CloseGate { scope } => self.close_gate(scope, deadline),
            Order::Drain => self.drain(deadline),
            Order::Save { stays } => self.save(stays),
            Order::Release => self.release(),
            Order::Verify => self.verify(),
            Order::AbortPause => self.abort_pause(),
            Order::CreateOwn { scope } => self.create_own(scope, deadline),
            Order::Restore => self.restore(),
            Order::Import => self.import(deadline),
            Order::ImportFromLiving => self.import_from_living(deadline),
            Order::Activate => self.activate(),
            Order::AbortResume => self.abort_resume(),
            Order::Settle => self.settle(),
        };
        let elapsed_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        match outcome {
            Ok(mut report) => {
                report.elapsed_us = elapsed_us;
                tracing::debug!(?phase, elapsed_us, bytes = report.bytes, "phase");
                // Of use to the coordinator alone, and long.
                let references = report.references.take();
                self.status().record(phase, &report);
                report.references = references;
                Reply::PhaseDone(phase, report)
            }
            Err(failure) => {
                tracing::error!(?phase, elapsed_us, "{failure}");
                if failure.kind == FailureKind::Faulted && self.state() != MemberState::Faulted {
                    self.stand_faulted();
                }
                Reply::Failed(failure)
            }
        }
    }

    /// Holds the process on the way to a cut, and says where it stands.
    pub(super) fn run_cut(
        &self,
        holder: u64,
        limits: Limits,
        seen: Seen,
        asked: u64,
        until: Instant,
    ) -> Reply {
        if let Err(failure) = self.expect(MemberState::Active) {
            return Reply::Failed(failure);
        }
        let held = self.cut.hold(holder, limits);
        let report =
            held.then(|| self.cut.watch(seen, asked, until, &|| self.captures())).flatten();
        match report {
            Some(report) => Reply::Cut(Box::new(report)),
            None => Reply::Failed(wrong_state("the hold ended with its holder".to_owned())),
        }
    }

    /// The context is lost, and nothing of ours can bring it back. The application's own calls are let
    /// through, so that it hears of it from the driver, and ends.
    fn stand_faulted(&self) {
        // Every state has this transition.
        if let Err(error) = self.transition(Event::Lost) {
            tracing::error!(%error, "a lost context was not recorded");
        }
        self.gate.open();
        self.cut.release();
    }

    /// The code of `phase`, or of a look at the cut, failed in a way that nobody foresaw. What has been done of it
    /// nobody knows, so the process is faulted; it is not left waiting.
    pub(super) fn fail_inside(&self, phase: Option<Phase>, panic: &str) -> Reply {
        let failure = failed_inside(phase, panic);
        tracing::error!("{failure}");
        self.note(failure.message.clone());
        self.stand_faulted();
        Reply::Failed(failure)
    }

    fn expect(&self, wanted: MemberState) -> Result<(), Failure> {
        let state = self.state();
        if state == wanted {
            return Ok(());
        }
        if state == MemberState::Faulted {
            return Err(faulted());
        }
        Err(wrong_state(format!(
            "process {} is {state:?}, and this step needs it {wanted:?}",
            std::process::id()
        )))
    }

    fn close_gate(&self, scope: &Scope, deadline: Instant) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Active)?;
        self.refuse_ungated()?;
        self.refuse_capture()?;
        let called_off = || self.calling_off.is_raised();
        self.gate.shut(deadline, called_off).map_err(|inside| self.still_inside(&inside))?;
        // A capture may have begun before the gate was shut; none can begin now.
        let settled = self
            .refuse_capture()
            .and_then(|()| self.transition(Event::PauseBegun).map_err(Failure::from));
        if settled.is_err() {
            self.gate.open();
        }
        settled?;
        let selection = self.paused_selection(scope);
        let mut status = self.status();
        status.selection = selection;
        status.progress = Progress::Untouched;
        status.last_pause.clear();
        Ok(PhaseReport::default())
    }

    /// What the pause or resume under way is about.
    fn selection(&self) -> Selection {
        self.status().selection.clone()
    }

    fn still_inside(&self, inside: &StillInside) -> Failure {
        let kind = if self.calling_off.is_raised() {
            FailureKind::CalledOff
        } else {
            FailureKind::DrainTimeout
        };
        let message = format!(
            "process {}: {inside}; pause at a step boundary, or give a longer timeout",
            std::process::id()
        );
        Failure { kind, message }
    }

    /// Some calls of this process may pass its gate by. Then only the process itself may pause, at a time when it
    /// makes none.
    fn refuse_ungated(&self) -> Result<(), Failure> {
        match (self.config.ungated)() {
            Some(why) if !self.is_asking() => Err(wrong_state(format!(
                "process {} cannot be paused from outside: {why}; start it with `sublet run`, or pause it from \
                 inside, between its steps (sublet_pause_tenant)",
                std::process::id()
            ))),
            Some(_) | None => Ok(()),
        }
    }

    fn refuse_capture(&self) -> Result<(), Failure> {
        match self.captures() {
            0 => Ok(()),
            count => Err(Failure {
                kind: FailureKind::InCapture,
                message: format!(
                    "process {} is capturing {count} stream(s): pause again when the capture has ended",
                    std::process::id()
                ),
            }),
        }
    }

    /// Waits for the devices on a thread of its own: a wait inside the driver cannot be called off, so
    /// past the deadline it is left behind and ends by itself when the work does.
    fn drain(&self, deadline: Instant) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let (tell, hear) = crossbeam_channel::unbounded();
        let devices = self.pool.devices_at_work().into_iter().map(Place::Device);
        let own = (self.config.own_contexts)().into_iter().map(Place::OwnContext);
        let places: Vec<Place> = devices.chain(own).collect();
        for &place in &places {
            let driver = std::sync::Arc::clone(self.pool.driver());
            let tell = tell.clone();
            let wait = move || {
                let current = match place {
                    Place::Device(device) => driver.make_current(device),
                    Place::OwnContext(context) => driver.make_own_context_current(context),
                };
                // Nobody listens any more when the deadline has passed.
                let _told = tell.send((place, current.and_then(|()| driver.synchronize())));
            };
            let thread = std::thread::Builder::new().name("sublet-drain".to_owned());
            thread.spawn(wait).map_err(|error| Failure {
                kind: FailureKind::DrainTimeout,
                message: format!("no thread to wait for {place:?} with: {error}"),
            })?;
        }
        for _ in &places {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard = crossbeam_channel::select! {
                recv(hear) -> heard => heard.ok(),
                recv(self.calling_off.receiver()) -> _ => return Err(drain_called_off()),
                default(left) => None,
            };
            match heard {
                Some((_, Ok(()))) => {}
                Some((place, Err(error))) => return Err(drain_failed(place, error)),
                None => return Err(drain_timeout()),
            }
        }
        // Asked only now: from here on no work of the application's can put anything there. What was said before
        // is void, also without an answer.
        self.pool.mark_unused(&(self.config.unused)());
        let driver_calls = 2 * places.len() as u64;
        self.pool.freeze();
        let references = References::new(self.pool.references(&self.selection()));
        Ok(PhaseReport {
            driver_calls,
            host: Some(self.host_need()),
            references: Some(Box::new(references)),
            ..PhaseReport::default()
        })
    }

    fn host_need(&self) -> HostNeed {
        let demand = self.pool.host_demand(&self.selection());
        HostNeed::new(demand, (self.config.host_limits)())
    }

    fn save(&self, stays: &[Stay]) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let stays: Vec<_> = stays.iter().map(|stay| (stay.id, stay.reason)).collect();
        self.pool.set_stays(&stays).map_err(|error| pool_failure(&error))?;
        let budget = self.host_need().budget();
        self.forget_ended();
        self.status().progress = Progress::Moving;
        let saved = self.pool.save(&self.selection(), budget);
        let log = saved.map_err(|error| pool_failure(&error))?;
        self.status().progress = Progress::Ready;
        Ok(report(log))
    }

    pub(super) fn release(&self) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let before = self.by_device(self.pool.resident_bytes(&self.selection()));
        let mut report = self.release_and_stand()?;
        report.devices = self.deltas(&before);
        Ok(report)
    }

    /// Past the point of no return of a pause: the process stands paused, or runs on without some tags.
    fn release_and_stand(&self) -> Result<PhaseReport, Failure> {
        let selection = self.selection();
        let released = self.pool.release_selected(&selection);
        let log = released.map_err(|error| pool_failure(&error))?;
        match selection {
            Selection::Tagged(..) => {
                self.transition(Event::TagsReleased)?;
                self.pool.set_aside();
                self.gate.open();
                self.cut.release();
            }
            Selection::Whole | Selection::SetAside(..) | Selection::Staged(_) => {
                self.transition(Event::Released)?;
                self.status().pauses += 1;
                self.changed.notify_all();
                self.cut.pause();
                self.gate.set_vacated();
            }
        }
        Ok(report(log))
    }

    fn by_device(&self, bytes: BTreeMap<DeviceOrdinal, u64>) -> Vec<DeviceBytes> {
        let named = |(device, bytes)| DeviceBytes { device, uuid: self.pool.uuid(device), bytes };
        bytes.into_iter().map(named).collect()
    }

    /// What the driver says of the devices of `bytes` now. Makes their contexts current on this thread.
    fn deltas(&self, bytes: &[DeviceBytes]) -> Vec<DeviceDelta> {
        let driver = self.pool.driver();
        bytes
            .iter()
            .map(|row| {
                let info = driver.make_current(row.device).and_then(|()| driver.memory_info());
                DeviceDelta {
                    device: row.device,
                    uuid: row.uuid.clone(),
                    bytes: row.bytes,
                    free_bytes: info.map_or(0, |info| info.free_bytes),
                    total_bytes: info.map_or(0, |info| info.total_bytes),
                }
            })
            .collect()
    }

    /// Says what stays on the devices, now that all members have released.
    fn verify(&self) -> Result<PhaseReport, Failure> {
        let selection = self.selection();
        if let Selection::Tagged(..) = selection {
            return Ok(self.verify_tags(&selection));
        }
        self.expect(MemberState::Paused)?;
        let pool = self.pool.report();
        let mut report = PhaseReport::default();
        for row in pool.devices {
            let resident = row.resident_bytes();
            let pinned: u64 = row.classes.iter().map(|class| class.pinned_bytes).sum();
            for stays in &row.pinned {
                report.notes.push(format!(
                    "{}: {} bytes in {} allocations stay: {}",
                    row.device, stays.bytes, stays.count, stays.reason
                ));
            }
            if resident > pinned {
                report.notes.push(format!(
                    "{}: {} bytes were not given back by the driver",
                    row.device,
                    resident - pinned
                ));
            }
        }
        report.devices = self.deltas(&self.by_device(self.pool.resident_bytes(&selection)));
        report.notes.extend(self.lost_imports());
        Ok(report)
    }

    /// As [`Member::verify`], of a process that runs on. New memory of the tags may be there already.
    fn verify_tags(&self, selection: &Selection) -> PhaseReport {
        let away = self.by_device(self.pool.vacated_bytes(selection));
        let notes = self.pool.pinned_bytes(selection).into_iter().map(|(device, bytes)| {
            format!(
                "{device}: {bytes} bytes of these tags stay: see what `sublet stats` says of them"
            )
        });
        PhaseReport { notes: notes.collect(), devices: self.deltas(&away), ..Default::default() }
    }

    /// Maps again what was unmapped, and runs on. Nobody else is needed for that, whoever has died meanwhile.
    pub(super) fn abort_pause(&self) -> Result<PhaseReport, Failure> {
        let (state, progress) = {
            let status = self.status();
            (status.state, status.progress)
        };
        match state {
            MemberState::Offloading => {}
            MemberState::Active => {
                self.cut.release();
                return Ok(PhaseReport::default());
            }
            MemberState::Paused => return Ok(PhaseReport::default()),
            MemberState::Faulted => return Err(faulted()),
            MemberState::Restoring => {
                return Err(wrong_state(format!("a pause cannot be undone while {state:?}")));
            }
        }
        let log = match progress {
            Progress::Untouched => StepLog::default(),
            Progress::Moving | Progress::Ready => {
                let remounted = self.pool.remount(&self.selection());
                remounted.map_err(|error| not_undone_yet(&pool_failure(&error)))?
            }
        };
        let spare = self.pool.commit_resume();
        if progress != Progress::Untouched {
            self.pool.give_back_host_memory();
        }
        self.transition(Event::PauseUndone)?;
        self.gate.open();
        self.cut.release();
        drop(spare);
        Ok(report(log))
    }

    fn create_own(&self, scope: &Scope, deadline: Instant) -> Result<PhaseReport, Failure> {
        let state = self.state();
        let selection = self.resumed_selection(scope, state);
        let begun = match selection {
            Selection::SetAside(..) => {
                self.expect(MemberState::Active)?;
                Event::TagResumeBegun
            }
            Selection::Whole | Selection::Staged(_) | Selection::Tagged(..) => {
                self.expect(MemberState::Paused)?;
                Event::ResumeBegun
            }
        };
        let called_off = || self.calling_off.is_raised();
        // On failure it leaves the gate as it was.
        let shut = self.gate.shut(deadline, called_off);
        shut.map_err(|inside| self.still_inside(&inside))?;
        self.transition(begun)?;
        // What comes back is given to those whom it is owed, and to nobody else before it is all there.
        self.pool.freeze();
        {
            let mut status = self.status();
            status.selection = selection.clone();
            status.progress = Progress::Moving;
            status.last_resume.clear();
        }
        let taken = self.by_device(self.pool.vacated_bytes(&selection));
        match self.pool.create_own(&selection) {
            Ok(log) => {
                let devices = self.deltas(&taken);
                Ok(PhaseReport { devices, ..report(log) })
            }
            Err(error) => {
                // Nothing was taken; stand as before, so that the same resume can be tried later.
                self.stand_as_before_resume()?;
                Err(pool_failure(&error))
            }
        }
    }

    /// A resume is undone in the pool: the process is as it was before.
    fn stand_as_before_resume(&self) -> Result<(), Failure> {
        match self.selection() {
            Selection::SetAside(..) => {
                self.transition(Event::TagResumeUndone)?;
                self.pool.thaw();
                self.gate.open();
            }
            Selection::Whole | Selection::Staged(_) | Selection::Tagged(..) => {
                self.transition(Event::ResumeUndone)?;
                self.gate.set_vacated();
            }
        }
        Ok(())
    }

    fn restore(&self) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Restoring)?;
        let restored = self.pool.restore_own(&self.selection(), free_descriptors() / 4);
        Ok(report(restored.map_err(|error| pool_failure(&error))?))
    }

    fn import(&self, deadline: Instant) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Restoring)?;
        let fetched = self.import_again(&self.selection(), deadline);
        let (log, missing) = fetched.map_err(|error| import_failure(&error))?;
        if let Some(missing) = missing.into_iter().next() {
            return Err(import_failure(&missing.into()));
        }
        self.map_imports(log)
    }

    fn import_from_living(&self, deadline: Instant) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Restoring)?;
        let mut notes = self.leave_lost_out();
        let fetched = self.import_again(&self.selection(), deadline);
        let (log, missing) = fetched.map_err(|error| import_failure(&error))?;
        notes.extend(missing.iter().map(|missing| self.leave_missing_out(missing)));
        let mut report = self.map_imports(log)?;
        report.notes.extend(notes);
        Ok(report)
    }

    /// All that comes before the gate opens is done with that.
    fn map_imports(&self, mut log: StepLog) -> Result<PhaseReport, Failure> {
        let mapped = self.pool.map_imports(&self.selection());
        log.add(mapped.map_err(|error| pool_failure(&error))?);
        self.status().progress = Progress::Ready;
        Ok(report(log))
    }

    pub(super) fn activate(&self) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Restoring)?;
        let spare = self.pool.commit_resume();
        self.transition(Event::Resumed)?;
        {
            let mut status = self.status();
            if !matches!(status.selection, Selection::SetAside(..)) {
                status.resumes += 1;
            }
        }
        self.changed.notify_all();
        self.gate.open();
        self.cut.release();
        self.close_later(spare);
        Ok(PhaseReport::default())
    }

    /// Closes descriptors after the answer is out: nobody waits for that.
    fn close_later(&self, spare: Vec<std::os::fd::OwnedFd>) {
        self.spare.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(spare);
    }

    /// Closes what [`Member::close_later`] was given.
    pub(super) fn close_spare(&self) {
        let spare = std::mem::take(
            &mut *self.spare.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        drop(spare);
    }

    pub(super) fn abort_resume(&self) -> Result<PhaseReport, Failure> {
        match self.state() {
            MemberState::Restoring => {}
            MemberState::Active | MemberState::Paused => return Ok(PhaseReport::default()),
            MemberState::Faulted => return Err(faulted()),
            state @ MemberState::Offloading => {
                return Err(wrong_state(format!("a resume cannot be undone while {state:?}")));
            }
        }
        let selection = self.selection();
        let mut log = self.pool.drop_imports(&selection).map_err(|error| pool_failure(&error))?;
        let own = self.pool.release_selected(&selection).map_err(|error| pool_failure(&error))?;
        log.steps.extend(own.steps);
        self.stand_as_before_resume()?;
        Ok(report(log))
    }

    /// Says what a resume of `scope` would need on each device, and what is free there.
    pub(super) fn run_needs(&self, scope: &Scope) -> Reply {
        match self.state() {
            state @ (MemberState::Active | MemberState::Paused) => {
                let selection = self.resumed_selection(scope, state);
                let vacated = self.by_device(self.pool.vacated_bytes(&selection));
                Reply::Needs(self.deltas(&vacated))
            }
            MemberState::Faulted => Reply::Failed(faulted()),
            state @ (MemberState::Offloading | MemberState::Restoring) => {
                Reply::Failed(wrong_state(format!(
                    "process {} is {state:?}: what a resume needs is known when it runs or is paused",
                    std::process::id()
                )))
            }
        }
    }
}

/// Bytes on one device.
struct DeviceBytes {
    device: DeviceOrdinal,
    uuid: String,
    bytes: u64,
}

impl Status {
    fn record(&mut self, phase: Phase, report: &PhaseReport) {
        let phases = match (phase.stage(), phase.action()) {
            (Stage::Prepare | Stage::Commit, Some(Action::Pause)) => &mut self.last_pause,
            (Stage::Prepare | Stage::Commit, Some(Action::Resume)) => &mut self.last_resume,
            (Stage::Abort | Stage::Settle, _) | (_, None) => return,
        };
        phases.push((phase, report.clone()));
    }
}

fn report(log: StepLog) -> PhaseReport {
    PhaseReport {
        driver_calls: log.driver_calls,
        bytes: log.bytes,
        steps: log.steps.into_iter().map(|step| (step.name.to_owned(), step.elapsed_us)).collect(),
        notes: log.notes,
        ..PhaseReport::default()
    }
}

/// Something whose work must end before memory can leave.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// The primary context of a device.
    Device(DeviceOrdinal),
    /// A context that the application made for itself.
    OwnContext(RawContext),
}
