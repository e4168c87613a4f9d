//! Uses as they are seen at launches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sublet_pager::{In, PageError};
use vmm_pool::FromOpen;
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{Driver as _, DriverCode, DriverOp, VaRange};

use crate::program::{LIMIT, Place, SHORT, Stage, byte_unseen, bytes_of, until, word_at};
use crate::stage::{DEVICE, UNIT, pause, resume};

#[test]
fn calls_that_use_the_same_take_one_event() {
    let mut stage = Stage::new(2);
    stage.alloc(1).expect("addresses");
    for _ in 0..40 {
        stage.try_use(&[0], 0, true).expect("a use");
    }
    stage.check();
    let report = stage.pager().report();
    assert_eq!((report.calls, report.hits + report.misses), (40, 1), "{report:?}");
    stage.end();
}

#[test]
fn a_call_uses_the_whole_span_that_it_names_an_address_of() {
    let mut stage = Stage::new(3);
    let stream = In::Stream(stage.streams[0]);
    // The second span reaches from the first chunk into the third.
    for size_bytes in [UNIT / 2, 2 * UNIT, UNIT / 2, UNIT] {
        stage.alloc_bytes(size_bytes).expect("addresses");
    }
    let begin = |words: &[VaRange]| stage.pager().begin_call(words, stream, LIMIT);
    let here = |words: &[VaRange], chunks: u64| {
        let touched = begin(words).expect("here").expect("paged");
        stage.pager().end_call(&touched);
        assert_eq!(stage.pager().report().resident_bytes, chunks * UNIT);
    };
    let [first, second, fourth] = [0, 1, 3].map(|span| word_at(stage.start_of(span), 8));
    here(&[first], 1);
    here(&[second], 3);
    let behind = word_at(stage.start_of(3), UNIT);
    assert!(begin(&[behind]).expect("nothing").is_none());
    let error = begin(&[first, second, fourth]).expect_err("four of three");
    assert!(matches!(error, PageError::TooFewFrames { .. }), "{error}");
    stage.end();
}

#[test]
fn a_call_that_waits_for_a_frame_ends_uses_of_other_streams() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    for round in 0..6 {
        stage.try_use(&[round % 2], round % 2, true).expect("the other stream has ended its use");
    }
    stage.check();
    stage.end();
}

#[test]
fn a_frame_whose_call_is_not_launched_yet_stays_and_who_waits_is_told_for_what() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    let (first, second) = (word_at(stage.start_of(0), 0), word_at(stage.start_of(1), 0));
    let streams = stage.streams.map(In::Stream);
    let looked = stage.pager().begin_call(&[first], streams[0], LIMIT).expect("here");
    let error = stage.pager().begin_call(&[second], streams[1], SHORT).expect_err("not launched");
    let text = error.to_string();
    assert!(text.contains(&format!("1 of 1 chunks from {:#x}", stage.start_of(1).0)), "{text}");
    assert!(text.contains("1 of 1 frames are taken, 1 chunks are in use"), "{text}");
    let waited = Duration::from_micros(stage.pager().report().waited_us);
    assert!(waited >= SHORT, "what a call has waited is counted: {waited:?}");
    stage.pager().end_call(&looked.expect("paged"));
    stage.try_use(&[1], 1, true).expect("now it is launched");
    stage.end();
}

/// The thread that ends a use may be doing so when the span is freed.
#[test]
fn a_span_that_is_freed_goes_when_the_use_is_over_that_another_thread_is_about_to_end() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    let (first, second) = (stage.start_of(0), stage.start_of(1));
    let other = In::Stream(stage.streams[1]);
    stage.use_without_end(0);
    std::thread::scope(|scope| {
        let recording = stage.driver().faults().hold(DriverOp::EventRecord);
        let ending = scope.spawn(|| {
            stage.driver().make_current(DEVICE).expect("device 0");
            stage.pager().flush(LIMIT)
        });
        assert!(recording.is_met(LIMIT), "it is about to end the use");
        stage.pager().free(first).expect("freed");
        // The frame of the first chunk is the only one.
        let begun = stage.pager().begin_call(&[word_at(second, 0)], other, SHORT);
        assert!(matches!(begun, Err(PageError::Late { .. })), "{begun:?}");
        drop(recording);
        ending.join().expect("no panic").expect("nothing is left to be copied");
    });
    stage.spans.remove(0);
    stage.check();
    stage.use_all(true);
    stage.check();
    stage.end();
}

