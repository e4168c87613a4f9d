//! The conformance list on the simulated driver, and the promises of the simulation alone.

#![expect(unsafe_code, reason = "starts copies and pulls memory from under them")]
#![expect(clippy::expect_used, reason = "a test fails by panicking, helpers of it too")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use sublet_driver::{
    AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverOp, Location,
    LocationKind, RawStream, VaRange,
};
use sublet_sim_driver::conformance::{Limits, cases};
use sublet_sim_driver::{
    FaultSpan, GRANULARITY_BYTES, SimDriver, SimNode, SimOptions, Touch, Work,
};

const CAPACITY_BYTES: u64 = 512 << 20;
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

fn node() -> SimNode {
    SimNode::private(&[CAPACITY_BYTES, CAPACITY_BYTES]).expect("a node under /dev/shm")
}

fn driver() -> SimDriver {
    SimDriver::new(node(), SimOptions::default())
}

#[test]
fn the_simulated_driver_conforms() {
    let driver = driver();
    let limits = Limits { free_tolerance_bytes: 0 };
    let failed: Vec<_> = cases::<SimDriver>()
        .iter()
        .filter(|case| catch_unwind(AssertUnwindSafe(|| (case.run)(&driver, limits))).is_err())
        .map(|case| case.name)
        .collect();
    assert!(failed.is_empty(), "failed: {failed:?}");
    driver.make_current(DEVICE).expect("current");
    let info = driver.memory_info().expect("info");
    assert_eq!(info.free_bytes, CAPACITY_BYTES, "cases leave nothing behind");
}

#[test]
fn dropping_a_driver_releases_all_it_holds() {
    let node = node();
    let first = SimDriver::new(node.clone(), SimOptions::default());
    let second = SimDriver::new(node, SimOptions::default());
    second.make_current(DEVICE).expect("current");
    first.create(8 * GRANULARITY_BYTES, &AllocationProp::pinned_on(DEVICE)).expect("memory");
    let held = second.memory_info().expect("info").free_bytes;
    assert_eq!(held, CAPACITY_BYTES - 8 * GRANULARITY_BYTES);
    drop(first);
    let free = second.memory_info().expect("info").free_bytes;
    assert_eq!(free, CAPACITY_BYTES);
}

#[test]
fn a_fault_rule_fails_the_call_it_names() {
    let driver = driver();
    let prop = AllocationProp::pinned_on(DEVICE);
    let code = DriverCode::OUT_OF_MEMORY;
    driver.faults().fail(DriverOp::Create, FaultSpan::Nth(2), code);
    driver.create(GRANULARITY_BYTES, &prop).expect("first");
    let second = driver.create(GRANULARITY_BYTES, &prop);
    assert_eq!(second.expect_err("second").code, code);
    driver.create(GRANULARITY_BYTES, &prop).expect("third");
    assert_eq!(driver.faults().calls(DriverOp::Create), 3);
    driver.faults().parse("*:1+:999").expect("rule");
    let any = driver.version().expect_err("every call fails");
    assert_eq!(any.code, DriverCode::UNKNOWN);
    driver.faults().clear();
    driver.version().expect("no rules left");
    assert_eq!(driver.faults().fired(), 2);
}

#[test]
fn a_context_costs_what_it_is_said_to() {
    let options = SimOptions { context_bytes: 100 << 20, ..SimOptions::default() };
    let driver = SimDriver::new(node(), options);
    driver.make_current(DEVICE).expect("current");
    let info = driver.memory_info().expect("info");
    assert_eq!(info.free_bytes, CAPACITY_BYTES - (100 << 20));
}

#[test]
fn host_memory_is_not_limited_by_the_device() {
    let driver = driver();
    let mut prop = AllocationProp::pinned_on(DEVICE);
    prop.location = Location { kind: LocationKind::HOST_NUMA, id: 0 };
    driver.create(4 * CAPACITY_BYTES, &prop).expect("host memory");
    driver.make_current(DEVICE).expect("current");
    let info = driver.memory_info().expect("info");
    assert_eq!(info.free_bytes, CAPACITY_BYTES);
}

#[test]
fn calls_that_need_a_context_refuse_without_one() {
    let driver = driver();
    let error = driver.stream_create().expect_err("no context");
    assert_eq!(error.code, DriverCode::INVALID_CONTEXT);
}

