//! First pauses, whose contents reach the host through a ring of slots, and what comes right after them.

use proptest::prelude::*;
use proptest::test_runner::Config;
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceOrdinal, DriverCode, DriverOp, VaRange};
use vmm_pool::{HostBudget, PoolError, Staging};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, STAGING, SimPool, UNIT, UNLIMITED, create, free_bytes, holds,
    kept, map, node, pattern, pause, pool, pool_that_pins_behind, resume, write,
};

const EVENT_CALLS: [DriverOp; 4] = [
    DriverOp::EventCreate,
    DriverOp::EventDestroy,
    DriverOp::EventRecord,
    DriverOp::EventSynchronize,
];

/// Memory of a pool, each with a pattern of its own.
struct Filled {
    pool: SimPool,
    places: Vec<(DeviceOrdinal, VaRange)>,
}

impl Filled {
    fn new(pool: SimPool, memories: &[(DeviceOrdinal, u64)]) -> Self {
        let mut filled = Self { pool, places: Vec::new() };
        filled.add(memories);
        filled
    }

    fn add(&mut self, memories: &[(DeviceOrdinal, u64)]) {
        for &(device, units) in memories {
            let handle = create(&self.pool, device, units, kept());
            let rights = [AccessDesc::read_write(device)];
            self.places.push((device, map(&self.pool, handle, units * UNIT, &rights)));
        }
        self.write(0);
    }

    /// Every 16 bytes of every place are its own in this round.
    fn write(&self, round: u64) {
        for (seed, &(device, place)) in (0..).zip(&self.places) {
            for unit in 0..place.size_bytes / UNIT {
                let start = vmm_pool::driver::DeviceAddress(place.start.0 + unit * UNIT);
                let seed = round * 1_000_000 + seed * 1000 + unit;
                write(&self.pool, device, VaRange::new(start, UNIT), pattern(seed));
            }
        }
    }

    fn assert_holds(&self, round: u64) {
        for (seed, &(device, place)) in (0..).zip(&self.places) {
            for unit in 0..place.size_bytes / UNIT {
                let start = vmm_pool::driver::DeviceAddress(place.start.0 + unit * UNIT);
                let bytes = pattern(round * 1_000_000 + seed * 1000 + unit);
                let part = VaRange::new(start, UNIT);
                assert!(holds(&self.pool, device, part, bytes), "unit {unit} of {place:?}");
            }
        }
    }

    fn calls(&self, op: DriverOp) -> u64 {
        self.pool.driver().faults().calls(op)
    }

    fn pinned_bytes(&self) -> u64 {
        self.pool.report().host_pinned_bytes
    }

    fn saved_bytes(&self) -> u64 {
        self.places.iter().map(|(_, place)| place.size_bytes).sum()
    }

    /// Chunks that hold its contents.
    fn chunks(&self) -> u64 {
        self.saved_bytes().div_ceil(STAGING.chunk_bytes)
    }
}

/// Both devices, sizes that leave every boundary somewhere else.
fn two_devices() -> Vec<(DeviceOrdinal, u64)> {
    vec![(DEVICE, 3), (OTHER, 1), (DEVICE, 1), (OTHER, 3), (DEVICE, 1)]
}

#[test]
fn a_first_pause_goes_through_the_ring_and_pins_no_more_than_that() {
    let filled = Filled::new(pool(&node()), &two_devices());
    pause(&filled.pool);
    assert_eq!(filled.calls(DriverOp::HostRegister), 1, "the ring's chunk");
    assert_eq!(filled.pinned_bytes(), STAGING.chunk_bytes);
    assert_eq!(filled.pool.report().host_arena_bytes, filled.chunks() * STAGING.chunk_bytes);
    assert!(filled.calls(DriverOp::EventRecord) >= filled.saved_bytes() / STAGING.chunk_bytes);
    assert_eq!(filled.pool.driver().census().events, 0, "no event is left");
    assert_eq!(free_bytes(&filled.pool, DEVICE), CAPACITY_BYTES);
    resume(&filled.pool);
    filled.assert_holds(0);
    assert_eq!(filled.calls(DriverOp::HostRegister), filled.chunks(), "pinned when needed, once");
}

#[test]
fn a_second_pause_goes_straight() {
    let filled = Filled::new(pool(&node()), &two_devices());
    pause(&filled.pool);
    resume(&filled.pool);
    let before: Vec<u64> = EVENT_CALLS.iter().map(|&op| filled.calls(op)).collect();
    filled.write(1);
    pause(&filled.pool);
    resume(&filled.pool);
    filled.assert_holds(1);
    let after: Vec<u64> = EVENT_CALLS.iter().map(|&op| filled.calls(op)).collect();
    assert_eq!(before, after, "the ring was not wanted");
    assert_eq!(filled.calls(DriverOp::HostRegister), filled.chunks());
}

