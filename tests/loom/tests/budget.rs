//! Processes that take room in a budget simultaneously, in every interleaving: never do they hold more than it, and where one
//! fits, one passes.

#![expect(clippy::expect_used, reason = "a thread of a test that panics ends the test")]

use loom::thread;
use std::sync::Arc;

use sublet_loom::explore;
use sublet_loom::slots_of_budget::{Slot, give_back, held_bytes, take};

const BUDGET: u64 = 10;

fn slots(count: usize) -> Arc<Vec<Slot>> {
    Arc::new((0..count).map(|_| Slot::default()).collect())
}

/// Each of two takes so much simultaneously; how many did.
fn both_take(bytes: [u64; 2]) -> usize {
    let slots = slots(2);
    let other = {
        let slots = Arc::clone(&slots);
        thread::spawn(move || take(&slots, 1, bytes[1], BUDGET).is_ok())
    };
    let one = take(&slots, 0, bytes[0], BUDGET).is_ok();
    let passed = [one, other.join().expect("it ended")];
    let held: u64 =
        passed.iter().zip(bytes).filter(|(passed, _)| **passed).map(|(_, bytes)| bytes).sum();
    assert_eq!(held_bytes(&slots), held);
    assert!(held <= BUDGET, "{held} held");
    passed.iter().filter(|passed| **passed).count()
}

#[test]
fn two_that_do_not_fit_together_do_not_both_pass_and_one_does() {
    explore(2, || assert_eq!(both_take([6, 6]), 1));
}

#[test]
fn two_that_fit_together_both_pass() {
    explore(2, || assert_eq!(both_take([6, 4]), 2));
}

#[test]
fn one_that_gives_back_meanwhile_is_never_counted_for_less_than_nothing() {
    explore(2, || {
        let slots = slots(2);
        take(&slots, 1, 6, BUDGET).unwrap();
        let other = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || give_back(&slots, 1, 6))
        };
        let passed = take(&slots, 0, 6, BUDGET).is_ok();
        other.join().unwrap();
        assert_eq!(held_bytes(&slots), if passed { 6 } else { 0 });
        take(&slots, 1, 4, BUDGET).unwrap();
    });
}
