//! The processes of one tenant while its lock is held. A step of theirs is a question to all of them, and their answers.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::conversation::{Inquiry, Next};
use super::interrupt::Interrupt;
use super::options::{Options, TakesPart};
use super::peers::{Peers, Question, Reached, gone, reach, with_source};
use super::report::{Event, MemberFailure, MemberPhase, PhaseSummary, Step, Who};
use super::round::Round;
use super::trouble::{Trouble, silence};
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{CoordinatorLock, MemberSocket, TenantDir};
use sublet_protocol::scope::Scope;
use sublet_protocol::time::micros;
use sublet_protocol::wire::{Action, Hello, MemberState, Phase, PhaseReport, TakePhase};

/// The processes of a tenant, the connections to them, and the receiver of progress events.
pub struct Cast<'a> {
    dir: &'a TenantDir,
    progress: &'a mut dyn FnMut(Event<'_>),
    /// The time limits of the steps, among others.
    pub options: &'a Options,
    /// The processes.
    pub peers: Peers,
}

/// Do the answers of slow members matter once one member has failed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// No: undo immediately.
    Stop,
    /// Yes: the step cannot be undone.
    WaitForAll,
}

/// The answers to one step, and the members that gave none.
#[derive(Debug)]
pub struct StepResult<T> {
    /// Answers, by the indices of the members.
    pub done: Vec<(usize, T)>,
    /// Failures, by the indices of the members.
    pub failures: Vec<(usize, MemberFailure)>,
}

impl<T> StepResult<T> {
    /// Returns all answers.
    ///
    /// # Errors
    /// The failures, if any member failed.
    pub fn of_all(self) -> Result<Vec<(usize, T)>, Vec<MemberFailure>> {
        let failures: Vec<_> = self.failures.into_iter().map(|(_, failure)| failure).collect();
        if failures.is_empty() { Ok(self.done) } else { Err(failures) }
    }
}

impl<'a> Cast<'a> {
    /// Connects to all live members and learns their identities.
    pub(super) fn open(
        (dir, lock): (&'a TenantDir, &CoordinatorLock),
        options: &'a Options,
        action: Action,
        progress: &'a mut dyn FnMut(Event<'_>),
    ) -> Result<Self, Trouble> {
        let mut cast = Self { dir, progress, options, peers: Peers::default() };
        dir.until_names_are_back(|| options.is_called_off());
        let deadline = Instant::now() + options.contact_timeout;
        for socket in dir.members()? {
            if matches!(options.takes_part, TakesPart::Alone(member) if member != socket.id) {
                continue;
            }
            let reached = reach(&socket, deadline)
                .map_err(|source| Trouble::Unreachable { tenant: dir.tenant().clone(), source })?;
            let is_dead = matches!(reached, Reached::Dead);
            cast.peers.add(dir, &socket, reached)?;
            if is_dead {
                cast.tell(Event::StaleRemoved { member: socket.id });
            }
        }
        cast.greet(action)?;
        if cast.peers.all().is_empty() {
            dir.remove_stale_holding(lock)?;
            return Err(Trouble::NoProcess { tenant: cast.tenant(), dead: cast.peers.dead() });
        }
        cast.check_versions()?;
        Ok(cast)
    }

    /// Asks every member for its identity, and leaves out dead ones. It can be called off: nothing has been done yet.
    fn greet(&mut self, action: Action) -> Result<(), Trouble> {
        let timeout = self.options.timeout.unwrap_or_default().max(self.options.contact_timeout);
        let result = self.step(&Hello, &self.peers.all(), timeout, OnFailure::WaitForAll);
        if self.options.is_called_off() {
            // Some members may not have answered yet, and would be left out.
            return Err(Trouble::called_off_before(self.tenant(), action));
        }
        let mut failures = result.failures;
        for (index, info) in result.done {
            let introduced = self.peers.introduce(index, info);
            failures.extend(introduced.err().map(|failure| (index, failure)));
        }
        failures.retain(|(index, _)| !self.peers.is_dead(*index, self.dir));
        if let Some((index, failure)) = failures.into_iter().next() {
            let is_silent = self.peers.is_overdue(index);
            let why = if is_silent { silence(&failure) } else { failure.to_string() };
            let (tenant, failure) = (self.tenant(), Box::new(failure));
            return Err(Trouble::NoGreeting { tenant, action, failure, why });
        }
        self.peers.drop_nameless();
        Ok(())
    }

