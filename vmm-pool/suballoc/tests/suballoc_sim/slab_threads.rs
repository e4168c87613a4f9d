//! Cells of slabs, used by several threads together.

use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::VirtualHandle;
use vmm_pool::driver::{AccessDesc, VaRange};

use crate::slabbed::{
    allocate, assert_nothing_left, create, free, free_range, import, is_clear, objects, place,
    pool, slabbed,
};
use crate::stage::{
    DEVICE, OTHER, SimPool, UNIT, holds, node, pattern, pause, reserve, resume, write,
};

/// The rounds of each thread, and the rounds between two pauses.
const ROUNDS: u64 = 30;
const ROUNDS_A_PAUSE: u64 = 9;

/// What a thread does of its own memory, as far as it says itself, while the process is paused and resumed.
fn work(pool: &SimPool, seed: u64, rounds: &AtomicU64) {
    let mut held: Vec<(VirtualHandle, VaRange, u64)> = Vec::new();
    let mut state = seed;
    let mut below = |limit: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    for round in 0..ROUNDS {
        rounds.fetch_add(1, Ordering::Relaxed);
        let at = usize::try_from(below(held.len() as u64 + 1)).expect("small");
        match below(5) {
            0 | 1 if held.len() < 12 => {
                let units = 1 + below(3);
                let Ok(handle) = create(pool, units) else { continue };
                let range = place(pool, handle, units, DEVICE);
                // A call at the gate, like a launch.
                let pass = pool.enter();
                assert!(is_clear(pool, DEVICE, range), "{seed}: new memory holds something");
                let mark = seed << 32 | round;
                write(pool, DEVICE, range, pattern(mark));
                drop(pass);
                held.push((handle, range, mark));
            }
            2 if at < held.len() => {
                let (_, range, _) = held.swap_remove(at);
                free(pool, range);
            }
            3 if at < held.len() => {
                // NCCL suspends so: the addresses stay.
                let (handle, range, _) = held[at];
                let entered = pool.enter_giving_up();
                entered.pool().front().unmap(&entered, range).expect("unmapped");
                entered.pool().front().release(&entered, handle).expect("released");
                drop(entered);
                let Ok(handle) = create(pool, range.size_bytes / UNIT) else {
                    held.swap_remove(at);
                    free_range(pool, range);
                    continue;
                };
                let entered = pool.enter();
                entered.pool().front().map(&entered, range, 0, handle).expect("mapped again");
                let access = [AccessDesc::read_write(DEVICE)];
                entered.pool().front().set_access(&entered, range, &access).expect("access");
                let mark = seed << 32 | round;
                write(pool, DEVICE, range, pattern(mark));
                held[at] = (handle, range, mark);
            }
            _ => {
                let pass = pool.enter();
                for (_, range, mark) in &held {
                    assert!(holds(pool, DEVICE, *range, pattern(*mark)), "{seed}: {range:?}");
                }
                drop(pass);
            }
        }
    }
    for (_, range, _) in held {
        free(pool, range);
    }
}

#[test]
fn threads_that_race_with_each_other_and_with_pauses_find_their_own_bytes() {
    let pool = slabbed(&node());
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (pool, rounds) = (&pool, &rounds);
        let work = |seed| scope.spawn(move || work(pool, seed, rounds));
        let workers = [1, 2, 3].map(work);
        let mut pauses = 0;
        while workers.iter().any(|worker| !worker.is_finished()) {
            if rounds.load(Ordering::Relaxed) / ROUNDS_A_PAUSE > pauses {
                pauses += 1;
                pause(pool);
                resume(pool);
            }
            std::thread::yield_now();
        }
    });
    assert_nothing_left(&pool);
}

#[test]
fn threads_that_import_cells_of_one_slab_at_once_hold_one_memory() {
    for _ in 0..20 {
        let node = node();
        let (owner, importer) = (slabbed(&node), pool(&node));
        let cells: Vec<_> = (0..4).map(|_| allocate(&owner, 1)).collect();
        std::thread::scope(|scope| {
            for ((handle, range), seed) in cells.iter().zip(1..) {
                let (owner, importer) = (&owner, &importer);
                scope.spawn(move || {
                    let imported = import(owner, *handle, importer).expect("imported");
                    let place = place(importer, imported, 1, OTHER);
                    write(importer, OTHER, place, pattern(seed));
                    assert!(holds(owner, DEVICE, *range, pattern(seed)));
                    free(importer, place);
                });
            }
        });
        assert_eq!(objects(&importer), [0; 3]);
    }
}

#[test]
fn a_cell_that_one_thread_exports_and_another_maps_elsewhere_is_one_memory() {
    for seed in 1..20 {
        let pool = slabbed(&node());
        let (_, kept) = allocate(&pool, 1);
        let handle = create(&pool, 1).expect("memory");
        let elsewhere = reserve(&pool, UNIT);
        let export = std::thread::scope(|scope| {
            let exporter =
                scope.spawn(|| pool.front().export(&pool.enter(), handle).expect("export"));
            pool.front().map(&pool.enter(), elsewhere, 0, handle).expect("mapped");
            exporter.join().expect("it ends")
        });
        pool.front()
            .set_access(&pool.enter(), elsewhere, &[AccessDesc::read_write(DEVICE)])
            .expect("access");
        write(&pool, DEVICE, elsewhere, pattern(seed));
        let again = pool.front().import_held(&pool.enter(), &export);
        let again = again.expect("held").expect("its own");
        let place = place(&pool, again, 1, DEVICE);
        assert!(holds(&pool, DEVICE, place, pattern(seed)));
        for _ in 0..2 {
            pool.front().release(&pool.enter_giving_up(), again).expect("released");
        }
        for range in [elsewhere, place] {
            pool.front().unmap(&pool.enter_giving_up(), range).expect("unmapped");
            free_range(&pool, range);
        }
        free(&pool, kept);
        assert_nothing_left(&pool);
    }
}
