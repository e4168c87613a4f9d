//! The one way that contents are copied, in a pause or resume and by a pager: between devices and the arena, or through its ring to
//! and from the file (`file.rs`). The arena is locked to look places up alone.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::ops::Range;

use crate::copies::{DeviceStreams, Way};
use crate::driver::{DeviceOrdinal, Driver, VaRange};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::pool::Pool;
use crate::store::Extent;

/// Contents of one allocation, where their device reaches them, and where they lie in a store.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) device: DeviceOrdinal,
    pub(crate) range: VaRange,
    /// Parts of `range`, and the place of each.
    pub(crate) extents: Vec<Extent>,
}

/// What copies, for one thread.
pub(crate) struct Copier<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
    pub(crate) streams: DeviceStreams<'a, D>,
}

impl<'a, D: Driver> Copier<'a, D> {
    pub(crate) fn new(pool: &'a Pool<D>) -> Self {
        Self { pool, streams: DeviceStreams::new(&pool.deferred) }
    }

    /// Starts copying between a device and the arena, on the stream of the device that was taken last.
    ///
    /// # Safety
    /// The device may reach all of the contents. They stay mapped until the stream is done, and nobody else uses them, or
    /// their places.
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
            let pieces = self.pool.arena().pieces_of(&extent.place());
            for piece in pieces {
                // SAFETY: as the caller vouches.
                unsafe { copies.start(way, &piece, range.part(&piece.part)) }?;
            }
        }
        Ok(())
    }

    /// Starts making parts of the range zero, on the stream of the device that was taken last.
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
