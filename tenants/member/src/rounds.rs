//! The pauses and resumes of a process, one at a time, and what it was told of their ends.
//!
//! A round is one pause or resume. The leader sends all its orders over one connection, and orders of other rounds are
//! refused as long as it is under way: two that lead at a time, each without knowing of the other, do not both get what
//! they want. [`Order::Settle`](sublet_protocol::phase::Order::Settle) is no order of a round: it ends the one under way.
//!
//! A process keeps what it was told of a round's end. Others may ask for it later, because the coordinator has ended.
//! Nobody asks about a round that no other process took part in, so such rounds displace nothing. A process may pause
//! and resume by itself as often as it likes, while another one is still to ask.

use std::collections::VecDeque;

use super::progress::Outlook;
use sublet_protocol::phase::Stage;
use sublet_protocol::wire::{Asked, RoundEnd};

/// Rounds of several processes that are remembered. No next one begins while a process is half-way in the last, as long as
/// commands take turns; the others are for when they do not, because their lock's file was removed.
const PAST_MAX: usize = 16;

/// The end of a pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Verdict {
    /// One was told to commit.
    Commit,
    /// None was told to commit.
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
    /// No other process takes part.
    pub(super) alone: bool,
    pub(super) stage: Stage,
}

/// The decision on an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Admission {
    /// It is taken.
    Taken,
    /// It undoes what has not begun here, or is undone.
    NothingToUndo,
    /// Another round is under way, or its own is over here.
    Refused,
}

/// See the head of this module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Rounds {
    /// The connection of the leader, also before the first order of a round: it holds ranks on the way to a cut.
    leader: Option<u64>,
    under_way: Option<Round>,
    /// The newest last.
    past: VecDeque<(u64, RoundEnd)>,
    /// The last step that was requested, for people.
    pub(super) asked: Option<Asked>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Round {
    number: u64,
    alone: bool,
    told: RoundEnd,
    /// The leader leads it no more, so that none of its orders is taken.
    is_closed: bool,
}

impl Rounds {
    /// The connection of the leader.
    pub(super) fn leader(&self) -> Option<u64> {
        self.leader
    }

    /// Lets `connection` lead, where nobody else does.
    pub(super) fn lead(&mut self, connection: u64) -> bool {
        *self.leader.get_or_insert(connection) == connection
    }

    /// Looks at an order that has come over `connection`. A process that `rests` is neither on its way to a pause nor to
    /// a resume.
    pub(super) fn admit(&mut self, connection: u64, order: OfRound, rests: bool) -> Admission {
        let OfRound { round, alone, stage } = order;
        if self.under_way.is_some_and(|open| open.is_closed && open.number != round) && rests {
            // Its leader has ended, and there is nothing to be settled.
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
            // It is half-way, because it could not be undone before.
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

    /// Is this round under way, and led over `connection`?
    pub(super) fn is_led(&self, connection: u64, round: u64) -> bool {
        let is_open = self.under_way.is_some_and(|open| open.number == round && !open.is_closed);
        is_open && self.leader == Some(connection)
    }

    /// The leader leads no more. Answers which round is to be settled.
    pub(super) fn end_leading(&mut self) -> Option<u64> {
        self.leader = None;
        let open = self.under_way.as_mut()?;
        open.is_closed = true;
        Some(open.number)
    }

    /// The last step of what was led over `connection` is answered. What it leads since then goes on.
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

    /// Returns what was told of the end of `round`.
    pub(super) fn told(&self, round: u64) -> RoundEnd {
        let open = self.under_way.filter(|open| open.number == round).map(|open| open.told);
        let past = || self.past.iter().rev().find(|(past, _)| *past == round).map(|past| past.1);
        open.or_else(past).unwrap_or(RoundEnd::Open)
    }

    /// This process has found out how `round` ends, which counts as told from then on.
    pub(super) fn decide(&mut self, round: u64, verdict: Verdict) {
        if let Some(open) = self.under_way.as_mut().filter(|open| open.number == round) {
            open.told = verdict.into();
        } else if let Some(past) = self.past.iter_mut().find(|(past, _)| *past == round) {
            past.1 = verdict.into();
        }
    }

    /// The last step of `round` was taken. One that has failed, so that the process does not rest, leaves it to be settled.
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

/// Returns how a round ends, as far as a process that takes part knows without asking anybody.
pub(super) fn known(outlook: Outlook, told: RoundEnd) -> Option<Verdict> {
    match (outlook, told) {
        (Outlook::InDoubt, RoundEnd::Commit) => Some(Verdict::Commit),
        (Outlook::Aborts, _) | (Outlook::InDoubt, RoundEnd::Abort) => Some(Verdict::Abort),
        (Outlook::InDoubt, RoundEnd::Open) => None,
    }
}

/// The answers of the others about a round's end so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Said {
    commits: bool,
    aborts: bool,
}

impl Said {
    /// One says that it was told this.
    pub(super) fn hear(&mut self, told: RoundEnd) {
        match told {
            RoundEnd::Open => {}
            RoundEnd::Commit => self.commits = true,
            RoundEnd::Abort => self.aborts = true,
        }
    }

    /// Returns the verdict that follows from the answers, whatever others will say.
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
