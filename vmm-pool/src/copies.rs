//! Copies between devices and the host: two streams of each device, taken in turn.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ptr::NonNull;

use crate::deferred::Deferred;
use crate::driver::{DeviceOrdinal, Driver, RawStream, VaRange};
use crate::error::{Describe, PoolResult};

/// Where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a device to the host.
    Out,
    /// From the host to a device.
    In,
}

/// Two streams of one device, taken in turn, so that the next copy is queued while one runs.
///
/// The driver takes a copy only while the context of a device is current that may reach the memory (driver 580;
/// conformance case `a_copy_out_of_reach_of_the_current_context_is_refused`), and a step works for several
/// devices by turns. So whoever takes a stream here has its device's context current.
#[derive(Debug)]
pub(crate) struct CopyStreams<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    device: DeviceOrdinal,
    streams: [RawStream; 2],
    next: usize,
}

impl<'a, D: Driver> CopyStreams<'a, D> {
    /// Makes `device`'s context current on this thread and two streams in it.
    pub(crate) fn open(deferred: &'a Deferred<D>, device: DeviceOrdinal) -> PoolResult<Self> {
        let about = || "stream for copies".to_owned();
        let driver = deferred.driver();
        driver.make_current(device).about(about, 0, Some(device))?;
        let first = driver.stream_create().about(about, 0, Some(device))?;
        match driver.stream_create() {
            Ok(second) => Ok(Self { deferred, device, streams: [first, second], next: 0 }),
            Err(error) => {
                end(deferred, device, first);
                Err(error).about(about, 0, Some(device))
            }
        }
    }

    /// The stream whose turn it is, after its earlier work is done. Its device's context is current then.
    pub(crate) fn take_idle(&mut self) -> PoolResult<RawStream> {
        let stream = self.take()?;
        self.finish(stream)?;
        Ok(stream)
    }

    /// The stream whose turn it is. Its device's context is current then.
    pub(crate) fn take(&mut self) -> PoolResult<RawStream> {
        self.make_current()?;
        self.next = 1 - self.next;
        Ok(self.taken())
    }

    /// The stream that was taken last.
    fn taken(&self) -> RawStream {
        self.streams[self.next]
    }

    /// Starts a copy between memory of the host, as long as that, and `range`, on the stream that was taken last.
    ///
    /// # Safety
    /// The device may reach the range. Both stay where they are until the stream is done, and nobody else uses them.
    pub(crate) unsafe fn start(
        &self,
        way: Way,
        host: NonNull<u8>,
        range: VaRange,
    ) -> PoolResult<()> {
        let (driver, stream) = (self.deferred.driver(), self.taken());
        let (what, begun) = match way {
            // SAFETY: as the caller vouches.
            Way::Out => ("saving", unsafe { driver.copy_to_host(host, range, stream) }),
            // SAFETY: as the caller vouches.
            Way::In => ("restoring", unsafe { driver.copy_to_device(range, host, stream) }),
        };
        let about = || format!("{what} of {}", range.start);
        begun.about(about, range.size_bytes, Some(self.device))
    }

    /// Starts making all of `range` zero, on the stream that was taken last.
    ///
    /// # Safety
    /// As [`CopyStreams::start`].
    pub(crate) unsafe fn start_zeros(&self, range: VaRange) -> PoolResult<()> {
        // SAFETY: as the caller vouches.
        let begun = unsafe { self.deferred.driver().fill_with_zeros(range, self.taken()) };
        begun.about(|| format!("zeros of {}", range.start), range.size_bytes, Some(self.device))
    }

    fn make_current(&self) -> PoolResult<()> {
        let current = self.deferred.driver().make_current(self.device);
        current.about(|| "stream for copies".to_owned(), 0, Some(self.device))
    }

    /// Waits for `stream`, one of the two.
    pub(crate) fn finish(&self, stream: RawStream) -> PoolResult<()> {
        let waited = self.deferred.driver().stream_synchronize(stream);
        waited.about(|| "copies of contents".to_owned(), 0, Some(self.device))
    }

    /// Waits for both streams.
    pub(crate) fn finish_all(&self) -> PoolResult<()> {
        let first = self.finish(self.streams[0]);
        first.and(self.finish(self.streams[1]))
    }

    /// See [`DeviceStreams::finish_or_leave`].
    fn finish_or_leave(&self) -> PoolResult<()> {
        let first = self.finish_all();
        if first.is_err() && self.finish_all().is_err() {
            self.deferred.leave_unsettled(self.device);
        }
        first
    }
}

/// The streams of several devices, each opened when it is first needed.
#[derive(Debug)]
pub(crate) struct DeviceStreams<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    by_device: BTreeMap<DeviceOrdinal, CopyStreams<'a, D>>,
}

impl<'a, D: Driver> DeviceStreams<'a, D> {
    pub(crate) fn new(deferred: &'a Deferred<D>) -> Self {
        Self { deferred, by_device: BTreeMap::new() }
    }

    /// Those of `device`.
    pub(crate) fn of(&mut self, device: DeviceOrdinal) -> PoolResult<&mut CopyStreams<'a, D>> {
        Ok(match self.by_device.entry(device) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(CopyStreams::open(self.deferred, device)?),
        })
    }

    /// Waits for all copies of a step, on each device whatever the others say. A wait that failed is tried once more; when
    /// that fails too, the device is left unsettled, and nothing is unmapped before [`Deferred::settle`] has waited for it.
    pub(crate) fn finish_or_leave(&self) -> PoolResult<()> {
        let all = self.by_device.values().map(CopyStreams::finish_or_leave);
        all.fold(Ok(()), Result::and)
    }
}

impl<D: Driver> Drop for CopyStreams<'_, D> {
    fn drop(&mut self) {
        for stream in self.streams {
            end(self.deferred, self.device, stream);
        }
    }
}

fn end<D: Driver>(deferred: &Deferred<D>, device: DeviceOrdinal, stream: RawStream) {
    if let Err(error) = deferred.end_stream(device, stream) {
        tracing::error!(%error, device = device.0, "a copy stream stays until the next pause");
    }
}
