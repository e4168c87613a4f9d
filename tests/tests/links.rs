//! Copies of real processes that take a neighbouring GPU's link beside their own.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage, Trouble};

const CAPACITIES: [u64; 2] = [1024 * MIB; 2];
const CONTEXT_BYTES: u64 = 8 * MIB;

fn options() -> JobOptions {
    JobOptions::new("train", 1)
        .with("SUBLET_LINKS", "2")
        .with("SUBLET_LINKS_MIN_MIB", "1")
        .with("SUBLET_ZERO", "0")
        .with("SUBLET_DELTA", "0")
        .with("SIMCUDA_CONTEXT_BYTES", &CONTEXT_BYTES.to_string())
}

fn job(stage: &Stage, options: &JobOptions) -> Outcome<Job> {
    let mut job = stage.connected_job(options)?;
    job.ranks[0].do_it(&format!("allocate {}", 200 * MIB))?;
    Ok(job)
}

/// What took the neighbour's link, of what was copied, and the notes.
fn change(stage: &Stage, what: &str) -> Outcome<(u64, u64, String)> {
    let report: Value = stage.sublet(&[what, "train", "--json"])?.succeeded()?.json()?;
    let phases = report["report"]["phases"].as_array().into_iter().flatten();
    let copies =
        phases.filter(|phase| ["Save", "Restore"].iter().any(|name| phase["phase"] == *name));
    let members = copies.flat_map(|phase| phase["members"].as_array().into_iter().flatten());
    let (mut relayed, mut copied) = (0, 0);
    for member in members {
        relayed += member["report"]["bytes_by_neighbour"].as_u64().unwrap_or_default();
        copied += member["report"]["bytes"].as_u64().unwrap_or_default();
    }
    Ok((relayed, copied, report["report"]["notes"].to_string()))
}

#[test]
fn a_tenant_alone_sends_a_part_through_its_neighbour_and_leaves_nothing_there() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, &options())?;
    let deadline = Instant::now() + Duration::from_mins(2);
    let (mut out, mut back) = (0, 0);
    while out == 0 || back == 0 {
        let (relayed, copied, notes) = change(&stage, "pause")?;
        assert!(copied > 200 * MIB && relayed < copied, "{relayed} {copied}");
        assert!(!notes.contains("link"), "{notes}");
        assert_eq!(stage.used_bytes(1)?, 0, "paused");
        out += relayed;
        let (relayed, copied, notes) = change(&stage, "resume")?;
        assert!(copied > 200 * MIB && relayed < copied, "{relayed} {copied}");
        assert!(!notes.contains("link"), "{notes}");
        assert_eq!(stage.used_bytes(1)?, 0, "resumed");
        back += relayed;
        job.verify()?;
        if Instant::now() > deadline {
            return Err(Trouble::new("nothing takes the neighbour's link".to_owned()));
        }
    }
    let (mut text, mut tries) = (String::new(), 0);
    while !text.contains("by a neighbouring GPU's link") && tries < 20 {
        change(&stage, "pause")?;
        text = stage.sublet(&["stats", "train"])?.exited(0)?.stdout;
        change(&stage, "resume")?;
        tries += 1;
    }
    assert!(text.contains("by a neighbouring GPU's link"), "{text}");
    job.exit()
}

#[test]
fn a_context_that_is_kept_is_there_while_paused_and_goes_when_somebody_comes() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = job(&stage, &options().with("SUBLET_LINKS_KEEP", "1"))?;
    change(&stage, "pause")?;
    assert_eq!(stage.used_bytes(1)?, CONTEXT_BYTES);
    change(&stage, "resume")?;
    job.verify()?;
    let other = JobOptions { first_device: 1, ..JobOptions::new("infer", 1) };
    let other = stage.job(&other)?;
    let (relayed, _, notes) = change(&stage, "pause")?;
    assert_eq!(relayed, 0);
    assert!(notes.contains("GPU 1 holds memory of another process"), "{notes}");
    other.exit()?;
    assert_eq!(stage.used_bytes(1)?, 0, "kept where somebody was");
    let (_, _, notes) = change(&stage, "resume")?;
    assert_eq!(notes, "[]");
    job.verify()?;
    job.exit()
}

#[test]
fn a_tenant_that_is_paused_there_counts_too_and_settings_that_say_nothing_are_named() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let other = JobOptions { first_device: 1, ..JobOptions::new("infer", 1) };
    let other = stage.job(&other)?;
    stage.pause("infer")?;
    let mut job = job(&stage, &options())?;
    let (relayed, _, notes) = change(&stage, "pause")?;
    assert_eq!(relayed, 0);
    assert!(notes.contains("GPU 1 holds memory of another process"), "{notes}");
    change(&stage, "resume")?;
    job.verify()?;
    job.exit()?;
    stage.resume("infer")?;
    other.exit()?;

    let mut job = self::job(&stage, &options().with("SUBLET_LINKS", "three"))?;
    let stats = stage.sublet(&["stats", "train", "--json"])?.exited(0)?.stdout;
    assert!(stats.contains("SUBLET_LINKS=three: expected 1, 2"), "{stats}");
    assert_eq!(change(&stage, "pause")?.0, 0);
    change(&stage, "resume")?;
    job.verify()?;
    job.exit()
}

#[test]
fn a_process_killed_while_it_copies_through_its_neighbour_leaves_nothing_there() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = options().with("SIMCUDA_LATENCY", "cuMemcpyDtoDAsync:200000");
    let mut job = job(&stage, &options)?;
    let mut command = stage.command(&stage.files().sublet);
    let mut pause = command.args(["pause", "train"]).stderr(Stdio::null()).spawn()?;
    let deadline = Instant::now() + Duration::from_mins(1);
    // The context first, then what is staged.
    while stage.used_bytes(1)? <= CONTEXT_BYTES {
        if Instant::now() > deadline || pause.try_wait()?.is_some() {
            return Err(Trouble::new("nothing was staged".to_owned()));
        }
    }
    job.ranks[0].kill()?;
    pause.wait()?;
    while stage.used_bytes(1)? > 0 {
        assert!(Instant::now() < deadline, "staging outlives its process");
    }
    Ok(())
}
