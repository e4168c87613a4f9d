//! One pause or resume, from the greeting to the account.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::peers::{Peers, Reached, reach};
use super::report::{Event, MemberFailure, MemberPhase, PhaseSummary, Report, Step};
use super::shortage::short_devices;
use super::{CoordinatorError, Interrupt, LostImports, Options, TakesPart, unexpected};
use crate::cut::{Limits, Seen};
use crate::host_memory;
use crate::identity::TenantName;
use crate::references::Stay;
use crate::run_dir::{CoordinatorLock, MemberSocket, TenantDir};
use crate::scope::Scope;
use crate::transport::has_ended;
use crate::wire::{
    Action, DeviceDelta, Failure, FailureKind, MemberState, Phase, PhaseReport, Reply, Request,
    SaveStep,
};

/// The order of phases, and how to go back.
struct Plan {
    reversible: &'static [Phase],
    /// The first of these is the point of no return.
    last: &'static [Phase],
    undo: Phase,
}

const PAUSE: Plan = Plan {
    reversible: &[Phase::CloseGate, Phase::Drain, Phase::Save],
    last: &[Phase::Release, Phase::Verify],
    undo: Phase::AbortPause,
};

/// A resume that leaves out what dead processes had.
const RESUME_WITHOUT_LOST: Plan =
    Plan { reversible: &[Phase::CreateOwn, Phase::Restore, Phase::ImportFromLiving], ..RESUME };

const RESUME: Plan = Plan {
    reversible: &[Phase::CreateOwn, Phase::Restore, Phase::Import],
    last: &[Phase::Activate],
    undo: Phase::AbortResume,
};

/// How long a member may take to hear that what it waits for will not happen.
const TELL_TIMEOUT: Duration = Duration::from_secs(1);

/// The connections to a tenant's members while its lock is held.
pub(super) struct Session<'a> {
    pub(super) dir: &'a TenantDir,
    pub(super) options: &'a Options,
    pub(super) progress: &'a mut dyn FnMut(Event<'_>),
    pub(super) peers: Peers,
    /// Tells this pause or resume from others.
    round: u64,
    /// Which memory it is about.
    pub(super) scope: Scope,
    /// One sentence for each communicator that some ranks of are in no live process of the tenant.
    pub(super) absent: Vec<String>,
    /// Shared memory that this pause leaves where it is.
    stays: Vec<Stay>,
    /// Processes whose sockets were found and removed.
    dead: usize,
}

/// Why an action ends before its point of no return.
pub(super) enum Stop {
    Failed(Vec<MemberFailure>),
    CalledOff,
    /// Processes have joined since the members were listed.
    Joined,
}

impl From<Vec<MemberFailure>> for Stop {
    fn from(failures: Vec<MemberFailure>) -> Self {
        Self::Failed(failures)
    }
}

/// Do the answers of the slow matter once somebody has failed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnFailure {
    /// No: go back at once.
    Stop,
    /// Yes: there is no way back.
    WaitForAll,
}

/// What came of one step.
#[derive(Default)]
pub(super) struct StepResult {
    pub(super) done: Vec<(usize, Reply)>,
    pub(super) failures: Vec<(usize, MemberFailure)>,
}

impl StepResult {
    pub(super) fn into_failures(self) -> Vec<MemberFailure> {
        self.failures.into_iter().map(|(_, failure)| failure).collect()
    }
}

