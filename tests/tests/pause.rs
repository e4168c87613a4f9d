//! Pausing and resuming a job from outside, by the real command.

use std::time::Duration;

use sublet_tests::{JobOptions, MIB, Outcome, Stage, statistic};

const CAPACITIES: [u64; 3] = [128 * MIB; 3];

/// Cross imports, windows mapped twice, imports released right after map, own tickets, tickets that went
/// around a ring and `cudaIpc` mappings are in every job of these tests; `verify` reads through all of them.
#[test]
fn every_byte_is_there_after_twenty_cycles() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 3)?;
    for _ in 0..20 {
        stage.pause("train")?;
        stage.resume("train")?;
        job.step(1)?;
    }
    job.verify()?;
    // And without work between.
    for _ in 0..3 {
        stage.pause("train")?;
        stage.resume("train")?;
        job.verify()?;
    }
    assert_eq!(job.steps_done(), 21);
    job.exit()
}

/// Two for each process, and some for the command itself.
#[test]
fn command_takes_the_open_files_that_it_may_have() -> Outcome {
    let stage = Stage::new(&[128 * MIB; 4])?;
    let job = stage.connected_job(&JobOptions::new("train", 4))?;
    for words in [
        &["pause", "train", "--timeout", "4m"][..],
        &["stats", "train"],
        &["resume", "train", "--timeout", "4m"],
    ] {
        stage.sublet_with_files(9, words)?.exited(0)?;
    }
    job.works_and_exits()
}

#[test]
fn job_that_keeps_running_is_paused_anywhere_in_a_step() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let mut job = stage.connected_job(&JobOptions::new("train", 2))?;
    job.run()?;
    for _ in 0..5 {
        stage.pause("train")?;
        let at = job.steps_done();
        assert!(job.ranks[0].is_silent_for(Duration::from_millis(50)));
        assert_eq!(job.steps_done(), at, "a paused job went on");
        stage.resume("train")?;
        job.wait_for_step(at + 2)?;
    }
    job.stop()?;
    job.verify()?;
    job.exit()
}

#[test]
fn steps_give_the_same_with_and_without_sublet() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let plain = JobOptions { is_preloaded: false, ..JobOptions::new("plain", 3) };
    let mut native = stage.connected_job(&plain)?;
    let wanted = native.step(3)?;
    native.verify()?;
    native.exit()?;

    let mut job = stage.connected_job(&JobOptions::new("train", 3))?;
    stage.pause("train")?;
    stage.resume("train")?;
    assert_eq!(job.step(3)?, wanted);
    job.exit()
}

#[test]
fn paused_memory_is_there_for_another_tenant() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let options = JobOptions { statics: 16, tensor_mib: 24, ..JobOptions::new("train", 2) };
    let job = stage.connected_job(&options)?;
    let before_bytes = stage.used_bytes(0)?;
    assert!(before_bytes > CAPACITIES[0] / 2, "the job is too small to be in the way");
    stage.pause("train")?;
    // What stays is the one small plain allocation of the rank.
    assert!(stage.used_bytes(0)? <= 2 * MIB, "{} bytes stay", stage.used_bytes(0)?);

    let other = JobOptions { statics: 0, ..JobOptions::new("infer", 1) };
    let mut other = stage.job(&other)?;
    let [free_bytes, total_bytes] = other.ranks[0].do_it("memory")?.numbers::<2>()?;
    let most_bytes = total_bytes / 10 * 9 - (total_bytes - free_bytes);
    other.ranks[0].do_it(&format!("allocate {most_bytes}"))?;
    assert!(stage.used_bytes(0)? >= total_bytes / 10 * 9);
    other.exit()?;

    stage.resume("train")?;
    assert_eq!(stage.used_bytes(0)?, before_bytes);
    job.works_and_exits()
}

#[test]
fn discarded_contents_are_not_moved() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let options = JobOptions { scratch_mib: 32, ..JobOptions::new("train", 1) };
    let job = stage.connected_job(&options)?;
    let member = &stage.members("train")?[0];
    let own_bytes = statistic(member, "own_bytes") - statistic(member, "pinned_bytes");
    let report = stage.pause("train")?;
    let saved = phase_bytes(&report, "prepare");
    let released = phase_bytes(&report, "release");
    assert_eq!(released, own_bytes, "{report:#}");
    assert_eq!(saved, own_bytes - 32 * MIB, "{report:#}");
    let report = stage.resume("train")?;
    assert_eq!(phase_bytes(&report, "restore"), saved, "{report:#}");
    job.works_and_exits()
}