/// A parameter may be an address by chance: a span ends where another begins.
#[test]
fn a_span_that_is_freed_while_a_call_that_names_it_waits_comes_and_goes_with_that_call() {
    for is_captured in [false, true] {
        free_while_a_call_waits(is_captured);
    }
}

fn free_while_a_call_waits(is_captured: bool) {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    let second = stage.start_of(1);
    let other = if is_captured { In::Graph } else { In::Stream(stage.streams[1]) };
    stage.use_without_end(0);
    let held = std::mem::take(&mut stage.held);
    let misses = stage.pager().report().misses;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            stage.driver().make_current(DEVICE).expect("device 0");
            let begun = stage.pager().begin_call(&[word_at(second, 0)], other, LIMIT);
            stage.pager().end_call(&begun.expect("it comes").expect("paged"));
        });
        while stage.pager().report().misses == misses {
            std::thread::yield_now();
        }
        stage.pager().free(second).expect("freed");
        drop(held);
        waiting.join().expect("no panic");
    });
    assert!(!stage.pager().has_captured(), "what a graph would use is freed");
    stage.spans.remove(1);
    stage.use_all(true);
    while stage.pager().report().paged_bytes > UNIT {
        std::thread::yield_now();
    }
    stage.alloc(1).expect("its addresses");
    assert_eq!(stage.start_of(1), second);
    stage.check();
    stage.end();
}

/// The chunk that is used last is to leave, but the work that uses it does not end.
#[test]
fn patience_for_what_is_used_last_ends() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    // The pager learns the order.
    for call in 0..14 {
        stage.try_use(&[call % 3], 1, false).expect("a use");
    }
    stage.use_without_end(2);
    let (first, other) = (word_at(stage.start_of(0), 0), In::Stream(stage.streams[1]));
    let begun = stage.pager().begin_call(&[first], other, LIMIT);
    stage.pager().end_call(&begun.expect("the second gave its frame").expect("paged"));
    stage.held.clear();
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn who_waits_for_room_ends_uses_that_have_begun_meanwhile() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    let words = [0, 1, 2].map(|span| word_at(stage.start_of(span), 0));
    let [first, second] = stage.streams.map(In::Stream);
    let looked = stage.pager().begin_call(&words[..1], first, LIMIT).expect("here");
    stage.try_use(&[0], 1, true).expect("a use");
    std::thread::scope(|scope| {
        let recorded = stage.driver().faults().calls(DriverOp::EventRecord);
        let waiting = scope.spawn(|| {
            stage.driver().make_current(DEVICE).expect("device 0");
            let touched = stage.pager().begin_call(&words[1..], second, LIMIT).expect("room");
            stage.pager().end_call(&touched.expect("paged"));
        });
        // The pager has ended the lists that could be ended.
        while stage.driver().faults().calls(DriverOp::EventRecord) == recorded {
            std::thread::yield_now();
        }
        let again = stage.pager().begin_call(&words[..1], second, LIMIT).expect("here");
        stage.pager().end_call(&again.expect("paged"));
        stage.pager().end_call(&looked.expect("paged"));
        waiting.join().expect("it got room");
    });
    stage.end();
}

