//! Patterns in simulated device memory: every word of a range tells which write it is from.

#![expect(unsafe_code, reason = "reads and writes simulated device memory through the driver")]

use std::cell::RefCell;
use std::sync::Arc;

use vmm_pool::driver::sim::{SimDriver, Work};
use vmm_pool::driver::{DeviceOrdinal, DriverCode, RawStream, VaRange};

const PAGE_BYTES: usize = 4096;

thread_local! {
    /// What was read last; a fresh one each time would cost more than the reading.
    static SEEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Odd, so that no two patterns look alike.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number of the worker whose pattern this word of memory is from.
pub(crate) fn writer_of(word: u64) -> u64 {
    // Newton's iteration for the inverse of an odd number doubles the bits that are right.
    let inverse =
        (0..6).fold(SPREAD, |x, _| x.wrapping_mul(2_u64.wrapping_sub(SPREAD.wrapping_mul(x))));
    word.wrapping_mul(inverse) >> 32
}

fn page_of(pattern: u64) -> Vec<u8> {
    pattern.wrapping_mul(SPREAD).to_le_bytes().repeat(PAGE_BYTES / 8)
}

/// The bytes of memory that holds `pattern`.
fn image_of(pattern: u64, size_bytes: u64) -> Vec<u8> {
    page_of(pattern).repeat(length(size_bytes) / PAGE_BYTES)
}

#[expect(clippy::cast_possible_truncation, reason = "a simulated device fits the address space")]
fn length(size_bytes: u64) -> usize {
    size_bytes as usize
}

/// Fills `range`, as `device` reaches it.
pub(super) fn write(
    driver: &SimDriver,
    device: DeviceOrdinal,
    range: VaRange,
    pattern: u64,
) -> Result<(), DriverCode> {
    let image = image_of(pattern, range.size_bytes);
    let source = image.as_ptr().expose_provenance() as u64;
    // SAFETY: `image` is host memory of this length; the target is checked by the driver.
    unsafe { driver.core().copy((device, range.start.0), (device, source), range.size_bytes) }
}

/// The same by a stream, some time later.
pub(super) fn queue_write(
    driver: &SimDriver,
    (device, stream): (DeviceOrdinal, RawStream),
    range: VaRange,
    pattern: u64,
) -> Result<(), DriverCode> {
    let image = Arc::new(image_of(pattern, range.size_bytes));
    let work: Work = Arc::new(move |core| {
        let source = image.as_ptr().expose_provenance() as u64;
        // SAFETY: the closure owns `image`; the target is checked by the driver.
        unsafe { core.copy((device, range.start.0), (device, source), range.size_bytes) }
    });
    driver.core().enqueue(stream, work)
}

/// Does `range` hold the pattern everywhere? An error when `device` cannot reach it.
pub(super) fn holds(
    driver: &SimDriver,
    device: DeviceOrdinal,
    range: VaRange,
    pattern: u64,
) -> Result<bool, DriverCode> {
    SEEN.with_borrow_mut(|seen| {
        seen.resize(length(range.size_bytes).max(seen.len()), 0);
        let seen = &mut seen[..length(range.size_bytes)];
        let target = seen.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: `seen` is host memory of this length; the source is checked by the driver.
        unsafe { driver.core().copy((device, target), (device, range.start.0), range.size_bytes) }?;
        let page = page_of(pattern);
        Ok(seen.chunks(PAGE_BYTES).all(|part| part == &page[..part.len()]))
    })
}
