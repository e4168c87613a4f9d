//! Memory that a pause does not give to others: the report, the exit code and a dry run say how much, and why.

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Rank, Stage};

const CAPACITIES: [u64; 1] = [512 * MIB];

/// Bytes that stay as a document says, and their causes.
fn stays(document: &Value) -> (u64, Vec<(u64, String)>) {
    let causes = document["stays"].as_array().into_iter().flatten().map(|stay| {
        let reason = stay["reason"].as_str().unwrap_or_default();
        let cause = reason.split([' ', ':']).next().unwrap_or_default();
        (stay["bytes"].as_u64().unwrap_or_default(), cause.to_owned())
    });
    (document["stayed_bytes"].as_u64().unwrap_or_default(), causes.collect())
}

fn makes(process: &mut Rank, kind: &str, bytes: u64) -> Outcome {
    process.do_it(&format!("{kind} 0 {bytes}")).map(drop)
}

#[test]
fn a_pause_that_leaves_memory_to_the_driver_is_partial_and_names_the_causes() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.hoard("comfy", &[], &[])?;
    for (kind, bytes) in [("create", 32 * MIB), ("async", 64 * MIB), ("managed", 20 * MIB)] {
        makes(&mut job, kind, bytes)?;
    }
    let left = (84 * MIB, vec![(64 * MIB, "stream-ordered".into()), (20 * MIB, "managed".into())]);

    let planned = stage.sublet(&["pause", "comfy", "--dry-run", "--json"])?.exited(0)?.json()?;
    assert_eq!(
        (planned["stays_bytes"].as_u64(), stays(&planned).1),
        (Some(left.0), left.1.clone())
    );
    let planned = stage.sublet(&["pause", "comfy", "--dry-run"])?.exited(0)?;
    assert!(
        planned.stdout.contains("64 MiB of device memory stay: stream-ordered"),
        "{planned:#?}"
    );

    for outcome in ["a pause", "another"] {
        let paused = stage.sublet(&["pause", "comfy", "--json"])?.exited(3)?.json()?;
        assert_eq!(paused["outcome"], "partial", "{outcome}: {paused:#}");
        assert_eq!(stays(&paused), left, "{outcome}: {paused:#}");
    }
    assert_eq!(stage.states("comfy")?, ["paused"]);
    let again = stage.sublet(&["pause", "comfy"])?.exited(3)?;
    for line in ["paused already", "\n64 MiB of device memory stay: stream-ordered", "\n20 MiB of "]
    {
        assert!(again.stdout.contains(line), "no '{line}' in {again:#?}");
    }

    // The driver takes it with the contexts, and then it does not stay.
    let deep = stage.sublet(&["pause", "comfy", "--deep", "--json"])?.exited(0)?.json()?;
    assert_eq!((deep["outcome"].as_str(), stays(&deep)), (Some("completed"), (0, Vec::new())));
    assert_eq!(stage.used_bytes(0)?, 0);
    let again = stage.sublet(&["pause", "comfy"])?.exited(0)?;
    assert!(!again.stdout.contains("stay"), "{again:#?}");
    stage.resume("comfy")?;
    let whole = stage.sublet(&["pause", "comfy", "--deep"])?.exited(0)?;
    assert!(!whole.stdout.contains("stay"), "{whole:#?}");
    stage.resume("comfy")?;
    job.exits_well()
}

#[test]
fn what_makes_no_room_for_anybody_is_not_told() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.hoard("comfy", &[], &[])?;
    for (kind, bytes) in [("create", 32 * MIB), ("async", 15 * MIB), ("plain", 129 << 10)] {
        makes(&mut job, kind, bytes)?;
    }
    let paused = stage.sublet(&["pause", "comfy"])?.exited(0)?;
    assert!(paused.stdout.lines().count() == 1 && !paused.stdout.contains("stay"), "{paused:#?}");
    stage.resume("comfy")?;
    // One MiB more, and it is enough to matter.
    makes(&mut job, "managed", MIB)?;
    let paused = stage.sublet(&["pause", "comfy", "--json"])?.exited(3)?.json()?;
    assert_eq!(stays(&paused).0, 16 * MIB + (129 << 10), "{paused:#}");
    stage.resume("comfy")?;
    job.exits_well()
}

#[test]
fn memory_outside_a_tag_does_not_count_for_its_pause() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut job = stage.hoard("comfy", &[], &[])?;
    job.do_it("tag kv")?;
    makes(&mut job, "create", 32 * MIB)?;
    job.do_it("untag")?;
    makes(&mut job, "async", 64 * MIB)?;
    let paused = stage.sublet(&["pause", "comfy", "--tag", "kv", "--json"])?.exited(0)?.json()?;
    assert_eq!(
        (paused["outcome"].as_str(), stays(&paused).0),
        (Some("completed"), 0),
        "{paused:#}"
    );
    stage.resume("comfy")?;
    job.exits_well()
}

#[test]
fn a_tenant_of_which_memory_stays_makes_way_all_the_same() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let mut first = stage.hoard("first", &[], &[])?;
    makes(&mut first, "create", 300 * MIB)?;
    makes(&mut first, "async", 64 * MIB)?;
    stage.sublet(&["pause", "first"])?.exited(3)?;
    let mut second = stage.hoard("second", &[], &[])?;
    makes(&mut second, "create", 300 * MIB)?;
    stage.sublet(&["swap", "second", "first"])?.exited(0)?;
    // It leaves 64 MiB, and the other comes.
    stage.sublet(&["swap", "first", "second"])?.exited(0)?;
    stage.sublet(&["switch", "first"])?.exited(0)?;
    stage.sublet(&["switch", "second"])?.exited(0)?;
    assert_eq!(
        (stage.states("first")?, stage.states("second")?),
        (vec!["paused".into()], vec!["active".into()])
    );
    stage.pause("second")?;
    stage.resume("first")?;
    first.exits_well()?;
    stage.resume("second")?;
    second.exits_well()
}
