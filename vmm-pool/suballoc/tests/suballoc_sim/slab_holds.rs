//! Addresses of slabs that callers keep, while a slab is away, or its driver calls fail.

use std::time::{Duration, Instant};

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{Known, PoolError, PoolResult, VirtualHandle};

use crate::slabbed::{
    SLAB_BYTES, allocate, assert_nothing_left, create, free, free_range, is_clear, nccl,
    reserved_range, slabbed,
};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, SimPool, UNIT, UNLIMITED, WHOLE, free_bytes, holds, node, pattern,
    pause_tags, resume, resume_tags, write,
};

/// A time that is long enough for a thread to reach a call.
const SOON: Duration = Duration::from_secs(10);

fn unmap(pool: &SimPool, range: VaRange) {
    pool.front().unmap(&pool.enter_giving_up(), range).expect("unmapped");
}

fn release(pool: &SimPool, handle: VirtualHandle) -> PoolResult<()> {
    pool.front().release(&pool.enter_giving_up(), handle)
}

fn map(pool: &SimPool, range: VaRange, handle: VirtualHandle) -> PoolResult<()> {
    pool.front().map(&pool.enter(), range, 0, handle)
}

fn alone(pool: &SimPool) -> VirtualHandle {
    pool.create(UNIT, &AllocationProp::pinned_on(DEVICE), nccl()).expect("memory")
}

fn is_clear_and_readable(pool: &SimPool, range: VaRange) -> bool {
    pool.front()
        .set_access(&pool.enter(), range, &[AccessDesc::read_write(DEVICE)])
        .expect("access");
    is_clear(pool, DEVICE, range)
}

/// Makes a slab that is given out whole, with addresses that a caller keeps with nothing mapped.
fn full_slab(pool: &SimPool) -> (VaRange, VaRange) {
    let (_, kept) = allocate(pool, 7);
    let (handle, spot) = allocate(pool, 1);
    write(pool, DEVICE, spot, pattern(1));
    unmap(pool, spot);
    release(pool, handle).expect("released");
    (kept, spot)
}

#[test]
fn nothing_comes_to_addresses_of_a_slab_that_is_set_aside() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    pause_tags(&pool, &["nccl"]);
    let handle = create(&pool, 1).expect("memory");
    let error = map(&pool, spot, handle).expect_err("set aside");
    assert!(matches!(error, PoolError::Offloaded { .. }), "{error}");
    resume_tags(&pool, &["nccl"]);
    map(&pool, spot, handle).expect("it is back");
    assert!(is_clear_and_readable(&pool, spot));
    for range in [kept, spot] {
        free(&pool, range);
    }
    assert_nothing_left(&pool);
}

#[test]
fn addresses_that_could_not_be_cleared_are_cleared_the_next_time() {
    for op in [DriverOp::StreamCreate, DriverOp::Fill, DriverOp::StreamSynchronize] {
        let pool = slabbed(&node());
        let (kept, spot) = full_slab(&pool);
        let handle = create(&pool, 1).expect("memory");
        pool.driver().faults().fail(op, FaultSpan::Nth(1), DriverCode::UNKNOWN);
        map(&pool, spot, handle).expect_err("not cleared");
        map(&pool, spot, handle).expect("cleared");
        assert!(is_clear_and_readable(&pool, spot), "{op:?}");
        for range in [kept, spot] {
            free(&pool, range);
        }
        assert_nothing_left(&pool);
    }
}

#[test]
fn a_slab_stays_while_a_cell_comes_to_it() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let handle = create(&pool, 1).expect("memory");
    let hold = pool.driver().faults().hold(DriverOp::Fill);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| map(&pool, spot, handle));
        assert!(hold.is_met(SOON), "nothing is cleared");
        free(&pool, kept);
        drop(hold);
        mapping.join().expect("it ends").expect("mapped");
    });
    assert!(is_clear_and_readable(&pool, spot));
    free(&pool, spot);
    assert_nothing_left(&pool);
}

#[test]
fn addresses_that_the_driver_would_not_clear_keep_nobody_waiting() {
    for is_alone in [false, true] {
        let pool = slabbed(&node());
        let (handle, spot) = allocate(&pool, 1);
        let faults = pool.driver().faults();
        faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
        unmap(&pool, spot);
        release(&pool, handle).expect("released");
        let next = if is_alone { alone(&pool) } else { create(&pool, 1).expect("memory") };
        let began = Instant::now();
        let error = map(&pool, spot, next).expect_err("the old slab is there");
        assert_eq!(error.code(), Some(DriverCode::NOT_READY), "{error}");
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        faults.clear();
        map(&pool, spot, next).expect("it is tried again");
        assert!(is_clear_and_readable(&pool, spot));
        free(&pool, spot);
        assert_nothing_left(&pool);
    }
}

#[test]
fn the_driver_answers_for_addresses_that_nothing_is_mapped_at() {
    let pool = slabbed(&node());
    let (_, kept) = allocate(&pool, 1);
    let start = pool.front().take_addresses(&pool.enter(), 2 * UNIT, 0, "nccl").expect("a room");
    assert_eq!(pool.who_answers(start), Known::Elsewhere, "they are reserved");
    assert_eq!(reserved_range(&pool, start), Some(VaRange::new(start, 2 * UNIT)));
    let behind = DeviceAddress(start.0 + 2 * UNIT);
    assert_eq!(pool.who_answers(behind), Known::Nobody, "the caller has not reserved them");
    free_range(&pool, VaRange::new(start, 2 * UNIT));
    free(&pool, kept);
    assert_nothing_left(&pool);
}

#[test]
fn addresses_that_are_kept_take_new_memory_where_no_slab_is_made_for_it() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    pool.slabs().use_slabs(false);
    let handle = create(&pool, 1).expect("memory");
    map(&pool, spot, handle).expect("mapped");
    assert!(is_clear_and_readable(&pool, spot));
    for range in [kept, spot] {
        free(&pool, range);
    }
    assert_nothing_left(&pool);
    pool.slabs().use_slabs(true);
    let (kept, spot) = full_slab(&pool);
    let left = free_bytes(&pool, DEVICE);
    let hog = pool.create(left, &AllocationProp::pinned_on(DEVICE), nccl()).expect("memory");
    let handle = create(&pool, 1).expect("the bytes are there");
    map(&pool, spot, handle).expect("mapped");
    assert!(is_clear_and_readable(&pool, spot));
    pool.release(hog).expect("released");
    for range in [kept, spot] {
        free(&pool, range);
    }
    assert_nothing_left(&pool);
}

#[test]
fn addresses_of_a_slab_that_is_set_aside_give_no_memory() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    pool.slabs().use_slabs(false);
    pause_tags(&pool, &["nccl"]);
    let handle = create(&pool, 1).expect("memory");
    assert_eq!(pool.report().slabs.cells, 1, "it stands alone");
    release(&pool, handle).expect("released");
    resume_tags(&pool, &["nccl"]);
    free(&pool, kept);
    free_range(&pool, spot);
    assert_nothing_left(&pool);
}

#[test]
fn a_pinned_cell_keeps_its_slab_in_place() {
    let pool = slabbed(&node());
    let (_, first) = allocate(&pool, 1);
    let (_, second) = allocate(&pool, 1);
    write(&pool, DEVICE, first, pattern(1));
    assert_eq!(pool.pin(second, "a card"), SLAB_BYTES);
    pool.save(&WHOLE, UNLIMITED).expect("saved");
    pool.release_selected().expect("released");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - SLAB_BYTES);
    resume(&pool);
    assert!(holds(&pool, DEVICE, first, pattern(1)));
}
