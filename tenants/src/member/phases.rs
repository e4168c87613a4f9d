//! What a process does in each phase. Runs on the worker thread, one phase at a time.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::gate::Call;
use vmm_pool::{
    After, Copies, Done, Draining, Failed, FromOffloaded, Keeper, NotShut, Origin, PinnedBytes,
    Quiesced, Schedule, Selection, Shut, StepLog, Undone,
};

use super::Member;
use super::failures::{
    drain_failure, failed_inside, faulted, in_capture, not_undone_yet, pool_failure, wrong_state,
};
use super::progress::Progress;
use crate::cut::{Limits, Seen};
use crate::host_memory::HostNeed;
use crate::phase::{Action, Window};
use crate::references::{References, Stay};
use crate::scope::{Scope, TagNames};
use crate::state::Event;
use crate::time::micros;
use crate::wire::{
    DeviceDelta, Drained, Failure, FailureKind, MemberState, Order, Phase, PhaseAnswer,
    PhaseReport, Reply,
};

/// How long the gate stays shut for a look at the devices at most.
const LOOK_MAX: Duration = Duration::from_millis(10);

impl<D: Driver> Member<D> {
    /// Takes the phase of `round` that `order` asks for, and answers for it. To settle is to settle that round; none where
    /// nothing is under way.
    pub(super) fn run_phase(&self, round: Option<u64>, order: &Order, deadline: Instant) -> Reply {
        let (phase, begin) = (order.phase(), Instant::now());
        let mut drained = None;
        let outcome = match order {
            Order::CloseGate { scope, is_deep, stands } => {
                self.close_gate(scope, (*is_deep, *stands), deadline)
            }
            Order::Drain => self.drain(deadline).map(|(report, said)| {
                drained = Some(Box::new(said));
                report
            }),
            Order::Prepare { stays, copies, schedule } => self.prepare(stays, *copies, *schedule),
            Order::Release { window: Some(window), .. } => self.release_window(window),
            Order::Release { window: None, rest } => self.release(*rest),
            Order::Verify => self.verify(),
            Order::Freeze => self.freeze(),
            Order::Thaw => self.thaw(),
            Order::Create { scope } => self.create(scope, deadline),
            Order::Restore { scope, window: Some(window) } => {
                self.restore_window(scope, window, deadline)
            }
            Order::Restore { window: None, .. } => self.restore(),
            Order::Import { without_lost } => self.import(*without_lost, deadline),
            Order::Activate => self.activate(),
            Order::Abort => self.abort(),
            Order::Settle => self.settle(round),
        };
        if phase.is_last() {
            self.count_pause();
            self.last_step_taken(round);
        }
        let elapsed_us = micros(begin.elapsed());
        match outcome {
            Ok(mut report) => {
                report.elapsed_us = elapsed_us;
                tracing::debug!(?phase, elapsed_us, bytes = report.bytes, "phase");
                self.phase_log.record(phase, &report);
                Reply::PhaseDone(phase, PhaseAnswer { report, drained })
            }
            Err(failure) => {
                tracing::error!(?phase, elapsed_us, "{failure}");
                self.refuse(failure)
            }
        }
    }

    /// The answer of a step that failed. Where the context is lost by that, the process stands faulted.
    pub(super) fn refuse(&self, failure: Failure) -> Reply {
        if failure.kind == FailureKind::Faulted && self.lifecycle.state() != MemberState::Faulted {
            self.stand_faulted();
        }
        Reply::Failed(failure)
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
        if let Err(failure) = self.lifecycle.expect(MemberState::Active) {
            return Reply::Failed(failure);
        }
        let held = self.cut.hold(holder, limits);
        let report = held
            .then(|| self.cut.watch(seen, asked, until, &|| self.captures().under_way()))
            .flatten();
        match report {
            Some(report) => Reply::Cut(Box::new(report)),
            None => Reply::Failed(wrong_state("the hold ended with its holder".to_owned())),
        }
    }

    /// The context is lost, and nothing of ours can bring it back. The application's own calls are let
    /// through, so that it hears of it from the driver, and ends.
    fn stand_faulted(&self) {
        // Every state has this transition.
        if let Err(error) = self.lifecycle.transition(Event::Lost) {
            tracing::error!(%error, "a lost context was not recorded");
        }
        self.take_progress().abandon();
        // What a panic has dropped has given it back too.
        if let Some(keeper) = self.pool.keeper() {
            keeper.let_through_for_good();
        } else {
            tracing::error!("calls stay held back: something is still under way");
        }
        self.let_nccl_through();
        self.cut.release();
    }

