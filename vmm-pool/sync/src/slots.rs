//! Records which threads are inside a call, without a lock that all threads share. Each thread marks a slot of its own.
//! A thread that must know who is inside reads all slots.
//!
//! A thread marks its slot with one sequentially consistent addition, and then loads the mode that says whether it may
//! go in. The thread that closes stores the mode, sequentially consistent too, and then reads the slots. So either the
//! first thread sees the new mode and steps out, or the closing thread sees it inside.

use std::cell::Cell;
use std::fmt;
use std::sync::TryLockError;

use crate::sync::{
    AtomicU8, AtomicU64, AtomicUsize, LocalKey, Mutex, MutexGuard, Ordering, PoisonError,
};

/// One thread's mark. It fills two cache lines of its own, because processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    /// The number of the thread that owns the slot. Written under the list's lock.
    number: AtomicU64,
    /// Odd while the owner is inside. Each stay inside has a value of its own. Only the owner writes it.
    turn: AtomicU64,
    /// A value that the owner sets. The user of the slots defines its meaning.
    label: AtomicUsize,
    /// Not 0 once the owner has ended: the next new thread gets this slot.
    is_free: AtomicU8,
}

/// A thread that was found inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// The number of the slot.
    pub number: u64,
    /// The value of this stay inside: each stay has a value of its own.
    pub turn: u64,
    /// The label that the owner had set.
    pub label: usize,
}

impl Slot {
    /// Marks the thread as inside. Only the owner may call it, and only while outside.
    #[inline]
    pub fn step_in(&self) {
        // Not a load and an exchange: a signal handler may go in and out between the two.
        self.turn.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes the mark. Only the owner may call it, and only while inside.
    #[inline]
    pub fn step_out(&self) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn.wrapping_add(1), Ordering::Release);
    }

    /// Is the owner inside? Only the owner may call it.
    #[inline]
    fn is_marked(&self) -> bool {
        self.turn.load(Ordering::Relaxed) % 2 == 1
    }

    /// Returns the number of the slot's thread. No two threads have the same number, even if one takes over the slot of
    /// a thread that has ended.
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// Returns the label that the owner set last.
    #[inline]
    pub fn label(&self) -> usize {
        self.label.load(Ordering::Relaxed)
    }

    /// Sets the label. Only the owner may call it.
    #[inline]
    pub fn set_label(&self, label: usize) {
        self.label.store(label, Ordering::Relaxed);
    }

    /// Frees the slot: its thread will not use it again.
    fn let_go(&self) {
        self.is_free.store(1, Ordering::Release);
    }

    /// Is the slot free? If so, the caller also sees all that the last owner did inside.
    fn is_free(&self) -> bool {
        self.is_free.load(Ordering::Acquire) != 0
    }

    fn occupant(&self) -> Option<Occupant> {
        let turn = self.turn.load(Ordering::SeqCst);
        let inside = turn % 2 == 1;
        inside.then(|| Occupant { number: self.number(), turn, label: self.label() })
    }
}

/// The state of a thread's slot, as the thread knows it.
#[derive(Clone, Copy, Debug)]
pub enum Seat {
    /// The thread has no slot: it was never inside, or it is ending and has freed its slot.
    None,
    /// The thread has no slot yet, or waits to go in. Calls that a signal handler makes meanwhile are part of the call
    /// that waits.
    Coming,
    /// The thread has this slot.
    Taken(&'static Slot),
}

/// Frees a thread's slot when the thread ends.
#[derive(Default)]
pub struct Lease(Cell<Option<(SeatKey, &'static Slot)>>);

type SeatKey = &'static LocalKey<Cell<Seat>>;

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
    }
}

impl Lease {
    /// Makes a lease of no slot yet.
    pub const fn new() -> Self {
        Self(Cell::new(None))
    }
}

impl Drop for Lease {
    /// Frees the slot. A thread that ends inside a call (a signal handler that calls `exit`) stays inside, and keeps
    /// its slot.
    fn drop(&mut self) {
        if let Some((seat, slot)) = self.0.take()
            && !slot.is_marked()
        {
            let _set = seat.try_with(|seat| seat.set(Seat::None));
            slot.let_go();
        }
    }
}

/// The thread-local storage in which each thread keeps its slot of one [`Slots`]. A call reads it once, when it begins.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// The state of the thread's slot. It has no destructor, so it exists for as long as the thread runs: destructors
    /// make calls too.
    pub seat: SeatKey,
    /// Frees the slot. It has a destructor, which runs when the thread ends.
    pub lease: &'static LocalKey<Lease>,
}

