//! The messages that let the devices of a tenant finish behind closed gates. [`sublet_protocol::stepping`] decides. This module
//! sends the decisions to each process, and reads its reports.

use std::time::{Duration, Instant};

use super::cast::Cast;
use super::report::{DrainSummary, Event, MemberFailure, Step};
use super::trouble::Stop;
use sublet_protocol::cut::Limits;
use sublet_protocol::cut::plan::{Pace, Plan};
use sublet_protocol::stepping::{Activity, Calls, Decision, StepOrder, Stepper, not_idle};
use sublet_protocol::time::{micros, millis};
use sublet_protocol::wire::{FailureKind, Phase, StepOn};

/// The time without progress before processes are let on for the first time: kernels that wait for nothing end without help.
const PATIENCE: Duration = Duration::from_millis(10);
/// The same time afterwards; it is doubled after each [`ROUNDS_PER_PATIENCE`] rounds.
const PATIENCE_BETWEEN: Duration = Duration::from_millis(1);
const PATIENCE_MAX: Duration = Duration::from_millis(200);
const ROUNDS_PER_PATIENCE: u32 = 8;
/// The time without progress for each call that a busy process was allowed in its turn. A process that computes on the host
/// meanwhile falls behind by no more than that.
const PATIENCE_PER_CALL: Duration = Duration::from_millis(1);
/// The time within which a process must make the calls of one step.
const STEP_TIME: Duration = Duration::from_millis(200);
/// The longest time that a process may be silent while nothing moves.
const SLICE: Duration = Duration::from_millis(25);
/// The longest drain that is not reported.
const QUIET: Duration = Duration::from_millis(500);
/// The number of processes that an error names in addition to its subject.
const NAMED_MAX: usize = 8;

/// The factor between the timeout that was too short and the one that an error proposes.
const LONGER: u32 = 4;

/// One process behind its gate.
struct Stepped {
    index: usize,
    activity: Option<Activity>,
    /// The last order that it was sent.
    sent: u64,
    /// The calls that this order allows.
    calls: Calls,
    /// The limits that were sent to it last; none before the first in this drain: the limits of the cut hold then.
    limits: Option<Limits>,
    /// The number of answers that it owes.
    due: usize,
}

impl Stepped {
    fn new(index: usize) -> Self {
        let (activity, calls, limits) = (None, Calls::None, None);
        Self { index, activity, sent: 0, calls, limits, due: 0 }
    }

    /// Returns the activity of the process, if the report belongs to the last order.
    fn fresh(&self) -> Option<&Activity> {
        self.activity.as_ref().filter(|activity| activity.order == self.sent)
    }

    /// May the process still be making calls that others make unnecessary?
    fn is_sent_on(&self) -> bool {
        self.fresh().is_none() && matches!(self.calls, Calls::Ready(_) | Calls::Turn(_))
    }
}

/// The figures of a process that change when it does anything.
type Moves = (u64, u64, u64, u64, bool);

fn moves(activities: &[&Activity]) -> Vec<Moves> {
    let of = |a: &&Activity| (a.steps, a.cut.progress, a.inside, a.waiting, a.is_idle);
    activities.iter().map(of).collect()
}

/// Logs a round, for readers of a long drain.
fn note_round(all: &[Stepped], activities: &[&Activity], calls: &[Calls]) {
    for ((stepped, activity), calls) in all.iter().zip(activities).zip(calls) {
        let Activity { steps, is_idle, .. } = activity;
        tracing::debug!(
            member = stepped.index,
            steps,
            is_idle,
            ?calls,
            "nothing moves: {activity}"
        );
    }
}

fn patience(stepper: &Stepper) -> Duration {
    let Some(later) = stepper.rounds().checked_sub(1) else { return PATIENCE };
    let by_rounds = PATIENCE_BETWEEN.saturating_mul(1 << (later / ROUNDS_PER_PATIENCE).min(16));
    by_rounds.max(PATIENCE_PER_CALL.saturating_mul(stepper.further())).min(PATIENCE_MAX)
}

/// The processes of a tenant behind their closed gates.
pub(super) struct Gated<'s, 'a> {
    cast: &'s mut Cast<'a>,
    /// The number of the pause.
    round: u64,
}

impl<'s, 'a> Gated<'s, 'a> {
    /// The processes of `cast`, in the pause with this number.
    pub(super) fn new(cast: &'s mut Cast<'a>, round: u64) -> Self {
        Self { cast, round }
    }

