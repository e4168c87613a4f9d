//! Copies between devices and the host, on two streams of each device. A user of the streams alternates between the
//! two, or uses one for each direction. Streams are made once: between two steps [`Deferred`] keeps them, until a
//! context or the pool ends. A step waits for a stream to learn that its copies have ended. A pager uses an event
//! behind its copies ([`CopyStreams::record`]).

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

/// Two streams of one device, used alternately, so that the next copy is queued while one runs.
///
/// The driver accepts a copy only while a context is current whose device may reach the memory (driver 580; conformance
/// case `a_copy_out_of_reach_of_the_current_context_is_refused`). A step works for several devices alternately. So
/// taking a stream here makes the context of its device current.
#[derive(Debug)]
pub struct CopyStreams<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    device: DeviceOrdinal,
    streams: [RawStream; 2],
    next: usize,
    /// True while a stream may have work that nobody has waited for.
    is_busy: [bool; 2],
    /// The host memory that the work of each stream uses.
    in_use: [Vec<InUse>; 2],
    /// True once the driver has refused work: the next step then makes its own streams.
    is_refused: bool,
}

impl<'a, D: Driver> CopyStreams<'a, D> {
    /// Makes `device`'s context current on this thread. Uses the streams that an earlier step has left, or makes two.
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

    /// Returns the next of the two streams, after its earlier work has ended. Makes its device's context current.
    pub(crate) fn take_idle(&mut self) -> PoolResult<RawStream> {
        self.make_current()?;
        let next = 1 - self.next;
        if self.is_busy[next] {
            self.finish(self.streams[next])?;
        }
        Ok(self.take_next())
    }

    /// Returns the next of the two streams. Makes its device's context current.
    pub(crate) fn take(&mut self) -> PoolResult<RawStream> {
        self.make_current()?;
        Ok(self.take_next())
    }

    /// Returns the stream for copies in this direction. Only such copies use it, if every caller uses this method.
    /// Makes its device's context current.
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

    /// Records `event` behind all work of the stream that was taken last. Returns the host memory that its copies use:
    /// the caller keeps it in place until the event has completed.
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

    /// Returns the stream that was taken last.
    fn taken(&self) -> RawStream {
        self.streams[self.next]
    }

    /// Starts a copy between a piece of host memory and `range`, which has the same size, on the stream that was taken
    /// last. The piece is in use until the copy has ended.
    ///
    /// # Safety
    /// The device may reach the range. The range stays mapped until the stream's work has ended, and nobody else uses
    /// it, or the piece.
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

    /// Starts filling `range` with zeros, on the stream that was taken last.
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

    /// Waits for each stream that may have work.
    pub(crate) fn finish_all(&mut self) -> PoolResult<()> {
        let mut all = Ok(());
        for (stream, is_busy) in self.streams.into_iter().zip(self.is_busy) {
            if is_busy {
                all = all.and(self.finish(stream));
            }
        }
        all
    }

    /// Waits for both streams. A failed wait is tried once more. If that fails too, the device is left unsettled:
    /// nothing is unmapped before [`Deferred::settle`] has waited for it.
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

    /// Leaves the device unsettled, because copies may still run: nothing may be unmapped before [`Deferred::settle`]
    /// has waited.
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

    /// Returns the streams of `device`.
    pub(crate) fn of(&mut self, device: DeviceOrdinal) -> PoolResult<&mut CopyStreams<'a, D>> {
        Ok(match self.by_device.entry(device) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(CopyStreams::open(self.deferred, device)?),
        })
    }

    /// Waits for all copies of a step, on each device even if another device's wait fails. A failed wait is tried once
    /// more. If that fails too, the device is left unsettled: nothing is unmapped before [`Deferred::settle`] has
    /// waited for it.
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
        // Also work that uses no host memory, such as filling with zeros and reading contents.
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
