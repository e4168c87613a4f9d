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
    /// Pins all `chunks`, where the driver copies nothing, or gives their pins up; what is in them stays. Stops when `goes_on` says so,
    /// which is asked behind each. What the driver will not unpin stays pinned, and its checkpoint takes longer. What it will not pin
    /// is copied slower, until a pause pins it.
    ///
    /// # Driver calls
    /// `cuMemHostRegister`, `cuMemHostUnregister`.
    pub(super) fn set_pinned(
        &self,
        are_pinned: bool,
        chunks: impl IntoIterator<Item = Placed>,
        goes_on: impl Fn(&Placed) -> bool,
    ) -> StepLog {
        let mut log = StepLog::default();
        let step = if are_pinned { "pin host memory" } else { "unpin host memory" };
        let changed = self.pins_beside_work(&self.devices(), 0).map(|pins| {
            let pins = if are_pinned { pins } else { Pins::Nobody };
            for mut chunk in chunks {
                let changed = log.timed(step, |_| chunk.change_pins(&*self.driver, pins));
                self.arena().note_pins(&chunk);
                if let Err(error) = changed {
                    tracing::warn!(%error, step, "a chunk of host memory is pinned as it was");
                }
                if !goes_on(&chunk) {
                    break;
                }
            }
        });
        if let Err(error) = changed {
            tracing::warn!(%error, step, "host memory is pinned as it was");
        }
        log
    }
}

/// Does something of `places` lie in `part`? They are where parts of the arena begin and end, apart.
pub(super) fn overlap(places: &BTreeMap<u64, u64>, part: &Range<u64>) -> bool {
    places.range(..part.end).next_back().is_some_and(|(_, end)| *end > part.start)
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
        let pinned = pool.arena().chunks(true);
        for chunk in pinned {
            let place = chunk.place();
            if !overlap(&self.pending, &place) && self.told.insert(place.start) {
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
        while overlap(&self.left, &(at..at + 1)) {
            match self.told.recv() {
                Ok(start) => drop(self.left.remove(&start)),
                // Nobody pins any more.
                Err(_) => self.left.clear(),
            }
        }
    }
}
