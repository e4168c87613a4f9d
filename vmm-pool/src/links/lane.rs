//! The thread that carries parcels to one device, for as long as a step lasts.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::VecDeque;
use std::time::Instant;

use super::haul::{Haul, Next, Outcome, Parcel, Piece};
use super::pace::{By, Pace};
use crate::copies::CopyStreams;
use crate::deferred::Deferred;
use crate::driver::{DeviceOrdinal, Driver, RawStream, WORD_BYTES};
use crate::error::{Describe, PoolResult};

/// Parcels on their way at the same time.
const FLYING_MOST: usize = 2;

/// Smaller pieces are for the engine: to start a kernel takes as long as copying them.
const KERNEL_PIECE_BYTES_MIN: u64 = 256 << 10;

/// What came of copies that the lane made.
#[derive(Debug, Default)]
pub(crate) struct Hauled {
    /// Bytes that a kernel copied.
    pub(crate) kernel_bytes: u64,
    /// Driver calls of the lane.
    pub(crate) driver_calls: u64,
}

/// Has `work` add copies to `device` to a haul that a lane carries, and returns when all of them are done, or none is under
/// way. Where the system gives no thread, `work` is told that there is no haul, and makes its copies itself.
///
/// # Safety
/// Every piece that `work` adds lies in host memory and in device memory which stay mapped until this returns and which
/// nobody else touches; the device may write it.
///
/// # Errors
/// What `work` returns; the failure of the lane, after which the device is settled unless it would not be
/// waited for ([`Deferred::is_settled`]).
pub(crate) unsafe fn carry<D: Driver>(
    deferred: &Deferred<D>,
    device: DeviceOrdinal,
    work: impl FnOnce(Option<&Haul>) -> PoolResult<()>,
) -> (PoolResult<()>, Hauled) {
    let haul = Haul::default();
    let outcome = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("sublet-link".to_owned());
        let lane = thread.spawn_scoped(scope, || {
            let _ends = Ends(&haul);
            if let Err(error) = Lane::run(deferred, device, &haul) {
                haul.fail(error);
            }
        });
        let lane = match lane {
            Ok(lane) => lane,
            Err(error) => {
                tracing::warn!(%error, "no thread to copy with: copy engines copy");
                return work(None);
            }
        };
        let _ends = Ends(&haul);
        let outcome = work(Some(&haul));
        match &outcome {
            Ok(()) => haul.close(),
            Err(_) => haul.call_off(),
        }
        if lane.join().is_err() {
            deferred.leave_unsettled(device);
        }
        outcome
    });
    let Outcome { carried, kernel_bytes, driver_calls } = haul.into_outcome();
    (outcome.and(carried), Hauled { kernel_bytes, driver_calls })
}

/// Sees that nobody waits for a lane that has panicked.
struct Ends<'h>(&'h Haul);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.call_off();
        }
    }
}

struct Lane<'a, D: Driver> {
    driver: &'a D,
    haul: &'a Haul,
    streams: CopyStreams<'a, D>,
    pace: Pace,
    flying: VecDeque<Flying>,
    /// When the last one that is done was.
    last_done: Option<Instant>,
}

/// A parcel on its way.
struct Flying {
    stream: RawStream,
    parcel: Parcel,
    by: By,
    began: Instant,
}

impl<'a, D: Driver> Lane<'a, D> {
    fn run(deferred: &'a Deferred<D>, device: DeviceOrdinal, haul: &'a Haul) -> PoolResult<()> {
        let streams = CopyStreams::open(deferred, device)?;
        let (driver, pace) = (deferred.driver(), Pace::new());
        let (flying, last_done) = (VecDeque::new(), None);
        let mut lane = Self { driver, haul, streams, pace, flying, last_done };
        let carried = lane.carry_all();
        carried.and(lane.streams.finish_or_leave())
    }

    /// Carries parcels until it is over.
    fn carry_all(&mut self) -> PoolResult<()> {
        loop {
            if self.flying.len() == FLYING_MOST {
                self.finish_oldest()?;
            }
            let is_idle = self.flying.is_empty();
            match self.haul.next(is_idle, self.pace.next_bytes_max()) {
                Next::Parcel(parcel) => self.begin(parcel)?,
                Next::Over if is_idle => return Ok(()),
                Next::Nothing | Next::Over => self.finish_oldest()?,
            }
        }
    }

    /// What is to copy this one, but for small pieces. Those of a model's state lie between large ones.
    fn by(&self, parcel: &Parcel) -> By {
        if kernel_bytes(parcel) > parcel.bytes / 2 { self.pace.next() } else { By::Engine }
    }

    /// Puts one on its way.
    fn begin(&mut self, parcel: Parcel) -> PoolResult<()> {
        let stream = self.streams.take()?;
        self.haul.called(parcel.pieces.len() as u64);
        let (mut by, began) = (self.by(&parcel), Instant::now());
        if by == By::Kernel && !self.begin_by_kernel(&parcel, stream) {
            by = By::Engine;
        }
        let is_left = |piece: &&Piece| by == By::Engine || !is_for_kernels(piece);
        for piece in parcel.pieces.iter().filter(is_left) {
            let (start, device) = (piece.device.start, self.streams.device());
            // SAFETY: as who added it vouches; the stream is waited for before this lane ends, or left unsettled.
            let begun = unsafe { self.driver.copy_to_device(piece.device, piece.host(), stream) };
            let about = || format!("restoring of {start}");
            begun.about(about, piece.device.size_bytes, Some(device))?;
        }
        self.flying.push_back(Flying { stream, parcel, by, began });
        Ok(())
    }

    /// Has a kernel copy the large ones. False where the driver refuses that, for now and later; what it has begun is waited for as
    /// any copy, and made again.
    fn begin_by_kernel(&mut self, parcel: &Parcel, stream: RawStream) -> bool {
        let device = self.streams.device();
        let mut large = parcel.pieces.iter().filter(|piece| is_for_kernels(piece));
        let begun = large.try_for_each(|piece| {
            // SAFETY: as who added it vouches, that nothing else keeps the device busy too; the stream is waited for before
            // this lane ends, or left unsettled.
            unsafe {
                self.driver.copy_to_device_by_kernel(device, piece.device, piece.host(), stream)
            }
        });
        let Err(error) = begun else { return true };
        tracing::warn!(%error, device = device.0, "no kernel copies to it");
        self.pace.refuse_kernel();
        false
    }

    /// Waits for the first of those on their way, if there is one.
    fn finish_oldest(&mut self) -> PoolResult<()> {
        let Some(Flying { stream, parcel, by, began }) = self.flying.pop_front() else {
            return Ok(());
        };
        self.streams.finish(stream)?;
        self.haul.done();
        let now = Instant::now();
        let since = self.last_done.map_or(began, |last| last.max(began));
        let elapsed_ns = u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX);
        self.pace.copied(by, parcel.bytes, elapsed_ns);
        if by == By::Kernel {
            self.haul.by_kernel(kernel_bytes(&parcel));
        }
        self.last_done = Some(now);
        Ok(())
    }
}

/// What of it a kernel copies, if any does.
fn kernel_bytes(parcel: &Parcel) -> u64 {
    let large = parcel.pieces.iter().filter(|piece| is_for_kernels(piece));
    large.map(|piece| piece.device.size_bytes).sum()
}

fn is_for_kernels(piece: &Piece) -> bool {
    let host = piece.host().as_ptr().addr() as u64;
    let places = host | piece.device.start.0 | piece.device.size_bytes;
    piece.device.size_bytes >= KERNEL_PIECE_BYTES_MIN && places.is_multiple_of(WORD_BYTES)
}
