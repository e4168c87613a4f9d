//! The table of hooks is complete: every function of NVIDIA's header is in it, or passed for a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use sublet_cuda_driver::functions::FUNCTIONS;

use crate::stage::{exported, preload_path, root, transcript};

/// Families of functions about memory, work and sharing, by start of name. Every function in them must
/// be accounted for.
const FAMILIES: &[&str] = &[
    "cuMem",
    "cuMulticast",
    "cuLaunch",
    "cuGraph",
    "cuStream",
    "cuIpc",
    "cuPointer",
    "cuGetProcAddress",
];

/// Functions that are passed on untouched, by exact name or (with `*`) by start of name, each with why.
const PASSED: &[(&str, &[&str])] = &[
    (
        "host memory: costs no device memory and stays where it is",
        &[
            "cuMemAllocHost*",
            "cuMemFreeHost",
            "cuMemHostAlloc",
            "cuMemHostGetDevicePointer*",
            "cuMemHostGetFlags",
            "cuMemHostRegister*",
            "cuMemHostUnregister",
        ],
    ),
    (
        "managed memory: the driver moves it itself; it is never taken from under anybody",
        &[
            "cuMemAllocManaged",
            "cuMemAdvise*",
            "cuMemDiscard*",
            "cuMemPrefetch*",
            "cuMemRangeGetAttribute*",
        ],
    ),
    (
        "asks for facts about the device or the interface, not about memory that can be away",
        &["cuMemGetInfo*", "cuMemGetAllocationGranularity", "cuMemGetLocationInfo"],
    ),
    ("reserves addresses, which a pause keeps", &["cuMemAddressReserve"]),
    (
        "stream-ordered pools: physical memory that the driver owns; allocation waits, and the pools are \
         trimmed at a pause",
        &["cuMemPool*", "cuMemGetDefaultMemPool", "cuMemGetMemPool", "cuMemSetMemPool"],
    ),
    (
        "pitched plain memory: left to the driver; no library that we know uses it for its buffers",
        &["cuMemAllocPitch*"],
    ),
    (
        "arrays and textures: no address that could be kept; they stay resident",
        &["cuMemcpyHtoA*", "cuMemcpyAtoH*", "cuMemcpyAtoA*", "cuMemMapArrayAsync*"],
    ),
    (
        "multicast objects cannot be made (cuMulticastCreate refuses), so nothing can be done to one",
        &["cuMulticastAddDevice", "cuMulticastBind*", "cuMulticastUnbind", "cuMulticastGet*"],
    ),
    (
        "superseded launch interface of CUDA 3: launches by it predate virtual memory",
        &["cuLaunch", "cuLaunchGrid*", "cuLaunchCooperativeKernelMultiDevice"],
    ),
    (
        "a host function touches no device memory and may be what a waiting thread waits for",
        &["cuLaunchHostFunc*", "cuStreamAddCallback*"],
    ),
    (
        "builds, changes or asks about a graph, which runs nothing before cuGraphLaunch",
        &[
            "cuGraphAddB*",
            "cuGraphAddD*",
            "cuGraphAddE*",
            "cuGraphAddH*",
            "cuGraphAddK*",
            "cuGraphAddM*",
            "cuGraphBatch*",
            "cuGraphChild*",
            "cuGraphConditional*",
            "cuGraphCreate",
            "cuGraphDebug*",
            "cuGraphDestroyNode",
            "cuGraphEvent*",
            "cuGraphExecBatch*",
            "cuGraphExecEvent*",
            "cuGraphExecExternal*",
            "cuGraphExecGet*",
            "cuGraphExecHost*",
            "cuGraphExecKernel*",
            "cuGraphExecMem*",
            "cuGraphExecNode*",
            "cuGraphExternal*",
            "cuGraphGet*",
            "cuGraphHost*",
            "cuGraphKernel*",
            "cuGraphMem*",
            "cuGraphNode*",
            "cuGraphRelease*",
            "cuGraphRemove*",
            "cuGraphRetain*",
            "cuGraphUpload*",
        ],
    ),
    (
        "graphics interoperation: memory of another interface, which stays resident",
        &["cuGraphics*"],
    ),
    (
        "makes, ends, orders or asks about a stream; touches no memory",
        &[
            "cuStreamAttachMemAsync*",
            "cuStreamCopyAttributes*",
            "cuStreamCreate*",
            "cuStreamGet*",
            "cuStreamIsCapturing*",
            "cuStreamQuery*",
            "cuStreamSetAttribute*",
            "cuStreamSynchronize*",
            "cuStreamUpdateCaptureDependencies*",
            "cuStreamWaitEvent*",
        ],
    ),
    ("events of other processes hold no memory", &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]),
    (
        "captures for a graphics interface, which runs what was captured itself",
        &["cuStreamBeginCaptureToCig*", "cuStreamEndCaptureToCig*"],
    ),
    ("changes a flag of an allocation of the driver's", &["cuPointerSetAttribute"]),
];

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
        name.starts_with("cu").then(|| name.to_owned())
    });
    let names: BTreeSet<String> = names.collect();
    assert!(names.contains("cuMemCreate"), "the bindings have changed their form");
    names
}

fn is_family(name: &str) -> bool {
    let peer = name.starts_with("cuCtx") && name.ends_with("PeerAccess");
    peer || FAMILIES.iter().any(|family| name.starts_with(family))
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => pattern == name,
    }
}

#[test]
fn every_declared_function_is_hooked_or_passed_for_a_reason() {
    let hooked: BTreeSet<String> = FUNCTIONS.iter().map(|row| row.symbol.to_owned()).collect();
    // A function whose newer form is hooked exists under the plain name for programs of CUDA 3 alone.
    let passed: Vec<&str> = PASSED.iter().flat_map(|(_, patterns)| *patterns).copied().collect();
    let mut uses: BTreeMap<&str, usize> = passed.iter().map(|pattern| (*pattern, 0)).collect();
    let mut forgotten = Vec::new();
    for name in declared().into_iter().filter(|name| is_family(name) && !hooked.contains(name)) {
        let reasons: Vec<_> = passed.iter().filter(|pattern| matches(pattern, &name)).collect();
        for pattern in &reasons {
            *uses.entry(pattern).or_default() += 1;
        }
        if reasons.is_empty() {
            forgotten.push(name);
        }
    }
    assert!(forgotten.is_empty(), "neither hooked nor passed for a reason: {forgotten:?}");
    let unused: Vec<_> = uses.iter().filter(|(_, count)| **count == 0).map(|(p, _)| p).collect();
    assert!(unused.is_empty(), "reasons that no declared function needs: {unused:?}");
}

#[test]
fn no_function_is_both_hooked_and_passed() {
    for row in FUNCTIONS {
        let twice = PASSED.iter().find(|(_, names)| names.iter().any(|p| matches(p, row.symbol)));
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
