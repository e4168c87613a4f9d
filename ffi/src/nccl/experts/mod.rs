//! NCCL EP's public functions under their own names, counted by the rules of `sublet_nccl::collectives`.

pub(crate) mod calls;

use std::ffi::CStr;

use super::{called, no_nccl};
use crate::runtime;
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// NCCL EP, and its known copies in this process.
pub(crate) static NCCL_EP: Library = Library::new(Description {
    prefix: "ncclEp",
    landmark: c"ncclEpGetVersion",
    file: c"libnccl_ep.so.0",
    table: TABLE,
    found,
});

interpose_library! {
    NCCL_EP; missing = super::no_nccl;
    replaced in calls {
        ncclEpCombine;
        ncclEpCreateGroup;
        ncclEpCreateHandle;
        ncclEpDispatch;
        ncclEpGroupDestroy;
        ncclEpHandleDestroy;
        ncclEpInitHandle;
    }
    told to called {
        ncclEpMaskClean;
    }
}

fn found(path: &CStr, is_watched: bool) {
    let path = path.to_string_lossy();
    if is_watched {
        tracing::debug!(%path, "NCCL EP");
    } else if let Some(member) = runtime::member() {
        // Sublet does not count the exchanges of the second library, so a pause in the middle of one may time out.
        // The job runs on. Pause between two steps.
        member.notes().add(format!(
            "a second NCCL EP is in use, {path}: a pause in the middle of its exchanges may time out"
        ));
    } else {
        tracing::warn!(%path, "a second NCCL EP is in use, which is not watched");
    }
}
