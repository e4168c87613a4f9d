//! What a pause leaves out of real processes' memory: zeros, and what has not changed since the last one.

use serde_json::Value;
use sublet_tests::{Job, JobOptions, MIB, Outcome, Stage};

const CAPACITIES: [u64; 1] = [512 * MIB];

/// As `sublet.h` has them.
const KEEP: u32 = 0;
const FILE: u32 = 2;

/// Zero, unchanged and copied bytes of a pause, of all processes, and the report as a whole.
fn pause(stage: &Stage) -> Outcome<([u64; 3], Value)> {
    let ran = stage.patiently(&["pause", "train", "--json"])?;
    let report: Value = serde_json::from_str(&ran.stdout)?;
    let phases = report["report"]["phases"].as_array().into_iter().flatten();
    let members = phases.flat_map(|phase| phase["members"].as_array().into_iter().flatten());
    let mut sums = [0; 3];
    for kept in members.map(|member| &member["report"]["kept"]).filter(|kept| !kept.is_null()) {
        for (sum, name) in sums.iter_mut().zip(["zero_bytes", "unchanged_bytes", "copied_bytes"]) {
            *sum += kept[name].as_u64().unwrap_or_default();
        }
    }
    Ok((sums, report))
}

fn host_bytes(stage: &Stage) -> Outcome<u64> {
    let ran = stage.sublet(&["stats", "train", "--json"])?.exited(0)?;
    let stats: Value = serde_json::from_str(&ran.stdout)?;
    let members = stats["tenants"][0]["members"].as_array().into_iter().flatten();
    Ok(members.filter_map(|member| member["pool"]["host_arena_bytes"].as_u64()).sum())
}

fn hold(job: &mut Job, contents: u32, mib: u64) -> Outcome {
    job.ranks[0].do_it(&format!("hold held {contents} {mib}")).map(drop)
}

#[test]
fn a_mostly_zero_tenant_takes_little_host_memory_and_an_unchanged_one_copies_nothing() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 1)?;
    job.ranks[0].do_it(&format!("zeros {}", 300 * MIB))?;
    hold(&mut job, KEEP, 4)?;
    let ([zero, unchanged, copied], report) = pause(&stage)?;
    assert!(zero >= 300 * MIB && unchanged == 0 && copied > 4 * MIB, "{zero} {unchanged} {copied}");
    assert!(copied < 40 * MIB, "{copied}");
    let steps = report["report"]["phases"].to_string();
    assert!(steps.contains("fingerprint"), "{steps}");
    assert!(host_bytes(&stage)? <= 64 * MIB);
    stage.resume("train")?;
    job.verify()?;

    let (again, _) = pause(&stage)?;
    assert_eq!(again, [zero, copied, 0]);
    stage.resume("train")?;
    job.verify()?;
    job.step(1)?;
    let ([_, _, changed], _) = pause(&stage)?;
    assert!(changed > 0 && changed < copied, "{changed} of {copied}");
    let text = stage.sublet(&["stats", "train", "-v"])?.exited(0)?.stdout;
    assert!(text.contains("fingerprint"), "{text}");
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}

#[test]
fn contents_in_files_leave_zeros_out_and_come_back() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions::new("train", 1).with("SUBLET_FILE_DIR", "/dev/shm");
    let mut job = stage.connected_job(&options)?;
    hold(&mut job, FILE, 8)?;
    for _ in 0..2 {
        pause(&stage)?;
        stage.resume("train")?;
        job.verify()?;
    }
    job.exit()
}

#[test]
fn what_is_left_out_can_be_switched_off() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    for (value, is_left_out) in [("off", false), ("on", true)] {
        let options = JobOptions::new("train", 1).with("SUBLET_CHANGES", value);
        let mut job = stage.connected_job(&options)?;
        job.ranks[0].do_it(&format!("zeros {}", 32 * MIB))?;
        pause(&stage)?;
        stage.resume("train")?;
        let ([zero, unchanged, copied], report) = pause(&stage)?;
        let left_out = (zero > 0, unchanged > 0, copied == 0);
        assert_eq!(left_out, (is_left_out, is_left_out, is_left_out), "{value}: {copied}");
        let notes = report["report"]["notes"].to_string();
        assert!(!notes.contains("differs") && !notes.contains("copied"), "{value}: {notes}");
        stage.resume("train")?;
        job.verify()?;
        job.exit()?;
    }
    Ok(())
}

#[test]
fn a_driver_that_refuses_the_kernel_has_all_copied_and_is_said_once() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    // The first one is the program's own.
    let options = JobOptions::new("train", 1).with("SIMCUDA_FAULTS", "cuModuleLoadData:2+:218");
    let mut job = stage.connected_job(&options)?;
    job.ranks[0].do_it(&format!("zeros {}", 32 * MIB))?;
    for is_first in [true, false] {
        let ([zero, unchanged, copied], report) = pause(&stage)?;
        assert!(zero == 0 && unchanged == 0 && copied > 32 * MIB, "{zero} {unchanged} {copied}");
        let notes = report["report"]["notes"].to_string();
        assert_eq!(notes.contains("does not tell what is zero"), is_first, "{notes}");
        stage.resume("train")?;
        job.verify()?;
    }
    job.exit()
}

#[test]
fn zeros_are_saved_into_files_as_zeros() -> Outcome {
    let (stage, mut job) = Stage::with_train(&CAPACITIES, 1)?;
    job.ranks[0].do_it(&format!("zeros {}", 16 * MIB))?;
    stage.pause("train")?;
    let dir = tempfile::tempdir()?;
    let to = dir.path().join("saved");
    let to = to.to_str().unwrap_or_default();
    stage.sublet(&["save", "train", to])?.exited(0)?;
    let tenant: Value = serde_json::from_slice(&std::fs::read(format!("{to}/tenant.json"))?)?;
    let map = tenant["processes"][0]["map"].as_str().unwrap_or_default();
    let map: Value = serde_json::from_slice(&std::fs::read(format!("{to}/{map}"))?)?;
    let data = std::fs::read(format!("{to}/{}", map["data"].as_str().unwrap_or_default()))?;
    let allocations = map["allocations"].as_array().into_iter().flatten();
    let zeros = allocations.filter(|allocation| {
        let at = |name: &str| usize::try_from(allocation[name].as_u64().unwrap_or(0)).unwrap_or(0);
        let bytes = data.get(at("file_offset")..at("file_offset") + at("bytes"));
        at("bytes") >= 16 << 20 && bytes.is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0))
    });
    assert_eq!(zeros.count(), 1, "{map}");
    stage.resume("train")?;
    job.verify()?;
    job.exit()
}