#[test]
fn what_is_not_full_yet_is_not_mapped() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.use_all(true);
    stage.check();
    stage.pager().flush(LIMIT).expect("copied");
    let driver = Arc::clone(stage.pool.driver());
    for round in 0..30 {
        let Place { range, holds } = stage.spans[round % 2][0];
        let wanted = bytes_of(holds, UNIT);
        let last = wanted.len() - 1;
        // An unseen use at this moment finds the contents, or a fault: before the mapping, and between mapping and access.
        let byte = loop {
            if let Ok(byte) = byte_unseen(&driver, range, last) {
                break byte;
            }
            // An announcement is a hint: another chunk may have taken the frame before this thread has looked.
            if driver.core().mapping_at(range.start).is_none() {
                stage.pager().announce(&[range.start]).expect("announced");
            }
            std::thread::yield_now();
        };
        assert_eq!(byte, wanted[last], "round {round}");
        stage.try_use(&[round % 2], 0, false).expect("a use");
    }
    stage.end();
}

#[test]
fn what_a_graph_uses_stays() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    stage.use_all(true);
    let word = word_at(stage.start_of(0), 0);
    stage.capture(0);
    for _ in 0..3 {
        stage.try_use(&[1], 0, true).expect("through the other frame");
        stage.try_use(&[2], 0, true).expect("through the other frame");
    }
    let again = stage.pager().begin_call(&[word], In::Graph, SHORT).expect("it never left");
    stage.pager().end_call(&again.expect("paged"));
    stage.free(0);
    stage.end();
}

#[test]
fn what_a_graph_uses_stays_if_a_span_that_shares_its_chunk_is_freed() {
    let mut stage = Stage::new(2);
    for size_bytes in [UNIT / 2, UNIT / 2, UNIT, UNIT] {
        stage.alloc_bytes(size_bytes).expect("addresses");
    }
    stage.capture(0);
    stage.free(1);
    let words = [1, 2].map(|span| word_at(stage.start_of(span), 0));
    let refused = stage.pager().begin_call(&words, In::Stream(stage.streams[0]), LIMIT);
    assert!(matches!(refused, Err(PageError::TooFewFrames { .. })), "{refused:?}");
    stage.free(0);
    let both = stage.pager().begin_call(&words, In::Stream(stage.streams[0]), LIMIT);
    stage.pager().end_call(&both.expect("no graph uses anything").expect("paged"));
    stage.end();
}

#[test]
fn a_capture_waits_for_the_copy_of_what_it_uses() {
    waits_for_a_copy(|stage| stage.capture(0));
}

/// Work that no call shows may begin then.
#[test]
fn what_is_acquired_is_not_being_copied() {
    waits_for_a_copy(|stage| {
        let start = stage.start_of(0);
        stage.pager().acquire(&[start], LIMIT).expect("here");
        stage.pager().release(&[start]).expect("released");
    });
}

fn waits_for_a_copy(hold: fn(&Stage)) {
    let mut stage = Stage::new(2);
    stage.alloc(1).expect("addresses");
    stage.use_all(true);
    stage.check();
    let faults = stage.driver().faults();
    let synchronized = faults.calls(DriverOp::EventSynchronize);
    let use_ends = faults.hold(DriverOp::EventRecord);
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| stage.pager().flush(LIMIT));
        assert!(use_ends.is_met(LIMIT), "the use gets its event");
        let copy_begins = faults.hold(DriverOp::EventRecord);
        drop(use_ends);
        assert!(copy_begins.is_met(LIMIT), "the copy gets its own");
        // The driver does not report the end of the copy.
        faults.fail(DriverOp::EventQuery, FaultSpan::From(1), DriverCode::UNKNOWN);
        drop(copy_begins);
        while stage.pager().report().out_bytes == 0 {
            std::thread::yield_now();
        }
        hold(&stage);
        assert!(faults.calls(DriverOp::EventSynchronize) > synchronized, "it reads the chunk");
        faults.clear();
        flushing.join().expect("no panic").expect("copied");
    });
    stage.free(0);
    stage.end();
}

