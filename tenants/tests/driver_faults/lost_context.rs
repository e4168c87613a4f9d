//! A context that is lost: from one call on, the driver refuses everything with the same code.

use tenants::coordinator::{Outcome, Trouble};
use tenants::wire::{Action, MemberState};
use vmm_pool::Schedule;
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::FaultSpan;

use crate::stage::Stage;

/// The first process loses its context at each third call in turn. The other goes on, or stands paused when it cannot have its
/// peer's memory back. Says how often the first was lost, and the command went on without it.
fn lose_context_in(action: Action, schedule: Schedule) -> usize {
    let codes =
        [DriverCode::ILLEGAL_ADDRESS, DriverCode::LAUNCH_FAILED, DriverCode::ECC_UNCORRECTABLE];
    let mut went_on = 0;
    for (nth, code) in (1..).step_by(3).zip(codes.into_iter().cycle()) {
        let what = format!("{action:?}, {schedule:?}, the context lost at call {nth} by {code}");
        let mut stage = Stage::new();
        stage.schedule = schedule;
        if action == Action::Resume {
            stage.must(Action::Pause);
        }
        let before = stage.faults(0).calls_total();
        stage.faults(0).fail_any(FaultSpan::From(nth), code);
        let outcome = stage.act(action);
        let is_met = stage.faults(0).calls_total() - before >= nth;
        let states = stage.states();
        let text = match &outcome {
            Err(error) => {
                assert!(!error.left_unchanged() && !error.is_retryable(), "{what}: {error}");
                error.to_string()
            }
            Ok(Outcome::Completed(report)) if !report.losses.is_empty() => {
                went_on += 1;
                report.losses[0].to_string()
            }
            // All of it was saved, or is back; what the driver did not take back is in the notes.
            Ok(outcome) => {
                assert!(!states.contains(&MemberState::Faulted), "{what}: {states:?}: {outcome:?}");
                if is_met {
                    continue;
                }
                break;
            }
        };
        assert!(text.contains("its CUDA context is lost"), "{what}: {text}");
        assert!(text.contains(&code.to_string()) && text.contains("end"), "{what}: {text}");
        assert_eq!(states[0], MemberState::Faulted, "{what}");
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
    went_on
}

#[test]
fn a_context_that_is_lost_in_a_pause_is_named_and_its_process_faulted() {
    lose_context_in(Action::Pause, Schedule::SaveFirst);
}

#[test]
fn a_context_that_is_lost_in_a_resume_is_named_and_its_process_faulted() {
    lose_context_in(Action::Resume, Schedule::SaveFirst);
}

/// Behind its first release it goes on without the one whose context is lost.
#[test]
fn a_context_that_is_lost_in_a_pause_that_releases_early_costs_nobody_else_anything() {
    assert!(lose_context_in(Action::Pause, Schedule::SaveMeanwhile) > 0);
}
