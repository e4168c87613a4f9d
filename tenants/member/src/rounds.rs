//! The pauses and resumes of a process, one at a time, and the orders that it got about their ends.
//!
//! A round is one pause or resume. The leader sends all its orders over one connection. Orders of other rounds are refused
//! while it is under way. So if two coordinators lead at a time, each without knowing of the other, only one of them succeeds.
//! [`Order::Settle`](sublet_protocol::phase::Order::Settle) is no order of a round: it ends the round under way.
//!
//! A process keeps its orders about a round's end. Others may ask for them later, after the coordinator has ended. No process
//! asks about a round in which no other process took part, so such rounds displace no entry. A process may pause and resume
//! itself any number of times before another process asks.

use std::collections::VecDeque;

use super::progress::Outlook;
use sublet_protocol::phase::Stage;
use sublet_protocol::wire::{Asked, RoundEnd};

/// The number of rounds of several processes that are remembered. While commands take turns, no further round begins as long as
/// a process is half-way in the last one. The other entries are for commands that do not take turns, because their lock's file
/// was removed.
const PAST_MAX: usize = 16;

/// The end of a pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Verdict {
    /// A process was told to commit.
    Commit,
    /// No process was told to commit.
    Abort,
}

impl From<Verdict> for RoundEnd {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Commit => Self::Commit,
            Verdict::Abort => Self::Abort,
        }
    }
}

/// The part of an order that concerns its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OfRound {
    pub(super) round: u64,
    /// Does no other process take part?
    pub(super) alone: bool,
    pub(super) stage: Stage,
}

/// The decision on an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Admission {
    /// The order is followed.
    Taken,
    /// The order undoes a round that has not begun here, or is undone.
    NothingToUndo,
    /// Another round is under way, or the order's round is over here.
    Refused,
}

/// The rounds of a process: see the head of this module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Rounds {
    /// The connection of the leader, even before the first order of a round, while it holds ranks on the way to a cut.
    leader: Option<u64>,
    under_way: Option<Round>,
    /// Finished rounds, the newest last.
    past: VecDeque<(u64, RoundEnd)>,
    /// The last step that was requested, for people.
    pub(super) asked: Option<Asked>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Round {
    number: u64,
    alone: bool,
    told: RoundEnd,
    /// Has the leader stopped leading the round, so that no order of it is followed?
    is_closed: bool,
}

impl Rounds {
    /// The connection of the leader.
    pub(super) fn leader(&self) -> Option<u64> {
        self.leader
    }

    /// Lets `connection` lead, unless another connection does.
    pub(super) fn lead(&mut self, connection: u64) -> bool {
        *self.leader.get_or_insert(connection) == connection
    }

    /// Decides on an order from `connection`. A process that `rests` is neither on its way to a pause nor to a resume.
    pub(super) fn admit(&mut self, connection: u64, order: OfRound, rests: bool) -> Admission {
        let OfRound { round, alone, stage } = order;
        if self.under_way.is_some_and(|open| open.is_closed && open.number != round) && rests {
            // The leader has ended, and no round is to be settled.
            self.end_round();
        }
        let leads = self.leader.is_none_or(|leader| leader == connection);
        let is_new = leads && !self.is_past(round);
        let told = match (&mut self.under_way, stage) {
            (Some(open), _) if open.number == round && leads && !open.is_closed => &mut open.told,
            (None, Stage::Prepare) if is_new => {
                let new = Round { number: round, alone, told: RoundEnd::Open, is_closed: false };
                &mut self.under_way.insert(new).told
            }
            (None, Stage::Abort) if is_new => {
                self.leader = Some(connection);
                self.remember(round, alone, RoundEnd::Abort);
                return Admission::Taken;
            }
            // The round is half-way, because it could not be undone before.
            (Some(open), Stage::Abort) if open.number == round && open.is_closed && !rests => {
                return Admission::Refused;
            }
            (_, Stage::Abort) => return Admission::NothingToUndo,
            (_, Stage::Prepare | Stage::Commit | Stage::Settle | Stage::AtRest) => {
                return Admission::Refused;
            }
        };
        match (*told, stage) {
            (RoundEnd::Open, Stage::Commit) => *told = RoundEnd::Commit,
            (RoundEnd::Open, Stage::Abort) => *told = RoundEnd::Abort,
            (RoundEnd::Commit, Stage::Abort) | (RoundEnd::Abort, Stage::Commit) => {
                return Admission::Refused;
            }
            _ => {}
        }
        self.leader = Some(connection);
        Admission::Taken
    }

