//! Host memory for saved contents, and the copies into and out of it.
//!
//! The arena is a list of chunks of 2 to 256 MiB: a process that saves little holds little. A chunk is mapped with huge
//! pages and touched by several threads (one thread populates 1.6 to 3 GiB/s, sixteen 57 GiB/s). Then one call pins it.
//! New chunks are made while copies into earlier chunks run. So a first pause runs at the speed of the slowest of the
//! three. Chunks stay for the next pause.
//!
//! ```text
//!   linear offset:  0 ......... first chunk ......... second chunk ............
//!   saved pieces:   [A      ][B ][C                      ][D   ]
//! ```

#![expect(unsafe_code, reason = "hands host memory to the driver")]

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::chunk::{
    BringIn, CHUNK_BYTES, Chunk, Stop, missing_chunks, new_chunk, next_chunk_bytes,
};
use super::incoming::{Coming, HeldFigures, Incoming, Used};
use super::places::{Located, Piece};
use super::ring::{self, Slot};
use super::{Disk, HeldFile, HostBudget, Part, Saved, Store};
use crate::driver::{DeviceOrdinal, Driver, DriverCode, PinnedFor};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;

/// The longest time that a step waits for a chunk that a thread populates. The system clears a chunk in less than a
/// second, unless it has to swap for it.
const BROUGHT_WITHIN: Duration = Duration::from_mins(1);

/// The contexts that a chunk is pinned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pins {
    /// No context: the driver refused to pin the chunk again. The chunk can still hold contents, but copies are slower.
    Nobody,
    /// The context of one device.
    Only(DeviceOrdinal),
    /// All contexts of the process.
    All,
}

impl Pins {
    /// Returns the pins that a process on these devices needs.
    pub(crate) fn of(devices: &[DeviceOrdinal]) -> Self {
        if let [only] = devices { Self::Only(*only) } else { Self::All }
    }
}

/// A chunk that is held. It belongs to the arena, and to everybody who has a piece of it.
#[derive(Debug)]
pub(crate) struct HeldChunk {
    pub(super) chunk: Arc<Chunk>,
    pub(super) pins: Pins,
}

impl HeldChunk {
    pub(super) fn new(chunk: Chunk) -> Self {
        Self { chunk: Arc::new(chunk), pins: Pins::Nobody }
    }

    /// Has anybody a piece of the chunk? Nobody gets one while the arena is locked. If nobody has, this thread also
    /// sees all that was done in the chunk. A look at the count alone does not guarantee that.
    fn is_in_use(&mut self) -> bool {
        Arc::get_mut(&mut self.chunk).is_none()
    }

    /// Populates the rest of the chunk, and pins it for `pins` too, in addition to its pins before. On failure the
    /// chunk may have lost its pins.
    fn pin<D: Driver>(&mut self, driver: &D, pins: Pins, threads: usize) -> PoolResult<()> {
        unpin(driver, self)?;
        // A process that has used two devices may use them again.
        let wanted = if self.pins == Pins::Nobody { pins } else { Pins::All };
        self.pins = Pins::Nobody;
        if let Some(chunk) = Arc::get_mut(&mut self.chunk) {
            chunk.touch(threads, &|| false);
        }
        pin(driver, &self.chunk, wanted)?;
        self.pins = wanted;
        Ok(())
    }

    /// Never unmaps the chunk: the driver holds its pages.
    fn keep_for_good(self) {
        let _kept = std::mem::ManuallyDrop::new(self.chunk);
    }
}

/// A chunk of the arena.
#[derive(Debug)]
struct Placed {
    held: HeldChunk,
    /// Its linear offset.
    start_bytes: u64,
}

impl Placed {
    fn end_bytes(&self) -> u64 {
        self.start_bytes + self.held.chunk.size_bytes()
    }
}

/// Pinned host memory for the saved contents of one process. Its lock is held to look up and to grow, but not to copy.
/// Code that copies has [`Piece`]s, whose chunks are not given back meanwhile.
#[derive(Debug)]
pub(crate) struct HostArena<D: Driver> {
    driver: Arc<D>,
    chunks: Vec<Placed>,
    /// The slots between devices and the file ([`ring`]).
    ring: Option<HeldChunk>,
    /// The part of the chunks that the last completed pause used.
    used: Option<Used>,
    /// The end of the arena that stays: used by that pause, or populated since while the application ran. And whether
    /// the ring stays.
    stays: (u64, bool),
    pub(crate) how: BringIn,
    /// The sizes of the arena, and the chunk that another thread populates while the application runs.
    incoming: Arc<Incoming>,
    /// The chunks that a thread populates for the step under way, and the end of that step's contents.
    growth: Option<(Receiver<Chunk>, u64)>,
    /// The file. It is under the arena's lock, because the same steps use both.
    pub(crate) disk: Disk,
}

