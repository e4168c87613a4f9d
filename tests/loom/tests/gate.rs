//! The gate and its slots in every interleaving of two or three threads.
//!
//! What threads do inside is a read of [`Cell`], what the closer does behind a shut gate is a write: loom reports
//! a race where neither happens before the other. It reports a deadlock where a thread is never woken.
//!
//! Interleavings are bounded: one loop of a thread, a few looks of the closer, and the preemptions that each
//! model names. Each ordering of `gate.rs` and `slots.rs` was weakened by hand to see a model here fail.

use std::cell::Cell as StdCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use sublet_loom::gate::{Gate, Passage, StillInside};
use sublet_loom::{explore, keeper};

/// What a gate protects: its accesses are looked at, it has no contents.
#[derive(Debug, Default)]
struct Memory(UnsafeCell<()>);

impl Memory {
    fn used(&self) {
        self.0.with(|_| ());
    }

    fn taken_away(&self) {
        self.0.with_mut(|_| ());
    }
}

#[derive(Clone, Debug, Default)]
struct World {
    gate: Arc<Gate>,
    device: Arc<Memory>,
    ledger: Arc<Memory>,
}

impl World {
    /// A gate behind which everything has been taken away.
    fn offloaded() -> Self {
        let world = Self::default();
        assert!(world.shut(1).is_ok());
        world.device.taken_away();
        keeper::offload(&world.gate);
        world
    }

    /// A thread that does `work`.
    fn thread(&self, work: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || work(&world))
    }

    fn uses(&self) {
        let pass = self.gate.pass(Passage::Use);
        assert!(!pass.is_offloaded(), "it uses what is away");
        self.device.used();
    }

    /// Gives up memory that is away: the table answers.
    fn gives_up(&self) {
        let pass = self.gate.pass(Passage::GiveUp);
        if pass.is_offloaded() {
            self.ledger.used();
        }
    }

    /// Shuts the gate, or calls it off after as many looks: where a real deadline passes is any of them.
    fn shut(&self, looks: usize) -> Result<(), StillInside> {
        let looked = StdCell::new(0);
        let called_off = || {
            looked.set(looked.get() + 1);
            looked.get() >= looks
        };
        keeper::shut(&self.gate, Instant::now() + Duration::from_hours(1), called_off)
    }
}

#[test]
fn who_shuts_meets_nobody_inside_and_who_waits_is_woken() {
    explore(3, || {
        let world = World::default();
        // The second time the thread has its slot: no lock orders it and the closer.
        let user = world.thread(|world| {
            world.uses();
            world.uses();
        });
        if world.shut(2).is_ok() {
            world.device.taken_away();
            keeper::open(&world.gate);
        }
        user.join().unwrap();
    });
}

#[test]
fn two_threads_are_both_seen() {
    explore(2, || {
        let world = World::default();
        let users = [world.thread(World::uses), world.thread(World::uses)];
        if world.shut(2).is_ok() {
            world.device.taken_away();
            keeper::open(&world.gate);
        }
        for user in users {
            user.join().unwrap();
        }
    });
}

#[test]
fn a_thread_that_ended_is_behind_who_shuts_also_when_another_has_cleared_its_slot_away() {
    explore(2, || {
        let world = World::default();
        let ended = world.thread(World::uses);
        // Its first pass gives it a slot, and takes those of ended threads off the list.
        drop(world.gate.pass(Passage::GiveUp));
        let other = world.clone();
        let closer = thread::spawn(move || {
            if other.shut(1).is_ok() {
                other.device.taken_away();
                keeper::open(&other.gate);
            }
        });
        ended.join().unwrap();
        closer.join().unwrap();
    });
}

#[test]
fn a_shut_that_nobody_calls_off_ends_when_the_thread_is_out() {
    explore(3, || {
        let world = World::default();
        let user = world.thread(World::uses);
        world.shut(usize::MAX).unwrap();
        world.device.taken_away();
        keeper::open(&world.gate);
        user.join().unwrap();
    });
}

