//! The memory of one GPU that several processes hold together. Each process has a slot, and a rule decides whether it may take
//! more.
//!
//! Only its own process adds to a slot. So the slot of a process that was killed at any instant can be cleared. No stored total
//! could be wrong afterwards: the total is the sum of all slots.
//!
//! To take memory, a process first writes the bytes that it *asks* into its slot. Then it adds up the held and asked bytes of all
//! slots. Two processes that ask simultaneously see each other: both have stored before they load, in one order of all
//! sequentially consistent accesses. So both never pass if only one fits. If neither fits because of the other, the one with the
//! lower slot stays, and the other withdraws and asks again. No process waits for one that has stopped in between: after a
//! bounded number of rounds, its asked bytes count as held.

use sublet_sync::sync::{AtomicU64, Ordering, yield_now};

/// The number of looks of a process while others ask.
const ROUNDS_MAX: u32 = 1000;

/// The memory of one process on one GPU. An unused slot is all zeros.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Slot {
    held_bytes: AtomicU64,
    asked_bytes: AtomicU64,
}

/// The error that the requested bytes do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// The amount that all processes hold, in bytes.
    pub held_bytes: u64,
}

/// The sums that one look at all slots has given, in bytes.
struct SlotTotals {
    held: u64,
    /// Asked by processes with lower slots.
    asked_before: u64,
    /// Asked by all others.
    asked: u64,
}

impl SlotTotals {
    fn by(slots: &[Slot], own: usize) -> Self {
        let mut seen = Self { held: 0, asked_before: 0, asked: 0 };
        for (index, slot) in slots.iter().enumerate() {
            if index != own {
                // The loads have this order: a process adds to its held bytes before it clears its asked bytes, so they are seen
                // at least once.
                let asked_bytes = slot.asked_bytes.load(Ordering::SeqCst);
                seen.asked = seen.asked.saturating_add(asked_bytes);
                if index < own {
                    seen.asked_before = seen.asked_before.saturating_add(asked_bytes);
                }
            }
            seen.held = seen.held.saturating_add(slot.held_bytes.load(Ordering::SeqCst));
        }
        seen
    }
}

/// Takes `size_bytes` for the process of slot `own`, if all processes then hold no more than `budget_bytes`. Only one thread of a
/// process may call this at a time.
///
/// # Errors
/// [`Full`]; nothing is taken.
pub fn take(slots: &[Slot], own: usize, size_bytes: u64, budget_bytes: u64) -> Result<(), Full> {
    let Some(mine) = slots.get(own) else {
        return Err(Full { held_bytes: 0 });
    };
    let mut held_bytes = 0;
    for _ in 0..ROUNDS_MAX {
        mine.asked_bytes.store(size_bytes, Ordering::SeqCst);
        let seen = SlotTotals::by(slots, own);
        let fits = |others_bytes: u64| {
            let all = seen.held.checked_add(others_bytes);
            all.and_then(|all| all.checked_add(size_bytes)).is_some_and(|all| all <= budget_bytes)
        };
        if fits(seen.asked) {
            mine.held_bytes.fetch_add(size_bytes, Ordering::SeqCst);
            mine.asked_bytes.store(0, Ordering::SeqCst);
            return Ok(());
        }
        if !fits(seen.asked_before) {
            mine.asked_bytes.store(0, Ordering::SeqCst);
        }
        if !fits(0) {
            return Err(Full { held_bytes: seen.held });
        }
        held_bytes = seen.held.saturating_add(seen.asked);
        yield_now();
    }
    mine.asked_bytes.store(0, Ordering::SeqCst);
    Err(Full { held_bytes })
}

/// Takes `size_bytes` for the process of slot `own`, whether it fits or not.
pub fn take_anyway(slots: &[Slot], own: usize, size_bytes: u64) {
    if let Some(slot) = slots.get(own) {
        slot.held_bytes.fetch_add(size_bytes, Ordering::SeqCst);
    }
}

