//! Windows that are larger than their frames: every byte is compared with plain memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sublet_pager::{In, PageError, Pager, WindowSize};
use vmm_pool::HostBudget;
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, DriverCode, DriverOp, VaRange};

use crate::process::SimPool;
use crate::program::{Holds, LIMIT, SHORT, Stage, unlimited, word_at, write_unseen};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, UNIT, UNLIMITED, WHOLE, create, free_bytes, kept, map, node, pattern,
    pause, pool, resume, write,
};

#[test]
fn four_times_as_much_as_the_frames_hold_is_all_there() {
    let mut stage = Stage::new(2);
    stage.alloc_each(8);
    stage.use_all(false);
    stage.check();
    for _ in 0..3 {
        stage.use_all(true);
        stage.use_all(false);
    }
    stage.check();
    let report = stage.pager().report();
    assert!(report.resident_bytes <= 2 * UNIT, "{report:?}");
    assert_eq!((report.paged_bytes, report.frames_bytes), (8 * UNIT, 2 * UNIT));
    assert_eq!(report.remaps, report.exchanges + 2, "two frames were made, then they went on");
    let taken = CAPACITY_BYTES - free_bytes(&stage.pool, DEVICE);
    assert!(taken <= 2 * UNIT, "{taken}");
    assert!(stage.driver().faults().calls(DriverOp::Create) <= 2, "frames go from hand to hand");
    stage.end();
}

#[test]
fn a_pager_that_panics_refuses_uses_by_name_and_keeps_no_pause_up() {
    let mut stage = Stage::new(2);
    let span = stage.alloc(1).expect("addresses");
    let start = stage.start_of(span);
    stage.driver().faults().panic_at(DriverOp::Create);
    for _ in 0..2 {
        let refused = stage.pager().acquire(&[start], LIMIT).expect_err("it has ended");
        assert!(matches!(refused, PageError::Ended { device: DEVICE }), "{refused}");
    }
    pause(&stage.pool);
    resume(&stage.pool);
    drop(stage.pager.take());
}

#[test]
fn spans_lie_side_by_side_and_take_the_chunks_that_their_bytes_fill() {
    let mut stage = Stage::new(2);
    for _ in 0..8 {
        stage.alloc_bytes(3 * UNIT / 4).expect("addresses");
    }
    assert_eq!(stage.pager().report().paged_bytes, 6 * UNIT, "six chunks of eight spans");
    stage.use_all(true);
    stage.pager().flush(LIMIT).expect("copied");
    // The tests of the order check how often a chunk comes. The machine decides which chunks come ahead in time.
    for _ in 0..4 {
        stage.use_all(false);
    }
    stage.check();
    let after = stage.pager().report();
    assert!(after.resident_bytes <= 2 * UNIT, "{after:?}");
    stage.end();
}

#[test]
fn a_chunk_of_two_spans_goes_when_both_are_done_and_keeps_what_each_has_written() {
    let mut stage = Stage::new(1);
    for size_bytes in [UNIT / 2, UNIT / 2, UNIT] {
        stage.alloc_bytes(size_bytes).expect("addresses");
    }
    let starts: Vec<_> = (0..3).map(|span| stage.start_of(span)).collect();
    assert_eq!(starts[0].0 + UNIT / 2, starts[1].0);
    // One call holds the chunk for two spans, and each hold ends separately.
    stage.pager().acquire(&starts[..2], LIMIT).expect("one chunk");
    stage.pager().release(&starts[..1]).expect("released");
    let error = stage.pager().acquire(&starts[2..], SHORT).expect_err("the other is held");
    assert!(matches!(error, PageError::Late { .. }), "{error}");
    stage.pager().release(&starts[1..2]).expect("released");
    for _ in 0..2 {
        for span in [0, 2, 1, 2] {
            stage.try_use(&[span], span % 2, true).expect("a use");
        }
        stage.use_all(false);
        stage.check();
    }
    // One span is freed: the other keeps the chunk.
    stage.pager().free(starts[0]).expect("freed");
    stage.spans.remove(0);
    stage.use_all(false);
    stage.check();
    assert_eq!(stage.pager().report().paged_bytes, 2 * UNIT);
    stage.end();
}

