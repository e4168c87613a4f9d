//! Locks that this process holds. A forked child closes them: a child that keeps one keeps it locked when this process has
//! been killed. It closes watches of claims with them.

use std::fs::File;
use std::os::fd::IntoRawFd as _;
use std::process;

use nix::fcntl::{FcntlArg, fcntl};

use crate::descriptors::{Noted, Numbers};

/// Threads of one process that pause, resume, or wait for memory or a turn; more are not noted.
const LOCKS_MAX: usize = 1024;

/// Those of this process.
pub(crate) static HELD: Numbers<LOCKS_MAX> = Numbers::new();

/// In a forked child: closes its copies of all locks that its parent holds. Blocks nowhere.
pub fn close_in_child() {
    HELD.close_in_child();
}

/// A lock on a file, held until dropped. A process that dies gives it up. In a forked child it is nothing, and its end does nothing.
#[derive(Debug)]
pub(crate) struct FileLock {
    /// Away once it has been dropped. The number goes before the file does.
    held: Option<(Noted, File)>,
    /// The process that took it.
    pid: u32,
}

impl FileLock {
    /// The lock that this process has just taken on `file`.
    pub(super) fn new(file: File) -> Self {
        Self { held: Some((HELD.note(&file), file)), pid: process::id() }
    }

    /// Its file; none in a forked child.
    pub(super) fn file(&self) -> Option<&File> {
        self.held.as_ref().filter(|_| self.is_own()).map(|(_, file)| file)
    }

    /// Did this process take it, and no parent of it?
    pub(super) fn is_own(&self) -> bool {
        self.pid == process::id()
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let is_own = self.is_own();
        let Some((noted, file)) = self.held.take() else { return };
        if !is_own {
            // The child's copy was closed at the fork: its number, and its place among those noted, may be others' by now.
            let _kept = std::mem::ManuallyDrop::new(noted);
            let _closed = file.into_raw_fd();
            return;
        }
        // A child forked meanwhile shares the lock until it closes or unlocks; unlocking ends it for both.
        if let Err(error) = file.unlock() {
            tracing::warn!(%error, "a lock of the run directory was not given up");
        }
        // First: once the file is closed, its number may be another's, which a child forked by another thread would close.
        drop(noted);
        drop(file);
    }
}

/// The wish to have the lock on a file alone, which others see who would share it; until dropped. It is a lock of another
/// kind on the same file. A process that dies gives it up.
#[derive(Debug)]
pub(crate) struct Wish {
    /// Goes before the file does.
    _noted: Noted,
    file: File,
}

impl Wish {
    /// On `file`, which nobody else has this opening of. None where the file system knows no such locks: then who wants
    /// it alone has to be lucky.
    pub(super) fn new(file: File) -> Option<Self> {
        let shared = whole_file(libc::F_RDLCK);
        fcntl(&file, FcntlArg::F_OFD_SETLK(&shared)).ok()?;
        Some(Self { _noted: HELD.note(&file), file })
    }

    /// Has anybody this wish? Takes no lock.
    pub(super) fn is_on(file: &File) -> bool {
        let mut found = whole_file(libc::F_WRLCK);
        let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
        asked.is_ok() && i32::from(found.l_type) != libc::F_UNLCK
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        // As for the lock: a child forked meanwhile has the same opening.
        if let Err(error) = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_UNLCK))) {
            tracing::warn!(%error, "the wish for a lock of the run directory was not given up");
        }
    }
}

fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_lock_in_a_forked_child_closes_and_unlocks_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = File::create(&path).unwrap();
        file.try_lock().unwrap();
        let mut lock = FileLock::new(file);
        // As its copy in a child, whose process has another number.
        lock.pid = 0;
        assert!(lock.file().is_none());
        drop(lock);
        File::open(&path).unwrap().try_lock().unwrap_err();
    }

    #[test]
    fn a_child_lets_go_of_the_locks_that_are_held_and_of_no_others() {
        static LOCKS: Numbers<LOCKS_MAX> = Numbers::new();
        let dir = tempfile::tempdir().unwrap();
        let open = |name| File::create(dir.path().join(name)).unwrap();
        let again = |name| File::open(dir.path().join(name)).unwrap();
        let [held, given_up] = ["held", "given up"].map(open);
        held.try_lock().unwrap();
        given_up.try_lock().unwrap();
        let noted = LOCKS.note(&held);
        drop(LOCKS.note(&given_up));
        let _its_number_is_closed_by_hand = held.into_raw_fd();
        again("held").try_lock().unwrap_err();
        // As a child of which the parent has ended.
        LOCKS.close_in_child();
        again("held").try_lock().unwrap();
        again("given up").try_lock().unwrap_err();
        drop(noted);
        LOCKS.close_in_child();
        drop(given_up);
    }
}
