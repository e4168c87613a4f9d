//! Strays: driver objects that nobody needs any more and that the driver would not take back, and devices
//! whose copies were not seen to end.
//!
//! What the driver refuses once it may take the next time, and whoever gave the object up can do nothing
//! about it. So it is filed here, counted in the report, and offered again at each step of a pause or resume:
//! no single failure leaks memory, addresses or streams for good.

#![expect(unsafe_code, reason = "gives strays back to the driver")]

use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};

use super::Pool;
use crate::driver::{DeviceOrdinal, Driver, DriverResult, RawHandle, RawStream, VaRange};
use crate::error::{Describe, PoolResult};

/// Why the bytes of stray handles stay on the device.
pub(crate) const REASON: &str =
    "the driver would not take it back; it is offered again at each pause and resume";

/// A handle that nobody uses, with what it holds.
#[derive(Debug)]
pub(crate) struct StrayHandle {
    pub(crate) raw: RawHandle,
    pub(crate) size_bytes: u64,
    pub(crate) device: Option<DeviceOrdinal>,
}

/// See the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(crate) struct Strays {
    pub(crate) handles: Vec<StrayHandle>,
    /// Reservations, and whatever is still mapped in them.
    pub(crate) ranges: Vec<VaRange>,
    pub(crate) streams: Vec<(DeviceOrdinal, RawStream)>,
    /// Copies may still be under way there: nothing may be unmapped before [`Pool::settle`] has waited.
    pub(crate) unsettled: BTreeSet<DeviceOrdinal>,
}

impl<D: Driver> Pool<D> {
    pub(crate) fn strays(&self) -> MutexGuard<'_, Strays> {
        self.strays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a handle back that is in no table any more; files it when the driver keeps it.
    pub(crate) fn give_back_handle(&self, stray: StrayHandle) -> DriverResult<()> {
        // SAFETY: the handle is in no table and mapped nowhere of ours: this is its last use, unless the
        // driver refuses, and then it is still the driver's.
        let released = unsafe { self.driver.release(stray.raw) };
        if released.is_err() {
            self.strays().handles.push(stray);
        }
        released
    }

    /// Unmaps and frees a range that is in no table any more; files it when the driver keeps it.
    pub(crate) fn give_back_range(&self, range: VaRange) -> PoolResult<()> {
        let freed = self.unmap_and_free(range);
        if freed.is_err() {
            self.strays().ranges.push(range);
        }
        freed.about(|| format!("addresses at {}", range.start), range.size_bytes, None)
    }

    fn unmap_and_free(&self, range: VaRange) -> DriverResult<()> {
        // SAFETY: nobody uses the range. Where nothing is mapped the driver refuses, which is as good.
        let unmapped = unsafe { self.driver.unmap(range) };
        // SAFETY: as above. Addresses are freed only when nothing is mapped there any more.
        unsafe { self.driver.address_free(range) }.map_err(|error| unmapped.err().unwrap_or(error))
    }

    /// Waits for copies that were not seen to end, then offers all strays to the driver again. Must come
    /// before any step that unmaps. Not for application threads: it changes the current context.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] when copies may still be under way: nothing may be unmapped.
    pub(crate) fn settle(&self) -> PoolResult<()> {
        let unsettled = self.strays().unsettled.clone();
        for device in unsettled {
            let waited = self.driver.make_current(device).and_then(|()| self.driver.synchronize());
            waited.about(|| "copies that did not end".to_owned(), 0, Some(device))?;
            self.strays().unsettled.remove(&device);
        }
        let Strays { handles, ranges, streams, .. } = std::mem::take(&mut *self.strays());
        for range in ranges {
            // Ranges before handles: a handle mapped there frees its memory with the later of the two.
            log_kept(self.give_back_range(range));
        }
        for handle in handles {
            let (size_bytes, device) = (handle.size_bytes, handle.device);
            let released = self.give_back_handle(handle);
            log_kept(released.about(|| "release".to_owned(), size_bytes, device));
        }
        for (device, stream) in streams {
            // SAFETY: the stream is ours and has no work.
            let ended = self
                .driver
                .make_current(device)
                .and_then(|()| unsafe { self.driver.stream_destroy(stream) });
            if ended.is_err() {
                self.strays().streams.push((device, stream));
            }
            log_kept(ended.about(|| "stream for copies".to_owned(), 0, Some(device)));
        }
        Ok(())
    }
}

fn log_kept(outcome: PoolResult<()>) {
    if let Err(error) = outcome {
        tracing::error!(%error, "the driver keeps what nobody needs any more");
    }
}
