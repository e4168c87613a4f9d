//! Turns of processes whose devices are busy: how many calls each is let make.

use super::{Activity, BUSY_AFTER, BUSY_EVERY, Calls, Decision, FURTHER_MAX, Stepper};
use crate::plan::{Pace, Plan};

/// Two processes whose one thread has launched what keeps the device busy, until the second has made so many more calls.
/// Each makes up to `at_a_time` of the calls that it is let. Says how often nothing moved, and who has made how many.
fn busy_until(missing: u64, at_a_time: u32) -> (u32, [u64; 2]) {
    let mut stepper = Stepper::new(Plan::default());
    let mut steps = [0; 2];
    let mut pace = Pace::Stalled;
    while steps[1] < missing {
        let seen = steps.map(|steps| Activity { steps, waiting: 1, ..Activity::default() });
        let Decision::Open(calls) = stepper.update(&[&seen[0], &seen[1]], pace) else {
            panic!("no device is idle");
        };
        pace = Pace::Stalled;
        for (steps, calls) in steps.iter_mut().zip(calls) {
            match calls {
                Calls::None => {}
                Calls::Turn(count) => {
                    *steps += u64::from(count.min(at_a_time));
                    pace = Pace::Moving;
                }
                Calls::Ready(_) | Calls::Each(_) => panic!("{calls:?}: no thread is ready"),
            }
        }
        assert!(stepper.rounds() < 1000, "{steps:?}");
    }
    (stepper.rounds(), steps)
}

#[test]
fn busy_processes_have_their_turns_and_each_is_twice_as_many_calls_as_the_last() {
    for missing in [1, 5, 400, 5000] {
        // Threads that are at the gate again immediately, and threads that need some time.
        for at_a_time in [FURTHER_MAX, 1] {
            let (rounds, steps) = busy_until(missing, at_a_time);
            let turns = missing.ilog2() + 1 + u32::try_from(missing).unwrap() / FURTHER_MAX;
            assert!(rounds <= BUSY_AFTER + 2 * turns, "{rounds} for {missing}");
            assert!(steps.iter().all(|steps| *steps <= 2 * missing), "{steps:?} for {missing}");
        }
    }
}

#[test]
fn turns_of_busy_processes_are_one_call_again_when_a_device_becomes_idle_or_a_thread_is_ready() {
    let busy = |ready| Activity { waiting: 1, ready, ..Activity::default() };
    let idle = Activity { is_idle: true, ..Activity::default() };
    let mut stepper = Stepper::new(Plan::default());
    let mut turn = |seen: &Activity| {
        while stepper.rounds() < BUSY_AFTER {
            stepper.update(&[&busy(0), seen], Pace::Stalled);
        }
        let Decision::Open(calls) = stepper.update(&[&busy(0), seen], Pace::Stalled) else {
            panic!("a device is busy");
        };
        calls
    };
    let nobody = Activity::default();
    for count in [1, 2, 4] {
        assert_eq!(turn(&nobody), [Calls::Turn(count), Calls::None]);
    }
    assert_eq!(turn(&idle), [Calls::Turn(1), Calls::None]);
    assert_eq!(turn(&idle), [Calls::Turn(2), Calls::None]);
    assert!(matches!(turn(&Activity { is_idle: true, ..busy(1) })[1], Calls::Ready(_)));
    assert_eq!(turn(&idle), [Calls::Turn(1), Calls::None]);
}

#[test]
fn one_whose_threads_are_always_ready_leaves_each_fourth_turn_to_one_that_is_busy() {
    let mut stepper = Stepper::new(Plan::default());
    let mut steps = [0_u64; 2];
    for missing in [1, 5, 40] {
        let (rounds, before) = (stepper.rounds(), steps[0]);
        while steps[0] < before + missing {
            let busy = Activity { steps: steps[0], waiting: 1, ..Activity::default() };
            // It computes for itself, and whatever it launches ends immediately.
            let ready =
                Activity { steps: steps[1], waiting: 1, ready: 1, is_idle: true, ..busy.clone() };
            let Decision::Open(calls) = stepper.update(&[&busy, &ready], Pace::Stalled) else {
                panic!("a device is busy");
            };
            match calls[..] {
                [Calls::Turn(count), Calls::None] => steps[0] += u64::from(count),
                [Calls::None, Calls::Ready(count)] => steps[1] += u64::from(count),
                _ => panic!("{calls:?}"),
            }
            assert!(stepper.rounds() < 1000, "{steps:?}");
        }
        let most = BUSY_AFTER + BUSY_EVERY * u32::try_from(missing).unwrap();
        assert!(stepper.rounds() - rounds <= most, "{} for {missing}", stepper.rounds() - rounds);
        assert_eq!(steps[0], before + missing, "it goes no further");
    }
}