    fn check_versions(&self) -> Result<(), Trouble> {
        let mut by_version: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for info in self.peers.infos() {
            by_version.entry(&info.version).or_default().push(info.pid.to_string());
        }
        if by_version.len() < 2 {
            return Ok(());
        }
        let texts: Vec<_> = by_version
            .iter()
            .map(|(version, pids)| format!("{version} in process {}", pids.join(", ")))
            .collect();
        Err(Trouble::VersionsDiffer { tenant: self.tenant(), versions: texts.join("; ") })
    }

    /// Makes every member that a dead coordinator left half-way finish or undo its part, so that every member is active or
    /// paused. The members decide among themselves which of the two ([`Phase::Settle`]).
    pub(super) fn recover(&mut self, round: &Round<'_>) -> Result<(), Trouble> {
        let half_way = self.peers.those(|info| match info.state {
            MemberState::Offloading | MemberState::Restoring => true,
            MemberState::Active | MemberState::Paused | MemberState::Deep => {
                info.held || info.in_round
            }
            MemberState::Faulted => false,
        });
        for index in &half_way {
            self.tell(Event::Recovering { who: self.peers.who(*index) });
        }
        if !half_way.is_empty() {
            let settle = round.question(Phase::Settle);
            let mut result = self.take(&settle, &half_way, OnFailure::WaitForAll);
            // A member that ended meanwhile is not half-way any more.
            result.failures.retain(|(index, _)| !self.peers.is_dead(*index, self.dir));
            if let Err(failures) = result.of_all() {
                return Err(Trouble::Unrecovered { tenant: self.tenant(), failures });
            }
            self.peers.drop_ended();
            self.greet(round.action())?;
        }
        match self.peers.infos().find(|info| info.state == MemberState::Faulted) {
            Some(info) => Err(Trouble::Faulted { tenant: self.tenant(), pid: info.pid }),
            None => Ok(()),
        }
    }

    /// Does this member share memory with processes outside a pause of `scope`? Either it named a family when it was greeted,
    /// or the pause by tag is for another process's memory.
    pub(super) fn shares(&self, scope: &Scope, index: usize) -> bool {
        let info = self.peers.info(index);
        info.is_some_and(|info| info.family.is_some() || !scope.is_about(info.id))
    }

    /// The tenant's name.
    pub fn tenant(&self) -> TenantName {
        self.dir.tenant().clone()
    }

    /// Reports `event` to the receiver of progress.
    pub fn tell(&mut self, event: Event<'_>) {
        (self.progress)(event);
    }

    /// Tells `members` to do the phase of `order`, within its time.
    pub fn take(
        &mut self,
        order: &TakePhase,
        members: &[usize],
        on_failure: OnFailure,
    ) -> StepResult<PhaseReport> {
        self.step(order, members, Duration::from_millis(order.timeout_ms), on_failure)
    }

    /// Asks `members` and gathers their answers.
    pub fn step<Q: Question>(
        &mut self,
        question: &Q,
        members: &[usize],
        timeout: Duration,
        on_failure: OnFailure,
    ) -> StepResult<Q::Answer> {
        let step = question.step();
        let began = Instant::now();
        let mut result = StepResult { done: Vec::new(), failures: Vec::new() };
        if members.is_empty() {
            return result;
        }
        let (tenant, count) = (self.dir.tenant(), members.len());
        self.tell(Event::StepStarted { tenant, step, members: count });
        let due = timeout + self.options.reply_margin;
        let listens = match on_failure {
            OnFailure::Stop => true,
            OnFailure::WaitForAll => step == Step::Hello || step.is_commit(),
        };
        let interrupt = self.options.interrupt.as_ref().filter(|_| listens);
        let inquiry = |interrupt| Inquiry::of(question.clone(), due, interrupt);
        self.take_answers(members, inquiry(interrupt), on_failure, &mut result);
        let goes_on = on_failure == OnFailure::WaitForAll && step.is_commit();
        if goes_on && interrupt.is_some_and(Interrupt::is_raised) {
            self.tell(Event::GoingOn);
            self.take_answers(&[], inquiry(None), on_failure, &mut result);
        }
        if result.failures.is_empty() {
            self.tell(Event::StepDone { step, elapsed: began.elapsed() });
        }
        result
    }

