//! Locks that this process holds. A forked child closes them: a child that keeps one keeps it locked when this process has
//! been killed.

use std::fs::File;

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
