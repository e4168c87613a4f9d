//! Cases about host memory that devices reach.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]

use std::os::fd::AsFd as _;
use std::ptr::NonNull;

use super::{Bench, Case, DEVICE, Limits, Mapped, assert_same, case_list, pattern, refused};
use sublet_driver::{
    AllocationProp, DeviceAddress, DeviceAttribute, DeviceOrdinal, Driver, DriverCode, Location,
    LocationKind, PinnedFor, RawHandle, VaRange,
};

case_list![
    registered_host_memory_is_reached_at_the_hosts_addresses,
    a_host_file_is_one_memory_for_the_host_the_device_and_importers,
    addresses_for_a_host_file_are_for_it_alone,
    a_host_file_may_be_mapped_twice_and_again,
];

fn clear<D: Driver>(bench: &Bench<'_, D>, range: VaRange) {
    // SAFETY: the case alone uses the range, which stays until the stream is waited for below.
    unsafe { bench.driver.fill_with_zeros(range, bench.stream) }.expect("fill");
    bench.driver.stream_synchronize(bench.stream).expect("wait");
}

fn registered_host_memory_is_reached_at_the_hosts_addresses<D: Driver>(driver: &D, _: Limits) {
    for device in (0..driver.device_count().expect("count")).map(DeviceOrdinal) {
        let attribute = DeviceAttribute::HOST_ADDRESSES_FOR_REGISTERED;
        if driver.device_attribute(device, attribute).expect("attribute") == 0 {
            return;
        }
    }
    let bench = Bench::new(driver);
    let mut memory = vec![7_u8; 1 << 20];
    let start = NonNull::from(memory.as_mut_slice()).cast::<u8>();
    // SAFETY: `memory` lives until the end of the case, after the registration.
    unsafe { driver.host_register(start, memory.len(), PinnedFor::AllContexts) }.expect("register");
    let address = DeviceAddress(start.as_ptr().expose_provenance() as u64);
    clear(&bench, VaRange::new(address, memory.len() as u64));
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_unregister(start) }.expect("unregister");
    assert_same(&memory, &vec![0; memory.len()], "what the device has written");
}

fn host_prop() -> AllocationProp {
    let location = Location { kind: LocationKind::HOST_NUMA, id: 0 };
    AllocationProp { location, ..AllocationProp::pinned_on(DEVICE) }
}

/// Makes a host file. `None` if the driver makes host memory only by its own allocator.
fn host_file<D: Driver>(bench: &Bench<'_, D>) -> Option<RawHandle> {
    match bench.driver.create_host_file(bench.granule_bytes, &host_prop()) {
        Ok(handle) => Some(handle),
        Err(error) => {
            refused::<()>(Err(error), &[DriverCode::NOT_SUPPORTED], "a host file");
            None
        }
    }
}

fn map<D: Driver>(bench: &Bench<'_, D>, handle: RawHandle) -> Mapped {
    let start = bench.driver.reserve_for_host_file(handle, bench.granule_bytes);
    let range = VaRange::new(start.expect("addresses"), bench.granule_bytes);
    assert_eq!(range.start.0 % bench.granule_bytes, 0, "{range:?} is misaligned");
    bench.map_at(range, handle);
    Mapped { range, handle }
}

fn end<D: Driver>(bench: &Bench<'_, D>, mapped: Mapped) {
    let busy = bench.driver.free_of_host_file(mapped.range).expect("its reservation");
    refused(busy, &[DriverCode::INVALID_VALUE], "to free what is mapped");
    bench.unmap(mapped.range);
    bench.release(mapped.handle);
    bench.driver.free_of_host_file(mapped.range).expect("its reservation").expect("free");
    assert!(bench.driver.free_of_host_file(mapped.range).is_none(), "it was freed");
}

fn host_bytes(range: VaRange) -> Vec<u8> {
    let (start, size) = (usize::try_from(range.start.0), usize::try_from(range.size_bytes));
    let start = std::ptr::with_exposed_provenance::<u8>(start.expect("an address"));
    // SAFETY: the range is mapped for the host, and nothing writes there during the call.
    unsafe { std::slice::from_raw_parts(start, size.expect("a size")) }.to_vec()
}

fn a_host_file_is_one_memory_for_the_host_the_device_and_importers<D: Driver>(
    driver: &D,
    _: Limits,
) {
    let bench = Bench::new(driver);
    let Some(handle) = host_file(&bench) else { return };
    let own = map(&bench, handle);
    let fd = driver.export_fd(handle).expect("export");
    let import = driver.import_fd(fd.as_fd()).expect("import");
    drop(fd);
    assert_eq!(driver.properties(import).expect("properties"), host_prop());
    let imported = map(&bench, import);
    let bytes = pattern(3, bench.granule_bytes);
    bench.write(own.range, &bytes);
    assert_same(&bench.read(imported.range), &bytes, "through the import");
    assert_same(&host_bytes(own.range), &bytes, "by the host");
    end(&bench, own);
    assert_same(&host_bytes(imported.range), &bytes, "after the source went");
    clear(&bench, imported.range);
    assert_same(&host_bytes(imported.range), &vec![0; bytes.len()], "what the device has written");
    end(&bench, imported);
}

fn addresses_for_a_host_file_are_for_it_alone<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let invalid = &[DriverCode::INVALID_VALUE];
    let Some(handle) = host_file(&bench) else { return };
    let of_driver = bench.create(bench.granule_bytes);
    refused(driver.reserve_for_host_file(of_driver, 0), invalid, "for memory of the driver's");
    refused(driver.reserve_for_host_file(handle, 3), invalid, "an alignment of three");
    let start = driver.reserve_for_host_file(handle, 0).expect("addresses");
    let place = VaRange::new(start, bench.granule_bytes);
    let other = host_file(&bench).expect("a second file");
    refused(driver.map(place, other), invalid, "another file");
    let half = VaRange::new(start, bench.granule_bytes / 2);
    refused(driver.map(half, handle), invalid, "a half");
    let elsewhere = bench.reserve(bench.granule_bytes);
    refused(driver.map(elsewhere, handle), invalid, "a host file at addresses of the driver's");
    bench.map_at(place, handle);
    refused(driver.map(place, handle), invalid, "a second time");
    bench.free(elsewhere);
    end(&bench, Mapped { range: place, handle });
    // A place that nobody has mapped can be freed.
    let start = driver.reserve_for_host_file(other, 0).expect("addresses");
    let place = VaRange::new(start, bench.granule_bytes);
    driver.free_of_host_file(place).expect("its reservation").expect("free");
    bench.release(other);
    refused(driver.reserve_for_host_file(other, 0), invalid, "for a file that has ended");
    bench.release(of_driver);
}

fn a_host_file_may_be_mapped_twice_and_again<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let Some(handle) = host_file(&bench) else { return };
    let [first, second] = [(); 2].map(|()| map(&bench, handle).range);
    let bytes = pattern(5, bench.granule_bytes);
    bench.write(first, &bytes);
    assert_same(&bench.read(second), &bytes, "at the second addresses");
    bench.unmap(first);
    assert_same(&host_bytes(second), &bytes, "after the first went");
    bench.map_at(first, handle);
    assert_same(&bench.read(first), &bytes, "mapped again");
    bench.unmap(second);
    driver.free_of_host_file(second).expect("its reservation").expect("free");
    end(&bench, Mapped { range: first, handle });
}
