//! The lane through a neighbour's link. What it holds there goes with it.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::VecDeque;

use super::haul::{Carrier, Haul, Parcel, Way};
use super::lanes::Lane;
use super::{RELAYED_AT_ONCE, Route};
use crate::copies::CopyStreams;
use crate::deferred::{Deferred, Physical};
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, RawStream, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};

/// What of a neighbour may be in use, our context with it: no more than this, in bytes, nor more than an eighth of all.
const MOST_USED_BYTES: u64 = 2 << 30;

/// Why a neighbour's link carries nothing, or no more.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It is in use.
    InUse {
        /// So many bytes are.
        used_bytes: u64,
    },
    /// The driver refused.
    Driver(PoolError),
}

impl Refusal {
    /// May it be otherwise the next time?
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::InUse { .. } => true,
            Self::Driver(PoolError::Driver { source, .. }) => source.is_transient(),
            Self::Driver(_) => false,
        }
    }
}

/// How a relay has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) refusal: Option<Refusal>,
    /// There is a context on the neighbour still.
    pub(super) context_stays: bool,
}

/// Carries parcels until it is over, or something is refused: then the direct lane goes on alone.
pub(super) fn run<D: Driver>(
    deferred: &Deferred<D>,
    route: &Route,
    way: Way,
    haul: &Haul,
) -> Ended {
    let refusal = relay(deferred, route, way, haul).err();
    if let Some(refusal) = &refusal {
        tracing::warn!(?refusal, neighbour = route.neighbour.0, "one link is used");
    }
    // What the driver has kept of ours there is offered to it again, and needs the context.
    let stays = route.keeps_context && refusal.is_none();
    let context_stays = stays || !end_context(deferred, route.neighbour);
    Ended { refusal, context_stays }
}

/// Gives our context on `neighbour` back. Is there none then, anybody's?
fn end_context<D: Driver>(deferred: &Deferred<D>, neighbour: DeviceOrdinal) -> bool {
    let driver = deferred.driver();
    if deferred.has_streams_of(neighbour) {
        return false;
    }
    if let Err(error) = driver.let_primary_context_go(neighbour) {
        tracing::warn!(%error, device = neighbour.0, "a context that copies have used stays");
    }
    driver.has_primary_context(neighbour).is_ok_and(|has_one| !has_one)
}

fn relay<D: Driver>(
    deferred: &Deferred<D>,
    route: &Route,
    way: Way,
    haul: &Haul,
) -> Result<(), Refusal> {
    let driver = deferred.driver();
    let about = || "context for copies".to_owned();
    let known = driver.make_current(route.neighbour).and_then(|()| driver.memory_info());
    let info = known.about(about, 0, Some(route.neighbour)).map_err(Refusal::Driver)?;
    let used_bytes = info.total_bytes.saturating_sub(info.free_bytes);
    if used_bytes > MOST_USED_BYTES.min(info.total_bytes / 8) {
        return Err(Refusal::InUse { used_bytes });
    }
    let mut relay = Relay::new(deferred, route, way, haul).map_err(Refusal::Driver)?;
    let carried = relay.carry_all();
    relay.end(carried).map_err(Refusal::Driver)
}

/// Memory of the neighbour that both devices reach. Dropped, it goes.
struct Staging<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    range: VaRange,
    physical: Option<Physical>,
    /// Copies may be under way there.
    is_unsettled: bool,
}

impl<'a, D: Driver> Staging<'a, D> {
    fn new(deferred: &'a Deferred<D>, route: &Route) -> PoolResult<Self> {
        let (driver, neighbour) = (deferred.driver(), route.neighbour);
        let prop =
            AllocationProp { requested_handle_types: 0, ..AllocationProp::pinned_on(neighbour) };
        let wanted = route.parcel_bytes * RELAYED_AT_ONCE as u64;
        let about = || "staging for copies".to_owned();
        let granularity = driver.allocation_granularity(&prop);
        let granularity = granularity.about(about, wanted, Some(neighbour))?;
        let size_bytes = granularity.round_up(wanted).unwrap_or(wanted);
        let raw = driver.create(size_bytes, &prop).about(about, size_bytes, Some(neighbour))?;
        let physical = Physical::new(raw, size_bytes, Some(neighbour));
        let start = match driver.address_reserve(size_bytes, 0, DeviceAddress(0)) {
            Ok(start) => start,
            Err(error) => {
                keep_quiet(deferred.release(physical).err());
                return Err(error).about(about, size_bytes, Some(neighbour));
            }
        };
        let range = VaRange::new(start, size_bytes);
        let staging = Self { deferred, range, physical: Some(physical), is_unsettled: false };
        let both = [route.device, neighbour].map(AccessDesc::read_write);
        let mapped = driver.map(range, raw).and_then(|()| driver.set_access(range, &both));
        mapped.about(about, size_bytes, Some(neighbour)).map(|()| staging)
    }
}

