//! One leg of a transaction: the pause or resume of one tenant, from the greeting to the account.
//!
//! A pause or resume that an earlier coordinator left half done is settled first. If a pause or resume ends before its point of
//! no return, all members undo it, and the error has the reason.

use std::time::{Duration, Instant};

use super::agreement::Agreed;
use super::cast::{Cast, OnFailure};
use super::contexts::Contexts;
use super::conversation::Wait;
use super::coordinator::{Coordinator, Held};
use super::cutting::Ranks;
use super::guards::{self, ON_REFUSAL, Refused, Tries};
use super::lending::Loans;
use super::needs::{Gives, name_holders, needs, short_devices};
use super::options::Options;
use super::peers::{Peers, Question};
use super::report::{Event, MemberFailure, Outcome, Report, Step};
use super::round::Round;
use super::stepping::Gated;
use super::trouble::{Stop, Trouble};
use sublet_protocol::run_dir::{CoordinatorLock, RunDirError};
use sublet_protocol::time::{micros, millis};
use sublet_protocol::wire::{
    Action, AwaitConsent, Drain, FailureKind, GiveUp, Lending, MemberState, Phase, PhaseReport,
};
use sublet_protocol::{phase::Stage, scope::Scope};

/// The time limit for telling a member that its wait is in vain.
const TELL_TIMEOUT: Duration = Duration::from_secs(1);

/// A tenant's pause or resume, while its lock is held.
#[derive(Debug)]
pub struct Session<'a> {
    /// The tenant's processes.
    pub cast: Cast<'a>,
    /// The pause or resume, from which its orders are made.
    pub round: Round<'a>,
    /// The account so far.
    pub report: Report,
    /// The members that take part, by their indices; none if there is no work.
    pub members: Vec<usize>,
    lock: &'a CoordinatorLock,
    /// One sentence for each communicator that has ranks in no live process of the tenant.
    absent: Vec<String>,
    /// The time of the first message to a process.
    began: Instant,
}

