//! Frames that are given up for other memory, and windows that share the device's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sublet_pager::{In, Pager, WHAT_IS_LEFT, WindowSize};
use vmm_pool::Contents;
use vmm_pool::driver::sim::SimNode;
use vmm_pool::driver::{AllocationProp, Driver as _, VaRange};

use crate::counting as budgets;
use crate::program::{self, LIMIT, Stage, pause_until, unlimited};
use crate::stage::{
    DEVICE, OTHER, UNIT, class, create, free_bytes, kept, node, pause, pool, resume,
};

const FRAMES: u64 = 16;

/// Makes a window with all of its frames taken, and no memory left on the device.
fn crowded() -> Stage {
    crowd(Stage::new(FRAMES))
}

fn crowd(mut stage: Stage) -> Stage {
    stage.alloc_each(FRAMES);
    stage.use_all(true);
    assert_eq!(stage.pager().report().resident_bytes, FRAMES * UNIT);
    let left = free_bytes(&stage.pool, DEVICE) / UNIT;
    // Pauses do not copy it.
    create(&stage.pool, DEVICE, left, class(Contents::Discard));
    stage
}

#[test]
fn frames_are_given_up_if_other_memory_finds_no_room() {
    let mut stage = crowded();
    let prop = AllocationProp::pinned_on(DEVICE);
    stage.pool.create(3 * UNIT, &prop, kept()).expect_err("the device is full");
    let pool = Arc::clone(stage.pool.pool());
    assert!(!pool.make_room(OTHER, UNIT), "nothing is paged there");
    assert!(pool.make_room(DEVICE, 3 * UNIT));
    assert_eq!(stage.pager().report().resident_bytes, (FRAMES - 3) * UNIT);
    create(&stage.pool, DEVICE, 3, kept());
    for _ in 0..2 {
        stage.use_all(true);
        stage.use_all(false);
    }
    stage.check();
    assert!(stage.pager().report().resident_bytes <= (FRAMES - 3) * UNIT);
    // The request is larger than the window: nothing is given up in vain.
    assert!(!pool.make_room(DEVICE, 1 << 40));
    let present = stage.pager().report().resident_bytes / UNIT;
    // Twice the chunks that were used together stay.
    assert!(pool.make_room(DEVICE, (present - 2) * UNIT));
    assert_eq!(stage.pager().report().resident_bytes, 2 * UNIT);
    assert!(!pool.make_room(DEVICE, UNIT), "it has no more to give");
    stage.use_all(false);
    stage.check();
    drop(stage.pager.take());
}

/// No message says that the device has room again.
#[test]
fn frames_that_gave_way_are_taken_again_some_time_later() {
    let mut stage = crowded();
    let pool = Arc::clone(stage.pool.pool());
    assert!(pool.make_room(DEVICE, 3 * UNIT));
    let (_open, silence) = std::sync::mpsc::channel::<()>();
    while stage.pager().report().resident_bytes < FRAMES * UNIT {
        stage.use_all(false);
        let _late = silence.recv_timeout(Duration::from_millis(200));
    }
    stage.check();
    drop(stage.pager.take());
}

