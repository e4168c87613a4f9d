//! A context that is lost: from one call on, the driver refuses everything with the same code.

use tenants::coordinator::{Outcome, Trouble};
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::FaultSpan;

use crate::stage::Stage;

fn lose_context_at(action: Action, nth: u64, code: DriverCode) {
    let what = format!("{action:?} with the context lost at call {nth} by {code}");
    let stage = Stage::new();
    if action == Action::Resume {
        stage.must(Action::Pause);
    }
    stage.faults(0).fail_any(FaultSpan::From(nth), code);
    let error = stage.act(action).expect_err("a lost context");
    let text = error.to_string();
    assert!(text.contains("its CUDA context is lost"), "{what}: {text}");
    assert!(text.contains(&code.to_string()) && text.contains("end the process"), "{what}: {text}");
    assert!(!error.left_unchanged() && !error.is_retryable(), "{what}: {text}");
    let states = stage.states();
    assert_eq!(states[0], MemberState::Faulted, "{what}");
    // The other has lost nothing of its own. It goes on, or stands paused when it cannot have its peer's
    // memory back.
    match (action, states[1]) {
        (Action::Pause, MemberState::Active) => stage.assert_contents_of(&[1], &what),
        (Action::Pause | Action::Resume, MemberState::Paused) => {}
        (_, state) => panic!("{what}: the other is {state:?}: {text}"),
    }
    for action in [Action::Pause, Action::Resume] {
        let error = stage.act(action).expect_err("a faulted member");
        assert!(matches!(error, Trouble::Faulted { .. }), "{what}: {error}");
        assert!(error.to_string().contains("end it"), "{what}: {error}");
    }
}

#[test]
fn a_context_that_is_lost_before_or_in_a_pause_is_named_and_its_process_faulted() {
    lose_context_at(Action::Pause, 1, DriverCode::ILLEGAL_ADDRESS);
    lose_context_at(Action::Pause, 9, DriverCode::LAUNCH_FAILED);
    lose_context_at(Action::Pause, 20, DriverCode::ECC_UNCORRECTABLE);
}

#[test]
fn a_context_that_is_lost_in_a_resume_is_named_and_its_process_faulted() {
    lose_context_at(Action::Resume, 1, DriverCode::LAUNCH_FAILED);
    lose_context_at(Action::Resume, 15, DriverCode::ILLEGAL_ADDRESS);
}

/// Behind its first release a pause goes on without the one whose context is lost.
#[test]
fn a_context_that_is_lost_in_a_pause_that_releases_early_costs_nobody_else_anything() {
    let mut lost_behind = 0;
    for nth in (1..).step_by(3) {
        let what = format!("the context lost at call {nth}");
        let stage = Stage::with_early_release();
        let before = stage.faults(0).calls_total();
        stage.faults(0).fail_any(FaultSpan::From(nth), DriverCode::LAUNCH_FAILED);
        let outcome = stage.act(Action::Pause);
        let is_met = stage.faults(0).calls_total() - before >= nth;
        let states = stage.states();
        if !is_met {
            assert_eq!(states, [MemberState::Paused; 2], "{what}: {outcome:?}");
            break;
        }
        match &outcome {
            Err(error) => {
                assert!(error.to_string().contains("its CUDA context is lost"), "{what}: {error}");
            }
            Ok(Outcome::Completed(report)) if !report.losses.is_empty() => {
                lost_behind += 1;
                let text = report.losses[0].to_string();
                assert!(text.contains("its CUDA context is lost"), "{what}: {text}");
            }
            // All of it was saved, and what the driver did not take back is in the notes.
            Ok(_) => assert_eq!(states, [MemberState::Paused; 2], "{what}: {outcome:?}"),
        }
        let rests = [MemberState::Active, MemberState::Paused].contains(&states[1]);
        assert!(rests, "{what}: {states:?}: {outcome:?}");
        if states[1] == MemberState::Active {
            stage.assert_contents_of(&[1], &what);
        }
    }
    assert!(lost_behind > 0);
}
