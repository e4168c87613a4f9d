//! Cells on their way, with a driver call of the one thread held while another thread does something about the same memory.

use std::time::{Duration, Instant};

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, AllocationProp, DriverCode, DriverOp, VaRange};
use vmm_pool::{Known, PoolError, PoolResult, VirtualHandle};

use crate::slabs::{allocate, assert_nothing_left, create, free, free_range, nccl, slabbed};
use crate::stage::{
    DEVICE, SimPool, UNIT, free_addresses, holds, is_clear, node, pattern, reserve, write,
};
use crate::tags::{pause_tags, resume_tags};

/// Long enough for a thread to come to a call.
const SOON: Duration = Duration::from_secs(10);
/// Long enough for a thread that nothing keeps from it.
const A_WHILE: Duration = Duration::from_millis(300);

/// A slab that is given out, and in it addresses that are kept, with nothing there.
fn full_slab(pool: &SimPool) -> (VaRange, VaRange) {
    let (_, kept) = allocate(pool, 7);
    let (handle, spot) = allocate(pool, 1);
    unmap(pool, spot);
    release(pool, handle).expect("released");
    (kept, spot)
}

/// A cell of another slab that holds the pattern of `seed`, and is mapped nowhere.
fn used_cell(pool: &SimPool, seed: u64) -> (VirtualHandle, VaRange) {
    let (handle, range) = allocate(pool, 1);
    write(pool, DEVICE, range, pattern(seed));
    unmap(pool, range);
    (handle, range)
}

fn unmap(pool: &SimPool, range: VaRange) {
    pool.enter_giving_up().unmap_cells(range).expect("unmapped");
}

fn release(pool: &SimPool, handle: VirtualHandle) -> PoolResult<()> {
    pool.enter_giving_up().release_cell(handle)
}

fn map(pool: &SimPool, range: VaRange, handle: VirtualHandle) -> PoolResult<()> {
    pool.enter().map_cell(range, 0, handle)
}

fn alone(pool: &SimPool) -> VirtualHandle {
    pool.create(UNIT, &AllocationProp::pinned_on(DEVICE), nccl()).expect("memory")
}

fn is_clear_and_readable(pool: &SimPool, range: VaRange) -> bool {
    pool.enter().set_cell_access(range, &[AccessDesc::read_write(DEVICE)]).expect("access");
    is_clear(pool, DEVICE, range)
}

fn is_readable(pool: &SimPool, range: VaRange, bytes: [u8; 16]) -> bool {
    pool.enter().set_cell_access(range, &[AccessDesc::read_write(DEVICE)]).expect("access");
    holds(pool, DEVICE, range, bytes)
}

/// Maps `handle` at `range`, and does `meanwhile` when it has come to `op`.
fn mapped_while(
    pool: &SimPool,
    (range, handle): (VaRange, VirtualHandle),
    op: DriverOp,
    meanwhile: impl FnOnce(),
) -> PoolResult<()> {
    let hold = pool.driver().faults().hold(op);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| map(pool, range, handle));
        assert!(hold.is_met(SOON), "nothing is on its way");
        meanwhile();
        drop(hold);
        mapping.join().expect("it ends")
    })
}

#[test]
fn a_slab_stays_while_a_cell_moves_into_it() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let (handle, before) = used_cell(&pool, 1);
    mapped_while(&pool, (spot, handle), DriverOp::CopyBetween, || free(&pool, kept))
        .expect("mapped");
    assert!(is_readable(&pool, spot, pattern(1)));
    free(&pool, spot);
    free_range(&pool, before);
    assert_nothing_left(&pool);
}

#[test]
fn a_slab_stays_while_an_allocation_is_made_a_cell_of_it() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let handle = alone(&pool);
    mapped_while(&pool, (spot, handle), DriverOp::Fill, || free(&pool, kept)).expect("mapped");
    assert!(is_readable(&pool, spot, [0; 16]));
    free(&pool, spot);
    assert_nothing_left(&pool);
}

#[test]
fn a_slab_ends_that_a_cell_could_not_move_into_and_nobody_has() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let (handle, before) = used_cell(&pool, 1);
    let moved = mapped_while(&pool, (spot, handle), DriverOp::CopyBetween, || {
        free(&pool, kept);
        free_range(&pool, spot);
    });
    assert_eq!(moved.expect_err("nowhere").code(), Some(DriverCode::INVALID_VALUE));
    map(&pool, before, handle).expect("it is where it was");
    assert!(is_readable(&pool, before, pattern(1)));
    free(&pool, before);
    assert_nothing_left(&pool);
}

#[test]
fn a_cell_that_is_released_while_it_moves_is_mapped_and_ends_with_that() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let (handle, before) = used_cell(&pool, 1);
    mapped_while(&pool, (spot, handle), DriverOp::CopyBetween, || {
        release(&pool, handle).expect("released");
        release(&pool, handle).expect_err("once");
    })
    .expect("mapped");
    assert!(is_readable(&pool, spot, pattern(1)));
    unmap(&pool, spot);
    release(&pool, handle).expect_err("gone");
    for range in [before, spot] {
        free_range(&pool, range);
    }
    free(&pool, kept);
    assert_nothing_left(&pool);
}

#[test]
fn a_cell_that_is_released_while_it_comes_to_stand_alone_is_gone() {
    let pool = slabbed(&node());
    let (handle, before) = used_cell(&pool, 1);
    let elsewhere = reserve(&pool, UNIT);
    let copied = mapped_while(&pool, (elsewhere, handle), DriverOp::CopyBetween, || {
        release(&pool, handle).expect("released");
    });
    let error = copied.expect_err("nobody has it");
    assert!(matches!(error, PoolError::StaleHandle { .. }), "{error}");
    assert_eq!(pool.report().slabs.slabs, 0);
    free_range(&pool, before);
    free_addresses(&pool, elsewhere);
    assert_nothing_left(&pool);
}

