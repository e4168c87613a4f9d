//! The data of the cut's messages: a member's report on its launches, and the limits that it is told. The module also
//! says in words why a cut is not reached yet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::plan::both_ways;
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

    /// Returns the limits that a member with this report must know. They are those of its own lanes, and of
    /// communicators being made, which it may be about to join.
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

/// The number of launches that one rank has made on one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaunchCount {
    /// On which lane.
    pub lane: Lane,
    /// By which rank.
    pub rank: u32,
    /// The number of launches.
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

/// The state of a member as the coordinator knows it. The coordinator is told when that state has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seen {
    /// The number of launches that had been made to wait.
    pub waits: u64,
    /// Was it at all its limits, with nobody inside?
    pub at_rest: bool,
}

/// A held member's report on its launches.
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

    /// Counts the launches that all ranks that live here have made on all lanes.
    pub fn launched(&self) -> u64 {
        self.counters.iter().map(|counter| counter.launched).fold(0, u64::saturating_add)
    }

    /// Returns the number of launches on `lane` of each rank that lives here.
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

// In words.

/// Why a member is not at the cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laggard {
    /// The index of the member's report.
    pub report: usize,
    /// The event that is missing.
    pub lag: Lag,
    /// A description of what its threads are at.
    pub place: String,
}

/// An event that a member lacks for the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lag {
    /// Launches of a lane.
    Launches {
        /// The lane of the launches.
        lane: Lane,
        /// By which rank.
        rank: u32,
        /// The number of launches that the rank has made.
        launched: u64,
        /// The limit of the lane.
        limit: u64,
    },
    /// A call to return.
    Call,
    /// Stream captures to end.
    Captures(u64),
}

/// All that is missing under `limits`, lane by lane.
pub fn laggards(limits: &Limits, reports: &[&CutReport]) -> Vec<Laggard> {
    let mut laggards = Vec::new();
    for (index, report) in reports.iter().enumerate() {
        let mut lags: Vec<_> = report
            .behind(limits)
            .map(|(lane, rank, launched)| Lag::Launches {
                lane,
                rank,
                launched,
                limit: limits.of(lane),
            })
            .collect();
        if report.captures > 0 {
            lags.push(Lag::Captures(report.captures));
        }
        if lags.is_empty() && !report.inside.is_empty() {
            lags.push(Lag::Call);
        }
        let place = place(report);
        laggards.extend(lags.into_iter().map(|lag| Laggard {
            report: index,
            lag,
            place: place.clone(),
        }));
    }
    laggards
}

/// Describes what the threads of a member are at: the oldest call, else the oldest wait.
fn place(report: &CutReport) -> String {
    if let Some(call) = report.inside.iter().max_by_key(|call| call.inside_ms) {
        return format!("inside {} for {}", call.what, seconds(call.inside_ms));
    }
    if let Some(waiting) = report.waiting.iter().max_by_key(|waiting| waiting.waited_ms) {
        let waited = seconds(waiting.waited_ms);
        return format!("held before {} for {waited}", waiting.what);
    }
    "running host code, with no launch since".to_owned()
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

impl fmt::Display for Laggard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = &self.place;
        match self.lag {
            Lag::Launches { lane, rank, launched, limit } => {
                let communicator = lane.communicator;
                write!(f, "rank {rank} of communicator {communicator} ")?;
                match lane.series {
                    Series::Creation => f.write_str("has yet to join it")?,
                    Series::End => f.write_str("has yet to end it")?,
                    Series::Collectives => write!(f, "at collective {launched} of {limit}")?,
                    Series::Expert { group } => {
                        write!(
                            f,
                            "at exchange {launched} of {limit} between experts of group {group}"
                        )?;
                    }
                    Series::Signal { from, to, index, context } => {
                        write!(
                            f,
                            "at signal {launched} of {limit} from rank {from} to rank {to} (index {index}, \
                             context {context})"
                        )?;
                    }
                    Series::Pair { from, to } => {
                        write!(
                            f,
                            "at message {launched} of {limit} from rank {from} to rank {to}"
                        )?;
                    }
                }
                write!(f, ": {place}")
            }
            Lag::Call => f.write_str(place),
            Lag::Captures(count) => write!(f, "capturing {count} stream(s): {place}"),
        }
    }
}

/// Communicators of which some ranks live in none of the processes that reported: how much those have
/// launched, nobody here knows. One line each.
pub fn foreign_ranks(reports: &[&CutReport]) -> Vec<String> {
    let mut communicators: BTreeMap<CommunicatorId, (u32, BTreeSet<u32>)> = BTreeMap::new();
    let aliases = both_ways(reports);
    for local in reports.iter().flat_map(|report| &report.ranks) {
        let id = local.communicator;
        let id = aliases.get(&id).map_or(id, |other| id.min(*other));
        let (ranks, here) = communicators.entry(id).or_default();
        *ranks = local.ranks;
        here.insert(local.rank);
    }
    let partial = communicators.iter().filter(|(_, (ranks, here))| here.len() < *ranks as usize);
    partial
        .map(|(communicator, (ranks, here))| {
            let missing: Vec<String> =
                (0..*ranks).filter(|rank| !here.contains(rank)).map(|rank| rank.to_string()).collect();
            format!(
                "communicator {communicator} has {ranks} ranks, and no live process of this tenant holds {} ({}): \
                 a pause cannot wait for what they have launched, and where they have ended, their peers wait in \
                 vain",
                if missing.len() == 1 { "one of them" } else { "some of them" },
                missing.join(", ")
            )
        })
        .collect()
}