    /// The code of `phase`, or of a look at the cut, failed in a way that nobody foresaw. What has been done of it
    /// nobody knows, so the process is faulted; it is not left waiting.
    pub(super) fn fail_inside(&self, phase: Option<Phase>, panic: &str) -> Reply {
        let failure = failed_inside(phase, panic);
        tracing::error!("{failure}");
        self.notes.add(failure.message.clone());
        // Its contexts are off the devices: calls that were let through would end it. Apart from a thaw, nothing that such a process is told
        // to do calls the driver, so it stands as before.
        let is_frozen = self.lifecycle.state() == MemberState::Deep && phase != Some(Phase::Thaw);
        if !is_frozen {
            self.stand_faulted();
        }
        Reply::Failed(failure)
    }

    fn close_gate(
        &self,
        scope: &Scope,
        (is_deep, stands): (bool, bool),
        deadline: Instant,
    ) -> Result<PhaseReport, Failure> {
        let stood = *scope == Scope::Whole && self.stood_without_tags();
        self.lifecycle.expect(if stood { MemberState::Paused } else { MemberState::Active })?;
        if is_deep {
            self.refuse_unfreezable()?;
        }
        self.refuse_ungated()?;
        self.refuse_unseen_pins(scope)?;
        if !stands {
            self.refuse_unseen_nccl(scope)?;
        }
        self.refuse_capture()?;
        self.end_closed_tickets();
        let selection = self.leaving_selection(scope, stands);
        let progress = if stood {
            let shut = self.shut::<FromOffloaded>(deadline)?;
            self.lifecycle.transition(Event::RestBegun)?;
            Progress::Quiesced(shut.into_quiesced(), selection)
        } else {
            let draining = self.begin_pause()?;
            self.lifecycle.transition(Event::PauseBegun)?;
            Progress::Draining(draining, selection)
        };
        self.phase_log.begin(Action::Pause);
        self.set_progress(progress);
        Ok(PhaseReport::default())
    }

    /// Shuts the gate for a pause, or for a look at the devices, and waits for nobody.
    pub(super) fn begin_pause(&self) -> Result<Draining<D>, Failure> {
        self.take_keeper()?.close().map_err(|failed| self.not_shut(failed))
    }

    pub(super) fn shut<W: Origin>(&self, deadline: Instant) -> Result<Shut<D, W>, Failure> {
        let called_off = || self.calling_off.is_raised();
        self.take_keeper()?.shut(deadline, called_off).map_err(|failed| self.not_shut(failed))
    }

    /// What something begins with that nothing else is under way for.
    pub(super) fn take_keeper(&self) -> Result<Keeper<D>, Failure> {
        let progress = self.take_progress();
        if matches!(progress, Progress::Taken) {
            return self.pool.keeper().ok_or_else(|| self.out_of_turn(progress));
        }
        progress.into_keeper().map_err(|other| self.out_of_turn(*other))
    }

