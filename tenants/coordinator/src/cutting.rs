//! The messages that bring the ranks of a tenant to a common cut, where a pause closes their gates.
//!
//! Every member is told to launch no more than [`Plan::limits`] admits, and to report when it has moved. A member that answers
//! gets the new limits immediately, without a wait for the others. So a member that computes on its host for long delays no
//! other.

use std::time::{Duration, Instant};

use super::cast::{Cast, OnFailure};
use super::report::{CutSummary, DrainSummary, Event, MemberFailure, PhaseSummary, Step};
use super::round::Round;
use super::stepping::{Gated, Stillness};
use super::trouble::Stop;
use sublet_protocol::cut::plan::{Pace, Plan, Verdict};
use sublet_protocol::cut::{CutReport, Lag, Laggard, Limits, foreign_ranks, laggards};
use sublet_protocol::run_dir::pause_thread;
use sublet_protocol::time::{micros, millis};
use sublet_protocol::wire::{FailureKind, Hold, Phase};

/// The longest time that a member may be silent while nothing moves.
const SLICE: Duration = Duration::from_millis(25);
/// The time without progress after which all ranks may launch further. It doubles after each [`STALLS_PER_PATIENCE`] such
/// stalls, so that the wait also suffices for a rank that computes for long.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_MAX: Duration = Duration::from_secs(2);
/// The number of stalls before the patience doubles. Each stall lets all ranks further than the last, by [`Plan::update`]: four
/// of them end a wait for 15 launches.
const STALLS_PER_PATIENCE: u32 = 4;
/// The time without progress, while a process waits for device memory, after which that wait counts as the cause.
const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// The time for which all ranks run on after a pause has met a capture. It doubles each time.
const CAPTURE_REST_MIN: Duration = Duration::from_millis(1);
/// The longest such time.
const CAPTURE_REST_MAX: Duration = Duration::from_millis(50);
/// The longest cut that is not reported.
const QUIET: Duration = Duration::from_millis(200);
/// The number of laggards that an error names.
const NAMED_MAX: usize = 10;

/// One member on the way to the cut.
struct Held {
    index: usize,
    report: CutReport,
    /// The limits that were sent to it last.
    sent: Limits,
    /// The number of answers that it owes.
    due: usize,
    /// The number of owed answers to requests before the last change of limits.
    stale: usize,
    /// Does `report` belong to the limits `sent`?
    fresh: bool,
}

impl Held {
    /// Makes the entry of a member that was held without raised limits, and has reported its position.
    fn new(index: usize, report: CutReport) -> Self {
        Self { index, report, sent: Limits::default(), due: 0, stale: 0, fresh: true }
    }

    /// Records another request to the member, under `limits`.
    fn asked(&mut self, limits: &Limits) {
        if self.sent != *limits {
            self.stale = self.due;
            self.fresh = false;
            self.sent.clone_from(limits);
        }
        self.due += 1;
    }

    /// Records the answer to the oldest request that the member has not answered.
    fn answered(&mut self, report: CutReport) {
        self.due = self.due.saturating_sub(1);
        self.report = report;
        if self.stale > 0 {
            self.stale -= 1;
        } else {
            self.fresh = true;
        }
    }
}

fn patience(stalls: u32) -> Duration {
    PATIENCE.saturating_mul(1 << (stalls / STALLS_PER_PATIENCE).min(16)).min(PATIENCE_MAX)
}

/// The ranks of a tenant on their way to a common cut, where a pause stops them.
pub(super) struct Ranks<'s, 'a> {
    cast: &'s mut Cast<'a>,
    members: &'s [usize],
    /// The running members. The others are stopped in a pause by tag, and are at a cut already.
    running: Vec<usize>,
    began: Instant,
    summary: CutSummary,
    /// One sentence for each communicator that has ranks in no live process of the tenant.
    absent: Vec<String>,
}

impl<'s, 'a> Ranks<'s, 'a> {
    /// The ranks of `members`. Nothing is sent yet.
    pub(super) fn new(cast: &'s mut Cast<'a>, members: &'s [usize]) -> Self {
        let standing = cast.peers.standing();
        let running = members.iter().copied().filter(|index| !standing.contains(index)).collect();
        let (began, summary, absent) = (Instant::now(), CutSummary::default(), Vec::new());
        Self { cast, members, running, began, summary, absent }
    }

    /// The account of the way to the cut, and sentences about missing ranks.
    pub(super) fn into_account(self) -> (CutSummary, Vec<String>) {
        (self.summary, self.absent)
    }

    fn deadline(&self) -> Instant {
        self.began + self.cast.options.cut_timeout()
    }

