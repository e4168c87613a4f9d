//! The arena: chunks that saved contents lie in, end to end.
//!
//! Chunks stay for the next pause. A pause that needs more maps them all at once, which costs nothing yet.
//! When more than one of those it will use is not pinned, the last of them is brought in and pinned, and
//! serves as the ring for all before it; what belongs there itself is copied last, straight, when the ring
//! is done. So the ring takes no memory of its own, and nothing is pinned that is unpinned again.
//!
//! ```text
//!   linear offset:  0 ............ chunk ............ 2*chunk ............ 3*chunk
//!   saved pieces:   [A      ][B ][C                      ][D   ]
//!   first pause:    fresh ............................. | ring, then D
//! ```

#![expect(unsafe_code, reason = "hands host memory to the driver for copies")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::chunk::{Chunk, HostPlace};
use super::pinning::Pinner;
use super::ring::{DeviceEvent, Ring};
use super::{HostBudget, HostDemand, PinFor, PinLater, Staging, length_of};
use crate::driver::{DeviceAddress, Driver, DriverResult, RawStream, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::turns::PinTurns;
use crate::vacate::StepLog;

pub(crate) use super::ring::{DeviceStream, Mark};

/// Where saved contents lie in the arena: `[offset, offset + size)` of its linear space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) offset_bytes: u64,
}

/// A ring, and the chunk that its slots lie in.
#[derive(Debug)]
struct OpenRing<D: Driver> {
    ring: Ring<D>,
    chunk: usize,
}

/// Host memory for the saved contents of one process.
#[derive(Debug)]
pub(crate) struct HostArena<D: Driver> {
    driver: Arc<D>,
    staging: Staging,
    turns: Arc<PinTurns>,
    chunks: Vec<Chunk>,
    /// What the last completed pause used.
    used_bytes: u64,
    /// How many chunks the last pause began with, and whom it pins them for.
    in_use: Option<(usize, PinFor)>,
    /// Has the driver refused to pin in this resume?
    pin_refused: bool,
    /// Events that the driver would not end with the last ring.
    kept_events: Vec<DeviceEvent>,
    /// Only while a pause saves.
    ring: Option<OpenRing<D>>,
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

