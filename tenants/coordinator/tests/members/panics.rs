//! Real members whose own code fails in a phase.

use super::*;
use sublet_stage::job::{Job, SOON, patient, until};
use vmm_pool::gate::Passage;

/// Panics when it is called, at the end of the drain.
fn fails() -> Vec<vmm_pool::driver::VaRange> {
    panic!("a table has no such row")
}

#[test]
fn a_phase_that_panics_is_named_and_holds_nobody_up() {
    let job = Job::with(2, |rank, config| {
        if rank == 0 {
            config.unused = fails;
        }
    });
    let begin = Instant::now();
    let timeout = Some(Duration::from_mins(5));
    let error = job.coordinator(Options { timeout, ..patient() }).pause(&mut quiet).unwrap_err();
    assert!(begin.elapsed() < Duration::from_mins(2), "it took {:?}", begin.elapsed());
    let text = error.to_string();
    assert!(text.contains("step 'drain' (a table has no such row)"), "{text}");
    until("the other to go back", || job.states()[1] == MemberState::Active);
    // The member answers, its application runs on, and no process waits for it in vain.
    assert_eq!(job.states()[0], MemberState::Faulted);
    let (passed, hear) = crossbeam_channel::bounded(1);
    let member = std::sync::Arc::clone(&job.members[0]);
    std::thread::spawn(move || {
        drop(member.gate().pass(Passage::Use));
        passed.send(()).unwrap();
    });
    hear.recv_timeout(SOON).expect("its gate is shut");
    assert!(!job.members[0].cut().is_held());
    for _ in 0..2 {
        let error = job.coordinator(patient()).pause(&mut quiet).unwrap_err();
        assert!(matches!(error, Trouble::Faulted { .. }), "{error}");
    }
    let stats = job.coordinator(patient()).stats().unwrap();
    let notes: Vec<_> = stats.members.iter().flat_map(|stats| &stats.notes).collect();
    assert!(notes.iter().any(|note| note.contains("no such row")), "{notes:?}");
}
