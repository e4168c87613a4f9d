//! Which members take part in a pause or resume, one step of it (a question to all members, and their answers), and the way back.
//!
//! A pause takes those that are active, a resume those that are paused. What a coordinator that has ended left half done is settled
//! before. When a pause or resume ends before its point of no return, all members go back, and the error says why.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use vmm_pool::PinnedBytes;

use super::agreement::Agreed;
use super::conversation::{Inquiry, Next, Wait};
use super::needs::short_devices;
use super::peers::{Peers, Question};
use super::report::{Event, MemberFailure, Step};
use super::session::{Session, Stop};
use super::{Interrupt, LostImports, Meanwhile, Trouble};
use crate::phase::Told;
use crate::run_dir::RunDirError;
use crate::scope::{LIBRARY_TAGS, NCCL_TAG, Scope, TagNames};
use crate::time::millis;
use crate::wire::{
    Action, FailureKind, GiveUp, MemberState, Phase, PhaseReport, TagBytes, TakePhase,
};

impl Session<'_> {
    pub(super) fn state(&self, index: usize) -> Option<MemberState> {
        self.peers.list[index].info.as_ref().map(|info| info.state)
    }

    /// The members that are in `state`.
    fn members_in(&self, state: MemberState) -> Vec<usize> {
        (0..self.peers.list.len()).filter(|index| self.state(*index) == Some(state)).collect()
    }

    /// The members that stand still in a pause by tag.
    pub(super) fn standing(&self) -> Vec<usize> {
        let info = |index: &usize| self.peers.list[*index].info.as_ref();
        let stands = |index: &usize| info(index).is_some_and(|info| info.stands_without.is_some());
        (0..self.peers.list.len()).filter(stands).collect()
    }

    /// The tags of a pause by tag in which members stand still.
    fn stands_without(&self) -> Option<TagNames> {
        let mut infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        infos.find_map(|info| info.stands_without.clone())
    }

    /// Device memory that the pause of everything has left. A pause by tag is not about that.
    pub(super) fn stays(&self) -> Vec<PinnedBytes> {
        let mut stays = Vec::new();
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        for info in infos.filter(|_| self.scope == Scope::Whole) {
            PinnedBytes::merge(&mut stays, &info.stays);
        }
        stays
    }

    /// The members that `action` has something to do for; empty when there is nothing to be done. A resume
    /// without tags of a tenant that runs is one of all its tags.
    pub(super) fn members_for(&mut self) -> Result<Vec<usize>, Trouble> {
        let action = self.action;
        self.refuse_unknown_tags()?;
        let active = self.members_in(MemberState::Active);
        let mut paused = self.members_in(MemberState::Paused);
        paused.extend(self.members_in(MemberState::Deep));
        if action == Action::Resume && paused.is_empty() && self.scope == Scope::Whole {
            self.scope = Scope::Tags { tags: TagNames::All, owner: None };
        }
        if let Some(without) = self.stands_without() {
            match (action, &self.scope) {
                (Action::Pause, Scope::Tags { tags, .. }) if without.cover(tags) => {
                    return Ok(Vec::new());
                }
                (Action::Resume, Scope::Tags { tags, .. }) if tags.cover(&without) => {}
                (Action::Resume, Scope::Whole) => {}
                // The rest of it.
                (Action::Pause, Scope::Whole) => {
                    let standing = self.standing();
                    return Ok(active.into_iter().chain(standing).collect());
                }
                (Action::Pause | Action::Resume, _) => self.refuse_standing()?,
            }
        }
        let members = match action {
            Action::Pause => active,
            Action::Resume if paused.is_empty() => active,
            Action::Resume => {
                self.refuse_resume_without_partners(&paused)?;
                return Ok(paused);
            }
        };
        let Scope::Tags { tags, .. } = &self.scope else {
            return Ok(members);
        };
        if action == Action::Pause && !paused.is_empty() {
            return Err(Trouble::PausedAlready { tenant: self.tenant() });
        }
        let infos = || members.iter().filter_map(|index| self.peers.list[*index].info.as_ref());
        let rows = infos().flat_map(|info| info.tags.iter().map(|row| (info.id, row)));
        let tags = match action {
            Action::Pause => tags.to_pause(),
            Action::Resume => tags.to_resume(),
        };
        let bytes = rows.filter(|(_, row)| tags.has(&row.tag)).map(|(id, row)| {
            match (action, self.scope.is_about(id)) {
                (Action::Pause, true) => row.resident_bytes,
                (Action::Pause, false) => 0,
                // What others have imported may be away where the owner's own memory is not.
                (Action::Resume, true) => row.away_bytes + row.imported_away_bytes,
                (Action::Resume, false) => row.imported_away_bytes,
            }
        });
        // Calls into NCCL wait as requested, whether or not it has memory to give.
        let nccl_waits = action == Action::Pause;
        let is_nccl_as_asked = !tags.has(NCCL_TAG)
            || infos()
                .filter(|info| self.scope.is_about(info.id))
                .all(|info| info.nccl_waits == nccl_waits);
        let is_nothing_to_do = bytes.sum::<u64>() == 0 && is_nccl_as_asked;
        let has_agreed = |row: &TagBytes| row.resident_bytes == 0 || row.runs_without;
        let mut leaving = infos().flat_map(|info| &info.tags).filter(|row| tags.has(&row.tag));
        let stands = action == Action::Pause
            && self.options.meanwhile == Meanwhile::AsAgreed
            && !leaving.all(has_agreed);
        self.stands = stands;
        if is_nothing_to_do {
            return Ok(Vec::new());
        }
        if action == Action::Resume {
            self.refuse_resume_without_partners(&members)?;
        }
        Ok(members)
    }

    /// Refuses what would end a pause by tag in which members stand still, or make it another.
    pub(super) fn refuse_standing(&self) -> Result<(), Trouble> {
        let Some(tags) = self.stands_without() else { return Ok(()) };
        let what = Scope::Tags { tags, owner: None }.subject(self.dir.tenant());
        Err(Trouble::StandsStill { tenant: self.tenant(), what })
    }

    /// What an owner has freed meanwhile comes back for those that hold it, and goes when all have it: without one of them it would be
    /// lost. Before anything is created.
    fn refuse_resume_without_partners(&mut self, members: &[usize]) -> Result<(), Trouble> {
        if self.acts_alone() {
            return Ok(());
        }
        let partners = self.partners(members);
        let found = partners.and_then(|partners| self.refuse_missing(partners.iter()));
        found.map_err(|failures| {
            let tenant = self.tenant();
            let runs = members.first().is_some_and(|index| self.runs(*index));
            Trouble::refused(tenant, (Action::Resume, runs), failures)
        })
    }

    /// What a pause of the scope takes of `members` now, so that a resume of it brings nothing back that was away before.
    pub(super) fn resident_part(&self, members: &[usize]) -> Scope {
        let Scope::Tags { tags, owner } = &self.scope else { return Scope::Whole };
        let infos = || members.iter().filter_map(|index| self.peers.list[*index].info.as_ref());
        let leaves = tags.to_pause();
        let rows = infos().flat_map(|info| &info.tags);
        let resident = rows.filter(|row| row.resident_bytes > 0 && leaves.has(&row.tag));
        let mut names: BTreeSet<String> = resident.map(|row| row.tag.clone()).collect();
        // Its calls are let through again where they were before.
        if leaves.has(NCCL_TAG) && infos().any(|info| !info.nccl_waits) {
            names.insert(NCCL_TAG.to_owned());
        }
        Scope::Tags { tags: TagNames::Named(names), owner: *owner }
    }

    /// Does this member run, so that what comes back to it comes by tag?
    pub(super) fn runs(&self, index: usize) -> bool {
        self.state(index) == Some(MemberState::Active)
    }

    fn refuse_unknown_tags(&self) -> Result<(), Trouble> {
        let Scope::Tags { tags: TagNames::Named(wanted), .. } = &self.scope else {
            return Ok(());
        };
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        let known: BTreeSet<String> =
            infos.flat_map(|info| &info.tags).map(|row| row.tag.clone()).collect();
        let mut unknown: Vec<String> = wanted.difference(&known).cloned().collect();
        // A library's may come to be at any time.
        unknown.retain(|tag| !LIBRARY_TAGS.contains(&tag.as_str()));
        if unknown.is_empty() {
            return Ok(());
        }
        let known = known.into_iter().collect();
        Err(Trouble::UnknownTags { tenant: self.tenant(), unknown, known })
    }

    /// Has every member that a dead coordinator left half-way finish or undo its part, so that every member
    /// is active or paused. They agree among themselves which way ([`Phase::Settle`]).
    pub(super) fn recover(&mut self) -> Result<(), Trouble> {
        let is_half_way = |index: &usize| match &self.peers.list[*index].info {
            Some(info) => match info.state {
                MemberState::Offloading | MemberState::Restoring => true,
                MemberState::Active | MemberState::Paused | MemberState::Deep => {
                    info.held || info.in_round
                }
                MemberState::Faulted => false,
            },
            None => false,
        };
        let half_way: Vec<usize> = (0..self.peers.list.len()).filter(is_half_way).collect();
        if half_way.is_empty() {
            return self.refuse_faulted();
        }
        for index in &half_way {
            let who = self.peers.list[*index].who;
            (self.progress)(Event::Recovering { who });
        }
        let result = self.phase_step(Phase::Settle, &half_way, OnFailure::WaitForAll);
        // One that ended meanwhile is left half-way no more.
        let mut failures = result.failures;
        failures.retain(|(index, _)| !self.is_dead(*index));
        if !failures.is_empty() {
            return Err(Trouble::Unrecovered {
                tenant: self.tenant(),
                failures: failures.into_iter().map(|(_, failure)| failure).collect(),
            });
        }
        self.peers.drop_ended();
        self.greet()?;
        self.refuse_faulted()
    }

    fn refuse_faulted(&self) -> Result<(), Trouble> {
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        for info in infos {
            match info.state {
                MemberState::Faulted => {
                    return Err(Trouble::Faulted { tenant: self.tenant(), pid: info.pid });
                }
                MemberState::Active
                | MemberState::Paused
                | MemberState::Deep
                | MemberState::Offloading
                | MemberState::Restoring => {}
            }
        }
        Ok(())
    }
}

