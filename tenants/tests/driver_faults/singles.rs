//! One call fails, each in turn.

use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Options, Outcome, Trouble};
use tenants::requests::act_together;
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{DriverCode, DriverOp};

use crate::stage::{Stage, tenant};

/// Fails call `nth` of `member` during `action` on `scope`. False when so many calls were not made.
fn fail_one(stage: &Stage, action: Action, scope: &Scope, member: usize, nth: u64) -> bool {
    let what = format!("{action:?} of {scope:?} with call {nth} of member {member} failed");
    let before = stage.clear_faults();
    stage.faults(member).fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
    let outcome = stage.act_on(action, scope.clone());
    let met = stage.clear_faults() > before;
    let (start, end) = match (scope, action) {
        (Scope::Whole, Action::Pause) => (MemberState::Active, MemberState::Paused),
        (Scope::Whole, Action::Resume) => (MemberState::Paused, MemberState::Active),
        // The processes run before, and run after.
        (Scope::Tags { .. }, _) => (MemberState::Active, MemberState::Active),
    };
    match outcome {
        Ok(Outcome::Completed(report)) => {
            assert!(report.losses.is_empty(), "{what}: {:?}", report.losses);
            if action == Action::Pause && report.notes.is_empty() && report.stays.is_empty() {
                stage.assert_gone(&what);
            }
            if action == Action::Pause && *scope == Scope::Whole {
                let is_gone = stage.used() == [0, 0];
                assert_eq!(report.stayed_bytes == 0, is_gone, "{what}: {:?}", report.stays);
                let again = stage.act_on(action, scope.clone());
                let already = Outcome::AlreadyPaused { stays: report.stays.clone() };
                assert_eq!(again.as_ref().ok(), Some(&already), "{what}: {again:?}");
            }
        }
        Ok(other) => panic!("{what}: {other:?}"),
        Err(error) => {
            assert!(met, "{what}: {error}");
            assert!(matches!(error, Trouble::Refused { .. }), "{what}: {error}");
            assert!(error.left_unchanged(), "{what}: {error}");
            assert!(error.to_string().contains("returned CUDA_ERROR_UNKNOWN"), "{what}: {error}");
            stage.assert_all(start, &what);
            if action == Action::Pause {
                stage.assert_contents_of(&[0, 1], &what);
            }
            let again = stage.act_on(action, scope.clone());
            assert!(again.is_ok(), "{what}, then again: {again:?} ({:?})", stage.states());
        }
    }
    stage.assert_all(end, &what);
    met
}

/// Fails each call of a pause of `scope` in turn, in `member`.
pub(crate) fn pauses(stage: Stage, scope: &Scope, member: usize) {
    for nth in 1.. {
        let met = fail_one(&stage, Action::Pause, scope, member, nth);
        let what = format!("pause of {scope:?}, call {nth} of member {member}");
        let resumed = stage.act_on(Action::Resume, scope.clone());
        assert!(resumed.is_ok(), "{what}: {resumed:?}");
        if *scope != Scope::Whole {
            // What the driver kept goes with the next pause.
            stage.must(Action::Pause);
            stage.assert_gone(&what);
            stage.must(Action::Resume);
        }
        stage.assert_intact(&what);
        if !met {
            assert!(nth > 50, "only {nth} calls were met");
            break;
        }
    }
    stage.assert_ticket_is_good();
}

#[test]
fn any_call_of_a_pause_may_fail_and_the_tenant_is_active_or_paused_with_its_contents() {
    pauses(Stage::new(), &Scope::Whole, 0);
}

#[test]
fn any_call_of_a_pause_may_fail_in_the_second_process_too() {
    pauses(Stage::new(), &Scope::Whole, 1);
}

#[test]
fn any_call_of_a_pause_that_releases_early_may_fail_and_nothing_is_lost() {
    pauses(Stage::with_early_release(), &Scope::Whole, 0);
}

#[test]
fn any_call_of_a_pause_that_releases_early_may_fail_in_the_second_process_too() {
    pauses(Stage::with_early_release(), &Scope::Whole, 1);
}

/// Fails each call of a resume of `scope` in turn, in `member`.
pub(crate) fn resumes(scope: &Scope, member: usize) {
    let stage = Stage::new();
    for nth in 1.. {
        let paused = stage.act_on(Action::Pause, scope.clone());
        assert!(paused.is_ok(), "{paused:?}");
        if *scope != Scope::Whole {
            stage.assert_gone("all memory has the tag");
        }
        let met = fail_one(&stage, Action::Resume, scope, member, nth);
        let what = format!("resume of {scope:?}, call {nth} of member {member}");
        stage.assert_contents_of(&[0, 1], &what);
        // A stream that the driver kept goes with the next pause.
        stage.must(Action::Pause);
        stage.must(Action::Resume);
        stage.assert_intact(&what);
        if !met {
            assert!(nth > 50, "only {nth} calls were met");
            break;
        }
    }
    stage.assert_ticket_is_good();
}

#[test]
fn any_call_of_a_resume_may_fail_and_the_tenant_stays_paused_with_its_contents() {
    resumes(&Scope::Whole, 0);
}

#[test]
fn any_call_of_a_resume_may_fail_in_the_second_process_too() {
    resumes(&Scope::Whole, 1);
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
