//! The numbers of locks that this process holds, for a forked child to close: a child that keeps one keeps it locked when
//! this process has been killed.

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Stands where there is no lock.
const NONE: RawFd = -1;
/// Threads of one process that pause or resume at once; more are not noted.
const LOCKS_MAX: usize = 16;

/// Numbers of locked files. No lock: a fork may come at any instant, on any thread.
#[derive(Debug)]
pub(crate) struct Locks([AtomicI32; LOCKS_MAX]);

/// Those of this process.
pub(crate) static HELD: Locks = Locks::new();

/// A lock that a child would close. Dropped before the file is: its number may then become another's.
#[derive(Debug)]
pub(crate) struct Noted(Option<&'static AtomicI32>);

impl Locks {
    const fn new() -> Self {
        Self([const { AtomicI32::new(NONE) }; LOCKS_MAX])
    }

    /// Notes the number of `file`.
    pub(crate) fn note(&'static self, file: &File) -> Noted {
        let order = Ordering::Relaxed;
        let takes =
            |held: &&AtomicI32| held.compare_exchange(NONE, file.as_raw_fd(), order, order).is_ok();
        Noted(self.0.iter().find(takes))
    }

    /// Closes them all, in a forked child: there, no thread has any further use for them.
    pub(crate) fn close_in_child(&self) {
        for held in &self.0 {
            let file = held.swap(NONE, Ordering::Relaxed);
            if file != NONE {
                // It was open at the fork, and this is the only thread.
                let _closed = nix::unistd::close(file);
            }
        }
    }
}

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

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(held) = self.0 {
            held.store(NONE, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    fn a_child_lets_go_of_the_locks_that_are_held_and_of_no_others() {
        static LOCKS: Locks = Locks::new();
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
