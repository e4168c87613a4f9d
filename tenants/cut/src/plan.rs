//! The coordinator's decision about what to let through next: a pure function of what it was told.
//!
//! `docs/consistent-cut.md` argues why this ends, and `tests/model.rs` next to this file tries it on all
//! interleavings of small programs.

use std::collections::{BTreeMap, BTreeSet};

use super::{CommunicatorId, CutReport, Lane, Limits, Series};

/// Up to how many launches further a process goes after one stall: about what the queue of a device holds.
const FURTHER_MAX: u64 = 1024;

/// The limits of one cut, and why they are what they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Plan {
    limits: Limits,
    /// For a lane whose limit was raised beyond what anybody had launched: the lanes that somebody was
    /// behind on, and for whose sake it was, directly or not.
    reasons: BTreeMap<Lane, BTreeSet<Lane>>,
    /// Communicators that some ranks know by one identity and some by another, both ways round.
    aliases: BTreeMap<CommunicatorId, CommunicatorId>,
    /// The obstacles of the last stall that have not changed since.
    stuck: BTreeSet<Stuck>,
    /// The number of further launches that each process may make because of these obstacles.
    further: u64,
    /// Up to how many launches in all each process goes on until the next stall, in the order of the reports.
    allowed: Vec<u64>,
}

/// An obstacle that the others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stuck {
    /// A rank is behind on a lane, with so many launches.
    Behind(Lane, u32, u64),
    /// The process of that report is inside a call.
    Inside(usize),
    /// The process of that report captures a stream.
    Captures(usize),
}

/// The result of a look at the reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nobody is below a limit, inside a call or capturing: if all reports were made under
    /// [`Plan::limits`], nothing can be launched any more, and nothing launched needs anything that is not.
    Settled,
    /// Somebody is still to come.
    Open,
}

/// Has nothing happened for so long that a rank may be waiting in host code for one that is held?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// No.
    Moving,
    /// Yes: everybody who waits may go further.
    Stalled,
}

impl Plan {
    /// Up to which count each lane may be launched now.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes the latest report of every member, and sets the limits.
    ///
    /// * A lane's limit is its largest count; of signals, what has been waited for. It never sinks, but for a stall: what was allowed and not
    ///   used by then (a launch that failed) is taken back.
    /// * A member that is behind on a lane, or captures, has what its threads wait for raised, unless that
    ///   lane was the reason for the limit that it is behind of: it cannot be in the way then (one thread
    ///   would have come the other way round), and two could raise each other's for ever.
    /// * In a stall, and after it until a process has gone as many launches further as it may, whatever anybody waits for
    ///   is raised. That is one launch in the first stall, and twice as many in each stall that finds somebody at the
    ///   same place as the stall before it. So a wait that N launches end costs no more than log2(N) + 1 stalls.
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

    /// The rank that the others waited for has come: no process goes further for it.
    fn forget_stall(&mut self) {
        self.stuck.clear();
        self.further = 0;
        self.allowed.clear();
    }

    /// Raises whatever the threads of one member wait for: each goes one launch further.
    pub fn let_on(&mut self, report: &CutReport) {
        for need in report.waiting.iter().flat_map(|waiting| &waiting.needs) {
            self.raise(need.lane, need.needed, BTreeSet::new());
        }
    }

    /// Is a communicator being made whose other ranks are not known yet?
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

    /// Lets no lane's limit be below what has been launched on it.
    fn count(&mut self, reports: &[&CutReport], pace: Pace) {
        if pace == Pace::Stalled {
            self.limits = Limits::default();
            self.reasons.clear();
        }
        for counter in reports.iter().flat_map(|report| &report.counters) {
            // A signal that nobody waits for yet lets nobody go further.
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

    /// Raises the limit of `lane`, under both of its names where it has two.
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

    /// Raises what a member that is behind waits for.
    fn help(&mut self, report: &CutReport, limits: &Limits) {
        let behind: BTreeSet<Lane> = report.behind(limits).map(|(lane, ..)| lane).collect();
        if behind.is_empty() && report.captures == 0 {
            return;
        }
        // A thread that may go already goes first: what it does may be all that was missing.
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
