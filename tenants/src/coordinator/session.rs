//! One pause or resume, from the greeting to the account.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::{ClassBytes, Copies, Schedule};

use super::early_release;
use super::error::silence;
use super::lending::Patience;
use super::peers::{Answer, Peers, Question, Reached, reach};
use super::report::{Event, MemberFailure, MemberPhase, PhaseSummary, Report, Step};
use super::shortage::short_devices;
use super::{CoordinatorError, Depth, Interrupt, LostImports, Options, TakesPart};
use crate::host_memory::{self, HostShortage};
use crate::identity::TenantName;
use crate::phase::{Manner, Stage, Told};
use crate::references::Stay;
use crate::run_dir::{CoordinatorLock, MemberSocket, RunDirError, TenantDir};
use crate::scope::Scope;
use crate::transport::has_ended;
use crate::wire::{
    Action, AwaitConsent, DeviceDelta, Failure, FailureKind, GiveUp, Hello, MemberState, Needed,
    Needs, Phase, PhaseReport, Stats, TakePhase,
};

/// The phases of one pause or resume.
pub(super) struct Plan {
    action: Action,
    by_stages: bool,
    prepare: Vec<Phase>,
    /// The first of these is the point of no return.
    commit: Vec<Phase>,
}

impl Plan {
    pub(super) fn new(action: Action, manner: Manner) -> Self {
        let phases = |stage| action.phases(stage, manner);
        let (prepare, commit) = (phases(Stage::Prepare), phases(Stage::Commit));
        Self { action, by_stages: manner.by_stages, prepare, commit }
    }
}

/// What all processes of a pause go by, behind [`Phase::Drain`].
#[derive(Default)]
struct Agreed {
    /// Shared memory that this pause leaves where it is.
    stays: Vec<Stay>,
    /// Copies of earlier pauses that all processes have room for in host memory.
    copies: Copies,
    /// When they save.
    schedule: Schedule,
    /// Saving behind the point of no return, in one stage, takes so long at the slowest.
    saving: Option<Duration>,
}

/// How long members may take to say what a resume needs, when nothing else is said.
pub(super) const NEEDS_TIMEOUT: Duration = Duration::from_mins(1);

/// How long a member may take to hear that what it waits for will not happen.
const TELL_TIMEOUT: Duration = Duration::from_secs(1);

/// The connections to a tenant's members while its lock is held.
pub(super) struct Session<'a> {
    pub(super) dir: &'a TenantDir,
    lock: &'a CoordinatorLock,
    pub(super) options: &'a Options,
    pub(super) progress: &'a mut dyn FnMut(Event<'_>),
    pub(super) peers: Peers,
    /// What is to be done.
    action: Action,
    /// Tells this pause or resume from others.
    round: u64,
    /// Which memory it is about.
    pub(super) scope: Scope,
    /// One sentence for each communicator that some ranks of are in no live process of the tenant.
    pub(super) absent: Vec<String>,
    agreed: Agreed,
    /// How long it waits for memory that other tenants have open.
    pub(super) patience: Patience,
    /// The limit that a pause of its members exceeds, where that is why it ends.
    pub(super) host_short: Option<HostShortage>,
    /// What came of bringing contexts back, where this resume had to.
    pub(super) thawed: Option<PhaseSummary>,
    /// Processes whose sockets were found and removed.
    dead: usize,
}

/// Why an action ends before its point of no return.
pub(super) enum Stop {
    Failed(Vec<MemberFailure>),
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

/// Do the answers of the slow matter once somebody has failed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnFailure {
    /// No: go back immediately.
    Stop,
    /// Yes: there is no way back.
    WaitForAll,
}

/// What came of one step.
pub(super) struct StepResult<T> {
    pub(super) done: Vec<(usize, T)>,
    pub(super) failures: Vec<(usize, MemberFailure)>,
}

impl<T> Default for StepResult<T> {
    fn default() -> Self {
        Self { done: Vec::new(), failures: Vec::new() }
    }
}