/// A budget is lowered below the bytes of a window's frames.
#[test]
fn frames_are_given_up_to_a_budget() {
    let pool = pool(&node());
    let shared = budgets::shared(1);
    budgets::counts(&pool, &shared, 0);
    let mut stage = Stage::of(pool, FRAMES, unlimited);
    stage.alloc_each(FRAMES);
    stage.use_all(true);
    let resident = |stage: &Stage| stage.pager().report().resident_bytes / UNIT;
    let before = resident(&stage);
    stage.pool.pool().yield_to_budgets();
    assert_eq!(resident(&stage), before, "within the budget");
    shared.set_budget(0, Some((before - 3) * UNIT));
    // A window that is asked again before it has given a frame gives no more.
    (0..3).for_each(|_| stage.pool.pool().yield_to_budgets());
    let given = std::time::Instant::now() + LIMIT;
    while resident(&stage) > before - 3 {
        assert!(std::time::Instant::now() < given, "{} of {before} are there", resident(&stage));
        std::thread::yield_now();
    }
    assert_eq!(resident(&stage), before - 3);
    for _ in 0..2 {
        stage.use_all(true);
        stage.use_all(false);
    }
    assert!(resident(&stage) <= before - 3, "what the budget refuses does not come back");
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn who_asks_for_room_waits_through_a_pause() {
    let mut stage = crowded();
    stage.hold(0);
    let (span, pool) = (stage.start_of(0), Arc::clone(stage.pool.pool()));
    stage.pager().acquire(&[span], LIMIT).expect("here");
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            pool.driver().make_current(DEVICE).expect("device 0");
            pool.make_room(DEVICE, 2 * UNIT)
        });
        while stage.pager().report().resident_bytes == FRAMES * UNIT && !asking.is_finished() {
            std::thread::yield_now();
        }
        stage.held.clear();
        pause(&stage.pool);
        resume(&stage.pool);
        stage.pager().release(&[span]).expect("released");
        assert!(asking.join().expect("no panic"));
        assert_eq!(stage.pager().report().resident_bytes, (FRAMES - 2) * UNIT);
    });
    stage.use_all(false);
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn a_window_that_finds_no_room_takes_a_frame_from_one_that_has_more() {
    let mut stage = crowded();
    let poor = program::pager(&stage.pool, 4, unlimited);
    let spans = [(); 4].map(|()| poor.alloc(UNIT).expect("addresses"));
    for span in spans {
        poor.acquire(&[span], LIMIT).expect("a frame of the other");
    }
    for span in spans {
        poor.release(&[span]).expect("released");
    }
    assert_eq!(poor.report().resident_bytes, 4 * UNIT);
    assert_eq!(stage.pager().report().resident_bytes, (FRAMES - 4) * UNIT);
    stage.use_all(false);
    drop(poor);
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn a_window_without_frames_waits_for_the_kernels_of_another_one() {
    let mut stage = crowded();
    let poor = program::pager(&stage.pool, 4, unlimited);
    let span = poor.alloc(UNIT).expect("addresses");
    // The uses of all frames are behind a kernel.
    stage.hold(0);
    let own = In::Stream(stage.streams[0]);
    for one in (0..stage.spans.len()).map(|span| [VaRange::new(stage.start_of(span), 1)]) {
        let used = stage.pager().begin_call(&one, own, LIMIT).expect("each of them");
        stage.pager().end_call(&used.expect("paged"));
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| poor.acquire(&[span], LIMIT));
        // This is longer than a window with frames of its own asks.
        std::thread::park_timeout(Duration::from_millis(1500));
        stage.held.clear();
        waiting.join().expect("no panic").expect("a frame of the other");
    });
    poor.release(&[span]).expect("released");
    stage.use_all(false);
    drop(poor);
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn windows_on_a_full_device_share_it_while_pauses_come() {
    let mut stage = crowd(Stage::new(FRAMES));
    let poor = program::pager(&stage.pool, 4, unlimited);
    let spans = [(); 6].map(|()| poor.alloc(UNIT).expect("addresses"));
    let stream = In::Stream(stage.streams[1]);
    let (pool, stop) = (Arc::clone(stage.pool.pool()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| pause_until(pool, &stop));
        for round in 0..6 {
            for span in spans {
                let used =
                    poor.begin_call(&[VaRange::new(span, 1)], stream, LIMIT).expect("a frame");
                poor.end_call(&used.expect("paged"));
            }
            stage.use_all(round % 2 == 0);
        }
        stop.store(true, Ordering::Release);
    });
    stage.check();
    assert!(poor.report().resident_bytes >= UNIT);
    drop(poor);
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn without_a_figure_frames_are_what_is_left_of_the_device() {
    const LEFT: u64 = 5;
    let node = SimNode::private(&[(1 << 30) + LEFT * UNIT, 1 << 30]).expect("a node");
    let mut stage = Stage::of(pool(&node), 1, unlimited);
    let size =
        WindowSize { window_bytes: 32 * UNIT, chunk_bytes: UNIT, frames_bytes: WHAT_IS_LEFT };
    let pool = Arc::clone(stage.pool.pool());
    stage.pager = Some(Pager::new(pool, DEVICE, size, unlimited).expect("a window"));
    for _ in 0..3 * LEFT {
        stage.alloc(1).expect("addresses");
    }
    for _ in 0..2 {
        stage.use_all(true);
        stage.use_all(false);
    }
    stage.check();
    let report = stage.pager().report();
    assert_eq!((report.resident_bytes, report.frames_bytes), (LEFT * UNIT, 3 * LEFT * UNIT));
    // A caller who waits also gets frames of the memory that is left free, if no chunk can leave.
    let all: Vec<_> = (0..stage.spans.len()).map(|span| stage.start_of(span)).collect();
    stage.pager().acquire(&all, LIMIT).expect("all of them");
    stage.pager().release(&all).expect("released");
    stage.use_all(false);
    stage.check();
    drop(stage.pager.take());
}
