//! Calls that ask the driver if work is over, or wait for it: `cuStreamQuery`, `cuEventSynchronize`, `cuCtxSynchronize` and their like.
//!
//! They touch no memory of the pool, so a pause lets them pass. But driver 580.159 ends the process (SIGSEGV in libcuda) if a thread makes one
//! while the process's contexts are off the device: the lock of `cuCheckpointProcessLock` does not hold them back, as it does launches and
//! copies (`gpu-tests/deep_calls.py`). So these calls pass a door of their own, which is shut while the process is frozen.
//!
//! Lock order: `turn` is a leaf, and never held over a driver call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use sublet_sync::slots::{Lease, Seat, Slots, Threads, Visit};
use sublet_sync::sync::{AtomicU8, Condvar, Mutex, Ordering, PoisonError, thread_local};

thread_local! {
    static SEAT: Cell<Seat> = const { Cell::new(Seat::None) };
    static LEASE: Lease = const { Lease::new() };
}

const HERE: Threads = Threads { seat: &SEAT, lease: &LEASE };

/// Between two looks of a thread that nobody wakes: the one that shuts the door, and a signal handler that finds it shut.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The door of one process. There is one a process: threads keep one slot each.
#[derive(Debug, Default)]
pub struct Door {
    /// Not 0 while it is shut.
    shut: AtomicU8,
    slots: Slots,
    turn: Mutex<()>,
    changed: Condvar,
}

/// A call that is past the door, until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it says that the call is over"]
pub struct Asking<'a> {
    /// None within another call of the thread.
    visit: Option<Visit>,
    /// The thread that goes in comes out: the slot is its own.
    _of: PhantomData<(&'a Door, *const ())>,
}

impl Door {
    /// Waits as long as the door is shut. Costs one look-up of thread-local storage and one atomic addition otherwise.
    #[inline]
    pub fn pass(&self) -> Asking<'_> {
        let visit = HERE.come(&self.slots);
        match &visit {
            Some(visit) => {
                visit.slot.step_in();
                if self.is_shut() {
                    self.wait(visit);
                }
            }
            None => self.pass_within(),
        }
        Asking { visit, _of: PhantomData }
    }

    #[inline]
    fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst) != 0
    }

    /// Waits outside.
    #[cold]
    fn wait(&self, visit: &Visit) {
        while self.is_shut() {
            // Calls that a signal handler makes while it waits are part of this one.
            SEAT.set(Seat::Coming);
            visit.slot.step_out();
            let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            while self.is_shut() {
                turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
            }
            drop(turn);
            SEAT.set(Seat::Taken(visit.slot));
            visit.slot.step_in();
        }
    }

    /// A signal handler's call within another. One that is past the door is waited for; one that waits is not, and may have the lock.
    fn pass_within(&self) {
        while matches!(SEAT.get(), Seat::Coming) && self.is_shut() {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Shuts it, and waits at most for `timeout` until all are out.
    ///
    /// # Errors
    /// The number of calls that are still under way; the door is open again.
    pub(crate) fn shut(&self, timeout: Duration) -> Result<(), usize> {
        let end = Instant::now() + timeout;
        self.shut.store(1, Ordering::SeqCst);
        loop {
            // No lock: a thread may hold one whose signal handler waits for the door.
            let inside = self.slots.count_inside();
            if inside == Some(0) {
                return Ok(());
            }
            if Instant::now() >= end {
                self.open();
                return Err(inside.unwrap_or(1));
            }
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Lets all pass.
    pub(crate) fn open(&self) {
        self.shut.store(0, Ordering::SeqCst);
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.notify_all();
    }
}

impl Drop for Asking<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(visit) = &self.visit {
            visit.slot.step_out();
            HERE.go(visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_shut_door_holds_calls_back_until_it_opens() {
        let door = Door::default();
        drop(door.pass());
        door.shut(Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let (tell, told) = mpsc::channel();
            let door = &door;
            scope.spawn(move || {
                let _asking = door.pass();
                tell.send(door.is_shut()).unwrap();
            });
            // It has come, and waits.
            while door.slots.numbers().len() < 2 {
                thread::yield_now();
            }
            assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
            door.open();
            assert!(!told.recv_timeout(Duration::from_mins(1)).unwrap(), "it passed an open door");
        });
    }

    #[test]
    fn a_call_under_way_keeps_the_door_from_shutting() {
        let door = Door::default();
        let asking = door.pass();
        // Part of the first.
        drop(door.pass());
        assert_eq!(door.shut(Duration::ZERO), Err(1));
        drop(asking);
        door.shut(Duration::ZERO).unwrap();
        door.open();
        drop(door.pass());
    }
}
