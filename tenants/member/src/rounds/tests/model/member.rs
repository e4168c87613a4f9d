//! A member, and its work on the orders of a coordinator.

use std::collections::BTreeMap;

use crate::progress::Outlook;
use crate::rounds::{Admission, OfRound, Rounds, Said, Verdict};
use sublet_protocol::phase::Stage;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Order {
    Begin,
    Prepare,
    Commit,
    /// A step after the point of no return.
    Verify,
    Abort,
    Settle,
}

pub(super) const ALL: [Order; 5] =
    [Order::Begin, Order::Prepare, Order::Commit, Order::Verify, Order::Abort];

impl Order {
    pub(super) fn stage(self) -> Stage {
        match self {
            Self::Begin | Self::Prepare => Stage::Prepare,
            Self::Commit | Self::Verify => Stage::Commit,
            Self::Abort => Stage::Abort,
            Self::Settle => Stage::Settle,
        }
    }

    pub(super) fn is_last(self) -> bool {
        matches!(self, Self::Verify | Self::Abort | Self::Settle)
    }

    /// Returns the next order of a coordinator.
    pub(super) fn next(self) -> Option<Self> {
        match self {
            Self::Settle => Some(Self::Begin),
            Self::Begin => Some(Self::Prepare),
            Self::Prepare => Some(Self::Commit),
            Self::Commit => Some(Self::Verify),
            Self::Verify | Self::Abort => None,
        }
    }
}

/// The progress of a member in its orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    Rest,
    Begun(u64),
    Prepared(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Settling {
    pub(super) round: Option<u64>,
    pub(super) said: Said,
    pub(super) asked: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Member {
    pub(super) rounds: Rounds,
    pub(super) at: At,
    /// The settling under way in the worker.
    pub(super) settling: Option<Settling>,
    /// The coordinator that waits for the member to settle.
    pub(super) asks_to_settle: Option<usize>,
    /// The ends of rounds of several members, as this member saw them.
    pub(super) ends: BTreeMap<u64, Verdict>,
    pub(super) is_stopped: bool,
    /// Have others gone on without this member?
    pub(super) was_passed_by: bool,
}

impl Member {
    pub(super) fn rests(&self) -> bool {
        self.at == At::Rest
    }

    pub(super) fn outlook(&self) -> Outlook {
        match self.at {
            At::Rest | At::Begun(_) => Outlook::Aborts,
            At::Prepared(_) => Outlook::InDoubt,
        }
    }

    pub(super) fn admit(
        &mut self,
        connection: u64,
        round: u64,
        alone: bool,
        order: Order,
    ) -> Admission {
        let rests = self.rests();
        self.rounds.admit(connection, OfRound { round, alone, stage: order.stage() }, rests)
    }

    /// Does the worker's part of an order. Returns false if the order does not follow the step before.
    pub(super) fn obey(&mut self, round: u64, order: Order) -> bool {
        let done = match (order, self.at) {
            (Order::Begin, At::Rest) => {
                self.at = At::Begun(round);
                true
            }
            (Order::Prepare, At::Begun(begun)) => {
                assert_eq!(begun, round, "an order of another round is obeyed");
                self.at = At::Prepared(round);
                true
            }
            (Order::Commit, At::Prepared(begun)) => {
                assert_eq!(begun, round, "an order of another round is obeyed");
                self.end(round, Verdict::Commit);
                true
            }
            (Order::Abort, At::Begun(begun) | At::Prepared(begun)) => {
                assert_eq!(begun, round, "an order of another round is obeyed");
                self.end(round, Verdict::Abort);
                true
            }
            (Order::Verify | Order::Abort, At::Rest) => true,
            _ => false,
        };
        if order.is_last() {
            self.rounds.last_step_taken(round, self.rests());
        }
        done
    }

    pub(super) fn end(&mut self, round: u64, verdict: Verdict) {
        self.at = At::Rest;
        self.ends.insert(round, verdict);
    }
}
