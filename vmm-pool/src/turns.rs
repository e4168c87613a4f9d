//! Turns between processes that pin host memory.
//!
//! The driver pins for one process of a machine at a time and loses by being asked by several: four
//! processes at once got 29 GB/s in all, the same four in turn 67 GB/s (measured, driver 580, memory
//! touched before). A turn is the lock of a file that the processes share. It is a courtesy, not a
//! promise: whoever waits too long, because the holder was stopped, goes ahead without it.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A pin of 256 MiB takes 4 to 10 ms alone; with 64 processes before us, this is still enough.
const PATIENCE: Duration = Duration::from_millis(500);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Where turns are taken.
#[derive(Debug, Default)]
pub struct PinTurns(Option<File>);

/// A turn. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a File);

impl PinTurns {
    /// Turns by the lock of `file`, which the processes that take turns have each opened.
    pub fn by(file: File) -> Self {
        Self(Some(file))
    }

    /// Waits for a turn. `None` when there is nobody to take turns with, or patience has ended.
    pub(crate) fn take(&self) -> Option<Turn<'_>> {
        self.take_unless(&AtomicBool::new(false))
    }

    /// As [`PinTurns::take`]; also `None` as soon as `called_off` is set.
    pub(crate) fn take_unless(&self, called_off: &AtomicBool) -> Option<Turn<'_>> {
        let file = self.0.as_ref()?;
        let began = Instant::now();
        while !called_off.load(Ordering::Acquire) {
            match file.try_lock() {
                Ok(()) => return Some(Turn(file)),
                Err(std::fs::TryLockError::WouldBlock) if began.elapsed() < PATIENCE => look_away(),
                Err(error) => {
                    tracing::debug!(%error, "pinning without a turn");
                    return None;
                }
            }
        }
        None
    }
}

#[expect(clippy::disallowed_methods, reason = "the kernel offers no file lock with a deadline")]
fn look_away() {
    std::thread::sleep(LOOK_EVERY);
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.unlock() {
            tracing::warn!(%error, "a turn at pinning was not given up");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened_twice() -> (tempfile::NamedTempFile, PinTurns, PinTurns) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || PinTurns::by(File::open(file.path()).unwrap());
        let (one, other) = (open(), open());
        (file, one, other)
    }

    #[test]
    fn a_turn_is_had_by_one_at_a_time() {
        let (_file, one, other) = opened_twice();
        let turn = one.take().expect("nobody has it");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| other.take().is_some());
            assert!(other.0.as_ref().unwrap().try_lock().is_err(), "both have it");
            drop(turn);
            assert!(waiter.join().unwrap(), "the turn was given up and not had");
        });
    }

    #[test]
    fn a_holder_that_never_ends_is_not_waited_for_for_ever() {
        let (_file, one, other) = opened_twice();
        let _turn = one.take().expect("nobody has it");
        let began = Instant::now();
        assert!(other.take().is_none());
        assert!(began.elapsed() >= PATIENCE);
    }

    #[test]
    fn a_waiter_that_is_called_off_goes_at_once() {
        let (_file, one, other) = opened_twice();
        let _turn = one.take().expect("nobody has it");
        assert!(other.take_unless(&AtomicBool::new(true)).is_none());
        let called_off = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| other.take_unless(&called_off).is_some());
            called_off.store(true, Ordering::Release);
            assert!(!waiter.join().unwrap());
        });
    }

    #[test]
    fn alone_there_are_no_turns() {
        assert!(PinTurns::default().take().is_none());
    }
}
