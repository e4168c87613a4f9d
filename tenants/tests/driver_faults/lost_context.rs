//! A context that is lost: from one call on, the driver refuses everything with the same code.

use tenants::coordinator::CoordinatorError;
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
        assert!(matches!(error, CoordinatorError::Faulted { .. }), "{what}: {error}");
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