#[test]
fn an_allocation_that_is_released_while_it_is_made_a_cell_ends_with_the_mapping() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let handle = alone(&pool);
    mapped_while(&pool, (spot, handle), DriverOp::Fill, || {
        release(&pool, handle).expect("released");
    })
    .expect("mapped");
    assert!(is_readable(&pool, spot, [0; 16]));
    unmap(&pool, spot);
    release(&pool, handle).expect_err("gone");
    free_range(&pool, spot);
    free(&pool, kept);
    assert_nothing_left(&pool);
}

#[test]
fn an_allocation_that_is_released_and_could_not_be_made_a_cell_is_gone() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let handle = alone(&pool);
    pool.driver().faults().fail(DriverOp::Fill, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    mapped_while(&pool, (spot, handle), DriverOp::StreamCreate, || {
        release(&pool, handle).expect("released");
    })
    .expect_err("refused");
    release(&pool, handle).expect_err("gone");
    free_range(&pool, spot);
    free(&pool, kept);
    assert_nothing_left(&pool);
}

#[test]
fn addresses_that_a_cell_is_on_its_way_to_take_no_other() {
    let pool = slabbed(&node());
    let (kept, spot) = full_slab(&pool);
    let (first, of_first) = used_cell(&pool, 1);
    let (second, of_second) = used_cell(&pool, 2);
    std::thread::scope(|scope| {
        let mut other = None;
        mapped_while(&pool, (spot, first), DriverOp::CopyBetween, || {
            let next = pool.driver().faults().hold(DriverOp::CopyBetween);
            other = Some(scope.spawn(|| map(&pool, spot, second)));
            assert!(!next.is_met(A_WHILE), "both are copied to one place");
        })
        .expect("mapped");
        let refused = other.expect("begun").join().expect("it ends").expect_err("taken");
        assert_eq!(refused.code(), Some(DriverCode::INVALID_VALUE));
    });
    assert!(is_readable(&pool, spot, pattern(1)));
    map(&pool, of_second, second).expect("where it was");
    assert!(is_readable(&pool, of_second, pattern(2)));
    for range in [kept, spot, of_second] {
        free(&pool, range);
    }
    free_range(&pool, of_first);
    assert_nothing_left(&pool);
}

#[test]
fn nothing_is_brought_to_addresses_of_a_slab_that_is_set_aside() {
    for has_evicted in [false, true] {
        let pool = slabbed(&node());
        let (_, kept) = allocate(&pool, 7);
        let (old, spot) = allocate(&pool, 1);
        write(&pool, DEVICE, spot, pattern(7));
        unmap(&pool, spot);
        if !has_evicted {
            release(&pool, old).expect("released");
        }
        pause_tags(&pool, &["nccl"]);
        let (used, before) = used_cell(&pool, 1);
        for handle in [create(&pool, 1).expect("memory"), alone(&pool)] {
            let error = map(&pool, spot, handle).expect_err("set aside");
            assert!(matches!(error, PoolError::Offloaded { .. }), "{error}");
            release(&pool, handle).expect("released");
        }
        let error = map(&pool, spot, used).expect_err("set aside");
        assert!(matches!(error, PoolError::Offloaded { .. }), "{error}");
        resume_tags(&pool, &["nccl"]);
        map(&pool, spot, used).expect("it is back");
        assert!(is_readable(&pool, spot, pattern(1)));
        if has_evicted {
            map(&pool, before, old).expect("moved out of the way");
            assert!(is_readable(&pool, before, pattern(7)));
            unmap(&pool, before);
            release(&pool, old).expect("released");
        }
        for range in [kept, spot] {
            free(&pool, range);
        }
        free_range(&pool, before);
        assert_nothing_left(&pool);
    }
}

#[test]
fn a_fresh_cell_does_not_change_places_with_one_that_is_set_aside() {
    let pool = slabbed(&node());
    let (_, kept) = allocate(&pool, 7);
    let away = create(&pool, 1).expect("memory");
    let spot =
        VaRange::new(pool.enter().take_addresses(UNIT, UNIT, "nccl").expect("its own"), UNIT);
    pause_tags(&pool, &["nccl"]);
    let here = create(&pool, 1).expect("memory");
    let error = map(&pool, spot, here).expect_err("set aside");
    assert!(matches!(error, PoolError::Offloaded { .. }), "{error}");
    resume_tags(&pool, &["nccl"]);
    map(&pool, spot, here).expect("it is back");
    assert!(is_clear_and_readable(&pool, spot));
    release(&pool, away).expect("released");
    for range in [kept, spot] {
        free(&pool, range);
    }
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
    let start = pool.enter().take_addresses(2 * UNIT, 0, "nccl").expect("a room");
    assert_eq!(pool.who_answers(start), Known::Elsewhere, "they are reserved");
    assert_eq!(pool.reserved_range(start), Some(VaRange::new(start, 2 * UNIT)));
    let behind = vmm_pool::driver::DeviceAddress(start.0 + 2 * UNIT);
    assert_eq!(pool.who_answers(behind), Known::Nobody, "the caller has not reserved them");
    free_range(&pool, VaRange::new(start, 2 * UNIT));
    free(&pool, kept);
    assert_nothing_left(&pool);
}