#[test]
fn what_has_no_room_next_to_what_graphs_use_is_refused_immediately() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    stage.use_all(true);
    for of in [0, 1] {
        stage.capture(of);
    }
    let word = word_at(stage.start_of(2), 0);
    for place in [In::Graph, In::Stream(stage.streams[0])] {
        let refused = stage.pager().begin_call(&[word], place, LIMIT);
        let error = refused.expect_err("two of two frames are taken for good");
        let PageError::TooFewFrames { needed_bytes, frames_bytes } = error else {
            panic!("{error}")
        };
        assert_eq!(needed_bytes / 3, frames_bytes / 2);
    }
    stage.free(1);
    stage.try_use(&[1], 0, true).expect("through the other frame");
    stage.free(0);
    stage.end();
}

#[test]
fn what_a_graph_uses_goes_when_it_is_freed_and_launches_are_over() {
    let mut stage = Stage::new(2);
    stage.alloc_each(3);
    let stream = In::Stream(stage.streams[0]);
    for graph in [true, false] {
        let word = word_at(stage.start_of(0), 0);
        stage.capture(0);
        // The stream already has a list.
        stage.try_use(&[1], 0, true).expect("through the other frame");
        stage.hold(0);
        // The graph is launched twice, or a call of its own names what it uses.
        for _ in 0..2 {
            let begun = if graph {
                stage.pager().begin_graph(stream)
            } else {
                stage.pager().begin_call(&[word], stream, LIMIT).expect("here")
            };
            stage.launch(&[0], 0, true).expect("it does not end");
            stage.pager().end_call(&begun.expect("paged"));
        }
        stage.free(0);
        // The call needs both frames.
        let words = [0, 1].map(|span| word_at(stage.start_of(span), 0));
        let begun = stage.pager().begin_call(&words, In::Stream(stage.streams[1]), SHORT);
        assert!(matches!(begun, Err(PageError::Late { .. })), "{begun:?}");
        stage.check();
        stage.use_all(true);
        stage.check();
        stage.alloc(1).expect("addresses");
        stage.spans.rotate_right(1);
    }
    assert!(stage.pager().begin_graph(stream).is_none(), "no graph uses anything");
    stage.end();
}

#[test]
fn a_window_ends_when_launches_of_graphs_are_over() {
    let mut stage = Stage::new(2);
    stage.alloc(1).expect("addresses");
    stage.capture(0);
    stage.hold(0);
    let begun = stage.pager().begin_graph(In::Stream(stage.streams[0])).expect("a graph uses it");
    stage.launch(&[0], 0, true).expect("it does not end");
    stage.pager().end_call(&begun);
    let pager = stage.pager.take();
    std::thread::scope(|scope| {
        let asked = stage.pool.driver().faults().calls(DriverOp::EventQuery);
        let ending = scope.spawn(|| drop(pager));
        // The pager queries again and again.
        while stage.pool.driver().faults().calls(DriverOp::EventQuery) < asked + 8 {
            std::thread::yield_now();
        }
        stage.held.clear();
        ending.join().expect("it has ended");
    });
    stage.end();
}

#[test]
fn what_is_freed_behind_its_last_use_leaves_though_nobody_wants_its_frame() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.use_all(true);
    stage.check();
    stage.free(0);
    until(|| stage.pager().report().resident_bytes == 0);
    stage.end();
}

