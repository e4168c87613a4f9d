//! The one way that contents are copied in a pause or resume: between devices and the arena, or through its ring to and from
//! the file (`file.rs`).

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::borrow::Cow;
use std::ops::Range;
use std::sync::MutexGuard;

use crate::copies::{DeviceStreams, Way};
use crate::driver::{DeviceOrdinal, Driver, VaRange};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::pool::Pool;
use crate::report::Copied;
use crate::store::{Extent, HostArena};

/// Contents of one allocation, where their device reaches them, and where they lie in a store.
#[derive(Clone, Debug)]
pub(super) struct Transfer<'a> {
    pub(super) device: DeviceOrdinal,
    pub(super) range: VaRange,
    /// Parts of `range`, and the place of each.
    pub(super) extents: Cow<'a, [Extent]>,
}

/// What copies in one step. Its streams end before anybody else has the arena.
pub(super) struct Copier<'a, D: Driver> {
    pub(super) streams: DeviceStreams<'a, D>,
    pub(super) arena: MutexGuard<'a, HostArena<D>>,
    /// What passes through the file is counted here.
    pub(super) copied: &'a Copied,
}

impl<'a, D: Driver> Copier<'a, D> {
    /// Waits for the arena.
    pub(super) fn new(pool: &'a Pool<D>) -> Self {
        Self {
            streams: DeviceStreams::new(&pool.deferred),
            arena: pool.arena(),
            copied: &pool.copied,
        }
    }

    /// Starts copying between a device and the arena, on the stream of the device that was taken last.
    ///
    /// # Safety
    /// The device may reach all of the contents. They stay mapped until the stream is done, and nobody else uses them, or
    /// their places.
    pub(super) unsafe fn start(
        &mut self,
        log: &mut StepLog,
        way: Way,
        transfer: &Transfer<'_>,
    ) -> PoolResult<()> {
        let copies = self.streams.of(transfer.device)?;
        for extent in transfer.extents.iter() {
            log.call();
            // SAFETY: as the caller vouches.
            unsafe { self.arena.start(way, transfer.range, *extent, copies) }?;
        }
        Ok(())
    }

    /// Starts making parts of `range` zero, on a stream of the device that is taken for it.
    ///
    /// # Safety
    /// As [`Copier::start`].
    pub(super) unsafe fn start_zeros(
        &mut self,
        log: &mut StepLog,
        (device, range): (DeviceOrdinal, VaRange),
        parts: &[Range<u64>],
    ) -> PoolResult<()> {
        let copies = self.streams.of(device)?;
        copies.take()?;
        for part in parts {
            log.call();
            // SAFETY: as the caller vouches.
            unsafe { copies.start_zeros(range.part(part)) }?;
        }
        Ok(())
    }
}
