//! Real programs against the simulated driver: their transcripts are fixed.

use std::path::Path;

use crate::stage::{CAPACITY_BYTES, Stage, source, transcript};
use vmm_pool::driver::Driver;

const BASIC: &str = include_str!("../../programs/basic.expected");
const SHARE: &str = include_str!("../../programs/share.expected");
const EDGES: &str = include_str!("../../programs/edges.expected");
const CONTEXTS: &str = include_str!("../../programs/contexts.expected");
const OWN_CONTEXTS: &str = include_str!("../../programs/own_contexts.expected");
const CHECKPOINT: &str = include_str!("../../programs/checkpoint.expected");
const PYTHON: &str = include_str!("../../programs/basic.py.expected");

#[test]
fn a_c_program_runs_whichever_way_it_looks_functions_up() {
    let stage = Stage::new();
    let program = stage.compile("basic");
    for lookup in ["table", "dlsym"] {
        let output = stage
            .command(&program)
            .env("SIMCUDA_PROGRAM_LOOKUP", lookup)
            .output()
            .expect("the program starts");
        assert_eq!(transcript(&output), BASIC, "lookup by {lookup}");
    }
}

#[test]
fn two_processes_share_memory() {
    let stage = Stage::new();
    let program = stage.compile("share");
    let output = stage.command(&program).output().expect("it starts");
    assert_eq!(transcript(&output), SHARE);
    let info = stage.observer().memory_info().expect("info");
    assert_eq!(info.free_bytes, CAPACITY_BYTES);
}

#[test]
fn edges_are_as_the_real_driver_has_them() {
    let stage = Stage::new();
    let program = stage.compile("edges");
    let output = stage.command(&program).output().expect("it starts");
    assert_eq!(transcript(&output), EDGES);
}

#[test]
fn memory_that_goes_under_queued_work_costs_the_context() {
    let stage = Stage::new();
    let program = stage.compile("edges");
    let output = stage.command(&program).arg("pulled").output().expect("it starts");
    let lost = "CUDA_ERROR_ILLEGAL_ADDRESS";
    let lines = ["pulled: unmap CUDA_SUCCESS".to_owned()];
    let lines =
        lines.into_iter().chain(["", "still: "].map(|when| format!("pulled: {when}{lost}")));
    assert_eq!(transcript(&output).lines().collect::<Vec<_>>(), lines.collect::<Vec<_>>());
}

/// Everything that it prints was seen with driver 580 on two H200.
#[test]
fn contexts_matter_where_they_do_on_the_real_driver() {
    let stage = Stage::new();
    let program = stage.compile("contexts");
    let output = stage.command(&program).output().expect("it starts");
    assert_eq!(transcript(&output), CONTEXTS);
}

#[test]
fn each_context_is_waited_for_and_paid_for_by_itself() {
    let stage = Stage::new();
    let program = stage.compile("own_contexts");
    let output = stage.command(&program).env("SIMCUDA_CONTEXT_BYTES", "10485760").output();
    assert_eq!(transcript(&output.expect("it starts")), OWN_CONTEXTS);
}

#[test]
fn one_process_takes_anothers_memory_off_the_device_and_brings_it_back() {
    let stage = Stage::new();
    let program = stage.compile("checkpoint");
    let output = stage.command(&program).env("SIMCUDA_CONTEXT_BYTES", "10485760").output();
    assert_eq!(transcript(&output.expect("it starts")), CHECKPOINT);
}

#[test]
fn a_python_program_runs() {
    let stage = Stage::new();
    let output = stage
        .command(Path::new("python3"))
        .arg(source("basic.py"))
        .output()
        .expect("python3 starts");
    assert_eq!(transcript(&output), PYTHON);
}

#[test]
fn without_a_node_a_private_one_comes_and_goes() {
    let stage = Stage::new();
    let program = stage.compile("basic");
    let output = stage.command(&program).env_remove("SIMCUDA_NODE").output().expect("it starts");
    assert_eq!(transcript(&output), BASIC);
}

#[test]
fn a_fault_rule_from_the_environment_fails_the_call() {
    let stage = Stage::new();
    let program = stage.compile("basic");
    let output = stage
        .command(&program)
        .env("SIMCUDA_FAULTS", "cuMemCreate:1:2")
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success());
    assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
}

#[test]
fn a_driver_without_virtual_memory_says_so() {
    let stage = Stage::new();
    let program = stage.compile("holder");
    let output = stage
        .command(&program)
        .args(["handle", "1"])
        .env("SIMCUDA_NO_VMM", "1")
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("CUDA_ERROR_NOT_SUPPORTED"), "{text}");
}