#[test]
fn a_pause_waits_for_what_is_being_filled() {
    let mut stage = Stage::new(2);
    stage.alloc_each(2);
    stage.use_all(true);
    stage.check();
    stage.pager().flush(LIMIT).expect("copied");
    stage.pager().set_frames(UNIT, LIMIT).expect("one leaves");
    stage.pager().set_frames(2 * UNIT, LIMIT).expect("room for it");
    let faults = stage.driver().faults();
    let mapped = faults.calls(DriverOp::Map);
    // The driver does not report the end of the copy.
    faults.fail(DriverOp::EventQuery, FaultSpan::From(1), DriverCode::UNKNOWN);
    let starts = [0, 1].map(|span| stage.start_of(span));
    stage.pager().announce(&starts).expect("announced");
    until(|| stage.driver().faults().calls(DriverOp::Map) > mapped);
    let shut = stage.pool.keeper().shut::<FromOpen>(Instant::now() + SHORT, || false);
    assert!(shut.is_err(), "a chunk is half way");
    drop(shut);
    stage.driver().faults().clear();
    pause(&stage.pool);
    resume(&stage.pool);
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn uses_of_a_stream_that_is_captured_end_behind_the_capture() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.try_use(&[0], 0, true).expect("a use");
    let faults = stage.driver().faults();
    for call in 1..=3 {
        let captured = DriverCode::STREAM_CAPTURE_IMPLICIT;
        faults.fail(DriverOp::StreamIsCapturing, FaultSpan::Nth(call), captured);
    }
    stage.try_use(&[1], 1, true).expect("the use of the other ends at last");
    assert_eq!(stage.driver().faults().fired(), 3);
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn a_capture_waits_through_a_pause_for_uses_that_another_thread_is_about_to_end() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.try_use(&[0], 0, true).expect("a use");
    let recorded = stage.driver().faults().calls(DriverOp::EventRecord);
    pause(&stage.pool);
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let pager = stage.pager();
        scope.spawn(move || {
            pager.capture_begins();
            tell.send(()).expect("somebody listens");
        });
        // This is longer than the wait for a process that runs.
        told.recv_timeout(Duration::from_millis(1300)).expect_err("the process is paused");
        resume(&stage.pool);
        told.recv_timeout(LIMIT).expect("the use ends now");
    });
    assert!(stage.driver().faults().calls(DriverOp::EventRecord) > recorded, "the use has ended");
    stage.check();
    stage.end();
}

#[test]
fn the_host_gets_all_but_what_a_graph_uses() {
    let mut stage = Stage::new(2);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.capture(0);
    stage.use_all(true);
    stage.check();
    stage.pager().flush(LIMIT).expect("it waits for nothing that stays in use");
    let report = stage.pager().report();
    assert_eq!((report.out_bytes, &*report.chunks), (UNIT, "wh"));
    stage.end();
}

#[test]
fn a_flush_ends_uses_that_have_begun_meanwhile() {
    let mut stage = Stage::new(2);
    stage.alloc_each(2);
    let word = word_at(stage.start_of(0), 0);
    let [first, second] = stage.streams.map(In::Stream);
    let held = stage.pager().begin_call(&[word], first, LIMIT).expect("here").expect("paged");
    stage.try_use(&[1], 1, true).expect("a use");
    std::thread::scope(|scope| {
        let recorded = stage.driver().faults().calls(DriverOp::EventRecord);
        let flushing = scope.spawn(|| stage.pager().flush(Duration::from_secs(10)));
        // The pager has ended the lists that could be ended.
        while stage.driver().faults().calls(DriverOp::EventRecord) == recorded
            && !flushing.is_finished()
        {
            std::thread::yield_now();
        }
        let again = stage.pager().begin_call(&[word], second, LIMIT).expect("here");
        stage.pager().end_call(&again.expect("paged"));
        stage.pager().end_call(&held);
        flushing.join().expect("no panic").expect("nothing is in use any more");
    });
    stage.end();
}

#[test]
fn what_calls_left_as_it_was_is_not_copied_out_again() {
    let mut stage = Stage::new(1);
    stage.alloc_each(3);
    stage.use_all(true);
    stage.pager().flush(LIMIT).expect("copied");
    let written = stage.pager().report();
    assert_eq!((written.out_bytes, written.unchanged_bytes), (3 * UNIT, 0));
    stage.use_all(false);
    stage.use_all(false);
    stage.pager().flush(LIMIT).expect("looked at");
    stage.check();
    let read = stage.pager().report();
    assert_eq!((read.out_bytes, read.unchanged_bytes), (3 * UNIT, 6 * UNIT));
    // A pause writes to the places too: then nobody relies on the fingerprints.
    stage.use_all(false);
    pause(&stage.pool);
    resume(&stage.pool);
    stage.use_all(true);
    stage.use_all(false);
    stage.check();
    assert!(stage.pager().report().out_bytes >= 6 * UNIT);
    stage.end();
}