    /// Puts the keeper back: the gate is as it was.
    fn not_shut(&self, Failed { state, error }: Failed<Keeper<D>, NotShut>) -> Failure {
        self.set_progress(Progress::Rest(*state));
        let inside = match error {
            NotShut::StillInside(inside) => inside,
            NotShut::Elsewhere(_) => {
                return wrong_state(format!("process {}: {error}", std::process::id()));
            }
        };
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

    /// Refuses a pause from outside where work can reach a device past the gate: only the process itself knows when it
    /// launches none.
    fn refuse_ungated(&self) -> Result<(), Failure> {
        match (self.config.ungated)() {
            Some(why) if !self.asking.is_for_pause() => Err(wrong_state(format!(
                "process {} cannot be paused from outside: {why}; or pause it from inside, between its steps \
                 (sublet_pause_tenant)",
                std::process::id()
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// Refuses to take memory away that a device may hold the pages of, unseen by us: it would go on reading and writing
    /// there.
    fn refuse_unseen_pins(&self, scope: &Scope) -> Result<(), Failure> {
        let leaving = self.pool.holdings().resident_bytes(&scope.paused(self.presence.id()));
        if leaving.values().all(|bytes| *bytes == 0) {
            return Ok(());
        }
        (self.config.unseen_pins)().map_or(Ok(()), |why| {
            let own = std::process::id();
            Err(wrong_state(format!("process {own} cannot be paused: {why}")))
        })
    }

    /// Gives memory back that nothing held but tickets, all closed by now. The worker's alone: it is who shuts the gate,
    /// so that it is open here.
    pub(super) fn end_closed_tickets(&self) {
        if self.lifecycle.state() == MemberState::Active {
            self.pool.enter_giving_up().end_closed_tickets();
        }
    }

    pub(super) fn refuse_capture(&self) -> Result<(), Failure> {
        match self.captures().under_way() {
            0 => Ok(()),
            count => Err(in_capture(count)),
        }
    }

    fn drain(&self, deadline: Instant) -> Result<(PhaseReport, Drained), Failure> {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (mut quiesced, selection, waited) = if self.stood_without_tags() {
            let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
            (quiesced, selection, 0)
        } else {
            self.quiesce(deadline)?
        };
        // Asked only now: from here on no work of the application's can put anything there. What was said before
        // is void, also without an answer. The code that knows may need the lock of an allocator, and would wait for it until the
        // resume where a thread at the gate has it, with the interpreter's lock in its hands.
        let waiting = quiesced.pool().gate().waiting();
        let is_locked = waiting.iter().any(|waiting| waiting.call == Call::Memory);
        let unused = if is_locked { Vec::new() } else { (self.config.unused)() };
        quiesced.mark_unused(&unused, &selection);
        let references = self.pool.holdings().references(&selection);
        let partners = self.sharing.sharers().living(&references.holders);
        let references = References::new(references, partners);
        // The devices of all processes are idle, behind gates that are shut: nobody writes to it from here on.
        let seen = quiesced.survey(&selection);
        let demand = quiesced.host_demand(&selection);
        let host = HostNeed { demand, limits: (self.config.host_limits)() };
        self.set_progress(Progress::Quiesced(quiesced, selection));
        let mut report = report(seen);
        report.driver_calls += 2 * waited as u64;
        Ok((report, Drained { host, references }))
    }

    /// Waits until nobody is inside a call and the devices are idle. Says how many waits that took.
    fn quiesce(&self, deadline: Instant) -> Result<(Quiesced<D>, Selection, usize), Failure> {
        let (mut draining, selection) = self.next_of(Progress::into_draining)?;
        if let Err(failure) = self.clear(&mut draining, deadline) {
            self.set_progress(Progress::Draining(draining, selection));
            return Err(failure);
        }
        match draining.drain(deadline, self.calling_off.receiver()) {
            Ok((quiesced, waited)) => Ok((quiesced, selection, waited)),
            Err(Failed { state, error }) => {
                let failure = drain_failure(&error, &state.pool().gate().waiting());
                self.set_progress(Progress::Draining(*state, selection));
                Err(failure)
            }
        }
    }

    /// Waits until nobody is inside a call. A capture that was begun by then ends the pause, and none can begin after.
    fn clear(&self, draining: &mut Draining<D>, deadline: Instant) -> Result<(), Failure> {
        let called_off = self.calling_off.receiver();
        let cleared = draining.clear(deadline, called_off);
        cleared.map_err(|error| drain_failure(&error, &draining.pool().gate().waiting()))?;
        self.refuse_capture()
    }

    /// What the requested step needs, if it follows the one before.
    pub(super) fn next_of<T>(
        &self,
        take: impl FnOnce(Progress<D>) -> Result<T, Box<Progress<D>>>,
    ) -> Result<T, Failure> {
        take(self.take_progress()).map_err(|progress| self.out_of_turn(*progress))
    }

    /// Puts `progress` back: the requested step does not follow it.
    pub(super) fn out_of_turn(&self, progress: Progress<D>) -> Failure {
        let message =
            format!("process {}: this step does not follow the one before", std::process::id());
        self.set_progress(progress);
        wrong_state(message)
    }

    /// Unless it is saved by then, what would leave is told by device, so that another tenant can count on it.
    fn prepare(
        &self,
        stays: &[Stay],
        copies: Copies,
        schedule: Schedule,
    ) -> Result<PhaseReport, Failure> {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
        self.sharing.sharers().forget_ended();
        let stays: Vec<_> = stays.iter().map(|stay| (stay.id, stay.reason)).collect();
        match quiesced.prepare(selection, &stays, copies, self.host_budget(), schedule) {
            Ok((prepared, log)) => {
                let leaving = match schedule {
                    Schedule::SaveFirst => BTreeMap::new(),
                    Schedule::SaveMeanwhile => {
                        self.pool.holdings().resident_bytes(prepared.selection())
                    }
                };
                let devices = self.deltas(&self.by_device(leaving));
                self.set_progress(Progress::Prepared(prepared));
                Ok(PhaseReport { devices, ..report(log) })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Leaving(*state));
                Err(pool_failure(&error))
            }
        }
    }

    /// The point of no return of a pause by stages, or behind it.
    pub(super) fn release_window(&self, window: &Window) -> Result<PhaseReport, Failure> {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (mut departing, _) =
            self.next_of(|progress| progress.into_departing(Some(window.stage)))?;
        let moved = departing.release_stage(&self.known(window));
        let left = departing.left();
        self.set_progress(Progress::Departing(departing, window.stage.saturating_add(1)));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(self.staged(moved, left))
    }

    /// The point of no return of a pause, or behind it: the process stands paused, or runs on without some tags.
    pub(super) fn release(&self, rest: Schedule) -> Result<PhaseReport, Failure> {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (departing, next) = self.next_of(|progress| progress.into_departing(None))?;
        let selection = departing.selection().clone();
        match departing.release(rest) {
            Ok((done, moved)) => {
                let stays = self.stand_released(selection, done)?;
                Ok(PhaseReport { stays, ..self.staged(moved, BTreeMap::new()) })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Departing(state, next));
                Err(pool_failure(&error))
            }
        }
    }

    /// The last step of `round` was taken, well or not.
    fn last_step_taken(&self, round: Option<u64>) {
        if let Some(round) = round {
            let mut rounds = self.rounds();
            rounds.last_step_taken(round, self.lifecycle.state().rests());
        }
    }

    /// A thread that has requested a pause together with others waits until all of them have released, which this process knows by
    /// what follows that.
    fn count_pause(&self) {
        if self.is_pausing.swap(false, Ordering::Relaxed) {
            self.phase_log.end_pause();
            self.asking.note_done(Action::Pause);
        }
    }

    /// All that leaves is released: the process stands paused, or runs on without some tags. Says what stays.
    pub(super) fn stand_released(
        &self,
        selection: Selection,
        done: Done<D>,
    ) -> Result<Vec<PinnedBytes>, Failure> {
        let stays = self.pool.stays(&selection, true);
        let keeper = match selection.after_pause() {
            After::Running => {
                self.lifecycle.transition(Event::TagsReleased)?;
                // Before the gate opens: what stands at it may be a launch.
                self.nccl_follows(&selection);
                let keeper = done.end();
                self.cut.release();
                keeper
            }
            After::Paused => {
                // Before others see it paused.
                self.lifecycle.stand_without(selection.stands_without().map(TagNames::from));
                self.lifecycle.transition(Event::Released)?;
                self.is_pausing.store(true, Ordering::Relaxed);
                self.cut.pause();
                done.end()
            }
        };
        self.set_progress(Progress::Released(keeper, selection));
        Ok(stays)
    }

    pub(super) fn by_device(&self, bytes: BTreeMap<DeviceOrdinal, u64>) -> Vec<DeviceBytes> {
        let named = |(device, bytes)| DeviceBytes { device, uuid: self.pool.uuid(device), bytes };
        bytes.into_iter().map(named).collect()
    }

    /// What the driver says of the devices of `bytes` now. Makes their contexts current on this thread.
    pub(super) fn deltas(&self, bytes: &[DeviceBytes]) -> Vec<DeviceDelta> {
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

    /// Says what is free on the devices, now that all members have released.
    fn verify(&self) -> Result<PhaseReport, Failure> {
        let (keeper, selection) = self.next_of(Progress::into_released)?;
        self.set_progress(Progress::Rest(keeper));
        if selection.is_by_tag() {
            return Ok(self.verify_tags(&selection));
        }
        self.lifecycle.expect(MemberState::Paused)?;
        let devices = self.deltas(&self.by_device(self.pool.holdings().resident_bytes(&selection)));
        Ok(PhaseReport {
            devices,
            notes: self.sharing.sharers().lost_imports(),
            ..PhaseReport::default()
        })
    }

    /// As [`Member::verify`], of a pause by tag. Where the process runs on, new memory of the tags may be there already.
    fn verify_tags(&self, selection: &Selection) -> PhaseReport {
        let away = self.by_device(self.pool.holdings().offloaded_bytes(selection));
        PhaseReport { devices: self.deltas(&away), ..PhaseReport::default() }
    }

    /// Looks whether the devices have work left, where nothing was launched for `quiet_us`. On the worker thread, which takes no step of a pause
    /// meanwhile. A thread that comes to the gate at this moment waits for some milliseconds.
    pub(super) fn run_idle(&self, quiet_us: u64) -> Reply {
        let before = self.idle.look();
        let is_at_rest = matches!(*self.progress(), Progress::Rest(_));
        let may_look = is_at_rest
            && self.lifecycle.state() == MemberState::Active
            && self.captures().under_way() == 0;
        if before.is_drained || before.quiet_us < quiet_us || !may_look {
            return Reply::Idleness(before);
        }
        let mark = self.idle.mark();
        let Ok(mut draining) = self.begin_pause() else { return Reply::Idleness(before) };
        let until = Instant::now() + LOOK_MAX;
        let is_idle = loop {
            // A capture that begins now waits at the gate.
            match draining.look(|| self.captures().under_way()) {
                Ok(activity) if activity.is_idle => break true,
                Ok(activity) if activity.inside > 0 => break false,
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "the devices were not looked at");
                    break false;
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            draining.wait_for_change(left, self.calling_off.receiver());
        };
        // A thread that has come to the gate since has something to launch.
        let is_drained = is_idle && self.gate().mark() == mark;
        self.set_progress(Progress::Rest(draining.reopen().done.end()));
        if is_drained {
            self.idle.note_drained(mark);
        }
        Reply::Idleness(self.idle.look())
    }

    /// Maps again what was unmapped, and runs on. Nobody else is needed for that, also when others have died meanwhile.
    /// Undoes what is under way, and nothing where nothing is.
    pub(super) fn abort(&self) -> Result<PhaseReport, Failure> {
        match self.lifecycle.state() {
            MemberState::Offloading => self.abort_pause(),
            MemberState::Restoring => self.abort_resume(),
            MemberState::Active => {
                self.cut.release();
                Ok(PhaseReport::default())
            }
            MemberState::Paused | MemberState::Deep => Ok(PhaseReport::default()),
            MemberState::Faulted => Err(faulted()),
        }
    }

    fn abort_pause(&self) -> Result<PhaseReport, Failure> {
        let undone = match self.take_progress() {
            Progress::Draining(draining, _) => Ok(draining.reopen()),
            Progress::Quiesced(quiesced, selection) => {
                return quiesced.reopen().map_or_else(
                    |Failed { state, error }| {
                        self.set_progress(Progress::Quiesced(*state, selection));
                        Err(not_undone_yet(&pool_failure(&error)))
                    },
                    |undone| self.run_again(undone),
                );
            }
            Progress::Leaving(leaving) => leaving.undo(),
            Progress::Prepared(prepared) => prepared.undo(),
            progress @ (Progress::Taken
            | Progress::Rest(_)
            | Progress::Departing(..)
            | Progress::Released(..)
            | Progress::Frozen(_)
            | Progress::Arriving(..)
            | Progress::Returning(_)
            | Progress::Restored(_)) => return Err(self.out_of_turn(progress)),
        };
        let undone = undone.map_err(|Failed { state, error }| {
            self.set_progress(Progress::Leaving(*state));
            not_undone_yet(&pool_failure(&error))
        })?;
        self.run_again(undone)
    }

    /// A pause has come to nothing.
    fn run_again(&self, Undone { done, log, spare }: Undone<D>) -> Result<PhaseReport, Failure> {
        if self.stood_without_tags() {
            self.lifecycle.transition(Event::RestUndone)?;
            self.set_progress(Progress::Rest(done.end()));
        } else {
            self.lifecycle.transition(Event::PauseUndone)?;
            self.set_progress(Progress::Rest(done.end()));
            self.cut.release();
        }
        drop(spare);
        Ok(report(log))
    }
}

pub(super) struct DeviceBytes {
    device: DeviceOrdinal,
    uuid: String,
    bytes: u64,
}

pub(super) fn report(log: StepLog) -> PhaseReport {
    PhaseReport {
        driver_calls: log.driver_calls,
        bytes: log.bytes,
        steps: log.steps.into_iter().map(|step| (step.name.to_owned(), step.elapsed_us)).collect(),
        kept: log.kept,
        notes: log.notes,
        ..PhaseReport::default()
    }
}
