//! Checks whether all ranks of this process's communicators can open Sublet's CUDA IPC handles.
//!
//! Processes of one tenant or family can, and a rank elsewhere cannot. Before a rank enters NCCL, it locks a file in the run
//! directory. The file's name has the communicator, the rank, and the group that can open its handles. NCCL allocates once all
//! ranks have entered; by then each rank of this run directory has its file. The lock ends with its process, and the next rank
//! removes the file.
//!
//! A rank without a file is on another machine, or outside Sublet. NVML then reports whether a program outside uses a GPU here.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenants::cut::CommunicatorId;
use tenants::run_dir::files::open_regular;

use crate::nvml::outside;
use crate::runtime::Member;

/// The most files. The ranks of later communicators count as not known.
const FILES_MAX: usize = 512;
/// Their folder in the run directory.
const FOLDER: &str = ".nccl";

/// The known ranks of this process's communicators.
#[derive(Debug)]
struct Known {
    /// Files that stay locked as long as this process lives.
    files: Vec<File>,
    /// Communicators with ranks that were not seen yet, with their number of ranks.
    open: Vec<(CommunicatorId, u32)>,
    /// Does any communicator have ranks of which nothing is known?
    is_any_unknown: bool,
}

static KNOWN: Mutex<Known> =
    Mutex::new(Known { files: Vec::new(), open: Vec::new(), is_any_unknown: false });

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the beginning of the names of a communicator's files.
fn beginning(id: CommunicatorId) -> String {
    format!("{:032x}-", id.0)
}

/// Returns the end of the names of files for processes that can open the handles of `member`.
fn ending(member: &Member) -> String {
    let mut hasher = DefaultHasher::new();
    match member.presence().family() {
        Some(family) => ("family", family.to_string()).hash(&mut hasher),
        None => ("tenant", member.presence().tenant().to_string()).hash(&mut hasher),
    }
    format!("-{:016x}", hasher.finish())
}

fn folder(member: &Member) -> PathBuf {
    member.presence().run_dir().path().join(FOLDER)
}

/// Creates and locks the file `name`. None if it is locked already, by another process or this one.
fn lock(folder: &Path, name: &str) -> io::Result<Option<File>> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = open_regular(&mut options, &folder.join(name))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Removes the files of ranks that have ended.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let opened = open_regular(OpenOptions::new().write(true), &entry.path());
        let has_ended = opened.is_ok_and(|file| file.try_lock().is_ok());
        if has_ended {
            let _removed_by_another = fs::remove_file(entry.path());
        }
    }
}

/// Notes that this process is about to enter NCCL as `rank` of the `ranks` of a communicator.
pub(crate) fn note(member: &Member, (id, rank, ranks): (CommunicatorId, i32, i32)) {
    let Ok(ranks) = u32::try_from(ranks) else { return };
    let (folder, name) = (folder(member), format!("{}{rank}{}", beginning(id), ending(member)));
    let mut known = known();
    if known.files.is_empty() {
        sweep(&folder);
    }
    if known.files.len() >= FILES_MAX {
        known.is_any_unknown = true;
        return;
    }
    match lock(&folder, &name) {
        Ok(Some(file)) => known.files.push(file),
        // The same id names a further communicator (`NCCL_COMM_ID`).
        Ok(None) => {}
        Err(error) => {
            tracing::debug!(%error, name, "a rank without a file");
            known.is_any_unknown = true;
        }
    }
    if !known.open.contains(&(id, ranks)) {
        known.open.push((id, ranks));
    }
}

/// Notes that a communicator has grown by ranks of which nothing is known.
pub(crate) fn note_unknown() {
    known().is_any_unknown = true;
}

/// Returns the ranks of a communicator by the names of files: those with `ending`, and all.
fn ranks_in(names: &[String], id: CommunicatorId, ending: &str) -> [BTreeSet<u32>; 2] {
    let mut found = [BTreeSet::new(), BTreeSet::new()];
    for name in names {
        let Some((rank, _)) =
            name.strip_prefix(&beginning(id)).and_then(|rest| rest.split_once('-'))
        else {
            continue;
        };
        let Ok(rank) = rank.parse() else { continue };
        if name.ends_with(ending) {
            found[0].insert(rank);
        }
        found[1].insert(rank);
    }
    found
}

/// May NCCL share memory of this process with one that cannot open Sublet's handles? Blocks for NVML calls if a rank of a
/// communicator is not known.
pub(crate) fn may_be_outside(member: &Member) -> bool {
    let (mut open, is_any_unknown) = {
        let known = known();
        (known.open.clone(), known.is_any_unknown)
    };
    let mut is_complete = !is_any_unknown;
    if !open.is_empty() {
        let entries = fs::read_dir(folder(member)).into_iter().flatten().flatten();
        let names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let ending = ending(member);
        for (id, ranks) in std::mem::take(&mut open) {
            let [ours, all] = ranks_in(&names, id, &ending);
            if all.len() > ours.len() {
                tracing::info!(
                    "NCCL shares plain memory with another tenant: it stays on its device; name one --family for both"
                );
                return true;
            }
            if ours.len() as u64 >= u64::from(ranks) {
                open.push((id, ranks));
            } else {
                is_complete = false;
            }
        }
        // A complete communicator stays complete.
        known().open.retain(|one| !open.contains(one));
    }
    if is_complete {
        return false;
    }
    let outside = outside::process();
    if let Some(pid) = outside {
        tracing::info!(
            pid,
            "a program outside Sublet uses a GPU, and not all ranks are known: NCCL's plain memory stays"
        );
    }
    outside.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_from_names() {
        let id = CommunicatorId(0xabc);
        let name = |rank: u32, end: &str| format!("{}{rank}{end}", beginning(id));
        let other = format!("{}0-aa", beginning(CommunicatorId(0xdef)));
        let names = [name(0, "-aa"), name(1, "-bb"), name(2, "-aa"), other, "stray".to_owned()];
        let [ours, all] = ranks_in(&names, id, "-aa");
        assert_eq!((ours, all), (BTreeSet::from([0, 2]), BTreeSet::from([0, 1, 2])));
    }

    #[test]
    fn the_file_of_a_rank_that_has_ended_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join(FOLDER);
        let living = lock(&folder, "living").expect("a file").expect("its lock");
        drop(lock(&folder, "ended").expect("a file").expect("its lock"));
        assert!(lock(&folder, "living").expect("a file").is_none());
        sweep(&folder);
        assert!(folder.join("living").exists() && !folder.join("ended").exists());
        drop(living);
    }
}
