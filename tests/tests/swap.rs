//! Two tenants that change places: both directions simultaneously, in bounded memory.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::Value;
use sublet_tests::{Boundary, Job, JobOptions, MIB, Outcome, Stage, Steps, Trouble};
use tenants::coordinator::{Coordinator, Options, Outcome as Done};
use tenants::identity::TenantName;
use tenants::wire::Phase;

/// Of memory that ranks keep in allocations of 2 MiB, so that it can go in small windows.
const STATICS: usize = 20;
const WINDOW: u64 = 8 * MIB;

fn options(tenant: &str) -> JobOptions {
    JobOptions { statics: STATICS, ..JobOptions::new(tenant, 2) }
}

/// `train`, paused, and `infer`, which runs, each of two processes on devices of this size.
fn pair(capacity_bytes: u64) -> Outcome<(Stage, Job, Job)> {
    let stage = Stage::new(&[capacity_bytes; 2])?;
    let train = stage.connected_job(&options("train"))?;
    stage.pause("train")?;
    let infer = stage.connected_job(&options("infer"))?;
    Ok((stage, train, infer))
}

fn swap(stage: &Stage, from: &str, to: &str) -> Outcome<[Value; 2]> {
    let coordinator = |name: &str| -> Outcome<Coordinator> {
        let options = Options::default();
        Ok(Coordinator::new(stage.run_dir().clone(), TenantName::new(name)?, options))
    };
    let (mut from, mut to) = (coordinator(from)?, coordinator(to)?);
    let done = tenants::swap::swap(&mut from, &mut to, Some(WINDOW), &mut |_| {})?;
    let of = |outcome| match outcome {
        Done::Completed(report) => Ok(serde_json::to_value(report)?),
        other @ (Done::AlreadyPaused { .. } | Done::AlreadyActive) => {
            Err(Trouble::new(format!("{other:?}")))
        }
    };
    Ok([of(done.paused)?, of(done.resumed)?])
}

fn stages<'a>(report: &'a Value, phase: &str) -> Vec<&'a Value> {
    let all = report["stages"].as_array().into_iter().flatten();
    all.filter(|stage| stage["phase"] == phase).collect()
}

fn runs(job: &mut Job) -> Outcome {
    job.step(1)?;
    job.verify().map(drop)
}

/// What one of the two tenants has on a device while it runs.
fn one_bytes() -> Outcome<u64> {
    let stage = Stage::new(&[512 * MIB; 2])?;
    let job = stage.connected_job(&options("infer"))?;
    let one_bytes = stage.used_bytes(0)?.max(stage.used_bytes(1)?);
    job.exit()?;
    Ok(one_bytes)
}

#[test]
fn every_byte_is_there_after_twenty_swaps_on_devices_that_hold_one_and_a_window() -> Outcome {
    let one_bytes = one_bytes()?;
    // What a process keeps that is paused, and a window.
    let (stage, mut train, mut infer) = pair(one_bytes + 2 * MIB + 8 * MIB)?;
    for _ in 0..10 {
        let [out, _] = swap(&stage, "infer", "train")?;
        assert_eq!(out["window_bytes"], 8 * MIB);
        // The coordinator's own tests ask whether the second begins before the first has ended: here the machine decides.
        assert!(stages(&out, "release").len() >= 4 + 2, "{out:#}");
        runs(&mut train)?;
        swap(&stage, "train", "infer")?;
        runs(&mut infer)?;
    }
    assert_eq!(stage.states("train")?, ["paused"]);
    Ok(())
}

#[test]
fn no_device_holds_more_than_the_larger_and_a_window_if_both_fit_without_a_window() -> Outcome {
    let (stage, mut train, mut infer) = pair(2 * one_bytes()?)?;
    let before_bytes = stage.used_bytes(0)?;
    let (most_bytes, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| -> Outcome {
        let look = scope.spawn(|| -> Outcome {
            while !is_over.load(Ordering::Relaxed) {
                most_bytes.fetch_max(stage.used_bytes(0)?, Ordering::Relaxed);
            }
            Ok(())
        });
        let swapped = swap(&stage, "infer", "train").map(drop);
        let swapped = swapped.and_then(|()| swap(&stage, "train", "infer"));
        is_over.store(true, Ordering::Relaxed);
        look.join().expect("the thread ends")?;
        swapped.map(drop)
    })?;
    let most_bytes = most_bytes.into_inner();
    // And the context of the process that comes back, should it have given that up.
    assert!(most_bytes <= before_bytes + 10 * MIB, "{most_bytes} of {before_bytes} bytes");
    runs(&mut infer)?;
    swap(&stage, "infer", "train")?;
    runs(&mut train)
}