impl<'a> Session<'a> {
    /// Connects to all live members, learns their identities, makes them settle half-done work, and chooses the members that
    /// take part.
    ///
    /// # Errors
    /// [`Trouble`]; nothing has moved.
    pub fn open(
        held: &'a Held<'_>,
        options: &'a Options,
        action: Action,
        progress: &'a mut dyn FnMut(Event<'_>),
    ) -> Result<Self, Trouble> {
        let began = Instant::now();
        let mut round = Round::new(options, action);
        let mut cast = Cast::open((&held.dir, &held.lock), options, action, progress)?;
        cast.recover(&round)?;
        let members = round.members(&mut cast)?;
        let mut report = Report::new(held.dir.tenant(), action);
        report.stands_still = round.stands;
        if cast.peers.dead() > 0 {
            report.notes.push(format!(
                "{} process(es) of the tenant had ended before; what they left behind was removed",
                cast.peers.dead()
            ));
        }
        Ok(Self { cast, round, report, members, lock: &held.lock, absent: Vec::new(), began })
    }

    /// The outcome of a session without work, except for the contexts that a deep pause takes.
    pub(super) fn rest(mut self) -> Outcome {
        if self.round.action() == Action::Resume {
            return Outcome::AlreadyActive;
        }
        let stays = self.round.stays(&self.cast.peers);
        self.report.set_stays(stays.clone());
        let contexts = self.contexts().ok().filter(|_| self.round.is_deep());
        if !contexts.is_some_and(|contexts| contexts.take_rest(&mut self)) {
            return Outcome::AlreadyPaused { stays };
        }
        self.report.wall_us = micros(self.began.elapsed());
        self.into_outcome()
    }

    /// Leads the members through all phases.
    ///
    /// # Errors
    /// [`Trouble`], after all members have undone their steps.
    pub fn run(mut self, tries: &Tries) -> Result<Outcome, Trouble> {
        if self.round.action() == Action::Resume {
            self.bring_contexts_back()?;
        }
        if let Err(stop) = self.prepare(tries) {
            let error = self.undo(stop);
            if error.left_unchanged() {
                self.take_contexts_again();
            }
            return Err(error);
        }
        self.commit();
        self.account(self.began);
        self.take_contexts(self.began);
        tracing::info!(wall_us = self.report.wall_us, losses = self.report.losses.len(), "done");
        Ok(self.into_outcome())
    }

    /// The account of the session.
    pub fn into_outcome(self) -> Outcome {
        Outcome::Completed(Box::new(self.report))
    }

    /// Does all steps that can be undone: consent, the phases that prepare, and a last check of the members.
    ///
    /// # Errors
    /// The reason for the end; nothing is undone yet.
    pub fn prepare(&mut self, tries: &Tries) -> Result<(), Stop> {
        guards::ask(&guards::BEFORE, self, tries)?;
        self.check_lock().map_err(|_| Stop::LockGone)?;
        self.take_all(tries)
    }

    /// Waits until all applications have requested the action too.
    pub(super) fn await_consent(&mut self) -> Result<(), Stop> {
        let timeout = self.cast.options.consent.unwrap_or_default();
        let question = AwaitConsent { action: self.round.action(), timeout_ms: millis(timeout) };
        let said = self.cast.step(&question, &self.members, timeout, OnFailure::Stop).of_all();
        said.map(drop).map_err(Stop::from)
    }

    /// Does this coordinator lead the tenant, as far as others can see? Checked before a first step is done.
    ///
    /// # Errors
    /// [`RunDirError::LockGone`].
    pub fn check_lock(&self) -> Result<(), Trouble> {
        let tenant = self.cast.tenant();
        if self.lock.is_named() { Ok(()) } else { Err(RunDirError::LockGone { tenant }.into()) }
    }

    /// Does the phases that prepare.
    ///
    /// # Errors
    /// The reason for the end; nothing is undone yet.
    pub fn take_all(&mut self, tries: &Tries) -> Result<(), Stop> {
        let taken = self.take_each(tries);
        taken.map_err(|stop| stop.naming(&self.absent))?;
        self.report.notes.append(&mut self.absent);
        let next = Step::Phase(self.round.action().commit());
        Ok(self.check_alive(next)?)
    }

    /// Does the phases that prepare, one after the other.
    fn take_each(&mut self, tries: &Tries) -> Result<(), Stop> {
        for phase in self.round.prepares() {
            if phase.is_at_cut() && !self.round.acts_alone() {
                self.stop_at_cut(phase)?;
                continue;
            }
            let began = Instant::now();
            let done = if phase == Phase::Drain {
                self.drain(tries)?
            } else {
                self.take(&self.round.question(phase), phase)?
            };
            self.report.add(self.cast.summary(phase, began.elapsed(), done));
        }
        Ok(())
    }

    /// Brings the ranks to a cut, and tells the members to do `phase` there.
    fn stop_at_cut(&mut self, phase: Phase) -> Result<(), Stop> {
        let mut ranks = Ranks::new(&mut self.cast, &self.members);
        let stopped = ranks.stop(&mut self.round, phase);
        let (cut, absent) = ranks.into_account();
        self.absent = absent;
        let (closed, drain) = stopped?;
        self.report.cut = Some(cut);
        self.report.drain = Some(drain);
        self.report.add(closed);
        Ok(())
    }

    /// Waits until the devices are idle and no other process has any of the memory open. Then makes the decision that all
    /// processes follow.
    fn drain(&mut self, tries: &Tries) -> Result<Vec<(usize, PhaseReport)>, Stop> {
        if self.report.drain.is_none() {
            let mut gated = Gated::new(&mut self.cast, self.round.number);
            self.report.drain = Some(gated.drain(&self.members, None)?);
        }
        guards::ask(&guards::BEHIND_GATES, self, tries)?;
        let done = self.take(&Drain(self.round.question(Phase::Drain)), Phase::Drain)?;
        let (done, said): (Vec<_>, Vec<_>) = done
            .into_iter()
            .map(|(index, (report, said))| ((index, report), (index, said)))
            .unzip();
        self.round.agreed = Agreed::of(&self.cast, &self.round, &said)?;
        Ok(done)
    }

    /// Returns the answers of all members; the first failure ends it.
    fn take<Q: Question>(
        &mut self,
        question: &Q,
        phase: Phase,
    ) -> Result<Vec<(usize, Q::Answer)>, Stop> {
        let timeout = self.cast.options.phase_timeout(phase);
        let done = self.cast.step(question, &self.members, timeout, OnFailure::Stop).of_all()?;
        if self.cast.options.is_called_off() { Err(Stop::CalledOff) } else { Ok(done) }
    }

    /// Does all phases that cannot be undone, with the members that are not lost meanwhile.
    pub fn commit(&mut self) {
        let mut saving = self.round.agreed.saving;
        let mut left = self.members.clone();
        for phase in self.round.action().phases(Stage::Commit) {
            let began = Instant::now();
            let mut order = self.round.question(phase);
            if let Some(saving) = saving.take() {
                // The phase cannot be undone, and a member that saves is not lost.
                order.timeout_ms = order.timeout_ms.max(millis(phase.timeout() + saving));
            }
            let result = self.cast.take(&order, &left, OnFailure::WaitForAll);
            left.retain(|index| !result.failures.iter().any(|(failed, _)| failed == index));
            self.report.losses.extend(result.failures.into_iter().map(|(_, failure)| failure));
            self.report.add(self.cast.summary(phase, began.elapsed(), result.done));
        }
    }

    /// Looks for members that have ended meanwhile, before `next` is sent to them.
    ///
    /// # Errors
    /// Those members.
    pub fn check_alive(&mut self, next: Step) -> Result<(), Vec<MemberFailure>> {
        let (peers, members) = (&mut self.cast.peers, self.members.iter());
        let dead: Vec<_> = members.filter_map(|it| peers.check_alive(*it, next).err()).collect();
        if dead.is_empty() { Ok(()) } else { Err(dead) }
    }

    /// The reports of each member that shares memory with other tenants.
    ///
    /// # Errors
    /// The members that do not answer.
    pub fn lendings(&mut self) -> Result<Vec<(usize, Lending)>, Vec<MemberFailure>> {
        self.loans().of_others()
    }

    pub(super) fn loans(&mut self) -> Loans<'_, 'a> {
        Loans::new(&mut self.cast, self.round.scope(), &self.members)
    }

    /// Refuses a deep pause that could not be completed, before anything moves.
    ///
    /// # Errors
    /// [`Trouble::NotDeep`].
    pub fn check_contexts(&mut self) -> Result<(), Trouble> {
        if !self.round.is_deep() {
            return Ok(());
        }
        let checked = if *self.round.scope() == Scope::Whole {
            self.contexts().and_then(|contexts| contexts.check(self))
        } else {
            let why = "its processes run on without the memory of a tag, and need their contexts";
            Err(why.to_owned())
        };
        checked.map_err(|why| Trouble::NotDeep { tenant: self.cast.tenant(), why })
    }

    /// Access to the contexts of the processes, or the reason why there is none.
    fn contexts(&self) -> Result<&'a dyn Contexts, String> {
        self.cast.options.contexts.as_deref().ok_or_else(|| {
            format!(
                "a process of a job cannot have the driver freeze processes, nor thaw them: the command can (sublet pause {0} --deep, sublet \
                 resume {0})",
                self.cast.tenant()
            )
        })
    }

    /// Takes the contexts off the devices after a deep pause is complete, and counts the time from `began`.
    pub fn take_contexts(&mut self, began: Instant) {
        if let Some(contexts) = self.contexts().ok().filter(|_| self.round.is_deep()) {
            contexts.take(self);
            self.report.wall_us = micros(began.elapsed());
        }
    }

    /// Restores the contexts that a resume needs.
    ///
    /// # Errors
    /// [`Trouble::Refused`].
    pub fn bring_contexts_back(&mut self) -> Result<(), Trouble> {
        let is_deep = |index: &usize| self.cast.peers.state(*index) == Some(MemberState::Deep);
        let deep: Vec<usize> = self.members.iter().copied().filter(is_deep).collect();
        if deep.is_empty() {
            return Ok(());
        }
        let brought = match self.contexts() {
            Ok(contexts) => contexts.bring_back(self, &deep),
            Err(why) => {
                let (step, kind) = (Step::Phase(Phase::Thaw), FailureKind::WrongState);
                let who = deep.iter().map(|index| self.cast.peers.who(*index));
                Err(who.map(|who| MemberFailure::new(who, step, kind, &*why)).collect())
            }
        };
        brought.map_err(|failures| {
            Trouble::refused(self.cast.tenant(), (Action::Resume, false), failures)
        })
    }

    /// Takes the contexts off the devices again that were restored for a failed resume.
    pub fn take_contexts_again(&mut self) {
        if let Ok(contexts) = self.contexts() {
            contexts.take_again(self);
        }
    }

    /// Undoes all work in the members and makes the error from `stop`. Applications that wait for the action together return
    /// with the same error.
    pub fn undo(&mut self, stop: Stop) -> Trouble {
        let error = self.roll_back(stop);
        if self.cast.options.consent.is_some() {
            let news = GiveUp { action: self.round.action(), why: error.to_string() };
            self.cast.peers.tell(&self.members, news, TELL_TIMEOUT);
        }
        error
    }

    fn roll_back(&mut self, stop: Stop) -> Trouble {
        let action = self.round.action();
        let mut failures = stop.failures();
        self.cast.tell(Event::RollingBack { failures: &failures });
        // A member that still waits for its application has done nothing yet, and stops when we close the connection.
        for index in &self.members {
            if self.cast.peers.owes(*index, Step::Consent(action)) {
                self.cast.peers.drop_link(*index);
            }
        }
        let up = |index: &usize| self.cast.peers.is_up(*index);
        let targets: Vec<usize> = self.members.iter().copied().filter(up).collect();
        let undo = self.round.question(Phase::Abort);
        let (mut undone, mut undo_failures) = (Vec::new(), Vec::new());
        for index in targets {
            // A silent member still gets the message, but not another full wait.
            let mut timeout = self.cast.options.reply_margin;
            if !self.cast.peers.is_overdue(index) {
                timeout += self.cast.options.phase_timeout(Phase::Abort);
            }
            undo_failures.extend(self.cast.peers.ask(index, &undo, timeout).err());
        }
        let failed_step = failures.first().map(|failure| failure.step);
        // Late news of the failed step is part of the reason. So is the loss of a member meanwhile.
        let is_why = |failure: &MemberFailure| {
            Some(failure.step) == failed_step && failure.failure.kind != FailureKind::CalledOff
        };
        Peers::gather(&mut [&mut self.cast.peers], Wait::Others, None, |_, _, answer| {
            let peer = answer.peer;
            if answer.step != undo.step() {
                failures.extend(answer.failure().filter(is_why));
                return Wait::Others;
            }
            match answer.to(&undo) {
                Ok(_) => undone.push(peer),
                // The step was under way, and another order undoes it.
                Err(failure) if failure.failure.kind == FailureKind::CalledOff => {}
                Err(failure) => undo_failures.push(failure),
            }
            Wait::Others
        });
        let out_of_memory = failures
            .iter()
            .any(|member| matches!(member.failure.kind, FailureKind::OutOfDeviceMemory { .. }));
        let mut shortages = Vec::new();
        if out_of_memory {
            let needs = needs(&mut self.cast, self.round.scope(), &undone).done;
            shortages = short_devices(needs.iter().flat_map(|(_, needed)| &needed.devices));
        }
        let tenant = self.cast.tenant();
        let runs = self.members.first().is_some_and(|index| self.cast.peers.runs(*index));
        match stop {
            Stop::Joined if undo_failures.is_empty() => Trouble::Joined { tenant },
            Stop::LockGone if undo_failures.is_empty() => RunDirError::LockGone { tenant }.into(),
            Stop::CalledOff => Trouble::CalledOff { tenant, action, runs, undo_failures },
            stop @ (Stop::Failed(_) | Stop::HostShort(..) | Stop::Joined | Stop::LockGone) => {
                Trouble::Refused {
                    tenant,
                    action,
                    runs,
                    shortages,
                    host_short: stop.host_shortage(),
                    failures,
                    undo_failures,
                }
            }
        }
    }

    /// Completes the account of a finished leg, with the time since `began`.
    pub fn account(&mut self, began: Instant) {
        self.report.wall_us = micros(began.elapsed());
        let late = if self.round.acts_alone() { 0 } else { self.cast.newcomers().len() };
        if late > 0 {
            // They took no part in the action.
            self.report.notes.push(format!(
                "{late} process(es) joined the tenant meanwhile and took no part; run the command again"
            ));
        }
        let Scope::Tags { tags, .. } = self.round.scope() else { return };
        let is_empty = self.report.devices.iter().all(|device| device.bytes == 0);
        if self.round.action() == Action::Pause && tags.names_nccl() == (true, 0) && is_empty {
            // No memory was released, and yet calls wait.
            self.report.notes.push(
                "NCCL had no memory in these processes at that moment, so nothing left; calls into NCCL wait until its \
                 resume all the same"
                    .to_owned(),
            );
        }
    }
}