#[test]
fn what_was_only_read_is_not_copied_out_again() {
    let mut stage = Stage::new(1);
    stage.alloc_each(3);
    stage.use_all(true);
    stage.pager().flush(LIMIT).expect("copied");
    let before = stage.pager().report();
    assert_eq!((before.out_bytes, &*before.chunks), (3 * UNIT, "aah"));
    stage.use_all(false);
    stage.use_all(false);
    stage.check();
    let after = stage.pager().report();
    assert_eq!((after.out_bytes, after.in_bytes - before.in_bytes), (before.out_bytes, 6 * UNIT));
    assert_eq!(after.chunks.matches('a').count(), 2, "{after:?}");
    let places = stage.pool.report().host_arena_bytes;
    stage.use_all(true);
    stage.use_all(true);
    assert_eq!(stage.pool.report().host_arena_bytes, places, "places are kept");
    stage.end();
}

#[test]
fn of_a_known_order_what_is_used_soonest_stays() {
    let mut stage = Stage::new(4);
    stage.alloc_each(8);
    let mut round = |writes| {
        for span in 0..8 {
            stage.try_use(&[span], span % 2, writes).expect("a use");
            stage.check();
            // Any chunk may leave now: the order alone decides.
            stage.pager().flush(LIMIT).expect("copied");
        }
        stage.pager().report().in_bytes / UNIT
    };
    round(true);
    let before = round(false);
    round(false);
    let brought = round(false) - before;
    // The forecast brings four or five of eight chunks in each round. To keep the last used chunks would bring all sixteen.
    assert!(brought <= 11, "{brought}");
    stage.end();
}

#[test]
fn a_use_of_more_than_the_frames_is_refused_with_the_least_that_works() {
    let mut stage = Stage::new(2);
    stage.alloc(3).expect("addresses");
    let start = stage.start_of(0);
    let error = stage.pager().acquire(&[start], LIMIT).expect_err("three of two");
    let PageError::TooFewFrames { needed_bytes, frames_bytes } = error else { panic!("{error}") };
    assert_eq!((needed_bytes, frames_bytes), (3 * UNIT, 2 * UNIT));
    stage.pager().set_frames(3 * UNIT, LIMIT).expect("more");
    stage.try_use(&[0], 0, true).expect("now it fits");
    stage.end();
}

#[test]
fn frames_are_waited_for_and_who_waits_too_long_is_told_for_what() {
    let mut stage = Stage::new(2);
    stage.alloc(2).expect("addresses");
    stage.alloc(1).expect("addresses");
    let (two, one) = (stage.start_of(0), stage.start_of(1));
    stage.pager().acquire(&[two], LIMIT).expect("both");
    let error = stage.pager().acquire(&[one], SHORT).expect_err("both are held");
    let PageError::Late { what, limit } = error else { panic!("{error}") };
    assert_eq!(limit, SHORT);
    assert!(what.contains(&format!("1 of 1 chunks from {:#x}", one.0)), "{what}");
    stage.pager().release(&[two]).expect("released");
    stage.try_use(&[1], 1, true).expect("now there is room");
    stage.end();
}

