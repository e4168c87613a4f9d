//! Cases about contents: where bytes are, who sees them, and how long they stay.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]

use std::os::fd::AsFd;

use super::{Bench, Case, Limits, Mapped, assert_same, case_list, pattern, refused};
use sublet_driver::{DeviceAddress, Driver, DriverCode, VaRange};

case_list![
    copies_come_back_as_they_went,
    copies_of_one_stream_happen_in_order,
    a_copy_between_two_places_of_a_device_arrives,
    two_mappings_of_a_handle_share_bytes,
    contents_survive_release_while_mapped,
    contents_survive_unmap_while_the_handle_is_held,
    an_import_shares_bytes_with_its_source,
    an_import_outlives_its_source,
    properties_survive_export_and_import,
    what_was_imported_is_not_exported_and_its_descriptor_imports_again,
    remapped_addresses_show_the_new_memory,
    a_freed_reservation_can_be_had_again_at_its_address,
    one_call_gives_access_to_many_mappings,
    one_hundred_blocks_keep_their_own_bytes,
];

fn copies_come_back_as_they_went<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(3 * bench.granule_bytes);
    let bytes = pattern(1, mapped.range.size_bytes);
    bench.write(mapped.range, &bytes);
    assert_same(&bench.read(mapped.range), &bytes, "whole mapping");
    let part = VaRange::new(DeviceAddress(mapped.range.start.0 + 12_345), 6_789);
    assert_same(&bench.read(part), &bytes[12_345..19_134], "unaligned part");
    bench.tear_down(mapped);
}

fn copies_of_one_stream_happen_in_order<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let rounds: Vec<Vec<u8>> = (0..20).map(|seed| pattern(seed, mapped.range.size_bytes)).collect();
    for bytes in &rounds {
        let source = std::ptr::NonNull::from(bytes.as_slice()).cast();
        // SAFETY: `rounds` outlives the wait below, and nobody writes it.
        unsafe { driver.copy_to_device(mapped.range, source, bench.stream) }.expect("copy in");
    }
    driver.synchronize().expect("wait for the device");
    assert_same(&bench.read(mapped.range), &rounds[19], "last copy wins");
    bench.tear_down(mapped);
}

fn a_copy_between_two_places_of_a_device_arrives<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let [from, to] = [28, 29].map(|seed| {
        let mapped = bench.mapped(bench.granule_bytes);
        bench.write(mapped.range, &pattern(seed, bench.granule_bytes));
        mapped
    });
    // SAFETY: both are mapped, and nobody else touches them before the wait.
    unsafe { driver.copy_between(to.range.start, from.range, bench.stream) }.expect("copy");
    driver.stream_synchronize(bench.stream).expect("wait");
    for range in [from.range, to.range] {
        assert_same(&bench.read(range), &pattern(28, bench.granule_bytes), "both ends");
    }
    bench.tear_down(to);
    bench.tear_down(from);
}

fn two_mappings_of_a_handle_share_bytes<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let first = bench.mapped(bench.granule_bytes);
    let second = bench.reserve(bench.granule_bytes);
    bench.map_at(second, first.handle);
    let bytes = pattern(2, bench.granule_bytes);
    bench.write(first.range, &bytes);
    assert_same(&bench.read(second), &bytes, "second mapping");
    let bytes = pattern(3, bench.granule_bytes);
    bench.write(second, &bytes);
    assert_same(&bench.read(first.range), &bytes, "first mapping");
    bench.unmap(second);
    bench.free(second);
    bench.tear_down(first);
}

fn contents_survive_release_while_mapped<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let bytes = pattern(4, bench.granule_bytes);
    bench.write(mapped.range, &bytes);
    bench.release(mapped.handle);
    assert_same(&bench.read(mapped.range), &bytes, "after release");
    bench.unmap(mapped.range);
    bench.free(mapped.range);
}

fn contents_survive_unmap_while_the_handle_is_held<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let bytes = pattern(5, bench.granule_bytes);
    bench.write(mapped.range, &bytes);
    bench.unmap(mapped.range);
    bench.map_at(mapped.range, mapped.handle);
    assert_same(&bench.read(mapped.range), &bytes, "after unmap and map");
    bench.tear_down(mapped);
}