    /// Is this round under way, with `connection` as its leader?
    pub(super) fn is_led(&self, connection: u64, round: u64) -> bool {
        let is_open = self.under_way.is_some_and(|open| open.number == round && !open.is_closed);
        is_open && self.leader == Some(connection)
    }

    /// Ends the lead. Returns the round that is to be settled.
    pub(super) fn end_leading(&mut self) -> Option<u64> {
        self.leader = None;
        let open = self.under_way.as_mut()?;
        open.is_closed = true;
        Some(open.number)
    }

    /// Ends the lead of `connection` after the answer to its last step. A round that it leads since then goes on.
    pub(super) fn stop_leading(&mut self, connection: u64) {
        let is_open = self.under_way.is_some_and(|open| !open.is_closed);
        if !is_open && self.leader == Some(connection) {
            self.leader = None;
        }
    }

    /// Does no other process take part in the round under way?
    pub(super) fn acts_alone(&self) -> bool {
        self.under_way.is_some_and(|open| open.alone)
    }

    /// The round that is under way, or left half done.
    pub(super) fn under_way(&self) -> Option<u64> {
        self.under_way.map(|open| open.number)
    }

    /// Returns the order that was given about the end of `round`.
    pub(super) fn told(&self, round: u64) -> RoundEnd {
        let open = self.under_way.filter(|open| open.number == round).map(|open| open.told);
        let past = || self.past.iter().rev().find(|(past, _)| *past == round).map(|past| past.1);
        open.or_else(past).unwrap_or(RoundEnd::Open)
    }

    /// Records the end of `round` that this process has found out. It counts as an order from then on.
    pub(super) fn decide(&mut self, round: u64, verdict: Verdict) {
        if let Some(open) = self.under_way.as_mut().filter(|open| open.number == round) {
            open.told = verdict.into();
        } else if let Some(past) = self.past.iter_mut().find(|(past, _)| *past == round) {
            past.1 = verdict.into();
        }
    }

    /// Ends `round` after its last step. If that step failed, so that the process does not rest, the round stays to be settled.
    pub(super) fn last_step_taken(&mut self, round: u64, rests: bool) {
        if self.under_way() != Some(round) {
            return;
        }
        if rests {
            self.end_round();
        } else if let Some(open) = &mut self.under_way {
            open.is_closed = true;
        }
    }

    fn end_round(&mut self) {
        if let Some(Round { number, alone, told, .. }) = self.under_way.take() {
            self.remember(number, alone, told);
        }
    }

    fn is_past(&self, round: u64) -> bool {
        self.past.iter().any(|(past, _)| *past == round)
    }

    fn remember(&mut self, round: u64, alone: bool, told: RoundEnd) {
        if alone {
            return;
        }
        if self.past.len() == PAST_MAX {
            self.past.pop_front();
        }
        self.past.push_back((round, told));
    }
}

/// Returns the end of a round, as far as a participating process knows it without asking others.
pub(super) fn known(outlook: Outlook, told: RoundEnd) -> Option<Verdict> {
    match (outlook, told) {
        (Outlook::InDoubt, RoundEnd::Commit) => Some(Verdict::Commit),
        (Outlook::Aborts, _) | (Outlook::InDoubt, RoundEnd::Abort) => Some(Verdict::Abort),
        (Outlook::InDoubt, RoundEnd::Open) => None,
    }
}

/// The answers of other processes about a round's end so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Said {
    commits: bool,
    aborts: bool,
}

impl Said {
    /// Adds the answer of one process.
    pub(super) fn hear(&mut self, told: RoundEnd) {
        match told {
            RoundEnd::Open => {}
            RoundEnd::Commit => self.commits = true,
            RoundEnd::Abort => self.aborts = true,
        }
    }

    /// Returns the verdict that follows from the answers, whatever other processes will answer.
    pub(super) fn verdict(self) -> Option<Verdict> {
        match self {
            Self { commits: true, .. } => Some(Verdict::Commit),
            Self { aborts: true, .. } => Some(Verdict::Abort),
            Self { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests;