/// A program may have an address mapped before it launches anything, so that the driver says whose it is.
#[test]
fn what_is_acquired_stays_until_it_is_released_and_keeps_what_was_written_unseen_meanwhile() {
    let mut stage = Stage::new(1);
    stage.alloc_each(2);
    stage.use_all(true);
    stage.check();
    stage.pager().flush(LIMIT).expect("copied");
    let first = stage.start_of(0);
    stage.pager().acquire(&[first], LIMIT).expect("here");
    assert!(stage.driver().core().mapping_at(first).is_some());
    let other = word_at(stage.start_of(1), 0);
    let stream = In::Stream(stage.streams[0]);
    let error = stage.pager().begin_call(&[other], stream, SHORT).expect_err("it is held");
    assert!(matches!(error, PageError::Late { .. }), "{error}");
    let holds = Holds::Pattern(77);
    write_unseen(&stage, 0, holds, 0, UNIT);
    stage.spans[0][0].holds = holds;
    stage.pager().release(&[first]).expect("released");
    stage.try_use(&[1], 0, false).expect("it gave its frame");
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn a_chunk_goes_only_when_uses_on_all_streams_are_over() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    let [first, second] = [0, 1].map(|span| word_at(stage.start_of(span), 0));
    let streams = stage.streams.map(In::Stream);
    let uses = streams.map(|stream| stage.pager().begin_call(&[first], stream, LIMIT));
    stage.hold(0);
    // One use is not over, and a later one is.
    for used in uses {
        stage.pager().end_call(&used.expect("here").expect("paged"));
    }
    let error = stage.pager().begin_call(&[second], streams[1], SHORT).expect_err("in use");
    assert!(matches!(error, PageError::Late { .. }), "{error}");
    stage.held.clear();
    let used = stage.pager().begin_call(&[second], streams[1], LIMIT).expect("now it is over");
    stage.pager().end_call(&used.expect("paged"));
    stage.end();
}

#[test]
fn a_pause_takes_what_is_there_and_paging_goes_on_behind_the_resume() {
    let mut stage = Stage::new(3);
    let other = create(&stage.pool, DEVICE, 2, kept());
    let range = map(&stage.pool, other, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&stage.pool, DEVICE, range, pattern(77));
    stage.alloc_each(6);
    stage.use_all(true);
    for round in 0..3 {
        pause(&stage.pool);
        assert_eq!(free_bytes(&stage.pool, DEVICE), CAPACITY_BYTES, "all of it is free");
        resume(&stage.pool);
        assert!(crate::stage::holds(&stage.pool, DEVICE, range, pattern(77)));
        stage.use_all(false);
        if round == 1 {
            stage.use_all(true);
        }
        stage.pool.save(&WHOLE, UNLIMITED).expect("saved");
        stage.pool.remount().expect("undone");
        drop(stage.pool.commit_resume());
        stage.use_all(false);
        stage.check();
    }
    stage.pool.unmap(range).expect("unmapped");
    stage.pool.release(other).expect("released");
    crate::stage::free_addresses(&stage.pool, range);
    stage.end();
}

/// The driver ends a process that waits for a stream while its contexts are off the device.
#[test]
fn a_window_that_ends_while_the_process_is_frozen_asks_for_no_work_before_the_thaw() {
    let mut stage = Stage::new(2);
    stage.alloc(2).expect("addresses");
    stage.use_all(true);
    let start = stage.start_of(0);
    stage.check();
    stage.pager().free(start).expect("freed");
    stage.spans.pop();
    while stage.pager().report().resident_bytes > 0 {
        std::thread::yield_now();
    }
    pause(&stage.pool);
    let (frozen, _) = stage.pool.keeper().freeze(LIMIT).expect("away");
    let asked = |pool: &SimPool| {
        let faults = pool.driver().faults();
        faults.calls(DriverOp::StreamSynchronize) + faults.calls(DriverOp::EventQuery)
    };
    let before = asked(&stage.pool);
    drop(stage.pager.take());
    std::thread::park_timeout(SHORT);
    assert_eq!(asked(&stage.pool), before);
    drop(frozen.thaw());
    while asked(&stage.pool) == before {
        std::thread::yield_now();
    }
    resume(&stage.pool);
}

#[test]
fn a_use_waits_through_a_pause_however_long_that_is() {
    /// The time that a busy machine needs for a use behind the resume.
    const BUSY: Duration = Duration::from_secs(3);
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.use_all(true);
    stage.check();
    pause(&stage.pool);
    let first = stage.start_of(0);
    std::thread::scope(|scope| {
        let pager = stage.pager();
        let (tell, told) = std::sync::mpsc::channel();
        scope.spawn(move || tell.send(pager.acquire(&[first], BUSY)));
        // The pager has reached the gate.
        while !stage.pool.gate().waiting().iter().any(|call| call.passage.can_step()) {
            std::thread::yield_now();
        }
        assert!(told.recv_timeout(BUSY + SHORT).is_err(), "the time of a pause does not count");
        resume(&stage.pool);
        told.recv().expect("no panic").expect("here");
    });
    stage.pager().release(&[first]).expect("released");
    stage.use_all(false);
    stage.end();
}

