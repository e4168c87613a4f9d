//! One step of a pause or resume: a question to all members, and their answers.

use std::time::{Duration, Instant};

use super::Interrupt;
use super::peers::{Answer, Question};
use super::report::{Event, MemberFailure, Step};
use super::session::{Agreed, Session};
use crate::phase::Told;
use crate::time::millis;
use crate::wire::{Phase, PhaseReport, TakePhase};

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
        Told { is_deep: self.is_deep(), ..Told::new(&self.scope, &[]) }
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
}
