//! Patterns in simulated device memory: every word of a range that is not zero tells which write it is from.

#![expect(unsafe_code, reason = "reads and writes simulated device memory through the driver")]

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Arc;

use vmm_pool::driver::sim::{SimDriver, Touch, Work};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode, RawStream, VaRange};

const PAGE_LENGTH: usize = 4096;
/// What has a pattern of its own, in bytes.
pub(super) const PAGE_BYTES: u64 = PAGE_LENGTH as u64;

thread_local! {
    /// What was read last; a fresh one each time would cost more than the reading.
    static SEEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Odd, so that no two patterns look alike.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number of the worker whose pattern this word of memory is from.
pub(crate) fn writer_of(word: u64) -> u64 {
    pattern_of(word) >> 32
}

fn pattern_of(word: u64) -> u64 {
    // Newton's iteration for the inverse of an odd number doubles the bits that are right.
    let inverse =
        (0..6).fold(SPREAD, |x, _| x.wrapping_mul(2_u64.wrapping_sub(SPREAD.wrapping_mul(x))));
    word.wrapping_mul(inverse)
}

/// What is in a range: one pattern, but perhaps nothing in its second half, and another pattern in one page. So a pause
/// meets memory that is all new, in part, not at all, and zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint {
    pub(super) pattern: u64,
    /// Is the second half zero?
    pub(super) is_hollow: bool,
    /// A page with a pattern of its own: which, and what.
    pub(super) page: Option<(u64, u64)>,
}

impl Paint {
    /// The same everywhere.
    pub(super) fn plain(pattern: u64) -> Self {
        Self { pattern, is_hollow: false, page: None }
    }

    /// What is in each page of `size_bytes`.
    fn pages(self, size_bytes: u64) -> impl Iterator<Item = u64> {
        let count = size_bytes / PAGE_BYTES;
        (0..count).map(move |index| match self.page {
            Some((page, pattern)) if page == index => pattern,
            _ if self.is_hollow && index >= count / 2 => 0,
            _ => self.pattern,
        })
    }
}

/// A page of these bytes is at this place of a range.
pub(super) fn page_at(range: VaRange, page: u64) -> VaRange {
    VaRange::new(DeviceAddress(range.start.0 + page * PAGE_BYTES), PAGE_BYTES)
}

/// How many pages a range has.
pub(super) fn page_count(range: VaRange) -> u64 {
    range.size_bytes / PAGE_BYTES
}

fn page_of(pattern: u64) -> Vec<u8> {
    pattern.wrapping_mul(SPREAD).to_le_bytes().repeat(PAGE_LENGTH / 8)
}

/// The bytes of memory with this in it.
fn image_of(paint: Paint, size_bytes: u64) -> Vec<u8> {
    let mut image = Vec::with_capacity(length(size_bytes));
    let (mut last, mut page) = (0, page_of(0));
    for pattern in paint.pages(size_bytes) {
        if pattern != last {
            (last, page) = (pattern, page_of(pattern));
        }
        image.extend_from_slice(&page);
    }
    image
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
    paint: Paint,
) -> Result<(), DriverCode> {
    let image = image_of(paint, range.size_bytes);
    let source = image.as_ptr().expose_provenance() as u64;
    // SAFETY: `image` is host memory of this length; the target is checked by the driver.
    unsafe { driver.core().copy((device, range.start.0), (device, source), range.size_bytes) }
}

/// The same by a stream, some time later.
pub(super) fn queue_write(
    driver: &SimDriver,
    (device, stream): (DeviceOrdinal, RawStream),
    range: VaRange,
    paint: Paint,
) -> Result<(), DriverCode> {
    let image = Arc::new(image_of(paint, range.size_bytes));
    let work = Work::new(move |core| {
        let source = image.as_ptr().expose_provenance() as u64;
        // SAFETY: the closure owns `image`; the target is checked by the driver.
        unsafe { core.copy((device, range.start.0), (device, source), range.size_bytes) }
    });
    driver.core().enqueue(stream, work.touching([(range, Touch::Write)]))
}

/// A kernel that reads `range`, some time later, and shows the pattern that each page has; `None` for more than one.
pub(super) fn queue_read(
    driver: &SimDriver,
    (device, stream): (DeviceOrdinal, RawStream),
    range: VaRange,
    show: impl Fn(&[Option<u64>]) + Send + Sync + 'static,
) -> Result<(), DriverCode> {
    let work = Work::new(move |core| {
        let mut seen = vec![0; length(range.size_bytes)];
        let target = seen.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: `seen` is host memory of this length; the source is checked by the driver.
        unsafe { core.copy((device, target), (device, range.start.0), range.size_bytes) }?;
        let patterns: Vec<_> = seen.chunks(PAGE_LENGTH).map(pattern_in).collect();
        show(&patterns);
        Ok(())
    });
    driver.core().enqueue(stream, work.touching([(range, Touch::Read)]))
}

/// The one that all words of a page are of.
fn pattern_in(page: &[u8]) -> Option<u64> {
    let first = page.first_chunk().copied().map(u64::from_le_bytes)?;
    // Slices are compared fast, and single words slowly.
    (page[8..] == page[..page.len() - 8]).then(|| pattern_of(first))
}

/// What `range` holds, for an error: where its pages change, and the pattern that their first word is of.
pub(super) fn told(driver: &SimDriver, device: DeviceOrdinal, range: VaRange) -> String {
    let mut words = String::new();
    let mut last = None;
    for page in 0..page_count(range) {
        let mut word = 0_u64;
        let target = std::ptr::from_mut(&mut word).expose_provenance() as u64;
        let from = page_at(range, page).start.0;
        // SAFETY: `word` is host memory of this length; the source is checked by the driver.
        let read = unsafe { driver.core().copy((device, target), (device, from), 8) };
        let seen = read.map(|()| word);
        if last.replace(seen) != Some(seen) {
            // Writing to a string does not fail.
            let _never = match seen {
                Ok(word) => write!(words, " from page {page} {:#x}", pattern_of(word)),
                Err(code) => write!(words, " from page {page} {code}"),
            };
        }
    }
    words
}

/// Does `range` hold just this? An error when `device` cannot reach it.
pub(super) fn holds(
    driver: &SimDriver,
    device: DeviceOrdinal,
    range: VaRange,
    paint: Paint,
) -> Result<bool, DriverCode> {
    SEEN.with_borrow_mut(|seen| {
        seen.resize(length(range.size_bytes).max(seen.len()), 0);
        let seen = &mut seen[..length(range.size_bytes)];
        let target = seen.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: `seen` is host memory of this length; the source is checked by the driver.
        unsafe { driver.core().copy((device, target), (device, range.start.0), range.size_bytes) }?;
        let (mut last, mut page) = (0, page_of(0));
        Ok(seen.chunks(PAGE_LENGTH).zip(paint.pages(range.size_bytes)).all(|(part, pattern)| {
            if pattern != last {
                (last, page) = (pattern, page_of(pattern));
            }
            part == &page[..part.len()]
        }))
    })
}
