//! Pins of host memory in a deep pause. A pinned chunk costs the driver's checkpoint more than unpinning it, so its pins are given up as
//! soon as the last copy of the pause that uses it is done, and taken again before the first copy of the resume that does.
//! Both on a thread of its own, during the copies: a pause or resume takes as long as the slower of the two.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crossbeam_channel::{Receiver, Sender};

use crate::driver::Driver;
use crate::journal::StepLog;
use crate::pool::Pool;
use crate::store::{Extent, Pins, Placed};

/// Does `work` on another thread, if there is one to be had.
pub(super) fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> StepLog + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, StepLog>> {
    let thread = Builder::new().name("sublet-pins".to_owned()).spawn_scoped(scope, work);
    thread.inspect_err(|error| tracing::debug!(%error, "no thread for pins of host memory")).ok()
}

/// Adds what the thread did, once that is over.
pub(super) fn join(log: &mut StepLog, thread: Option<ScopedJoinHandle<'_, StepLog>>) {
    if let Some(Ok(done)) = thread.map(ScopedJoinHandle::join) {
        log.add(done);
    }
}

impl<D: Driver> Pool<D> {
    /// Gives the pins of all `chunks` up, where the driver copies nothing; what is in them stays. What the driver will not unpin
    /// stays pinned, and its checkpoint takes longer.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub(super) fn unpin(&self, chunks: impl IntoIterator<Item = Placed>) -> StepLog {
        self.change_pins("unpin host memory", |_| Pins::Nobody, chunks, |_| true)
    }

    /// Pins all `chunks`, where the driver copies nothing, and tells of each when that is over, until nobody listens. What the driver
    /// will not pin is copied slower, until a pause pins it.
    ///
    /// # Driver calls
    /// `cuMemHostRegister`.
    pub(super) fn pin(&self, chunks: Vec<Placed>, tell: &Sender<u64>) -> StepLog {
        let tell = |chunk: &Placed| tell.send(chunk.place().start).is_ok();
        self.change_pins("pin host memory", |pins| pins, chunks, tell)
    }

    fn change_pins(
        &self,
        step: &'static str,
        choose: impl FnOnce(Pins) -> Pins,
        chunks: impl IntoIterator<Item = Placed>,
        goes_on: impl Fn(&Placed) -> bool,
    ) -> StepLog {
        let mut log = StepLog::default();
        let pins = match self.pins_beside_work(&self.devices(), 0) {
            Ok(pins) => choose(pins),
            Err(error) => {
                tracing::warn!(%error, step, "host memory is pinned as it was");
                return log;
            }
        };
        for mut chunk in chunks {
            log.call();
            let changed = log.timed(step, |_| chunk.change_pins(&*self.driver, pins));
            self.arena().note_pins(&chunk);
            if let Err(error) = changed {
                tracing::warn!(%error, step, "a chunk of host memory is pinned as it was");
            }
            if !goes_on(&chunk) {
                break;
            }
        }
        log
    }
}

/// Chunks whose pins are given up behind the copies of a pause.
#[derive(Debug)]
pub(super) struct Behind {
    /// What is still to be copied: where it begins in the arena, and where it ends. They are apart.
    pending: BTreeMap<u64, u64>,
    /// Those that were told of.
    told: BTreeSet<u64>,
    tell: Sender<Placed>,
}

impl Behind {
    /// Of a pause that is to copy all of `extents`.
    pub(super) fn new<'e>(extents: impl Iterator<Item = &'e Extent>, tell: Sender<Placed>) -> Self {
        let pending = extents.map(|extent| (extent.at, extent.place().end)).collect();
        Self { pending, told: BTreeSet::new(), tell }
    }

    /// All copies of `extents` are over. Tells of each chunk that no other is to use.
    pub(super) fn are_done<'e, D: Driver>(
        &mut self,
        pool: &Pool<D>,
        extents: impl Iterator<Item = &'e Extent>,
    ) {
        for extent in extents {
            self.pending.remove(&extent.at);
        }
        for chunk in pool.arena().chunks(true) {
            let place = chunk.place();
            let last = self.pending.range(..place.end).next_back();
            if last.is_none_or(|(_, end)| *end <= place.start) && self.told.insert(place.start) {
                // With nobody there it stays pinned until the process is frozen.
                let _told = self.tell.send(chunk);
            }
        }
    }
}

/// Chunks that are pinned ahead of the copies of a resume.
#[derive(Debug)]
pub(super) struct Ahead {
    /// Those that were not told of: where each begins and ends in the arena.
    left: BTreeMap<u64, u64>,
    told: Receiver<u64>,
}

impl Ahead {
    /// Of these, which `told` tells of.
    pub(super) fn new(chunks: &[Placed], told: Receiver<u64>) -> Self {
        let places = chunks.iter().map(Placed::place);
        Self { left: places.map(|place| (place.start, place.end)).collect(), told }
    }

    /// Waits until the chunk that holds the byte `at` is pinned, or will not be.
    pub(super) fn wait_for(&mut self, at: u64) {
        while self.left.range(..=at).next_back().is_some_and(|(_, end)| at < *end) {
            match self.told.recv() {
                Ok(start) => drop(self.left.remove(&start)),
                // Nobody pins any more.
                Err(_) => self.left.clear(),
            }
        }
    }
}

/// The chunks that hold something of `places`, in the order of those, then the others.
pub(super) fn in_order_of_use(
    chunks: Vec<Placed>,
    places: impl Iterator<Item = Range<u64>>,
) -> (Vec<Placed>, Vec<Placed>) {
    let by_start: BTreeMap<u64, usize> =
        chunks.iter().enumerate().map(|(index, chunk)| (chunk.place().start, index)).collect();
    let mut chunks: Vec<_> = chunks.into_iter().map(Some).collect();
    let mut used = Vec::new();
    for place in places {
        let before = by_start.range(..=place.start).next_back();
        let within = by_start.range(place.start + 1..place.end.max(place.start + 1));
        for (_, &index) in before.into_iter().chain(within) {
            let is_of = |chunk: &mut Placed| chunk.place().end > place.start;
            used.extend(chunks[index].take_if(is_of));
        }
    }
    (used, chunks.into_iter().flatten().collect())
}