fn an_import_shares_bytes_with_its_source<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let source = bench.mapped(bench.granule_bytes);
    let fd = driver.export_fd(source.handle).expect("export");
    let handle = driver.import_fd(fd.as_fd()).expect("import");
    drop(fd);
    let range = bench.reserve(bench.granule_bytes);
    bench.map_at(range, handle);
    let bytes = pattern(6, bench.granule_bytes);
    bench.write(source.range, &bytes);
    assert_same(&bench.read(range), &bytes, "through the import");
    bench.tear_down(Mapped { range, handle });
    bench.tear_down(source);
}

fn an_import_outlives_its_source<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let source = bench.mapped(bench.granule_bytes);
    let bytes = pattern(7, bench.granule_bytes);
    bench.write(source.range, &bytes);
    let fd = driver.export_fd(source.handle).expect("export");
    bench.tear_down(source);
    let handle = driver.import_fd(fd.as_fd()).expect("import");
    drop(fd);
    let range = bench.reserve(bench.granule_bytes);
    bench.map_at(range, handle);
    assert_same(&bench.read(range), &bytes, "after the source went");
    bench.tear_down(Mapped { range, handle });
}

fn properties_survive_export_and_import<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let source = bench.create(bench.granule_bytes);
    let fd = driver.export_fd(source).expect("export");
    let import = driver.import_fd(fd.as_fd()).expect("import");
    for (handle, what) in [(source, "source"), (import, "import")] {
        let found = driver.properties(handle).expect("properties");
        let wanted = super::prop();
        assert_eq!(found.location, wanted.location, "location of the {what}");
        assert_eq!(found.kind, wanted.kind, "kind of the {what}");
        bench.release(handle);
    }
}

fn what_was_imported_is_not_exported_and_its_descriptor_imports_again<D: Driver>(
    driver: &D,
    _: Limits,
) {
    let bench = Bench::new(driver);
    let source = bench.create(bench.granule_bytes);
    let fd = driver.export_fd(source).expect("export");
    bench.release(source);
    let import = driver.import_fd(fd.as_fd()).expect("import");
    let found = driver.properties(import).expect("properties");
    assert_eq!(found.requested_handle_types, 0, "handle types of an import");
    refused(driver.export_fd(import), &[DriverCode::INVALID_VALUE], "export of an import");
    let again = driver.import_fd(fd.as_fd()).expect("imported again, without its first owner");
    bench.release(import);
    bench.release(again);
}

fn remapped_addresses_show_the_new_memory<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let old = bench.mapped(bench.granule_bytes);
    bench.write(old.range, &pattern(8, bench.granule_bytes));
    bench.unmap(old.range);
    bench.release(old.handle);
    let handle = bench.create(bench.granule_bytes);
    bench.map_at(old.range, handle);
    let bytes = pattern(9, bench.granule_bytes);
    bench.write(old.range, &bytes);
    assert_same(&bench.read(old.range), &bytes, "new memory, old address");
    bench.tear_down(Mapped { range: old.range, handle });
}

fn a_freed_reservation_can_be_had_again_at_its_address<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let size_bytes = 8 * bench.granule_bytes;
    let range = bench.reserve(size_bytes);
    bench.free(range);
    let again = driver.address_reserve(size_bytes, 0, range.start).expect("addresses");
    assert_eq!(again, range.start, "reserved again elsewhere");
    bench.free(range);
}

fn one_call_gives_access_to_many_mappings<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let range = bench.reserve(4 * bench.granule_bytes);
    for part in parts(range, bench.granule_bytes) {
        let handle = bench.create(bench.granule_bytes);
        driver.map(part, handle).expect("map");
        bench.release(handle);
    }
    bench.allow(range);
    let bytes = pattern(10, range.size_bytes);
    bench.write(range, &bytes);
    assert_same(&bench.read(range), &bytes, "across mappings");
    bench.unmap(range);
    bench.free(range);
}

fn one_hundred_blocks_keep_their_own_bytes<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let blocks: Vec<Mapped> = (0..100).map(|_| bench.mapped(bench.granule_bytes)).collect();
    let head = |block: &Mapped| VaRange::new(block.range.start, 4096);
    for (seed, block) in (0_u8..).zip(&blocks) {
        bench.write(head(block), &pattern(seed, 4096));
    }
    for (seed, block) in (0_u8..).zip(&blocks) {
        assert_same(&bench.read(head(block)), &pattern(seed, 4096), "block");
    }
    for block in blocks {
        bench.tear_down(block);
    }
}

fn parts(range: VaRange, part_bytes: u64) -> impl Iterator<Item = VaRange> {
    (0..range.size_bytes / part_bytes).map(move |index| {
        VaRange::new(DeviceAddress(range.start.0 + index * part_bytes), part_bytes)
    })
}
