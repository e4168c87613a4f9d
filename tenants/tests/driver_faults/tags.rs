//! One call fails, each in turn, of a pause or resume by tag. The processes run before, and run after.

use tenants::wire::Action;

use crate::singles::fail_one;
use crate::stage::{Stage, by_tag};

/// Fails each call of a pause by tag in turn, in `member`.
fn pauses(stage: Stage, member: usize) {
    for nth in 1.. {
        let met = fail_one(&stage, Action::Pause, &by_tag(), member, nth);
        let what = format!("pause by tag, call {nth} of member {member}");
        let resumed = stage.act_on(Action::Resume, by_tag());
        assert!(resumed.is_ok(), "{what}: {resumed:?}");
        // What the driver kept goes with the next pause.
        stage.must(Action::Pause);
        stage.assert_gone(&what);
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
fn any_call_of_a_pause_by_tag_may_fail_and_the_processes_run_on() {
    pauses(Stage::new(), 0);
}

#[test]
fn any_call_of_a_pause_by_tag_may_fail_in_the_second_process_too() {
    pauses(Stage::new(), 1);
}

#[test]
fn any_call_of_a_pause_by_tag_that_releases_early_may_fail_and_the_processes_run_on() {
    pauses(Stage::with_early_release(), 0);
}

/// Fails each call of a resume by tag in turn, in `member`.
fn resumes(member: usize) {
    let stage = Stage::new();
    for nth in 1.. {
        let paused = stage.act_on(Action::Pause, by_tag());
        assert!(paused.is_ok(), "{paused:?}");
        stage.assert_gone("all memory has the tag");
        let met = fail_one(&stage, Action::Resume, &by_tag(), member, nth);
        let what = format!("resume by tag, call {nth} of member {member}");
        stage.assert_contents_of(&[0, 1], &what);
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
fn any_call_of_a_resume_by_tag_may_fail_and_the_tag_stays_away_with_its_contents() {
    resumes(0);
}

#[test]
fn any_call_of_a_resume_by_tag_may_fail_in_the_second_process_too() {
    resumes(1);
}