// A step.

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

impl Session<'_> {
    /// What orders say, when no process has said anything yet that others go by.
    pub(super) fn told(&self) -> Told<'_> {
        Told {
            is_deep: self.is_deep(),
            stands: self.stands,
            without_lost: self.options.lost_imports == LostImports::LeaveOut,
            ..Told::new(&self.scope, &[])
        }
    }

    /// `phase` as part of this pause or resume.
    pub(super) fn question(&self, phase: Phase) -> TakePhase {
        self.question_of(phase, &Agreed::default())
    }

    /// The same, by what all have agreed on.
    pub(super) fn question_of(&self, phase: Phase, agreed: &Agreed) -> TakePhase {
        let Agreed { stays, copies, schedule, .. } = agreed;
        let order =
            phase.order(&Told { stays, copies: *copies, schedule: *schedule, ..self.told() });
        let timeout_ms = millis(self.options.phase_timeout(phase));
        TakePhase { round: self.round(), alone: self.acts_alone(), order, timeout_ms }
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
        let listens = match on_failure {
            OnFailure::Stop => true,
            OnFailure::WaitForAll => step == Step::Hello || step.is_commit(),
        };
        let interrupt = self.options.interrupt.as_ref().filter(|_| listens);
        self.take_answers(
            members,
            Inquiry::of(question.clone(), due, interrupt),
            on_failure,
            &mut result,
        );
        let goes_on = on_failure == OnFailure::WaitForAll && step.is_commit();
        if goes_on && interrupt.is_some_and(Interrupt::is_raised) {
            (self.progress)(Event::GoingOn);
            self.take_answers(
                &[],
                Inquiry::of(question.clone(), due, None),
                on_failure,
                &mut result,
            );
        }
        let elapsed = began.elapsed();
        if result.failures.is_empty() {
            (self.progress)(Event::StepDone { step, elapsed });
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
        let step = inquiry.step();
        self.peers.converse(members, inquiry, |peers, index, said| match said {
            Ok(answer) => {
                progress(Event::MemberDone { who: peers.list[index].who, step });
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
}

// The way back.

/// How long a member may take to hear that what it waits for will not happen.
const TELL_TIMEOUT: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Undoes all that was done in `members` and makes the error of it.
    pub(super) fn roll_back(&mut self, members: &[usize], stop: Stop) -> Trouble {
        let action = self.action;
        let mut failures = stop.failures();
        (self.progress)(Event::RollingBack { failures: &failures });
        // A member that still waits for its application has done nothing yet, and stops when we hang up.
        for index in members {
            if self.peers.owes(*index, Step::Consent(action)) {
                self.peers.drop_link(*index);
            }
        }
        let up = |index: &usize| self.peers.is_up(*index);
        let targets: Vec<usize> = members.iter().copied().filter(up).collect();
        let undo = self.question(Phase::Abort);
        let mut result = StepResult::default();
        for index in targets {
            // One that is silent already gets the message, but not another full wait.
            let timeout = if self.peers.is_overdue(index) {
                self.options.reply_margin
            } else {
                self.options.phase_timeout(Phase::Abort) + self.options.reply_margin
            };
            if let Err(failure) = self.peers.ask(index, &undo, timeout) {
                result.failures.push((index, failure));
            }
        }
        let failed_step = failures.first().map(|failure| failure.step);
        // Late news of the step that failed is part of why; of a member lost meanwhile, too.
        let is_why = |failure: &MemberFailure| {
            Some(failure.step) == failed_step && failure.failure.kind != FailureKind::CalledOff
        };
        Peers::gather(&mut [&mut self.peers], Wait::Others, None, |_, _, answer| {
            let peer = answer.peer;
            if answer.step != undo.step() {
                failures.extend(answer.failure().filter(is_why));
                return Wait::Others;
            }
            match answer.to(&undo) {
                Ok(report) => result.done.push((peer, report)),
                // It was under way, and is undone by another's word.
                Err(failure) if failure.failure.kind == FailureKind::CalledOff => {}
                Err(failure) => result.failures.push((peer, failure)),
            }
            Wait::Others
        });
        let out_of_memory = failures
            .iter()
            .any(|member| matches!(member.failure.kind, FailureKind::OutOfDeviceMemory { .. }));
        let undone: Vec<usize> = result.done.iter().map(|(index, _)| *index).collect();
        let shortages =
            if out_of_memory { short_devices(&self.needs(&undone)) } else { Vec::new() };
        let (tenant, undo_failures) = (self.tenant(), result.into_failures());
        let info = members.first().and_then(|index| self.peers.list[*index].info.as_ref());
        let runs = info.is_some_and(|info| info.state == MemberState::Active);
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

    /// Lets the applications that wait for it together go on with the same error.
    pub(super) fn tell_waiting(&mut self, members: &[usize], error: &Trouble) {
        let news = GiveUp { action: self.action, why: error.to_string() };
        self.peers.tell(members, news, TELL_TIMEOUT);
    }
}
