//! Locks that this process holds. A forked child closes them: a child that keeps one keeps it locked when this process has
//! been killed.

use std::fs::File;

use nix::fcntl::{FcntlArg, fcntl};

use crate::descriptors::{Noted, Numbers};

/// Threads of one process that pause or resume at once; more are not noted.
const LOCKS_MAX: usize = 16;

/// Those of this process.
pub(crate) static HELD: Numbers<LOCKS_MAX> = Numbers::new();

/// A lock on a file, held until dropped. A process that dies gives it up.
#[derive(Debug)]
pub(crate) struct FileLock {
    /// Goes before the file does.
    _noted: Noted,
    file: File,
}

impl FileLock {
    /// The lock that this process has just taken on `file`.
    pub(super) fn new(file: File) -> Self {
        Self { _noted: HELD.note(&file), file }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // A child forked meanwhile shares the lock until it closes or unlocks; unlocking ends it for both.
        if let Err(error) = self.file.unlock() {
            tracing::warn!(%error, "a lock of the run directory was not given up");
        }
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
    use std::os::fd::IntoRawFd as _;

    use super::*;

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
