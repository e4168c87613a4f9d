//! The work of a process in each phase. It runs on the worker thread, one phase at a time.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;
use vmm_pool::gate::Call;
use vmm_pool::{
    After, Copies, Done, Draining, Failed, FromOffloaded, Keeper, NotShut, Origin, PinnedBytes,
    Quiesced, Schedule, Selection, Shut, Undone,
};

use super::Executor;
use super::participants::{captures, may_close};
use super::reports::{PhaseResult, deltas, known, report, staged};
use crate::failures::{
    PID, drain_failure, failed_inside, faulted, not_undone_yet, pool_failure, wrong_state,
};
use crate::progress::Progress;
use sublet_protocol::host_memory::HostNeed;
use sublet_protocol::phase::{Action, Window};
use sublet_protocol::references::{References, Stay};
use sublet_protocol::scope::{Scope, TagNames};
use sublet_protocol::state::Event;
use sublet_protocol::time::micros;
use sublet_protocol::wire::{
    Drained, Failure, FailureKind, Hold, MemberState, Order, Phase, PhaseAnswer, PhaseReport, Reply,
};

/// The longest time that the gate stays closed for a look at the devices.
const LOOK_MAX: Duration = Duration::from_millis(10);

impl<D: Driver> Executor<D> {
    /// Does the phase of `round` that `order` requests, and answers. An order to settle settles that round; none if no action
    /// is under way.
    pub(crate) fn run_phase(
        &mut self,
        round: Option<u64>,
        order: &Order,
        deadline: Instant,
    ) -> Reply {
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
            self.end_round(round);
        }
        let elapsed_us = micros(begin.elapsed());
        match outcome {
            Ok(mut report) => {
                report.elapsed_us = elapsed_us;
                tracing::debug!(?phase, elapsed_us, bytes = report.bytes, "phase");
                self.member.phase_log.record(phase, &report);
                Reply::PhaseDone(phase, PhaseAnswer { report, drained })
            }
            Err(failure) => {
                // The process that ordered the phase reports it. The job's own log only has losses of the job.
                if failure.kind == FailureKind::Faulted {
                    tracing::error!(?phase, elapsed_us, "{failure}");
                } else {
                    tracing::info!(?phase, elapsed_us, "{failure}");
                }
                self.refuse(failure)
            }
        }
    }

    /// The answer of a failed step. If the failure lost the context, the process becomes faulted.
    pub(super) fn refuse(&mut self, failure: Failure) -> Reply {
        if failure.kind == FailureKind::Faulted && self.lifecycle.state() != MemberState::Faulted {
            self.stand_faulted();
        }
        Reply::Failed(failure)
    }

    /// Holds the process on the way to a cut, and reports its position.
    pub(super) fn run_cut(&self, holder: u64, hold: Hold, asked: u64, until: Instant) -> Reply {
        if let Err(failure) = self.lifecycle.expect(MemberState::Active) {
            return Reply::Failed(failure);
        }
        let cut = &self.member.cut;
        let held = cut.hold(holder, hold.limits);
        let captures = || self.member.captures().under_way();
        let report = held.then(|| cut.watch(hold.seen, asked, until, &captures)).flatten();
        match report {
            Some(report) => Reply::Cut(Box::new(report)),
            None => Reply::Failed(wrong_state("the hold ended with its holder".to_owned())),
        }
    }

    /// Marks the process as faulted: the context is lost, and Sublet cannot restore it. The application's own calls are let
    /// through, so that the driver reports the loss to it, and it ends.
    fn stand_faulted(&mut self) {
        // Every state has this transition.
        if let Err(error) = self.lifecycle.transition(Event::Lost) {
            tracing::error!(%error, "a lost context was not recorded");
        }
        mem::take(&mut self.progress).abandon();
        // A state that a panic dropped has returned the keeper too.
        if let Some(keeper) = self.pool.keeper() {
            keeper.let_through_for_good();
        } else {
            tracing::error!("calls stay held back: something is still under way");
        }
        self.let_nccl_through();
        self.member.cut.release();
    }

    /// Handles an unforeseen failure in the code of `phase`, or of a look at the cut. The extent of its work is not known, so
    /// the process is faulted; it is not left waiting.
    pub(crate) fn fail_inside(&mut self, phase: Option<Phase>, panic: &str) -> Reply {
        let failure = failed_inside(phase, panic);
        tracing::error!("{failure}");
        self.member.notes.add(failure.message.clone());
        // The contexts are off the devices: calls that were let through would end the process. Apart from a thaw, no order to
        // such a process calls the driver, so it stays as before.
        let is_frozen = self.lifecycle.state() == MemberState::Deep && phase != Some(Phase::Thaw);
        if !is_frozen {
            self.stand_faulted();
        }
        Reply::Failed(failure)
    }

    fn close_gate(
        &mut self,
        scope: &Scope,
        (is_deep, stands): (bool, bool),
        deadline: Instant,
    ) -> PhaseResult {
        let stood = *scope == Scope::Whole && self.stood_without_tags();
        self.lifecycle.expect(if stood { MemberState::Paused } else { MemberState::Active })?;
        may_close(&self.member, scope, (is_deep, stands))?;
        let selection = self.leaving(scope, stands);
        let progress = if stood {
            let shut = self.shut::<FromOffloaded>(deadline)?;
            self.lifecycle.transition(Event::RestBegun)?;
            Progress::Quiesced(shut.into_quiesced(), selection)
        } else {
            let draining = self.begin_pause()?;
            self.lifecycle.transition(Event::PauseBegun)?;
            Progress::Draining(draining, selection)
        };
        self.member.phase_log.begin(Action::Pause);
        self.progress = progress;
        Ok(PhaseReport::default())
    }

    /// Closes the gate for a pause, or for a look at the devices. Waits for no thread.
    pub(super) fn begin_pause(&mut self) -> Result<Draining<D>, Failure> {
        self.take_keeper()?.close().map_err(|failed| self.not_shut(failed))
    }

    pub(super) fn shut<W: Origin>(&mut self, deadline: Instant) -> Result<Shut<D, W>, Failure> {
        let keeper = self.take_keeper()?;
        let called_off = || self.member.calling_off.is_raised();
        keeper.shut(deadline, called_off).map_err(|failed| self.not_shut(failed))
    }

    /// Takes the keeper for an action that begins while no other is under way.
    pub(super) fn take_keeper(&mut self) -> Result<Keeper<D>, Failure> {
        let progress = mem::take(&mut self.progress);
        if matches!(progress, Progress::Taken) {
            return self.pool.keeper().ok_or_else(|| self.out_of_turn(progress));
        }
        progress.into_keeper().map_err(|other| self.out_of_turn(*other))
    }

    /// Restores the keeper after a failed close: the gate is as it was.
    fn not_shut(&mut self, Failed { state, error }: Failed<Keeper<D>, NotShut>) -> Failure {
        self.progress = Progress::Rest(*state);
        let is_called_off = self.member.calling_off.is_raised();
        match &error {
            NotShut::StillInside(inside) => {
                let late = FailureKind::DrainTimeout;
                let kind = if is_called_off { FailureKind::CalledOff } else { late };
                // Threads of the process are inside driver calls that did not return before the deadline. The job
                // runs on. Pause between two steps of the job, or give a longer `--timeout`.
                kind.because(format!(
                    "process {PID}: {inside}; pause at a step boundary, or give a longer timeout"
                ))
            }
            NotShut::Elsewhere(_) => wrong_state(format!("process {PID}: {error}")),
        }
    }

    fn drain(&mut self, deadline: Instant) -> Result<(PhaseReport, Drained), Failure> {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (mut quiesced, selection, waited) = if self.stood_without_tags() {
            let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
            (quiesced, selection, 0)
        } else {
            self.quiesce(deadline)?
        };
        // Asked only now: from here on no work of the application can write there. Earlier answers are void, even if there is
        // no new one. The code that answers may need the lock of an allocator. If a thread at the gate has that lock, and the
        // interpreter's lock too, the code would wait for it until the resume.
        let waiting = quiesced.pool().gate().waiting();
        let is_locked = waiting.iter().any(|waiting| waiting.call == Call::Memory);
        let unused = if is_locked { Vec::new() } else { (self.member.config().unused)() };
        quiesced.mark_unused(&unused, &selection);
        // Lent memory refuses the pause, unless the coordinator leaves it on its device.
        self.pool.holdings().leave_lent(&selection);
        let references = self.pool.holdings().references(&selection);
        let partners = self.member.sharing.sharers().living(&references.holders);
        let references = References::new(references, partners);
        // The devices of all processes are idle, behind closed gates: no process writes to the memory from here on.
        let seen = quiesced.survey(&selection);
        let demand = quiesced.host_demand(&selection);
        let host = HostNeed { demand, limits: (self.member.config().host_limits)() };
        self.progress = Progress::Quiesced(quiesced, selection);
        let mut report = report(seen);
        report.driver_calls += 2 * waited as u64;
        Ok((report, Drained { host, references }))
    }

    /// Waits until no thread is inside a call and the devices are idle. Returns the number of waits.
    fn quiesce(&mut self, deadline: Instant) -> Result<(Quiesced<D>, Selection, usize), Failure> {
        let (mut draining, selection) = self.next_of(Progress::into_draining)?;
        if let Err(failure) = self.clear(&mut draining, deadline) {
            self.progress = Progress::Draining(draining, selection);
            return Err(failure);
        }
        match draining.drain(deadline, self.member.calling_off.receiver()) {
            Ok((quiesced, waited)) => Ok((quiesced, selection, waited)),
            Err(Failed { state, error }) => {
                let failure = drain_failure(&error, &state.pool().gate().waiting());
                self.progress = Progress::Draining(*state, selection);
                Err(failure)
            }
        }
    }

    /// Waits until no thread is inside a call. A capture that began before ends the pause, and none can begin after.
    fn clear(&mut self, draining: &mut Draining<D>, deadline: Instant) -> Result<(), Failure> {
        let called_off = self.member.calling_off.receiver();
        let cleared = draining.clear(deadline, called_off);
        cleared.map_err(|error| drain_failure(&error, &draining.pool().gate().waiting()))?;
        captures(&self.member).map_or(Ok(()), Err)
    }

    /// Takes out the state that the requested step needs, if the step follows the one before.
    pub(super) fn next_of<T>(
        &mut self,
        take: impl FnOnce(Progress<D>) -> Result<T, Box<Progress<D>>>,
    ) -> Result<T, Failure> {
        take(mem::take(&mut self.progress)).map_err(|progress| self.out_of_turn(*progress))
    }

    /// Restores the state that a failed step has left.
    pub(super) fn put_back<S>(
        &mut self,
        Failed { state, error }: Failed<S>,
        progress: impl FnOnce(S) -> Progress<D>,
    ) -> Failure {
        self.progress = progress(*state);
        pool_failure(&error)
    }

    /// Restores `progress`, because the requested step does not follow it.
    pub(super) fn out_of_turn(&mut self, progress: Progress<D>) -> Failure {
        self.progress = progress;
        // Two commands worked on the process simultaneously, or one ended early. No contents are lost. The next
        // `sublet pause` or `sublet resume` repairs the state.
        wrong_state(format!("process {PID}: this step does not follow the one before"))
    }

    /// Prepares the release by `schedule`. If contents are not saved by then, the report has the bytes to release by device, so
    /// that another tenant can count on them.
    fn prepare(&mut self, stays: &[Stay], copies: Copies, schedule: Schedule) -> PhaseResult {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
        self.member.sharing.sharers().forget_ended();
        let stays: Vec<_> = stays.iter().map(|stay| (stay.id, stay.reason)).collect();
        let budget = self.member.host_budget();
        let prepared = quiesced.prepare(selection, &stays, copies, budget, schedule);
        let (prepared, log) =
            prepared.map_err(|failed| self.put_back(failed, Progress::Leaving))?;
        let leaving = match schedule {
            Schedule::SaveFirst => BTreeMap::new(),
            Schedule::SaveMeanwhile => self.pool.holdings().resident_bytes(prepared.selection()),
        };
        self.progress = Progress::Prepared(prepared);
        Ok(PhaseReport { devices: deltas(&self.pool, leaving), ..report(log) })
    }

    /// Releases one window: the point of no return of a pause by stages, or a step after it.
    pub(super) fn release_window(&mut self, window: &Window) -> PhaseResult {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (mut departing, _) =
            self.next_of(|progress| progress.into_departing(Some(window.stage)))?;
        let moved = departing.release_stage(&known(&self.pool, window));
        let left = departing.left();
        self.progress = Progress::Departing(departing, window.stage.saturating_add(1));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(staged(&self.pool, moved, left))
    }

    /// Releases all that is left: the point of no return of a pause, or a step after it. The process is then paused, or runs on
    /// without some tags.
    pub(super) fn release(&mut self, rest: Schedule) -> PhaseResult {
        self.lifecycle.expect(MemberState::Offloading)?;
        let (departing, next) = self.next_of(|progress| progress.into_departing(None))?;
        let selection = departing.selection().clone();
        let put_back = |state| Progress::Departing(Box::new(state), next);
        let released = departing.release(rest);
        let (done, moved) = released.map_err(|failed| self.put_back(failed, put_back))?;
        let stays = self.stand_released(selection, done)?;
        Ok(PhaseReport { stays, ..staged(&self.pool, moved, BTreeMap::new()) })
    }

    /// Ends `round` after its last step, whether that failed or not. A thread that requested a pause together with others waits
    /// until all have released. This process learns that from the step that follows.
    fn end_round(&mut self, round: Option<u64>) {
        if mem::take(&mut self.is_pausing) {
            self.member.phase_log.end_pause();
            self.member.asking.note_done(Action::Pause);
        }
        if let Some(round) = round {
            let mut rounds = self.member.rounds();
            rounds.last_step_taken(round, self.lifecycle.state().rests());
        }
    }

    /// Ends the release: the process is paused, or runs on without some tags. Reports the memory that stays.
    pub(super) fn stand_released(
        &mut self,
        selection: Selection,
        done: Done<D>,
    ) -> Result<Vec<PinnedBytes>, Failure> {
        let stays = self.pool.stays(&selection, true);
        let keeper = match selection.after_pause() {
            After::Running => {
                self.lifecycle.transition(Event::TagsReleased)?;
                // Before the gate opens: a call that waits there may be a launch.
                self.nccl_follows(&selection);
                let keeper = done.end();
                self.member.cut.release();
                keeper
            }
            After::Paused => {
                // Before others see the process as paused.
                self.lifecycle.stand_without(selection.stands_without().map(TagNames::from));
                self.lifecycle.transition(Event::Released)?;
                self.is_pausing = true;
                self.member.cut.pause();
                done.end()
            }
        };
        self.progress = Progress::Released(keeper, selection);
        Ok(stays)
    }

    /// Reports the free memory of the devices, after all members have released.
    fn verify(&mut self) -> PhaseResult {
        let (keeper, selection) = self.next_of(Progress::into_released)?;
        self.progress = Progress::Rest(keeper);
        let holdings = self.pool.holdings();
        if selection.is_by_tag() {
            // If the process runs on, it may have allocated new memory of the tags already.
            let devices = deltas(&self.pool, holdings.offloaded_bytes(&selection));
            return Ok(PhaseReport { devices, ..PhaseReport::default() });
        }
        self.lifecycle.expect(MemberState::Paused)?;
        let devices = deltas(&self.pool, holdings.resident_bytes(&selection));
        let notes = self.member.sharing.sharers().lost_imports();
        Ok(PhaseReport { devices, notes, ..PhaseReport::default() })
    }

    /// Checks whether the devices have work left, if nothing was launched for `quiet_us`. This is no step of a pause. A thread
    /// that reaches the gate at this moment waits for some milliseconds.
    pub(super) fn run_idle(&mut self, quiet_us: u64) -> Reply {
        let before = self.member.idle.look();
        let is_at_rest = matches!(self.progress, Progress::Rest(_));
        let may_look = is_at_rest
            && self.lifecycle.state() == MemberState::Active
            && self.member.captures().under_way() == 0;
        if before.is_drained || before.quiet_us < quiet_us || !may_look {
            return Reply::Idleness(before);
        }
        let mark = self.pool.gate().mark();
        let Ok(mut draining) = self.begin_pause() else { return Reply::Idleness(before) };
        let until = Instant::now() + LOOK_MAX;
        let is_idle = loop {
            // A capture that begins now waits at the gate.
            match draining.look(|| self.member.captures().under_way()) {
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
            draining.wait_for_change(left, self.member.calling_off.receiver());
        };
        // A thread that has reached the gate since then has something to launch.
        let is_drained = is_idle && self.member.gate().mark() == mark;
        self.progress = Progress::Rest(draining.reopen().done.end());
        if is_drained {
            self.member.idle.note_drained(mark);
        }
        Reply::Idleness(self.member.idle.look())
    }

    /// Undoes the action under way, if there is one: maps again what was unmapped, and runs on. That needs no other process,
    /// even if others have died meanwhile.
    pub(super) fn abort(&mut self) -> PhaseResult {
        match self.lifecycle.state() {
            MemberState::Offloading => self.abort_pause(),
            MemberState::Restoring => self.abort_resume(),
            MemberState::Active => {
                self.member.cut.release();
                Ok(PhaseReport::default())
            }
            MemberState::Paused | MemberState::Deep => Ok(PhaseReport::default()),
            MemberState::Faulted => Err(faulted()),
        }
    }

    fn abort_pause(&mut self) -> PhaseResult {
        let undone = match mem::take(&mut self.progress) {
            Progress::Draining(draining, _) => Ok(draining.reopen()),
            Progress::Quiesced(quiesced, selection) => quiesced.reopen().map_err(|failed| {
                self.put_back(failed, |quiesced| Progress::Quiesced(quiesced, selection))
            }),
            Progress::Leaving(leaving) => {
                leaving.undo().map_err(|failed| self.put_back(failed, Progress::Leaving))
            }
            Progress::Prepared(prepared) => {
                prepared.undo().map_err(|failed| self.put_back(failed, Progress::Leaving))
            }
            progress @ (Progress::Taken
            | Progress::Rest(_)
            | Progress::Departing(..)
            | Progress::Released(..)
            | Progress::Frozen(_)
            | Progress::Arriving(..)
            | Progress::Returning(_)
            | Progress::Restored(_)) => return Err(self.out_of_turn(progress)),
        };
        self.run_again(undone.map_err(|failure| not_undone_yet(&failure))?)
    }

    /// Ends an undone pause.
    fn run_again(&mut self, Undone { done, log, spare }: Undone<D>) -> PhaseResult {
        if self.stood_without_tags() {
            self.lifecycle.transition(Event::RestUndone)?;
            self.progress = Progress::Rest(done.end());
        } else {
            self.lifecycle.transition(Event::PauseUndone)?;
            self.progress = Progress::Rest(done.end());
            self.member.cut.release();
        }
        drop(spare);
        Ok(report(log))
    }
}