#[test]
fn thousands_of_blocks_are_created_and_released() {
    let node = SimNode::private(&[8 << 30]).expect("node");
    let driver = SimDriver::new(node, SimOptions::default());
    let prop = AllocationProp::pinned_on(DEVICE);
    let handles: Vec<_> =
        (0..4096).map(|_| driver.create(GRANULARITY_BYTES, &prop).expect("memory")).collect();
    let full = driver.create(GRANULARITY_BYTES, &prop);
    assert_eq!(full.expect_err("full").code, DriverCode::OUT_OF_MEMORY);
    assert_eq!(handles.len(), 4096);
}

#[test]
fn work_on_a_freed_address_is_an_illegal_access_and_not_a_crash() {
    let driver = driver();
    driver.make_current(DEVICE).expect("current");
    let range = driver.allocate(DEVICE, GRANULARITY_BYTES).expect("memory");
    let touch = [(range, Touch::Write)];
    drop(driver.access(DEVICE, &touch).expect("it is there"));
    driver.deallocate(range).expect("freed");
    assert_eq!(driver.access(DEVICE, &touch).expect_err("gone"), DriverCode::ILLEGAL_ADDRESS);
}

/// Starts a copy to host memory. Returns the memory that is copied, and the stream.
fn copying(driver: &SimDriver, host: &mut [u8]) -> (VaRange, RawStream) {
    driver.make_current(DEVICE).expect("current");
    let range = driver.allocate(DEVICE, GRANULARITY_BYTES).expect("memory");
    let stream = driver.stream_create().expect("a stream");
    let part = VaRange::new(range.start, host.len() as u64);
    // SAFETY: the caller keeps the host memory until the driver is gone.
    unsafe { driver.copy_to_host(NonNull::from(host).cast(), part, stream) }.expect("begun");
    (range, stream)
}

#[test]
fn memory_that_is_unmapped_before_anybody_has_waited_for_its_copy_costs_the_context() {
    let mut host = [0; 64];
    let driver = driver();
    let (range, stream) = copying(&driver, &mut host);
    driver.stream_synchronize(stream).expect("copied");
    driver.unmap_memory(range).expect("nothing uses it");
    driver.synchronize().expect("a context");

    let (range, stream) = copying(&driver, &mut host);
    // The work counts as under way, however fast it was here.
    while driver.has_work(stream).expect("a stream") {
        std::thread::yield_now();
    }
    driver.unmap_memory(range).expect("an unmapping waits for nothing");
    let lost = driver.synchronize().expect_err("the context is lost");
    assert_eq!(lost.code, DriverCode::ILLEGAL_ADDRESS);
}

#[test]
fn two_streams_at_the_same_bytes_without_a_wait_between_cost_the_context() {
    let mut host = [0_u8; 64];
    let driver = driver();
    let (range, stream) = copying(&driver, &mut host);
    let other = driver.stream_create().expect("another");
    let next = VaRange::new(DeviceAddress(range.start.0 + 64), 64);
    // SAFETY: it stays mapped.
    unsafe { driver.fill_with_zeros(next, other) }.expect("other bytes");
    driver.stream_synchronize(stream).expect("no harm");
    // SAFETY: as above.
    unsafe { driver.fill_with_zeros(range, other) }.expect("after what was waited for");
    // SAFETY: as above; the host memory outlives the driver.
    unsafe { driver.copy_to_host(NonNull::from(&mut host[..]).cast(), next, stream) }
        .expect("begun");
    let lost = driver.synchronize().expect_err("the context is lost");
    assert_eq!(lost.code, DriverCode::ILLEGAL_ADDRESS);
}

