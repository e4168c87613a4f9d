//! Two calls fail: the second may be one of the undo.
//!
//! A build takes a sample, which `SUBLET_TEST_SEED` repeats: `cargo xtask test` sets it. `SUBLET_FAULT_PAIRS` says how
//! many pairs (`all` for every one).

use fastrand::Rng;
use tenants::wire::MemberState;
use vmm_pool::Schedule::{self, SaveFirst, SaveMeanwhile};

use crate::scene::Command::{self, Pause, Resume, Swap};
use crate::scene::Memory::Whole;
use crate::scene::Scene;

const PAIRS_IN_A_BUILD: u64 = 40;

/// A call that fails: of which process, and its number among that process's calls.
type Call = (usize, u64);

fn check(scene: &Scene, calls: [Call; 2], what: &str) {
    scene.make_ready();
    let (outcome, _) = scene.act(&calls);
    let states = scene.states();
    assert!(!states.contains(&MemberState::Faulted), "{what}: {states:?}: {outcome:?}");
    // Whatever was left half done is put right first.
    scene.go_back(what);
    // What the driver kept after two refusals goes with the next pause.
    scene.move_once_more(what);
    scene.first.assert_intact(what);
}

/// All calls that processes make when none fails, and in an undo about as many again.
fn all_calls(scene: &Scene) -> Vec<Call> {
    let count = || scene.faults().iter().map(|it| it.calls_total()).collect::<Vec<_>>();
    scene.make_ready();
    let before = count();
    assert!(scene.act(&[]).0.is_ok());
    let made = count().into_iter().zip(before).map(|(calls, before)| (calls - before) * 3 / 2);
    let made = made.enumerate();
    let all = made.flat_map(|(process, calls)| (1..=calls).map(move |nth| (process, nth)));
    let all = all.collect();
    scene.go_back("without a fault");
    all
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn some_pairs(command: Command, schedule: Schedule) {
    let seed = variable("SUBLET_TEST_SEED").and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let case = (command, Whole, schedule);
    let scene = Scene::new(case);
    let all = all_calls(&scene);
    let round = |calls: [Call; 2]| {
        check(
            &scene,
            calls,
            &format!("{case:?} with calls {calls:?} failed (SUBLET_TEST_SEED={seed})"),
        );
    };
    let wanted = variable("SUBLET_FAULT_PAIRS");
    if wanted.as_deref() == Some("all") {
        for (index, first) in all.iter().enumerate() {
            all[index + 1..].iter().for_each(|second| round([*first, *second]));
        }
        return;
    }
    let mut random = Rng::with_seed(seed);
    let count = wanted.and_then(|text| text.parse().ok()).unwrap_or(PAIRS_IN_A_BUILD);
    for _ in 0..count {
        round([0, 1].map(|_| all[random.usize(..all.len())]));
    }
}

#[test]
fn any_two_calls_of_a_pause_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(Pause, SaveFirst);
    some_pairs(Pause, SaveMeanwhile);
}

#[test]
fn any_two_calls_of_a_resume_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(Resume, SaveFirst);
}

#[test]
fn any_two_calls_of_a_swap_may_fail_and_the_next_command_puts_all_right() {
    some_pairs(Swap, SaveFirst);
    some_pairs(Swap, SaveMeanwhile);
}
