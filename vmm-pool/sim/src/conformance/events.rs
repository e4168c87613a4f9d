//! Cases about events: the work that they stand for, and the waits for them.
//!
//! Cases about two devices do nothing where there is one.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]

use std::ptr::NonNull;

use super::{Bench, Case, DEVICE, Limits, assert_same, case_list, pattern, refused};
use sublet_driver::{DeviceOrdinal, Driver, DriverCode, RawEvent, RawStream};

case_list![
    an_event_that_was_never_recorded_is_done,
    an_event_is_done_when_its_stream_has_come_there,
    a_stream_that_waits_for_an_event_sees_what_was_copied_before_it,
    a_wait_of_a_stream_outlives_its_event,
    an_event_that_is_recorded_again_stands_for_the_later_work,
    a_stream_of_another_context_does_not_record_an_event_but_waits_for_it,
];

const OTHER: DeviceOrdinal = DeviceOrdinal(1);

fn event<D: Driver>(driver: &D) -> RawEvent {
    driver.event_create().expect("an event")
}

fn end<D: Driver>(driver: &D, event: RawEvent) {
    // SAFETY: the case made it and uses it no more.
    unsafe { driver.event_destroy(event) }.expect("event ends");
}

fn end_stream<D: Driver>(driver: &D, stream: RawStream) {
    // SAFETY: the case made it and uses it no more.
    unsafe { driver.stream_destroy(stream) }.expect("stream ends");
}

fn an_event_that_was_never_recorded_is_done<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let event = event(driver);
    assert!(driver.event_is_done(event).expect("query"), "nothing is to be done");
    driver.event_synchronize(event).expect("nothing to wait for");
    driver.stream_wait_event(bench.stream, event).expect("nothing to wait for");
    driver.stream_synchronize(bench.stream).expect("wait");
    end(driver, event);
}

fn an_event_is_done_when_its_stream_has_come_there<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(4 * bench.granule_bytes);
    let bytes = pattern(31, mapped.range.size_bytes);
    let mut back = vec![0; bytes.len()];
    bench.write(mapped.range, &bytes);
    let event = event(driver);
    let target = NonNull::from(back.as_mut_slice()).cast();
    // SAFETY: `back` outlives the wait below, and nobody touches it before.
    unsafe { driver.copy_to_host(target, mapped.range, bench.stream) }.expect("copy out");
    driver.event_record(event, bench.stream).expect("record");
    driver.event_synchronize(event).expect("wait");
    assert!(driver.event_is_done(event).expect("query"), "it has been waited for");
    assert_same(&back, &bytes, "after a wait for the event alone");
    end(driver, event);
    bench.tear_down(mapped);
}

fn a_stream_that_waits_for_an_event_sees_what_was_copied_before_it<D: Driver>(
    driver: &D,
    _: Limits,
) {
    let bench = Bench::new(driver);
    let other = driver.stream_create().expect("a stream");
    let mapped = bench.mapped(4 * bench.granule_bytes);
    let event = event(driver);
    for seed in 32..40 {
        let bytes = pattern(seed, mapped.range.size_bytes);
        let mut back = vec![0; bytes.len()];
        let (source, target) =
            (NonNull::from(bytes.as_slice()).cast(), NonNull::from(back.as_mut_slice()).cast());
        // SAFETY: both outlive the wait below, and nobody touches them before.
        unsafe { driver.copy_to_device(mapped.range, source, bench.stream) }.expect("copy in");
        driver.event_record(event, bench.stream).expect("record");
        driver.stream_wait_event(other, event).expect("order");
        // SAFETY: as above.
        unsafe { driver.copy_to_host(target, mapped.range, other) }.expect("copy out");
        driver.stream_synchronize(other).expect("wait for the second alone");
        assert_same(&back, &bytes, "on the stream that waited");
    }
    end(driver, event);
    end_stream(driver, other);
    bench.tear_down(mapped);
}

fn a_wait_of_a_stream_outlives_its_event<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let other = driver.stream_create().expect("a stream");
    let mapped = bench.mapped(4 * bench.granule_bytes);
    let bytes = pattern(41, mapped.range.size_bytes);
    let mut back = vec![0; bytes.len()];
    let (source, target) =
        (NonNull::from(bytes.as_slice()).cast(), NonNull::from(back.as_mut_slice()).cast());
    let event = event(driver);
    // SAFETY: both outlive the wait below, and nobody touches them before.
    unsafe { driver.copy_to_device(mapped.range, source, bench.stream) }.expect("copy in");
    driver.event_record(event, bench.stream).expect("record");
    driver.stream_wait_event(other, event).expect("order");
    end(driver, event);
    // SAFETY: as above.
    unsafe { driver.copy_to_host(target, mapped.range, other) }.expect("copy out");
    driver.stream_synchronize(other).expect("wait for the second alone");
    assert_same(&back, &bytes, "on the stream that waited");
    end_stream(driver, other);
    bench.tear_down(mapped);
}

fn an_event_that_is_recorded_again_stands_for_the_later_work<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(4 * bench.granule_bytes);
    let event = event(driver);
    let rounds: Vec<Vec<u8>> =
        (42..46).map(|seed| pattern(seed, mapped.range.size_bytes)).collect();
    for bytes in &rounds {
        let source = NonNull::from(bytes.as_slice()).cast();
        // SAFETY: `rounds` outlives the wait below, and nobody writes it.
        unsafe { driver.copy_to_device(mapped.range, source, bench.stream) }.expect("copy in");
        driver.event_record(event, bench.stream).expect("record");
    }
    driver.event_synchronize(event).expect("wait");
    assert_same(&bench.read(mapped.range), &rounds[3], "the last copy");
    end(driver, event);
    bench.tear_down(mapped);
}

fn a_stream_of_another_context_does_not_record_an_event_but_waits_for_it<D: Driver>(
    driver: &D,
    _: Limits,
) {
    if driver.device_count().expect("count") < 2 {
        return;
    }
    let bench = Bench::new(driver);
    let event = event(driver);
    driver.make_current(OTHER).expect("device 1 is usable");
    let other = driver.stream_create().expect("a stream");
    refused(driver.event_record(event, other), &[DriverCode::INVALID_HANDLE], "record");
    driver.event_record(event, bench.stream).expect("record on its own");
    driver.stream_wait_event(other, event).expect("order");
    driver.stream_synchronize(other).expect("wait");
    end_stream(driver, other);
    driver.make_current(DEVICE).expect("device 0");
    end(driver, event);
}
