//! One call fails, each in turn.

use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Options, Outcome};
use tenants::requests::act_together;
use tenants::wire::{Action, MemberState};
use vmm_pool::Schedule::{SaveFirst, SaveMeanwhile};
use vmm_pool::driver::DriverOp;

use crate::scene::Command::{Pause, Resume, Swap};
use crate::scene::Memory::{Rest, Tagged, Whole};
use crate::scene::{Case, Scene};
use crate::stage::{Stage, tenant};

/// Fails each call in turn, of which a process makes so many at least.
fn each_call(case: Case, least: u64) {
    let scene = Scene::new(case);
    let calls = |process| (1..).map(move |nth| (process, nth));
    // In a swap those of one process of each tenant.
    let step = if case.0 == Swap { 2 } else { 1 };
    for mut calls in (0..scene.faults().len()).step_by(step).map(calls) {
        let not_made = calls.find(|call| !one_call(&scene, case, *call));
        assert!(not_made.is_some_and(|(_, nth)| nth > least), "only {not_made:?} was not made");
    }
    scene.first.assert_ticket_is_good();
}

/// False when so many calls were not made.
fn one_call(scene: &Scene, case: Case, call: (usize, u64)) -> bool {
    let what = &format!("{case:?} with call {call:?} failed");
    scene.make_ready();
    let held = scene.first.used();
    let (outcome, is_made) = scene.act(&[call]);
    match outcome {
        Ok(done) => scene.assert_done(&done, what),
        Err(error) => {
            assert!(is_made, "{what}: {error}");
            scene.assert_refused(&error, &held, what);
            // Processes that stood still before go back from there every other time.
            if case.1 != Rest || call.1.is_multiple_of(2) {
                let (again, _) = scene.act(&[]);
                assert!(again.is_ok(), "{what}, then again: {again:?} ({:?})", scene.states());
            }
        }
    }
    scene.assert_behind(what);
    scene.go_back(what);
    // What the driver keeps in a whole pause goes with the way back.
    if !is_made || case.1 != Whole || case.0 == Resume {
        scene.move_once_more(what);
    }
    scene.first.assert_intact(what);
    is_made
}

/// A test for each case: the tenant is as before or as it was to be, and has lost nothing.
macro_rules! each_call_may_fail {
    ($($name:ident: $command:ident, $memory:ident, $schedule:ident, $least:literal;)*) => {$(
        #[test]
        fn $name() {
            each_call(($command, $memory, $schedule), $least);
        }
    )*};
}

each_call_may_fail! {
    any_call_of_a_pause_may_fail_and_nothing_is_lost: Pause, Whole, SaveFirst, 50;
    any_call_of_a_pause_that_releases_early_may_fail_and_nothing_is_lost: Pause, Whole, SaveMeanwhile, 50;
    any_call_of_a_pause_by_tag_may_fail_and_nothing_is_lost: Pause, Tagged, SaveFirst, 50;
    any_call_of_a_pause_by_tag_that_releases_early_may_fail_and_nothing_is_lost: Pause, Tagged, SaveMeanwhile, 50;
    any_call_of_a_pause_of_the_rest_may_fail_and_nothing_is_lost: Pause, Rest, SaveFirst, 30;
    any_call_of_a_pause_of_the_rest_that_releases_early_may_fail_and_nothing_is_lost: Pause, Rest, SaveMeanwhile, 30;
    any_call_of_a_resume_may_fail_and_nothing_is_lost: Resume, Whole, SaveFirst, 50;
    any_call_of_a_resume_by_tag_may_fail_and_nothing_is_lost: Resume, Tagged, SaveFirst, 50;
    any_call_of_a_swap_with_room_for_both_may_fail_and_nothing_is_lost: Swap, Whole, SaveFirst, 50;
    any_call_of_a_swap_by_windows_may_fail_and_nothing_is_lost: Swap, Whole, SaveMeanwhile, 50;
}

/// There is no way back then, and it comes to its end by itself.
#[test]
fn a_short_timeout_does_not_end_the_saving_of_a_pause_that_releases_early() {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let stage = Stage::new();
    let reply_margin = Duration::from_secs(1);
    let timeout = Some(TIMEOUT);
    let options = Options { timeout, reply_margin, releases_early: true, ..Options::default() };
    let hold = stage.faults(0).hold(DriverOp::CopyToHost);
    let mut coordinator = Coordinator::new(stage.run_dir.clone(), tenant(), options);
    let outcome = std::thread::scope(|threads| {
        let paused = threads.spawn(|| coordinator.pause(&mut |_| {}));
        assert!(hold.is_met(Duration::from_secs(30)));
        // Longer than was requested, and than an answer may take besides.
        let late = Instant::now() + TIMEOUT + 2 * reply_margin;
        while let Some(left) = late.checked_duration_since(Instant::now()) {
            std::thread::park_timeout(left);
        }
        drop(hold);
        paused.join().expect("no panic")
    });
    let Ok(Outcome::Completed(report)) = outcome else { panic!("{outcome:?}") };
    assert!(report.losses.is_empty(), "{:?}", report.losses);
    stage.must(Action::Resume);
    stage.assert_intact("resumed");
}

/// The first to be done may find that others still hold device memory.
#[test]
fn a_pause_that_all_ask_for_returns_nowhere_before_it_has_happened_everywhere() {
    let stage = Stage::new();
    let hold = stage.faults(0).hold(DriverOp::Release);
    let ask =
        |member: usize| act_together(&stage.members[member], Action::Pause, Duration::from_mins(1));
    let is_held =
        || stage.run_dir.tenant(&tenant()).is_ok_and(|dir| !dir.lock_holders().is_empty());
    std::thread::scope(|threads| {
        // It coordinates, and the other is done with its part while this one is not.
        let first = threads.spawn(|| ask(0));
        while !is_held() {
            std::thread::yield_now();
        }
        let second = threads.spawn(|| ask(1));
        assert!(hold.is_met(Duration::from_secs(30)));
        while stage.states()[1] != MemberState::Paused {
            std::thread::yield_now();
        }
        let late = Instant::now() + Duration::from_millis(300);
        while Instant::now() < late {
            assert!(!first.is_finished() && !second.is_finished());
            std::thread::yield_now();
        }
        drop(hold);
        let done = [first, second].map(|asked| asked.join().expect("no panic").expect("paused"));
        assert!(matches!(&done, [Some(Outcome::Completed(_)), None]), "{done:?}");
    });
    stage.assert_all(MemberState::Paused, "together");
    stage.must(Action::Resume);
    stage.assert_intact("resumed");
}
