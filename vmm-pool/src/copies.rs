//! Copies between devices and the host: two streams of each device, taken in turn, or one for each way. They are made once:
//! between two steps [`Deferred`] has them, until a context ends or the pool goes. What is over a step knows by waiting for a stream,
//! and a pager by an event behind its copies ([`CopyStreams::record`]).

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use crate::deferred::{Deferred, InUse};
use crate::driver::{DeviceOrdinal, Driver, RawEvent, RawStream, VaRange};
use crate::error::{Describe, PoolResult};
use crate::store::Piece;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From a device to the host.
    Out,
    /// From the host to a device.
    In,
}

/// Two streams of one device, taken in turn, so that the next copy is queued while one runs.
///
/// The driver takes a copy only while the context of a device is current that may reach the memory (driver 580;
/// conformance case `a_copy_out_of_reach_of_the_current_context_is_refused`), and a step works for several
/// devices by turns. So a thread that takes a stream here has its device's context current.
#[derive(Debug)]
pub struct CopyStreams<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    device: DeviceOrdinal,
    streams: [RawStream; 2],
    next: usize,
    /// There may be work that was not waited for.
    is_busy: [bool; 2],
    /// The host memory that this work uses.
    in_use: [Vec<InUse>; 2],
    /// The driver has refused work: the next step makes its own.
    is_refused: bool,
}

impl<'a, D: Driver> CopyStreams<'a, D> {
    /// Makes `device`'s context current on this thread, and two streams in it where none are left of an earlier step.
    pub(crate) fn open(deferred: &'a Deferred<D>, device: DeviceOrdinal) -> PoolResult<Self> {
        let about = || "stream for copies".to_owned();
        let driver = deferred.driver();
        driver.make_current(device).about(about, 0, Some(device))?;
        let with = |streams| Self {
            deferred,
            device,
            streams,
            next: 0,
            is_busy: [false; 2],
            in_use: [Vec::new(), Vec::new()],
            is_refused: false,
        };
        if let Some(streams) = deferred.take_streams(device) {
            return Ok(with(streams));
        }
        let first = driver.stream_create().about(about, 0, Some(device))?;
        match driver.stream_create() {
            Ok(second) => Ok(with([first, second])),
            Err(error) => {
                end(deferred, device, first);
                Err(error).about(about, 0, Some(device))
            }
        }
    }

    /// The stream whose turn it is, after its earlier work is done. Its device's context is current then.
    pub(crate) fn take_idle(&mut self) -> PoolResult<RawStream> {
        self.make_current()?;
        let next = 1 - self.next;
        if self.is_busy[next] {
            self.finish(self.streams[next])?;
        }
        Ok(self.take_next())
    }

    /// The stream whose turn it is. Its device's context is current then.
    pub(crate) fn take(&mut self) -> PoolResult<RawStream> {
        self.make_current()?;
        Ok(self.take_next())
    }

    /// The stream that copies this way alone, if all are taken so. Its device's context is current then.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuCtxSetCurrent`.
    pub fn take_for(&mut self, way: Way) -> PoolResult<RawStream> {
        self.next = usize::from(way == Way::Out);
        self.take()
    }

    fn take_next(&mut self) -> RawStream {
        self.next = 1 - self.next;
        self.is_busy[self.next] = true;
        self.taken()
    }

    /// Records `event` behind all that the stream taken last was given. What copies there use of the host comes out: it
    /// stays where it is until the event is over.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuEventRecord`.
    pub fn record(&mut self, event: RawEvent) -> PoolResult<Vec<InUse>> {
        let recorded = self.deferred.driver().event_record(event, self.taken());
        recorded.about(|| "the end of copies".to_owned(), 0, Some(self.device))?;
        Ok(std::mem::take(&mut self.in_use[self.next]))
    }

    /// The stream that was taken last.
    fn taken(&self) -> RawStream {
        self.streams[self.next]
    }

