//! Questions to several members, and the handling of each answer.
//!
//! All waits for answers use [`Peers::gather`], which handles late answers, closed connections, deadlines and calling off.

use std::time::Duration;

use super::interrupt::Interrupt;
use super::peers::{Answer, Peers, Question};
use super::report::MemberFailure;

/// One question, its time limit, and the interrupt that ends the wait early.
#[derive(Debug)]
pub struct Inquiry<'a, Q> {
    pub(super) question: Q,
    timeout: Duration,
    interrupt: Option<&'a Interrupt>,
}

impl<'a, Q> Inquiry<'a, Q> {
    /// Makes an inquiry of `question`, to be answered within `timeout`, or until `interrupt` is raised.
    pub fn of(question: Q, timeout: Duration, interrupt: Option<&'a Interrupt>) -> Self {
        Self { question, timeout, interrupt }
    }
}

/// The step that follows an answer.
#[derive(Debug)]
pub enum Next<Q> {
    /// No further question to this member.
    Done,
    /// Another question to the member, with the same time limit.
    Again(Q),
    /// An end of all waiting: only answers that have arrived are used.
    Stop,
}

/// Does the wait for other members go on after an answer?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Yes.
    Others,
    /// No: only answers that have arrived are used.
    Nobody,
}

impl Peers {
    /// Asks `members`, and passes each answer, or the reason why there is none, to `take`, until all have answered or are
    /// overdue. An answer to an abandoned earlier step is dropped. Without members the call waits for those that were asked
    /// already.
    pub fn converse<Q: Question>(
        &mut self,
        members: &[usize],
        inquiry: Inquiry<'_, Q>,
        mut take: impl FnMut(&mut Self, usize, Result<Q::Answer, MemberFailure>) -> Next<Q>,
    ) {
        let Inquiry { question, timeout, interrupt } = inquiry;
        let mut follow = |peers: &mut Self, index, mut said| loop {
            match take(peers, index, said) {
                Next::Done => return Wait::Others,
                Next::Stop => return Wait::Nobody,
                Next::Again(question) => match peers.ask(index, &question, timeout) {
                    Ok(()) => return Wait::Others,
                    Err(failure) => said = Err(failure),
                },
            }
        };
        let mut wait = Wait::Others;
        for index in members {
            if let Err(failure) = self.ask(*index, &question, timeout) {
                wait = follow(self, *index, Err(failure));
                if wait == Wait::Nobody {
                    break;
                }
            }
        }
        let step = question.step();
        self.give_all_the_time_of_the_last(step);
        Self::gather(&mut [self], wait, interrupt, |all, _, answer| {
            let index = answer.peer;
            if answer.step == step { follow(all[0], index, answer.to(&question)) } else { wait }
        });
    }

    /// Passes on the answers of several tenants' members, each with the position of its tenant, until no member owes an answer
    /// that could still be in time, or `interrupt` is raised.
    pub(super) fn gather(
        all: &mut [&mut Self],
        mut wait: Wait,
        interrupt: Option<&Interrupt>,
        mut take: impl FnMut(&mut [&mut Self], usize, Answer) -> Wait,
    ) {
        loop {
            let Some((position, answer)) = Self::next_of(all, wait, interrupt) else { return };
            if take(all, position, answer) == Wait::Nobody {
                wait = Wait::Nobody;
            }
        }
    }

    /// Waits for one answer, and returns all that have arrived by then.
    pub(super) fn arrived(&mut self, interrupt: Option<&Interrupt>) -> Vec<Answer> {
        let mut arrived = Vec::new();
        Self::gather(&mut [self], Wait::Others, interrupt, |_, _, answer| {
            arrived.push(answer);
            Wait::Nobody
        });
        arrived
    }
}