#[test]
fn an_order_by_an_event_holds_for_what_came_before_it_and_for_nothing_else() {
    let mut host = [0_u8; 64];
    let driver = driver();
    let (range, stream) = copying(&driver, &mut host);
    let other = driver.stream_create().expect("another");
    let third = driver.stream_create().expect("a third");
    let event = driver.event_create().expect("an event");
    driver.event_record(event, stream).expect("recorded");
    driver.stream_wait_event(other, event).expect("ordered");
    // SAFETY: it stays mapped.
    unsafe { driver.fill_with_zeros(range, other) }.expect("behind the copy");
    driver.event_record(event, other).expect("recorded");
    driver.stream_wait_event(third, event).expect("ordered");
    // SAFETY: as above.
    unsafe { driver.fill_with_zeros(range, third) }.expect("behind both");
    driver.event_synchronize(event).expect("no harm");
    // SAFETY: as above; the first copy was waited for, through the second stream.
    unsafe { driver.fill_with_zeros(range, third) }.expect("on the same stream");
    driver.stream_synchronize(third).expect("no harm");
    driver.unmap_memory(range).expect("nothing uses it");
    driver.synchronize().expect("a context");

    let (range, stream) = copying(&driver, &mut host);
    driver.event_record(event, stream).expect("recorded");
    // SAFETY: as above.
    unsafe { driver.fill_with_zeros(range, stream) }.expect("after the event");
    driver.stream_wait_event(other, event).expect("ordered");
    // SAFETY: as above.
    unsafe { driver.fill_with_zeros(range, other) }.expect("behind the copy alone");
    let lost = driver.synchronize().expect_err("the context is lost");
    assert_eq!(lost.code, DriverCode::ILLEGAL_ADDRESS);
}

#[test]
fn a_later_record_delays_no_stream_that_waits_already() {
    let driver = driver();
    driver.make_current(DEVICE).expect("current");
    let [stream, other] = [(); 2].map(|()| driver.stream_create().expect("a stream"));
    let event = driver.event_create().expect("an event");
    driver.event_record(event, stream).expect("recorded");
    driver.stream_wait_event(other, event).expect("ordered");
    let (go, goes) = std::sync::mpsc::channel::<()>();
    let goes = std::sync::Mutex::new(goes);
    let held = Work::new(move |_| {
        let _gone = goes.lock().map(|goes| goes.recv());
        Ok(())
    });
    driver.core().enqueue(stream, held).expect("held");
    driver.event_record(event, stream).expect("recorded again");
    driver.stream_synchronize(other).expect("what it waits for is done");
    assert!(!driver.event_is_done(event).expect("query"), "its work is held");
    drop(go);
    driver.event_synchronize(event).expect("done");
}

#[test]
fn new_memory_is_not_zero() {
    let driver = driver();
    let range = driver.allocate(DEVICE, 3 * GRANULARITY_BYTES).expect("memory");
    for piece in 0..range.size_bytes / (64 << 10) {
        let piece = VaRange::new(DeviceAddress(range.start.0 + piece * (64 << 10)), 64 << 10);
        assert!(!driver.device_holds(DEVICE, piece, &[0; 16]).expect("readable"), "{piece:?}");
        assert!(driver.is_clear(DEVICE, piece).expect("readable"), "{piece:?}");
    }
}

/// Runs two works on two streams, and returns the one that ran first. The second may be queued behind an event of the first.
fn first_of_two(seed: u64, is_ordered: bool) -> usize {
    let driver = driver();
    driver.make_current(DEVICE).expect("current");
    driver.core().schedule(seed);
    let streams = [(); 2].map(|()| driver.stream_create().expect("a stream"));
    let event = driver.event_create().expect("an event");
    let (tell, told) = std::sync::mpsc::channel();
    for (index, stream) in streams.into_iter().enumerate() {
        if is_ordered && index == 1 {
            driver.event_record(event, streams[0]).expect("recorded");
            driver.stream_wait_event(stream, event).expect("behind it");
        }
        let tell = tell.clone();
        let work = Work::new(move |_| {
            let _told = tell.send(index);
            Ok(())
        });
        driver.core().enqueue(stream, work).expect("queued");
    }
    // Both works must be there to choose from. Work that need not wait may have run.
    let mut ran: Vec<usize> = Vec::new();
    while !is_ordered && driver.core().held_up() + ran.len() < 2 {
        ran.extend(told.try_recv());
        std::thread::yield_now();
    }
    driver.synchronize().expect("done");
    while ran.len() < 2 {
        ran.push(told.recv().expect("both run"));
    }
    ran[0]
}

#[test]
fn a_seed_decides_which_stream_comes_first_and_events_hold_in_any_order() {
    let first: Vec<_> = (0..64).map(|seed| first_of_two(seed, false)).collect();
    assert!(first.contains(&0) && first.contains(&1), "{first:?}");
    assert!((0..64).all(|seed| first_of_two(seed, true) == 0));
}
