//! Memory of a process: made, mapped, written so that each page tells by whom, and looked at.
//!
//! Everything here panics when it is refused, but for [`holds`]: a test that expects a refusal calls the pool.

use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, VaRange,
};
use vmm_pool::{Class, Pool, VirtualHandle};

/// The simulated driver's granularity.
pub const UNIT: u64 = GRANULARITY_BYTES;

/// A handle of new memory on `device`.
pub fn create(
    pool: &Pool<SimDriver>,
    device: DeviceOrdinal,
    units: u64,
    class: Class,
) -> VirtualHandle {
    let prop = AllocationProp::pinned_on(device);
    let created = pool.enter().create(units * UNIT, &prop, class);
    created.unwrap_or_else(|error| panic!("{units} units on {device:?}: {error}"))
}

/// Fresh addresses.
pub fn reserve(pool: &Pool<SimDriver>, size_bytes: u64) -> VaRange {
    let reserved = pool.driver().reserve(size_bytes, 0, DeviceAddress(0));
    let start = reserved.unwrap_or_else(|code| panic!("{size_bytes} bytes of addresses: {code}"));
    VaRange::new(start, size_bytes)
}

/// Maps `handle` at fresh addresses, where `device` may read and write.
pub fn map(
    pool: &Pool<SimDriver>,
    handle: VirtualHandle,
    units: u64,
    device: DeviceOrdinal,
) -> VaRange {
    let range = reserve(pool, units * UNIT);
    let mapped = pool.enter().map(range, 0, handle);
    mapped.unwrap_or_else(|error| panic!("mapping at {range:?}: {error}"));
    let allowed = pool.enter().set_access(range, &[AccessDesc::read_write(device)]);
    allowed.unwrap_or_else(|error| panic!("access to {range:?}: {error}"));
    range
}

/// Four kibibytes that tell `seed` from any other.
pub fn page_of(seed: u64) -> Vec<u8> {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(512)
}

/// Fills `range` with pages of `seed`, as `device` would.
pub fn write(driver: &SimDriver, device: DeviceOrdinal, range: VaRange, seed: u64) {
    let written = driver.core().fill_device(device, range, &page_of(seed));
    written.unwrap_or_else(|code| panic!("writing to {range:?}: {code}"));
}

/// Does all of `range` hold pages of `seed`, as `device` sees it?
pub fn holds(
    driver: &SimDriver,
    device: DeviceOrdinal,
    range: VaRange,
    seed: u64,
) -> Result<bool, DriverCode> {
    driver.core().device_holds(device, range, &page_of(seed))
}
