//! Which threads are inside a call, without a lock that they share: each thread marks a slot of its own, and whoever
//! must know reads them all.
//!
//! A thread marks its slot with one sequentially consistent exchange and then loads the mode that says
//! whether it may go in; whoever closes stores the mode, sequentially consistent too, and then looks at
//! the slots. So either the thread sees the new mode and steps out, or the other sees it inside.

use crate::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, fence};

/// One thread's mark. Padded to a cache line of its own, with its neighbour, which is fetched along.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    number: u64,
    /// Odd while inside; each time inside has a value of its own. Written by the owner alone.
    turn: AtomicU64,
    /// What the owner says of itself; for the user of the slots to understand.
    label: AtomicUsize,
}

/// A look at a thread that was inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// Which slot.
    pub number: u64,
    /// Which time inside.
    pub turn: u64,
    /// What it said of itself.
    pub label: usize,
}

impl Slot {
    /// Marks the thread as inside. Only its owner calls it, and only while outside.
    pub fn step_in(&self) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.swap(turn.wrapping_add(1), Ordering::SeqCst);
    }

    /// Takes the mark away. Only its owner calls it, and only while inside.
    pub fn step_out(&self) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn.wrapping_add(1), Ordering::Release);
    }

    /// Which slot.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What the owner said of itself last.
    pub fn label(&self) -> usize {
        self.label.load(Ordering::Relaxed)
    }

    /// Says something of itself.
    pub fn set_label(&self, label: usize) {
        self.label.store(label, Ordering::Relaxed);
    }

    fn occupant(&self) -> Option<Occupant> {
        let turn = self.turn.load(Ordering::SeqCst);
        let inside = turn % 2 == 1;
        inside.then(|| Occupant { number: self.number, turn, label: self.label() })
    }
}

/// The slots of all threads that have ever been inside and still live.
#[derive(Debug, Default)]
pub struct Slots {
    list: Mutex<List>,
}

/// A thread that has ended let go of its slot with a release; that its slot is gone was learnt by relaxed loads.
/// Puts all that it did inside before what the caller does next.
fn after_ended_threads() {
    fence(Ordering::Acquire);
}

#[derive(Debug, Default)]
struct List {
    /// Those of ended threads too, until the next thread comes: nobody else has a reference to these.
    slots: Vec<Arc<Slot>>,
    last_number: u64,
    /// The sum of the turns of slots that were cleared away.
    ended_turns: u64,
}

impl List {
    /// The slots of threads that live at this moment.
    fn living(&self) -> impl Iterator<Item = &Slot> {
        let living = self.slots.iter().filter(|slot| Arc::strong_count(slot) > 1);
        living.map(|slot| &**slot)
    }
}

impl Slots {
    /// A slot for one more thread, which owns it.
    pub fn add(&self) -> Arc<Slot> {
        let mut list = self.list();
        list.last_number += 1;
        let slot = Arc::new(Slot {
            number: list.last_number,
            turn: AtomicU64::new(0),
            label: AtomicUsize::new(0),
        });
        let List { slots, ended_turns, .. } = &mut *list;
        slots.retain(|slot| {
            let lives = Arc::strong_count(slot) > 1;
            after_ended_threads();
            if !lives {
                *ended_turns = ended_turns.wrapping_add(slot.turn.load(Ordering::Relaxed));
            }
            lives
        });
        slots.push(Arc::clone(&slot));
        slot
    }

    /// The numbers of all that live.
    pub fn numbers(&self) -> Vec<u64> {
        self.list().living().map(|slot| slot.number).collect()
    }

    /// A number that changes whenever somebody goes in, comes out, or comes for the first time. It never takes an earlier
    /// value again: the turns of ended threads count too.
    pub fn mark(&self) -> u64 {
        let list = self.list();
        let turns = list.slots.iter().map(|slot| slot.turn.load(Ordering::Relaxed));
        let mark = turns.fold(list.last_number.wrapping_add(list.ended_turns), u64::wrapping_add);
        after_ended_threads();
        mark
    }

    /// Who is inside now.
    pub fn inside(&self) -> Vec<Occupant> {
        let list = self.list();
        let inside = list.living().filter_map(Slot::occupant).collect();
        after_ended_threads();
        inside
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_inside_is_seen_with_its_turn_and_what_it_says_of_itself() {
        let slots = Slots::default();
        let [first, second] = [slots.add(), slots.add()];
        assert!(slots.inside().is_empty());
        second.set_label(7);
        second.step_in();
        assert_eq!(second.label(), 7);
        let seen = slots.inside();
        assert_eq!(seen, [Occupant { number: second.number, turn: 1, label: 7 }]);
        first.step_in();
        assert_eq!(slots.inside().len(), 2);
        assert_ne!(first.number, second.number);
        for slot in [&first, &second] {
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
            step(&slot);
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
        drop(ends);
        marks.push(slots.mark());
        // Clears the slot of the ended thread away.
        let _comes = slots.add();
        marks.push(slots.mark());
        assert!(marks.is_sorted_by(|earlier, later| earlier < later), "{marks:?}");
    }

    #[test]
    fn slots_of_threads_that_have_ended_are_cleared_away() {
        let slots = Slots::default();
        let ended = slots.add();
        ended.step_in();
        drop(ended);
        assert!(slots.inside().is_empty());
        let lives = slots.add();
        assert_eq!(slots.list().slots.len(), 1);
        assert_eq!(slots.numbers(), [lives.number]);
    }
}