/// Returns bytes that the process of slot `own` has taken.
pub fn give_back(slots: &[Slot], own: usize, size_bytes: u64) {
    if let Some(slot) = slots.get(own) {
        // The difference is negative only if another process has taken this one for dead. It must not wrap to a huge amount.
        let less = |held: u64| Some(held.saturating_sub(size_bytes));
        let _before = slot.held_bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Adds up the bytes that all processes hold.
pub fn held_bytes(slots: &[Slot]) -> u64 {
    let each = slots.iter().map(|slot| slot.held_bytes.load(Ordering::SeqCst));
    each.fold(0, u64::saturating_add)
}

/// Is anything held or asked in this slot?
pub fn is_used(slot: &Slot) -> bool {
    slot.held_bytes.load(Ordering::SeqCst) > 0 || slot.asked_bytes.load(Ordering::SeqCst) > 0
}

/// Clears the slot of a process that has ended.
pub fn clear(slot: &Slot) {
    slot.asked_bytes.store(0, Ordering::SeqCst);
    slot.held_bytes.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(count: usize) -> Vec<Slot> {
        (0..count).map(|_| Slot::default()).collect()
    }

    #[test]
    fn all_slots_together_hold_no_more_than_the_budget_to_the_byte() {
        let slots = slots(3);
        take(&slots, 0, 60, 100).unwrap();
        take(&slots, 2, 40, 100).unwrap();
        assert_eq!(take(&slots, 1, 1, 100), Err(Full { held_bytes: 100 }));
        give_back(&slots, 2, 1);
        take(&slots, 1, 1, 100).unwrap();
        assert_eq!(held_bytes(&slots), 100);
        assert_eq!(take(&slots, 1, u64::MAX, 100), Err(Full { held_bytes: 100 }));
        assert_eq!(take(&slots, 7, 1, 100), Err(Full { held_bytes: 0 }), "no such slot");
    }

    #[test]
    fn what_is_taken_anyway_counts_and_what_is_forgotten_does_not() {
        let slots = slots(2);
        take_anyway(&slots, 0, 150);
        assert_eq!(take(&slots, 1, 1, 100), Err(Full { held_bytes: 150 }));
        assert!(is_used(&slots[0]) && !is_used(&slots[1]));
        clear(&slots[0]);
        take(&slots, 1, 100, 100).unwrap();
        give_back(&slots, 0, 10);
        assert_eq!(held_bytes(&slots), 100, "one that was taken for dead has nothing to give");
    }

    #[test]
    fn one_that_stands_still_while_it_asks_is_not_waited_for() {
        let slots = slots(2);
        slots[0].asked_bytes.store(60, Ordering::SeqCst);
        assert_eq!(take(&slots, 1, 60, 100), Err(Full { held_bytes: 60 }));
        assert!(!is_used(&slots[1]));
        take(&slots, 1, 40, 100).unwrap();
    }

    #[test]
    fn threads_that_take_and_give_at_once_never_exceed_and_always_one_passes() {
        const TAKERS: usize = 4;
        const TURNS: usize = 20_000;
        let slots = slots(TAKERS);
        let barrier = std::sync::Barrier::new(TAKERS);
        let passed: Vec<u64> = std::thread::scope(|scope| {
            let take_turns = |own: usize| {
                let (slots, barrier) = (&slots, &barrier);
                move || {
                    let mut random = own as u64;
                    barrier.wait();
                    let mut passed = 0;
                    for _ in 0..TURNS {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let bytes = 1 + (random >> 33) % 60;
                        if take(slots, own, bytes, 100).is_ok() {
                            passed += 1;
                            assert!(held_bytes(slots) <= 100);
                            give_back(slots, own, bytes);
                        }
                    }
                    passed
                }
            };
            let takers: Vec<_> = (0..TAKERS).map(|own| scope.spawn(take_turns(own))).collect();
            takers.into_iter().map(|taker| taker.join().unwrap()).collect()
        });
        assert_eq!(held_bytes(&slots), 0);
        assert!(slots.iter().all(|slot| !is_used(slot)));
        assert!(passed.iter().all(|passed| *passed > 0), "{passed:?}");
    }
}
