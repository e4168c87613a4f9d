//! Cases about free memory: how much there is, and when.

use std::os::fd::AsFd;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use super::{Bench, Case, Limits, Mapped, case_list, prop, refused};
use sublet_driver::{Driver, DriverCode};

case_list![
    create_takes_memory_and_release_returns_it,
    a_mapping_keeps_released_memory,
    an_exported_descriptor_keeps_memory,
    a_program_that_is_started_has_no_exported_descriptor,
    an_import_keeps_memory,
    out_of_memory_leaves_nothing_behind,
];

/// The number of granules that stands out from the noise of a shared device.
const GRANULES: u64 = 32;

#[track_caller]
fn assert_free<D: Driver>(bench: &Bench<'_, D>, wanted: u64, limits: Limits, when: &str) {
    let free = bench.free_bytes();
    assert!(
        free.abs_diff(wanted) <= limits.free_tolerance_bytes,
        "{when}: {free} bytes are free, should be {wanted}"
    );
}

fn create_takes_memory_and_release_returns_it<D: Driver>(driver: &D, limits: Limits) {
    let bench = Bench::new(driver);
    let size_bytes = GRANULES * bench.granule_bytes;
    let before = bench.free_bytes();
    let handle = bench.create(size_bytes);
    assert_free(&bench, before - size_bytes, limits, "after create");
    bench.release(handle);
    assert_free(&bench, before, limits, "after release");
}

fn a_mapping_keeps_released_memory<D: Driver>(driver: &D, limits: Limits) {
    let bench = Bench::new(driver);
    let size_bytes = GRANULES * bench.granule_bytes;
    // The first mapping may cost page tables, which stay.
    let warm = bench.mapped(size_bytes);
    bench.tear_down(warm);
    let before = bench.free_bytes();
    let mapped = bench.mapped(size_bytes);
    bench.release(mapped.handle);
    assert_free(&bench, before - size_bytes, limits, "after release");
    bench.unmap(mapped.range);
    assert_free(&bench, before, limits, "after unmap");
    bench.free(mapped.range);
}

fn an_exported_descriptor_keeps_memory<D: Driver>(driver: &D, limits: Limits) {
    let bench = Bench::new(driver);
    let size_bytes = GRANULES * bench.granule_bytes;
    let before = bench.free_bytes();
    let handle = bench.create(size_bytes);
    let fd = driver.export_fd(handle).expect("export");
    let copy = fd.try_clone().expect("duplicate");
    bench.release(handle);
    assert_free(&bench, before - size_bytes, limits, "after release");
    drop(fd);
    assert_free(&bench, before - size_bytes, limits, "with one left");
    drop(copy);
    assert_free(&bench, before, limits, "after the last close");
}

fn a_program_that_is_started_has_no_exported_descriptor<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let handle = bench.create(bench.granule_bytes);
    let fd = driver.export_fd(handle).expect("export");
    let flags = fcntl(&fd, FcntlArg::F_GETFD).expect("an open descriptor");
    assert!(FdFlag::from_bits_truncate(flags).contains(FdFlag::FD_CLOEXEC), "{flags}");
    bench.release(handle);
}

fn an_import_keeps_memory<D: Driver>(driver: &D, limits: Limits) {
    let bench = Bench::new(driver);
    let size_bytes = GRANULES * bench.granule_bytes;
    let before = bench.free_bytes();
    let handle = bench.create(size_bytes);
    let fd = driver.export_fd(handle).expect("export");
    let import = driver.import_fd(fd.as_fd()).expect("import");
    drop(fd);
    bench.release(handle);
    assert_free(&bench, before - size_bytes, limits, "with the import");
    bench.release(import);
    assert_free(&bench, before, limits, "after both");
}

fn out_of_memory_leaves_nothing_behind<D: Driver>(driver: &D, limits: Limits) {
    let bench = Bench::new(driver);
    let before = bench.free_bytes();
    let total = driver.memory_info().expect("memory info").total_bytes;
    let too_much = total / bench.granule_bytes * bench.granule_bytes + bench.granule_bytes;
    let no_memory = &[DriverCode::OUT_OF_MEMORY];
    let result = driver.create(too_much, &prop());
    refused(result, no_memory, "create of more than there is");
    assert_free(&bench, before, limits, "after one refusal");

    let half = before / 2 / bench.granule_bytes * bench.granule_bytes;
    let first = bench.create(half);
    let second = driver.create(half + 2 * bench.granule_bytes, &prop());
    refused(second, no_memory, "create of more than is left");
    assert_free(&bench, before - half, limits, "after another refusal");
    let range = bench.reserve(half);
    bench.map_at(range, first);
    bench.tear_down(Mapped { range, handle: first });
    assert_free(&bench, before, limits, "after release");
}
