//! Deferred releases: unneeded driver objects that the driver refused to release, and devices whose copies may not have
//! ended.
//!
//! The driver may release an object later that it has refused to release. The caller that gave the object up can do
//! nothing about a refusal. So the object is kept here, counted in the report, and offered again at each step of a
//! pause or resume. No single failure leaks memory, addresses or streams for good. Idle streams for copies are kept
//! here for the next step too.

#![expect(unsafe_code, reason = "gives objects back to the driver")]

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::budget::Charge;
use crate::driver::{DeviceOrdinal, Driver, DriverResult, RawHandle, RawStream, VaRange};
use crate::error::{Describe, PoolResult};
use sublet_driver::descriptors::UninheritedFd;
use sublet_sync::sync::lock;

/// Why the bytes of deferred handles stay on the device.
pub(crate) const REASON: &str =
    "the driver would not take it back; it is offered again at each pause and resume";

/// A physical allocation of the driver's. It has one owner: a row of the ledger, or the list here. `Deferred::release`
/// ends it.
#[derive(Debug)]
#[must_use = "only `Deferred::release` gives its memory back"]
pub struct Physical {
    raw: RawHandle,
    /// 0 if the size is unknown.
    size_bytes: u64,
    device: Option<DeviceOrdinal>,
    /// For memory that another process has lent: a descriptor that stays open until the driver has released the handle.
    _lease: Option<Arc<UninheritedFd>>,
    /// The charge against a budget, if there is a budget and this is own memory.
    charge: Option<Charge>,
}

impl Physical {
    /// Takes ownership of a handle that the driver has just returned, and that nobody else holds.
    pub(crate) fn new(raw: RawHandle, size_bytes: u64, device: Option<DeviceOrdinal>) -> Self {
        Self { raw, size_bytes, device, _lease: None, charge: None }
    }

    /// Adds a lease, which lasts as long as the handle.
    pub(crate) fn under(self, lease: Option<Arc<UninheritedFd>>) -> Self {
        Self { _lease: lease, ..self }
    }

    /// Makes the allocation count against a budget for as long as the driver has it.
    pub(crate) fn charged(mut self, charge: Option<Charge>) -> Self {
        self.charge = charge.or(self.charge);
        self
    }

    /// As [`Physical::charged`], if the allocation has no charge yet.
    pub(crate) fn charge_with(
        &mut self,
        make: impl FnOnce(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        if self.charge.is_none() {
            self.charge = make(self.size_bytes, self.device);
        }
    }

    /// Returns the driver's handle, for a driver call.
    pub(crate) fn raw(&self) -> RawHandle {
        self.raw
    }

    /// Returns the size and the device, for an error.
    pub(crate) fn extent(&self) -> (u64, Option<DeviceOrdinal>) {
        (self.size_bytes, self.device)
    }
}

/// Keeps host memory that copies use in place, for as long as somebody holds this.
pub type InUse = Arc<dyn Any + Send + Sync>;

/// The deferred releases of one pool: see the head of this module. Its lock is a leaf.
#[derive(Debug)]
pub struct Deferred<D: Driver> {
    driver: Arc<D>,
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    handles: Vec<Physical>,
    /// Reservations. Memory may still be mapped in them.
    ranges: Vec<VaRange>,
    streams: Vec<(DeviceOrdinal, RawStream)>,
    /// Streams for copies, which are idle between two steps.
    idle_streams: Vec<(DeviceOrdinal, [RawStream; 2])>,
    /// The devices where copies may still run, with the host memory that those use. Nothing may be unmapped before
    /// [`Deferred::settle`] has waited.
    unsettled: BTreeMap<DeviceOrdinal, Vec<InUse>>,
}

impl<D: Driver> Deferred<D> {
    /// Makes the lists, which are empty.
    pub(crate) fn new(driver: Arc<D>) -> Self {
        Self { driver, lists: Mutex::default() }
    }

    /// Returns the driver that releases objects.
    pub(crate) fn driver(&self) -> &D {
        &self.driver
    }

    /// Releases a handle that no row has any more. Keeps it if the driver refuses.
    pub(crate) fn release(&self, physical: Physical) -> DriverResult<()> {
        // SAFETY: the handle has no other owner, and is mapped nowhere of ours: this is its last use, unless
        // the driver refuses, and then it is still the driver's.
        let released = unsafe { self.driver.release(physical.raw) };
        if released.is_err() {
            lock(&self.lists).handles.push(physical);
        }
        released
    }

    /// Unmaps and frees a range that no table has any more. Keeps it if the driver refuses.
    pub(crate) fn free_range(&self, range: VaRange) -> PoolResult<()> {
        let freed = self.unmap_and_free(range).inspect_err(|_| self.free_range_later(range));
        freed.about(|| format!("addresses at {}", range.start), range.size_bytes, None)
    }

    /// Frees a range where nothing is mapped, and that no table has any more. Keeps it if the driver refuses.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]: the next pause frees the range.
    ///
    /// # Driver calls
    /// `cuMemAddressFree`.
    pub fn free_addresses(&self, range: VaRange) -> PoolResult<()> {
        // SAFETY: nobody uses the range any more.
        let freed = unsafe { self.driver.address_free(range) };
        let freed = freed.inspect_err(|_| self.free_range_later(range));
        freed.about(|| format!("addresses at {}", range.start), range.size_bytes, None)
    }

    /// Keeps a range that the driver has refused to free.
    pub(crate) fn free_range_later(&self, range: VaRange) {
        lock(&self.lists).ranges.push(range);
    }

