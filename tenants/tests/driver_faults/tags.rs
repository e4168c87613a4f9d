//! One call fails, each in turn, of a pause or resume by tag. The processes run before, and run after.

use crate::singles::{pauses, resumes};
use crate::stage::{Stage, by_tag};

#[test]
fn any_call_of_a_pause_by_tag_may_fail_and_the_processes_run_on() {
    pauses(Stage::new(), &by_tag(), 0);
}

#[test]
fn any_call_of_a_pause_by_tag_may_fail_in_the_second_process_too() {
    pauses(Stage::new(), &by_tag(), 1);
}

#[test]
fn any_call_of_a_pause_by_tag_that_releases_early_may_fail_and_the_processes_run_on() {
    pauses(Stage::with_early_release(), &by_tag(), 0);
}

#[test]
fn any_call_of_a_resume_by_tag_may_fail_and_the_tag_stays_away_with_its_contents() {
    resumes(&by_tag(), 0);
}

#[test]
fn any_call_of_a_resume_by_tag_may_fail_in_the_second_process_too() {
    resumes(&by_tag(), 1);
}
