//! Access to bytes, for work on streams.

#![expect(
    unsafe_code,
    reason = "stream work copies between addresses whose mapping was just checked"
)]

use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;

use super::Core;
use crate::blocks::new_memory;
use crate::memory::{Coded, Memory};
use crate::vm;
use sublet_driver::{AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, Location, VaRange};

/// The most bytes that are copied before the mapping is looked up again.
const COPY_CHUNK_BYTES: u64 = 4 << 20;

/// The kind of access that a kernel makes to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// It loads from the range.
    Read,
    /// It stores to the range, and may load.
    Write,
}

/// Proof that some ranges may be accessed. While it lives, no mapping of the process changes.
#[derive(Debug)]
pub struct AccessGuard<'a> {
    _memory: RwLockReadGuard<'a, Memory>,
}

impl Core {
    /// Checks that `device` may access all of `ranges`, and keeps the mappings while the guard lives. A range outside every
    /// reservation is host memory, for which the caller vouches.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    pub fn access(
        &self,
        device: DeviceOrdinal,
        ranges: &[(VaRange, Touch)],
    ) -> Coded<AccessGuard<'_>> {
        let memory = self.read();
        for (range, touch) in ranges {
            self.check(&memory, device, range.start.0, range.size_bytes, *touch)?;
        }
        Ok(AccessGuard { _memory: memory })
    }

    /// Checks a copy as the driver does before it accepts the copy: `current` must have access to the mapped memory in
    /// `ranges`. The work itself checks addresses where nothing is mapped.
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn check_copy(&self, current: DeviceOrdinal, ranges: &[VaRange]) -> Coded<()> {
        let memory = self.read();
        let place = Location::device(current);
        if ranges.iter().all(|range| memory.is_in_reach(*range, place)) {
            Ok(())
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    /// Counts a copy of `device` whose host side is pinned only for other devices: it works, and is slow.
    pub(crate) fn note_host_side(&self, device: DeviceOrdinal, address: u64) {
        if self.read().is_pinned_for_others(address, device) {
            self.foreign_pins.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the copies whose host memory was pinned for another device's context alone.
    pub fn copies_pinned_for_others(&self) -> u64 {
        self.foreign_pins.load(Ordering::Relaxed)
    }

    /// Copies `size_bytes` bytes. Each side is accessed as its device would.
    ///
    /// # Safety
    /// An address outside every reservation is host memory of this process that the caller may use so.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`; bytes before the offending address may have been copied.
    pub unsafe fn copy(
        &self,
        target: (DeviceOrdinal, u64),
        source: (DeviceOrdinal, u64),
        size_bytes: u64,
    ) -> Coded<()> {
        for (offset, length) in chunks(size_bytes) {
            let (to, from) = (target.1 + offset, source.1 + offset);
            let memory = self.read();
            self.check(&memory, target.0, to, length, Touch::Write)?;
            self.check(&memory, source.0, from, length, Touch::Read)?;
            let length = usize::try_from(length).map_err(|_| DriverCode::INVALID_VALUE)?;
            // SAFETY: device addresses have just been checked and stay mapped while `memory` is locked;
            // for host addresses the caller vouches.
            unsafe { vm::copy(to, from, length) };
        }
        Ok(())
    }

    /// Fills a range with copies of `pattern`, as `device` would. The length of `pattern` divides the chunk size.
    ///
    /// # Safety
    /// As [`Self::copy`].
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    pub unsafe fn fill(&self, device: DeviceOrdinal, range: VaRange, pattern: &[u8]) -> Coded<()> {
        for (offset, length) in chunks(range.size_bytes) {
            let to = range.start.0 + offset;
            let part = VaRange::new(DeviceAddress(to), length);
            let _guard = self.access(device, &[(part, Touch::Write)])?;
            let length = usize::try_from(length).map_err(|_| DriverCode::INVALID_VALUE)?;
            // SAFETY: as in `copy`.
            unsafe { vm::fill(to, length, pattern) };
        }
        Ok(())
    }

    /// Fills a range with copies of `pattern`, as `device` would. The length of `pattern` divides the chunk size. Safe: a range
    /// that is neither reserved nor registered is refused, so no other host memory is touched.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    pub fn fill_device(&self, device: DeviceOrdinal, range: VaRange, pattern: &[u8]) -> Coded<()> {
        for (offset, length) in chunks(range.size_bytes) {
            let to = range.start.0 + offset;
            let memory = self.read();
            check_reserved(&memory, to, length)?;
            self.check(&memory, device, to, length, Touch::Write)?;
            let length = usize::try_from(length).map_err(|_| DriverCode::INVALID_VALUE)?;
            // SAFETY: all of it has just been checked, and stays mapped while `memory` is locked.
            unsafe { vm::fill(to, length, pattern) };
        }
        Ok(())
    }

    /// Does a range hold only copies of `pattern`, as `device` sees it? The length of `pattern` divides the chunk size. Safe as
    /// [`Self::fill_device`].
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    pub fn device_holds(
        &self,
        device: DeviceOrdinal,
        range: VaRange,
        pattern: &[u8],
    ) -> Coded<bool> {
        for (offset, length) in chunks(range.size_bytes) {
            let from = range.start.0 + offset;
            let memory = self.read();
            check_reserved(&memory, from, length)?;
            self.check(&memory, device, from, length, Touch::Read)?;
            // Zeroed by the allocator: a test build writes single elements slowly.
            let mut seen = vec![0; usize::try_from(length).map_err(|_| DriverCode::INVALID_VALUE)?];
            let to = seen.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: as in `fill_device`; `seen` has this length.
            unsafe { vm::copy(to, from, seen.len()) };
            drop(memory);
            // It compares one pattern at a time: a test build compares slices fast and single elements slowly.
            if !seen.chunks(pattern.len()).all(|part| *part == pattern[..part.len()]) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Core {
    fn check(
        &self,
        memory: &Memory,
        device: DeviceOrdinal,
        start: u64,
        size_bytes: u64,
        touch: Touch,
    ) -> Coded<()> {
        let flags = match touch {
            Touch::Read => 1,
            Touch::Write => AccessDesc::READ_WRITE,
        };
        let range = VaRange::new(DeviceAddress(start), size_bytes);
        let checked = memory.check_touch(range, Location::device(device), flags);
        if checked.is_err() {
            self.last_words.refused(touch, device, range);
        }
        checked
    }

    /// Has nobody written in a range, as `device` sees it? It then holds zeros, or the contents of new memory. The range begins
    /// at a multiple of 64 KiB of an allocation, or holds zeros. Safe as [`Self::fill_device`].
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS`.
    pub fn is_clear(&self, device: DeviceOrdinal, range: VaRange) -> Coded<bool> {
        let is_zero = self.device_holds(device, range, &[0; 4096])?;
        Ok(is_zero || self.device_holds(device, range, &new_memory())?)
    }
}

/// Is the whole range within one reservation, or registered? Both stay mapped while `memory` is locked.
fn check_reserved(memory: &Memory, start: u64, size_bytes: u64) -> Coded<()> {
    let reservation = memory.reservation_at(DeviceAddress(start));
    let reservation = reservation.or_else(|| memory.host_range_at(start));
    let end = start.checked_add(size_bytes);
    if reservation.is_some_and(|found| end.is_some_and(|end| end <= found.end().0)) {
        Ok(())
    } else {
        Err(DriverCode::ILLEGAL_ADDRESS)
    }
}

fn chunks(size_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..size_bytes.div_ceil(COPY_CHUNK_BYTES)).map(move |index| {
        let offset = index * COPY_CHUNK_BYTES;
        (offset, COPY_CHUNK_BYTES.min(size_bytes - offset))
    })
}
