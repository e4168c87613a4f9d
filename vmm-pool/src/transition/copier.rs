//! The code that copies contents, for pauses, resumes and pagers: between devices and the arena, or through the arena's
//! ring to and from the file. The arena is locked only to look up places.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::ops::Range;

use crate::copies::{CopyStreams, DeviceStreams, Way};
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, VaRange};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::pool::Pool;
use crate::store::{Extent, SLOT_BYTES, Slot, nothing_to_write_to};

/// The contents of one allocation: the range where their device accesses them, and their places in a store.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) device: DeviceOrdinal,
    pub(crate) range: VaRange,
    /// The parts of `range`, and the place of each.
    pub(crate) extents: Vec<Extent>,
}

/// The pool and the streams with which one thread copies.
#[derive(Debug)]
pub(crate) struct Copier<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
    pub(crate) streams: DeviceStreams<'a, D>,
}

impl<'a, D: Driver> Copier<'a, D> {
    pub(crate) fn new(pool: &'a Pool<D>) -> Self {
        Self { pool, streams: DeviceStreams::new(&pool.deferred) }
    }

    /// Starts copies between a device and the arena, on the stream of the device that was taken last.
    ///
    /// # Safety
    /// The device may access all of the contents. They stay mapped until the stream's work has ended, and nobody else
    /// uses them, or their places.
    pub(crate) unsafe fn start(
        &mut self,
        log: &mut StepLog,
        way: Way,
        transfer: &Transfer,
    ) -> PoolResult<()> {
        let copies = self.streams.of(transfer.device)?;
        for extent in &transfer.extents {
            log.call();
            let range = transfer.range.part(&extent.part());
            let pieces = self.pool.host_memory().arena().pieces_of(&extent.place());
            for piece in pieces {
                // SAFETY: as the caller vouches.
                unsafe { copies.start(way, &piece, range.part(&piece.part)) }?;
            }
        }
        Ok(())
    }

    /// Starts filling parts of the range with zeros, on the stream of the device that was taken last.
    ///
    /// # Safety
    /// As [`Copier::start`].
    pub(crate) unsafe fn start_zeros(
        &mut self,
        log: &mut StepLog,
        transfer: &Transfer,
        parts: &[Range<u64>],
    ) -> PoolResult<()> {
        let copies = self.streams.of(transfer.device)?;
        for part in parts {
            log.call();
            // SAFETY: as the caller vouches.
            unsafe { copies.start_zeros(transfer.range.part(part)) }?;
        }
        Ok(())
    }
}

// Copies to the file and back: the bytes that pass through a slot together.

/// Adjacent bytes in the file that pass through a slot together.
#[derive(Debug, PartialEq, Eq)]
struct Batch {
    device: DeviceOrdinal,
    /// The place in the file, at most as long as a slot.
    place: Range<u64>,
    /// The ranges on the device, in the order of the file.
    ranges: Vec<VaRange>,
}

impl Batch {
    fn size_bytes(&self) -> u64 {
        self.place.end - self.place.start
    }
}

/// Splits all of `filed` into batches, in the file's order for each device.
fn in_batches(filed: &[&Transfer]) -> Vec<Batch> {
    let mut pieces = Vec::new();
    for transfer in filed {
        let device = transfer.device;
        for extent in &transfer.extents {
            let (mut at, mut left) = (extent.at, transfer.range.part(&extent.part()));
            while left.size_bytes > 0 {
                let size_bytes = left.size_bytes.min(SLOT_BYTES);
                pieces.push((device, at, VaRange::new(left.start, size_bytes)));
                at += size_bytes;
                let rest = DeviceAddress(left.start.0 + size_bytes);
                left = VaRange::new(rest, left.size_bytes - size_bytes);
            }
        }
    }
    pieces.sort_by_key(|&(device, at, _)| (device, at));
    let mut batches: Vec<Batch> = Vec::new();
    for (device, at, range) in pieces {
        let end = at + range.size_bytes;
        match batches.last_mut() {
            Some(last)
                if last.device == device
                    && last.place.end == at
                    && end - last.place.start <= SLOT_BYTES =>
            {
                last.place.end = end;
                last.ranges.push(range);
            }
            _ => batches.push(Batch { device, place: at..end, ranges: vec![range] }),
        }
    }
    batches
}

impl<D: Driver> Copier<'_, D> {
    /// Writes all of `filed` to its places, which are reserved, and waits until it is written.
    ///
    /// # Safety
    /// As [`Copier::start`], until this returns.
    pub(super) unsafe fn write_file(
        &mut self,
        log: &mut StepLog,
        filed: &[&Transfer],
    ) -> PoolResult<()> {
        let Some((slots, file)) = self.pool.host_memory().arena().way_to_file(log)? else {
            return Err(nothing_to_write_to(&self.pool.host_memory().file_dir()));
        };
        let mut batches = in_batches(filed).into_iter();
        log.timed("save to file", |log| {
            file.write_behind(slots, &mut |slot| {
                let Some(batch) = batches.next() else { return Ok(None) };
                // SAFETY: as the caller vouches; the slot is this batch's alone.
                unsafe { pass(log, self.streams.of(batch.device)?, Way::Out, &batch, slot) }?;
                self.pool.copied.add(batch.size_bytes());
                let lengths = batch.ranges.iter().map(|range| range.size_bytes).collect();
                Ok(Some((batch.place, lengths)))
            })
        })
    }

    /// Restores all of `filed` from its places, and waits until it is restored.
    ///
    /// # Safety
    /// As [`Copier::start`], until this returns.
    pub(super) unsafe fn read_file(
        &mut self,
        log: &mut StepLog,
        filed: &[&Transfer],
    ) -> PoolResult<()> {
        let batches = in_batches(filed);
        let places: Vec<_> = batches.iter().map(|batch| batch.place.clone()).collect();
        let Some((slots, file)) = self.pool.host_memory().arena().way_to_file(log)? else {
            let missing = |place| Err(self.pool.host_memory().arena().disk.nothing_to_read(place));
            return places.first().map_or(Ok(()), missing);
        };
        log.timed("restore from file", |log| {
            file.read_ahead(slots, &places, &mut |index, slot| {
                let batch = &batches[index];
                // SAFETY: as the caller vouches; the slot is this batch's alone.
                unsafe { pass(log, self.streams.of(batch.device)?, Way::In, batch, slot) }?;
                self.pool.copied.add(batch.size_bytes());
                Ok(())
            })
        })
    }
}

