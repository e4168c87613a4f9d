//! NCCL's functions: the table is complete, and ours are found exactly where NCCL's own would be.

use std::collections::BTreeSet;

use crate::stage::{exported, preload_path, root};

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
const NEWER: &[&str] = &["ncclCommGrow", "ncclPutSignal", "ncclSignal", "ncclWaitSignal"];

/// The table, read from its source: one name a line.
pub(crate) fn table() -> BTreeSet<String> {
    let path = root().join("ffi/src/nccl/mod.rs");
    let source = std::fs::read_to_string(path).expect("the table");
    let rows = source.lines().filter_map(|line| {
        let name = line.trim().strip_suffix(';')?;
        let is_name = name.starts_with("nccl") && name.chars().all(|c| c.is_ascii_alphanumeric());
        is_name.then(|| name.to_owned())
    });
    let rows: BTreeSet<String> = rows.collect();
    assert!(rows.len() > 20, "the table has changed its form: {} rows read", rows.len());
    rows
}

#[test]
fn every_function_of_nccl_is_hooked_or_passed_for_a_reason() {
    let table = table();
    let declared: BTreeSet<&str> = DECLARED.iter().copied().collect();
    let passed: BTreeSet<&str> = PASSED.iter().flat_map(|(_, names)| *names).copied().collect();
    let newer: BTreeSet<&str> = NEWER.iter().copied().collect();
    let hooked: BTreeSet<&str> = table.iter().map(String::as_str).collect();
    let accounted: BTreeSet<&str> = hooked.union(&passed).copied().collect();
    let expected: BTreeSet<&str> = declared.union(&newer).copied().collect();
    assert_eq!(accounted, expected);
    assert!(hooked.is_disjoint(&passed), "hooked and passed: {:?}", hooked.intersection(&passed));
    assert!(declared.is_disjoint(&newer));
}

#[test]
fn every_row_is_exported() {
    let exports: BTreeSet<String> = exported(&preload_path()).into_iter().collect();
    let lacks: Vec<_> = table().into_iter().filter(|name| !exports.contains(name)).collect();
    assert!(lacks.is_empty(), "{lacks:?}");
}
