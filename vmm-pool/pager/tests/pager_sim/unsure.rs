//! Uses and copies whose end the driver does not report, and calls that it refuses.

use sublet_pager::{In, PageError};
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{DriverCode, DriverOp};

use crate::program::{LIMIT, SHORT, Stage, word_at};
use crate::stage::{CAPACITY_BYTES, DEVICE, UNIT, free_bytes};

/// Makes the driver accept a copy, and then refuse both an event behind it and a wait for it. `events` events come before.
fn lose_a_copy(stage: &Stage, events: u64) {
    for (op, first) in [(DriverOp::EventRecord, events + 1), (DriverOp::StreamSynchronize, 1)] {
        stage.driver().faults().fail(op, FaultSpan::From(first), DriverCode::UNKNOWN);
    }
}

#[test]
fn a_use_that_no_list_has_and_whose_end_the_driver_does_not_say_keeps_its_frame() {
    let own: fn(_) -> _ = In::OwnStream;
    for (place, op, failures) in
        [(own, DriverOp::EventRecord, 2), (In::Elsewhere, DriverOp::StreamSynchronize, 1)]
    {
        let mut stage = Stage::new(1);
        stage.alloc_each(2);
        let words = [0, 1].map(|span| word_at(stage.start_of(span), 0));
        let begun = stage.pager().begin_call(&words[..1], place(stage.streams[0]), LIMIT);
        stage.hold(0);
        stage.launch(&[0], 0, true).expect("it does not end");
        for call in 1..=failures {
            stage.driver().faults().fail(op, FaultSpan::Nth(call), DriverCode::UNKNOWN);
        }
        stage.pager().end_call(&begun.expect("here").expect("paged"));
        assert_eq!(stage.driver().faults().fired(), failures);
        let other = In::Stream(stage.streams[1]);
        let refused = stage.pager().begin_call(&words[1..], other, SHORT);
        assert!(matches!(refused, Err(PageError::Late { .. })), "{refused:?}");
        assert_eq!(stage.pager().report().stays_bytes, UNIT);
        stage.held.clear();
        stage.end();
    }
}

#[test]
fn what_cannot_be_mapped_leaves_no_mapping_and_no_memory_behind() {
    // The chunk is first mapped for its copy.
    for nth in [1, 2] {
        let mut stage = Stage::new(1);
        stage.alloc(1).expect("addresses");
        let denied = DriverCode::OPERATING_SYSTEM;
        stage.driver().faults().fail(DriverOp::SetAccess, FaultSpan::Nth(nth), denied);
        let error = stage.try_use(&[0], 0, true).expect_err("it has no right");
        assert!(error.contains("cuMemSetAccess"), "{error}");
        assert_eq!(stage.driver().census().mappings, 0);
        assert_eq!(free_bytes(&stage.pool, DEVICE), CAPACITY_BYTES);
        stage.use_all(true);
        stage.end();
    }
}

#[test]
fn addresses_of_a_copy_whose_end_nobody_knows_are_not_used_again() {
    let mut stage = Stage::new(2);
    stage.alloc_each(2);
    lose_a_copy(&stage, 0);
    stage.try_use(&[0], 0, false).expect_err("nobody knows when it is full");
    stage.driver().faults().clear();
    stage.use_all(true);
    stage.use_all(false);
    stage.check();
    drop(stage.pager.take());
}

#[test]
fn a_chunk_leaves_behind_a_wait_for_copies_whose_end_nobody_knows() {
    let mut stage = Stage::new(1);
    stage.alloc_each(2);
    stage.try_use(&[0], 0, true).expect("here");
    stage.check();
    // One event is behind its use, one behind the question about its contents.
    lose_a_copy(&stage, 2);
    let error =
        stage.try_use(&[1], 0, true).expect_err("what has the frame is not known to be copied");
    assert!(
        error.contains("cuStreamSynchronize"),
        "who waits for the frame is told immediately: {error}"
    );
    let [waited, unmapped] =
        [DriverOp::ContextSynchronize, DriverOp::Unmap].map(|op| stage.driver().faults().calls(op));
    stage.driver().faults().clear();
    stage.try_use(&[1], 0, true).expect("it is copied once more");
    let went_over = stage.driver().faults().calls(DriverOp::Unmap) > unmapped;
    let has_waited = stage.driver().faults().calls(DriverOp::ContextSynchronize) > waited;
    assert!(went_over && has_waited, "its frame went over behind a wait for its context");
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn what_the_driver_does_not_say_the_end_of_is_waited_for_when_the_window_ends() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    let start = stage.start_of(0);
    stage.use_without_end(0);
    let faults = stage.pool.driver().faults();
    for call in 1..=2 {
        faults.fail(DriverOp::EventRecord, FaultSpan::Nth(call), DriverCode::UNKNOWN);
    }
    let pager = stage.pager.take();
    std::thread::scope(|scope| {
        let waits = stage.pool.driver().faults().calls(DriverOp::ContextSynchronize);
        let ending = scope.spawn(|| drop(pager));
        let (core, faults) = (stage.pool.driver().core(), stage.pool.driver().faults());
        let is_waiting = || faults.calls(DriverOp::ContextSynchronize) > waits;
        while core.mapping_at(start).is_some() && !is_waiting() {
            std::thread::yield_now();
        }
        assert!(core.mapping_at(start).is_some(), "its use is not over");
        assert_eq!(faults.fired(), 2);
        stage.held.clear();
        ending.join().expect("it has ended");
    });
    stage.end();
}

#[test]
fn the_end_of_a_use_that_the_driver_refuses_once_is_marked_all_the_same() {
    let mut stage = Stage::new(1);
    stage.alloc(1).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.try_use(&[0], 0, true).expect("a use");
    let faults = stage.driver().faults();
    faults.fail(DriverOp::EventRecord, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    // The frame of that chunk is the only one.
    stage.try_use(&[1], 0, true).expect("the use of the other has ended");
    assert_eq!(stage.driver().faults().fired(), 1);
    stage.use_all(false);
    stage.check();
    stage.end();
}

#[test]
fn a_capture_that_begins_while_a_use_gets_its_event_has_the_use_end_later() {
    let mut stage = Stage::new(1);
    stage.alloc_each(2);
    stage.try_use(&[0], 0, true).expect("a use");
    let faults = stage.driver().faults();
    let recorded = faults.calls(DriverOp::EventRecord);
    // The query comes before the event, and again behind it.
    let captured = DriverCode::STREAM_CAPTURE_IMPLICIT;
    faults.fail(DriverOp::StreamIsCapturing, FaultSpan::Nth(2), captured);
    let word = word_at(stage.start_of(1), 0);
    let begun = stage.pager().begin_call(&[word], In::Stream(stage.streams[1]), LIMIT);
    assert_eq!(stage.driver().faults().fired(), 1, "the first event stands for nothing");
    assert!(stage.driver().faults().calls(DriverOp::EventRecord) >= recorded + 2);
    stage.pager().end_call(&begun.expect("the use has ended").expect("paged"));
    stage.end();
}
