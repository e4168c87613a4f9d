//! The threads that carry parcels, for as long as a step lasts: one for the device's own link, one for a neighbour's.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::VecDeque;
use std::time::Instant;

use super::Lanes;
use super::haul::{Carrier, Haul, Next, Outcome, Parcel, Piece, Way};
use super::pace::{By, Pace};
use super::relay::{self, Refusal};
use crate::copies::CopyStreams;
use crate::deferred::Deferred;
use crate::driver::{Driver, DriverResult, RawStream, WORD_BYTES};
use crate::error::{Describe, PoolResult};

/// Parcels on their way through the device's own link at once.
const DIRECT_AT_ONCE: usize = 2;

/// Smaller pieces are for the engine: to start a kernel takes as long as copying them.
const KERNEL_PIECE_BYTES_MIN: u64 = 256 << 10;

/// What came of copies that lanes made.
#[derive(Debug, Default)]
pub(crate) struct Hauled {
    /// Bytes that a kernel copied.
    pub(crate) kernel_bytes: u64,
    /// Bytes that took the neighbour's link.
    pub(crate) neighbour_bytes: u64,
    /// Driver calls of both lanes.
    pub(crate) driver_calls: u64,
    /// Why nothing, or no more, took the neighbour's link.
    pub(crate) refusal: Option<Refusal>,
    /// A context was made on the neighbour, and stays.
    pub(crate) context_stays: bool,
}

