//! What cannot be done now: it is said in one line, the exit code is not 0, and nothing is lost.

use sublet_tests::{Job, JobOptions, MIB, Outcome, Ran, Stage};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

/// The command refused, in one line with these words, and the job goes on.
fn refused(stage: &Stage, arguments: &[&str], words: &[&str]) -> Outcome<Ran> {
    let ran = stage.sublet(arguments)?.exited(1)?;
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
    for word in words {
        assert!(ran.stderr.contains(word), "no '{word}' in {ran:#?}");
    }
    Ok(ran)
}

fn goes_on(stage: &Stage, job: &mut Job) -> Outcome {
    assert_eq!(stage.states("train")?, ["active"]);
    job.step(1)?;
    job.verify()?;
    stage.pause("train")?;
    stage.resume("train")?;
    job.step(1)?;
    job.verify()?;
    Ok(())
}

#[test]
fn pause_during_a_capture_waits_for_its_end_and_is_refused_in_the_end() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    job.ranks[1].do_it("capture begin")?;
    let pid = format!("process {} is capturing 1 stream", job.ranks[1].pid());
    let words = [pid.as_str(), "The tenant is active as before"];
    refused(&stage, &["pause", "train", "--timeout", "700ms"], &words)?;
    job.ranks[1].do_it("capture end")?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn kernel_that_waits_for_ever_lets_the_pause_time_out() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    job.ranks[0].do_it("spin")?;
    let words = ["the device did not finish its work in time", "The tenant is active as before"];
    refused(&stage, &["pause", "train", "--timeout", "700ms"], &words)?;
    job.ranks[0].do_it("release spin")?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn host_without_room_refuses_the_pause() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 2).with("SUBLET_HOST_BYTES_MAX", "1048576");
    let mut job = stage.connected_job(&options)?;
    refused(&stage, &["pause", "train"], &["host memory", "The tenant is active as before"])?;
    assert_eq!(stage.states("train")?, ["active"]);
    job.step(1)?;
    job.verify()?;
    job.exit()
}

#[test]
fn device_without_room_refuses_the_resume_until_it_has() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let mut job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;

    let ran = refused(
        &stage,
        &["resume", "train"],
        &["GPU 0", "The tenant is paused, contents kept as before"],
    )?;
    assert!(ran.stderr.contains("bytes"), "{ran:#?}");
    let document = stage.sublet(&["resume", "train", "--json"])?.exited(1)?.json()?;
    let missing_bytes = document["missing_device_bytes"].as_u64().expect("a number of bytes");
    assert!((MIB..CAPACITIES[0]).contains(&missing_bytes), "{document:#}");
    assert_eq!(document["retryable"], true);
    assert_eq!(stage.states("train")?, ["paused"]);
    assert!(stage.used_bytes(1)? <= 2 * MIB, "the failed resume keeps memory");

    other.exit()?;
    stage.resume("train")?;
    job.step(1)?;
    job.verify()?;
    job.exit()
}

#[test]
fn resume_waits_for_memory_when_told_to() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let mut job = stage.connected_job(&options)?;
    stage.pause("train")?;
    let other = stage.job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;
    std::thread::scope(|scope| -> Outcome {
        let resume = scope.spawn(|| stage_resume_waiting(&stage));
        other.exit()?;
        resume.join().expect("the thread ends")
    })?;
    job.step(1)?;
    job.verify()?;
    job.exit()
}

fn stage_resume_waiting(stage: &Stage) -> Outcome {
    stage.sublet(&["resume", "train", "--wait", "30s"])?.succeeded().map(drop)
}

#[test]
fn unknown_tenant_is_named_with_those_there_are() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    refused(
        &stage,
        &["pause", "nobody"],
        &["there is no tenant 'nobody'", "no tenant is running"],
    )?;
    let job = stage.job(&JobOptions::new("train", 1))?;
    for command in ["pause", "resume", "stats"] {
        refused(&stage, &[command, "nobody"], &["there is no tenant 'nobody'", "train"])?;
    }
    job.exit()
}
