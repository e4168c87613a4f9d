//! Processes that are killed in the middle of a pause, and commands that meet.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use sublet_tests::{JobOptions, MIB, Outcome, Stage};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// Begins a pause that cannot end, because of a kernel that rank 0 has launched, and waits until every
/// process is on its way.
fn begin_pause(stage: &Stage) -> Outcome<Child> {
    let mut command = stage.command(&stage.files().sublet);
    command.args(["pause", "train", "--timeout", "5m"]);
    let child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    stage.states_become("train", "offloading")?;
    Ok(child)
}

#[test]
fn command_killed_in_the_middle_of_a_pause_leaves_the_job_active() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 2)?;
    job.ranks[0].do_it("spin")?;
    let mut command = begin_pause(&stage)?;
    command.kill()?;
    command.wait()?;
    stage.states_become("train", "active")?;
    job.ranks[0].do_it("release spin")?;
    job.works()?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn rank_killed_in_the_middle_of_a_pause_is_named_and_the_others_stay_active() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // Not connected: what the others hold does not depend on it.
    let mut job = stage.job(&JobOptions::new("train", 2))?;
    job.ranks[0].do_it("spin")?;
    let command = begin_pause(&stage)?;
    let begin = Instant::now();
    job.ranks[0].kill()?;
    let output = command.wait_with_output()?;
    // A fifth of what the pause would wait for it.
    assert!(begin.elapsed() < Duration::from_mins(1), "the end of a process was not noticed");
    let errors = String::from_utf8_lossy(&output.stderr);
    let pid = format!("process {}", job.ranks[0].pid());
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains(&pid), "no '{pid}' in {errors}");
    assert_eq!(stage.states("train")?, ["active"]);
    job.ranks[1].do_it("step")?;
    job.ranks[1].do_it("verify")?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.ranks[1].do_it("verify")?;
    Ok(())
}

#[test]
fn two_commands_at_once_take_turns() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    for verb in ["pause", "resume"] {
        let said = std::thread::scope(|scope| -> Outcome<Vec<String>> {
            let run = || stage.patiently(&[verb, "train"]).map(|ran| ran.stdout);
            let threads = [scope.spawn(run), scope.spawn(run)];
            threads.into_iter().map(|thread| thread.join().expect("the thread ends")).collect()
        })?;
        let already = said.iter().filter(|text| text.contains("already")).count();
        assert_eq!(already, 1, "{said:?}");
    }
    job.works_and_exits()
}