/// The outermost call of the calling thread. It ends with [`Threads::go`].
#[derive(Debug)]
pub struct Visit {
    /// The slot of the calling thread.
    pub slot: &'static Slot,
    /// True if only this call has the slot: the thread is ending, and has freed its own.
    is_last: bool,
}

impl Threads {
    /// Begins a call of the calling thread, which has not marked its slot yet. None if this is within another call of
    /// the same thread.
    #[inline]
    pub fn come(self, slots: &Slots) -> Option<Visit> {
        match self.seat.get() {
            Seat::Taken(slot) => (!slot.is_marked()).then_some(Visit { slot, is_last: false }),
            Seat::Coming => None,
            Seat::None => Some(self.come_first(slots)),
        }
    }

    #[cold]
    fn come_first(self, slots: &Slots) -> Visit {
        // A signal handler that runs meanwhile must not need the list's lock.
        self.seat.set(Seat::Coming);
        let slot = slots.add();
        let leased = self.lease.try_with(|lease| lease.0.set(Some((self.seat, slot))));
        self.seat.set(Seat::Taken(slot));
        Visit { slot, is_last: leased.is_err() }
    }

    /// Is the calling thread inside a call, or does it wait to go in?
    pub fn is_inside(self) -> bool {
        match self.seat.get() {
            Seat::None => false,
            Seat::Coming => true,
            Seat::Taken(slot) => slot.is_marked(),
        }
    }

    /// Returns the label that the calling thread set last.
    pub fn label(self) -> usize {
        match self.seat.get() {
            Seat::None | Seat::Coming => 0,
            Seat::Taken(slot) => slot.label(),
        }
    }

    /// Ends `visit`, which has removed its mark.
    #[inline]
    pub fn go(self, visit: &Visit) {
        if visit.is_last {
            self.seat.set(Seat::None);
            visit.slot.let_go();
        }
    }
}

/// The slots of all threads that have ever been inside. Slots are never freed but reused. So there are as many as
/// threads have lived simultaneously.
#[derive(Debug, Default)]
pub struct Slots {
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    slots: Vec<&'static Slot>,
    last_number: u64,
}

impl List {
    /// Returns the slots of threads that live now.
    fn living(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().copied().filter(|slot| !slot.is_free())
    }
}

