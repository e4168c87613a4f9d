//! The programs of the GPU lane that need no torch, on the simulated driver: they work, and survive pauses.

use std::time::Duration;

use sublet_tests::{MIB, Outcome, Stage};

const END_TIMEOUT: Duration = Duration::from_mins(2);

/// Pauses at one step after another, then compares what all ranks wrote with a run without Sublet.
fn survives_pauses(program: &str, ranks: usize, arguments: &[&str], pauses_at: &[u32]) -> Outcome {
    let stage = Stage::new(&[256 * MIB; 2])?;
    let values = |dir: &std::path::Path| -> Outcome<Vec<String>> {
        let read = |rank| Ok(std::fs::read_to_string(dir.join(format!("rank{rank}.txt")))?);
        (0..ranks).map(read).collect()
    };
    let (mut plain, wanted) = stage.lane_program(None, program, ranks, arguments)?;
    let status = plain.ends_within(END_TIMEOUT)?;
    assert!(status.success(), "{status}: {}", plain.stderr());

    // It does not end before its last pause.
    let arguments = [arguments, &["--stay"]].concat();
    let (mut job, got) = stage.lane_program(Some("lane"), program, ranks, &arguments)?;
    for step in pauses_at {
        job.wait_for_line(&format!("step {step} "))?;
        stage.pause("lane")?;
        stage.resume("lane")?;
    }
    std::fs::write(got.join("go-on"), "")?;
    let status = job.ends_within(END_TIMEOUT)?;
    assert!(status.success(), "{status}: {}", job.stderr());
    assert_eq!(values(&got)?, values(&wanted)?);
    Ok(())
}

#[test]
fn communicators_that_come_and_go_survive_pauses() -> Outcome {
    // A communicator ends after each 20th step.
    let pauses_at = [5, 18, 19, 20, 39, 47, 59, 79, 80, 99];
    survives_pauses("rebuild.py", 2, &["--steps", "130", "--width", "32"], &pauses_at)
}

#[test]
fn contents_of_every_policy_on_two_devices_survive_pauses() -> Outcome {
    let arguments = ["--steps", "200", "--width", "16", "--devices", "2"];
    survives_pauses("one_contents.py", 1, &arguments, &[3, 20, 60, 100, 150])
}

#[test]
fn graphs_that_many_threads_make_and_end_survive_pauses() -> Outcome {
    let pauses_at = [2, 9, 20, 31, 45];
    survives_pauses("graph_threads.py", 1, &["--steps", "60", "--width", "16"], &pauses_at)
}

/// Their launches are not counted: a pause may find one waiting for a launch that it holds back.
#[test]
fn kernels_that_wait_for_another_process_survive_pauses() -> Outcome {
    let pauses_at = [4, 11, 23, 42, 61, 90];
    survives_pauses("peers.py", 2, &["--steps", "120", "--width", "16"], &pauses_at)
}