/// Has `work` add copies to a haul that `lanes` carry, and returns when all of them are done, or none is under way.
/// Where the system gives no threads, `work` is told that there is no haul, and makes its copies itself.
///
/// # Safety
/// Every piece that `work` adds lies in host memory and in device memory which stay mapped until this returns and which
/// nobody else touches; the device may read or write it.
///
/// # Errors
/// What `work` returns; the failure of the direct lane, after which the device is settled unless it would not be
/// waited for ([`Deferred::is_settled`]).
pub(crate) unsafe fn carry<D: Driver>(
    deferred: &Deferred<D>,
    lanes: &Lanes,
    way: Way,
    work: impl FnOnce(Option<&Haul>) -> PoolResult<()>,
) -> (PoolResult<()>, Hauled) {
    let haul = Haul::default();
    let (outcome, relayed) = std::thread::scope(|scope| {
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let direct = thread("sublet-link").spawn_scoped(scope, || {
            let _ends = Ends(&haul);
            if let Err(error) = Direct::run(deferred, lanes, way, &haul) {
                haul.fail(error);
            }
        });
        let direct = match direct {
            Ok(direct) => direct,
            Err(error) => {
                tracing::warn!(%error, "no thread to copy with: one link is used");
                return (work(None), None);
            }
        };
        let relay = lanes.neighbour.as_ref().and_then(|route| {
            let haul = &haul;
            let relay = thread("sublet-neighbour").spawn_scoped(scope, move || {
                let _ends = Ends(haul);
                relay::run(deferred, route, way, haul)
            });
            match relay {
                Ok(relay) => Some((relay, route)),
                Err(error) => {
                    tracing::warn!(%error, "no thread to copy with: one link is used");
                    None
                }
            }
        });
        let _ends = Ends(&haul);
        let outcome = work(Some(&haul));
        match &outcome {
            Ok(()) => haul.close(),
            Err(_) => haul.call_off(),
        }
        if direct.join().is_err() {
            deferred.leave_unsettled(lanes.device);
        }
        let ended = relay.map(|(relay, route)| {
            relay.join().unwrap_or_else(|_panic| {
                // What it has left nobody knows.
                deferred.leave_unsettled(lanes.device);
                deferred.leave_late(route.neighbour);
                relay::Ended { refusal: None, context_stays: true }
            })
        });
        (outcome, Some(ended))
    });
    let Some(relayed) = relayed else { return (outcome, Hauled::default()) };
    let Outcome { carried, bytes: [_, neighbour_bytes], kernel_bytes, driver_calls } =
        haul.into_outcome();
    let (refusal, context_stays) =
        relayed.map_or((None, false), |end| (end.refusal, end.context_stays));
    (
        outcome.and(carried),
        Hauled { kernel_bytes, neighbour_bytes, driver_calls, refusal, context_stays },
    )
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

/// A lane, which has parcels on their way.
pub(super) trait Lane {
    /// Where they come from.
    fn haul(&self) -> &Haul;

    /// How many are on their way.
    fn flying(&self) -> usize;

    /// How many may be, at once.
    fn most(&self) -> usize;

    /// Bytes that the next one may hold.
    fn bytes_max(&self) -> u64 {
        u64::MAX
    }

    /// Puts one on its way.
    fn begin(&mut self, parcel: Parcel) -> PoolResult<()>;

    /// Waits for the first of those on their way, if there is one.
    fn finish_oldest(&mut self) -> PoolResult<()>;

    /// Carries parcels until it is over.
    fn carry_all(&mut self) -> PoolResult<()> {
        loop {
            if self.flying() == self.most() {
                self.finish_oldest()?;
            }
            let is_idle = self.flying() == 0;
            match self.haul().next(is_idle, self.bytes_max()) {
                Next::Parcel(parcel) => self.begin(parcel)?,
                Next::Over if is_idle => return Ok(()),
                Next::Nothing | Next::Over => self.finish_oldest()?,
            }
        }
    }
}

/// The lane through the device's own link.
struct Direct<'a, D: Driver> {
    driver: &'a D,
    way: Way,
    haul: &'a Haul,
    streams: CopyStreams<'a, D>,
    /// Where a kernel may copy.
    pace: Option<Pace>,
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

impl<'a, D: Driver> Direct<'a, D> {
    fn run(deferred: &'a Deferred<D>, lanes: &Lanes, way: Way, haul: &'a Haul) -> PoolResult<()> {
        let streams = CopyStreams::open(deferred, lanes.device)?;
        let driver = deferred.driver();
        let pace = (lanes.by_kernel && way == Way::In).then(Pace::new);
        let (flying, last_done) = (VecDeque::new(), None);
        let mut lane = Self { driver, way, haul, streams, pace, flying, last_done };
        let carried = lane.carry_all();
        carried.and(lane.streams.finish_or_leave())
    }

    /// What is to copy this one, but for small pieces. Those of a model's state lie between large ones.
    fn by(&self, parcel: &Parcel) -> By {
        match &self.pace {
            Some(pace) if kernel_bytes(parcel) > parcel.bytes / 2 => pace.next(),
            Some(_) | None => By::Engine,
        }
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
        if let Some(pace) = &mut self.pace {
            pace.refuse_kernel();
        }
        false
    }

    fn begin_by_engine(&self, piece: &Piece, stream: RawStream) -> DriverResult<()> {
        match self.way {
            // SAFETY: as who added it vouches; the stream is waited for before this lane ends, or left unsettled.
            Way::Out => unsafe { self.driver.copy_to_host(piece.host(), piece.device, stream) },
            // SAFETY: as above.
            Way::In => unsafe { self.driver.copy_to_device(piece.device, piece.host(), stream) },
        }
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

impl<D: Driver> Lane for Direct<'_, D> {
    fn haul(&self) -> &Haul {
        self.haul
    }

    fn flying(&self) -> usize {
        self.flying.len()
    }

    fn most(&self) -> usize {
        DIRECT_AT_ONCE
    }

    fn bytes_max(&self) -> u64 {
        self.pace.as_ref().map_or(u64::MAX, Pace::next_bytes_max)
    }

    fn begin(&mut self, parcel: Parcel) -> PoolResult<()> {
        let stream = self.streams.take()?;
        self.haul.called(parcel.pieces.len() as u64);
        let (mut by, began) = (self.by(&parcel), Instant::now());
        if by == By::Kernel && !self.begin_by_kernel(&parcel, stream) {
            by = By::Engine;
        }
        let is_left = |piece: &&Piece| by == By::Engine || !is_for_kernels(piece);
        for piece in parcel.pieces.iter().filter(is_left) {
            let what = match self.way {
                Way::Out => "saving",
                Way::In => "restoring",
            };
            let (start, device) = (piece.device.start, self.streams.device());
            let begun = self.begin_by_engine(piece, stream);
            begun.about(|| format!("{what} of {start}"), piece.device.size_bytes, Some(device))?;
        }
        self.flying.push_back(Flying { stream, parcel, by, began });
        Ok(())
    }

    fn finish_oldest(&mut self) -> PoolResult<()> {
        let Some(Flying { stream, parcel, by, began }) = self.flying.pop_front() else {
            return Ok(());
        };
        self.streams.finish(stream)?;
        self.haul.done(&parcel, Carrier::Direct);
        let now = Instant::now();
        let since = self.last_done.map_or(began, |last| last.max(began));
        if let Some(pace) = &mut self.pace {
            let elapsed_ns = u64::try_from((now - since).as_nanos()).unwrap_or(u64::MAX);
            pace.copied(by, parcel.bytes, elapsed_ns);
        }
        if by == By::Kernel {
            self.haul.by_kernel(kernel_bytes(&parcel));
        }
        self.last_done = Some(now);
        Ok(())
    }
}