    /// Waits until the devices of `members` have nothing left to do, and lets calls in if the devices wait for work that was
    /// not launched. `plan` is the cut that holds their launches, if any.
    pub(super) fn drain(
        &mut self,
        members: &[usize],
        plan: Option<Plan>,
    ) -> Result<DrainSummary, Stop> {
        let began = Instant::now();
        let deadline = began + self.cast.options.phase_timeout(Phase::Drain);
        let held = plan.as_ref().map(|plan| plan.limits().clone());
        let mut stepper = Stepper::new(plan.unwrap_or_default());
        let mut still = Stillness::new(Vec::new());
        let mut all: Vec<_> = members.iter().map(|&index| Stepped::new(index)).collect();
        loop {
            if self.cast.options.is_called_off() {
                return Err(Stop::CalledOff);
            }
            let activities: Vec<_> = all.iter().filter_map(Stepped::fresh).collect();
            if activities.len() == all.len() {
                let pace = still.pace(moves(&activities), patience(&stepper));
                let decision = stepper.update(&activities, pace);
                if pace == Pace::Stalled {
                    still.begin_again();
                }
                match decision {
                    Decision::Drained => {
                        return Ok(DrainSummary {
                            wall_us: micros(began.elapsed()),
                            rounds: stepper.rounds().into(),
                            calls: activities.iter().map(|activity| activity.steps).sum(),
                        });
                    }
                    Decision::Open(calls) => {
                        if pace == Pace::Stalled {
                            note_round(&all, &activities, &calls);
                        }
                        for (stepped, calls) in all.iter_mut().zip(calls) {
                            let limits = held.as_ref().map(|held| (held, stepper.limits()));
                            self.let_on(stepped, calls, limits)?;
                        }
                    }
                }
            } else if stepper.is_idle_now(all.iter().map(Stepped::fresh)) {
                self.stop_calls(&mut all)?;
            }
            if Instant::now() >= deadline {
                return Err(Stop::Failed(self.not_drained(&all, began.elapsed())));
            }
            if began.elapsed() >= QUIET {
                self.tell_of_devices(&all);
            }
            let left = patience(&stepper).saturating_sub(still.lasts());
            let wait = left.clamp(PATIENCE_BETWEEN, SLICE);
            for stepped in all.iter_mut().filter(|stepped| stepped.due == 0) {
                let step = StepOrder { order: stepped.sent, ..StepOrder::default() };
                self.ask_for_activity(stepped, step, wait)?;
            }
            self.gather_activities(&mut all)?;
        }
    }

    /// Sends a process its allowed calls, if they are new. `limits` are the limits under which its gate was closed, and those
    /// of now.
    fn let_on(
        &mut self,
        stepped: &mut Stepped,
        calls: Calls,
        limits: Option<(&Limits, &Limits)>,
    ) -> Result<(), Vec<MemberFailure>> {
        let cut = stepped.activity.as_ref().map(|activity| &activity.cut);
        let changed = limits.zip(cut).and_then(|((held, limits), cut)| {
            let limits = limits.for_member(cut);
            let told = stepped.limits.clone().unwrap_or_else(|| held.for_member(cut));
            (told != limits).then_some(limits)
        });
        if changed.is_none() && calls == Calls::None {
            return Ok(());
        }
        if changed.is_some() {
            stepped.limits.clone_from(&changed);
        }
        let wait = if calls == Calls::None { SLICE } else { STEP_TIME };
        self.send_order(stepped, changed, calls, wait)
    }

    /// Stops the processes that still make calls after their present call, and gets their reports.
    fn stop_calls(&mut self, all: &mut [Stepped]) -> Result<(), Vec<MemberFailure>> {
        for stepped in all.iter_mut().filter(|stepped| stepped.is_sent_on()) {
            self.send_order(stepped, None, Calls::None, Duration::ZERO)?;
        }
        Ok(())
    }

    fn send_order(
        &mut self,
        stepped: &mut Stepped,
        limits: Option<Limits>,
        calls: Calls,
        wait: Duration,
    ) -> Result<(), Vec<MemberFailure>> {
        stepped.sent += 1;
        stepped.calls = calls;
        let step = StepOrder { order: stepped.sent, limits, calls };
        self.ask_for_activity(stepped, step, wait)
    }

