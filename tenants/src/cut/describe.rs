//! A cut that is not reached yet, in words.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::plan::both_ways;
use super::{CommunicatorId, CutReport, Lane, Limits, Series};

/// Why a member is not at the cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laggard {
    /// Which of the reports.
    pub report: usize,
    /// What is missing.
    pub lag: Lag,
    /// What its threads are at.
    pub place: String,
}

/// What a member lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lag {
    /// Launches of a lane.
    Launches {
        /// Which.
        lane: Lane,
        /// By which rank.
        rank: u32,
        /// How many it has made.
        launched: u64,
        /// How many others have.
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

/// What the threads of a member are at: the oldest call, else the oldest wait.
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
