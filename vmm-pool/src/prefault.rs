//! Populates host memory for the next pause, as much as a pause would need, while the application runs.
//!
//! A chunk is touched and pinned without a lock. A pause that begins meanwhile takes the chunk, however much of it is
//! populated. So two threads never grow the arena simultaneously.

use std::time::Duration;

use crate::driver::Driver;
use crate::error::PoolResult;
use crate::gate::Gate;
use crate::journal::StepLog;
use crate::ledger::{Selection, Survey};
use crate::pool::HostMemory;
use crate::store::{Coming, Copies, bring_in};

/// Threads that touch memory while the application runs.
const TOUCHERS_MAX: usize = 2;

/// The host memory of one process, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStanding {
    /// The host memory held for saved contents, in bytes.
    pub held_bytes: u64,
    /// The host memory that a pause of everything would hold, in bytes: as much as the device memory whose contents are
    /// kept. After a pause it is what that pause used, plus what the process has allocated since.
    pub wanted_bytes: u64,
    /// The size of the next chunk to populate, in bytes; 0 when nothing is missing.
    pub next_bytes: u64,
}

/// The outcome of [`HostMemory::bring_in`].
#[derive(Debug, PartialEq, Eq)]
pub enum BroughtIn {
    /// Nothing is missing.
    Enough,
    /// The process holds one chunk more.
    Chunk {
        /// The size of the chunk.
        size_bytes: u64,
        /// The steps that populated the chunk.
        log: StepLog,
    },
    /// A pause or resume is under way, or the process ends.
    NotNow,
}

impl<D: Driver> HostMemory<D> {
    /// Returns the host memory that is held, and the host memory that a pause would hold. Does not block.
    pub fn standing(&self) -> HostStanding {
        let ((kept, filed), held) = (self.wanted_places(), self.incoming.figures());
        HostStanding {
            held_bytes: held.bytes(),
            wanted_bytes: held.wanted_bytes(kept, filed > 0),
            next_bytes: held.missing(kept, filed > 0).map_or(0, |coming| coming.chunk_bytes),
        }
    }

    /// Computes where the contents of a pause of everything would end, in the arena and in the file.
    fn wanted_places(&self) -> (u64, u64) {
        let (whole, kept_bytes) = {
            let ledger = self.holdings.ledger();
            (ledger.rows.choose(&Selection::Whole), ledger.rows.kept_bytes())
        };
        let layouts = self.layouts(&whole, &Survey::default(), Copies::All);
        let [kept, filed] = layouts.map(|layout| layout.end_bytes);
        let kept = self.incoming.figures().used.map_or(kept, |used| {
            kept.min(used.end_bytes + kept_bytes.saturating_sub(used.kept_bytes))
        });
        (kept, filed)
    }

    /// Populates one chunk of host memory, if a pause of everything would need more than is held. Does nothing if more
    /// than `most_bytes` would be held then. The application runs meanwhile. A few threads touch and pin the chunk
    /// without a lock, and a pause that begins takes the chunk as it is. Makes no context: without one, the pause pins
    /// the chunk. Call it on a thread of Sublet's that does nothing else.
    ///
    /// # Errors
    /// [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::Driver`]: the host memory held before stays.
    ///
    /// # Driver calls
    /// `cuThreadExchangeStreamCaptureMode`, `cuDevicePrimaryCtxGetState`, `cuCtxSetCurrent`, `cuMemHostRegister`.
    pub fn bring_in(&self, gate: &Gate, most_bytes: u64) -> PoolResult<BroughtIn> {
        let (kept, filed) = self.wanted_places();
        let devices = self.holdings.devices();
        let nodes = self.devices.nodes_of(&devices);
        let (claim, mut how) = {
            let mut arena = self.arena();
            // Checked under the lock: a pause takes the lock after its gate is shut, and then looks for a chunk that is
            // on its way.
            if gate.is_shut() || self.incoming.is_held() {
                return Ok(BroughtIn::NotNow);
            }
            let held = self.incoming.figures();
            let missing = held.missing(kept, filed > 0);
            let fits = |next: &Coming| held.bytes() + next.chunk_bytes <= most_bytes;
            let Some(coming) = missing.filter(fits) else { return Ok(BroughtIn::Enough) };
            let Some(claim) = self.incoming.begin(coming) else { return Ok(BroughtIn::NotNow) };
            arena.set_nodes(nodes);
            (claim, arena.how.clone())
        };
        how.toucher_threads = how.toucher_threads.clamp(1, TOUCHERS_MAX);
        let size_bytes = claim.coming.chunk_bytes;
        let pins = self.devices.pins_beside_work(&devices, size_bytes)?;
        let (mut log, driver) = (StepLog::default(), &*self.devices.driver);
        let is_urgent = || gate.is_shut() || self.incoming.is_held();
        let held = bring_in(&mut log, driver, &how, (claim.coming, pins), &is_urgent)?;
        let mut arena = self.arena();
        if self.incoming.figures().missing(kept, filed > 0).is_none() {
            // A pause has stopped waiting for this chunk, and has allocated as much itself.
            arena.discard(held);
            return Ok(BroughtIn::NotNow);
        }
        arena.put(held, claim.coming);
        Ok(BroughtIn::Chunk { size_bytes, log })
    }

    /// Stops populating and giving back host memory, because the process ends. Waits for the driver call under way, for
    /// at most `timeout`.
    pub fn stop(&self, timeout: Duration) {
        self.incoming.hold(timeout);
    }

    /// Has populating stopped, because the process ends or is frozen?
    pub fn has_stopped(&self) -> bool {
        self.incoming.is_held()
    }
}