    /// Brings the ranks to a cut, and tells the members to do `phase` there, which closes their gates. Then lets calls in until
    /// their devices are idle. If a capture prevents that, the ranks run on for a moment, to another cut.
    pub(super) fn stop(
        &mut self,
        round: &mut Round<'_>,
        phase: Phase,
    ) -> Result<(PhaseSummary, DrainSummary), Stop> {
        let mut rest = CAPTURE_REST_MIN;
        loop {
            let plan = self.reach_cut()?;
            let failures = match self.close_gates(round, phase, plan) {
                Err(Stop::Failed(failures)) => failures,
                closed => return closed,
            };
            if !failures.iter().all(is_of_capture) || Instant::now() >= self.deadline() {
                return Err(Stop::Failed(failures));
            }
            // A capture has begun: all ranks run on, then the pause tries again.
            let undo = round.question(Phase::Abort);
            self.cast.take(&undo, self.members, OnFailure::WaitForAll).of_all()?;
            round.begin_again();
            self.summary.retries += 1;
            // Each try holds all ranks, and no try can shorten a capture.
            pause_thread(rest);
            rest = (rest * 2).min(CAPTURE_REST_MAX);
        }
    }

    fn close_gates(
        &mut self,
        round: &Round<'_>,
        phase: Phase,
        plan: Plan,
    ) -> Result<(PhaseSummary, DrainSummary), Stop> {
        let closing = Instant::now();
        let result = self.cast.take(&round.question(phase), self.members, OnFailure::Stop);
        if self.cast.options.is_called_off() {
            return Err(Stop::CalledOff);
        }
        let done = result.of_all()?;
        self.summary.wall_us = micros(closing - self.began);
        let closed = self.cast.summary(phase, closing.elapsed(), done);
        let drain = Gated::new(self.cast, round.number).drain(&self.running, Some(plan))?;
        Ok((closed, drain))
    }

    /// Holds the running members until all launched work can end.
    fn reach_cut(&mut self) -> Result<Plan, Stop> {
        let mut held = self.hold_all()?;
        let launched_before = launched(&held);
        let mut plan = Plan::default();
        let began = Instant::now();
        let mut still = Stillness::new(0);
        let mut quiet = Stillness::new(0);
        let mut stalls = 0;
        loop {
            if self.cast.options.is_called_off() {
                return Err(Stop::CalledOff);
            }
            let reports: Vec<_> = held.iter().map(|held| &held.report).collect();
            self.absent = foreign_ranks(&reports);
            let pace = still.pace(progress(&reports), patience(stalls));
            let verdict = plan.update(&reports, pace);
            if pace == Pace::Stalled {
                self.summary.stalls += 1;
                still.begin_again();
                // A communicator in the making needs ranks that nobody can name yet, perhaps from many launches away. Patience
                // does not help it.
                stalls += u32::from(!plan.is_making(&reports));
            }
            let limits: Vec<_> = reports.iter().map(|r| plan.limits().for_member(r)).collect();
            let current = |(held, limits): (&Held, &Limits)| held.fresh && held.sent == *limits;
            if verdict == Verdict::Settled && held.iter().zip(&limits).all(current) {
                self.summary.launches += launched(&held).saturating_sub(launched_before);
                return Ok(plan);
            }
            let late = laggards(plan.limits(), &reports);
            if self.cast.options.passes_by_memory_waits
                && quiet.pace(progress(&reports), MEMORY_WAIT) == Pace::Stalled
            {
                let waits = self.memory_waits(&held, &late);
                if !waits.is_empty() {
                    return Err(Stop::Failed(waits));
                }
            }
            if Instant::now() >= self.deadline() {
                return Err(Stop::Failed(self.not_reached(&held, &late)));
            }
            if began.elapsed() >= QUIET {
                self.tell(&held, &late);
            }
            // If all ranks are at their places, they only need to confirm their limits.
            let wait = if verdict == Verdict::Settled { Duration::ZERO } else { SLICE };
            for (held, limits) in held.iter_mut().zip(limits) {
                let is_current = held.fresh && held.sent == limits;
                if verdict == Verdict::Settled && is_current {
                    continue;
                }
                self.send_limits(held, limits, wait)?;
            }
            self.gather(&mut held)?;
        }
    }

    fn hold_all(&mut self) -> Result<Vec<Held>, Vec<MemberFailure>> {
        // The first request of a cut: hold everything, and report the position.
        let timeout = self.cast.options.contact_timeout;
        let held = self.cast.step(&Hold::default(), &self.running, timeout, OnFailure::Stop);
        let held = held.of_all()?.into_iter();
        Ok(held.map(|(index, report)| Held::new(index, report)).collect())
    }

    /// Sends a member its limits, unless it knows them and owes an answer. That answer comes when the member moves or after
    /// `wait`.
    fn send_limits(
        &mut self,
        held: &mut Held,
        limits: Limits,
        wait: Duration,
    ) -> Result<(), Vec<MemberFailure>> {
        let changed = held.sent != limits;
        if !changed && held.due > 0 {
            return Ok(());
        }
        self.summary.rounds += u64::from(changed);
        held.asked(&limits);
        let hold = Hold { limits, seen: held.report.seen, wait_ms: millis(wait) };
        let timeout = wait + self.cast.options.contact_timeout;
        let asked = self.cast.peers.ask(held.index, &hold, timeout);
        asked.map_err(|failure| vec![failure])
    }

