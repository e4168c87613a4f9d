//! NCCL's functions: the table is complete, and ours are found exactly where NCCL's own would be.

use std::collections::BTreeSet;
use std::path::Path;

use crate::stage::{Preload, Stage, exported, preload_path, transcript};

/// The functions that NCCL 2.28.9 exports for programs: those of `nccl.h` and of `nccl_device/*.h`.
const DECLARED: &[&str] = &[
    "ncclAllGather",
    "ncclAllReduce",
    "ncclAlltoAll",
    "ncclBcast",
    "ncclBroadcast",
    "ncclCommAbort",
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommDeregister",
    "ncclCommDestroy",
    "ncclCommFinalize",
    "ncclCommGetAsyncError",
    "ncclCommInitAll",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
    "ncclCommRegister",
    "ncclCommRevoke",
    "ncclCommShrink",
    "ncclCommSplit",
    "ncclCommUserRank",
    "ncclCommWindowDeregister",
    "ncclCommWindowRegister",
    "ncclDevCommCreate",
    "ncclDevCommDestroy",
    "ncclGather",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGetUniqueId",
    "ncclGetVersion",
    "ncclGinBarrierCreateRequirement",
    "ncclGroupEnd",
    "ncclGroupSimulateEnd",
    "ncclGroupStart",
    "ncclLLA2ACalcSlots",
    "ncclLLA2ACreateRequirement",
    "ncclLsaBarrierCreateRequirement",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclRecv",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclReduce",
    "ncclReduceScatter",
    "ncclResetDebugInit",
    "ncclScatter",
    "ncclSend",
    "ncclTeamLsa",
    "ncclTeamRail",
    "ncclTeamRankToLsa",
    "ncclTeamRankToWorld",
    "ncclTeamWorld",
];

/// Functions that are not hooked, each with why.
const PASSED: &[(&str, &[&str])] = &[
    (
        "asks about a communicator, the library or a team; waits for nobody",
        &[
            "ncclCommCount",
            "ncclCommCuDevice",
            "ncclCommUserRank",
            "ncclGetErrorString",
            "ncclGetLastError",
            "ncclGetVersion",
            "ncclLLA2ACalcSlots",
            "ncclTeamLsa",
            "ncclTeamRail",
            "ncclTeamRankToLsa",
            "ncclTeamRankToWorld",
            "ncclTeamWorld",
        ],
    ),
    (
        "one rank calls it before there is a communicator; the identity is read where it is used",
        &["ncclGetUniqueId"],
    ),
    (
        "one rank's own memory, which the driver's hooks see; no other rank takes part",
        &["ncclCommDeregister", "ncclCommRegister", "ncclMemAlloc", "ncclMemFree"],
    ),
    (
        "one rank's own bookkeeping",
        &[
            "ncclDevCommDestroy",
            "ncclGinBarrierCreateRequirement",
            "ncclLLA2ACreateRequirement",
            "ncclLsaBarrierCreateRequirement",
            "ncclRedOpCreatePreMulSum",
            "ncclRedOpDestroy",
            "ncclResetDebugInit",
        ],
    ),
];

/// Rows for functions that NCCL 2.28.9 does not have yet.
const NEWER: &[&str] = &[
    "ncclCommGrow",
    "ncclCommResume",
    "ncclCommSuspend",
    "ncclPutSignal",
    "ncclSignal",
    "ncclWaitSignal",
];

/// Is `name` one of NCCL's own functions, and not one of ours that is named likewise (`ncclPause`)?
pub(crate) fn is_nccls(name: &str) -> bool {
    DECLARED.contains(&name) || NEWER.contains(&name)
}

/// NCCL's functions that we export.
fn hooked() -> BTreeSet<String> {
    exported(&preload_path()).into_iter().filter(|name| is_nccls(name)).collect()
}

