//! `dlsym` and its relatives answer as they do without us, except for the driver's functions.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stage::{Preload, Stage, preload_path, transcript};

/// Runs a mode of `preload_loader.c` without us, preloaded, and attached.
fn same(mode: &str) -> String {
    let stage = Stage::new();
    stage.library("local");
    let program = stage.program("loader");
    stage.same_as_without(Preload::Attached, &program, &[mode]);
    stage.same(&program, &[mode])
}

#[test]
fn next_is_next_after_the_library_that_asks() {
    let stage = Stage::new();
    let interposer = stage.library("interposer");
    let program = stage.program_with("interposed", &interposer);
    assert_eq!(stage.same(&program, &[]), "page size and one: 1\n");
    stage.same_as_without(Preload::Attached, &program, &[]);
}

#[test]
fn default_searches_from_the_library_that_asks() {
    assert_eq!(
        same("default"),
        "program finds its own 1, the local one 0\nlibrary finds its own 1\n"
    );
}

#[test]
fn dlvsym_is_the_loaders_own() {
    assert_eq!(
        same("dlvsym"),
        "versioned 1, of another version 0, error 1\ndlvsym in libc 1\ndriver by version 0\n"
    );
}

#[test]
fn another_namespace_has_its_own_libraries() {
    assert_eq!(same("dlmopen"), "cos 1.0\nlocal 42, finds itself 1\ndriver 1, in the driver 1\n");
}

#[test]
fn unrelated_libraries_are_found_as_always() {
    assert_eq!(same("unrelated"), "cos 1.0\nagain 1\nnot loaded 1\n");
}

#[test]
fn missing_names_leave_an_error_and_found_ones_leave_none() {
    assert_eq!(
        same("missing"),
        "no such name: null 1, error names it 1, error read once 1\n\
         first driver function: found 1, error 0\n\
         driver lacks it: null 1, error names it 1\n\
         after a failure: found 1, error 0\n"
    );
}

#[test]
fn threads_look_up_while_others_load_and_unload() {
    assert_eq!(same("threads"), "wrong answers 0\n");
}

#[test]
fn a_constructor_that_runs_before_ours_may_look_up() {
    let stage = Stage::new();
    let early = stage.library("early");
    let program = stage.program("loader");
    // Constructors run from the last preloaded library to the first.
    let both = format!("{}:{}", preload_path().display(), early.display());
    let run = |preload: &str| {
        let mut command = stage.command(&program, Preload::Without);
        command.env("LD_PRELOAD", preload).arg("unrelated");
        transcript(&command.output().expect("it starts"))
    };
    let without = run(&early.display().to_string());
    assert!(without.starts_with("early: atoi 7, driver function found 1\n"), "{without}");
    assert_eq!(run(&both), without);
}

/// A command of `program` with `libraries` preloaded in this order.
fn preloaded(stage: &Stage, program: &Path, libraries: &[&Path]) -> Command {
    let libraries: Vec<String> = libraries.iter().map(|path| path.display().to_string()).collect();
    let mut command = stage.command(program, Preload::Without);
    command.env("LD_PRELOAD", libraries.join(":"));
    command
}

#[test]
fn an_allocator_looks_its_successor_up_without_more_memory_than_without_us() {
    let stage = Stage::new();
    let allocator = stage.library("allocator");
    let program = stage.program("loader");
    let ours = preload_path();
    let said = |libraries: &[&Path]| {
        let output = preloaded(&stage, &program, libraries).arg("unrelated").output();
        transcript(&output.expect("it starts"))
    };
    let without = said(&[&allocator]);
    for both in [[&*allocator, &*ours], [&*ours, &*allocator]] {
        assert_eq!(said(&both), without, "{both:?}");
    }
}

/// `AddressSanitizer`'s runtime, as the compiler brings it along.
fn address_sanitizer() -> PathBuf {
    let output = Command::new("cc").arg("-print-file-name=libasan.so").output();
    let found = String::from_utf8(output.expect("a C compiler").stdout).expect("a path");
    let found = std::fs::canonicalize(found.trim());
    found.expect("AddressSanitizer's runtime, libasan.so: install it for this compiler (gcc brings it along)")
}

#[test]
fn a_program_with_address_sanitizer_starts_and_is_paused() {
    let stage = Stage::new();
    stage.library("runtime");
    let program = stage.program_as("attach", &["-fsanitize=address", "-g"]);
    let words = ["runtime", "malloc", "pause", "resume", "malloc"];
    let (sanitizer, ours) = (address_sanitizer(), preload_path());
    for (libraries, options) in
        [(&[&*sanitizer, &*ours][..], ""), (&[&*ours][..], "verify_asan_link_order=0")]
    {
        let mut command = preloaded(&stage, &program, libraries);
        let output = command.env("ASAN_OPTIONS", options).args(words).output();
        let said = transcript(&output.expect("it starts"));
        assert_eq!(said, "malloc 0\npause 0\nresume 0, wrong words 0\nmalloc 0\n", "{options}");
    }
}

#[test]
fn a_driver_that_is_loaded_late_is_hooked() {
    let stage = Stage::new();
    let program = stage.program("loader");
    let run = |preload| {
        let output = stage.command(&program, preload).arg("late").output();
        transcript(&output.expect("it starts"))
    };
    assert_eq!(run(Preload::Without), "loaded before 0\nallocation 0 libcuda.so.1\n");
    for preload in [Preload::With, Preload::Attached] {
        assert_eq!(run(preload), "loaded before 0\nallocation 0 libsublet.so\n", "{preload:?}");
    }
}

#[test]
fn programs_without_a_driver_run_unharmed() {
    let stage = Stage::new();
    let programs: [(&str, &[&str]); 4] = [
        ("ls", &["/"]),
        ("sh", &["-c", "echo $((6 * 7)) | cat"]),
        ("python3", &["-c", "import ctypes, threading; print(ctypes.CDLL(None).abs(-3))"]),
        ("env", &["true"]),
    ];
    for (program, arguments) in programs {
        let [without, with] = [Preload::Without, Preload::With].map(|preload| {
            let mut command: Command = stage.bare_command(program, preload);
            let output = command.args(arguments).output().expect("it starts");
            (transcript(&output), String::from_utf8_lossy(&output.stderr).into_owned())
        });
        assert_eq!(with, without, "{program}");
        assert_eq!(with.1, "", "{program} says nothing about us");
    }
    assert!(!stage.path("run").exists(), "nobody joined, so nothing was made");
}

#[test]
fn without_a_driver_our_exports_answer_as_an_uninitialised_one() {
    let stage = Stage::new();
    let program = stage.program_with("bound", &preload_path());
    // On a machine without a driver, and where nobody has opened it.
    for mut command in
        [stage.bare_command(&program, Preload::With), stage.command(&program, Preload::With)]
    {
        let text = transcript(&command.output().expect("it starts"));
        assert_eq!(
            text,
            "cuMemCreate 3, cuMemAlloc 3, cuLaunchKernel 3, lookup 3\ndriver in the process 0\n"
        );
    }
}
