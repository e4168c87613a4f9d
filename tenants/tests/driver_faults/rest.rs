//! A whole pause of processes that stand still in a pause by tag: one call fails, each in turn.

use tenants::coordinator::{Outcome, Trouble};
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::FaultSpan;

use crate::stage::Stage;

fn rest_may_fail(stage: &Stage, member: usize) {
    for nth in 1.. {
        let what = format!("pause of the rest with call {nth} of member {member} failed");
        stage.must_stand_without_blocks();
        let held = stage.used();
        let before = stage.clear_faults();
        stage.faults(member).fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let outcome = stage.act(Action::Pause);
        let met = stage.clear_faults() > before;
        match outcome {
            Ok(Outcome::Completed(report)) => {
                assert!(report.losses.is_empty(), "{what}: {:?}", report.losses);
                assert_eq!(report.stayed_bytes == 0, stage.used() == [0, 0], "{what}: {report:?}");
            }
            Ok(other) => panic!("{what}: {other:?}"),
            Err(error) => {
                assert!(met && error.left_unchanged(), "{what}: {error}");
                assert!(matches!(error, Trouble::Refused { .. }), "{what}: {error}");
                stage.assert_all(MemberState::Paused, &what);
                assert_eq!(stage.used(), held, "{what}: the rest is where it was");
                // Every other time it is resumed from there.
                if nth % 2 == 0 {
                    stage.must_then(Action::Pause, &what);
                }
            }
        }
        stage.assert_all(MemberState::Paused, &what);
        stage.must_then(Action::Resume, &what);
        stage.assert_all(MemberState::Active, &what);
        stage.assert_contents_of(&[0, 1], &what);
        // What the driver kept goes with the next pause, which has as much host memory as the first.
        stage.must_then(Action::Pause, &what);
        stage.assert_gone(&what);
        stage.must_then(Action::Resume, &what);
        stage.assert_intact(&what);
        if !met {
            assert!(nth > 30, "only {nth} calls were met");
            break;
        }
    }
}

#[test]
fn any_call_may_fail_and_the_processes_stand_as_before_or_without_any_memory() {
    rest_may_fail(&Stage::new(), 0);
}

#[test]
fn any_call_may_fail_in_the_second_process_too() {
    rest_may_fail(&Stage::new(), 1);
}

#[test]
fn any_call_of_one_that_releases_early_may_fail() {
    rest_may_fail(&Stage::with_early_release(), 0);
}