impl<D: Driver> Drop for Staging<'_, D> {
    fn drop(&mut self) {
        let Some(physical) = self.physical.take() else { return };
        if self.is_unsettled || std::thread::panicking() {
            self.deferred.give_back_later(self.range, physical);
            return;
        }
        keep_quiet(self.deferred.give_back(self.range, physical).err());
    }
}

/// What the driver keeps is deferred.
fn keep_quiet(error: Option<impl std::fmt::Display>) {
    if let Some(error) = error {
        tracing::error!(%error, "staging for copies stays until the next step");
    }
}

/// A place in the staging memory, and the neighbour's stream of it. Dropped, the stream ends.
struct Slot<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    neighbour: DeviceOrdinal,
    stream: RawStream,
    start: DeviceAddress,
    /// The stream is somebody else's to end.
    has_ended: bool,
}

impl<D: Driver> Slot<'_, D> {
    /// The stream, which does not end by this.
    fn into_stream(mut self) -> RawStream {
        self.has_ended = true;
        self.stream
    }
}

impl<D: Driver> Drop for Slot<'_, D> {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let ended = match self.deferred.driver().make_current(self.neighbour) {
            Ok(()) => self.deferred.end_stream(self.neighbour, self.stream),
            Err(error) => {
                self.deferred.end_stream_later(self.neighbour, self.stream);
                Err(error)
            }
        };
        if let Err(error) = ended {
            tracing::error!(%error, "a stream for copies stays until the next step");
        }
    }
}

/// The lane, with all that it holds. Fields go in this order.
struct Relay<'a, D: Driver> {
    deferred: &'a Deferred<D>,
    driver: &'a D,
    route: &'a Route,
    way: Way,
    haul: &'a Haul,
    /// Between the devices.
    streams: CopyStreams<'a, D>,
    /// By turns; those of `flying` from the oldest on, and behind them the free ones.
    slots: VecDeque<Slot<'a, D>>,
    staging: Staging<'a, D>,
    /// Parcels under way, oldest first; a slot each.
    flying: VecDeque<Parcel>,
}

impl<D: Driver> Lane for Relay<'_, D> {
    fn haul(&self) -> &Haul {
        self.haul
    }

    fn flying(&self) -> usize {
        self.flying.len()
    }

    fn most(&self) -> usize {
        self.slots.len()
    }

    /// The first hop, and in a pause the second, which is not waited for.
    fn begin(&mut self, parcel: Parcel) -> PoolResult<()> {
        let slot = self.flying.len();
        // From here on it is given back whatever fails.
        self.flying.push_back(parcel);
        match self.way {
            Way::Out => {
                self.between_devices(slot)?;
                self.at_host(slot)
            }
            Way::In => self.at_host(slot),
        }
    }

    fn finish_oldest(&mut self) -> PoolResult<()> {
        let Some(slot) = self.slots.front() else { return Ok(()) };
        let waited = self.driver.stream_synchronize(slot.stream);
        let about = || "copies through a neighbour".to_owned();
        waited.about(about, 0, Some(self.route.neighbour))?;
        if self.way == Way::In {
            self.between_devices(0)?;
        }
        if let Some(parcel) = self.flying.pop_front() {
            self.haul.done(&parcel, Carrier::Relay);
            self.slots.rotate_left(1);
        }
        Ok(())
    }
}

impl<'a, D: Driver> Relay<'a, D> {
    fn new(
        deferred: &'a Deferred<D>,
        route: &'a Route,
        way: Way,
        haul: &'a Haul,
    ) -> PoolResult<Self> {
        let (driver, neighbour) = (deferred.driver(), route.neighbour);
        let staging = Staging::new(deferred, route)?;
        let mut slots = VecDeque::new();
        for number in 0..RELAYED_AT_ONCE as u64 {
            let about = || "stream for copies".to_owned();
            let stream = driver.stream_create().about(about, 0, Some(neighbour))?;
            let start = DeviceAddress(staging.range.start.0 + number * route.parcel_bytes);
            slots.push_back(Slot { deferred, neighbour, stream, start, has_ended: false });
        }
        let streams = CopyStreams::open(deferred, route.device)?;
        let flying = VecDeque::new();
        Ok(Self { deferred, driver, route, way, haul, streams, slots, staging, flying })
    }