/// Copies a batch between its device and `slot`, and waits for the copies.
///
/// # Safety
/// As [`CopyStreams::start`], until this returns.
unsafe fn pass<D: Driver>(
    log: &mut StepLog,
    copies: &mut CopyStreams<'_, D>,
    way: Way,
    batch: &Batch,
    slot: &Slot,
) -> PoolResult<()> {
    let stream = copies.take_idle()?;
    let mut offset = 0;
    let queued = batch.ranges.iter().try_for_each(|&range| {
        log.call();
        let part = slot.0.part(offset..offset + range.size_bytes);
        offset += range.size_bytes;
        // SAFETY: as the caller vouches.
        unsafe { copies.start(way, &part, range) }
    });
    // Also waits for copies queued before one that failed: the slot is passed on after this.
    let finished = copies.finish(stream);
    queued.and(finished)
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "sim")]
    use std::sync::Arc;

    use super::*;
    use crate::store::Extent;

    const MIB: u64 = 1 << 20;
    const GPU: DeviceOrdinal = DeviceOrdinal(0);

    fn range(start_mib: u64, size_mib: u64) -> VaRange {
        VaRange::new(DeviceAddress(start_mib * MIB), size_mib * MIB)
    }

    /// Parts by where they begin and their length, which lie in the file as in the allocation, from `at_mib` on.
    fn filed(device: DeviceOrdinal, range: VaRange, at_mib: u64, parts: &[(u64, u64)]) -> Transfer {
        let extent = |&(start, size): &(u64, u64)| {
            let (start, size_bytes) = (start * MIB, size * MIB);
            Extent { start, size_bytes, at: at_mib * MIB + start }
        };
        Transfer { device, range, extents: parts.iter().map(extent).collect() }
    }

    #[test]
    fn neighbours_in_the_file_share_a_slot_and_large_ones_take_several() {
        let filed = [
            filed(GPU, range(1000, 130), 4, &[(0, 130)]),
            filed(GPU, range(500, 2), 2, &[(0, 2)]),
            filed(GPU, range(700, 2), 0, &[(0, 2)]),
            filed(DeviceOrdinal(1), range(800, 2), 134, &[(0, 2)]),
        ];
        let batches = in_batches(&filed.each_ref());
        let places: Vec<_> =
            batches.iter().map(|b| (b.place.start / MIB, b.place.end / MIB)).collect();
        assert_eq!(
            places,
            [(0, 4), (4, 36), (36, 68), (68, 100), (100, 132), (132, 134), (134, 136)]
        );
        assert_eq!(batches[0].ranges, [range(700, 2), range(500, 2)]);
        assert_eq!(batches[2].ranges, [range(1032, 32)]);
        assert_eq!(batches[6].device, DeviceOrdinal(1));
    }

    #[cfg(feature = "sim")]
    #[test]
    fn contents_without_a_file_or_a_ring_are_an_error() {
        use crate::PoolError;
        use crate::driver::sim::{SimDriver, SimNode, SimOptions};

        let node = SimNode::private(&[64 * MIB]).unwrap();
        let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
        driver.make_current(GPU).unwrap();
        let (pool, _keeper) = Pool::new(driver, 0, Vec::new);
        let mut copier = Copier::new(&pool);
        let mut log = StepLog::default();
        // SAFETY: nothing is copied.
        let refused = unsafe { copier.write_file(&mut log, &[]) }.unwrap_err();
        assert!(
            matches!(&refused, PoolError::FileRefused { operation: "writing", .. }),
            "{refused}"
        );
        let filed = [filed(GPU, range(100, 8), 2, &[(0, 8)])];
        // SAFETY: as above.
        let unread = unsafe { copier.read_file(&mut log, &filed.each_ref()) }.unwrap_err();
        let PoolError::FileUnreadable { size_bytes, .. } = unread else { panic!("{unread}") };
        assert_eq!(size_bytes, 8 * MIB);
        // SAFETY: as above.
        unsafe { copier.read_file(&mut log, &[]) }.unwrap();
    }

    #[test]
    fn unused_parts_end_a_batch() {
        let filed = [filed(GPU, range(100, 8), 0, &[(0, 2), (6, 2)])];
        let batches = in_batches(&filed.each_ref());
        let places: Vec<_> =
            batches.iter().map(|b| (b.place.start / MIB, b.place.end / MIB)).collect();
        assert_eq!(places, [(0, 2), (6, 8)]);
        assert_eq!(batches[1].ranges, [range(106, 2)]);
    }
}