#[test]
fn a_pause_that_needs_more_uses_the_ring_for_what_is_new() {
    let mut filled = Filled::new(pool(&node()), &two_devices());
    pause(&filled.pool);
    resume(&filled.pool);
    let pinned = filled.chunks();
    filled.add(&[(OTHER, 7), (DEVICE, 4)]);
    filled.write(2);
    let records = filled.calls(DriverOp::EventRecord);
    pause(&filled.pool);
    assert!(filled.calls(DriverOp::EventRecord) > records);
    assert_eq!(filled.calls(DriverOp::HostRegister), pinned + 1);
    resume(&filled.pool);
    filled.assert_holds(2);
}

#[test]
fn one_chunk_more_needs_no_ring() {
    let filled = Filled::new(pool(&node()), &[(DEVICE, 1)]);
    pause(&filled.pool);
    assert_eq!(filled.calls(DriverOp::EventRecord), 0);
    assert_eq!(filled.pinned_bytes(), STAGING.chunk_bytes);
    resume(&filled.pool);
    filled.assert_holds(0);
}

#[test]
fn memory_is_pinned_behind_the_pause() {
    let filled = Filled::new(pool_that_pins_behind(&node()), &two_devices());
    pause(&filled.pool);
    filled.pool.finish_pinning();
    assert_eq!(filled.pinned_bytes(), filled.chunks() * STAGING.chunk_bytes);
    resume(&filled.pool);
    filled.assert_holds(0);
    assert_eq!(filled.calls(DriverOp::HostRegister), filled.chunks(), "each once");
}

#[test]
fn a_resume_comes_between_and_pins_the_rest_itself() {
    for round in 0..5 {
        let filled = Filled::new(pool_that_pins_behind(&node()), &two_devices());
        filled.write(round);
        pause(&filled.pool);
        resume(&filled.pool);
        filled.assert_holds(round);
        assert_eq!(filled.calls(DriverOp::HostRegister), filled.chunks(), "each once");
        assert_eq!(filled.pinned_bytes(), filled.chunks() * STAGING.chunk_bytes);
    }
}

#[test]
fn a_pool_may_go_while_its_memory_is_pinned() {
    for _ in 0..5 {
        let filled = Filled::new(pool_that_pins_behind(&node()), &two_devices());
        pause(&filled.pool);
        let driver = std::sync::Arc::clone(filled.pool.driver());
        drop(filled);
        let faults = driver.faults();
        let [pinned, unpinned] =
            [DriverOp::HostRegister, DriverOp::HostUnregister].map(|op| faults.calls(op));
        assert_eq!(pinned, unpinned, "nothing stays pinned");
    }
}

#[test]
fn stopping_is_enough_at_the_end_of_a_process() {
    let filled = Filled::new(pool_that_pins_behind(&node()), &two_devices());
    pause(&filled.pool);
    filled.pool.stop_pinning();
    let pinned = filled.calls(DriverOp::HostRegister);
    filled.pool.finish_pinning();
    assert_eq!(filled.calls(DriverOp::HostRegister), pinned, "nobody pins any more");
    resume(&filled.pool);
    filled.assert_holds(0);
}

#[test]
fn memory_that_cannot_be_pinned_is_restored_all_the_same() {
    for behind in [false, true] {
        let node = node();
        let pool = if behind { pool_that_pins_behind(&node) } else { pool(&node) };
        let filled = Filled::new(pool, &two_devices());
        let saved = filled.pool.save_and_drop_imports(UNLIMITED).expect("saving");
        assert_eq!(saved.bytes, filled.saved_bytes());
        let faults = filled.pool.driver().faults();
        faults.fail(DriverOp::HostRegister, FaultSpan::From(1), DriverCode::OUT_OF_MEMORY);
        filled.pool.release_own().expect("release");
        filled.pool.finish_pinning();
        filled.pool.create_own().expect("memory");
        let log = filled.pool.restore_own().expect("contents");
        assert_eq!(log.notes.len(), 1, "said once: {:?}", log.notes);
        assert!(log.notes[0].contains("could not be pinned"), "{:?}", log.notes);
        drop(filled.pool.commit_resume());
        filled.assert_holds(0);
        faults.clear();
        filled.write(1);
        pause(&filled.pool);
        resume(&filled.pool);
        filled.assert_holds(1);
    }
}

