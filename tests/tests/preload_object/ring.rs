//! The order of driver calls of a communicator's life, from both ends of it.

use crate::stage::{CAPACITY_BYTES, Preload, Stage, transcript};

fn run(arguments: &[&str]) -> (Stage, Vec<serde_json::Value>) {
    let stage = Stage::new();
    let program = stage.program("ring");
    let output = stage.command(&program, Preload::With).args(arguments).output();
    let text = transcript(&output.expect("it starts"));
    let ranks: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(ranks.len(), 2, "{text}");
    (stage, ranks)
}

fn assert_empty(stage: &Stage, ranks: &[serde_json::Value]) {
    for rank in ranks {
        assert_eq!(rank["wrong"], 0, "every byte arrived");
        assert_eq!(rank["missing_bytes"], 0, "the process's own view of its device");
        let devices = rank["stats"]["pool"]["devices"].as_array().expect("devices");
        assert!(devices.is_empty(), "the table is not empty: {devices:?}");
    }
    assert_eq!(stage.free_bytes(), [CAPACITY_BYTES; 2]);
}

#[test]
fn tables_are_empty_after_a_communicators_life() {
    let (stage, ranks) = run(&["run"]);
    assert_empty(&stage, &ranks);
}

#[test]
fn tables_are_empty_after_a_life_with_pauses() {
    let (stage, ranks) = run(&["pause"]);
    assert_empty(&stage, &ranks);
    for rank in &ranks {
        assert_eq!(rank["pauses"], 3, "{rank}");
    }
}

#[test]
fn without_us_the_same_calls_succeed_too() {
    let stage = Stage::new();
    let program = stage.program("ring");
    let output = stage.command(&program, Preload::Without).arg("run").output();
    let text = transcript(&output.expect("it starts"));
    for line in text.lines() {
        let rank: serde_json::Value = serde_json::from_str(line).expect(line);
        assert_eq!((&rank["wrong"], &rank["missing_bytes"]), (&0.into(), &0.into()));
    }
    assert_eq!(stage.free_bytes(), [CAPACITY_BYTES; 2]);
}
