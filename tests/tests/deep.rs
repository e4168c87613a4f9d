//! Deep pauses by the real command: nothing of a job is left on a device, its contexts neither, and all of it comes back.

use std::process::Stdio;
use std::time::Duration;

use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, until};

const CAPACITIES: [u64; 3] = [128 * MIB; 3];
const CONTEXT_BYTES: &str = "10485760";
const RANKS: usize = 3;

/// Ranks that have each other's memory open, and whose contexts cost something.
fn job(stage: &Stage, tenant: &str) -> Outcome<Job> {
    let options = JobOptions::new(tenant, RANKS).with("SIMCUDA_CONTEXT_BYTES", CONTEXT_BYTES);
    stage.connected_job(&options)
}

fn used_bytes(stage: &Stage) -> Outcome<Vec<u64>> {
    (0..3).map(|device| stage.used_bytes(device)).collect()
}

fn goes_on(stage: &Stage, job: &mut Job) -> Outcome {
    assert_eq!(stage.states("train")?, ["active"]);
    job.works()?;
    Ok(())
}

#[test]
fn nothing_is_left_on_a_device_and_every_byte_comes_back() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    let before = used_bytes(&stage)?;
    for _ in 0..5 {
        let paused = stage.patiently(&["pause", "train", "--deep", "--json"])?.json()?;
        let phases = paused["report"]["phases"].as_array().cloned().unwrap_or_default();
        assert_eq!(phases.last().map(|phase| phase["phase"].clone()), Some("freeze".into()));
        assert_eq!(stage.states("train")?, ["deep"]);
        assert_eq!(used_bytes(&stage)?, [0; 3]);
        stage.resume("train")?;
        assert_eq!(used_bytes(&stage)?, before);
        job.step(1)?;
    }
    job.verify()?;
    job.exit()
}

#[test]
fn a_frozen_job_is_seen_and_refuses_what_needs_the_driver() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    job.run()?;
    stage.patiently(&["pause", "train"])?;
    assert!(used_bytes(&stage)?.iter().all(|bytes| *bytes >= 10 * MIB), "contexts stay");
    // What is left NVML tells.
    let with_nvml = |words: &[&str]| {
        stage.sublet_told("LD_LIBRARY_PATH", &stage.libraries_with_nvml(), words)?.succeeded()
    };
    let left = with_nvml(&["ps", "--json"])?.json()?["tenants"][0]["left"].clone();
    let each = left.as_array().into_iter().flatten();
    let each: Vec<_> = each.filter_map(|left| left["gpus"][0]["bytes"].as_u64()).collect();
    assert!(each.len() == RANKS && each.iter().all(|bytes| *bytes >= 10 * MIB), "{left:#}");
    assert!(with_nvml(&["ps"])?.stdout.contains("paused, "), "how much is left");
    assert!(with_nvml(&["stats"])?.stdout.contains("left on GPUs: 1"), "the same");
    assert!(with_nvml(&["metrics"])?.stdout.contains("sublet_left_bytes{tenant=\"train\""));
    // Of a tenant that is paused the contexts follow.
    let shown = stage.patiently(&["pause", "train", "--deep", "-v"])?;
    assert!(shown.stdout.contains("freeze"), "{shown:#?}");
    let again = stage.patiently(&["pause", "train", "--deep"])?;
    assert!(again.stdout.contains("paused already"), "{again:#?}");
    let left = with_nvml(&["ps", "--json"])?.json()?["tenants"][0]["left"].to_string();
    assert!(!left.contains("bytes"), "{left}");
    let ps = stage.sublet(&["ps"])?.succeeded()?;
    assert!(ps.stdout.contains(" deep ") && ps.stdout.contains("sublet resume train"), "{ps:#?}");
    let metrics = stage.sublet(&["metrics"])?.succeeded()?;
    let line = "sublet_processes{tenant=\"train\",state=\"deep\"} 3";
    assert!(metrics.stdout.contains(line), "{metrics:#?}");
    let counted = stage.sublet(&["budget", "train", "1GiB"])?;
    let all = format!("{}{}", counted.stdout, counted.stderr);
    assert!(counted.code != Some(0) && all.contains("in a deep pause"), "{counted:#?}");
    stage.resume("train")?;
    let at = job.steps_done();
    job.wait_for_step(at + 2)?;
    job.stop()?;
    job.verify()?;
    job.exit()
}

#[test]
fn another_tenant_has_the_whole_device_meanwhile_and_a_resume_without_room_changes_nothing()
-> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    stage.patiently(&["pause", "train", "--deep"])?;
    let mut other = stage.job(&JobOptions { statics: 0, ..JobOptions::new("infer", 1) })?;
    let [free_bytes, _] = other.ranks[0].do_it("memory")?.numbers::<2>()?;
    other.ranks[0].do_it(&format!("allocate {}", free_bytes - 4 * MIB))?;
    let refused = stage.sublet(&["resume", "train"])?.exited(1)?;
    assert!(refused.stderr.contains("'thaw'"), "{refused:#?}");
    other.exit()?;
    stage.resume("train")?;
    goes_on(&stage, &mut job)?;
    job.exit()
}

#[test]
fn two_tenants_change_places_and_the_contexts_of_the_first_follow() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = job(&stage, "train")?;
    stage.patiently(&["pause", "train", "--deep"])?;
    let infer = job(&stage, "infer")?;
    let before = used_bytes(&stage)?;
    for [from, to] in [["infer", "train"], ["train", "infer"]] {
        stage.patiently(&["swap", from, to, "--deep"])?;
        assert_eq!(
            (stage.states(from)?, stage.states(to)?),
            (vec!["deep".into()], vec!["active".into()])
        );
        assert_eq!(used_bytes(&stage)?, before);
    }
    stage.patiently(&["swap", "infer", "train"])?;
    goes_on(&stage, &mut train)?;
    train.exit()?;
    stage.resume("infer")?;
    infer.works_and_exits()
}