#[test]
fn the_first_leaves_in_one_step_if_both_fit_with_a_window() -> Outcome {
    let (stage, mut train, mut infer) = pair(2 * one_bytes()? + 2 * WINDOW)?;
    let [out, back] = swap(&stage, "infer", "train")?;
    assert_eq!(stages(&out, "release").len(), 2, "one of each process: {out:#}");
    assert_eq!(stages(&back, "restore").len(), 2, "one of each process: {back:#}");
    runs(&mut train)?;
    swap(&stage, "train", "infer")?;
    runs(&mut infer)
}

#[test]
fn a_tenant_that_does_not_fit_leaves_the_first_running() -> Outcome {
    let (stage, mut train, mut infer) = pair(128 * MIB)?;
    let held = JobOptions { tensor_mib: 60, ..JobOptions::new("other", 2) };
    swap(&stage, "infer", "train")?;
    stage.pause("train")?;
    let other = stage.job(&held)?;
    let small = stage.job(&JobOptions::new("small", 1))?;
    let ran = stage.sublet(&["swap", "small", "train", "--json"])?.exited(1)?;
    let document = ran.json()?;
    assert_eq!(
        (&document["resumed"]["tenant"], &document["resumed"]["unchanged"]),
        (&"train".into(), &true.into())
    );
    assert_eq!(stage.states("small")?, ["active"]);
    assert_eq!(stage.states("train")?, ["paused"]);
    small.exit()?;
    other.exit()?;
    stage.resume("train")?;
    runs(&mut train)?;
    swap(&stage, "train", "infer")?;
    runs(&mut infer)
}

/// The command is killed wherever it has come to: both are paused then, or as before, and nothing is lost.
#[test]
fn a_command_that_is_killed_loses_nothing() -> Outcome {
    let boundaries = Boundary::HALF_WAY_THROUGH_A_SWAP;
    let (stage, mut train, mut infer) = pair(128 * MIB)?;
    for boundary in boundaries {
        let mut steps = steps(&stage)?;
        steps.until(boundary)?;
        steps.kill()?;
        let left = stage.settled("infer")?;
        assert_eq!(stage.settled("train")?, ["paused"], "{boundary}");
        let runs_on = boundary == Boundary::Done(Phase::Prepare)
            || boundary == Boundary::Started(Phase::Release);
        assert_eq!(left, [if runs_on { "active" } else { "paused" }], "{boundary}");
        if !runs_on {
            stage.resume("infer")?;
        }
        runs(&mut infer)?;
    }
    swap(&stage, "infer", "train")?;
    runs(&mut train)
}

fn steps(stage: &Stage) -> Outcome<Steps> {
    let program = Path::new(env!("CARGO_BIN_EXE_sublet-steps"));
    Steps::start(stage, program, "infer", &["swap", "train"])
}

#[test]
fn a_process_of_the_second_that_is_killed_brings_the_first_back() -> Outcome {
    let boundaries = [Boundary::Started(Phase::Restore), Boundary::Done(Phase::Restore)];
    for boundary in boundaries {
        let (stage, mut train, mut infer) = pair(128 * MIB)?;
        let mut steps = steps(&stage)?;
        steps.until(boundary)?;
        train.ranks[1].kill()?;
        let said = steps.finish()?;
        assert!(
            said.starts_with("error") && said.contains("is active again"),
            "{boundary}: {said}"
        );
        assert!(said.contains("has ended"), "{boundary}: {said}");
        assert_eq!(stage.settled("infer")?, ["active"]);
        assert_eq!(stage.settled("train")?, ["paused"]);
        runs(&mut infer)?;
    }
    Ok(())
}

#[test]
fn a_process_of_the_first_that_is_killed_is_named_and_the_second_comes() -> Outcome {
    let boundaries = [Boundary::Started(Phase::Restore), Boundary::Started(Phase::Release)];
    for boundary in boundaries {
        let (stage, mut train, mut infer) = pair(128 * MIB)?;
        let mut steps = steps(&stage)?;
        steps.until(boundary)?;
        infer.ranks[1].kill()?;
        let who = format!("process {}", infer.ranks[1].pid());
        let said = steps.finish()?;
        assert!(said.starts_with("ok") && said.contains(&who), "{boundary}: {said}");
        assert_eq!(stage.settled("infer")?, ["paused"]);
        assert_eq!(stage.settled("train")?, ["active"]);
        runs(&mut train)?;
    }
    Ok(())
}