impl<T> StepResult<T> {
    pub(super) fn into_failures(self) -> Vec<MemberFailure> {
        self.failures.into_iter().map(|(_, failure)| failure).collect()
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
    ) -> Result<Self, CoordinatorError> {
        let round = new_round();
        let scope = options.scope.clone();
        let peers = Peers::default();
        let mut session = Self {
            dir,
            lock,
            options,
            progress,
            peers,
            action,
            round,
            scope,
            absent: Vec::new(),
            agreed: Agreed::default(),
            patience: Patience::new(options),
            host_short: None,
            thawed: None,
            dead: 0,
        };
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
    pub(super) fn greet(&mut self) -> Result<(), CoordinatorError> {
        let everyone: Vec<usize> = (0..self.peers.list.len()).collect();
        let timeout = self.options.greeting_timeout();
        let result = self.step(&Hello, &everyone, timeout, OnFailure::WaitForAll);
        if self.is_called_off() {
            // Some may not have answered yet, and would be left out.
            let (tenant, action) = (self.tenant(), self.action);
            return Err(CoordinatorError::called_off_before(tenant, action));
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
                return Err(CoordinatorError::NoGreeting { tenant, action, failure, why });
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
        let plan = Plan::new(action, self.manner(false));
        let started = Instant::now();
        self.thaw_for(action, &members)?;
        let mut report = self.new_report(action);
        if let Err(stop) = self.prepare(&plan, &members, &mut report) {
            let error = self.roll_back(action, &members, stop);
            if self.options.consent.is_some() {
                self.tell_waiting(action, &members, &error);
            }
            return Err(error);
        }
        self.commit(&plan.commit, members, &mut report);
        if self.is_deep() {
            self.freeze_all(&mut report);
        }
        report.wall_us = micros(started.elapsed());
        self.note_latecomers(&mut report);
        self.note_nothing_of_nccl(&mut report);
        Ok(report)
    }

    fn manner(&self, by_stages: bool) -> Manner {
        let without_lost = self.options.lost_imports == LostImports::LeaveOut;
        Manner { without_lost, by_stages }
    }

    /// An account of `action` without any step yet.
    pub(super) fn new_report(&self, action: Action) -> Report {
        let mut report = Report::new(self.dir.tenant(), action);
        if self.dead > 0 {
            report.notes.push(format!(
                "{} process(es) of the tenant had ended before; what they left behind was removed",
                self.dead
            ));
        }
        if let Some(thawed) = self.thawed.clone().filter(|_| action == Action::Resume) {
            report.add(thawed);
        }
        report
    }

    /// Is this a pause that takes contexts too?
    pub(super) fn is_deep(&self) -> bool {
        self.action == Action::Pause && self.options.depth == Depth::Contexts
    }

    /// All that can be undone: consent, the phases that prepare, and a last look at who is there.
    pub(super) fn prepare(
        &mut self,
        plan: &Plan,
        members: &[usize],
        report: &mut Report,
    ) -> Result<(), Stop> {
        let action = plan.action;
        if let Some(timeout) = self.options.consent {
            let question = AwaitConsent { action, timeout_ms: millis(timeout) };
            let result = self.step(&question, members, timeout, OnFailure::Stop);
            if !result.failures.is_empty() {
                return Err(Stop::Failed(result.into_failures()));
            }
        }
        if self.options.look_first && action == Action::Resume {
            self.look(plan, members)?;
        }
        if action == Action::Pause {
            self.wait_for_borrowers(members)?;
        }
        self.check_lock().map_err(|_| Stop::LockGone)?;
        self.take_all(plan, members, report)
    }

    /// Is this the one that leads the tenant, as far as others can see? Looked at before a first step is taken.
    pub(super) fn check_lock(&self) -> Result<(), CoordinatorError> {
        let tenant = self.tenant();
        if self.lock.is_named() { Ok(()) } else { Err(RunDirError::LockGone { tenant }.into()) }
    }

    /// The end of a resume by stages: all that follows them. An error is undone by the caller.
    pub(super) fn come(&mut self, members: &[usize], report: &mut Report) -> Result<(), Stop> {
        let mut plan = Plan::new(Action::Resume, self.manner(true));
        plan.prepare.retain(|phase| !phase.is_staged());
        self.take_all(&plan, members, report)?;
        self.commit(&plan.commit, members.to_vec(), report);
        Ok(())
    }

    fn take_all(
        &mut self,
        plan: &Plan,
        members: &[usize],
        report: &mut Report,
    ) -> Result<(), Stop> {
        let action = plan.action;
        let mut taken = 0;
        while let Some(&phase) = plan.prepare.get(taken) {
            taken += 1;
            if phase.is_at_cut() && self.options.takes_part == TakesPart::Everybody {
                self.cut_and_take(phase, action.abort(), members, report)?;
                continue;
            }
            let began = Instant::now();
            if phase == Phase::Drain && report.drain.is_none() {
                self.drain_by_steps(members, None, report)?;
            }
            if phase == Phase::Drain {
                self.wait_behind_gates(members)?;
            }
            let result = self.phase_step(phase, members, OnFailure::Stop);
            if !result.failures.is_empty() {
                return Err(Stop::Failed(result.into_failures()));
            }
            if self.is_called_off() {
                return Err(Stop::CalledOff);
            }
            if let Some(failure) = self.host_shortage(&result.done) {
                return Err(Stop::Failed(vec![failure]));
            }
            if phase == Phase::Drain {
                self.agreed = self.agree(plan, &result.done)?;
            }
            report.add(self.summary(phase, began.elapsed(), result.done));
        }
        let next = Step::Phase(action.commit());
        let dead: Vec<_> =
            members.iter().filter_map(|index| self.peers.check_alive(*index, next).err()).collect();
        if dead.is_empty() { Ok(()) } else { Err(Stop::Failed(dead)) }
    }

    /// What `drained` go by from here on.
    fn agree(&self, plan: &Plan, drained: &[(usize, PhaseReport)]) -> Result<Agreed, Stop> {
        let said: Vec<_> = drained.iter().map(|(_, report)| report).collect();
        let needs = said.iter().filter_map(|report| report.host.as_ref());
        let copies = host_memory::copies_with_room(&needs.collect::<Vec<_>>());
        let is_early = self.options.releases_early || early_release::pays(&said, copies);
        let (schedule, saving) = if plan.by_stages {
            (Schedule::SaveMeanwhile, None)
        } else if is_early {
            (Schedule::SaveMeanwhile, Some(early_release::saving_time(&said)))
        } else {
            (Schedule::SaveFirst, None)
        };
        Ok(Agreed { stays: self.agree_on_shared(drained)?, copies, schedule, saving })
    }

    /// All phases that cannot be undone, of members that are not lost on the way.
    fn commit(&mut self, phases: &[Phase], members: Vec<usize>, report: &mut Report) {
        let mut left = members;
        let mut saving = self.agreed.saving;
        for &phase in phases {
            let began = Instant::now();
            let usual = self.options.phase_timeout(phase);
            // There is no way back, and one that saves is not lost.
            let timeout = saving.take().map_or(usual, |saving| usual.max(phase.timeout() + saving));
            let question = self.question_within(phase, timeout);
            let result = self.step(&question, &left, timeout, OnFailure::WaitForAll);
            left.retain(|index| !result.failures.iter().any(|(failed, _)| failed == index));
            let StepResult { done, failures } = result;
            report.add(self.summary(phase, began.elapsed(), done));
            report.losses.extend(failures.into_iter().map(|(_, failure)| failure));
        }
    }

    /// Have any of `members`, which were not told anything yet, ended meanwhile?
    pub(super) fn check_all_alive(&mut self, members: &[usize]) -> Result<(), Vec<MemberFailure>> {
        let step = Step::Phase(Phase::RestoreStage);
        let dead: Vec<_> =
            members.iter().filter_map(|index| self.peers.check_alive(*index, step).err()).collect();
        if dead.is_empty() { Ok(()) } else { Err(dead) }
    }

    /// Does somebody want it called off?
    pub(super) fn is_called_off(&self) -> bool {
        self.options.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    /// Refuses when the devices cannot hold the members.
    fn look(&mut self, plan: &Plan, members: &[usize]) -> Result<(), Vec<MemberFailure>> {
        let short = short_devices(&self.needs(members));
        let next = plan.prepare.first();
        let (Some(shortage), Some(&index), Some(&next)) = (short.first(), members.first(), next)
        else {
            return Ok(());
        };
        let missing_bytes = shortage.missing_bytes();
        let kind = FailureKind::OutOfDeviceMemory { missing_bytes };
        let failure = Failure { kind, message: "its tenant does not fit".to_owned() };
        let step = Step::Phase(next);
        Err(vec![MemberFailure { who: self.peers.list[index].who, step, failure }])
    }

    /// What `members` need to be resumed and what is free, as far as they answer.
    fn needs(&mut self, members: &[usize]) -> Vec<DeviceDelta> {
        self.ask_needs(members).done.into_iter().flat_map(|(_, needed)| needed.devices).collect()
    }

    fn ask_needs(&mut self, members: &[usize]) -> StepResult<Needed> {
        let timeout = self.options.timeout.unwrap_or(NEEDS_TIMEOUT);
        let question =
            Needs { scope: self.scope.clone(), timeout_ms: millis(timeout), all_devices: false };
        self.step(&question, members, timeout, OnFailure::WaitForAll)
    }

    /// What each of `members` needs to be resumed, in their order.
    pub(super) fn needs_of_each(
        &mut self,
        members: &[usize],
    ) -> Result<Vec<Needed>, Vec<MemberFailure>> {
        let mut result = self.ask_needs(members);
        if !result.failures.is_empty() {
            return Err(result.into_failures());
        }
        result.done.sort_by_key(|(index, _)| members.iter().position(|member| member == index));
        Ok(result.done.into_iter().map(|(_, needed)| needed).collect())
    }

    /// What a pause of `members` would give back about now, by device, as far as they answer.
    pub(super) fn resident_bytes(&mut self, members: &[usize]) -> BTreeMap<String, u64> {
        let timeout = self.options.contact_timeout;
        let result = self.step(&Stats, members, timeout, OnFailure::WaitForAll);
        let leaves = |class: &&ClassBytes| match &self.scope {
            Scope::Whole => true,
            Scope::Tags { tags, .. } => tags.to_pause().has(&class.tag),
        };
        let mut bytes = BTreeMap::new();
        for device in result.done.iter().flat_map(|(_, stats)| &stats.pool.devices) {
            let classes = device.classes.iter().filter(leaves);
            let leaving =
                classes.map(|class| class.resident_bytes.saturating_sub(class.pinned_bytes));
            *bytes.entry(device.uuid.clone()).or_insert(0_u64) += leaving.sum::<u64>();
        }
        bytes
    }

    /// What each of `members` said of its devices in the last phase of `report`, in their order.
    pub(super) fn last_said(&self, report: &Report, members: &[usize]) -> Vec<Vec<DeviceDelta>> {
        let said = report.phases.last().map_or(&[][..], |phase| &phase.members);
        let of = |index: &usize| {
            let who = self.peers.list[*index].who;
            let found = said.iter().find(|member| member.who == who);
            found.map(|member| member.report.devices.clone()).unwrap_or_default()
        };
        members.iter().map(of).collect()
    }

    /// Do the members need more host memory together than there is? Named after the one that needs most.
    fn host_shortage(&mut self, done: &[(usize, PhaseReport)]) -> Option<MemberFailure> {
        let needs = done.iter().filter_map(|(index, report)| Some((*index, report.host.as_ref()?)));
        let needs: Vec<_> = needs.collect();
        let short = host_memory::shortage(needs.iter().map(|(_, need)| *need))?;
        let (most, _) = needs.iter().max_by_key(|(_, need)| need.grow_bytes)?;
        let failure = Failure { kind: FailureKind::OutOfHostMemory, message: short.to_string() };
        self.host_short = Some(short);
        let step = Step::Phase(Phase::Prepare);
        Some(MemberFailure { who: self.peers.list[*most].who, step, failure })
    }

    /// Undoes all that was done in `members` and makes the error of it.
    pub(super) fn roll_back(
        &mut self,
        action: Action,
        members: &[usize],
        stop: Stop,
    ) -> CoordinatorError {
        let called_off = matches!(stop, Stop::CalledOff);
        let joined = matches!(stop, Stop::Joined);
        let lock_is_gone = matches!(stop, Stop::LockGone);
        let mut failures = match stop {
            Stop::Failed(failures) => failures,
            Stop::CalledOff | Stop::Joined | Stop::LockGone => Vec::new(),
        };
        self.name_absent(&mut failures);
        (self.progress)(Event::RollingBack { failures: &failures });
        // A member that still waits for its application has done nothing yet, and stops when we hang up.
        for index in members {
            if self.peers.owes(*index, Step::Consent(action)) {
                self.peers.drop_link(*index);
            }
        }
        let up = |index: &usize| self.peers.is_up(*index);
        let targets: Vec<usize> = members.iter().copied().filter(up).collect();
        let undo = self.question(action.abort());
        let mut result = StepResult::default();
        for index in targets {
            // One that is silent already gets the message, but not another full wait.
            let timeout = if self.peers.is_overdue(index) {
                self.options.reply_margin
            } else {
                self.options.phase_timeout(action.abort()) + self.options.reply_margin
            };
            if let Err(failure) = self.peers.ask(index, &undo, timeout) {
                result.failures.push((index, failure));
            }
        }
        let failed_step = failures.first().map(|failure| failure.step);
        while let Some(answer) = self.peers.next_answer(None) {
            let peer = answer.peer;
            if answer.step == undo.step() {
                match answer.to(&undo) {
                    Ok(report) => result.done.push((peer, report)),
                    // It was under way, and is undone by another's word.
                    Err(failure) if failure.failure.kind == FailureKind::CalledOff => {}
                    Err(failure) => result.failures.push((peer, failure)),
                }
                continue;
            }
            // Late news of the step that failed is part of why; of a member lost meanwhile, too.
            let is_why = |failure: &MemberFailure| {
                Some(failure.step) == failed_step && failure.failure.kind != FailureKind::CalledOff
            };
            failures.extend(answer.failure().filter(is_why));
        }
        let out_of_memory = failures
            .iter()
            .any(|member| matches!(member.failure.kind, FailureKind::OutOfDeviceMemory { .. }));
        let undone: Vec<usize> = result.done.iter().map(|(index, _)| *index).collect();
        let shortages =
            if out_of_memory { short_devices(&self.needs(&undone)) } else { Vec::new() };
        let (tenant, undo_failures) = (self.tenant(), result.into_failures());
        let info = members.first().and_then(|index| self.peers.list[*index].info.as_ref());
        let runs = info.is_some_and(|info| info.state == MemberState::Active);
        if joined && undo_failures.is_empty() {
            CoordinatorError::Joined { tenant }
        } else if lock_is_gone && undo_failures.is_empty() {
            RunDirError::LockGone { tenant }.into()
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
        let news = GiveUp { action, why: error.to_string() };
        for index in members {
            if self.peers.is_up(*index)
                && let Err(failure) = self.peers.ask(*index, &news, TELL_TIMEOUT)
            {
                tracing::debug!(%failure, "a waiting member was not told");
            }
        }
        while let Some(answer) = self.peers.next_answer(None) {
            if let Some(failure) = answer.failure() {
                tracing::debug!(%failure, "a waiting member did not take the news");
            }
        }
    }

    /// What orders of this pause or resume say.
    pub(super) fn told(&self) -> Told<'_> {
        let Agreed { stays, copies, schedule, .. } = &self.agreed;
        let is_deep = self.is_deep();
        Told { copies: *copies, schedule: *schedule, is_deep, ..Told::new(&self.scope, stays) }
    }

    /// `phase` as part of this pause or resume.
    fn question(&self, phase: Phase) -> TakePhase {
        self.question_within(phase, self.options.phase_timeout(phase))
    }

    fn question_within(&self, phase: Phase, timeout: Duration) -> TakePhase {
        let order = phase.order(&self.told());
        let alone = self.acts_alone();
        TakePhase { round: self.round, alone, order, timeout_ms: millis(timeout) }
    }

    pub(super) fn phase_step(
        &mut self,
        phase: Phase,
        members: &[usize],
        on_failure: OnFailure,
    ) -> StepResult<PhaseReport> {
        let timeout = self.options.phase_timeout(phase);
        self.step(&self.question(phase), members, timeout, on_failure)
    }

    /// Asks `members` and gathers their answers.
    pub(super) fn step<Q: Question>(
        &mut self,
        question: &Q,
        members: &[usize],
        timeout: Duration,
        on_failure: OnFailure,
    ) -> StepResult<Q::Answer> {
        let step = question.step();
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
        let due = timeout + self.options.reply_margin;
        for index in members {
            if let Err(failure) = self.peers.ask(*index, question, due) {
                result.failures.push((*index, failure));
                if on_failure == OnFailure::Stop {
                    return result;
                }
            }
        }
        self.peers.give_all_the_time_of_the_last(step);
        let mut goes_on = false;
        loop {
            let stop = on_failure == OnFailure::Stop && !result.failures.is_empty();
            let listens = match on_failure {
                OnFailure::Stop => true,
                OnFailure::WaitForAll => step == Step::Hello || step.is_commit() && !goes_on,
            };
            let interrupt = self.options.interrupt.as_ref().filter(|_| listens);
            let answer =
                if stop { self.peers.settled_answer() } else { self.peers.next_answer(interrupt) };
            let Some(answer) = answer else {
                if on_failure == OnFailure::WaitForAll
                    && step.is_commit()
                    && interrupt.is_some_and(Interrupt::is_raised)
                {
                    goes_on = true;
                    (self.progress)(Event::GoingOn);
                    continue;
                }
                break;
            };
            // An answer to an earlier step that was given up on has no meaning any more.
            if answer.step == step {
                self.file(question, answer, &mut result);
            }
        }
        let elapsed = began.elapsed();
        if result.failures.is_empty() {
            (self.progress)(Event::StepDone { step, elapsed });
        }
        result
    }

    fn file<Q: Question>(
        &mut self,
        question: &Q,
        answer: Answer,
        result: &mut StepResult<Q::Answer>,
    ) {
        let (index, step) = (answer.peer, answer.step);
        match answer.to(question) {
            Ok(answer) => {
                let who = self.peers.list[index].who;
                (self.progress)(Event::MemberDone { who, step });
                result.done.push((index, answer));
            }
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

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