    fn ask_for_activity(
        &mut self,
        stepped: &mut Stepped,
        step: StepOrder,
        wait: Duration,
    ) -> Result<(), Vec<MemberFailure>> {
        let seen = stepped.activity.as_ref().map(Activity::seen).unwrap_or_default();
        let question = StepOn { round: self.round, step, seen, wait_ms: millis(wait) };
        stepped.due += 1;
        let timeout = wait + self.cast.options.contact_timeout;
        self.cast.peers.ask(stepped.index, &question, timeout).map_err(|failure| vec![failure])
    }

    /// Waits for an answer, and handles all that have arrived.
    fn gather_activities(&mut self, all: &mut [Stepped]) -> Result<(), Vec<MemberFailure>> {
        let mut failures = Vec::new();
        for answer in self.cast.peers.arrived(self.cast.options.interrupt.as_ref()) {
            let peer = answer.peer;
            match answer.to(&StepOn::default()) {
                Ok(activity) => {
                    if let Some(stepped) = all.iter_mut().find(|stepped| stepped.index == peer) {
                        stepped.due = stepped.due.saturating_sub(1);
                        stepped.activity = Some(activity);
                    }
                }
                Err(failure) => failures.push(failure),
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures) }
    }

    fn tell_of_devices(&mut self, all: &[Stepped]) {
        let mut busy = all.iter().filter_map(|stepped| {
            let activity = stepped.activity.as_ref().filter(|activity| !activity.is_idle)?;
            Some((stepped.index, activity))
        });
        if let Some((index, activity)) = busy.next() {
            let (who, others) = (self.cast.peers.who(index), busy.count());
            self.cast.tell(Event::WaitingForDevices { who, activity, others });
        }
    }

    /// One failure for each process whose devices are busy after `waited`, the first with the activity of all others.
    fn not_drained(&self, all: &[Stepped], waited: Duration) -> Vec<MemberFailure> {
        let tenant = self.cast.tenant();
        let longer_s = (waited * LONGER).as_secs().max(1);
        let who = |stepped: &Stepped| self.cast.peers.who(stepped.index);
        let is_busy = |stepped: &&Stepped| stepped.activity.as_ref().is_none_or(|a| !a.is_idle);
        let describe = |stepped: &Stepped| match &stepped.activity {
            Some(activity) => activity.to_string(),
            None => "it did not say in time what it does".to_owned(),
        };
        let failure = |stepped: &Stepped| {
            let busy = not_idle(who(stepped), describe(stepped));
            let message = format!(
                "{busy} ({:.1} s were too short: sublet pause {tenant} --timeout {longer_s}s)",
                waited.as_secs_f64()
            );
            MemberFailure::new(who(stepped), Step::Drain, FailureKind::DrainTimeout, message)
        };
        let mut failures: Vec<_> = all.iter().filter(is_busy).map(failure).collect();
        let idle = all.iter().filter(|stepped| !is_busy(stepped)).take(NAMED_MAX);
        for stepped in idle {
            if let Some(first) = failures.first_mut() {
                let text =
                    format!("; the devices of {} are idle: {}", who(stepped), describe(stepped));
                first.failure.message.push_str(&text);
            }
        }
        if failures.is_empty() {
            // All devices were idle, but a counted launch lacks its counterpart.
            failures.extend(all.first().map(failure));
        }
        failures
    }
}

/// The state that was seen last, and the time since which it has not changed.
pub(super) struct Stillness<T> {
    seen: T,
    since: Instant,
}

impl<T: PartialEq> Stillness<T> {
    /// Begins with `seen`.
    pub(super) fn new(seen: T) -> Self {
        Self { seen, since: Instant::now() }
    }

    /// Has `seen` been the same for `patience`?
    pub(super) fn pace(&mut self, seen: T, patience: Duration) -> Pace {
        if seen != self.seen {
            self.seen = seen;
            self.begin_again();
        }
        if self.lasts() < patience { Pace::Moving } else { Pace::Stalled }
    }

    /// The time for which the state has not changed.
    pub(super) fn lasts(&self) -> Duration {
        self.since.elapsed()
    }

    /// Restarts the time after an action.
    pub(super) fn begin_again(&mut self) {
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_when_it_was_given_under_the_order_sent_last() {
        let given = |order| Some(Activity { order, ..Activity::default() });
        let mut stepped = Stepped::new(0);
        assert!(stepped.fresh().is_none());
        stepped.activity = given(0);
        assert!(stepped.fresh().is_some());
        // Calls were let in, and the process's report is older than that.
        stepped.sent = 1;
        assert!(stepped.fresh().is_none());
        stepped.activity = given(1);
        assert!(stepped.fresh().is_some());
    }
}
