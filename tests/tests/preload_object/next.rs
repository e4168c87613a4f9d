//! `dlsym(RTLD_NEXT, ...)`: ours instead of the driver's and NCCL's, and whatever else comes next is what it is without us.

use std::path::Path;

use crate::stage::{Preload, Stage, preload_path, simcuda_dir, transcript};

/// What `preload_asks.c` says to `words` without us, preloaded, and attached; `behind` is preloaded behind us.
fn said(stage: &Stage, program: &Path, behind: Option<&Path>, words: &[&str]) -> [String; 3] {
    [Preload::Without, Preload::With, Preload::Attached].map(|preload| {
        let mut command = stage.command(program, preload);
        if let Some(behind) = behind {
            let ours = if preload == Preload::With { preload_path() } else { "".into() };
            command.env("LD_PRELOAD", format!("{}:{}", ours.display(), behind.display()));
        }
        transcript(&command.args(words).output().expect("it starts"))
    })
}

fn driver() -> String {
    simcuda_dir().join("libcuda.so.1").display().to_string()
}

#[test]
fn behind_a_library_that_was_opened_comes_ours_in_place_of_the_drivers() {
    let stage = Stage::new();
    let driver = driver();
    stage.library_as("next", &["-Wl,--no-as-needed", &driver]);
    stage.library_named(
        "next",
        "libbefore.so",
        &["-DSTANDS_BEFORE", "-Wl,--no-as-needed", &driver],
    );
    let program = stage.program("asks");
    for library in ["libnext.so", "libbefore.so"] {
        let words = [library, "=cuLaunchKernel", "=cuInit", "=cuMemAlloc_v2", "=no_such_name"];
        let [without, with, attached] = said(&stage, &program, None, &words);
        let expected = |file| {
            format!(
                "cuLaunchKernel {file}\ncuInit libcuda.so.1\ncuMemAlloc_v2 {file}\nno_such_name nowhere\n"
            )
        };
        assert_eq!(without, expected("libcuda.so.1"), "{library}");
        assert_eq!(with, expected("libsublet.so"), "{library}");
        assert_eq!(attached, expected("libsublet.so"), "{library}");
    }
}

#[test]
fn behind_a_library_without_the_driver_comes_nothing() {
    let stage = Stage::new();
    stage.library("next");
    let program = stage.program("asks");
    let said = said(&stage, &program, None, &["libnext.so", "=cuLaunchKernel", "=ncclAllReduce"]);
    assert_eq!(said, ["cuLaunchKernel nowhere\nncclAllReduce nowhere\n"; 3]);
}

#[test]
fn behind_a_library_comes_another_that_stands_before_the_driver() {
    let stage = Stage::new();
    let driver = driver();
    let asks = stage.library("next");
    let other = stage.library_named("next", "libother.so", &["-DSTANDS_BEFORE"]);
    let rpath = format!("-Wl,-rpath,{}", stage.path("").display());
    let links: Vec<&str> = [&asks, &other].map(|path| path.to_str().expect("UTF-8")).to_vec();
    let flags = [&["-Wl,--no-as-needed", &rpath][..], &links, &[&driver]].concat();
    stage.library_named("local", "libboth.so", &flags);
    let program = stage.program("asks");
    let words = ["libboth.so", "=cuLaunchKernel", "=cuMemAlloc_v2"];
    let [without, with, attached] = said(&stage, &program, None, &words);
    assert_eq!(without, "cuLaunchKernel libother.so\ncuMemAlloc_v2 libcuda.so.1\n");
    for with in [with, attached] {
        assert_eq!(with, "cuLaunchKernel libother.so\ncuMemAlloc_v2 libsublet.so\n");
    }
}

#[test]
fn behind_a_preloaded_library_comes_ours_in_place_of_the_drivers() {
    let stage = Stage::new();
    let before = stage.library_as("next", &["-DSTANDS_BEFORE"]);
    let program = stage.program_with("asks", simcuda_dir().join("libcuda.so.1").as_path());
    let words = ["here", "=cuLaunchKernel", "=cuInit"];
    let [without, with, attached] = said(&stage, &program, Some(&before), &words);
    assert_eq!(without, "cuLaunchKernel libcuda.so.1\ncuInit libcuda.so.1\n");
    for with in [with, attached] {
        assert_eq!(with, "cuLaunchKernel libsublet.so\ncuInit libcuda.so.1\n");
    }
}

#[test]
fn behind_a_library_that_was_opened_comes_ours_in_place_of_nccls() {
    let stage = Stage::new();
    let nccl = stage.nccl(1000);
    let rpath = format!("-Wl,-rpath,{}", stage.path("").display());
    let link = nccl.to_str().expect("UTF-8");
    stage.library_as("next", &["-Wl,--no-as-needed", &rpath, link]);
    let program = stage.program("asks");
    let words = ["libnext.so", "=ncclAllReduce", "=ncclSignal"];
    let [without, with, attached] = said(&stage, &program, None, &words);
    assert_eq!(without, "ncclAllReduce libnccl1000.so\nncclSignal nowhere\n");
    for with in [with, attached] {
        assert_eq!(with, "ncclAllReduce libsublet.so\nncclSignal nowhere\n");
    }
}

#[test]
fn a_library_between_us_and_nccl_is_called_once_and_calls_on() {
    let stage = Stage::new();
    let nccl = stage.nccl(1000);
    let before = stage.library_as("next", &["-DSTANDS_BEFORE"]);
    let rpath = format!("-Wl,-rpath,{}", stage.path("").display());
    let link = nccl.to_str().expect("UTF-8");
    let program = stage.program_as("asks", &["-Wl,--no-as-needed", &rpath, link]);
    let words = ["here", "=ncclAllReduce", "nccl"];
    let [without, with, _] = said(&stage, &program, Some(&before), &words);
    assert_eq!(without, "ncclAllReduce libnccl1000.so\nnccl 101001 from libnext.so\n");
    assert_eq!(with, without);
}
