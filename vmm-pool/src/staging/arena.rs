//! The arena: chunks that saved contents lie in, end to end, and their pinning.
//!
//! Chunks stay for the next pause. A pause that needs more maps them all at once, which costs nothing yet; who
//! fills them, and how, is in `copies.rs`.

#![expect(unsafe_code, reason = "pins and unpins host memory through the driver")]

use std::sync::Arc;

use super::chunk::Chunk;
use super::copies::OpenRing;
use super::pinning::Pinner;
use super::ring::DeviceEvent;
use super::{HostBudget, HostDemand, PinFor, PinLater, Staging, length_of};
use crate::driver::{Driver, DriverResult};
use crate::error::{Describe, PoolError, PoolResult};
use crate::turns::PinTurns;
use crate::vacate::StepLog;

/// Host memory for the saved contents of one process.
#[derive(Debug)]
pub(crate) struct HostArena<D: Driver> {
    pub(super) driver: Arc<D>,
    pub(super) staging: Staging,
    turns: Arc<PinTurns>,
    pub(super) chunks: Vec<Chunk>,
    /// What the last completed pause used.
    used_bytes: u64,
    /// How many chunks the last pause began with, and whom it pins them for.
    pub(super) in_use: Option<(usize, PinFor)>,
    /// Has the driver refused to pin in this resume?
    pub(super) pin_refused: bool,
    /// Events that the driver would not end with the last ring.
    pub(super) kept_events: Vec<DeviceEvent>,
    /// Only while a pause saves.
    pub(super) ring: Option<OpenRing<D>>,
    /// Only between a pause and what comes next.
    pinner: Option<Pinner>,
}

impl<D: Driver> HostArena<D> {
    pub(crate) fn new(driver: Arc<D>, staging: Staging) -> Self {
        Self {
            driver,
            staging,
            turns: Arc::default(),
            chunks: Vec::new(),
            used_bytes: 0,
            in_use: None,
            pin_refused: false,
            kept_events: Vec::new(),
            ring: None,
            pinner: None,
        }
    }

    pub(crate) fn set_staging(&mut self, staging: Staging) {
        self.staging = staging;
    }

    pub(crate) fn set_turns(&mut self, turns: PinTurns) {
        self.turns = Arc::new(turns);
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.staging.chunk_bytes
    }

    pub(super) fn chunk_length(&self) -> usize {
        length_of(self.chunk_bytes())
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.chunks.len() as u64 * self.chunk_bytes()
    }

