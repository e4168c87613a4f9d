//! The host memory, the disk and the descriptors that this process may take, and its signals, as the simulation
//! has them.

#![expect(unsafe_code, reason = "installs a signal handler")]

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
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

/// As `tenants::keep::limits` has it of a machine, of which a tenth of what is free stays so.
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

/// What fills the table of descriptors, and the limit of before.
struct Filling {
    _copies: Vec<File>,
    soft: u64,
}

static FILLING: Mutex<Option<Filling>> = Mutex::new(None);
/// There were no descriptors at some time since all was last compared.
static LACKED_DESCRIPTORS: AtomicBool = AtomicBool::new(false);
/// So many numbers above the first free one are filled: the table that the system allows would take long.
const NUMBERS_FILLED: u64 = 256;

/// Uses all descriptors up but for some, or gives them back.
pub(super) fn limit_table(spare: Option<usize>) -> Outcome {
    let mut filling = FILLING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(Filling { soft, .. }) = filling.take() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    }
    let Some(spare) = spare else { return Ok(()) };
    LACKED_DESCRIPTORS.store(true, Ordering::Relaxed);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let first = File::open("/dev/null")?;
    let most = u64::try_from(first.as_raw_fd())? + NUMBERS_FILLED;
    setrlimit(Resource::RLIMIT_NOFILE, most.min(soft), hard)?;
    let mut copies = Vec::new();
    while let Ok(copy) = first.try_clone() {
        copies.push(copy);
    }
    copies.truncate(copies.len().saturating_sub(spare));
    copies.push(first);
    *filling = Some(Filling { _copies: copies, soft });
    Ok(())
}

/// Is what fails for want of descriptors to be expected?
pub(super) fn lacks_descriptors() -> bool {
    LACKED_DESCRIPTORS.load(Ordering::Relaxed)
}

/// All is compared, and what lacked descriptors is over.
pub(super) fn has_descriptors() {
    LACKED_DESCRIPTORS.store(false, Ordering::Relaxed);
}

extern "C" fn nothing(_signal: c_int) {}

fn handled() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM].into_iter().collect()
}

/// From now on these signals interrupt calls of the system's, which are not begun again by themselves.
pub(super) fn handle_signals() -> Outcome {
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    for signal in &handled() {
        // SAFETY: the handler does nothing, and so nothing that a handler may not do.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// They do not come to the calling thread, nor to those that it starts.
pub(super) fn leave_signals() -> Outcome {
    Ok(handled().thread_block()?)
}

/// They come to the calling thread.
pub(super) fn take_signals() -> Outcome {
    Ok(handled().thread_unblock()?)
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