/// The first cannot leave: it captures a graph for longer than the command waits.
#[test]
fn one_that_does_not_come_since_the_other_stays_is_deep_as_before() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut train = job(&stage, "train")?;
    stage.patiently(&["pause", "train", "--deep"])?;
    let mut stays = stage.turn_taker("stays", &[], 0)?;
    stays.do_it("allocate 16 3")?;
    stays.do_it("capture")?;
    let ran = stage.sublet(&["swap", "stays", "train", "--timeout", "3s"])?.exited(1)?;
    assert!(ran.stderr.contains("is capturing 1 stream"), "{ran:#?}");
    assert_eq!(stage.states("train")?, ["deep"]);
    stays.do_it("captured")?;
    stage.patiently(&["swap", "stays", "train"])?;
    goes_on(&stage, &mut train)?;
    train.exit()
}

/// If the contexts of both do not fit together, the first leaves before.
#[test]
fn two_tenants_change_places_whose_contexts_do_not_fit_side_by_side() -> Outcome {
    let stage = Stage::new(&[48 * MIB; 3])?;
    let mut train = job(&stage, "train")?;
    stage.patiently(&["pause", "train", "--deep"])?;
    let mut infer = job(&stage, "infer")?;
    for rank in &mut infer.ranks {
        let [free_bytes, _] = rank.do_it("memory")?.numbers::<2>()?;
        rank.do_it(&format!("allocate {}", free_bytes - 2 * MIB))?;
    }
    stage.patiently(&["swap", "infer", "train", "--deep"])?;
    assert_eq!(stage.states("infer")?, ["deep"]);
    goes_on(&stage, &mut train)?;
    train.exit()?;
    stage.resume("infer")?;
    infer.verify()?;
    infer.exit()
}

/// The second process's call fails, when the first has done its part.
#[test]
fn a_call_that_fails_for_one_process_leaves_all_paused_and_the_next_command_goes_on() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    let faults = |call: &str| format!("cuCheckpointProcess{call}:2:999");
    for call in ["Lock", "Checkpoint"] {
        let words = ["pause", "train", "--deep"];
        let ran = stage.sublet_told("SIMCUDA_FAULTS", &faults(call), &words)?.exited(3)?;
        assert!(
            ran.stdout.contains("not deep") && ran.stdout.contains("CUDA_ERROR_UNKNOWN"),
            "{ran:#?}"
        );
        assert_eq!(stage.states("train")?, ["paused"], "{call}");
        stage.resume("train")?;
        goes_on(&stage, &mut job)?;
    }
    for call in ["Restore", "Unlock"] {
        stage.patiently(&["pause", "train", "--deep"])?;
        let ran =
            stage.sublet_told("SIMCUDA_FAULTS", &faults(call), &["resume", "train"])?.exited(1)?;
        assert!(ran.stderr.contains("'thaw'"), "{ran:#?}");
        // Those that had come back were frozen again.
        assert_eq!(stage.states("train")?, ["deep"], "{call}");
        stage.resume("train")?;
        goes_on(&stage, &mut job)?;
    }
    job.exit()
}

#[test]
fn a_command_that_is_killed_half_way_is_gone_on_from() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    let killed = |call: &str, words: &[&str]| -> Outcome {
        let mut command = stage.command(&stage.files().sublet);
        command.args(words).env("SIMCUDA_LATENCY", format!("cuCheckpointProcess{call}:60000000"));
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let limit = Duration::from_secs(30);
        until("all told", limit, || Ok(stage.states("train")? == ["deep"]))?;
        command.kill()?;
        command.wait()?;
        Ok(())
    };
    for call in ["Lock", "Checkpoint"] {
        killed(call, &["pause", "train", "--deep"])?;
        stage.resume("train")?;
        goes_on(&stage, &mut job)?;
        killed(call, &["pause", "train", "--deep"])?;
        stage.patiently(&["pause", "train", "--deep"])?;
        assert_eq!(used_bytes(&stage)?, [0; 3], "{call}");
        for call in ["Restore", "Unlock"] {
            killed(call, &["resume", "train"])?;
        }
        stage.resume("train")?;
        goes_on(&stage, &mut job)?;
    }
    job.exit()
}

#[test]
fn a_process_that_dies_in_a_deep_pause_leaves_the_others_a_way_back() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    stage.patiently(&["pause", "train", "--deep"])?;
    job.ranks[1].kill()?;
    assert_eq!(used_bytes(&stage)?, [0; 3]);
    stage.sublet(&["resume", "train"])?.exited(1)?;
    stage.patiently(&["resume", "train", "--without-lost"])?;
    assert_eq!(stage.states("train")?, ["active"]);
    Ok(())
}

#[test]
fn what_a_deep_pause_cannot_do_is_refused_and_changes_nothing() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, "train")?;
    stage.sublet(&["pause", "train", "--deep", "--tag", "kv"])?.exited(2)?;
    let words = ["pause", "train", "--deep"];
    for (variable, value, why) in [
        ("SIMCUDA_FAULTS", "cuCheckpointProcessGetState:1:801", "does not support"),
        ("CUDA_VISIBLE_DEVICES", "", "cuInit failed with CUDA_ERROR_NO_DEVICE"),
    ] {
        let ran = stage.sublet_told(variable, value, &words)?;
        let ran = ran.exited(1)?;
        assert!(
            ran.stderr.contains(why) && ran.stderr.contains("`sublet pause train`"),
            "{ran:#?}"
        );
        goes_on(&stage, &mut job)?;
    }
    job.exit()
}