    /// Of the capacity, what copies may use at full speed.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let pinned = self.chunks.iter().filter(|chunk| chunk.is_pinned).count();
        let behind = self.pinner.as_ref().map_or(0, Pinner::pinned);
        (pinned + behind) as u64 * self.chunk_bytes()
    }

    /// What saving `saved_bytes` takes. The ring takes nothing more.
    pub(crate) fn demand(&self, saved_bytes: u64) -> HostDemand {
        let held_bytes = self.capacity_bytes();
        let missing = saved_bytes.saturating_sub(held_bytes);
        let grow_bytes = missing.next_multiple_of(self.chunk_bytes());
        HostDemand { saved_bytes, held_bytes, grow_bytes }
    }

    /// Refuses when `needed_bytes` cannot be held within `budget`; changes nothing.
    pub(crate) fn check_budget(&self, needed_bytes: u64, budget: HostBudget) -> PoolResult<()> {
        let grow_bytes = self.demand(needed_bytes).grow_bytes;
        match budget.0 {
            Some(available_bytes) if grow_bytes > available_bytes => {
                Err(PoolError::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn pin(&mut self, log: &mut StepLog, index: usize) -> DriverResult<()> {
        let Some((_, pin_for)) = self.in_use else {
            return Ok(());
        };
        let length = self.chunk_length();
        let turn = log.measured("wait for a turn at pinning", || self.turns.take());
        log.call();
        log.measured("pin host memory", || {
            let start = self.chunks[index].start();
            // SAFETY: the chunk stays mapped until `shrink_to` or the drop of the arena unregisters it.
            unsafe { self.driver.host_register(start.0, length, pin_for.contexts) }
        })?;
        drop(turn);
        self.chunks[index].is_pinned = true;
        Ok(())
    }

    /// Has a thread pin what the last pause has left unpinned. Without a thread to be had, it is pinned when
    /// needed.
    pub(crate) fn pin_behind(&mut self) {
        let Some((used, pin_for)) = self.in_use else {
            return;
        };
        let chunks = self.chunks.iter().enumerate().take(used);
        let unpinned: Vec<_> = chunks
            .filter(|(_, chunk)| !chunk.is_pinned)
            .map(|(index, chunk)| (index, chunk.start()))
            .collect();
        if unpinned.is_empty()
            || self.pinner.is_some()
            || self.staging.pin_later != PinLater::Behind
        {
            return;
        }
        let (driver, turns) = (Arc::clone(&self.driver), Arc::clone(&self.turns));
        // SAFETY: every method that pins, unpins or unmaps a chunk, and the drop, ends the pinner first.
        match unsafe { Pinner::start(driver, turns, pin_for, self.chunk_length(), unpinned) } {
            Ok(pinner) => self.pinner = Some(pinner),
            Err(error) => tracing::debug!(%error, "no thread to pin host memory behind a pause"),
        }
    }

    /// Stops pinning behind a pause, after the chunk that is being pinned.
    pub(crate) fn call_pinner_off(&mut self, log: &mut StepLog) {
        self.pin_refused = false;
        let Some(pinner) = self.pinner.take() else {
            return;
        };
        pinner.call_off();
        let pinned = if pinner.is_finished() {
            pinner.end()
        } else {
            log.measured("wait for pinning to stop", || pinner.end())
        };
        self.mark_pinned(pinned);
    }

    /// Waits until the last pause's memory is pinned, as far as it can be.
    pub(crate) fn wait_for_pinner(&mut self) {
        if let Some(pinner) = self.pinner.take() {
            self.mark_pinned(pinner.end());
        }
    }

    fn mark_pinned(&mut self, indices: Vec<usize>) {
        for index in indices {
            self.chunks[index].is_pinned = true;
        }
    }

    /// Gives chunks back until at most `keep_bytes` (rounded up to a chunk) are held. A context must be
    /// current, and no contents saved beyond that.
    pub(crate) fn shrink_to(&mut self, keep_bytes: u64) -> PoolResult<()> {
        self.call_pinner_off(&mut StepLog::default());
        while self.capacity_bytes() >= keep_bytes.saturating_add(self.chunk_bytes()) {
            let Some(chunk) = self.chunks.last() else {
                break;
            };
            if chunk.is_pinned {
                // SAFETY: the caller vouches that nothing is saved in this chunk, so no copy uses it.
                unsafe { self.driver.host_unregister(chunk.start().0) }.about(
                    || "unpinning of host memory".to_owned(),
                    self.chunk_bytes(),
                    None,
                )?;
            }
            self.chunks.pop();
        }
        Ok(())
    }

    /// A pause is complete that has `saved_bytes` here.
    pub(crate) fn used(&mut self, saved_bytes: u64) {
        self.used_bytes = saved_bytes;
    }

    /// After a pause that came to nothing: gives back what the last completed one did not use. What the
    /// driver will not unpin stays for the next pause. A context must be current, and nothing saved.
    pub(crate) fn give_back_unused(&mut self) {
        if let Err(error) = self.shrink_to(self.used_bytes) {
            tracing::error!(%error, "host memory stays for the next pause");
        }
    }
}

impl<D: Driver> Drop for HostArena<D> {
    fn drop(&mut self) {
        self.end_saving(&mut StepLog::default());
        if let Err(error) = self.shrink_to(0) {
            tracing::error!(%error, "host memory stays pinned");
            self.chunks.drain(..).for_each(Chunk::keep);
        }
    }
}
