//! The coordinator's decision which launches to let through next: a pure function of the reports.
//!
//! `docs/consistent-cut.md` argues why this ends, and `tests/model.rs` next to this file tries it on all
//! interleavings of small programs.

use std::collections::{BTreeMap, BTreeSet};

use super::{CommunicatorId, CutReport, Lane, Limits, Series};

/// The most further launches of a process after one stall: about the length of a device's queue.
const FURTHER_MAX: u64 = 1024;

/// The limits of one cut, and their reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Plan {
    limits: Limits,
    /// The reasons of lanes whose limit was raised beyond all launches: the lanes with a rank behind that the raise was for,
    /// directly or not.
    reasons: BTreeMap<Lane, BTreeSet<Lane>>,
    /// Communicators that have two identities, mapped in both directions.
    aliases: BTreeMap<CommunicatorId, CommunicatorId>,
    /// The obstacles of the last stall that have not changed since.
    stuck: BTreeSet<Stuck>,
    /// The number of further launches that each process may make because of these obstacles.
    further: u64,
    /// The total launches up to which each process goes on until the next stall, in the order of the reports.
    allowed: Vec<u64>,
}

/// An obstacle that the other processes wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stuck {
    /// A rank is behind on a lane, with this number of launches.
    Behind(Lane, u32, u64),
    /// The process of that report is inside a call.
    Inside(usize),
    /// The process of that report captures a stream.
    Captures(usize),
}

/// The result of a look at the reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No process is below a limit, inside a call or capturing. If all reports were made under [`Plan::limits`], nothing more can
    /// be launched, and no launched work needs work that is not launched.
    Settled,
    /// A process is still below a limit, inside a call or capturing.
    Open,
}

/// Has nothing happened for so long that a rank may be waiting in host code for one that is held?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// No.
    Moving,
    /// Yes: all waiting processes may go further.
    Stalled,
}

impl Plan {
    /// Returns the count up to which each lane may be launched now.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sets the limits by the latest report of every member.
    ///
    /// * A lane's limit is its largest count; for signals, the largest count that was waited for. It sinks only in a stall: then
    ///   launches that were allowed but not made (a failed one) are taken back.
    /// * If a member is behind on a lane, or captures, the limits that its threads wait for are raised. The exception is a lane
    ///   that was the reason for the limit that the member has not reached. Such a lane cannot be the obstacle (one thread would
    ///   have come in the other order), and two lanes could raise each other for ever.
    /// * In a stall, all limits that threads wait for are raised, until each process has made its further launches. That is one
    ///   launch in the first stall. It doubles in each stall that finds an obstacle of the stall before. So a wait that N
    ///   launches end costs no more than log2(N) + 1 stalls.
    pub fn update(&mut self, reports: &[&CutReport], pace: Pace) -> Verdict {
        self.aliases = both_ways(reports);
        self.count(reports, pace);
        let limits = self.limits.clone();
        if reports.iter().all(|report| report.is_at_rest(&limits)) {
            self.forget_stall();
            return Verdict::Settled;
        }
        let stuck = stuck(reports, &limits);
        self.stuck.retain(|one| stuck.contains(one));
        if pace == Pace::Stalled {
            let goes_on = !self.stuck.is_empty();
            self.further = if goes_on { (2 * self.further).min(FURTHER_MAX) } else { 1 };
            let allowed = reports.iter().map(|report| report.launched() + self.further);
            self.allowed = allowed.collect();
            self.stuck = stuck;
        } else if self.stuck.is_empty() {
            self.forget_stall();
        }
        for (index, report) in reports.iter().enumerate() {
            if self.allowed.get(index).is_some_and(|allowed| report.launched() < *allowed) {
                self.let_on(report);
            } else {
                self.help(report, &limits);
            }
        }
        Verdict::Open
    }

    /// Forgets the stall: its obstacle is gone, and no process goes further for it.
    fn forget_stall(&mut self) {
        self.stuck.clear();
        self.further = 0;
        self.allowed.clear();
    }

    /// Raises the limits that the threads of one member wait for: each thread goes one launch further.
    pub fn let_on(&mut self, report: &CutReport) {
        for need in report.waiting.iter().flat_map(|waiting| &waiting.needs) {
            self.raise(need.lane, need.needed, BTreeSet::new());
        }
    }

