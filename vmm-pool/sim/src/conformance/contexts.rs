//! Cases about contexts: the calls that depend on the current context, and those that do not.
//!
//! Cases about two devices do nothing where there is one.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]

use std::ptr::NonNull;

use super::{Bench, Case, DEVICE, Limits, Mapped, assert_same, case_list, pattern, refused};
use sublet_driver::{
    AccessDesc, AllocationProp, DeviceOrdinal, Driver, DriverCode, DriverResult, PinnedFor,
    RawStream, VaRange,
};

case_list![
    a_thread_without_a_context_is_refused_what_needs_one,
    a_stream_works_on_a_thread_without_a_context,
    a_stream_works_while_another_context_is_current,
    a_copy_out_of_reach_of_the_current_context_is_refused,
    a_copy_in_reach_of_the_current_context_goes_to_a_stream_of_another,
    host_memory_is_unregistered_without_a_context,
    host_memory_pinned_for_one_context_serves_copies_of_another,
];

/// The other device of the cases that use two.
const OTHER: DeviceOrdinal = DeviceOrdinal(1);
const INVALID: &[DriverCode] = &[DriverCode::INVALID_VALUE];

fn has_two<D: Driver>(driver: &D) -> bool {
    driver.device_count().expect("count") > 1
}

/// Runs `body` on a thread where no context has been made current.
fn without_context(body: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let ended = scope.spawn(body).join();
        ended.expect("what the thread says above");
    });
}

/// Makes a stream of the other device, whose context is current afterwards.
fn stream_of_other<D: Driver>(driver: &D) -> RawStream {
    driver.make_current(OTHER).expect("device 1 is usable");
    driver.stream_create().expect("a stream")
}

fn destroy<D: Driver>(driver: &D, stream: RawStream) {
    // SAFETY: the case made it and uses it no more.
    unsafe { driver.stream_destroy(stream) }.expect("stream ends");
}

/// Makes memory of the other device that `accessors` reach.
fn mapped_on_other<D: Driver>(bench: &Bench<'_, D>, accessors: &[DeviceOrdinal]) -> Mapped {
    let range = bench.reserve(bench.granule_bytes);
    let made = bench.driver.create(range.size_bytes, &AllocationProp::pinned_on(OTHER));
    let handle = made.expect("memory of device 1");
    bench.driver.map(range, handle).expect("map");
    let access: Vec<_> = accessors.iter().map(|&who| AccessDesc::read_write(who)).collect();
    bench.driver.set_access(range, &access).expect("access");
    Mapped { range, handle }
}

fn copy_in<D: Driver>(
    driver: &D,
    target: VaRange,
    bytes: &[u8],
    stream: RawStream,
) -> DriverResult<()> {
    // SAFETY: nobody writes a shared slice, and it is waited for below.
    unsafe { driver.copy_to_device(target, NonNull::from(bytes).cast(), stream) }?;
    driver.stream_synchronize(stream)
}

fn copy_out<D: Driver>(
    driver: &D,
    bytes: &mut [u8],
    source: VaRange,
    stream: RawStream,
) -> DriverResult<()> {
    // SAFETY: `bytes` is borrowed for the call alone, and it is waited for below.
    unsafe { driver.copy_to_host(NonNull::from(bytes).cast(), source, stream) }?;
    driver.stream_synchronize(stream)
}

/// Checks a copy to the device and back through `stream`, with whatever context is current.
#[track_caller]
fn assert_copies<D: Driver>(driver: &D, range: VaRange, stream: RawStream, seed: u8, what: &str) {
    let bytes = pattern(seed, range.size_bytes);
    let mut back = vec![0; bytes.len()];
    copy_in(driver, range, &bytes, stream).expect(what);
    copy_out(driver, &mut back, range, stream).expect(what);
    assert_same(&back, &bytes, what);
}

fn a_thread_without_a_context_is_refused_what_needs_one<D: Driver>(driver: &D, _: Limits) {
    let _bench = Bench::new(driver);
    without_context(|| {
        let no_context = &[DriverCode::INVALID_CONTEXT];
        refused(driver.synchronize(), no_context, "wait for a device");
        refused(driver.memory_info(), no_context, "memory info");
        refused(driver.stream_create(), no_context, "stream");
        refused(driver.event_create(), no_context, "event");
        let mut memory = vec![0_u8; 1 << 20];
        let start = NonNull::from(memory.as_mut_slice()).cast();
        // SAFETY: it is refused.
        let pinned = unsafe { driver.host_register(start, memory.len(), PinnedFor::AllContexts) };
        refused(pinned, no_context, "pinning");
    });
}

