//! Frees that arrive while the memory is away, and processes that end then.

use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, statistic};

const CAPACITIES: [u64; 3] = [128 * MIB; 3];

/// Paused from inside, so that the ranks' own threads are free to call the driver.
fn paused_job(stage: &Stage, ranks: usize) -> Outcome<Job> {
    let mut job = stage.connected_job(&JobOptions::new("train", ranks))?;
    job.ranks[0].do_it("pause-all 0")?;
    Ok(job)
}

fn resumed_and_right(job: &mut Job) -> Outcome {
    job.ranks[0].do_it("resume-all 0")?;
    job.verify()?;
    job.works()?;
    Ok(())
}

#[test]
fn frees_while_paused_are_answered_and_not_brought_back() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = paused_job(&stage, 3)?;
    let before: Vec<_> = stage.members("train")?;
    for what in ["buffer", "tensor", "import", "opened"] {
        job.all(&format!("free {what}"))?;
    }
    for (before, after) in before.iter().zip(&stage.members("train")?) {
        let freed = |name| statistic(before, name) - statistic(after, name);
        // A buffer and a tensor of our own; a ring buffer and an opened block of a peer.
        assert_eq!(freed("own_bytes"), 4 * MIB);
        assert_eq!(freed("imported_bytes"), 4 * MIB);
    }
    resumed_and_right(&mut job)?;
    job.exit()
}

#[test]
fn second_mapping_freed_while_paused_leaves_the_first() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = paused_job(&stage, 2)?;
    job.all("free alias")?;
    resumed_and_right(&mut job)?;
    job.exit()
}

#[test]
fn frees_of_a_resumed_job_give_the_memory_to_the_driver() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = paused_job(&stage, 2)?;
    resumed_and_right(&mut job)?;
    let before_bytes = stage.used_bytes(0)?;
    for what in ["buffer", "tensor", "import", "opened", "alias"] {
        job.all(&format!("free {what}"))?;
    }
    assert_eq!(before_bytes - stage.used_bytes(0)?, 4 * MIB);
    job.works_and_exits()
}

#[test]
fn rank_killed_while_paused_does_not_hold_back_those_that_share_nothing_with_it() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // Not connected: nobody imports anything.
    let mut job = stage.job(&JobOptions::new("train", 3))?;
    stage.pause("train")?;
    job.ranks[1].kill()?;
    stage.resume("train")?;
    for index in [0, 2] {
        job.ranks[index].do_it("step")?;
        job.ranks[index].do_it("verify")?;
    }
    Ok(())
}

#[test]
fn rank_that_ends_while_paused_is_no_longer_a_member() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.job(&JobOptions::new("train", 2))?;
    stage.pause("train")?;
    assert!(job.ranks[1].exit()?.success());
    assert_eq!(stage.members("train")?.len(), 1);
    stage.resume("train")?;
    job.ranks[0].do_it("verify")?;
    assert_eq!(stage.used_bytes(1)?, 0);
    Ok(())
}

#[test]
fn what_dead_processes_left_behind_is_removed() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.job(&JobOptions::new("train", 2))?;
    for rank in &mut job.ranks {
        rank.kill()?;
    }
    let dir = stage.run_dir_path().join("train");
    assert!(dir.is_dir(), "the kill came too late");
    let ran = stage.sublet(&["pause", "train"])?.exited(1)?;
    assert!(ran.stderr.contains("tenant 'train' has no live process"), "{ran:#?}");
    assert!(ran.stderr.contains("2 dead processes"), "{ran:#?}");
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:#?}");
    assert!(!dir.exists(), "the directory stays");
    let ran = stage.sublet(&["pause", "train"])?.exited(1)?;
    assert!(ran.stderr.contains("there is no tenant 'train'"), "{ran:#?}");
    Ok(())
}
