//! Two stages of a pipeline that post each receive before the work that it follows: their devices are both idle at one
//! place of each step, and only there.

use super::{Activity, Calls, Decision, Stepper};
use crate::plan::{Pace, Plan};

/// Calls of a step: the receive, what is computed, the send.
const STEP: u64 = 402;

/// The number of calls that each stage has made.
#[derive(Clone, Copy, Debug)]
struct Stages {
    made: [u64; 2],
    seen: [u64; 2],
}

impl Stages {
    /// Counts the sends of `stage`. The first stage computes and sends without the second. The second needs what the
    /// first has sent.
    fn sent(&self, stage: usize) -> u64 {
        let first = self.made[0] / STEP;
        if stage == 0 { first } else { first.min(self.made[1] / STEP) }
    }

    /// Its receive of the step is over, and so is all that it has launched.
    fn is_idle(&self, stage: usize) -> bool {
        self.made[stage] <= self.sent(1 - stage) * STEP
    }

    /// A stage waits on the host for the end of each step.
    fn is_at_gate(&self, stage: usize) -> bool {
        !self.made[stage].is_multiple_of(STEP) || self.is_idle(stage)
    }

    fn activity(&self, stage: usize) -> Activity {
        let waiting = u64::from(self.is_at_gate(stage));
        let is_idle = self.is_idle(stage);
        let steps = self.made[stage] - self.seen[stage];
        let ready = if is_idle { waiting } else { 0 };
        Activity { waiting, ready, is_idle, steps, ..Activity::default() }
    }

    /// Makes the calls that `stage` was let make. It is told of a device that becomes idle before its next one.
    fn go_on(&mut self, stage: usize, calls: Calls, stepper: &Stepper) {
        let was_idle = self.is_idle(stage);
        let (Calls::Ready(count) | Calls::Turn(count)) = calls else { return };
        for _ in 0..count {
            let is_ready = !matches!(calls, Calls::Ready(_)) || self.is_idle(stage);
            if !self.is_at_gate(stage) || !is_ready {
                break;
            }
            self.made[stage] += 1;
            let other = self.activity(1 - stage);
            let mut fresh = [None; 2];
            fresh[1 - stage] = Some(&other);
            // In its turn it was busy.
            let has_changed = self.is_idle(stage) != was_idle;
            if has_changed || stepper.is_idle_now(fresh) {
                break;
            }
        }
    }
}

/// Drains both stages, whose gates are shut after so many calls. Returns how often nothing moves until both are idle,
/// and how many calls they make.
fn drain(made: [u64; 2]) -> (u32, u64) {
    let mut stages = Stages { made, seen: made };
    let mut stepper = Stepper::new(Plan::default());
    let mut pace = Pace::Stalled;
    loop {
        let seen = [0, 1].map(|stage| stages.activity(stage));
        let Decision::Open(calls) = stepper.update(&[&seen[0], &seen[1]], pace) else {
            return (stepper.rounds(), seen.iter().map(|activity| activity.steps).sum());
        };
        let before = stages.made;
        for (stage, calls) in calls.into_iter().enumerate() {
            stages.go_on(stage, calls, &stepper);
        }
        pace = if stages.made == before { Pace::Stalled } else { Pace::Moving };
        assert!(stepper.rounds() < 10_000, "{stages:?}");
    }
}

#[test]
fn stages_whose_receives_are_posted_before_400_launches_are_drained_within_the_step() {
    // From each place of the second step at which they can be: the second stage waits for the first.
    for first in (STEP..=2 * STEP).step_by(17) {
        let last = if first == 2 * STEP { 2 * STEP } else { first.max(STEP + 1) };
        for second in (STEP..=last).step_by(31) {
            let (rounds, calls) = drain([first, second]);
            assert!(rounds <= 50, "{rounds} rounds from {first} and {second}");
            assert!(calls <= 2 * STEP, "{calls} calls from {first} and {second}");
        }
    }
}