    fn take_answers<Q: Question>(
        &mut self,
        members: &[usize],
        inquiry: Inquiry<'_, Q>,
        on_failure: OnFailure,
        result: &mut StepResult<Q::Answer>,
    ) {
        let progress = &mut self.progress;
        let step = inquiry.question.step();
        self.peers.converse(members, inquiry, |peers, index, said| match said {
            Ok(answer) => {
                progress(Event::MemberDone { who: peers.who(index), step });
                result.done.push((index, answer));
                Next::Done
            }
            Err(failure) => {
                tracing::debug!(%failure, "a member failed");
                result.failures.push((index, failure));
                match on_failure {
                    OnFailure::Stop => Next::Stop,
                    OnFailure::WaitForAll => Next::Done,
                }
            }
        });
    }

    /// The account of a phase that these members have done.
    pub fn summary(
        &self,
        phase: Phase,
        wall: Duration,
        done: impl IntoIterator<Item = (usize, PhaseReport)>,
    ) -> PhaseSummary {
        let mut members: Vec<_> = done
            .into_iter()
            .map(|(index, report)| MemberPhase { who: self.peers.who(index), report })
            .collect();
        members.sort_by_key(|member| (member.who.pid, member.who.member));
        PhaseSummary { phase, wall_us: micros(wall), members }
    }

    /// The sockets of processes that have joined the tenant since its members were listed.
    pub(super) fn newcomers(&self) -> Vec<MemberSocket> {
        let mut sockets = self.dir.members().unwrap_or_default();
        let known = self.peers.names();
        sockets.retain(|socket| !known.contains(&socket.id));
        sockets
    }
}

impl fmt::Debug for Cast<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cast").field("peers", &self.peers).finish_non_exhaustive()
    }
}

/// All live processes of a tenant, for a question that does not need an answer of each.
#[derive(Debug, Default)]
pub struct Everybody {
    /// The connected processes.
    pub peers: Peers,
    /// The processes that could not be reached.
    pub failures: Vec<MemberFailure>,
}

impl Everybody {
    /// Connects to every live process of the tenant, and removes the sockets of dead ones. Processes that cannot be reached
    /// count as failed in `step`.
    ///
    /// # Errors
    /// [`Trouble::NoProcess`], [`Trouble::RunDir`].
    pub fn connect(dir: &TenantDir, step: Step, deadline: Instant) -> Result<Self, Trouble> {
        let mut all = Self::default();
        for socket in dir.members()? {
            match reach(&socket, deadline) {
                Ok(reached) => all.peers.add(dir, &socket, reached)?,
                Err(error) => {
                    let who = Who { pid: None, member: socket.id };
                    all.failures.push(gone(who, step, with_source(&error)));
                }
            }
        }
        if all.peers.all().is_empty() && all.failures.is_empty() {
            let (tenant, dead) = (dir.tenant().clone(), all.peers.dead());
            return Err(Trouble::NoProcess { tenant, dead });
        }
        Ok(all)
    }

    /// Asks `members`, and passes each answer to `take`. Members that do not answer count as failed.
    pub fn ask<Q: Question>(
        &mut self,
        members: &[usize],
        inquiry: Inquiry<'_, Q>,
        mut take: impl FnMut(&Peers, usize, Q::Answer) -> Next<Q>,
    ) {
        let Self { peers, failures } = self;
        peers.converse(members, inquiry, |peers, index, said| match said {
            Ok(answer) => take(peers, index, answer),
            Err(failure) => {
                failures.push(failure);
                Next::Done
            }
        });
    }
}