#[test]
fn a_ring_that_cannot_be_pinned_fails_the_pause_and_nothing_has_changed() {
    let filled = Filled::new(pool(&node()), &two_devices());
    let faults = filled.pool.driver().faults();
    faults.fail(DriverOp::HostRegister, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    let error = filled.pool.save_and_drop_imports(UNLIMITED).expect_err("no ring");
    let PoolError::Driver { source, size_bytes, .. } = error else { panic!("{error}") };
    assert_eq!((source.op, size_bytes), (DriverOp::HostRegister, STAGING.chunk_bytes));
    filled.pool.remount_own().expect("nothing was unmapped");
    drop(filled.pool.commit_resume());
    filled.assert_holds(0);
    faults.clear();
    pause(&filled.pool);
    resume(&filled.pool);
    filled.assert_holds(0);
}

/// A first pause in which calls of `op` in `span` fail, undone, then tried again. Was the fault met?
fn first_pause_with_fault(op: DriverOp, span: FaultSpan) -> bool {
    let filled = Filled::new(pool(&node()), &[(DEVICE, 2), (OTHER, 2)]);
    let faults = filled.pool.driver().faults();
    faults.fail(op, span, DriverCode::UNKNOWN);
    let outcome = filled.pool.save_and_drop_imports(UNLIMITED);
    faults.clear();
    let met = faults.fired() > 0;
    // Only what can be put off may go wrong unnoticed.
    let hidden = met && outcome.is_ok();
    let put_off = filled.pool.driver().census().events > 0 || op == DriverOp::StreamDestroy;
    assert!(!hidden || put_off, "{op} {span:?} was hidden");
    assert!(met || outcome.is_ok(), "{op} {span:?}: {outcome:?}");
    filled.pool.remount_own().unwrap_or_else(|error| panic!("{op} {span:?}: undo: {error}"));
    drop(filled.pool.commit_resume());
    filled.assert_holds(0);
    filled.write(1);
    pause(&filled.pool);
    resume(&filled.pool);
    filled.assert_holds(1);
    assert_eq!(filled.pool.driver().census().events, 0, "{op} {span:?}: an event is left for good");
    met
}

#[test]
fn any_call_of_a_first_pause_may_fail_and_it_is_undone() {
    let mut met = std::collections::BTreeMap::new();
    for &op in DriverOp::ALL {
        for nth in 1.. {
            if !first_pause_with_fault(op, FaultSpan::Nth(nth)) {
                break;
            }
            *met.entry(op).or_insert(0) += 1;
        }
    }
    for op in EVENT_CALLS {
        assert!(met.contains_key(&op), "the ring made no {op}: {met:?}");
    }
    assert!(met[&DriverOp::EventSynchronize] >= 6, "{met:?}");
}

#[test]
fn a_driver_that_goes_on_failing_keeps_nobody_waiting() {
    for op in EVENT_CALLS {
        for nth in [1, 3] {
            first_pause_with_fault(op, FaultSpan::From(nth));
        }
    }
}

#[test]
fn the_ring_is_counted_in_the_budget() {
    let filled = Filled::new(pool(&node()), &two_devices());
    let held = filled.chunks() * STAGING.chunk_bytes;
    let short = HostBudget(Some(held - 1));
    let refused = filled.pool.save_and_drop_imports(short).expect_err("a byte is missing");
    assert!(matches!(refused, PoolError::OutOfHostMemory { .. }), "{refused}");
    filled.pool.save_and_drop_imports(HostBudget(Some(held))).expect("that is all it takes");
    assert_eq!(filled.pool.report().host_arena_bytes, held);
}

proptest! {
    #![proptest_config(Config { cases: 12, max_shrink_iters: 100, ..Config::default() })]

    #[test]
    fn any_sizes_come_back_as_they_went(
        memories in prop::collection::vec((0..2_i32, 1..5_u64), 1..6),
        blocks in prop::collection::vec(1..3 * UNIT, 0..3),
        more in prop::collection::vec((0..2_i32, 1..4_u64), 0..3),
        chunk_pages in 512..4096_u64,
        slot_pages in 3..300_u64,
        copier_threads in 0..5_usize,
        behind in any::<bool>(),
    ) {
        let node = node();
        let stage = if behind { pool_that_pins_behind(&node) } else { pool(&node) };
        let staging = Staging {
            chunk_bytes: chunk_pages * 4096,
            // At least two of them fit into a chunk; they need not be aligned to anything.
            slot_bytes: slot_pages * 3511,
            copier_threads,
            ..if behind { Staging::with_copiers(0) } else { STAGING }
        };
        let on = |list: &[(i32, u64)]| -> Vec<_> {
            list.iter().map(|&(device, units)| (DeviceOrdinal(device), units)).collect()
        };
        let mut filled = Filled::new(stage.staging_by(staging), &on(&memories));
        for size_bytes in blocks {
            let prop = AllocationProp::pinned_on(DEVICE);
            let made = filled.pool.block_allocate(size_bytes, &prop, &[DEVICE], kept());
            let place = VaRange::new(made.expect("a block"), size_bytes.next_multiple_of(UNIT));
            filled.places.push((DEVICE, place));
        }
        filled.write(1);
        for round in 1..4 {
            filled.write(round);
            pause(&filled.pool);
            resume(&filled.pool);
            filled.assert_holds(round);
            if round == 2 {
                filled.add(&on(&more));
            }
        }
        assert_eq!(filled.pool.driver().census().events, 0, "no event is left");
    }
}