impl Slots {
    /// Returns a slot for one more thread, which then owns it.
    fn add(&self) -> &'static Slot {
        let mut list = self.list();
        list.last_number += 1;
        let number = list.last_number;
        if let Some(slot) = list.slots.iter().find(|slot| slot.is_free()) {
            slot.number.store(number, Ordering::Relaxed);
            slot.is_free.store(0, Ordering::Relaxed);
            return slot;
        }
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            number: AtomicU64::new(number),
            turn: AtomicU64::new(0),
            label: AtomicUsize::new(0),
            is_free: AtomicU8::new(0),
        }));
        list.slots.push(slot);
        slot
    }

    /// Returns the numbers of all threads that have a slot and live.
    pub fn numbers(&self) -> Vec<u64> {
        self.list().living().map(Slot::number).collect()
    }

    /// Returns a number that changes whenever a thread goes in, comes out, or gets a slot. It never returns to an
    /// earlier value: a thread that takes over a slot goes on with the slot's turns.
    pub fn mark(&self) -> u64 {
        let list = self.list();
        let turns = list.slots.iter().map(|slot| slot.turn.load(Ordering::Acquire));
        turns.fold(list.last_number, u64::wrapping_add)
    }

    /// Counts the threads that are inside now. Returns `None` if the list is locked, as it is while a thread gets its
    /// slot.
    pub fn count_inside(&self) -> Option<usize> {
        let list = match self.list.try_lock() {
            Ok(list) => list,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(list.living().filter(|slot| slot.occupant().is_some()).count())
    }

    /// Lists the threads that are inside now.
    pub fn inside(&self) -> Vec<Occupant> {
        self.list().living().filter_map(Slot::occupant).collect()
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::thread_local;

    #[test]
    fn who_is_inside_is_seen_with_its_turn_and_what_it_says_of_itself() {
        let slots = Slots::default();
        let [first, second] = [slots.add(), slots.add()];
        assert!(slots.inside().is_empty());
        second.set_label(7);
        second.step_in();
        assert_eq!(second.label(), 7);
        let seen = slots.inside();
        assert_eq!(seen, [Occupant { number: second.number(), turn: 1, label: 7 }]);
        first.step_in();
        assert_eq!(slots.inside().len(), 2);
        assert_ne!(first.number(), second.number());
        for slot in [first, second] {
            slot.step_out();
        }
        assert!(slots.inside().is_empty());
        second.step_in();
        assert_ne!(slots.inside()[0].turn, seen[0].turn, "another time inside");
    }

    #[test]
    fn the_mark_stands_still_while_nobody_goes_in_or_out() {
        let slots = Slots::default();
        let slot = slots.add();
        let mut marks = vec![slots.mark()];
        for step in [Slot::step_in, Slot::step_out] {
            step(slot);
            marks.push(slots.mark());
        }
        let _another = slots.add();
        marks.push(slots.mark());
        assert_eq!(slots.mark(), marks[3]);
        marks.dedup();
        assert_eq!(marks.len(), 4);
    }

    #[test]
    fn the_mark_moves_when_a_call_was_made_and_a_thread_has_ended() {
        let slots = Slots::default();
        let [ends, works] = [slots.add(), slots.add()];
        ends.step_in();
        ends.step_out();
        let mut marks = vec![slots.mark()];
        works.step_in();
        works.step_out();
        ends.let_go();
        marks.push(slots.mark());
        // Takes over the slot of the thread that has ended.
        let comes = slots.add();
        marks.push(slots.mark());
        assert!(std::ptr::eq(comes, ends));
        assert!(marks.is_sorted_by(|earlier, later| earlier < later), "{marks:?}");
    }

    #[test]
    fn a_slot_of_a_thread_that_has_ended_is_the_next_ones_under_another_number() {
        let slots = Slots::default();
        let ended = slots.add();
        let number = ended.number();
        ended.let_go();
        assert!(slots.inside().is_empty());
        assert!(slots.numbers().is_empty());
        let lives = slots.add();
        assert_eq!(slots.list().slots.len(), 1);
        assert_eq!(slots.numbers(), [lives.number()]);
        assert_ne!(lives.number(), number);
        assert_eq!(slots.add().number(), lives.number() + 1);
    }

    thread_local! {
        static SEAT: Cell<Seat> = const { Cell::new(Seat::None) };
        static LEASE: Lease = const { Lease::new() };
    }

    const HERE: Threads = Threads { seat: &SEAT, lease: &LEASE };

    #[test]
    fn a_signal_handler_that_calls_at_any_instant_is_part_of_the_call_or_leaves_it_as_it_was() {
        let slots = Slots::default();
        let handler = || {
            HERE.come(&slots).map(|visit| {
                visit.slot.step_in();
                let inside = slots.inside().len();
                visit.slot.step_out();
                HERE.go(&visit);
                inside
            })
        };
        let visit = HERE.come(&slots).unwrap();
        assert_eq!(handler(), Some(1), "before the mark it is a call of its own");
        assert!(slots.inside().is_empty());
        visit.slot.step_in();
        assert_eq!((handler(), slots.inside().len()), (None, 1));
        visit.slot.step_out();
        assert_eq!((handler(), slots.inside().len()), (Some(1), 0));
        HERE.go(&visit);
        assert!(!HERE.is_inside());
        SEAT.set(Seat::Coming);
        assert_eq!((handler(), HERE.is_inside()), (None, true), "while it waits");
    }
}
