//! Tests of the rounds: step by step, and every sequence of events in the rounds of several processes.

mod model;
mod search;

use super::*;

#[test]
fn a_second_undo_of_what_could_not_be_undone_is_not_answered_as_done() {
    let mut rounds = Rounds::default();
    let mut admit = |round, stage, rests| {
        let admission = rounds.admit(1, OfRound { round, alone: false, stage }, rests);
        if stage == Stage::Abort {
            rounds.last_step_taken(round, rests);
        }
        admission
    };
    assert_eq!(admit(7, Stage::Prepare, true), Admission::Taken);
    assert_eq!(admit(7, Stage::Abort, false), Admission::Taken);
    assert_eq!(admit(7, Stage::Abort, false), Admission::Refused);
    // There is nothing to undo for another round.
    assert_eq!(admit(8, Stage::Abort, false), Admission::NothingToUndo);
    // The round was settled meanwhile.
    assert_eq!(admit(7, Stage::Abort, true), Admission::NothingToUndo);
}