impl<D: Driver> HostArena<D> {
    pub(crate) fn new(driver: Arc<D>, toucher_threads: usize) -> Self {
        Self {
            driver,
            chunks: Vec::new(),
            ring: None,
            used: None,
            stays: (0, false),
            how: BringIn { toucher_threads, nodes: Vec::new() },
            incoming: Arc::default(),
            growth: None,
            disk: Disk::default(),
        }
    }

    /// Returns the part of the arena's state that can be read without its lock.
    pub(crate) fn incoming(&self) -> &Arc<Incoming> {
        &self.incoming
    }

    /// Sets the NUMA nodes of new chunks.
    pub(crate) fn set_nodes(&mut self, nodes: Vec<u32>) {
        self.how.nodes = nodes;
    }

    /// Returns work for a thread that populates what is missing of `[0, end_bytes)`, on these NUMA nodes. The thread
    /// stays a little ahead of the step, so that touching, pinning and copying run simultaneously. If the work is
    /// dropped, the step populates all itself. [`HostArena::end_growth`] ends it.
    pub(crate) fn begin_growth(
        &mut self,
        nodes: Vec<u32>,
        end_bytes: u64,
    ) -> Option<impl FnOnce() + Send + use<D>> {
        self.set_nodes(nodes);
        let (how, (give, growth)) = (self.how.clone(), bounded(1));
        let mut missing = missing_chunks(self.capacity_bytes(), end_bytes).peekable();
        missing.peek()?;
        self.growth = Some((growth, end_bytes));
        // The step retries what the system has refused, and reports that.
        let chunks = missing.map_while(move |size_bytes| new_chunk(&how, size_bytes).ok());
        Some(move || chunks.map_while(|chunk| give.send(chunk).ok()).for_each(drop))
    }

    /// Ends the growth: no more is needed. Chunks that were populated and not used are dropped.
    pub(crate) fn end_growth(&mut self) {
        self.growth = None;
    }

    /// Returns the next chunk, populated, for contents that end at `end_bytes`.
    fn next_chunk(&self, end_bytes: u64) -> PoolResult<HeldChunk> {
        let mut end_bytes = end_bytes;
        if let Some((growth, growth_end_bytes)) = &self.growth {
            if let Some(chunk) = brought(growth, BROUGHT_WITHIN)? {
                return Ok(HeldChunk::new(chunk));
            }
            end_bytes = end_bytes.max(*growth_end_bytes);
        }
        self.new_chunk(next_chunk_bytes(self.capacity_bytes(), end_bytes))
    }

    fn new_chunk(&self, size_bytes: u64) -> PoolResult<HeldChunk> {
        let chunk = new_chunk(&self.how, size_bytes);
        Ok(HeldChunk::new(chunk.map_err(memory_refused(size_bytes))?))
    }

    /// Adds a chunk that was populated outside a pause.
    pub(crate) fn put(&mut self, held: HeldChunk, Coming { is_for_ring, .. }: Coming) {
        if is_for_ring && self.ring.is_none() {
            self.ring = Some(held);
            self.stays.1 = true;
        } else {
            self.push(held);
            self.stays.0 = self.stays.0.max(self.capacity_bytes());
        }
        self.note_held();
    }

    /// Gives up a populated chunk that is not needed any more. If it is pinned, a context must be current.
    pub(crate) fn discard(&self, held: HeldChunk) {
        if let Err(error) = unpin(&*self.driver, &held) {
            tracing::error!(%error, "host memory stays pinned");
            held.keep_for_good();
        }
    }

    fn push(&mut self, held: HeldChunk) {
        self.chunks.push(Placed { held, start_bytes: self.capacity_bytes() });
    }

    fn note_held(&self) {
        let last = self.chunks.last();
        self.incoming.note(HeldFigures {
            chunk_bytes: self.capacity_bytes(),
            last_chunk_bytes: last.map_or(0, |last| last.held.chunk.size_bytes()),
            has_ring: self.ring.is_some(),
            used: self.used,
        });
    }

