//! Host memory for the next pause: what one would take, brought in while the application runs.
//!
//! A chunk is touched and pinned without a lock. A pause that comes meanwhile takes it as far as it has come, so that never
//! two grow the arena at the same time.

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

/// Host memory of one process, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStanding {
    /// Held for saved contents, in bytes.
    pub held_bytes: u64,
    /// The host memory that a pause of everything would hold, in bytes: as much as is kept of device memory. After a
    /// pause it is what that pause used, and what has come to it since.
    pub wanted_bytes: u64,
    /// The size of what is brought in next, in bytes; 0 when nothing is missing.
    pub next_bytes: u64,
}

/// The outcome of [`HostMemory::bring_in`].
#[derive(Debug, PartialEq, Eq)]
pub enum BroughtIn {
    /// Nothing is missing.
    Enough,
    /// One chunk more is held.
    Chunk {
        /// Its size.
        size_bytes: u64,
        /// The steps that were taken for it.
        log: StepLog,
    },
    /// A pause or resume is under way, or the process ends.
    NotNow,
}

impl<D: Driver> HostMemory<D> {
    /// Returns the host memory that is held, and that which a pause would hold. Waits for nothing.
    pub fn standing(&self) -> HostStanding {
        let ((kept, filed), held) = (self.wanted_places(), self.incoming.figures());
        HostStanding {
            held_bytes: held.bytes(),
            wanted_bytes: held.wanted_bytes(kept, filed > 0),
            next_bytes: held.missing(kept, filed > 0).map_or(0, |coming| coming.chunk_bytes),
        }
    }

    /// Computes the ends of the contents of a pause of everything, in arena and file.
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

    /// Brings in one chunk of the host memory that a pause of everything would take beyond what is held, as long as no
    /// more than `most_bytes` are held with it. The application runs meanwhile, and a pause that comes takes the chunk as
    /// it is: no lock is held while it is touched and pinned, by a few threads. Makes no context: where there is none, the
    /// chunk is pinned by the pause. To be called on a thread of ours that does nothing else.
    ///
    /// # Errors
    /// [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::Driver`]; what was held before is held still.
    ///
    /// # Driver calls
    /// `cuThreadExchangeStreamCaptureMode`, `cuDevicePrimaryCtxGetState`, `cuCtxSetCurrent`, `cuMemHostRegister`.
    pub fn bring_in(&self, gate: &Gate, most_bytes: u64) -> PoolResult<BroughtIn> {
        let (kept, filed) = self.wanted_places();
        let devices = self.holdings.devices();
        let nodes = self.devices.nodes_of(&devices);
        let (claim, mut how) = {
            let mut arena = self.arena();
            // Behind the lock: a pause takes it when its gate is shut, before it looks for what is on its way.
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
            // A pause did not wait for it any longer, and has taken as much itself.
            arena.discard(held);
            return Ok(BroughtIn::NotNow);
        }
        arena.put(held, claim.coming);
        Ok(BroughtIn::Chunk { size_bytes, log })
    }

    /// Nothing is brought in or given back from now on, because the process ends. Waits for the driver call under way, at
    /// most for as long as this.
    pub fn stop(&self, timeout: Duration) {
        self.incoming.hold(timeout);
    }

    /// Is nothing brought in now, because the process ends or is frozen?
    pub fn has_stopped(&self) -> bool {
        self.incoming.is_held()
    }
}