impl<'a> Session<'a> {
    /// Connects to all live members and learns who they are.
    pub(super) fn open(
        dir: &'a TenantDir,
        lock: &CoordinatorLock,
        options: &'a Options,
        progress: &'a mut dyn FnMut(Event<'_>),
    ) -> Result<Self, CoordinatorError> {
        let round = getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()));
        let scope = options.scope.clone();
        let peers = Peers::default();
        let mut session = Self {
            dir,
            options,
            progress,
            peers,
            round,
            scope,
            absent: Vec::new(),
            stays: Vec::new(),
            dead: 0,
        };
        let deadline = Instant::now() + options.contact_timeout;
        let takes_part = |socket: &MemberSocket| match options.takes_part {
            TakesPart::Everybody => true,
            TakesPart::Alone(member) => socket.id == member,
        };
        for socket in dir.members()?.into_iter().filter(takes_part) {
            match reach(&socket, deadline) {
                Ok(Reached::Peer(peer)) => session.peers.list.push(*peer),
                Ok(Reached::Dead) => {
                    dir.remove_socket(&socket)?;
                    session.dead += 1;
                    let member = socket.id;
                    (session.progress)(Event::StaleRemoved { member });
                }
                Err(source) => {
                    let tenant = dir.tenant().clone();
                    return Err(CoordinatorError::Unreachable { tenant, source });
                }
            }
        }
        session.greet()?;
        if session.peers.list.is_empty() {
            dir.remove_stale_holding(lock)?;
            let (tenant, dead) = (dir.tenant().clone(), session.dead);
            return Err(CoordinatorError::NoProcess { tenant, dead });
        }
        session.check_versions()?;
        Ok(session)
    }

    pub(super) fn tenant(&self) -> TenantName {
        self.dir.tenant().clone()
    }

    /// Asks every member who it is; those that turn out dead are left out.
    pub(super) fn greet(&mut self) -> Result<(), CoordinatorError> {
        let everyone: Vec<usize> = (0..self.peers.list.len()).collect();
        let timeout = self.options.contact_timeout;
        let result = self.step(Step::Hello, &everyone, timeout, OnFailure::WaitForAll);
        for (index, reply) in result.done {
            let Reply::Member(info) = reply else { continue };
            let peer = &mut self.peers.list[index];
            // The kernel's id is in our namespace, the member's own may not be.
            peer.who.pid = peer.who.pid.or(Some(info.pid));
            peer.info = Some(info);
        }
        for (index, failure) in result.failures {
            if !self.is_dead(index) {
                let tenant = self.tenant();
                return Err(CoordinatorError::NoGreeting { tenant, failure });
            }
        }
        self.peers.list.retain(|peer| peer.info.is_some());
        Ok(())
    }

    /// Has this member ended? That it hung up does not say so.
    pub(super) fn is_dead(&self, index: usize) -> bool {
        let socket = self.dir.socket_path(self.peers.list[index].who.member);
        let nobody_is_there = || socket.is_ok_and(|path| has_ended(&path));
        self.peers.process_has_ended(index) || (self.peers.has_hung_up(index) && nobody_is_there())
    }

    fn check_versions(&self) -> Result<(), CoordinatorError> {
        let mut by_version: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for info in self.peers.list.iter().filter_map(|peer| peer.info.as_ref()) {
            let pids = by_version.entry(&info.version).or_default();
            pids.push(info.pid.to_string());
        }
        if by_version.len() < 2 {
            return Ok(());
        }
        let texts: Vec<_> = by_version
            .iter()
            .map(|(version, pids)| format!("{version} in process {}", pids.join(", ")))
            .collect();
        Err(CoordinatorError::VersionsDiffer { tenant: self.tenant(), versions: texts.join("; ") })
    }

    /// Takes `members` through all phases of `action`.
    pub(super) fn run(
        &mut self,
        action: Action,
        members: Vec<usize>,
    ) -> Result<Report, CoordinatorError> {
        let plan = match action {
            Action::Pause => PAUSE,
            Action::Resume => match self.options.lost_imports {
                LostImports::Refuse => RESUME,
                LostImports::LeaveOut => RESUME_WITHOUT_LOST,
            },
        };
        let started = Instant::now();
        let mut report = Report::new(self.dir.tenant(), action);
        if self.dead > 0 {
            report.notes.push(format!(
                "{} process(es) of the tenant had ended before; what they left behind was removed",
                self.dead
            ));
        }
        if let Err(stop) = self.prepare(action, &plan, &members, &mut report) {
            let error = self.roll_back(action, &plan, &members, stop);
            if self.options.consent.is_some() {
                self.tell_waiting(action, &members, &error);
            }
            return Err(error);
        }
        let mut left = members;
        for phase in plan.last {
            let began = Instant::now();
            let result = self.phase_step(*phase, &left, OnFailure::WaitForAll);
            left.retain(|index| !result.failures.iter().any(|(failed, _)| failed == index));
            let StepResult { done, failures } = result;
            report.add(self.summary(*phase, began.elapsed(), done));
            report.losses.extend(failures.into_iter().map(|(_, failure)| failure));
        }
        report.wall_us = micros(started.elapsed());
        self.note_latecomers(&mut report);
        Ok(report)
    }

    /// All that can be undone: consent, the reversible phases, and a last look at who is there.
    fn prepare(
        &mut self,
        action: Action,
        plan: &Plan,
        members: &[usize],
        report: &mut Report,
    ) -> Result<(), Stop> {
        if let Some(timeout) = self.options.consent {
            let step = Step::Consent(action);
            let result = self.step(step, members, timeout, OnFailure::Stop);
            if !result.failures.is_empty() {
                return Err(Stop::Failed(result.into_failures()));
            }
        }
        if self.options.look_first && action == Action::Resume {
            self.look(plan, members)?;
        }
        let mut phases = plan.reversible;
        if action == Action::Pause && self.options.takes_part == TakesPart::Everybody {
            self.cut_and_close(members, report)?;
            phases = &phases[1..];
        }
        for phase in phases {
            let began = Instant::now();
            let result = self.phase_step(*phase, members, OnFailure::Stop);
            if !result.failures.is_empty() {
                return Err(Stop::Failed(result.into_failures()));
            }
            if self.is_called_off() {
                return Err(Stop::CalledOff);
            }
            if let Some(failure) = self.host_shortage(&result.done) {
                return Err(Stop::Failed(vec![failure]));
            }
            if *phase == Phase::Drain {
                self.stays = self.agree_on_shared(&result.done)?;
            }
            report.add(self.summary(*phase, began.elapsed(), result.done));
        }
        let next = plan.last.first().map_or(Step::Hello, |p| Step::Phase(*p));
        let dead: Vec<_> =
            members.iter().filter_map(|index| self.peers.check_alive(*index, next).err()).collect();
        if dead.is_empty() { Ok(()) } else { Err(Stop::Failed(dead)) }
    }

    /// Does somebody want it called off?
    pub(super) fn is_called_off(&self) -> bool {
        self.options.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    /// Refuses when the devices cannot hold the members. Changes nothing: paused members that are asked to
    /// undo a resume only say what they need.
    fn look(&mut self, plan: &Plan, members: &[usize]) -> Result<(), Vec<MemberFailure>> {
        let result = self.phase_step(plan.undo, members, OnFailure::WaitForAll);
        let short = short_devices(result.done.iter().flat_map(|(_, reply)| needs_of(reply)));
        let (Some(shortage), Some(&index)) = (short.first(), members.first()) else {
            return Ok(());
        };
        let missing_bytes = shortage.missing_bytes();
        let kind = FailureKind::OutOfDeviceMemory { missing_bytes };
        let failure = Failure { kind, message: "its tenant does not fit".to_owned() };
        let step = Step::Phase(Phase::CreateOwn);
        Err(vec![MemberFailure { who: self.peers.list[index].who, step, failure }])
    }

    /// Do the members need more host memory together than there is? Named after the one that needs most.
    fn host_shortage(&self, done: &[(usize, Reply)]) -> Option<MemberFailure> {
        let needs = done.iter().filter_map(|(index, reply)| match reply {
            Reply::PhaseDone(_, report) => Some((*index, report.host.as_ref()?)),
            Reply::Member(_)
            | Reply::Cut(_)
            | Reply::Stats(_)
            | Reply::Consented
            | Reply::Saving(_)
            | Reply::Noted
            | Reply::Fds { .. }
            | Reply::Failed(_) => None,
        });
        let needs: Vec<_> = needs.collect();
        let short = host_memory::shortage(needs.iter().map(|(_, need)| *need))?;
        let (most, _) = needs.iter().max_by_key(|(_, need)| need.grow_bytes)?;
        let failure = Failure { kind: FailureKind::OutOfHostMemory, message: short.to_string() };
        let step = Step::Phase(Phase::Save);
        Some(MemberFailure { who: self.peers.list[*most].who, step, failure })
    }

    /// Undoes all that was done in `members` and makes the error of it.
    fn roll_back(
        &mut self,
        action: Action,
        plan: &Plan,
        members: &[usize],
        stop: Stop,
    ) -> CoordinatorError {
        let called_off = matches!(stop, Stop::CalledOff);
        let joined = matches!(stop, Stop::Joined);
        let mut failures = match stop {
            Stop::Failed(failures) => failures,
            Stop::CalledOff | Stop::Joined => Vec::new(),
        };
        self.name_absent(&mut failures);
        (self.progress)(Event::RollingBack { failures: &failures });
        let undo = Step::Phase(plan.undo);
        // Whoever still waits for its application has done nothing yet, and stops when we hang up.
        for index in members {
            if self.peers.owes(*index, Step::Consent(action)) {
                self.peers.drop_link(*index);
            }
        }
        let up = |index: &usize| self.peers.is_up(*index);
        let targets: Vec<usize> = members.iter().copied().filter(up).collect();
        let mut result = StepResult::default();
        for index in targets {
            // One that is silent already gets the message, but not another full wait.
            let timeout = if self.peers.is_overdue(index) {
                self.options.reply_margin
            } else {
                self.options.phase_timeout(plan.undo) + self.options.reply_margin
            };
            let request = self.request(undo);
            if let Err(failure) = self.peers.ask(index, undo, &request, timeout) {
                result.failures.push((index, failure));
            }
        }
        let failed_step = failures.first().map(|failure| failure.step);
        let mut needs = Vec::new();
        while let Some(answer) = self.peers.next_answer(None) {
            let failure = match answer.result {
                Err(failure) => failure,
                Ok(reply) => {
                    if answer.step == undo {
                        needs.extend(needs_of(&reply).iter().cloned());
                    }
                    continue;
                }
            };
            if failure.failure.kind == FailureKind::CalledOff {
                continue;
            }
            // Late news of the step that failed is part of why; of a member lost meanwhile, too.
            if answer.step != undo && Some(failure.step) == failed_step {
                failures.push(failure);
            } else if answer.step == undo {
                result.failures.push((answer.peer, failure));
            }
        }
        let out_of_memory = failures
            .iter()
            .any(|member| matches!(member.failure.kind, FailureKind::OutOfDeviceMemory { .. }));
        let shortages = if out_of_memory { short_devices(&needs) } else { Vec::new() };
        let (tenant, undo_failures) = (self.tenant(), result.into_failures());
        let info = members.first().and_then(|index| self.peers.list[*index].info.as_ref());
        let runs = info.is_some_and(|info| info.state == MemberState::Active);
        if joined && undo_failures.is_empty() {
            CoordinatorError::Joined { tenant }
        } else if called_off {
            CoordinatorError::CalledOff { tenant, action, runs, undo_failures }
        } else {
            CoordinatorError::Refused { tenant, action, runs, shortages, failures, undo_failures }
        }
    }

    /// Says with a wait that was in vain who may be missing: a rank that had ended before is no member any more.
    fn name_absent(&self, failures: &mut [MemberFailure]) {
        let in_vain = |failure: &&mut MemberFailure| {
            matches!(failure.failure.kind, FailureKind::CutNotReached | FailureKind::DrainTimeout)
        };
        if let Some(first) = failures.iter_mut().find(in_vain) {
            for sentence in &self.absent {
                first.failure.message.push_str("; ");
                first.failure.message.push_str(sentence);
            }
        }
    }

    /// Lets the applications that wait for `action` together go on with the same error.
    fn tell_waiting(&mut self, action: Action, members: &[usize], error: &CoordinatorError) {
        let request = Request::GiveUp { action, why: error.to_string() };
        let step = Step::Consent(action);
        for index in members {
            if self.peers.is_up(*index)
                && let Err(failure) = self.peers.ask(*index, step, &request, TELL_TIMEOUT)
            {
                tracing::debug!(%failure, "a waiting member was not told");
            }
        }
        while let Some(answer) = self.peers.next_answer(None) {
            if let Err(failure) = answer.result {
                tracing::debug!(%failure, "a waiting member did not take the news");
            }
        }
    }

    fn request(&self, step: Step) -> Request {
        match step {
            Step::Hello => Request::Hello,
            Step::Stats => Request::Stats,
            Step::Consent(action) => Request::AwaitConsent {
                action,
                timeout_ms: millis(self.options.consent.unwrap_or_default()),
            },
            // The first of a cut: hold everything, and say where you stand.
            Step::Cut => {
                Request::Cut { limits: Limits::default(), seen: Seen::default(), wait_ms: 0 }
            }
            // No part of a pause or resume; this would end one that is under way.
            Step::Save => Request::Save(SaveStep::CallOff),
            Step::Phase(phase) => Request::Phase {
                phase,
                round: self.round,
                scope: self.scope.clone(),
                stays: if phase == Phase::Save { self.stays.clone() } else { Vec::new() },
                timeout_ms: millis(self.options.phase_timeout(phase)),
            },
        }
    }

    pub(super) fn phase_step(
        &mut self,
        phase: Phase,
        members: &[usize],
        on_failure: OnFailure,
    ) -> StepResult {
        let timeout = self.options.phase_timeout(phase);
        self.step(Step::Phase(phase), members, timeout, on_failure)
    }

    /// Sends one step to `members` and gathers their answers.
    pub(super) fn step(
        &mut self,
        step: Step,
        members: &[usize],
        timeout: Duration,
        on_failure: OnFailure,
    ) -> StepResult {
        let began = Instant::now();
        let mut result = StepResult::default();
        if members.is_empty() {
            return result;
        }
        (self.progress)(Event::StepStarted {
            tenant: self.dir.tenant(),
            step,
            members: members.len(),
        });
        let request = self.request(step);
        let due = timeout + self.options.reply_margin;
        for index in members {
            if let Err(failure) = self.peers.ask(*index, step, &request, due) {
                result.failures.push((*index, failure));
                if on_failure == OnFailure::Stop {
                    return result;
                }
            }
        }
        loop {
            let stop = on_failure == OnFailure::Stop && !result.failures.is_empty();
            let interrupt = match on_failure {
                OnFailure::Stop => self.options.interrupt.as_ref(),
                OnFailure::WaitForAll => None,
            };
            let answer =
                if stop { self.peers.settled_answer() } else { self.peers.next_answer(interrupt) };
            let Some(answer) = answer else { break };
            // An answer to an earlier step that was given up on has no meaning any more.
            if answer.step == step {
                self.file(step, answer.peer, answer.result, &mut result);
            }
        }
        let elapsed = began.elapsed();
        if result.failures.is_empty() {
            (self.progress)(Event::StepDone { step, elapsed });
        }
        result
    }

    fn file(
        &mut self,
        step: Step,
        index: usize,
        answer: Result<Reply, MemberFailure>,
        result: &mut StepResult,
    ) {
        let peer = &self.peers.list[index];
        let who = peer.who;
        match answer {
            Ok(reply) if fits(step, &reply) && is_from(&reply, who.member) => {
                (self.progress)(Event::MemberDone { who, step });
                result.done.push((index, reply));
            }
            Ok(_) => result.failures.push((index, unexpected(who, step))),
            Err(failure) => {
                tracing::debug!(%failure, "a member failed");
                result.failures.push((index, failure));
            }
        }
    }

    pub(super) fn summary(
        &self,
        phase: Phase,
        wall: Duration,
        done: Vec<(usize, Reply)>,
    ) -> PhaseSummary {
        let mut members: Vec<_> = done
            .into_iter()
            .map(|(index, reply)| MemberPhase {
                who: self.peers.list[index].who,
                report: phase_report(reply),
            })
            .collect();
        members.sort_by_key(|member| (member.who.pid, member.who.member));
        PhaseSummary { phase, wall_us: micros(wall), members }
    }

    /// Processes that joined while we worked were not part of it.
    fn note_latecomers(&self, report: &mut Report) {
        if self.options.takes_part != TakesPart::Everybody {
            return;
        }
        let Ok(sockets) = self.dir.members() else {
            return;
        };
        let known = |id| self.peers.list.iter().any(|peer| peer.who.member == id);
        let late = sockets.iter().filter(|socket| !known(socket.id)).count();
        if late > 0 {
            report.notes.push(format!(
                "{late} process(es) joined the tenant meanwhile and took no part; run the command again"
            ));
        }
    }
}

