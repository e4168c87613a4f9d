//! The table of hooks is complete: every function of NVIDIA's header is in it, or passed for a reason.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use sublet_cuda_driver::functions::FUNCTIONS;

use crate::passed::PASSED;
use crate::stage::{exported, preload_path, root, simcuda_dir, transcript};

/// The functions that NVIDIA's header declares, from the bindings that we build with.
fn declared() -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // For this platform alone: the build has fetched no crate that only another one needs.
    let platform = concat!("--filter-platform=", env!("SUBLET_PLATFORM"));
    let arguments = ["metadata", "--format-version=1", "--locked", platform];
    let output = Command::new(cargo).args(arguments).current_dir(root()).output();
    let metadata: serde_json::Value =
        serde_json::from_str(&transcript(&output.expect("cargo"))).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc").expect("cudarc");
    let manifest = PathBuf::from(cudarc["manifest_path"].as_str().expect("a path"));
    let bindings = manifest.with_file_name("src").join("driver/sys/mod.rs");
    let text = std::fs::read_to_string(bindings).expect("the bindings");
    let names = text.lines().filter_map(|line| {
        let name = line.trim_start().strip_prefix("pub unsafe fn ")?.split('(').next()?;
        // What else is there belongs to the bindings.
        let rest = name.strip_prefix("cu")?;
        rest.starts_with(|first: char| first.is_ascii_uppercase()).then(|| name.to_owned())
    });
    let names: BTreeSet<String> = names.collect();
    assert!(names.contains("cuMemCreate"), "the bindings have changed their form");
    names
}

#[test]
fn every_declared_function_is_hooked_or_passed_for_a_reason() {
    let hooked: BTreeSet<&str> = FUNCTIONS.iter().map(|row| row.symbol).collect();
    let passed: Vec<&str> = PASSED.iter().flat_map(|(_, names)| *names).copied().collect();
    let names: BTreeSet<&str> = passed.iter().copied().collect();
    assert_eq!(names.len(), passed.len(), "a function is passed for two reasons");
    let declared = declared();
    // The header has no older forms. Those that take addresses of 32 bits are for programs of CUDA 3 alone; the others are
    // hooked as the newer ones are.
    let is_placed = |name: &String| hooked.contains(&**name) || names.contains(&**name);
    let forgotten: Vec<_> = declared.iter().filter(|name| !is_placed(name)).collect();
    assert!(forgotten.is_empty(), "neither hooked nor passed for a reason: {forgotten:?}");
    let unknown: Vec<_> = names.iter().filter(|name| !declared.contains(**name)).collect();
    assert!(unknown.is_empty(), "passed, and declared nowhere: {unknown:?}");
}

/// The version of a form, as a suffix of its name.
fn suffix(symbol: &str) -> &str {
    let symbol = symbol.strip_suffix("_ptsz").or(symbol.strip_suffix("_ptds")).unwrap_or(symbol);
    symbol.rfind("_v").map_or("", |at| &symbol[at..])
}

#[test]
fn no_function_is_both_hooked_and_passed() {
    for row in FUNCTIONS {
        let plain = format!("{}{}", row.base, suffix(row.symbol));
        let twice = PASSED.iter().find(|(_, names)| names.contains(&&*plain));
        assert!(twice.is_none(), "{} is hooked, and passed because: {twice:?}", row.symbol);
    }
}

#[test]
fn exports_and_table_agree() {
    let table: BTreeSet<String> = FUNCTIONS.iter().map(|row| row.symbol.to_owned()).collect();
    let exports: BTreeSet<String> =
        exported(&preload_path()).into_iter().filter(|name| name.starts_with("cu")).collect();
    assert_eq!(exports, table);
}

/// The version that the simulated driver claims to be.
const SIMULATED_VERSION: i32 = 13_000;

/// Hooked functions that the simulated driver lacks, so that no test of several processes comes to their hooks, by reason.
const ABSENT: &[(&str, &[&str])] = &[
    ("for programs of before CUDA 4", &["cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync"]),
    ("one launch on several devices: deprecated", &["cuLaunchCooperativeKernelMultiDevice"]),
    ("it has modules, and no libraries of kernels", &["cuLibraryUnload"]),
    (
        "needs hardware that unpacks",
        &["cuMemBatchDecompressAsync", "cuMemBatchDecompressAsync_ptsz"],
    ),
];

#[test]
fn every_hooked_function_is_one_of_the_simulated_drivers_or_absent_for_a_reason() {
    let simulated: BTreeSet<String> =
        exported(&simcuda_dir().join("libcuda.so.1")).into_iter().collect();
    let absent: BTreeSet<&str> = ABSENT.iter().flat_map(|(_, names)| *names).copied().collect();
    let of_its_time = FUNCTIONS.iter().filter(|row| row.version <= SIMULATED_VERSION);
    let lacks: BTreeSet<&str> =
        of_its_time.map(|row| row.symbol).filter(|name| !simulated.contains(*name)).collect();
    assert_eq!(lacks, absent);
}

#[test]
fn a_hook_for_the_legacy_stream_has_its_per_thread_twin() {
    let lacks: Vec<_> = FUNCTIONS
        .iter()
        .filter(|row| !row.per_thread)
        .filter(|row| row.symbol.starts_with("cuMemcpy") || row.symbol.starts_with("cuMemset"))
        .filter(|row| !FUNCTIONS.iter().any(|twin| twin.per_thread && twin.base == row.base))
        .collect();
    assert!(lacks.is_empty(), "{lacks:?}");
}