    /// Is a communicator being created whose other ranks are not known yet?
    pub fn is_making(&self, reports: &[&CutReport]) -> bool {
        let locals = || reports.iter().flat_map(|report| &report.ranks);
        let creations = self.limits.iter().filter(|(lane, _)| lane.series == Series::Creation);
        let making = creations.map(|(lane, _)| lane.communicator).any(|communicator| {
            let other = self.aliases.get(&communicator).copied();
            let is_one = move |id| id == communicator || Some(id) == other;
            let here = locals().filter(|local| is_one(local.communicator));
            here.clone().any(|local| here.clone().count() < local.ranks as usize)
        });
        making && reports.iter().any(|report| !report.inside.is_empty())
    }

    /// Raises the limit of each lane to the launches that were made on it.
    fn count(&mut self, reports: &[&CutReport], pace: Pace) {
        if pace == Pace::Stalled {
            self.limits = Limits::default();
            self.reasons.clear();
        }
        for counter in reports.iter().flat_map(|report| &report.counters) {
            // A signal that no rank waits for yet raises no limit.
            let is_surplus =
                matches!(counter.lane.series, Series::Signal { from, .. } if from == counter.rank);
            if !is_surplus {
                self.raise(counter.lane, counter.launched, BTreeSet::new());
            }
        }
        for communicator in reports.iter().flat_map(|report| &report.given_up) {
            self.limits.give_up(*communicator);
            if let Some(other) = self.aliases.get(communicator) {
                self.limits.give_up(*other);
            }
        }
    }

    /// Raises the limit of `lane`, under both identities of its communicator if it has two.
    fn raise(&mut self, lane: Lane, to: u64, reasons: BTreeSet<Lane>) {
        if let Some(other) = self.other_name(lane)
            && self.limits.raise(other, to)
        {
            self.reasons.insert(other, reasons.clone());
        }
        if self.limits.raise(lane, to) {
            self.reasons.insert(lane, reasons);
        }
    }

    fn other_name(&self, lane: Lane) -> Option<Lane> {
        let communicator = *self.aliases.get(&lane.communicator)?;
        Some(Lane { communicator, ..lane })
    }

    /// Raises the limits that a member waits for, if it is behind or captures.
    fn help(&mut self, report: &CutReport, limits: &Limits) {
        let behind: BTreeSet<Lane> = report.behind(limits).map(|(lane, ..)| lane).collect();
        if behind.is_empty() && report.captures == 0 {
            return;
        }
        // A thread that may go already goes first: its launch may be the only missing one.
        if report.waiting.iter().any(|waiting| limits.admit(&waiting.needs)) {
            return;
        }
        for waiting in &report.waiting {
            let missing: Vec<_> =
                waiting.needs.iter().filter(|need| need.needed > limits.of(need.lane)).collect();
            let own = waiting.needs.iter().map(|need| need.lane).find(|lane| behind.contains(lane));
            let cause = own.or_else(|| {
                let misses = |lane: &Lane| missing.iter().any(|need| need.lane == *lane);
                behind.iter().copied().find(|lane| !self.is_for(*lane, misses))
            });
            let reasons = match cause {
                Some(lane) => {
                    let mut reasons = self.reasons.get(&lane).cloned().unwrap_or_default();
                    reasons.extend(self.other_name(lane));
                    reasons.insert(lane);
                    reasons
                }
                None if report.captures > 0 => BTreeSet::new(),
                None => continue,
            };
            for need in missing {
                self.raise(need.lane, need.needed, reasons.clone());
            }
        }
    }

    /// Was the limit of `lane` raised for the sake of a lane that `which` picks?
    fn is_for(&self, lane: Lane, which: impl Fn(&Lane) -> bool) -> bool {
        self.reasons.get(&lane).is_some_and(|reasons| reasons.iter().any(which))
    }
}

/// Lists the obstacles that keep `reports` from a cut at `limits`.
fn stuck(reports: &[&CutReport], limits: &Limits) -> BTreeSet<Stuck> {
    let all = reports.iter().enumerate().flat_map(|(index, report)| {
        let behind =
            report.behind(limits).map(|(lane, rank, count)| Stuck::Behind(lane, rank, count));
        let inside = (!report.inside.is_empty()).then_some(Stuck::Inside(index));
        let captures = (report.captures > 0).then_some(Stuck::Captures(index));
        behind.chain(inside).chain(captures)
    });
    all.collect()
}

/// Returns the communicators that have two identities according to `reports`, mapped both ways round.
pub(super) fn both_ways(reports: &[&CutReport]) -> BTreeMap<CommunicatorId, CommunicatorId> {
    let aliases = reports.iter().flat_map(|report| &report.aliases);
    aliases.flat_map(|(one, other)| [(*one, *other), (*other, *one)]).collect()
}