    fn capacity_bytes(&self) -> u64 {
        self.chunks.last().map_or(0, Placed::end_bytes)
    }

    /// Returns the host memory held, in bytes, with the chunk that is being populated.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.incoming.expected().bytes()
    }

    /// Returns the host memory, in bytes, that must be allocated so that `host_bytes` fit here, with a ring if the file
    /// is used.
    pub(crate) fn growth(&self, host_bytes: u64, is_file_used: bool) -> u64 {
        let held = self.incoming.expected();
        let ring_bytes = if is_file_used && !held.has_ring { CHUNK_BYTES } else { 0 };
        missing_chunks(held.chunk_bytes, host_bytes).sum::<u64>() + ring_bytes
    }

    /// Refuses a growth that exceeds `budget`. Changes nothing.
    pub(crate) fn check_budget(
        needed_bytes: u64,
        grow_bytes: u64,
        budget: HostBudget,
    ) -> PoolResult<()> {
        match budget.0 {
            Some(available_bytes) if grow_bytes > available_bytes => {
                Err(PoolError::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Pins all chunks for `pins` too: without that, a process that has begun to use another device would copy at a
    /// fraction of the speed. A context must be current on this thread (that of the device, where `pins` names one). No
    /// copy may run in a chunk.
    pub(crate) fn pin_again(&mut self, log: &mut StepLog, pins: Pins) -> PoolResult<()> {
        let (driver, threads) = (&*self.driver, self.how.toucher_threads);
        let mut held = self.chunks.iter_mut().map(|placed| &mut placed.held);
        held.try_for_each(|held| match held.pins {
            Pins::All => Ok(()),
            present if present == pins => Ok(()),
            Pins::Nobody | Pins::Only(_) => {
                log.timed("pin host memory", |_| held.pin(driver, pins, threads))
            }
        })
    }

    /// Unpins all chunks, and keeps their contents. A chunk that the driver refuses to unpin stays pinned. A context
    /// must be current on this thread, and no copy may run in a chunk.
    pub(crate) fn unpin_all(&mut self, log: &mut StepLog) {
        for Placed { held, .. } in &mut self.chunks {
            if held.pins == Pins::Nobody {
                continue;
            }
            match log.timed("unpin host memory", |_| unpin(&*self.driver, held)) {
                Ok(()) => held.pins = Pins::Nobody,
                Err(error) => tracing::warn!(%error, "host memory stays pinned in a deep pause"),
            }
        }
    }

    /// Pins a new chunk.
    fn pinned(&self, log: &mut StepLog, mut held: HeldChunk, pins: Pins) -> PoolResult<HeldChunk> {
        let (driver, threads) = (&*self.driver, self.how.toucher_threads);
        log.timed("pin host memory", |_| held.pin(driver, pins, threads))?;
        Ok(held)
    }

    /// Grows until `[0, end_bytes)` is held, and pins the new chunks for `pins`. A context must be current on this
    /// thread (that of the device, where `pins` names one).
    pub(crate) fn grow_to(
        &mut self,
        log: &mut StepLog,
        end_bytes: u64,
        pins: Pins,
    ) -> PoolResult<()> {
        while self.capacity_bytes() < end_bytes {
            let held = log.timed("wait for host memory", |_| self.next_chunk(end_bytes))?;
            let held = self.pinned(log, held, pins)?;
            self.push(held);
            self.note_held();
        }
        Ok(())
    }

    /// Makes the ring, if it is missing or not pinned for all contexts. A context must be current on this thread.
    pub(crate) fn hold_ring(&mut self, log: &mut StepLog) -> PoolResult<()> {
        let held = match self.ring.take() {
            Some(held) if held.pins == Pins::All => {
                self.ring = Some(held);
                return Ok(());
            }
            Some(held) => held,
            None => log.timed("wait for host memory", |_| self.new_chunk(CHUNK_BYTES))?,
        };
        // Pinned for all contexts, because the next pause may be of another device.
        let pinned = self.pinned(log, held, Pins::All);
        let outcome = pinned.map(|held| self.ring = Some(held));
        // A ring that could not be pinned has been dropped.
        self.note_held();
        outcome
    }

    /// Returns all slots of the ring, which is made if it is missing, and the file. `None` if there is no file, or
    /// somebody has a slot. A context must be current on this thread.
    pub(crate) fn way_to_file(
        &mut self,
        log: &mut StepLog,
    ) -> PoolResult<Option<(Vec<Slot>, HeldFile)>> {
        self.hold_ring(log)?;
        let is_idle = self.ring.as_mut().is_some_and(|held| !held.is_in_use());
        let slots = self.ring.as_ref().filter(|_| is_idle).map(|held| ring::slots(&held.chunk));
        Ok(slots.zip(self.disk.file.clone()))
    }

    /// Gives back all chunks that begin at `keep_bytes` or behind it, up to the last one that is in use. A context must
    /// be current, and no contents may be saved there.
    pub(crate) fn shrink_to(&mut self, keep_bytes: u64) -> PoolResult<()> {
        while let Some(Placed { held, start_bytes }) = self.chunks.last_mut()
            && *start_bytes >= keep_bytes
            && !held.is_in_use()
        {
            unpin(&*self.driver, held)?;
            self.chunks.pop();
            self.note_held();
        }
        Ok(())
    }

    /// Gives back one chunk that begins at `keep_bytes` or behind it, or else the ring, if `ring_may_go`. Returns its
    /// size in bytes. In other respects as [`HostArena::shrink_to`].
    pub(crate) fn shrink_by_one(&mut self, keep_bytes: u64, ring_may_go: bool) -> PoolResult<u64> {
        let before_bytes = self.incoming.figures().bytes();
        match self.chunks.last().map(|last| last.start_bytes) {
            Some(start_bytes) if start_bytes >= keep_bytes => self.shrink_to(start_bytes)?,
            Some(_) | None if ring_may_go => self.drop_ring()?,
            Some(_) | None => {}
        }
        Ok(before_bytes - self.incoming.figures().bytes())
    }

    /// Gives the ring back, unless somebody has a slot. A context must be current.
    fn drop_ring(&mut self) -> PoolResult<()> {
        if let Some(held) = self.ring.take_if(|held| !held.is_in_use())
            && let Err(error) = unpin(&*self.driver, &held)
        {
            self.ring = Some(held);
            return Err(error);
        }
        self.note_held();
        Ok(())
    }

    /// Records that a pause is complete. It has saved contents here, and in the file if `is_file_used`.
    pub(crate) fn used(&mut self, used: Used, is_file_used: bool) {
        self.used = Some(used);
        self.stays = (used.end_bytes, is_file_used);
        self.note_held();
    }

    /// After a pause that failed: gives back unused memory behind `live_bytes`. Memory stays that the last completed
    /// pause used, or that was populated for the next one. A chunk that the driver refuses to unpin stays for the next
    /// pause. A context must be current, and nothing may be saved behind `live_bytes`.
    pub(crate) fn give_back_unused(&mut self, live_bytes: u64) -> PoolResult<()> {
        let (end_bytes, keeps_ring) = self.stays;
        let shrunk = self.shrink_to(end_bytes.max(live_bytes));
        let dropped = if keeps_ring { Ok(()) } else { self.drop_ring() };
        shrunk.and(dropped)
    }

    /// Returns the chunk with the byte `at`. The arena must hold that byte.
    fn chunk_at(&self, at: u64) -> &Placed {
        &self.chunks[self.chunks.partition_point(|placed| placed.end_bytes() <= at)]
    }

    /// Returns the end of the chunk with the byte before `at`. Memory behind that end can be given back while the chunk
    /// stays.
    pub(crate) fn chunk_end(&self, at: u64) -> u64 {
        if at == 0 || at > self.capacity_bytes() {
            return at;
        }
        self.chunk_at(at - 1).end_bytes()
    }

    /// Returns the pieces of host memory that make up `place`, which the arena must hold. The memory stays there for as
    /// long as somebody has a piece.
    pub(crate) fn pieces_of(&self, place: &Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = place.start;
        while at < place.end {
            // Panics before any copy, if the arena does not hold the place.
            let placed = self.chunk_at(at);
            let end = placed.end_bytes().min(place.end);
            let part = at - place.start..end - place.start;
            pieces.push(Piece::new(&placed.held.chunk, at - placed.start_bytes, part));
            at = end;
        }
        pieces
    }

    /// Returns the places of the part `part` of an allocation, whose saved contents are `saved`.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`] if there is no file.
    pub(crate) fn locate(&self, saved: &Saved, part: Range<u64>) -> PoolResult<Vec<Located>> {
        let mut all = Vec::new();
        for part in saved.parts_of(part) {
            match (part, saved.store, self.disk.file.clone()) {
                (Part::Zeros(zeros), _, _) => all.push(Located::Zeros(zeros.end - zeros.start)),
                (Part::Stored(extent), Store::Host, _) => {
                    all.extend(self.pieces_of(&extent.place()).into_iter().map(Located::InMemory));
                }
                (Part::Stored(extent), Store::File, Some(file)) => {
                    all.push(Located::InFile(file, extent));
                }
                (Part::Stored(extent), Store::File, None) => {
                    return Err(self.disk.nothing_to_read(&extent.place()));
                }
            }
        }
        Ok(all)
    }
}

/// Waits for the next chunk that a thread populates, for at most `limit`. `None` if the thread has ended.
///
/// # Errors
/// [`PoolError::HostMemoryRefused`]: the thread took too long.
fn brought(growth: &Receiver<Chunk>, limit: Duration) -> PoolResult<Option<Chunk>> {
    match growth.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => {
            let late = format!("a chunk of it did not come in within {} s", limit.as_secs());
            Err(memory_refused(CHUNK_BYTES)(io::Error::new(io::ErrorKind::TimedOut, late)))
        }
        chunk => Ok(chunk.ok()),
    }
}

fn memory_refused(size_bytes: u64) -> impl Fn(io::Error) -> PoolError {
    move |source| PoolError::HostMemoryRefused { size_bytes, source }
}

fn pin<D: Driver>(driver: &D, chunk: &Chunk, pins: Pins) -> PoolResult<()> {
    let (contexts, device) = match pins {
        Pins::Nobody => return Ok(()),
        Pins::Only(device) => (PinnedFor::CurrentContext, Some(device)),
        Pins::All => (PinnedFor::AllContexts, None),
    };
    // SAFETY: the keeper of the chunk keeps it mapped until `unpin`, or for good.
    unsafe { driver.host_register(chunk.start, chunk.length, contexts) }.about(
        || "pinning of host memory".to_owned(),
        chunk.size_bytes(),
        device,
    )
}

/// Unpins `held`. The driver may not be copying to or from it.
fn unpin<D: Driver>(driver: &D, HeldChunk { chunk, pins }: &HeldChunk) -> PoolResult<()> {
    if *pins == Pins::Nobody {
        return Ok(());
    }
    // SAFETY: the caller vouches that no copy uses it.
    match unsafe { driver.host_unregister(chunk.start) } {
        // The context that the chunk was pinned for has ended, and its pins have ended too.
        Err(error) if error.code == DriverCode::HOST_MEMORY_NOT_REGISTERED => Ok(()),
        unpinned => {
            unpinned.about(|| "unpinning of host memory".to_owned(), chunk.size_bytes(), None)
        }
    }
}

/// Populates the chunk `coming`, and pins it. If `pins` names a context, one must be current on this thread. Once
/// `stop` returns true, the chunk is returned as it is.
///
/// # Errors
/// [`PoolError::HostMemoryRefused`], [`PoolError::Driver`]: nothing is held then.
pub(crate) fn bring_in<D: Driver>(
    log: &mut StepLog,
    driver: &D,
    how: &BringIn,
    (Coming { chunk_bytes, is_for_ring }, pins): (Coming, Pins),
    stop: Stop<'_>,
) -> PoolResult<HeldChunk> {
    let chunk = log.timed("touch host memory", |_| {
        Chunk::new(how, chunk_bytes, stop).map_err(memory_refused(chunk_bytes))
    })?;
    let mut held = HeldChunk::new(chunk);
    if !stop() && pins != Pins::Nobody {
        let pins = if is_for_ring { Pins::All } else { pins };
        log.timed("pin host memory", |_| pin(driver, &held.chunk, pins))?;
        held.pins = pins;
    }
    Ok(held)
}

impl<D: Driver> Drop for HostArena<D> {
    fn drop(&mut self) {
        let dropped = self.drop_ring();
        if let Err(error) = self.shrink_to(0).and(dropped) {
            tracing::error!(%error, "host memory stays pinned");
        }
        // Never unmap memory that the driver still has pinned: keep the rest for good.
        let chunks = self.chunks.drain(..).map(|placed| placed.held);
        chunks.chain(self.ring.take()).for_each(HeldChunk::keep_for_good);
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
