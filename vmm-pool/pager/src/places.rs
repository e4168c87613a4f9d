//! The choice of addresses for windows.
//!
//! The words of a launch show the memory that it names. The driver gives addresses from 8 GiB upwards, where a word may also be
//! a pair of small numbers: sizes, strides or counters. Each such pair would count as a use of some chunk. So windows have far
//! higher addresses. The upper half of such an address is a number that kernels are hardly ever given.

use std::sync::atomic::{AtomicU64, Ordering};

use vmm_pool::driver::{DeviceAddress, Driver, DriverResult, VaRange};

/// The range for windows. Programs are below it, their libraries and stacks above.
const FIRST: u64 = 0x5b1d << 32;
const END: u64 = 0x7000 << 32;
/// Windows begin at a multiple of this, and leave as much between them.
const STEP: u64 = 1 << 32;
/// The address at which the next window of this process is tried.
static NEXT: AtomicU64 = AtomicU64::new(FIRST);

/// Reserves addresses for a window of `size_bytes`. The driver may choose another place than the preferred one.
///
/// # Driver calls
/// `cuMemAddressReserve`, whose fifth argument is the address that the caller prefers.
pub(super) fn reserve<D: Driver>(driver: &D, size_bytes: u64) -> DriverResult<VaRange> {
    let far = DeviceAddress(next(size_bytes));
    let start = driver
        .address_reserve(size_bytes, 0, far)
        .or_else(|_| driver.address_reserve(size_bytes, 0, DeviceAddress(0)))?;
    Ok(VaRange::new(start, size_bytes))
}

fn next(size_bytes: u64) -> u64 {
    let behind = |place: u64| {
        place.checked_add(size_bytes)?.checked_next_multiple_of(STEP)?.checked_add(STEP)
    };
    let place = |next: u64| if behind(next).is_some_and(|end| end <= END) { next } else { FIRST };
    let stepped = NEXT.try_update(Ordering::Relaxed, Ordering::Relaxed, |next| behind(place(next)));
    // Only a size that no device has finds no place.
    place(stepped.unwrap_or(FIRST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_lie_far_away_and_apart() {
        let mut end = FIRST;
        for size_bytes in [1 << 20, 1 << 40, STEP, 1 << 43, 1 << 30] {
            let start = next(size_bytes);
            assert!(start >= end && start.is_multiple_of(STEP), "{start:#x} behind {end:#x}");
            end = start + size_bytes;
            assert!(end <= END);
        }
        // Behind the last place comes the first.
        let starts = [(); 3].map(|()| next(1 << 43));
        assert!(starts.contains(&FIRST) && starts.iter().all(|start| start + (1 << 43) <= END));
        assert_eq!(next(u64::MAX), FIRST, "the driver refuses the size");
    }
}