fn a_stream_works_on_a_thread_without_a_context<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let (range, stream) = (mapped.range, bench.driver.stream_create().expect("a stream"));
    without_context(|| {
        assert_copies(driver, range, stream, 21, "copies without a context");
        destroy(driver, stream);
    });
    bench.tear_down(mapped);
}

fn a_stream_works_while_another_context_is_current<D: Driver>(driver: &D, _: Limits) {
    if !has_two(driver) {
        return;
    }
    let bench = Bench::new(driver);
    let other = stream_of_other(driver);
    let mapped = mapped_on_other(&bench, &[OTHER]);
    let bytes = pattern(22, mapped.range.size_bytes);
    let source = NonNull::from(bytes.as_slice()).cast();
    // SAFETY: `bytes` outlives the wait below, and nobody writes it.
    unsafe { driver.copy_to_device(mapped.range, source, other) }.expect("copy in");
    driver.make_current(DEVICE).expect("device 0");
    driver.stream_synchronize(other).expect("wait");
    destroy(driver, other);
    bench.tear_down(mapped);
}

fn a_copy_out_of_reach_of_the_current_context_is_refused<D: Driver>(driver: &D, _: Limits) {
    if !has_two(driver) {
        return;
    }
    let bench = Bench::new(driver);
    let other = stream_of_other(driver);
    let mapped = mapped_on_other(&bench, &[OTHER]);
    assert_copies(driver, mapped.range, other, 23, "its own context is current");
    driver.make_current(DEVICE).expect("device 0");
    let mut bytes = pattern(24, mapped.range.size_bytes);
    for stream in [other, bench.stream] {
        let result = copy_in(driver, mapped.range, &bytes, stream);
        refused(result, INVALID, "copy in while another context is current");
        let result = copy_out(driver, &mut bytes, mapped.range, stream);
        refused(result, INVALID, "copy out while another context is current");
    }
    driver.make_current(OTHER).expect("device 1");
    copy_out(driver, &mut bytes, mapped.range, other).expect("copy out");
    assert_same(&bytes, &pattern(23, mapped.range.size_bytes), "nothing was written");
    destroy(driver, other);
    bench.tear_down(mapped);
    driver.make_current(DEVICE).expect("device 0");
}

fn a_copy_in_reach_of_the_current_context_goes_to_a_stream_of_another<D: Driver>(
    driver: &D,
    _: Limits,
) {
    if !has_two(driver) {
        return;
    }
    let bench = Bench::new(driver);
    let other = stream_of_other(driver);
    let mapped = mapped_on_other(&bench, &[DEVICE, OTHER]);
    driver.make_current(DEVICE).expect("device 0");
    assert_copies(driver, mapped.range, other, 25, "the current context reaches it too");
    assert_copies(driver, mapped.range, bench.stream, 26, "a stream of the current context");
    destroy(driver, other);
    bench.tear_down(mapped);
}

fn host_memory_is_unregistered_without_a_context<D: Driver>(driver: &D, _: Limits) {
    let _bench = Bench::new(driver);
    let mut memory = vec![0_u8; 1 << 20];
    let start = NonNull::from(memory.as_mut_slice()).cast();
    // SAFETY: `memory` lives until the end of the case, after the registration.
    unsafe { driver.host_register(start, memory.len(), PinnedFor::CurrentContext) }
        .expect("register");
    let address = start.as_ptr().expose_provenance();
    without_context(move || {
        let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
        let start = NonNull::new(pointer).expect("memory");
        // SAFETY: no copy uses the memory.
        unsafe { driver.host_unregister(start) }.expect("unregister");
    });
}

fn host_memory_pinned_for_one_context_serves_copies_of_another<D: Driver>(driver: &D, _: Limits) {
    if !has_two(driver) {
        return;
    }
    let bench = Bench::new(driver);
    let bytes = pattern(27, bench.granule_bytes);
    let start = NonNull::from(bytes.as_slice()).cast();
    // SAFETY: `bytes` lives until the end of the case, after the registration.
    unsafe { driver.host_register(start, bytes.len(), PinnedFor::CurrentContext) }
        .expect("register");
    let other = stream_of_other(driver);
    let mapped = mapped_on_other(&bench, &[OTHER]);
    copy_in(driver, mapped.range, &bytes, other).expect("copy in");
    let mut back = vec![0; bytes.len()];
    copy_out(driver, &mut back, mapped.range, other).expect("copy out");
    assert_same(&back, &bytes, "through memory that is pinned for device 0");
    // SAFETY: the copies have been waited for.
    unsafe { driver.host_unregister(start) }.expect("unregister");
    destroy(driver, other);
    bench.tear_down(mapped);
    driver.make_current(DEVICE).expect("device 0");
}