fn phase_bytes(report: &serde_json::Value, phase: &str) -> u64 {
    let phases = report["report"]["phases"].as_array().into_iter().flatten();
    let members = phases
        .filter(|found| found["phase"] == phase)
        .flat_map(|found| found["members"].as_array().into_iter().flatten());
    members.filter_map(|member| member["report"]["bytes"].as_u64()).sum()
}

#[test]
fn what_is_so_already_succeeds_and_is_said() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let job = stage.connected_job(&JobOptions::new("train", 1))?;
    let said = stage.patiently(&["resume", "train"])?.stdout;
    assert_eq!(said, "tenant 'train' is active already\n");
    stage.pause("train")?;
    let said = stage.patiently(&["pause", "train"])?.stdout;
    assert_eq!(said, "tenant 'train' is paused already\n");
    assert_eq!(stage.states("train")?, ["paused"]);
    stage.resume("train")?;
    assert_eq!(stage.states("train")?, ["active"]);
    job.exit()
}

#[test]
fn all_tenants_are_paused_by_one_command_and_one_that_refuses_keeps_no_other() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..1])?;
    let train = stage.connected_job(&JobOptions::new("train", 1))?;
    let mut infer = stage.connected_job(&JobOptions::new("infer", 1))?;
    infer.ranks[0].do_it("capture begin")?;
    let ran = stage.sublet(&["pause", "--all", "--timeout", "5s"])?.exited(3)?;
    assert!(ran.stdout.starts_with("paused tenant 'train' in "), "{ran:#?}");
    let is_note = |line: &str| line.starts_with("note: ");
    assert!(ran.stdout.lines().skip(1).all(is_note), "{ran:#?}");
    let next = " [in-capture]; next: sublet pause infer --timeout 2m\n";
    assert!(ran.stderr.ends_with(next), "{ran:#?}");
    assert_eq!([stage.states("train")?, stage.states("infer")?], [["paused"], ["active"]]);
    infer.ranks[0].do_it("capture end")?;
    let changes = stage.patiently(&["pause", "--all", "--json"])?.json()?;
    let outcomes = changes["changes"].as_array().into_iter().flatten();
    let outcomes = outcomes.map(|change| (change["tenant"].as_str(), change["outcome"].as_str()));
    let expected = [("infer", "completed"), ("train", "already_paused")];
    assert_eq!(outcomes.collect::<Vec<_>>(), expected.map(|(a, b)| (Some(a), Some(b))));
    for (name, job) in [("train", train), ("infer", infer)] {
        stage.resume(name)?;
        job.exit()?;
    }
    Ok(())
}

#[test]
fn a_dry_run_says_what_a_pause_frees_and_moves_nothing() -> Outcome {
    let stage = Stage::new(&CAPACITIES[..2])?;
    let job = stage.connected_job(&JobOptions::new("train", 2))?;
    let plan = stage.sublet(&["pause", "train", "--dry-run", "--json"])?.succeeded()?.json()?;
    let said = stage.sublet(&["pause", "train", "--dry-run"])?.succeeded()?.stdout;
    assert!(said.starts_with("a pause of tenant 'train' would free "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(stage.states("train")?, ["active"]);
    let done = stage.patiently(&["pause", "train", "--json"])?.json()?;
    assert_eq!(plan["freed_bytes"], done["freed_bytes"], "{plan:#}");
    let kept = |name: &str| {
        let members = done["report"]["phases"].as_array().into_iter().flatten();
        let members = members.flat_map(|phase| phase["members"].as_array().into_iter().flatten());
        members.filter_map(|member| member["report"]["kept"][name].as_u64()).sum::<u64>()
    };
    let all: u64 = ["zero_bytes", "unchanged_bytes", "copied_bytes"].map(kept).iter().sum();
    assert!(plan["host_bytes_max"].as_u64() >= Some(all), "{all}: {plan:#}");
    stage.resume("train")?;
    job.exit()
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
