//! Two tenants that change places, by the real command: both directions at once, in bounded memory.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_tests::{Boundary, Job, JobOptions, MIB, Outcome, Stage, Steps, Trouble};
use tenants::wire::Phase;

/// Of memory that ranks keep in allocations of 2 MiB, so that it can go in small windows.
const STATICS: usize = 20;
const WINDOW: &str = "8MiB";
/// Memory is released and created, or changes hands: words for the command that stops at every event.
const WAYS: [&str; 2] = ["swap", "hand-over"];

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
    swap_with(stage, from, to, &[])
}

fn swap_with(stage: &Stage, from: &str, to: &str, words: &[&str]) -> Outcome<[Value; 2]> {
    swap_as_told(stage, from, to, &[&["--window", WINDOW], words].concat())
}

/// With the usual window.
fn swap_as_told(stage: &Stage, from: &str, to: &str, words: &[&str]) -> Outcome<[Value; 2]> {
    let all = [&["swap", from, to, "--json"], words].concat();
    let ran = stage.sublet(&all)?.succeeded()?;
    let both = ran.json()?;
    Ok([both["halves"][0]["report"].clone(), both["halves"][1]["report"].clone()])
}

fn stages<'a>(report: &'a Value, phase: &str) -> Vec<&'a Value> {
    let all = report["stages"].as_array().into_iter().flatten();
    all.filter(|stage| stage["phase"] == phase).collect()
}

fn runs(job: &mut Job) -> Outcome {
    job.step(1)?;
    job.verify().map(drop)
}

/// Steps of nobody who is left are under way any more.
fn settled(stage: &Stage, tenant: &str) -> Outcome<Vec<String>> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let states = stage.states(tenant)?;
        if states.iter().all(|state| state == "active" || state == "paused") {
            return Ok(states);
        }
        if Instant::now() >= deadline {
            return Err(Trouble::new(format!("the processes of {tenant} stay {states:?}")));
        }
    }
}

#[test]
fn every_byte_is_there_after_twenty_swaps_on_devices_that_hold_one_and_a_window() -> Outcome {
    let stage = Stage::new(&[512 * MIB; 2])?;
    let job = stage.connected_job(&options("infer"))?;
    let one_bytes = stage.used_bytes(0)?.max(stage.used_bytes(1)?);
    job.exit()?;
    // What a process keeps that is paused, and a window.
    let (stage, mut train, mut infer) = pair(one_bytes + 2 * MIB + 8 * MIB)?;
    for round in 0..10 {
        let words = [if round % 2 == 0 { "--hand-over=none" } else { "--hand-over" }];
        let [out, back] = swap_with(&stage, "infer", "train", &words)?;
        assert_eq!(out["window_bytes"], 8 * MIB);
        let handed_bytes = out["handed_bytes"].as_u64().unwrap_or_default();
        // Of each of two processes, nearly all that are alike.
        let least_bytes = (STATICS as u64 - 5) * 2 * 2 * MIB;
        let right = if round % 2 == 0 { handed_bytes == 0 } else { handed_bytes >= least_bytes };
        assert!(right, "{out:#}");
        let saves = stages(&out, "ReleaseStage");
        let first_in = stages(&back, "RestoreStage")[0]["began_us"].as_u64();
        let last_out = stages(&out, "Release").iter().filter_map(|s| s["ended_us"].as_u64()).max();
        assert!(saves.len() >= 4, "{out:#}");
        assert!(first_in < last_out, "round {round}: in at {first_in:?}, out until {last_out:?}");
        runs(&mut train)?;
        swap(&stage, "train", "infer")?;
        runs(&mut infer)?;
    }
    assert_eq!(stage.states("train")?, ["paused"]);
    Ok(())
}

/// However much is free, what both have alike changes hands, but for the head start of a window.
#[test]
fn on_devices_with_much_free_memory_what_both_have_alike_changes_hands() -> Outcome {
    const MANY: usize = 60;
    let stage = Stage::new(&[1024 * MIB; 2])?;
    let many = |tenant| JobOptions { statics: MANY, ..JobOptions::new(tenant, 2) };
    let mut train = stage.connected_job(&many("train"))?;
    stage.pause("train")?;
    let mut infer = stage.connected_job(&many("infer"))?;
    let alike_bytes = 2 * MANY as u64 * 2 * MIB;
    for words in [&["--hand-over", "--window", WINDOW][..], &["--hand-over"]] {
        let [out, back] = swap_as_told(&stage, "infer", "train", words)?;
        let handed_bytes = out["handed_bytes"].as_u64().unwrap_or_default();
        assert!(handed_bytes >= alike_bytes / 5 * 4, "{handed_bytes} of {alike_bytes}: {out:#}");
        // Nobody waits until the other has done.
        let first_in = stages(&back, "RestoreStage")[0]["began_us"].as_u64();
        let last_out = stages(&out, "Release").iter().filter_map(|s| s["ended_us"].as_u64()).max();
        assert!(first_in < last_out, "in at {first_in:?}, out until {last_out:?}");
        runs(&mut train)?;
        swap_as_told(&stage, "train", "infer", words)?;
        runs(&mut infer)?;
    }
    let words = ["swap", "infer", "train", "--json"];
    let told = stage.sublet_told("SUBLET_HAND_OVER", "1", &words)?.succeeded()?.json()?;
    let handed_bytes = told["halves"][0]["report"]["handed_bytes"].as_u64().unwrap_or_default();
    assert!(handed_bytes >= alike_bytes / 5 * 4, "as the environment says: {told:#}");
    runs(&mut train)
}

