//! One pause or resume, from the greeting to the account.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::agreement::Agreed;
use super::lending::Patience;
use super::peers::{Peers, Reached, reach};
use super::report::{Event, MemberFailure, MemberPhase, PhaseSummary, Question, Report, Step};
use super::steps::{OnFailure, StepResult};
use super::trouble::silence;
use super::{Depth, Interrupt, Options, TakesPart, Trouble};
use crate::host_memory::HostShortage;
use crate::identity::TenantName;
use crate::phase::Stage;
use crate::run_dir::{CoordinatorLock, MemberSocket, RunDirError, TenantDir};
use crate::scope::Scope;
use crate::time::{micros, millis};
use crate::transport::has_ended;
use crate::wire::{Action, AwaitConsent, Drain, FailureKind, Hello, Phase, PhaseReport, TakePhase};

/// The legs of a transaction: one tenant leaves, or comes, or both at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Legs {
    One,
    Both,
}

/// The connections to a tenant's members while its lock is held.
pub(super) struct Session<'a> {
    pub(super) dir: &'a TenantDir,
    lock: &'a CoordinatorLock,
    pub(super) options: &'a Options,
    pub(super) progress: &'a mut dyn FnMut(Event<'_>),
    pub(super) peers: Peers,
    /// What is to be done.
    pub(super) action: Action,
    /// When the first process was spoken to.
    pub(super) began: Instant,
    /// Tells this pause or resume from others.
    round: u64,
    /// Which memory it is about.
    pub(super) scope: Scope,
    /// Do all processes stand still while a pause by tag lasts?
    pub(super) stands: bool,
}

/// Why an action ends before its point of no return.
pub(super) enum Stop {
    Failed(Vec<MemberFailure>),
    /// The members need more host memory than this limit leaves.
    HostShort(Box<HostShortage>, MemberFailure),
    CalledOff,
    /// Processes have joined since the members were listed.
    Joined,
    /// See [`RunDirError::LockGone`].
    LockGone,
}

impl From<Vec<MemberFailure>> for Stop {
    fn from(failures: Vec<MemberFailure>) -> Self {
        Self::Failed(failures)
    }
}

impl Stop {
    /// Who has failed.
    pub(super) fn failures(&self) -> Vec<MemberFailure> {
        match self {
            Self::Failed(failures) => failures.clone(),
            Self::HostShort(_, failure) => vec![failure.clone()],
            Self::CalledOff | Self::Joined | Self::LockGone => Vec::new(),
        }
    }

    pub(super) fn host_shortage(self) -> Option<Box<HostShortage>> {
        if let Self::HostShort(short, _) = self { Some(short) } else { None }
    }

    /// Says with a wait that was in vain who may be missing: a rank that had ended before is no member any more.
    fn naming(mut self, absent: &[String]) -> Self {
        let in_vain = |failure: &&mut MemberFailure| {
            matches!(failure.failure.kind, FailureKind::CutNotReached | FailureKind::DrainTimeout)
        };
        if let Self::Failed(failures) = &mut self
            && let Some(first) = failures.iter_mut().find(in_vain)
        {
            for sentence in absent {
                first.failure.message.push_str("; ");
                first.failure.message.push_str(sentence);
            }
        }
        self
    }
}

