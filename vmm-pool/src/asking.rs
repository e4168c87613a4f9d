//! A door for calls that ask the driver whether work is over, or wait for it: `cuStreamQuery`, `cuEventSynchronize`,
//! `cuCtxSynchronize` and similar calls.
//!
//! These calls touch no memory of the pool, so a pause lets them pass. But driver 580.159 ends the process (SIGSEGV in
//! libcuda) if a thread makes one while the process's contexts are off the device. The lock of
//! `cuCheckpointProcessLock` blocks launches and copies, but not these calls (`gpu-tests/deep_calls.py`). So they pass
//! a door of their own, which is shut while the process is frozen.
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

/// The interval at which a thread that nobody wakes checks again. Such threads are the one that shuts the door, and a
/// signal handler that finds it shut.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The door of one process. Each process has only one, because threads keep one slot each.
#[derive(Debug, Default)]
pub struct Door {
    /// Not 0 while the door is shut.
    shut: AtomicU8,
    slots: Slots,
    turn: Mutex<()>,
    changed: Condvar,
}

/// A call that has passed the door. The call is over when this value is dropped.
#[derive(Debug)]
#[must_use = "dropping it says that the call is over"]
pub struct Asking<'a> {
    /// None if the call is made within another call of the thread.
    visit: Option<Visit>,
    /// Not `Send`: the thread that goes in must come out, because the slot is its own.
    _of: PhantomData<(&'a Door, *const ())>,
}

impl Door {
    /// Waits while the door is shut. If it is open, a pass costs one look-up of thread-local storage and one atomic
    /// addition.
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

    /// Waits outside the door until it opens.
    #[cold]
    fn wait(&self, visit: &Visit) {
        while self.is_shut() {
            // Calls that a signal handler makes while this call waits are part of this call.
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

    /// Passes a signal handler's call within another call. If the outer call has passed the door, this call passes too.
    /// If the outer call waits outside, this call waits too, without the lock, which the outer call may hold.
    fn pass_within(&self) {
        while matches!(SEAT.get(), Seat::Coming) && self.is_shut() {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Shuts the door, and waits until all calls are out, for at most `timeout`.
    ///
    /// # Errors
    /// The number of calls that are still under way. The door is open again.
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

    /// Opens the door: all calls pass.
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