/// Nobody has to ask for it: of memory that was asked for by address nothing can tell.
#[test]
fn plain_memory_changes_hands_unless_told_otherwise() -> Outcome {
    const HELD: u64 = 24;
    const HELD_MIB: u64 = 4;
    let stage = Stage::new(&[1024 * MIB; 2])?;
    let job = |tenant| -> Outcome<Job> {
        let mut job = stage.connected_job(&options(tenant))?;
        for rank in &mut job.ranks {
            for _ in 0..HELD {
                assert!(rank.ask(&format!("hold kv 0 {HELD_MIB}"))?.is_ok);
            }
        }
        Ok(job)
    };
    let mut train = job("train")?;
    stage.pause("train")?;
    let mut infer = job("infer")?;
    let plain_bytes = 2 * HELD * HELD_MIB * MIB;
    let handed_by = |name: &str, word: &str, from: &str, to: &str| -> Outcome<u64> {
        let words = ["swap", from, to, "--json"];
        let told = stage.sublet_told(name, word, &words)?.succeeded()?.json()?;
        Ok(told["halves"][0]["report"]["handed_bytes"].as_u64().unwrap_or_default())
    };
    for (name, word, least, most) in [
        ("NOT_SET", "", plain_bytes / 5 * 4, plain_bytes + 2 * 16 * MIB),
        ("SUBLET_HAND_OVER", "", plain_bytes / 5 * 4, plain_bytes + 2 * 16 * MIB),
        ("SUBLET_HAND_OVER", "plain", plain_bytes / 5 * 4, plain_bytes + 2 * 16 * MIB),
        ("SUBLET_HAND_OVER", "none", 0, 0),
        ("SUBLET_HAND_OVER", "everything", 0, 0),
        ("SUBLET_HAND_OVER", "all", plain_bytes / 5 * 4, u64::MAX),
    ] {
        let handed_bytes = handed_by(name, word, "infer", "train")?;
        assert!((least..=most).contains(&handed_bytes), "{name}={word}: {handed_bytes}");
        runs(&mut train)?;
        handed_by(name, word, "train", "infer")?;
        runs(&mut infer)?;
    }
    Ok(())
}

#[test]
fn no_device_holds_more_than_the_larger_and_a_window_where_there_is_room_for_both() -> Outcome {
    let (stage, mut train, mut infer) = pair(512 * MIB)?;
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
        let swapped = swapped.and_then(|()| swap_with(&stage, "train", "infer", &["--hand-over"]));
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
        (&document["halves"][0]["tenant"], &document["halves"][0]["unchanged"]),
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
    for (way, boundary) in WAYS.into_iter().flat_map(|way| boundaries.map(|at| (way, at))) {
        let mut steps = steps(&stage, way)?;
        steps.until(boundary)?;
        steps.kill()?;
        let left = settled(&stage, "infer")?;
        assert_eq!(settled(&stage, "train")?, ["paused"], "{boundary}");
        let runs_on = boundary == Boundary::Done(Phase::Reserve)
            || boundary == Boundary::Started(Phase::ReleaseStage);
        assert_eq!(left, [if runs_on { "active" } else { "paused" }], "{boundary}");
        if !runs_on {
            stage.resume("infer")?;
        }
        runs(&mut infer)?;
    }
    swap(&stage, "infer", "train")?;
    runs(&mut train)
}

fn steps(stage: &Stage, way: &str) -> Outcome<Steps> {
    let program = Path::new(env!("CARGO_BIN_EXE_sublet-steps"));
    Steps::start(stage, program, "infer", &[way, "train"])
}

#[test]
fn a_process_of_the_second_that_is_killed_brings_the_first_back() -> Outcome {
    let boundaries = [Boundary::Started(Phase::RestoreStage), Boundary::Done(Phase::Restore)];
    for (way, boundary) in WAYS.into_iter().flat_map(|way| boundaries.map(|at| (way, at))) {
        let (stage, mut train, mut infer) = pair(128 * MIB)?;
        let mut steps = steps(&stage, way)?;
        steps.until(boundary)?;
        train.ranks[1].kill()?;
        let said = steps.finish()?;
        assert!(
            said.starts_with("error") && said.contains("is active again"),
            "{boundary}: {said}"
        );
        assert!(said.contains("has ended"), "{boundary}: {said}");
        assert_eq!(settled(&stage, "infer")?, ["active"]);
        assert_eq!(settled(&stage, "train")?, ["paused"]);
        runs(&mut infer)?;
    }
    Ok(())
}

#[test]
fn a_process_of_the_first_that_is_killed_is_named_and_the_second_comes() -> Outcome {
    let boundaries = [Boundary::Started(Phase::RestoreStage), Boundary::Started(Phase::Release)];
    for (way, boundary) in WAYS.into_iter().flat_map(|way| boundaries.map(|at| (way, at))) {
        let (stage, mut train, mut infer) = pair(128 * MIB)?;
        let mut steps = steps(&stage, way)?;
        steps.until(boundary)?;
        infer.ranks[1].kill()?;
        let who = format!("process {}", infer.ranks[1].pid());
        let said = steps.finish()?;
        assert!(said.starts_with("ok") && said.contains(&who), "{boundary}: {said}");
        assert_eq!(settled(&stage, "infer")?, ["paused"]);
        assert_eq!(settled(&stage, "train")?, ["active"]);
        runs(&mut train)?;
    }
    Ok(())
}