impl<'a> Session<'a> {
    /// Connects to all live members and learns who they are.
    pub(super) fn open(
        dir: &'a TenantDir,
        lock: &'a CoordinatorLock,
        options: &'a Options,
        action: Action,
        progress: &'a mut dyn FnMut(Event<'_>),
    ) -> Result<Self, Trouble> {
        let (began, round) = (Instant::now(), new_round());
        let scope = options.scope.clone();
        let peers = Peers::default();
        let stands = false;
        let mut session =
            Self { dir, lock, options, progress, peers, action, began, round, scope, stands };
        dir.until_names_are_back(|| session.is_called_off());
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
                    session.peers.dead += 1;
                    let member = socket.id;
                    (session.progress)(Event::StaleRemoved { member });
                }
                Err(source) => {
                    let tenant = dir.tenant().clone();
                    return Err(Trouble::Unreachable { tenant, source });
                }
            }
        }
        session.greet()?;
        if session.peers.list.is_empty() {
            dir.remove_stale_holding(lock)?;
            let (tenant, dead) = (dir.tenant().clone(), session.peers.dead);
            return Err(Trouble::NoProcess { tenant, dead });
        }
        session.check_versions()?;
        Ok(session)
    }

    /// Tells this pause or resume from others.
    pub(super) fn round(&self) -> u64 {
        self.round
    }

    /// What was led is undone, and what follows is a pause or resume of its own.
    pub(super) fn begin_anew(&mut self) {
        self.round = new_round();
    }

    /// Does no process but one take part?
    pub(super) fn acts_alone(&self) -> bool {
        self.options.takes_part != TakesPart::Everybody
    }

    pub(super) fn tenant(&self) -> TenantName {
        self.dir.tenant().clone()
    }

    /// Asks every member who it is; those that turn out dead are left out. It can be called off: nothing has been done yet.
    pub(super) fn greet(&mut self) -> Result<(), Trouble> {
        let everyone: Vec<usize> = (0..self.peers.list.len()).collect();
        let timeout = self.options.greeting_timeout();
        let result = self.step(&Hello, &everyone, timeout, OnFailure::WaitForAll);
        if self.is_called_off() {
            // Some may not have answered yet, and would be left out.
            let (tenant, action) = (self.tenant(), self.action);
            return Err(Trouble::called_off_before(tenant, action));
        }
        let mut failures = result.failures;
        for (index, info) in result.done {
            let introduced = self.peers.introduce(index, info);
            failures.extend(introduced.err().map(|failure| (index, failure)));
        }
        for (index, failure) in failures {
            if !self.is_dead(index) {
                let (tenant, action) = (self.tenant(), self.action);
                let is_silent = self.peers.is_overdue(index);
                let why = if is_silent { silence(&failure) } else { failure.to_string() };
                let failure = Box::new(failure);
                return Err(Trouble::NoGreeting { tenant, action, failure, why });
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

    fn check_versions(&self) -> Result<(), Trouble> {
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
        Err(Trouble::VersionsDiffer { tenant: self.tenant(), versions: texts.join("; ") })
    }

    /// Takes `members` through all phases.
    pub(super) fn run(
        &mut self,
        members: Vec<usize>,
        patience: Patience,
    ) -> Result<Report, Trouble> {
        let thawed = self.thaw_for(&members)?;
        let mut report = self.new_report();
        if let Some(thawed) = thawed.clone() {
            report.add(thawed);
        }
        let saving = match self.prepare(Legs::One, &members, patience, &mut report) {
            Ok(saving) => saving,
            Err(stop) => {
                let error = self.roll_back(&members, stop);
                if self.options.consent.is_some() {
                    self.tell_waiting(&members, &error);
                }
                if error.left_unchanged() {
                    self.freeze_again(thawed);
                }
                return Err(error);
            }
        };
        self.commit(members, saving, &mut report);
        if self.is_deep() {
            self.freeze_all(&mut report);
        }
        report.wall_us = micros(self.began.elapsed());
        self.note_latecomers(&mut report);
        self.note_nothing_of_nccl(&mut report);
        Ok(report)
    }

    /// An account without any step yet.
    pub(super) fn new_report(&self) -> Report {
        let mut report = Report::new(self.dir.tenant(), self.action);
        report.stands_still = self.stands;
        if self.peers.dead > 0 {
            report.notes.push(format!(
                "{} process(es) of the tenant had ended before; what they left behind was removed",
                self.peers.dead
            ));
        }
        report
    }

    /// Is this a pause that takes contexts too?
    pub(super) fn is_deep(&self) -> bool {
        self.action == Action::Pause && self.options.depth == Depth::Contexts
    }

    /// All that can be undone: consent, the phases that prepare, and a last look at who is there. How long saving takes at the
    /// slowest behind the point of no return, if it is left for then.
    pub(super) fn prepare(
        &mut self,
        legs: Legs,
        members: &[usize],
        patience: Patience,
        report: &mut Report,
    ) -> Result<Option<Duration>, Stop> {
        let action = self.action;
        if let Some(timeout) = self.options.consent {
            let question = AwaitConsent { action, timeout_ms: millis(timeout) };
            let result = self.step(&question, members, timeout, OnFailure::Stop);
            if !result.failures.is_empty() {
                return Err(Stop::Failed(result.into_failures()));
            }
        }
        if self.options.look_first && action == Action::Resume {
            self.look(members)?;
        }
        if action == Action::Pause {
            self.wait_for_borrowers(members, patience)?;
        }
        self.check_lock().map_err(|_| Stop::LockGone)?;
        self.take_all(legs, members, patience, report)
    }

    /// Is this the one that leads the tenant, as far as others can see? Looked at before a first step is taken.
    pub(super) fn check_lock(&self) -> Result<(), Trouble> {
        let tenant = self.tenant();
        if self.lock.is_named() { Ok(()) } else { Err(RunDirError::LockGone { tenant }.into()) }
    }

    /// The end of a resume by stages: all that follows them. An error is undone by the caller.
    pub(super) fn come(&mut self, members: &[usize], report: &mut Report) -> Result<(), Stop> {
        let patience = Patience::new(self.options);
        let saving = self.take_all(Legs::Both, members, patience, report)?;
        self.commit(members.to_vec(), saving, report);
        Ok(())
    }

    fn take_all(
        &mut self,
        legs: Legs,
        members: &[usize],
        patience: Patience,
        report: &mut Report,
    ) -> Result<Option<Duration>, Stop> {
        let mut absent = Vec::new();
        let taken = self.take_each(legs, members, patience, (&mut absent, report));
        let agreed = taken.map_err(|stop| stop.naming(&absent))?;
        report.notes.append(&mut absent);
        self.check_alive(members, Step::Phase(self.action.commit()))?;
        Ok(agreed.saving)
    }

    /// One phase that prepares after the other. One sentence goes to `absent` for each communicator that some ranks of are
    /// in no live process of the tenant.
    fn take_each(
        &mut self,
        legs: Legs,
        members: &[usize],
        patience: Patience,
        (absent, report): (&mut Vec<String>, &mut Report),
    ) -> Result<Agreed, Stop> {
        let mut agreed = Agreed::default();
        // With both legs memory comes by windows, each created when there is room for it.
        let is_taken = |phase: &Phase| legs == Legs::One || *phase != Phase::Create;
        for phase in self.action.phases(Stage::Prepare).filter(is_taken) {
            if phase.is_at_cut() && self.options.takes_part == TakesPart::Everybody {
                self.cut_and_take(phase, members, absent, report)?;
                continue;
            }
            let began = Instant::now();
            if phase == Phase::Drain {
                if report.drain.is_none() {
                    self.drain_by_steps(members, None, report)?;
                }
                self.wait_behind_gates(members, patience)?;
            }
            let question = self.question_of(phase, &agreed);
            let done = if phase == Phase::Drain {
                let done = self.take(&Drain(question), phase, members)?;
                let (done, said): (Vec<_>, Vec<_>) = done
                    .into_iter()
                    .map(|(index, (report, said))| ((index, report), (index, said)))
                    .unzip();
                self.refuse_host_shortage(&said)?;
                agreed = self.agree(legs, &said)?;
                done
            } else {
                self.take(&question, phase, members)?
            };
            report.add(self.summary(phase, began.elapsed(), done));
        }
        Ok(agreed)
    }

    /// What all of `members` answer; the first that fails ends it.
    fn take<Q: Question>(
        &mut self,
        question: &Q,
        phase: Phase,
        members: &[usize],
    ) -> Result<Vec<(usize, Q::Answer)>, Stop> {
        let timeout = self.options.phase_timeout(phase);
        let result = self.step(question, members, timeout, OnFailure::Stop);
        if !result.failures.is_empty() {
            return Err(Stop::Failed(result.into_failures()));
        }
        if self.is_called_off() { Err(Stop::CalledOff) } else { Ok(result.done) }
    }

    /// Have any of `members` ended meanwhile, before they are told `next`?
    pub(super) fn check_alive(
        &mut self,
        members: &[usize],
        next: Step,
    ) -> Result<(), Vec<MemberFailure>> {
        let dead = members.iter().filter_map(|index| self.peers.check_alive(*index, next).err());
        let dead: Vec<_> = dead.collect();
        if dead.is_empty() { Ok(()) } else { Err(dead) }
    }

    /// All phases that cannot be undone, of members that are not lost on the way.
    fn commit(&mut self, members: Vec<usize>, mut saving: Option<Duration>, report: &mut Report) {
        let mut left = members;
        for phase in self.action.phases(Stage::Commit) {
            let began = Instant::now();
            let usual = self.options.phase_timeout(phase);
            // There is no way back, and one that saves is not lost.
            let timeout = saving.take().map_or(usual, |saving| usual.max(phase.timeout() + saving));
            let question = TakePhase { timeout_ms: millis(timeout), ..self.question(phase) };
            let result = self.step(&question, &left, timeout, OnFailure::WaitForAll);
            left.retain(|index| !result.failures.iter().any(|(failed, _)| failed == index));
            let StepResult { done, failures } = result;
            report.add(self.summary(phase, began.elapsed(), done));
            report.losses.extend(failures.into_iter().map(|(_, failure)| failure));
        }
    }

    /// Does somebody want it called off?
    pub(super) fn is_called_off(&self) -> bool {
        self.options.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    pub(super) fn summary(
        &self,
        phase: Phase,
        wall: Duration,
        done: Vec<(usize, PhaseReport)>,
    ) -> PhaseSummary {
        let mut members: Vec<_> = done
            .into_iter()
            .map(|(index, report)| MemberPhase { who: self.peers.list[index].who, report })
            .collect();
        members.sort_by_key(|member| (member.who.pid, member.who.member));
        PhaseSummary { phase, wall_us: micros(wall), members }
    }

    /// Nothing has left, and yet calls wait.
    pub(super) fn note_nothing_of_nccl(&self, report: &mut Report) {
        let Scope::Tags { tags, .. } = &self.scope else { return };
        let is_empty = report.devices.iter().all(|device| device.bytes == 0);
        if report.action == Action::Pause && tags.names_nccl() == (true, 0) && is_empty {
            report.notes.push(
                "NCCL had no memory in these processes at that moment, so nothing left; calls into NCCL wait until its \
                 resume all the same"
                    .to_owned(),
            );
        }
    }

    /// Processes that joined while we worked were not part of it.
    pub(super) fn note_latecomers(&self, report: &mut Report) {
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

/// A number that no other pause or resume has.
fn new_round() -> u64 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let counted = || {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        (u64::from(std::process::id()) << 32) | u64::from(count)
    };
    getrandom::u64().unwrap_or_else(|_| counted())
}
