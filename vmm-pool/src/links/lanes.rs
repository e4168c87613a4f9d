//! The two threads that carry parcels, for as long as a step lasts.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::VecDeque;

use super::Route;
use super::haul::{Carrier, Haul, Next, Parcel, Way};
use super::relay::{self, Refusal};
use crate::copies::CopyStreams;
use crate::deferred::Deferred;
use crate::driver::{DeviceOrdinal, Driver, RawStream};
use crate::error::{Describe, PoolResult};

/// Parcels on their way through the device's own link at once.
const DIRECT_AT_ONCE: usize = 2;

/// What came of copies through two links.
#[derive(Debug, Default)]
pub(crate) struct Hauled {
    /// Bytes that took the neighbour's link.
    pub(crate) neighbour_bytes: u64,
    /// Driver calls of both lanes.
    pub(crate) driver_calls: u64,
    /// Why nothing, or no more, took the neighbour's link.
    pub(crate) refusal: Option<Refusal>,
    /// A context was made on the neighbour, and stays.
    pub(crate) context_stays: bool,
}

/// Has `work` add copies to a haul that two lanes carry, and returns when all of them are done, or none is under way.
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
    route: &Route,
    way: Way,
    work: impl FnOnce(Option<&Haul>) -> PoolResult<()>,
) -> (PoolResult<()>, Hauled) {
    let haul = Haul::default();
    let (outcome, relayed) = std::thread::scope(|scope| {
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let direct = thread("sublet-link").spawn_scoped(scope, || {
            let _ends = Ends(&haul);
            if let Err(error) = Direct::run(deferred, route.device, way, &haul) {
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
        let relay = thread("sublet-neighbour").spawn_scoped(scope, || {
            let _ends = Ends(&haul);
            relay::run(deferred, route, way, &haul)
        });
        if let Err(error) = &relay {
            tracing::warn!(%error, "no thread to copy with: one link is used");
        }
        let _ends = Ends(&haul);
        let outcome = work(Some(&haul));
        match &outcome {
            Ok(()) => haul.close(),
            Err(_) => haul.call_off(),
        }
        if direct.join().is_err() {
            deferred.leave_unsettled(route.device);
        }
        let ended = relay.ok().map(|relay| {
            relay.join().unwrap_or_else(|_panic| {
                // What it has left nobody knows.
                deferred.leave_unsettled(route.device);
                deferred.leave_late(route.neighbour);
                relay::Ended { refusal: None, context_stays: true }
            })
        });
        (outcome, Some(ended))
    });
    let Some(relayed) = relayed else { return (outcome, Hauled::default()) };
    let (carried, [_, neighbour_bytes], driver_calls) = haul.into_outcome();
    let (refusal, context_stays) =
        relayed.map_or((None, false), |end| (end.refusal, end.context_stays));
    (outcome.and(carried), Hauled { neighbour_bytes, driver_calls, refusal, context_stays })
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
            match self.haul().next(is_idle) {
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
    flying: VecDeque<(RawStream, Parcel)>,
}

impl<'a, D: Driver> Direct<'a, D> {
    fn run(
        deferred: &'a Deferred<D>,
        device: DeviceOrdinal,
        way: Way,
        haul: &'a Haul,
    ) -> PoolResult<()> {
        let streams = CopyStreams::open(deferred, device)?;
        let driver = deferred.driver();
        let mut lane = Self { driver, way, haul, streams, flying: VecDeque::new() };
        let carried = lane.carry_all();
        let finished = lane.streams.finish_all();
        if finished.is_err() && lane.streams.finish_all().is_err() {
            deferred.leave_unsettled(device);
        }
        carried.and(finished)
    }
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

    fn begin(&mut self, parcel: Parcel) -> PoolResult<()> {
        let stream = self.streams.take()?;
        self.haul.called(parcel.pieces.len() as u64);
        for piece in &parcel.pieces {
            let begun = match self.way {
                // SAFETY: as who added it vouches; the stream is waited for before this lane ends, or left unsettled.
                Way::Out => unsafe { self.driver.copy_to_host(piece.host(), piece.device, stream) },
                // SAFETY: as above.
                Way::In => unsafe {
                    self.driver.copy_to_device(piece.device, piece.host(), stream)
                },
            };
            let what = match self.way {
                Way::Out => "saving",
                Way::In => "restoring",
            };
            let (start, device) = (piece.device.start, self.streams.device());
            begun.about(|| format!("{what} of {start}"), piece.device.size_bytes, Some(device))?;
        }
        self.flying.push_back((stream, parcel));
        Ok(())
    }

    fn finish_oldest(&mut self) -> PoolResult<()> {
        if let Some((stream, parcel)) = self.flying.pop_front() {
            self.streams.finish(stream)?;
            self.haul.done(&parcel, Carrier::Direct);
        }
        Ok(())
    }
}