    /// Waits for an answer, and handles all that have arrived.
    fn gather(&mut self, held: &mut [Held]) -> Result<(), Vec<MemberFailure>> {
        let mut failures = Vec::new();
        for answer in self.cast.peers.arrived(self.cast.options.interrupt.as_ref()) {
            let peer = answer.peer;
            match answer.to(&Hold::default()) {
                Ok(report) => {
                    if let Some(held) = held.iter_mut().find(|held| held.index == peer) {
                        held.answered(report);
                    }
                }
                Err(failure) => failures.push(failure),
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures) }
    }

    fn tell(&mut self, held: &[Held], late: &[Laggard]) {
        if let Some(laggard) = late.first() {
            let who = self.cast.peers.who(held[laggard.report].index);
            self.cast.tell(Event::WaitingForCut { who, laggard, others: late.len() - 1 });
        }
    }

    /// The failures of members for which others wait and which wait for device memory themselves: no launch lets them go on.
    fn memory_waits(&self, held: &[Held], late: &[Laggard]) -> Vec<MemberFailure> {
        let waits = late.iter().filter(|laggard| matches!(laggard.lag, Lag::Launches { .. }));
        let failures = waits.filter_map(|laggard| {
            let held = &held[laggard.report];
            let waited_ms = held.report.waits_for_memory_ms?;
            let message = format!(
                "an allocation of it has waited for {} s for device memory that others hold, and other ranks stand in a collective with it ({laggard}): it \
                 can be paused when it has got that, or was refused it",
                waited_ms / 1000
            );
            let who = self.cast.peers.who(held.index);
            Some(MemberFailure::new(who, Step::Cut, FailureKind::NotNow, message))
        });
        failures.take(NAMED_MAX).collect()
    }

    fn not_reached(&self, held: &[Held], late: &[Laggard]) -> Vec<MemberFailure> {
        let mut failures: Vec<_> = late
            .iter()
            .take(NAMED_MAX)
            .map(|laggard| {
                let who = self.cast.peers.who(held[laggard.report].index);
                let (kind, message) = match laggard.lag {
                    Lag::Captures(count) => (
                        FailureKind::InCapture,
                        format!(
                            "{who} is capturing {count} stream(s): pause again when the capture has ended"
                        ),
                    ),
                    Lag::Launches { .. } | Lag::Call => {
                        (FailureKind::CutNotReached, laggard.to_string())
                    }
                };
                MemberFailure::new(who, Step::Cut, kind, message)
            })
            .collect();
        if late.len() > failures.len()
            && let Some(last) = failures.last_mut()
        {
            let more = late.len() - NAMED_MAX;
            last.failure.message = format!("{} (and {more} more)", last.failure.message);
        }
        if failures.is_empty() {
            // All members had stopped, but not all had reported so under the last limits.
            failures.extend(held.iter().filter(|held| !held.fresh).map(|held| {
                let message = "it did not say in time that it has stopped";
                let who = self.cast.peers.who(held.index);
                MemberFailure::new(who, Step::Cut, FailureKind::CutNotReached, message)
            }));
        }
        failures
    }
}

/// Returns a figure that changes with any step of any member.
fn progress(reports: &[&CutReport]) -> u64 {
    reports.iter().map(|report| report.progress).fold(0, u64::wrapping_add)
}

/// Can the same member be paused a little later, after a capture has ended?
fn is_of_capture(failure: &MemberFailure) -> bool {
    failure.failure.kind == FailureKind::InCapture
}

fn launched(held: &[Held]) -> u64 {
    held.iter().map(|held| held.report.launched()).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_protocol::cut::{CommunicatorId, Lane, Series};

    fn limits(limit: u64) -> Limits {
        let mut limits = Limits::default();
        let communicator = CommunicatorId(1);
        limits.raise(Lane { communicator, series: Series::Collectives }, limit);
        limits
    }

    #[test]
    fn an_answer_counts_when_it_was_given_under_the_limits_sent_last() {
        let mut held = Held::new(0, CutReport::default());
        assert!(held.fresh);
        // The member is asked twice under the first limits, then under others, with no answer in between.
        for limit in [1, 1, 2] {
            held.asked(&limits(limit));
        }
        let mut fresh = Vec::new();
        for _ in 0..3 {
            held.answered(CutReport::default());
            fresh.push(held.fresh);
        }
        assert_eq!(fresh, [false, false, true]);
        // If the member is asked again under the same limits, its last report still holds.
        held.asked(&limits(2));
        assert!(held.fresh && held.due == 1);
    }
}