    /// The hop between the devices of the parcel that is number `index` of those under way, to its end: by our own device,
    /// whose context reaches both ends.
    fn between_devices(&mut self, index: usize) -> PoolResult<()> {
        let stream = self.streams.take()?;
        let (Some(parcel), Some(slot)) = (self.flying.get(index), self.slots.get(index)) else {
            return Ok(());
        };
        self.haul.called(parcel.pieces.len() as u64 + 1);
        for (piece, staged) in staged(parcel, slot.start) {
            let (target, source) = match self.way {
                Way::Out => (staged.start, piece),
                Way::In => (piece.start, staged),
            };
            // SAFETY: the slot is this parcel's alone, and the piece is as who added it vouches; it is waited for below,
            // or when the lane ends.
            let begun = unsafe { self.driver.copy_between(target, source, stream) };
            let about = || format!("copy of {} through a neighbour", piece.start);
            begun.about(about, piece.size_bytes, Some(self.route.device))?;
        }
        self.streams.finish(stream)
    }

    /// Begins the hop between neighbour and host, by the neighbour.
    fn at_host(&self, index: usize) -> PoolResult<()> {
        let (Some(parcel), Some(slot)) = (self.flying.get(index), self.slots.get(index)) else {
            return Ok(());
        };
        let neighbour = Some(self.route.neighbour);
        let about = || "copies through a neighbour".to_owned();
        self.driver.make_current(self.route.neighbour).about(about, parcel.bytes, neighbour)?;
        self.haul.called(parcel.pieces.len() as u64 + 1);
        for (piece, (_, staged)) in parcel.pieces.iter().zip(staged(parcel, slot.start)) {
            let begun = match self.way {
                // SAFETY: as above; the slot's stream is waited for before it is used again, and when the lane ends.
                Way::Out => unsafe { self.driver.copy_to_host(piece.host(), staged, slot.stream) },
                // SAFETY: as above.
                Way::In => unsafe { self.driver.copy_to_device(staged, piece.host(), slot.stream) },
            };
            begun.about(about, staged.size_bytes, neighbour)?;
        }
        Ok(())
    }

    /// Waits for all that is under way, after a failure too, and gives back what has not arrived.
    fn end(mut self, carried: PoolResult<()>) -> PoolResult<()> {
        let ours = self.streams.finish_all();
        let is_unsettled = ours.is_err() && self.streams.finish_all().is_err();
        if is_unsettled {
            self.deferred.leave_unsettled(self.route.device);
            self.staging.is_unsettled = true;
        }
        if self.finish_slots().is_err()
            && let Err(error) = self.finish_slots()
        {
            self.end_slots(error.poisons_context());
        }
        let lost = std::mem::take(&mut self.flying);
        if is_unsettled {
            // Copies may come yet to memory that the direct lane would copy to.
            let error = carried.and(ours).err().unwrap_or_else(|| self.not_waited_for());
            self.haul.fail(error);
            return Err(self.not_waited_for());
        }
        // What the neighbour copies yet to the host is what the direct lane copies there.
        self.haul.give_back(lost.into_iter());
        carried.and(ours)
    }

    fn not_waited_for(&self) -> PoolError {
        use crate::driver::{DriverCode, DriverError, DriverOp};
        PoolError::Driver {
            object: "copies through a neighbour".to_owned(),
            size_bytes: 0,
            device: Some(self.route.neighbour),
            source: DriverError { op: DriverOp::StreamSynchronize, code: DriverCode::UNKNOWN },
        }
    }

    fn finish_slots(&self) -> PoolResult<()> {
        let about = || "copies through a neighbour".to_owned();
        let mut all = Ok(());
        for slot in &self.slots {
            let waited = self.driver.stream_synchronize(slot.stream);
            all = all.and(waited.about(about, 0, Some(self.route.neighbour)));
        }
        all
    }

    /// The neighbour would not be waited for: no work of its outlives its context, which is nobody else's, nor an error that the context does not outlive.
    fn end_slots(&mut self, is_dead: bool) {
        let mut streams: Vec<_> = self.slots.drain(..).map(Slot::into_stream).collect();
        let neighbour = self.route.neighbour;
        if end_context(self.deferred, neighbour) {
            return;
        }
        if !is_dead {
            self.deferred.leave_late(neighbour);
        }
        self.staging.is_unsettled = true;
        for stream in streams.drain(..) {
            self.deferred.end_stream_later(neighbour, stream);
        }
    }
}

/// Each piece of `parcel` on its device, and where it is staged from `start` on.
fn staged(
    parcel: &Parcel,
    start: DeviceAddress,
) -> impl Iterator<Item = (VaRange, VaRange)> + use<'_> {
    let mut at = start.0;
    parcel.pieces.iter().map(move |piece| {
        let staged = VaRange::new(DeviceAddress(at), piece.device.size_bytes);
        at += piece.device.size_bytes;
        (piece.device, staged)
    })
}
