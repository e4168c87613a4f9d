//! Two calls fail: the second may be one of the undo.
//!
//! A build takes a sample, whose seed is printed with a failure and can be given again; `SUBLET_FAULT_PAIRS`
//! says how many pairs (`all` for every one) and `SUBLET_FAULT_SEED` which sample.

use fastrand::Rng;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::FaultSpan;

use crate::stage::Stage;

const PAIRS_IN_A_BUILD: u64 = 40;

/// A call that fails: of which member, and its number among that member's calls.
type Call = (usize, u64);

fn check(stage: &Stage, action: Action, first: Call, second: Call, seed: u64) {
    let what = format!("{action:?} with calls {first:?} and {second:?} failed (seed {seed})");
    for (member, nth) in [first, second] {
        stage.faults(member).fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
    }
    let outcome = stage.act(action);
    stage.clear_faults();
    let states = stage.states();
    assert!(!states.contains(&MemberState::Faulted), "{what}: {states:?}: {outcome:?}");
    // Whatever was left half done is put right first.
    stage.must_then(Action::Resume, &what);
    stage.assert_all(MemberState::Active, &what);
    stage.assert_contents_of(&[0, 1], &what);
    // What the driver kept after two refusals goes with the next pause.
    stage.must_then(Action::Pause, &what);
    stage.must_then(Action::Resume, &what);
    stage.assert_intact(&what);
}

/// How many calls each member makes in `action` when none fails, and in an undo about as many again.
fn calls_in(stage: &Stage, action: Action) -> [u64; 2] {
    let count = |member| stage.faults(member).calls_total();
    let before = [count(0), count(1)];
    stage.must(action);
    [0, 1].map(|member| (count(member) - before[member]) * 3 / 2)
}

fn all_calls(calls: [u64; 2]) -> Vec<Call> {
    (0..2).flat_map(|member| (1..=calls[member]).map(move |nth| (member, nth))).collect()
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn some_pairs(stage: &Stage, action: Action) {
    let seed = variable("SUBLET_FAULT_SEED").and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    if action == Action::Resume {
        stage.must(Action::Pause);
    }
    let calls = all_calls(calls_in(stage, action));
    if action == Action::Pause {
        stage.must(Action::Resume);
    }
    let round = |first, second| {
        if action == Action::Resume {
            stage.must(Action::Pause);
        }
        check(stage, action, first, second, seed);
    };
    let wanted = variable("SUBLET_FAULT_PAIRS");
    if wanted.as_deref() == Some("all") {
        for (index, first) in calls.iter().enumerate() {
            calls[index + 1..].iter().for_each(|second| round(*first, *second));
        }
        return;
    }
    let mut random = Rng::with_seed(seed);
    let count = wanted.and_then(|text| text.parse().ok()).unwrap_or(PAIRS_IN_A_BUILD);
    for _ in 0..count {
        let [first, second] = [0, 1].map(|_| calls[random.usize(..calls.len())]);
        round(first, second);
    }
}

#[test]
fn any_two_calls_of_a_pause_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(&Stage::new(), Action::Pause);
}

#[test]
fn any_two_calls_of_a_resume_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(&Stage::new(), Action::Resume);
}

#[test]
fn any_two_calls_of_a_pause_that_releases_early_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(&Stage::with_early_release(), Action::Pause);
}