#[test]
fn freed_spans_give_their_frames_and_addresses_back_and_come_again_as_zeros() {
    let mut stage = Stage::new(2);
    for _ in 0..40 {
        let span = stage.alloc(2).expect("addresses of those that were freed");
        stage.try_use(&[span], 0, false).expect("zeros");
        stage.try_use(&[span], 1, true).expect("written");
        let start = stage.start_of(span);
        stage.pager().free(start).expect("freed");
        stage.spans.pop();
        let error = stage.pager().free(start).expect_err("twice");
        assert!(matches!(error, PageError::NotPaged { .. }), "{error}");
        // A chunk that leaves behind its last use needs its addresses until then.
        while stage.pager().report().resident_bytes > 0 {
            stage.check();
            std::thread::yield_now();
        }
    }
    stage.end();
}

#[test]
fn pinned_chunks_stay_and_are_counted() {
    let mut stage = Stage::new(2);
    stage.alloc_each(4);
    stage.use_all(true);
    stage.try_use(&[0], 0, true).expect("here");
    let range = VaRange::new(stage.start_of(0), UNIT);
    let registered = stage.pool.enter().register(range, "registered with a network card");
    for _ in 0..2 {
        for span in 1..4 {
            stage.try_use(&[span], 0, true).expect("through the other frame");
        }
    }
    stage.check();
    assert_eq!(stage.pager().report().stays_bytes, UNIT);
    let Holds::Pattern(seed) = stage.spans[0][0].holds else { panic!("it was written") };
    assert!(crate::stage::holds(&stage.pool, DEVICE, range, pattern(seed)));
    stage.pool.enter().unregister(&registered);
    stage.use_all(false);
    stage.end();
}

/// No other step checks whether the chunk stays.
#[test]
fn what_is_pinned_no_more_leaves_for_a_use_that_did_not_fit_beside_it() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    stage.try_use(&[0], 0, true).expect("here");
    let range = VaRange::new(stage.start_of(0), UNIT);
    let registered = stage.pool.enter().register(range, "registered with a network card");
    // The pager finds that the chunk stays.
    for span in [1, 2, 1] {
        stage.try_use(&[span], 0, true).expect("through the other frame");
    }
    let both = [1, 2].map(|span| stage.start_of(span));
    let refused = stage.pager().acquire(&both, SHORT).expect_err("no room");
    assert!(matches!(refused, PageError::Late { .. }), "{refused}");
    stage.pool.enter().unregister(&registered);
    stage.try_use(&[1, 2], 0, true).expect("through both frames");
    stage.use_all(false);
    stage.end();
}

#[test]
fn what_is_freed_while_it_is_pinned_goes() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    stage.use_all(true);
    stage.try_use(&[0], 0, true).expect("here");
    let start = stage.start_of(0);
    stage.pool.pin(VaRange::new(start, UNIT), "a network card has it");
    // The pager finds that the chunk stays.
    for span in [1, 2, 1] {
        stage.try_use(&[span], 0, true).expect("through the other frame");
    }
    assert_eq!(stage.pager().report().stays_bytes, UNIT);
    stage.free(0);
    stage.try_use(&[0, 1], 0, true).expect("through both frames");
    assert_eq!(stage.pager().report().stays_bytes, 0);
    stage.end();
}

#[test]
fn a_device_that_is_full_pages_with_what_it_gave() {
    let mut stage = Stage::new(4);
    stage.alloc_each(4);
    let hog = create(&stage.pool, DEVICE, CAPACITY_BYTES / UNIT - 2, kept());
    stage.use_all(true);
    stage.use_all(false);
    stage.check();
    assert_eq!(free_bytes(&stage.pool, DEVICE), 0);
    let all: Vec<_> = (0..3).collect();
    let error = stage.try_use(&all, 0, false).expect_err("three of two");
    assert!(error.contains("cuMemCreate"), "{error}");
    stage.pool.release(hog).expect("released");
    stage.try_use(&all, 0, false).expect("three");
    stage.end();
}

