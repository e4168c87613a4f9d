//! NCCL's public functions under their own names, counted for the consistent cut.
//!
//! | what we do | means |
//! | --- | --- |
//! | replaced | counted, and held before a pause (`calls.rs`), then NCCL's own function |
//! | told | NCCL's own function; the process's owner is told once that a pause does not see it |
//! | pass | not hooked, for the reason given in the completeness test |
//!
//! NCCL EP (`libnccl_ep.so`), which is built on NCCL's public functions, is a separate library with its own table (`experts`).
//!
//! The engine ([`sublet_interpose`]) leads callers to these functions; this is its table. The profiling names (`pnccl...`) are
//! not hooked: a tool calls them after the application has called the public ones, and `PyTorch` never does.

pub(crate) mod calls;
pub(crate) mod experts;

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use sublet_nccl::collectives::NcclResult;

use crate::runtime;
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// NCCL, and its known copies in this process.
pub(crate) static NCCL: Library = Library::new(Description {
    prefix: "nccl",
    landmark: c"ncclGetVersion",
    file: c"libnccl.so.2",
    table: TABLE,
    found,
});

interpose_library! {
    NCCL; missing = super::no_nccl;
    replaced in calls {
        ncclAllGather;
        ncclAllGatherConfig;
        ncclAllReduce;
        ncclAllReduceConfig;
        ncclAlltoAll;
        ncclAlltoAllConfig;
        ncclBcast;
        ncclBroadcast;
        ncclBroadcastConfig;
        ncclCommAbort;
        ncclCommDestroy;
        ncclCommFinalize;
        ncclCommGetAsyncError;
        ncclCommGrow;
        ncclCommInitAll;
        ncclCommInitRank;
        ncclCommInitRankConfig;
        ncclCommInitRankScalable;
        ncclCommResume;
        ncclCommRevoke;
        ncclCommShrink;
        ncclCommSplit;
        ncclCommSuspend;
        ncclCommWindowRegister;
        ncclDevCommCreate;
        ncclGather;
        ncclGatherConfig;
        ncclGroupEnd;
        ncclGroupSimulateEnd;
        ncclGroupStart;
        ncclMemAlloc;
        ncclPutSignal;
        ncclRecv;
        ncclReduce;
        ncclReduceConfig;
        ncclReduceScatter;
        ncclReduceScatterConfig;
        ncclScatter;
        ncclScatterConfig;
        ncclSend;
        ncclSignal;
        ncclWaitSignal;
    }
}

fn found(path: &CStr, is_watched: bool) {
    let path = path.to_string_lossy();
    if is_watched {
        tracing::debug!(%path, "NCCL");
        return;
    }
    note_unseen(|| format!("a second NCCL is in use, {path}, whose calls are not held back"));
    if let Some(member) = runtime::member() {
        // Sublet does not count the collectives of the second library, so a pause in the middle of one times out. The
        // job runs on. Pause between two steps.
        member.notes().add(format!(
            "a second NCCL is in use, {path}: a pause in the middle of its collectives times out"
        ));
    } else {
        tracing::warn!(%path, "a second NCCL is in use, which is not watched");
    }
}

/// The NCCL work in this process that a pause of NCCL's memory alone would not hold back, as text.
static UNSEEN: OnceLock<String> = OnceLock::new();

/// Returns why NCCL's memory cannot be released while this process runs on.
pub(crate) fn unseen_work() -> Option<String> {
    UNSEEN.get().cloned()
}

fn note_unseen(why: impl FnOnce() -> String) {
    UNSEEN.get_or_init(why);
}

fn called(name: &CStr) {
    note_unseen(|| format!("{} is used, which is not held back", name.to_string_lossy()));
    if let Some(member) = runtime::member() {
        let name = name.to_string_lossy();
        // Sublet does not count the work of this call, so a pause cannot wait for it. The job runs on. Pause between
        // two steps.
        member.notes().add(format!("{name} is used, and a pause does not see its work"));
    }
}

/// The function for a program that was linked against NCCL while none is in the process.
extern "C" fn no_nccl() -> c_int {
    NcclResult::SYSTEM_ERROR.0
}
