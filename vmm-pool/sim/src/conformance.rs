//! The behaviour that every [`Driver`] must show, as functions that any driver can be put through.
//!
//! The list runs on the simulated driver in every build, and on hardware by hand, which keeps the simulation honest. Each case
//! is independent: it makes what it needs on device 0, and leaves nothing behind. It panics with the outcome that it expected.
//! If a real driver may answer with one of several codes, the case lists them.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]
#![expect(clippy::expect_used, reason = "a case reports by panicking")]

mod accounting;
mod bytes;
mod contexts;
mod events;
mod host;
mod pieces;
mod refusals;

use std::fmt::Debug;
use std::ptr::NonNull;

use sublet_driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverResult,
    RawHandle, RawStream, VaRange,
};

/// The assumptions that a case may make about its surroundings.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The bytes by which free memory may change without our doing: 0 on a node of our own.
    pub free_tolerance_bytes: u64,
}

/// One case of the list.
#[derive(Debug)]
pub struct Case<D: Driver> {
    /// The condition and its outcome.
    pub name: &'static str,
    /// The check. It panics when the driver behaves otherwise.
    pub run: fn(&D, Limits),
}

/// All cases, in the order to run them in.
pub fn cases<D: Driver>() -> Vec<Case<D>> {
    let mut all = bytes::cases();
    all.extend(refusals::cases());
    all.extend(accounting::cases());
    all.extend(contexts::cases());
    all.extend(events::cases());
    all.extend(host::cases());
    all.extend(pieces::cases());
    all
}

/// Builds a list of cases from functions of a module, by their names.
macro_rules! case_list {
    ($($name:ident),* $(,)?) => {
        pub(super) fn cases<D: Driver>() -> Vec<Case<D>> {
            vec![$(Case { name: stringify!($name), run: $name::<D> },)*]
        }
    };
}
use case_list;

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

/// A driver, its granularity and a stream, for the length of a case.
#[derive(Debug)]
struct Bench<'a, D: Driver> {
    driver: &'a D,
    granule_bytes: u64,
    stream: RawStream,
}

/// Memory mapped for reading and writing, with its handle still held.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    range: VaRange,
    handle: RawHandle,
}

fn prop() -> AllocationProp {
    AllocationProp::pinned_on(DEVICE)
}

impl<'a, D: Driver> Bench<'a, D> {
    fn new(driver: &'a D) -> Self {
        driver.make_current(DEVICE).expect("device 0 is usable");
        let granularity =
            driver.allocation_granularity(&prop()).expect("pinned device memory has a granularity");
        Self {
            driver,
            granule_bytes: granularity.size_bytes,
            stream: driver.stream_create().expect("a stream"),
        }
    }

    fn reserve(&self, size_bytes: u64) -> VaRange {
        let start =
            self.driver.address_reserve(size_bytes, 0, DeviceAddress(0)).expect("addresses");
        assert_eq!(start.0 % self.granule_bytes, 0, "reservation at {start} is misaligned");
        VaRange::new(start, size_bytes)
    }

    fn create(&self, size_bytes: u64) -> RawHandle {
        self.driver.create(size_bytes, &prop()).expect("memory")
    }

    fn map_at(&self, range: VaRange, handle: RawHandle) {
        self.driver.map(range, handle).expect("map");
        self.allow(range);
    }

    fn allow(&self, range: VaRange) {
        self.driver.set_access(range, &[AccessDesc::read_write(DEVICE)]).expect("access");
    }

    fn mapped(&self, size_bytes: u64) -> Mapped {
        let range = self.reserve(size_bytes);
        let handle = self.create(size_bytes);
        self.map_at(range, handle);
        Mapped { range, handle }
    }

    fn unmap(&self, range: VaRange) {
        // SAFETY: the case has waited for its copies; nobody else knows the range.
        unsafe { self.driver.unmap(range) }.expect("unmap");
    }

    fn release(&self, handle: RawHandle) {
        self.try_release(handle).expect("release");
    }

    fn try_release(&self, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the handle is the case's own, or none at all; the case uses it no more.
        unsafe { self.driver.release(handle) }
    }

    fn free(&self, range: VaRange) {
        self.try_free(range).expect("address free");
    }

    fn try_free(&self, range: VaRange) -> DriverResult<()> {
        // SAFETY: the range is the case's own; what is still mapped in it is not in use.
        unsafe { self.driver.address_free(range) }
    }

    fn tear_down(&self, mapped: Mapped) {
        self.unmap(mapped.range);
        self.release(mapped.handle);
        self.free(mapped.range);
    }

    fn write(&self, range: VaRange, bytes: &[u8]) {
        assert_eq!(range.size_bytes, bytes.len() as u64);
        let source = NonNull::from(bytes).cast();
        // SAFETY: `bytes` outlives the wait below; nobody writes a shared slice.
        unsafe { self.driver.copy_to_device(range, source, self.stream) }.expect("copy in");
        self.driver.stream_synchronize(self.stream).expect("wait");
    }

    fn read(&self, range: VaRange) -> Vec<u8> {
        let length = usize::try_from(range.size_bytes).expect("a size that fits");
        let mut bytes = vec![0; length];
        let target = NonNull::from(bytes.as_mut_slice()).cast();
        // SAFETY: `bytes` outlives the wait below and is touched by nobody before it.
        unsafe { self.driver.copy_to_host(target, range, self.stream) }.expect("copy out");
        self.driver.stream_synchronize(self.stream).expect("wait");
        bytes
    }

    fn free_bytes(&self) -> u64 {
        let info = self.driver.memory_info().expect("memory info");
        assert!(info.free_bytes <= info.total_bytes, "more memory is free than there is: {info:?}");
        info.free_bytes
    }
}

impl<D: Driver> Drop for Bench<'_, D> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and used by nobody else.
        let ended = unsafe { self.driver.stream_destroy(self.stream) };
        assert!(ended.is_ok() || std::thread::panicking(), "stream not ended: {ended:?}");
    }
}

/// `count` bytes that differ from each other and from those of another `seed`.
fn pattern(seed: u8, count: u64) -> Vec<u8> {
    (0..count)
        .map(|i| {
            // CAST: the low byte of each is what is wanted.
            #[expect(clippy::cast_possible_truncation, reason = "the low byte is meant")]
            let low = (i ^ (i >> 8) ^ (i >> 16)) as u8;
            low.wrapping_mul(31).wrapping_add(seed)
        })
        .collect()
}

#[track_caller]
fn assert_same(got: &[u8], wanted: &[u8], what: &str) {
    let first = got.iter().zip(wanted).position(|(a, b)| a != b);
    assert!(
        first.is_none() && got.len() == wanted.len(),
        "{what}: contents differ, first at byte {first:?} of {}",
        wanted.len()
    );
}

/// Checks that the call has failed with one of `codes`.
#[track_caller]
fn refused<T: Debug>(result: DriverResult<T>, codes: &[DriverCode], what: &str) {
    match result {
        Ok(value) => panic!("{what}: allowed ({value:?}), but should fail with {codes:?}"),
        Err(error) => {
            assert!(codes.contains(&error.code), "{what}: {error}, but should be one of {codes:?}");
        }
    }
}
