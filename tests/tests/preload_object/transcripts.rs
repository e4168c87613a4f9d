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
fn copies_fills_and_waits_for_memory_that_is_away_by_tag_are_refused_and_the_context_lives() {
    let stage = Stage::new();
    let program = stage.program_as("every", &["-pthread"]);
    let output = stage.command(program, Preload::With).arg("asleep").output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "asleep 0\n\
         refused: all 1\n\
         copied out: 800 800\n\
         other memory: flush 0, its address written 0\n\
         the context lives: 0\n\
         awake 0\n\
         contents 9\n"
    );
    // One line a tag, with what brings the memory back.
    let log = String::from_utf8_lossy(&output.stderr);
    let refusals: Vec<_> = log.lines().filter(|line| line.contains("NOT_PERMITTED")).collect();
    let [line] = refusals[..] else { panic!("{log}") };
    let resume = "`sublet resume preload-test --tag weights`";
    for part in
        ["cuMemcpy was refused", "memory at 0x", "8388608 bytes of GPU 0", "'weights'", resume]
    {
        assert!(line.contains(part), "{log}");
    }
}

/// What `preload_away.c` prints to `word`, and what it leaves in the log.
fn about_memory_that_is_away(word: &str) -> (String, String) {
    let stage = Stage::new();
    let program = stage.program_as("away", &["-pthread"]);
    let mut command = stage.command(program, Preload::With);
    command.arg(word).env("SIMCUDA_NO_P2P", "1");
    let output = command.output().expect("it starts");
    (transcript(&output), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn assert_said(word: &str, lines: &[&str]) {
    let (said, log) = about_memory_that_is_away(word);
    let last = format!("{word}: context CUDA_SUCCESS, contents 5");
    let expected: Vec<_> = lines.iter().copied().chain([last.as_str()]).collect();
    assert_eq!(said.lines().collect::<Vec<_>>(), expected, "{log}");
}

#[test]
fn a_call_that_begins_before_memory_that_is_away_and_reaches_into_it_is_refused() {
    assert_said(
        "reach",
        &[
            "before it: line 0, batch 0, rows 0, box 0, boxes 0",
            "into it: line 800, batch 800, rows 800, box 800, boxes 800",
            "by an offset: rows 800 800, box 800, boxes 800",
            "a reduction there: 800",
        ],
    );
}

#[test]
fn a_call_about_no_bytes_of_memory_that_is_away_is_none_about_it() {
    assert_said(
        "nothing",
        &["nothing: copies 0 0 0, fill 0, batch 0, rows 0 0, box 0", "nothing: fills of rows 0 0"],
    );
}

#[test]
fn a_batch_that_is_refused_says_that_it_is_not_for_one_copy_alone() {
    assert_said("index", &["batches 800 800, of no copy alone 1 1", "without an index 800 800"]);
}

#[test]
fn a_capture_lives_while_other_calls_are_refused() {
    assert_said(
        "captured",
        &[
            "meanwhile: legacy 800 800, own 800, stream 800, none 800",
            "captured 0, ended CUDA_SUCCESS",
        ],
    );
}

#[test]
fn memory_comes_back_behind_a_copy_between_devices_that_do_not_reach_each_other() {
    assert_said("across", &["across: captured 0, ended 0, by itself 800, of other memory 0"]);
}

#[test]
fn a_copy_is_refused_or_made_whenever_its_memory_leaves_and_comes_back() {
    assert_said("always", &["always: 0 wrong, some 1"]);
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