    fn chunk_length(&self) -> usize {
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

    /// Makes ready for a pause that saves to `[0, end_bytes)`, in any order that comes to the last chunk last.
    /// A context of `pin_for` must be current, and nothing saved.
    pub(crate) fn begin_saving(
        &mut self,
        log: &mut StepLog,
        end_bytes: u64,
        pin_for: PinFor,
    ) -> PoolResult<()> {
        self.call_pinner_off(log);
        log.timed("map host memory", |_| {
            while self.capacity_bytes() < end_bytes {
                let chunk = Chunk::map(self.chunk_length());
                self.chunks.push(chunk.map_err(|source| PoolError::HostMemoryRefused {
                    size_bytes: self.chunk_bytes(),
                    source,
                })?);
            }
            Ok(())
        })?;
        let used = length_of(end_bytes.div_ceil(self.chunk_bytes()));
        self.in_use = Some((used, pin_for));
        let unpinned: Vec<usize> = (0..used).filter(|&i| !self.chunks[i].is_pinned).collect();
        let Some(&last_unpinned) = unpinned.last() else {
            return Ok(());
        };
        let last = if unpinned.len() == 1 { last_unpinned } else { used - 1 };
        self.bring_in(log, last)?;
        if unpinned.len() > 1 {
            self.open_ring(last);
        }
        Ok(())
    }

    /// Touches and pins a chunk.
    fn bring_in(&mut self, log: &mut StepLog, index: usize) -> PoolResult<()> {
        if self.chunks[index].is_pinned {
            return Ok(());
        }
        log.measured("touch host memory", || {
            // SAFETY: nothing is saved yet, and no ring is open.
            unsafe { self.chunks[index].touch(self.chunk_length(), self.staging.copier_threads) };
        });
        self.pin(log, index).about(|| "pinning of host memory".to_owned(), self.chunk_bytes(), None)
    }

    fn pin(&mut self, log: &mut StepLog, index: usize) -> DriverResult<()> {
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

    /// Without a thread to be had there is no ring, and copies go to unpinned memory: right, and slow.
    fn open_ring(&mut self, chunk: usize) {
        let slot_bytes = self.staging.slot_bytes;
        let start = self.chunks[chunk].start();
        let slots = (0..self.chunk_bytes() / slot_bytes).map(|index| {
            // SAFETY: the slot lies inside the chunk.
            HostPlace(unsafe { start.0.add(length_of(index * slot_bytes)) })
        });
        // SAFETY: the chunk is pinned; it is unpinned and unmapped by `shrink_to` and the drop of the arena
        // only, when all copies are done; until the ring is gone `save` keeps other contents out of it.
        let ring = unsafe {
            Ring::open(&self.driver, slots.collect(), slot_bytes, self.staging.copier_threads)
        };
        self.ring = ring.map(|mut ring| {
            ring.adopt(&mut self.kept_events);
            OpenRing { ring, chunk }
        });
    }

    /// The pause has saved, or failed to: ends the ring and its threads, after all copies that it was given.
    pub(crate) fn end_saving(&mut self) {
        if let Some(open) = self.ring.take() {
            self.kept_events = open.ring.end();
        }
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

    /// The pieces of `[offset, offset + size)`, chunk by chunk: index, host pointer, offset in the range,
    /// length.
    fn pieces(&self, saved: Saved, size_bytes: u64) -> Vec<Piece> {
        let chunk_bytes = self.chunk_bytes();
        let mut pieces = Vec::new();
        let mut offset_bytes = 0;
        while offset_bytes < size_bytes {
            let at = saved.offset_bytes + offset_bytes;
            let within = at % chunk_bytes;
            let length_bytes = (chunk_bytes - within).min(size_bytes - offset_bytes);
            let chunk = length_of(at / chunk_bytes);
            // A chunk that does not exist panics here, before any copy.
            let start = self.chunks[chunk].start();
            // SAFETY: `within` is less than the chunk's length.
            let pointer = unsafe { start.0.add(length_of(within)) };
            pieces.push(Piece { chunk, pointer, offset_bytes, length_bytes });
            offset_bytes += length_bytes;
        }
        pieces
    }

    /// Starts copies of `source` to its place in the arena: straight where that is pinned, through the ring
    /// elsewhere.
    ///
    /// # Safety
    /// `source` stays mapped, and the arena's place untouched, until the stream is done and
    /// [`HostArena::wait_for`] has returned for the mark of a later [`HostArena::flush`], or
    /// [`HostArena::end_saving`] has.
    pub(crate) unsafe fn save(
        &mut self,
        log: &mut StepLog,
        source: VaRange,
        saved: Saved,
        through: DeviceStream,
    ) -> PoolResult<()> {
        for piece in self.pieces(saved, source.size_bytes) {
            let address = DeviceAddress(source.start.0 + piece.offset_bytes);
            let from = VaRange::new(address, piece.length_bytes);
            if self.ring.as_ref().is_some_and(|open| open.chunk == piece.chunk) {
                self.drain_ring(log)?;
                // Ending events has made contexts current.
                self.driver.make_current(through.device).about(
                    || "copies of contents".to_owned(),
                    0,
                    Some(through.device),
                )?;
            }
            match &mut self.ring {
                Some(open) if !self.chunks[piece.chunk].is_pinned => {
                    // SAFETY: the place lies in a live chunk that is not the ring's; the rest is the
                    // caller's promise.
                    unsafe { open.ring.pass(log, from, piece.pointer, through) }?;
                }
                _ => {
                    log.call();
                    let queued = log.measured("queue copies", || {
                        // SAFETY: the piece lies in a live chunk; the caller keeps both ends valid.
                        unsafe { self.driver.copy_to_host(piece.pointer, from, through.stream) }
                    });
                    let about = || format!("saving of {}", source.start);
                    queued.about(about, piece.length_bytes, Some(through.device))?;
                }
            }
        }
        Ok(())
    }

    /// Lets everything under way through the ring land, and ends it: its chunk takes contents from now on.
    fn drain_ring(&mut self, log: &mut StepLog) -> PoolResult<()> {
        let mark = self.flush(log)?;
        log.timed("drain the ring", |_| self.wait_for(mark))?;
        self.end_saving();
        Ok(())
    }

    /// Sends what [`HostArena::save`] was last given on its way. The mark stands for it and all before it.
    pub(crate) fn flush(&mut self, log: &mut StepLog) -> PoolResult<Mark> {
        self.ring.as_mut().map_or(Ok(Mark::default()), |open| open.ring.flush(log))
    }

    /// Waits until everything before `mark` that goes through the ring is in its final place.
    pub(crate) fn wait_for(&mut self, mark: Mark) -> PoolResult<()> {
        self.ring.as_mut().map_or(Ok(()), |open| open.ring.wait_for(mark))
    }

    /// Starts copies from the arena back to `target`. Memory that is not pinned yet is pinned first; where the
    /// driver refuses, it is copied from as it is.
    ///
    /// # Safety
    /// `target` stays mapped, and the arena's place untouched, until the stream is done.
    pub(crate) unsafe fn restore(
        &mut self,
        log: &mut StepLog,
        target: VaRange,
        saved: Saved,
        stream: RawStream,
    ) -> PoolResult<()> {
        for piece in self.pieces(saved, target.size_bytes) {
            if !self.chunks[piece.chunk].is_pinned
                && !self.pin_refused
                && let Err(error) = self.pin(log, piece.chunk)
            {
                self.pin_refused = true;
                log.notes.push(format!(
                    "copies from host memory are slow, because it could not be pinned: {error}"
                ));
            }
            let to = VaRange::new(
                DeviceAddress(target.start.0 + piece.offset_bytes),
                piece.length_bytes,
            );
            log.call();
            // SAFETY: the piece lies in a live chunk; the caller keeps both ends valid.
            unsafe { self.driver.copy_to_device(to, piece.pointer, stream) }.about(
                || format!("restoring of {}", target.start),
                piece.length_bytes,
                None,
            )?;
        }
        Ok(())
    }
}

/// A part of a saved range that lies in one chunk.
#[derive(Debug)]
struct Piece {
    chunk: usize,
    pointer: NonNull<u8>,
    /// Where it begins in the saved range.
    offset_bytes: u64,
    length_bytes: u64,
}

impl<D: Driver> Drop for HostArena<D> {
    fn drop(&mut self) {
        self.end_saving();
        if let Err(error) = self.shrink_to(0) {
            tracing::error!(%error, "host memory stays pinned");
            self.chunks.drain(..).for_each(Chunk::keep);
        }
    }
}
