//! Whichever way a program looks a driver function up, it gets ours, and only in the right form.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::Stdio;

use sublet_cuda_driver::functions::FUNCTIONS;

use crate::stage::{Preload, Stage, exported, simcuda_dir, transcript};

const PER_THREAD: u32 = 2;

/// Asks `preload_lookup.c` for each of `questions`: `symbol base version flags`. Each answer is one line:
/// file by `dlsym`, by `cuGetProcAddress_v2`, by `cuGetProcAddress`, by ELF symbol; are all found ones the
/// same; code and status.
fn ask(preload: Preload, questions: &[String]) -> Vec<Vec<String>> {
    let stage = Stage::new();
    let program = stage.program("lookup");
    let mut child = stage
        .command(&program, preload)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    let text = questions.join("\n") + "\n";
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let answers = transcript(&child.wait_with_output().expect("it ends"));
    writer.join().expect("a thread").expect("all questions");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    let answers: Vec<Vec<String>> = answers.lines().map(words).collect();
    assert_eq!(answers.len(), questions.len());
    answers
}

#[test]
fn every_hooked_symbol_is_ours_by_every_road() {
    let driver: BTreeSet<String> =
        exported(&simcuda_dir().join("libcuda.so.1")).into_iter().collect();
    let questions: Vec<String> = FUNCTIONS
        .iter()
        .map(|row| {
            let flags = if row.per_thread { PER_THREAD } else { 1 };
            format!("{} {} {} {flags}", row.symbol, row.base, row.version)
        })
        .collect();
    let mut present = 0;
    let answers = [Preload::With, Preload::Attached].map(|preload| ask(preload, &questions));
    assert_eq!(answers[0], answers[1], "attached is as good as preloaded");
    for (row, answer) in FUNCTIONS.iter().zip(&answers[0]) {
        let ours = "libsublet.so";
        let (by_dlsym, by_table, by_old_table, by_elf) =
            (&answer[0], &answer[1], &answer[2], &answer[3]);
        if driver.contains(row.symbol) {
            present += 1;
            assert_eq!(by_elf, ours, "{row:?}: in the order of the program");
            assert_eq!(by_dlsym, ours, "{row:?}: by dlsym");
            assert_eq!(by_table, ours, "{row:?}: by cuGetProcAddress_v2");
            assert_eq!(by_old_table, ours, "{row:?}: by cuGetProcAddress");
            assert_eq!(answer[4], "same", "{row:?}: one function by every road");
        } else {
            // What this driver lacks must not seem to be there.
            assert_eq!(by_dlsym, "nowhere", "{row:?}: by dlsym");
            assert_eq!(by_elf, "nowhere", "{row:?}: in the order of the program");
        }
    }
    assert!(present > 50, "the simulated driver has only {present} of the hooked functions");
}

#[test]
fn functions_that_are_not_hooked_are_the_drivers() {
    let questions = ["cuInit cuInit 2000 0", "cuDeviceGetCount cuDeviceGetCount 2000 0"];
    let questions = questions.map(str::to_owned);
    for preload in [Preload::With, Preload::Attached] {
        for answer in ask(preload, &questions) {
            assert_eq!(answer[..3], ["libcuda.so.1"; 3], "{preload:?} {answer:?}");
        }
    }
}

#[test]
fn older_forms_of_a_function_never_get_the_newer_forms_wrapper() {
    let questions = [
        // Before there was a form that the driver still has.
        "- cuMemAlloc 2000 0",
        "- cuMemCreate 10010 0",
        "- cuGetProcAddress 11020 0",
    ];
    let questions = questions.map(str::to_owned);
    let (without, with) = (ask(Preload::Without, &questions), ask(Preload::With, &questions));
    for (with, without) in with.iter().zip(&without) {
        assert_ne!(with[1], "libsublet.so", "{with:?}");
        assert_eq!((&with[1], &with[5..]), (&without[1], &without[5..]));
    }
}

#[test]
fn each_form_of_a_function_has_a_wrapper_of_its_own() {
    let questions = [
        "cuIpcOpenMemHandle cuIpcOpenMemHandle 4010 0",
        "cuIpcOpenMemHandle_v2 cuIpcOpenMemHandle 12000 0",
    ];
    let questions = questions.map(str::to_owned);
    for answer in ask(Preload::With, &questions) {
        assert_eq!(answer[..4], ["libsublet.so"; 4], "{answer:?}");
        assert_eq!(answer[4], "same", "{answer:?}: not the other form");
    }
}

#[test]
fn newer_versions_than_a_form_still_get_it() {
    let questions = [
        "cuMemAlloc_v2 cuMemAlloc 13000 0",
        "cuGetProcAddress_v2 cuGetProcAddress 13000 0",
        // The name of the oldest form, which from 12.0 on is that of another function.
        "cuGraphInstantiateWithFlags cuGraphInstantiate 12000 0",
        "cuGraphInstantiateWithFlags cuGraphInstantiate 13000 0",
    ];
    let questions = questions.map(str::to_owned);
    for answer in ask(Preload::With, &questions) {
        assert_eq!(answer[..4], ["libsublet.so"; 4], "{answer:?}");
        assert_eq!(answer[4], "same", "{answer:?}");
    }
}

#[test]
fn the_per_thread_flag_gives_the_per_thread_form() {
    let questions = [
        "cuMemcpyHtoDAsync_v2_ptsz cuMemcpyHtoDAsync 12000 2",
        "cuMemcpyDtoH_v2_ptds cuMemcpyDtoH 12000 2",
        "cuLaunchKernel_ptsz cuLaunchKernel 12000 2",
        "cuMemFreeAsync_ptsz cuMemFreeAsync 12000 2",
    ];
    let questions = questions.map(str::to_owned);
    for answer in ask(Preload::With, &questions) {
        assert_eq!(answer[..4], ["libsublet.so"; 4], "{answer:?}");
        assert_eq!(answer[4], "same", "{answer:?}: not the legacy form");
    }
}

#[test]
fn probes_are_answered_by_the_driver_itself() {
    let questions = ["- EMPTY 0 0", "- EMPTY 12000 0", "- NULL 12000 0", "- NOWHERE 12000 0"];
    let questions = questions.map(str::to_owned);
    assert_eq!(ask(Preload::With, &questions), ask(Preload::Without, &questions));
}