#[test]
fn every_function_of_nccl_is_hooked_or_passed_for_a_reason() {
    let hooked = hooked();
    let hooked: BTreeSet<&str> = hooked.iter().map(String::as_str).collect();
    let declared: BTreeSet<&str> = DECLARED.iter().copied().collect();
    let passed: BTreeSet<&str> = PASSED.iter().flat_map(|(_, names)| *names).copied().collect();
    let newer: BTreeSet<&str> = NEWER.iter().copied().collect();
    let accounted: BTreeSet<&str> = hooked.union(&passed).copied().collect();
    let expected: BTreeSet<&str> = declared.union(&newer).copied().collect();
    assert_eq!(accounted, expected);
    assert!(hooked.is_disjoint(&passed), "hooked and passed: {:?}", hooked.intersection(&passed));
    assert!(declared.is_disjoint(&newer));
}

/// What `preload_nccl_finder.c` says of `libraries`.
fn finds(stage: &Stage, program: &Path, preload: Preload, libraries: &[&Path]) -> Vec<String> {
    let output = stage.command(program, preload).args(libraries).output();
    transcript(&output.expect("the program starts")).lines().map(str::to_owned).collect()
}

const NOWHERE: [&str; 3] =
    ["default: nowhere, an error", "next: nowhere, an error", "program: nowhere, an error"];

#[test]
fn a_process_without_nccl_finds_none() {
    let stage = Stage::new();
    let program = stage.program("nccl_finder");
    for preload in [Preload::Without, Preload::With] {
        assert_eq!(finds(&stage, &program, preload, &[]), NOWHERE, "{preload:?}");
    }
}

#[test]
fn a_library_that_links_nccl_gets_ours_and_nobody_else_finds_it() {
    let stage = Stage::new();
    let program = stage.program("nccl_finder");
    let nccl = stage.nccl(1000);
    let user = stage.nccl_user("libuser.so", &nccl);
    for (preload, file) in [(Preload::Without, "libnccl1000.so"), (Preload::With, "libsublet.so")] {
        let said = finds(&stage, &program, preload, &[&user]);
        let direct = format!("by name: {file} 1001");
        assert_eq!(said[..3], ["linked: 1001", &direct, "calls: 2"], "{preload:?}");
        assert_eq!(said[3..], NOWHERE, "{preload:?}");
    }
}

#[test]
fn a_second_nccl_gets_its_own_calls() {
    let stage = Stage::new();
    let program = stage.program("nccl_finder");
    let users = [1000, 2000]
        .map(|which| stage.nccl_user(&format!("libuser{which}.so"), &stage.nccl(which)));
    let [first, second] = [&*users[0], &*users[1]];
    let said = finds(&stage, &program, Preload::With, &[first, second, first]);
    let wanted = [
        "linked: 1001",
        "by name: libsublet.so 1001",
        "calls: 2",
        "linked: 2002",
        "by name: libnccl2000.so 2002",
        "calls: 2",
        "linked: 1003",
        "by name: libsublet.so 1003",
        "calls: 4",
    ];
    assert_eq!(said[..9], wanted);
    assert_eq!(said[9..], NOWHERE);
}

#[test]
fn a_library_of_ours_and_nccl_has_the_functions_of_both() {
    let stage = Stage::new();
    let program = stage.program("nccl_finder");
    let both = stage.both("libboth.so", &stage.nccl(1000));
    // Ours come first in its order, and lead to its own NCCL.
    for preload in [Preload::With, Preload::Without] {
        let said = finds(&stage, &program, preload, &[&both]);
        assert_eq!(said[..2], ["by name: libsublet.so 1001", "calls: 1"], "{preload:?}");
        assert_eq!(said[2..], NOWHERE, "{preload:?}");
    }
}

#[test]
fn a_program_that_links_nccl_finds_ours_without_naming_a_library() {
    let stage = Stage::new();
    let nccl = stage.nccl(1000);
    let program = stage.program_with("nccl_finder", &nccl);
    let found = |preload| {
        let mut command = stage.command(&program, preload);
        let mut path = std::ffi::OsString::from(stage.path(""));
        path.push(":");
        path.push(crate::stage::simcuda_dir());
        let output = command.env("LD_LIBRARY_PATH", path).output();
        transcript(&output.expect("the program starts"))
    };
    assert_eq!(found(Preload::With).matches("libsublet.so, no error").count(), 3);
    assert_eq!(found(Preload::Without).matches("libnccl1000.so, no error").count(), 3);
}
