//! The host memory and the disk that this process may take, as the simulation has it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sublet_tests::Outcome;
use tenants::host_memory::{HostLimit, LimitKind};

use crate::orders::{HostRoom, Saved};
use crate::usage::held_host_bytes;

use super::Sim;

/// What `MemberConfig::host_limits` says, which can hold no value of its own.
static ROOM: Mutex<HostRoom> = Mutex::new(HostRoom::Plenty);
/// How often there was less than plenty.
static SHORTAGES: AtomicU64 = AtomicU64::new(0);

pub(super) fn shortages() -> u64 {
    SHORTAGES.load(Ordering::Relaxed)
}

pub(super) fn set_room(room: &HostRoom) {
    if !matches!(room, HostRoom::Plenty) {
        SHORTAGES.fetch_add(1, Ordering::Relaxed);
    }
    room.clone_into(&mut ROOM.lock().unwrap_or_else(PoisonError::into_inner));
}

/// As `tenants::host_memory::limits` has it of a machine, of which a tenth of what is free stays so.
pub(super) fn limits() -> Vec<HostLimit> {
    let room = ROOM.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match room {
        HostRoom::Plenty => Vec::new(),
        HostRoom::Nothing => vec![HostLimit { kind: LimitKind::Configured, bytes: 0 }],
        HostRoom::Shared { total_bytes, pids } => {
            let held: u64 = pids.iter().map(|pid| held_host_bytes(*pid)).sum();
            let free = total_bytes.saturating_sub(held);
            vec![HostLimit { kind: LimitKind::Available, bytes: free - free / 10 }]
        }
    }
}

/// A simulated device writes a word to a file when memory of it goes, which a real one does not: with no room for that the
/// process would end by a signal (`SIGXFSZ`). No allocation that moves to a file is as small.
const FILE_BYTES_MIN: u64 = 4096;

/// Files of this process have so many bytes at most, or a page; none: as many as the system lets them.
pub(super) fn limit_files(most_bytes: Option<u64>) -> Outcome {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE)?;
    let soft = most_bytes.map_or(hard, |bytes| bytes.max(FILE_BYTES_MIN).min(hard));
    setrlimit(Resource::RLIMIT_FSIZE, soft, hard)?;
    Ok(())
}

/// Where what it has saved lies.
pub(super) fn saved(member: &Sim) -> Saved {
    let report = member.pool().report();
    Saved { spilled_bytes: report.spilled_bytes }
}

/// Where this process may move what it has saved: most have room there, and some name a place that is not there.
pub(super) fn file_dir(node: &Path, seed: u64) -> PathBuf {
    let nowhere = node.join("nowhere");
    if (seed >> 40) % 8 == 1 { nowhere } else { node.parent().map_or(nowhere, Path::to_owned) }
}

/// May it?
pub(super) fn spills(seed: u64) -> bool {
    !(seed >> 40).is_multiple_of(8)
}

/// Does a resume of this process give host memory back, so that its next pause has to find some?
pub(super) fn gives_back(seed: u64) -> bool {
    (seed >> 44).is_multiple_of(4)
}