    fn unmap_and_free(&self, range: VaRange) -> DriverResult<()> {
        // SAFETY: nobody uses the range. Where nothing is mapped the driver refuses, which is as good.
        let unmapped = unsafe { self.driver.unmap(range) };
        // SAFETY: as above. Addresses are freed only when nothing is mapped there any more.
        unsafe { self.driver.address_free(range) }.map_err(|error| unmapped.err().unwrap_or(error))
    }

    /// Ends a stream of Sublet's; its queued work completes first. Keeps it if the driver refuses. The context of its
    /// device must be current.
    pub(crate) fn end_stream(&self, device: DeviceOrdinal, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the stream is ours, and nobody queues anything there any more.
        let ended = unsafe { self.driver.stream_destroy(stream) };
        ended.inspect_err(|_| self.end_stream_later(device, stream))
    }

    /// Keeps a stream of Sublet's that the driver has refused to end.
    pub fn end_stream_later(&self, device: DeviceOrdinal, stream: RawStream) {
        lock(&self.lists).streams.push((device, stream));
    }

    /// Returns two idle streams of `device`, if an earlier step has left some. Nobody else has them then.
    pub(crate) fn take_streams(&self, device: DeviceOrdinal) -> Option<[RawStream; 2]> {
        let idle = &mut lock(&self.lists).idle_streams;
        let at = idle.iter().position(|(of, _)| *of == device)?;
        Some(idle.swap_remove(at).1)
    }

    /// Keeps two idle streams for the next step, which may end them instead.
    pub(crate) fn keep_streams(&self, device: DeviceOrdinal, streams: [RawStream; 2]) {
        lock(&self.lists).idle_streams.push((device, streams));
    }

    /// Ends all streams that are kept here, before a context ends. Streams that the driver refuses to end are not
    /// offered again: afterwards the driver may give the same values to streams of the application.
    ///
    /// # Driver calls
    /// `cuStreamDestroy`.
    pub(crate) fn end_streams(&self) {
        let (refused, idle) = {
            let Lists { streams, idle_streams, .. } = &mut *lock(&self.lists);
            (std::mem::take(streams), std::mem::take(idle_streams))
        };
        let idle = idle.into_iter().flat_map(|(_, streams)| streams);
        for stream in refused.into_iter().map(|(_, stream)| stream).chain(idle) {
            // SAFETY: the stream is ours, and nobody uses it any more.
            if let Err(error) = unsafe { self.driver.stream_destroy(stream) } {
                tracing::error!(%error, "a stream for copies ends with its context");
            }
        }
    }

    /// Records that copies may still run on `device`, which use this host memory. Waiting for them has failed.
    pub(crate) fn leave_unsettled(&self, device: DeviceOrdinal, in_use: Vec<InUse>) {
        lock(&self.lists).unsettled.entry(device).or_default().extend(in_use);
    }

    /// Have all copies ended, as far as is known?
    pub fn is_settled(&self) -> bool {
        lock(&self.lists).unsettled.is_empty()
    }

    /// Returns the device and the size in bytes of each handle that is kept here.
    pub(crate) fn handles(&self) -> Vec<(DeviceOrdinal, u64)> {
        let lists = lock(&self.lists);
        let placed = lists.handles.iter().filter_map(|kept| Some((kept.device?, kept.size_bytes)));
        placed.collect()
    }

    /// Returns the bytes of the kept handles without a device: host memory.
    pub(crate) fn host_bytes(&self) -> u64 {
        let lists = lock(&self.lists);
        lists.handles.iter().filter(|kept| kept.device.is_none()).map(|kept| kept.size_bytes).sum()
    }

    /// Makes every handle that is kept here count against a budget.
    pub(crate) fn charge_all(&self, make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>) {
        lock(&self.lists).handles.iter_mut().for_each(|kept| kept.charge_with(&make));
    }

    /// Offers each handle again that the driver has refused to release. Any thread may do so while work runs: no
    /// mapping uses these handles.
    ///
    /// # Driver calls
    /// `cuMemRelease`.
    pub(crate) fn release_again(&self) {
        let handles = std::mem::take(&mut lock(&self.lists).handles);
        for handle in handles {
            let (size_bytes, device) = handle.extent();
            let released = self.release(handle);
            log_kept(released.about(|| "release".to_owned(), size_bytes, device));
        }
    }

    /// Waits for copies that may still run, then offers everything to the driver again. Call it before any step that
    /// unmaps, and not on application threads: it changes the current context.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]: copies may still run, and nothing may be unmapped.
    pub fn settle(&self) -> PoolResult<()> {
        let unsettled: Vec<_> = lock(&self.lists).unsettled.keys().copied().collect();
        for device in unsettled {
            let waited = self.driver.make_current(device).and_then(|()| self.driver.synchronize());
            waited.about(|| "copies that did not end".to_owned(), 0, Some(device))?;
            let done = lock(&self.lists).unsettled.remove(&device);
            drop(done);
        }
        let (ranges, streams) = {
            let Lists { ranges, streams, .. } = &mut *lock(&self.lists);
            (std::mem::take(ranges), std::mem::take(streams))
        };
        for range in ranges {
            // Ranges before handles: a handle mapped there frees its memory with the later of the two.
            log_kept(self.free_range(range));
        }
        self.release_again();
        for (device, stream) in streams {
            let current = self.driver.make_current(device);
            let current = current.inspect_err(|_| self.end_stream_later(device, stream));
            let ended = current.and_then(|()| self.end_stream(device, stream));
            log_kept(ended.about(|| "stream for copies".to_owned(), 0, Some(device)));
        }
        Ok(())
    }
}

impl<D: Driver> Drop for Deferred<D> {
    fn drop(&mut self) {
        self.end_streams();
    }
}

fn log_kept(outcome: PoolResult<()>) {
    if let Err(error) = outcome {
        tracing::error!(%error, "the driver keeps what nobody needs any more");
    }
}