impl Coordinator {
    /// Makes all active processes of the tenant release their device memory.
    ///
    /// Processes that are paused already stay so. Returns when others can use the memory.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then active as before, unless the error says otherwise.
    pub fn pause(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        self.act(Action::Pause, progress)
    }

    /// Takes the contexts of a paused tenant off the devices, if the options request a deep pause. A tenant that runs is not
    /// changed.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then paused as before.
    pub fn deepen(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        let held = self.hold(Action::Pause)?;
        let mut session = Session::open(&held, &self.options, Action::Pause, progress)?;
        if !session.members.is_empty() {
            return Ok(Outcome::AlreadyActive);
        }
        session.check_contexts()?;
        Ok(session.rest())
    }

    /// Makes all paused processes of the tenant restore their device memory, at its old addresses.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then paused as before, contents kept, unless the error says
    /// otherwise. [`Trouble::missing_device_bytes`] tells when memory was short.
    pub fn resume(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        self.act(Action::Resume, progress)
    }

    fn act(
        &mut self,
        action: Action,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Trouble> {
        let span = tracing::info_span!("tenant.act", tenant = %self.tenant, ?action);
        let _entered = span.enter();
        self.hold(action)?.act(action, progress)
    }

    /// Adds to `error` the tenants that hold the devices that are too full for this tenant. Memory in `gives` counts as free.
    pub fn with_holders(&self, mut error: Trouble, gives: Option<Gives<'_>>) -> Trouble {
        if let Trouble::Refused { shortages, .. } = &mut error {
            name_holders(shortages, &self.tenant, &self.run_dir, gives);
        }
        error
    }
}

impl Held<'_> {
    /// Pauses or resumes the tenant, without another leg.
    ///
    /// # Errors
    /// As [`Coordinator::pause`] and [`Coordinator::resume`].
    pub fn act(
        &self,
        action: Action,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Trouble> {
        let (mut outcome, notes) = attempt(&[self], progress, |tries, progress| {
            let mut session = Session::open(self, &self.coordinator.options, action, progress)?;
            session.check_contexts()?;
            self.finish(session, tries)
        })?;
        outcome.note(notes);
        Ok(outcome)
    }

    /// Completes the leg of `session`.
    ///
    /// # Errors
    /// Those of [`Session::run`].
    pub fn finish(&self, session: Session<'_>, tries: &Tries) -> Result<Outcome, Trouble> {
        if session.members.is_empty() {
            return Ok(session.rest());
        }
        session.run(tries).map_err(|error| self.coordinator.with_holders(error, None))
    }
}

/// Repeats `once` as long as a feature helps the tenant that its error names, which is one of `legs`. Returns the result, and
/// notes about that help.
///
/// # Errors
/// The last error, if nothing helps.
pub fn attempt<T>(
    legs: &[&Held<'_>],
    progress: &mut dyn FnMut(Event<'_>),
    mut once: impl FnMut(&Tries, &mut dyn FnMut(Event<'_>)) -> Result<T, Trouble>,
) -> Result<(T, Vec<String>), Trouble> {
    let mut tries = Tries::default();
    loop {
        let error = match once(&tries, progress) {
            Ok(done) => return Ok((done, tries.room.map_or_else(Vec::new, |room| room.notes()))),
            Err(error) => error,
        };
        let about = |held: &&&Held<'_>| error.is_about(&held.coordinator.tenant);
        let held = legs.iter().find(about).unwrap_or(&legs[0]);
        let mut refused = Refused { held, error: &error, progress };
        if !ON_REFUSAL.iter().any(|(_, helps)| helps(&mut tries, &mut refused)) {
            return Err(error);
        }
    }
}