/// What the undo of a resume says is needed and free.
fn needs_of(reply: &Reply) -> &[DeviceDelta] {
    match reply {
        Reply::PhaseDone(_, report) => &report.devices,
        Reply::Member(_)
        | Reply::Cut(_)
        | Reply::Stats(_)
        | Reply::Consented
        | Reply::Saving(_)
        | Reply::Noted
        | Reply::Fds { .. }
        | Reply::Failed(_) => &[],
    }
}

/// Is `reply` the kind of answer that `step` asks for?
fn fits(step: Step, reply: &Reply) -> bool {
    match step {
        Step::Hello => matches!(reply, Reply::Member(_)),
        Step::Stats => matches!(reply, Reply::Stats(_)),
        Step::Consent(_) => matches!(reply, Reply::Consented),
        Step::Cut => matches!(reply, Reply::Cut(_)),
        Step::Save => matches!(reply, Reply::Saving(_)),
        Step::Phase(phase) => matches!(reply, Reply::PhaseDone(done, _) if *done == phase),
    }
}

/// A greeting must come from the member whose socket was called; other replies name nobody.
fn is_from(reply: &Reply, member: crate::identity::MemberId) -> bool {
    match reply {
        Reply::Member(info) => info.id == member,
        Reply::Stats(_)
        | Reply::Cut(_)
        | Reply::PhaseDone(..)
        | Reply::Consented
        | Reply::Saving(_)
        | Reply::Noted
        | Reply::Fds { .. }
        | Reply::Failed(_) => true,
    }
}

fn phase_report(reply: Reply) -> PhaseReport {
    match reply {
        Reply::PhaseDone(_, report) => report,
        Reply::Member(_)
        | Reply::Stats(_)
        | Reply::Cut(_)
        | Reply::Consented
        | Reply::Saving(_)
        | Reply::Noted
        | Reply::Fds { .. }
        | Reply::Failed(_) => PhaseReport::default(),
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
