//! What a member says of its launches, and what it is told: the data of the cut's messages.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{CommunicatorId, Lane, Rank, Series};

/// Up to which count each lane may be launched. On a lane that is not named, nothing may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Limits {
    of: BTreeMap<Lane, u64>,
    /// Of these, a member below a limit is not waited for.
    given_up: BTreeSet<CommunicatorId>,
}

impl Limits {
    /// The limit of `lane`.
    pub fn of(&self, lane: Lane) -> u64 {
        self.of.get(&lane).copied().unwrap_or(0)
    }

    /// May what needs `needs` be launched?
    pub fn admit(&self, needs: &[Need]) -> bool {
        needs.iter().all(|need| need.needed <= self.of(need.lane))
    }

    /// Raises the limit of `lane` to `to`, if it is lower; says whether.
    pub fn raise(&mut self, lane: Lane, to: u64) -> bool {
        let raised = to > self.of(lane);
        if raised {
            self.of.insert(lane, to);
        }
        raised
    }

    /// All lanes that have one, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Lane, u64)> {
        self.of.iter().map(|(lane, limit)| (*lane, *limit))
    }

    /// What a member with this report must know: its own lanes, and communicators being made, which it
    /// may be about to join.
    #[must_use]
    pub fn for_member(&self, report: &CutReport) -> Self {
        let own = |lane: Lane| lane.series == Series::Creation || report.takes_part(lane);
        let of: BTreeMap<_, _> = self.iter().filter(|(lane, _)| own(*lane)).collect();
        let is_own = |id: &&CommunicatorId| of.keys().any(|lane| lane.communicator == **id);
        let given_up = self.given_up.iter().filter(is_own).copied().collect();
        Self { of, given_up }
    }

    /// Ranks of `communicator` wait for some that have given it up: nobody is waited for on its lanes any more.
    pub(super) fn give_up(&mut self, communicator: CommunicatorId) {
        self.given_up.insert(communicator);
    }

    /// Is `rank` waited for while it is below the limit of `lane`?
    fn demands(&self, lane: Lane, rank: u32) -> bool {
        lane.series.demands(rank) && !self.given_up.contains(&lane.communicator)
    }
}

/// One lane's part of a launch that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Need {
    /// On which lane.
    pub lane: Lane,
    /// By which rank.
    pub rank: u32,
    /// The limit that would let it pass.
    pub needed: u64,
}

/// How much one rank has launched on one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaunchCount {
    /// On which lane.
    pub lane: Lane,
    /// By which rank.
    pub rank: u32,
    /// How much.
    pub launched: u64,
}

/// A thread that waits to launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Waiting {
    /// The call.
    pub what: String,
    /// The limits that would let it go; none while it waits for memory that is away, since no limit does.
    pub needs: Vec<Need>,
    /// For how long, in milliseconds.
    pub waited_ms: u64,
}

/// A call that has been let through and is not over.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Inside {
    /// The call.
    pub what: String,
    /// For how long at least, in milliseconds.
    pub inside_ms: u64,
}

/// What the coordinator knows of a member already: it is told when this is no longer so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seen {
    /// How many launches had been made to wait.
    pub waits: u64,
    /// Was it at all its limits, with nobody inside?
    pub at_rest: bool,
}

/// What a held member says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CutReport {
    /// The state that this report is of.
    pub seen: Seen,
    /// Moves with every launch, wait and return: unchanged, nothing has happened.
    pub progress: u64,
    /// The ranks that live here.
    pub ranks: Vec<Rank>,
    /// Their counts.
    pub counters: Vec<LaunchCount>,
    /// Threads that wait to launch.
    pub waiting: Vec<Waiting>,
    /// Calls under way.
    pub inside: Vec<Inside>,
    /// Stream captures under way.
    pub captures: u64,
    /// For how long an allocation of the process has waited for memory that others hold, in milliseconds, where one does.
    pub waits_for_memory_ms: Option<u64>,
    /// Communicators that ranks of this process have given up, the latest ones.
    pub given_up: Vec<CommunicatorId>,
    /// Communicators of ranks that live here which other ranks know by another identity.
    pub aliases: Vec<(CommunicatorId, CommunicatorId)>,
}

/// Lists in a report are cut at this length, counts of ranks excepted: they are for people, and for
/// deciding what to let through next, one at a time.
pub(super) const LISTED_MAX: usize = 256;

impl CutReport {
    /// Does a rank that lives here take part in `lane`?
    pub fn takes_part(&self, lane: Lane) -> bool {
        self.ranks_in(lane).next().is_some()
            || self.counters.iter().any(|counter| counter.lane == lane)
    }

    /// How much all ranks that live here have launched on all lanes.
    pub(crate) fn launched(&self) -> u64 {
        self.counters.iter().map(|counter| counter.launched).fold(0, u64::saturating_add)
    }

    /// How much each rank that lives here has launched on `lane`.
    pub fn counts_on(&self, lane: Lane) -> impl Iterator<Item = (u32, u64)> + '_ {
        let counters = move || self.counters.iter().filter(move |counter| counter.lane == lane);
        let idle =
            self.ranks_in(lane).filter(move |rank| counters().all(|counter| counter.rank != *rank));
        counters().map(|counter| (counter.rank, counter.launched)).chain(idle.map(|rank| (rank, 0)))
    }

    /// Lanes, of those with a limit, on which a rank that lives here has launched less and is waited for, in order.
    pub fn behind<'a>(&'a self, limits: &'a Limits) -> impl Iterator<Item = (Lane, u32, u64)> + 'a {
        limits.iter().flat_map(move |(lane, limit)| {
            let is_short =
                move |(rank, count): &(u32, u64)| *count < limit && limits.demands(lane, *rank);
            let short = self.counts_on(lane).filter(is_short);
            short.map(move |(rank, count)| (lane, rank, count))
        })
    }

    /// Is it at all its `limits`, with nothing under way?
    pub fn is_at_rest(&self, limits: &Limits) -> bool {
        self.inside.is_empty() && self.captures == 0 && self.behind(limits).next().is_none()
    }

    fn ranks_in(&self, lane: Lane) -> impl Iterator<Item = u32> + '_ {
        let locals = self.ranks.iter().filter(move |local| local.communicator == lane.communicator);
        locals.map(|local| local.rank).filter(move |rank| lane.series.includes(*rank))
    }
}
