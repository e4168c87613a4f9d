//! Programs of the driver interface behave the same under the preload object.

use crate::stage::{CAPACITY_BYTES, Preload, Stage, driver_source, transcript};

#[test]
fn c_programs_print_the_same() {
    let stage = Stage::new();
    for name in ["basic", "edges", "share"] {
        let program = stage.driver_program(name);
        let text = stage.same(&program, &[]);
        let expected = std::fs::read_to_string(driver_source(&format!("{name}.expected")));
        assert_eq!(text, expected.expect("the transcript"), "{name}");
        assert_eq!(stage.free_bytes(), [CAPACITY_BYTES; 2], "{name}: all memory is back");
    }
}

#[test]
fn a_program_that_unmaps_under_its_own_work_loses_its_context() {
    let stage = Stage::new();
    let text = stage.same(&stage.driver_program("edges"), &["pulled"]);
    assert!(text.contains("pulled: CUDA_ERROR_ILLEGAL_ADDRESS"), "{text}");
}

#[test]
fn a_c_program_that_looks_up_by_dlsym_prints_the_same() {
    let stage = Stage::new();
    let program = stage.driver_program("basic");
    let [without, with] = [Preload::Without, Preload::With].map(|preload| {
        let mut command = stage.command(&program, preload);
        command.env("SIMCUDA_PROGRAM_LOOKUP", "dlsym");
        transcript(&command.output().expect("it starts"))
    });
    assert_eq!(with, without);
}

#[test]
fn a_python_program_prints_the_same() {
    let stage = Stage::new();
    let source = driver_source("basic.py");
    let source = source.to_str().expect("UTF-8");
    let text = stage.same(std::path::Path::new("python3"), &[source]);
    let expected = std::fs::read_to_string(driver_source("basic.py.expected"));
    assert_eq!(text, expected.expect("the transcript"));
}

#[test]
fn calls_that_few_libraries_make_wait_for_a_resume_and_do_the_same() {
    let stage = Stage::new();
    let program = stage.program_as("every", &["-pthread"]);
    let text = stage.same(&program, &[]);
    let lines: Vec<&str> = text.lines().collect();
    let wrong = |line: &&&str| !line.contains(": 0 of ");
    assert_eq!((lines.len(), lines.iter().find(wrong)), (2, None), "{text}");
}

#[test]
fn captures_into_a_graph_that_is_there_end_and_a_pause_follows_them() {
    let stage = Stage::new();
    let text = stage.same(&stage.program("graphs"), &[]);
    // Each launch is two steps of `2 x + 1`, from 1 on.
    let sum: u64 = 31 << 20;
    let same = "ended: the same graph 1";
    assert_eq!(text.lines().collect::<Vec<_>>(), [same, same, &format!("sum {sum}")]);
}
