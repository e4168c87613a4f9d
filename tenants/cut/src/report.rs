//! The data of the cut's messages: a member's report on its launches, and the limits that it gets. The module also describes why
//! a cut is not reached yet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::plan::both_ways;
use super::{CommunicatorId, Lane, Rank, Series};

/// The count up to which each lane may be launched; 0 for a lane without an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Limits {
    of: BTreeMap<Lane, u64>,
    /// Communicators on whose lanes a member below a limit is not waited for.
    given_up: BTreeSet<CommunicatorId>,
}

impl Limits {
    /// Returns the limit of `lane`.
    pub fn of(&self, lane: Lane) -> u64 {
        self.of.get(&lane).copied().unwrap_or(0)
    }

    /// May a launch with these `needs` be made?
    pub fn admit(&self, needs: &[Need]) -> bool {
        needs.iter().all(|need| need.needed <= self.of(need.lane))
    }

    /// Raises the limit of `lane` to `to`, if it is lower. Returns whether it was.
    pub fn raise(&mut self, lane: Lane, to: u64) -> bool {
        let raised = to > self.of(lane);
        if raised {
            self.of.insert(lane, to);
        }
        raised
    }

    /// Returns all lanes with a limit, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Lane, u64)> {
        self.of.iter().map(|(lane, limit)| (*lane, *limit))
    }

    /// Returns the limits that a member with this report must know. They are the limits of its own lanes, and of communicators
    /// being created, which it may be about to join.
    #[must_use]
    pub fn for_member(&self, report: &CutReport) -> Self {
        let own = |lane: Lane| lane.series == Series::Creation || report.takes_part(lane);
        let of: BTreeMap<_, _> = self.iter().filter(|(lane, _)| own(*lane)).collect();
        let is_own = |id: &&CommunicatorId| of.keys().any(|lane| lane.communicator == **id);
        let given_up = self.given_up.iter().filter(is_own).copied().collect();
        Self { of, given_up }
    }

    /// Marks `communicator` as given up: some ranks wait for others that have left it. No rank is waited for on its lanes any
    /// more.
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
    /// The limits that would let it go. Empty while it waits for memory that is away: no limit lets it go then.
    pub needs: Vec<Need>,
    /// For how long, in milliseconds.
    pub waited_ms: u64,
}

/// A call that was let through and has not returned.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Inside {
    /// The call.
    pub what: String,
    /// The least time that it has lasted, in milliseconds.
    pub inside_ms: u64,
}

/// The state of a member that the coordinator knows. A change of it is reported to the coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seen {
    /// The number of launches that have had to wait.
    pub waits: u64,
    /// Had it reached all its limits, with no thread inside?
    pub at_rest: bool,
}

/// A held member's report on its launches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CutReport {
    /// The state that this report is of.
    pub seen: Seen,
    /// Changes with every launch, wait and return.
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
    /// The time for which an allocation has waited for memory that others hold, in milliseconds; none if no allocation waits.
    pub waits_for_memory_ms: Option<u64>,
    /// Communicators that ranks of this process have given up, the latest ones.
    pub given_up: Vec<CommunicatorId>,
    /// Communicators of ranks that live here, and the other identities by which other ranks know them.
    pub aliases: Vec<(CommunicatorId, CommunicatorId)>,
}

/// The greatest length of lists in a report, except counts of ranks. The lists are for people, and for the choice of the next
/// launch, one at a time.
pub(super) const LISTED_MAX: usize = 256;

impl CutReport {
    /// Does a rank that lives here take part in `lane`?
    pub fn takes_part(&self, lane: Lane) -> bool {
        self.ranks_in(lane).next().is_some()
            || self.counters.iter().any(|counter| counter.lane == lane)
    }

    /// Returns the number of launches of all ranks that live here, on all lanes.
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

    /// Returns the lanes on which a rank that lives here is below the limit and is waited for, in order, with the rank and its
    /// launches.
    pub fn behind<'a>(&'a self, limits: &'a Limits) -> impl Iterator<Item = (Lane, u32, u64)> + 'a {
        limits.iter().flat_map(move |(lane, limit)| {
            let is_short =
                move |(rank, count): &(u32, u64)| *count < limit && limits.demands(lane, *rank);
            let short = self.counts_on(lane).filter(is_short);
            short.map(move |(rank, count)| (lane, rank, count))
        })
    }

    /// Has it reached all its `limits`, with nothing under way?
    pub fn is_at_rest(&self, limits: &Limits) -> bool {
        self.inside.is_empty() && self.captures == 0 && self.behind(limits).next().is_none()
    }

    fn ranks_in(&self, lane: Lane) -> impl Iterator<Item = u32> + '_ {
        let locals = self.ranks.iter().filter(move |local| local.communicator == lane.communicator);
        locals.map(|local| local.rank).filter(move |rank| lane.series.includes(*rank))
    }
}

// In words.

/// A reason why a member is not at the cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laggard {
    /// The index of the member's report.
    pub report: usize,
    /// The event that is missing.
    pub lag: Lag,
    /// A description of the calls or waits of its threads.
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

/// Lists all that is missing under `limits`, lane by lane.
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

/// Describes the oldest call of a member's threads, or else the oldest wait.
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

/// Lists communicators with ranks in processes that did not report, one line each. The launches of those ranks are not known
/// here.
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