#[test]
fn host_memory_is_asked_for_before_anything_moves_and_again_before_it_is_taken() {
    let most_bytes = Arc::new(AtomicU64::new(2 * UNIT));
    let limit = Arc::clone(&most_bytes);
    let mut stage = Stage::within(1, move |held| {
        HostBudget(Some(limit.load(Ordering::Relaxed).saturating_sub(held)))
    });
    for _ in 0..2 {
        stage.alloc(1).expect("the host holds two");
    }
    let error = stage.pager().alloc(UNIT).expect_err("three of two");
    let PageError::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes } = error else {
        panic!("{error}")
    };
    assert_eq!((needed_bytes, available_bytes), (3 * UNIT, 2 * UNIT));
    assert!(grow_bytes >= 3 * UNIT && error.to_string().contains("sublet ps"), "{error}");
    assert_eq!(stage.pager().report().paged_bytes, 2 * UNIT);
    // Others have taken the host memory meanwhile.
    most_bytes.store(0, Ordering::Relaxed);
    stage.try_use(&[0], 0, true).expect("it has the frame");
    let error = stage.try_use(&[1], 0, true).expect_err("what has the frame has no place to go");
    assert!(error.contains("more bytes of host memory") && error.contains("0 are"), "{error}");
    assert_eq!(stage.pool.report().host_arena_bytes, 0);
    most_bytes.store(2 * UNIT, Ordering::Relaxed);
    stage.use_all(true);
    stage.use_all(false);
    stage.check();
    assert_eq!(stage.pool.report().host_arena_bytes, 2 * UNIT, "counted where others' is");
    stage.end();
}

#[test]
fn a_pager_that_cannot_begin_leaves_nothing_behind() {
    let pool = pool(&node());
    let size = WindowSize { window_bytes: 4 * UNIT, chunk_bytes: UNIT, frames_bytes: UNIT };
    for at in 1.. {
        pool.driver().faults().fail_any(FaultSpan::Nth(at), DriverCode::UNKNOWN);
        let made = Pager::new(Arc::clone(pool.pool()), DEVICE, size, unlimited);
        pool.driver().faults().clear();
        let is_made = made.is_ok();
        drop(made);
        assert_eq!(crate::stage::end_streams(&pool), 0, "{at}: but for those that the pool keeps");
        assert_eq!(pool.driver().census().reservations, 0, "{at}");
        if is_made {
            break;
        }
    }
    let none = WindowSize { frames_bytes: UNIT - 1, ..size };
    let error = Pager::new(Arc::clone(pool.pool()), DEVICE, none, unlimited);
    let error = error.expect_err("not one chunk");
    assert!(matches!(error, PageError::TooFewFrames { needed_bytes: UNIT, .. }), "{error}");
}

#[test]
fn sizes_that_the_device_does_not_allocate_are_refused_by_name() {
    let mut stage = Stage::new(1);
    for chunk_bytes in [0, 1000, UNIT / 2, UNIT + 4096] {
        let size = WindowSize { window_bytes: 4 * UNIT, chunk_bytes, frames_bytes: 2 * UNIT };
        let pool = Arc::clone(stage.pool.pool());
        let error = Pager::new(pool, DEVICE, size, unlimited).expect_err("no such memory");
        let PageError::UnfitChunk { granularity_bytes: UNIT, device: DEVICE, .. } = error else {
            panic!("{error}")
        };
        assert!(error.to_string().contains(&format!("{UNIT} bytes")), "{error}");
    }
    let error = stage.pager().alloc(0).expect_err("of nothing");
    assert!(matches!(error, PageError::NoBytes), "{error}");
    stage.alloc_bytes(1).expect("one byte");
    stage.end();
}

#[test]
fn limits_of_the_host_are_looked_at_once_for_each_chunk_and_not_for_each_span() {
    let looks = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&looks);
    let mut stage = Stage::within(1, move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        UNLIMITED
    });
    for _ in 0..2 * UNIT / 4096 {
        stage.alloc_bytes(4096).expect("addresses");
    }
    assert_eq!(looks.load(Ordering::Relaxed), 2);
    stage.end();
}