    /// Starts a copy between a piece of host memory and `range`, as long as that, on the stream that was taken last. The piece is in
    /// use until the copy is over.
    ///
    /// # Safety
    /// The device may reach the range. It stays where it is until the stream is done, and nobody else uses it, or the piece.
    pub(crate) unsafe fn start(
        &mut self,
        way: Way,
        piece: &Piece,
        range: VaRange,
    ) -> PoolResult<()> {
        let (in_use, host) = (&mut self.in_use[self.next], piece.in_use());
        if in_use.last().is_none_or(|last| !Arc::ptr_eq(last, &host)) {
            in_use.push(host);
        }
        let (driver, stream, host) = (self.deferred.driver(), self.taken(), piece.start());
        let (what, begun) = match way {
            // SAFETY: as the caller vouches.
            Way::Out => ("saving", unsafe { driver.copy_to_host(host, range, stream) }),
            // SAFETY: as the caller vouches.
            Way::In => ("restoring", unsafe { driver.copy_to_device(range, host, stream) }),
        };
        self.is_refused |= begun.is_err();
        let about = || format!("{what} of {}", range.start);
        begun.about(about, range.size_bytes, Some(self.device))
    }

    /// Starts making all of `range` zero, on the stream that was taken last.
    ///
    /// # Safety
    /// As [`CopyStreams::start`].
    pub(crate) unsafe fn start_zeros(&mut self, range: VaRange) -> PoolResult<()> {
        // SAFETY: as the caller vouches.
        let begun = unsafe { self.deferred.driver().fill_with_zeros(range, self.taken()) };
        self.is_refused |= begun.is_err();
        begun.about(|| format!("zeros of {}", range.start), range.size_bytes, Some(self.device))
    }

    fn make_current(&self) -> PoolResult<()> {
        let current = self.deferred.driver().make_current(self.device);
        current.about(|| "stream for copies".to_owned(), 0, Some(self.device))
    }

    /// Waits for `stream`, one of the two.
    pub(crate) fn finish(&mut self, stream: RawStream) -> PoolResult<()> {
        let waited = self.deferred.driver().stream_synchronize(stream);
        if let Some(at) = self.streams.iter().position(|known| *known == stream) {
            self.is_busy[at] = waited.is_err();
            if waited.is_ok() {
                self.in_use[at].clear();
            }
        }
        waited.about(|| "copies of contents".to_owned(), 0, Some(self.device))
    }

    /// Waits for both streams, where they may have work.
    pub(crate) fn finish_all(&mut self) -> PoolResult<()> {
        let mut all = Ok(());
        for (stream, is_busy) in self.streams.into_iter().zip(self.is_busy) {
            if is_busy {
                all = all.and(self.finish(stream));
            }
        }
        all
    }

    /// Waits for both streams. A wait that failed is tried once more; when that fails too, the device is left unsettled, and nothing is
    /// unmapped before [`Deferred::settle`] has waited for it.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    pub fn finish_or_leave(&mut self) -> PoolResult<()> {
        let first = self.finish_all();
        if first.is_err() && self.finish_all().is_err() {
            self.leave_unsettled();
        }
        first
    }

    /// Copies may be under way that were not seen to end: nothing may be unmapped before [`Deferred::settle`] has waited.
    pub(crate) fn leave_unsettled(&mut self) {
        let in_use = self.in_use.iter_mut().flat_map(std::mem::take).collect();
        self.deferred.leave_unsettled(self.device, in_use);
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
    pub(crate) fn finish_or_leave(&mut self) -> PoolResult<()> {
        let all = self.by_device.values_mut().map(CopyStreams::finish_or_leave);
        all.fold(Ok(()), Result::and)
    }
}

impl<D: Driver> Drop for CopyStreams<'_, D> {
    fn drop(&mut self) {
        if self.is_busy == [false; 2] && !self.is_refused {
            return self.deferred.keep_streams(self.device, self.streams);
        }
        // Also what uses nothing of the host, as zeros and looks at contents do.
        if self.is_busy != [false; 2] {
            self.leave_unsettled();
        }
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

#[cfg(all(test, feature = "sim"))]
mod tests;