#[test]
fn an_offloaded_gate_lets_giving_up_through_and_holds_use_until_it_opens() {
    explore(2, || {
        let world = World::offloaded();
        let user = world.thread(World::uses);
        let giver = world.thread(World::gives_up);
        // Before anything opens.
        giver.join().unwrap();
        world.shut(usize::MAX).unwrap();
        world.device.taken_away();
        world.ledger.taken_away();
        keeper::open(&world.gate);
        user.join().unwrap();
    });
}

#[test]
fn who_gives_up_while_the_gate_is_shut_again_is_waited_for() {
    explore(3, || {
        let world = World::offloaded();
        let giver = world.thread(|world| {
            world.gives_up();
            world.gives_up();
        });
        if world.shut(2).is_ok() {
            world.ledger.taken_away();
            keeper::open(&world.gate);
        }
        giver.join().unwrap();
    });
}

#[test]
fn a_shut_that_is_called_off_leaves_the_gate_offloaded() {
    explore(3, || {
        let world = World::offloaded();
        let giver = world.thread(|world| {
            world.gives_up();
            world.gives_up();
        });
        if world.shut(1).is_ok() {
            keeper::offload(&world.gate);
        }
        assert!(world.gate.pass(Passage::GiveUp).is_offloaded());
        world.device.taken_away();
        // It is let through although nothing opens.
        giver.join().unwrap();
    });
}

#[test]
fn who_gives_up_knows_what_was_true_when_it_went_in_however_the_gate_moves_then() {
    explore(3, || {
        let world = World::offloaded();
        let is_back = Arc::new(AtomicBool::new(false));
        let is_back_for_giver = Arc::clone(&is_back);
        let giver = world.thread(move |world| {
            let pass = world.gate.pass(Passage::GiveUp);
            // Where memory is away nothing brings it back before this thread is out.
            let is_away = || !is_back_for_giver.load(Ordering::Relaxed);
            assert_eq!(pass.is_offloaded(), is_away());
            let inner = world.gate.pass(Passage::GiveUp);
            assert_eq!(inner.is_offloaded(), is_away(), "the outermost one's");
            drop(inner);
            assert_eq!(pass.is_offloaded(), is_away(), "it stays so");
        });
        // A resume: it moves memory when nobody is inside.
        if world.shut(2).is_ok() {
            is_back.store(true, Ordering::Relaxed);
            keeper::open(&world.gate);
        }
        giver.join().unwrap();
    });
}

#[test]
fn a_shut_that_is_called_off_leaves_the_gate_open() {
    explore(3, || {
        let world = World::default();
        let user = world.thread(|world| {
            world.uses();
            world.uses();
        });
        let shut = world.shut(1);
        if shut.is_ok() {
            keeper::open(&world.gate);
        }
        user.join().unwrap();
    });
}

#[test]
fn who_steps_aside_is_out_and_comes_back_in() {
    explore(3, || {
        let world = World::default();
        let user = world.thread(|world| {
            let pass = world.gate.pass(Passage::Use);
            world.device.used();
            pass.step_aside();
            world.device.used();
        });
        if world.shut(2).is_ok() {
            world.device.taken_away();
            keeper::open(&world.gate);
        }
        user.join().unwrap();
    });
}

#[test]
fn within_two_passes_nobody_steps_aside() {
    explore(3, || {
        let world = World::default();
        let user = world.thread(|world| {
            let _outer = world.gate.pass(Passage::Use);
            let inner = world.gate.pass(Passage::GiveUp);
            // A use that lasts.
            world.device.0.with(|_| inner.step_aside());
        });
        if world.shut(2).is_ok() {
            world.device.taken_away();
            keeper::open(&world.gate);
        }
        user.join().unwrap();
    });
}

#[test]
fn who_is_let_in_at_a_shut_gate_is_seen_until_it_is_out_and_waits_for_its_next_call() {
    explore(3, || {
        let world = World::default();
        let user = world.thread(|world| {
            world.uses();
            world.uses();
        });
        keeper::close(&world.gate);
        keeper::step(&world.gate);
        // A thread that is let in once cannot come in again, so memory that is found untouched stays so.
        if keeper::is_clear(&world.gate) {
            world.device.taken_away();
        }
        keeper::open(&world.gate);
        user.join().unwrap();
    });
}
