//! Deferred releases: driver objects that nobody needs any more and that the driver would not take back, and
//! devices whose copies were not seen to end.
//!
//! An object that the driver refuses once it may take the next time. The caller that gave the object up can do nothing
//! about it. So it is kept here, counted in the report, and offered again at each step of a pause or resume: no single
//! failure leaks memory, addresses or streams for good. Idle streams for copies wait here for the next step too.

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

/// A physical allocation of the driver's, with one owner: a row of the ledger, or the list here. It ends in
/// `Deferred::release`.
#[derive(Debug)]
#[must_use = "only `Deferred::release` gives its memory back"]
pub struct Physical {
    raw: RawHandle,
    /// 0 where nobody has said.
    size_bytes: u64,
    device: Option<DeviceOrdinal>,
    /// For memory that another process has lent: open until the driver has taken the handle back.
    _lease: Option<Arc<UninheritedFd>>,
    /// The part of a budget that it takes, where a budget counts and it is own memory.
    charge: Option<Charge>,
}

impl Physical {
    /// Owns a handle that the driver has just handed out, and that nobody else holds.
    pub(crate) fn new(raw: RawHandle, size_bytes: u64, device: Option<DeviceOrdinal>) -> Self {
        Self { raw, size_bytes, device, _lease: None, charge: None }
    }

    /// The same, under a lease.
    pub(crate) fn under(self, lease: Option<Arc<UninheritedFd>>) -> Self {
        Self { _lease: lease, ..self }
    }

    /// Has it count against a budget for as long as the driver has it.
    pub(crate) fn charged(mut self, charge: Option<Charge>) -> Self {
        self.charge = charge.or(self.charge);
        self
    }

    /// As [`Physical::charged`], where it does not yet.
    pub(crate) fn charge_with(
        &mut self,
        make: impl FnOnce(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        if self.charge.is_none() {
            self.charge = make(self.size_bytes, self.device);
        }
    }

    /// For a call of the driver's about it.
    pub(crate) fn raw(&self) -> RawHandle {
        self.raw
    }

    /// Its size and device, for an error.
    pub(crate) fn extent(&self) -> (u64, Option<DeviceOrdinal>) {
        (self.size_bytes, self.device)
    }
}

/// A hold on host memory that copies use. The memory stays where it is while somebody has this.
pub type InUse = Arc<dyn Any + Send + Sync>;

/// See the head of this module. Its lock is a leaf.
#[derive(Debug)]
pub struct Deferred<D: Driver> {
    driver: Arc<D>,
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    handles: Vec<Physical>,
    /// Reservations, and whatever is still mapped in them.
    ranges: Vec<VaRange>,
    streams: Vec<(DeviceOrdinal, RawStream)>,
    /// For copies: idle, and between two steps.
    idle_streams: Vec<(DeviceOrdinal, [RawStream; 2])>,
    /// Copies may still be under way there, and what they use of the host: nothing may be unmapped before [`Deferred::settle`] has
    /// waited.
    unsettled: BTreeMap<DeviceOrdinal, Vec<InUse>>,
}

impl<D: Driver> Deferred<D> {
    /// Nothing is deferred yet.
    pub(crate) fn new(driver: Arc<D>) -> Self {
        Self { driver, lists: Mutex::default() }
    }

    /// The driver that is asked again.
    pub(crate) fn driver(&self) -> &D {
        &self.driver
    }

    /// Gives a handle back that is in no row any more; keeps it when the driver refuses.
    pub(crate) fn release(&self, physical: Physical) -> DriverResult<()> {
        // SAFETY: the handle has no other owner, and is mapped nowhere of ours: this is its last use, unless
        // the driver refuses, and then it is still the driver's.
        let released = unsafe { self.driver.release(physical.raw) };
        if released.is_err() {
            lock(&self.lists).handles.push(physical);
        }
        released
    }

    /// Unmaps and frees a range that is in no table any more; keeps it when the driver refuses.
    pub(crate) fn free_range(&self, range: VaRange) -> PoolResult<()> {
        let freed = self.unmap_and_free(range).inspect_err(|_| self.free_range_later(range));
        freed.about(|| format!("addresses at {}", range.start), range.size_bytes, None)
    }

    /// Frees a range that nothing is mapped in, and that is in no table any more; keeps it when the driver refuses.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]: it goes at the next pause.
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

    /// Ends a stream of ours, whose queued work completes before it ends; keeps it when the driver refuses. The
    /// context of its device must be current.
    pub(crate) fn end_stream(&self, device: DeviceOrdinal, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the stream is ours, and nobody queues anything there any more.
        let ended = unsafe { self.driver.stream_destroy(stream) };
        ended.inspect_err(|_| self.end_stream_later(device, stream))
    }

    /// Keeps a stream of ours that the driver has refused to end.
    pub fn end_stream_later(&self, device: DeviceOrdinal, stream: RawStream) {
        lock(&self.lists).streams.push((device, stream));
    }

    /// Two idle streams of `device`, if an earlier step has left some. Nobody else has them.
    pub(crate) fn take_streams(&self, device: DeviceOrdinal) -> Option<[RawStream; 2]> {
        let idle = &mut lock(&self.lists).idle_streams;
        let at = idle.iter().position(|(of, _)| *of == device)?;
        Some(idle.swap_remove(at).1)
    }

    /// Keeps two idle streams for the next step, which may end them instead.
    pub(crate) fn keep_streams(&self, device: DeviceOrdinal, streams: [RawStream; 2]) {
        lock(&self.lists).idle_streams.push((device, streams));
    }

    /// Ends all streams that are kept here. For a context that is about to end: afterwards the driver may give their values to
    /// streams of the application, so what it refuses is not offered again.
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

    /// Copies may be under way on `device`, which use this, and could not be waited for.
    pub(crate) fn leave_unsettled(&self, device: DeviceOrdinal, in_use: Vec<InUse>) {
        lock(&self.lists).unsettled.entry(device).or_default().extend(in_use);
    }

    /// Has every copy been seen to end?
    pub fn is_settled(&self) -> bool {
        lock(&self.lists).unsettled.is_empty()
    }

    /// Sizes of the handles kept, with their devices.
    pub(crate) fn handles(&self) -> Vec<(DeviceOrdinal, u64)> {
        let lists = lock(&self.lists);
        let placed = lists.handles.iter().filter_map(|kept| Some((kept.device?, kept.size_bytes)));
        placed.collect()
    }

    /// Bytes of the handles kept that are of no device: the host's.
    pub(crate) fn host_bytes(&self) -> u64 {
        let lists = lock(&self.lists);
        lists.handles.iter().filter(|kept| kept.device.is_none()).map(|kept| kept.size_bytes).sum()
    }

    /// Has every handle that is kept count against a budget.
    pub(crate) fn charge_all(&self, make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>) {
        lock(&self.lists).handles.iter_mut().for_each(|kept| kept.charge_with(&make));
    }

    /// Offers the driver each handle once more that it would not take back. Any thread may do so while work runs: no mapping uses
    /// these handles.
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

    /// Waits for copies that were not seen to end, then offers everything to the driver again. Must come
    /// before any step that unmaps. Not for application threads: it changes the current context.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] when copies may still be under way: nothing may be unmapped.
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
