//! NCCL's functions: the table is complete, and ours are found exactly where NCCL's own would be.

use std::collections::BTreeSet;
use std::path::Path;

use crate::stage::{Preload, Stage, exported, preload_path, transcript};

/// The functions that NCCL and NCCL EP declare or export, in any version that was looked at, as `cargo xtask nccl-functions`
/// lists them.
const DECLARED: [&str; 2] =
    [include_str!("../../functions/nccl.txt"), include_str!("../../functions/nccl_ep.txt")];

/// Functions that are hooked, and not counted: a program that uses one is told that a pause does not see it.
const NOTED: &[&str] = &["ncclEpMaskClean"];

/// Functions that are not hooked, each with why. Every other function of the headers is counted.
const PASSED: &[(&str, &[&str])] = &[
    (
        "asks about a communicator, the library, a team or a window; waits for nobody",
        &[
            "ncclCommCount",
            "ncclCommCuDevice",
            "ncclCommMemStats",
            "ncclCommQueryProperties",
            "ncclCommUserRank",
            "ncclEpGetAsyncError",
            "ncclEpGetVersion",
            "ncclEpHandleMemSize",
            "ncclGetCftDeviceLeInfo",
            "ncclGetErrorString",
            "ncclGetLastError",
            "ncclGetLsaDevicePointer",
            "ncclGetLsaMultimemDevicePointer",
            "ncclGetMultimemDeviceLeInfo",
            "ncclGetMultimemDevicePointer",
            "ncclGetPeerDeviceLeInfo",
            "ncclGetPeerDevicePointer",
            "ncclGetVersion",
            "ncclLLA2ACalcSlots",
            "ncclParamDumpAll",
            "ncclParamGet",
            "ncclParamGetAllParameterKeys",
            "ncclParamGetI16",
            "ncclParamGetI32",
            "ncclParamGetI64",
            "ncclParamGetI8",
            "ncclParamGetParameter",
            "ncclParamGetStr",
            "ncclParamGetU16",
            "ncclParamGetU32",
            "ncclParamGetU64",
            "ncclParamGetU8",
            "ncclTeamCft",
            "ncclTeamCftMultimem",
            "ncclTeamLsa",
            "ncclTeamRail",
            "ncclTeamRankToLsa",
            "ncclTeamRankToWorld",
            "ncclTeamWorld",
            "ncclWinGetUserPtr",
        ],
    ),
    (
        "one rank calls it before there is a communicator; the identity is read where it is used",
        &["ncclCommGetUniqueId", "ncclGetUniqueId"],
    ),
    (
        "one rank's own memory, which the driver's hooks see; no other rank takes part",
        &["ncclCommDeregister", "ncclCommRegister", "ncclMemFree"],
    ),
    (
        "deregistration is local to the rank (documentation of ncclCommWindowDeregister): ranks make it at different \
         times, or not at all",
        &["ncclCommWindowDeregister"],
    ),
    (
        "one rank's own bookkeeping",
        &[
            "ncclCftBarrierCreateRequirement",
            "ncclDevCommDestroy",
            "ncclEpErrorClear",
            "ncclEpMaskQuery",
            "ncclEpMaskUpdate",
            "ncclEpTensorAlloc",
            "ncclEpTensorDestroy",
            "ncclGinBarrierCreateRequirement",
            "ncclGinInboxA2ACreateRequirement",
            "ncclGinOutboxCreateRequirement",
            "ncclLLA2ACreateRequirement",
            "ncclLsaBarrierCreateRequirement",
            "ncclParamBind",
            "ncclRedOpCreatePreMulSum",
            "ncclRedOpDestroy",
            "ncclResetDebugInit",
            "ncclSetEncryption",
        ],
    ),
    (
        "waits for other ranks by NCCL's public functions alone, which count by themselves",
        &["ncclEpUpdateHandle"],
    ),
    (
        "waits for what ncclEpDispatch and ncclEpCombine have sent, of which all ranks have launched as many at a cut",
        &["ncclEpComplete"],
    ),
];

/// The twins of all functions, for tools that come between the public names and NCCL. Such a tool calls them once the
/// public ones, which are ours, have been called. So none is hooked.
const TWIN: &str = "pnccl";

/// All names of the headers.
fn declared() -> impl Iterator<Item = &'static str> {
    let lines = DECLARED.into_iter().flat_map(str::lines).filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_whitespace().next())
}

/// Is `name` one of NCCL's own functions, and not one of ours that is named likewise (`ncclPause`)?
pub(crate) fn is_nccls(name: &str) -> bool {
    declared().any(|declared| declared == name)
}

#[test]
fn every_function_of_nccl_is_counted_noted_or_passed_for_a_reason() {
    let (twins, declared): (BTreeSet<&str>, BTreeSet<&str>) =
        declared().partition(|name| name.starts_with(TWIN));
    for twin in &twins {
        assert!(declared.contains(&twin[1..]), "{twin} is the twin of nothing");
    }
    let exported = exported(&preload_path());
    let hooked: BTreeSet<&str> =
        exported.iter().map(String::as_str).filter(|name| declared.contains(name)).collect();
    assert!(exported.iter().all(|name| !name.starts_with(TWIN)), "a twin is hooked");
    let noted: BTreeSet<&str> = NOTED.iter().copied().collect();
    assert!(noted.is_subset(&hooked), "not hooked: {:?}", noted.difference(&hooked));
    let listed: Vec<&str> = PASSED.iter().flat_map(|(_, names)| *names).copied().collect();
    let passed: BTreeSet<&str> = listed.iter().copied().collect();
    assert_eq!(passed.len(), listed.len(), "one is listed twice");
    assert!(hooked.is_disjoint(&passed), "hooked and passed: {:?}", hooked.intersection(&passed));
    let placed: BTreeSet<&str> = hooked.union(&passed).copied().collect();
    let missing: Vec<_> = declared.difference(&placed).collect();
    assert!(
        missing.is_empty(),
        "functions of NCCL's headers that are in no list: {missing:?}. Count each in `ffi/src/nccl`, or say here why not"
    );
    let unknown: Vec<_> = placed.difference(&declared).collect();
    assert!(unknown.is_empty(), "in no header: {unknown:?}");
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
fn calls_that_nccl_makes_of_itself_stay_its_own_on_any_thread() {
    let stage = Stage::new();
    let rpath = format!("-Wl,-rpath,{}", stage.path("").display());
    let nccl = stage.nccl(1000);
    let link = nccl.to_str().expect("UTF-8");
    let program = stage.program_as("asks", &["-Wl,--no-as-needed", &rpath, link]);
    let output = stage.command(&program, Preload::With).args(["nccl", "itself"]).output();
    assert_eq!(
        transcript(&output.expect("it starts")),
        "nccl 1001 from libsublet.so\nitself 1000 from libnccl1000.so\n"
    );
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
