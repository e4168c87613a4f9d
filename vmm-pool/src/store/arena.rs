//! Host memory for saved contents, and the copies into and out of it.
//!
//! The arena is a list of equal chunks. A chunk is mapped with huge pages, touched by several threads at
//! once (one thread brings in 1.6 to 3 GiB/s, sixteen 57 GiB/s), then pinned in one call. New chunks are
//! made while copies into earlier ones are under way, so that a first pause runs at the speed of the
//! slowest of the three. Chunks stay for the next pause.
//!
//! ```text
//!   linear offset:  0 ............ chunk ............ 2*chunk ............ 3*chunk
//!   saved pieces:   [A      ][B ][C                      ][D   ]
//! ```

#![expect(unsafe_code, reason = "hands host memory to the driver for copies")]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crossbeam_channel::Receiver;

use super::chunk::{CHUNK_BYTES, CHUNK_LENGTH, Chunk, new_chunk};
use super::disk::Disk;
use super::ring::{self, Ring, Slot, Writing};
use super::{Extent, HostBudget, Part, Saved, Store};
use crate::copies::CopyStreams;
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverCode, PinnedFor, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;

/// Whose context a chunk is pinned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pins {
    /// Nobody's: the driver would not pin it again. It holds contents as well as any, and is slower.
    Nobody,
    /// That of one device.
    Only(DeviceOrdinal),
    /// All of the process.
    All,
}

impl Pins {
    /// What a process needs that uses these devices.
    pub(crate) fn of(devices: &[DeviceOrdinal]) -> Self {
        if let [only] = devices { Self::Only(*only) } else { Self::All }
    }
}

/// A chunk that is held.
#[derive(Debug)]
struct Held {
    chunk: Chunk,
    pins: Pins,
}

/// Pinned host memory for the saved contents of one process.
#[derive(Debug)]
pub(crate) struct HostArena<D: Driver> {
    driver: Arc<D>,
    chunks: Vec<Held>,
    /// Between devices and the file.
    ring: Option<Ring>,
    /// What the last completed pause used of the chunks, and of the ring.
    used: (u64, bool),
    toucher_threads: usize,
    /// Chunks on their way, brought in by a thread that runs ahead of the copies.
    coming: Option<Receiver<io::Result<Chunk>>>,
    /// The file. It is under the arena's lock, for the same steps use both.
    pub(crate) disk: Disk,
}

/// How many chunks are brought in ahead of the one being pinned.
const CHUNKS_AHEAD: usize = 2;

impl<D: Driver> HostArena<D> {
    pub(crate) fn new(driver: Arc<D>, toucher_threads: usize) -> Self {
        Self {
            driver,
            chunks: Vec::new(),
            ring: None,
            used: (0, false),
            toucher_threads,
            coming: None,
            disk: Disk::new(),
        }
    }

    /// Has a thread bring memory in up to `end_bytes`, so that touching, pinning and copying run at the
    /// same time. Without a thread to be had, [`HostArena::grow_to`] does it all.
    pub(crate) fn begin_growth(&mut self, end_bytes: u64) {
        let missing = end_bytes.saturating_sub(self.capacity_bytes()).div_ceil(CHUNK_BYTES);
        if missing == 0 {
            return;
        }
        let (ready, coming) = crossbeam_channel::bounded(CHUNKS_AHEAD);
        let threads = self.toucher_threads;
        let bring_in = move || {
            for _ in 0..missing {
                // Nobody listens any more when the pause has failed.
                if ready.send(new_chunk(threads)).is_err() {
                    return;
                }
            }
        };
        match std::thread::Builder::new().name("sublet-arena".to_owned()).spawn(bring_in) {
            Ok(_) => self.coming = Some(coming),
            Err(error) => tracing::debug!(%error, "no thread to bring host memory in ahead"),
        }
    }

    fn next_chunk(&mut self) -> io::Result<Chunk> {
        let coming = self.coming.as_ref().and_then(|coming| coming.recv().ok());
        coming.unwrap_or_else(|| {
            self.coming = None;
            new_chunk(self.toucher_threads)
        })
    }

    /// Calls off what [`HostArena::begin_growth`] has not brought in yet.
    pub(crate) fn end_growth(&mut self) {
        self.coming = None;
    }

    fn capacity_bytes(&self) -> u64 {
        self.chunks.len() as u64 * CHUNK_BYTES
    }

    /// Host memory held, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.capacity_bytes() + self.ring.as_ref().map_or(0, |_| CHUNK_BYTES)
    }

    /// Host memory to be taken in addition, so that `host_bytes` fit here, and something passes to the file or nothing.
    pub(crate) fn growth(&self, host_bytes: u64, is_file_used: bool) -> u64 {
        let missing = host_bytes.saturating_sub(self.capacity_bytes());
        let ring_bytes = if is_file_used && self.ring.is_none() { CHUNK_BYTES } else { 0 };
        missing.next_multiple_of(CHUNK_BYTES) + ring_bytes
    }

    /// Refuses what cannot be held within `budget`; changes nothing.
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

    /// Pins what is held for `pins` too: a process that has come to use another device would copy to and from the
    /// rest at a fraction of the speed. A context must be current on this thread (that of the device, where `pins`
    /// names one), and no copy under way in a chunk.
    pub(crate) fn pin_again(&mut self, log: &mut StepLog, pins: Pins) -> PoolResult<()> {
        for index in 0..self.chunks.len() {
            let present = self.chunks[index].pins;
            if present == pins || present == Pins::All {
                continue;
            }
            log.timed("pin host memory", |_| {
                if present != Pins::Nobody {
                    self.unpin(&self.chunks[index].chunk)?;
                    self.chunks[index].pins = Pins::Nobody;
                }
                // Whoever has used two devices may use them again.
                let wanted = if present == Pins::Nobody { pins } else { Pins::All };
                self.pin(&self.chunks[index].chunk, wanted)?;
                self.chunks[index].pins = wanted;
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Grows until `[0, end_bytes)` is held, pinned for `pins`. A context must be current on this thread (that
    /// of the device, where `pins` names one).
    pub(crate) fn grow_to(
        &mut self,
        log: &mut StepLog,
        end_bytes: u64,
        pins: Pins,
    ) -> PoolResult<()> {
        while self.capacity_bytes() < end_bytes {
            let chunk =
                log.timed("wait for host memory", |_| self.next_chunk().map_err(memory_refused))?;
            log.timed("pin host memory", |_| self.pin(&chunk, pins))?;
            self.chunks.push(Held { chunk, pins });
        }
        Ok(())
    }

    /// Sees that there is a ring. A context must be current on this thread.
    pub(crate) fn hold_ring(&mut self, log: &mut StepLog) -> PoolResult<()> {
        if self.ring.is_some() {
            return Ok(());
        }
        let chunk = log.timed("wait for host memory", |_| {
            new_chunk(self.toucher_threads).map_err(memory_refused)
        })?;
        // The next pause may be of another device.
        log.timed("pin host memory", |_| self.pin(&chunk, Pins::All))?;
        self.ring = Some(Ring { chunk });
        Ok(())
    }

    fn pin(&self, chunk: &Chunk, pins: Pins) -> PoolResult<()> {
        let (contexts, device) = match pins {
            Pins::Nobody => return Ok(()),
            Pins::Only(device) => (PinnedFor::CurrentContext, Some(device)),
            Pins::All => (PinnedFor::AllContexts, None),
        };
        // SAFETY: whoever keeps the chunk keeps it mapped until `unpin`, or for good.
        unsafe { self.driver.host_register(chunk.start, CHUNK_LENGTH, contexts) }.about(
            || "pinning of host memory".to_owned(),
            CHUNK_BYTES,
            device,
        )
    }

    /// Nothing that is copied may be in `chunk`.
    fn unpin(&self, chunk: &Chunk) -> PoolResult<()> {
        // SAFETY: the caller vouches that no copy uses it.
        match unsafe { self.driver.host_unregister(chunk.start) } {
            // The context that it was pinned for has ended, and its pins with it.
            Err(error) if error.code == DriverCode::HOST_MEMORY_NOT_REGISTERED => Ok(()),
            unpinned => unpinned.about(|| "unpinning of host memory".to_owned(), CHUNK_BYTES, None),
        }
    }

    /// Writes what `fill` hands over to the file, and returns when it is on the disk.
    ///
    /// # Errors
    /// [`PoolError::FileRefused`]; nothing is being written then.
    pub(crate) fn write_behind<'r>(
        &'r mut self,
        fill: impl FnOnce(&mut Writing<'r>) -> PoolResult<()>,
    ) -> PoolResult<()> {
        match (&mut self.ring, self.disk.file()) {
            (Some(ring), Some(file)) => ring::write_behind(file, ring.slots(), fill),
            (None, _) | (_, None) => Err(self.disk.nothing_to_write_to()),
        }
    }

    /// Reads `places` of the file, and calls `each` with the index of every one and the slot that holds it.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`]; nothing is being read then.
    pub(crate) fn read_ahead<'r>(
        &'r mut self,
        places: &[Range<u64>],
        each: impl FnMut(usize, &Slot<'r>) -> PoolResult<()>,
    ) -> PoolResult<()> {
        match (&mut self.ring, self.disk.file()) {
            (Some(ring), Some(file)) => ring::read_ahead(file, ring.slots(), places, each),
            (None, _) | (_, None) => {
                places.first().map_or(Ok(()), |place| Err(self.disk.nothing_to_read(place)))
            }
        }
    }

    /// Gives chunks back until at most `keep_bytes` (rounded up to a chunk) are held. A context must be
    /// current, and no contents saved beyond that.
    pub(crate) fn shrink_to(&mut self, keep_bytes: u64) -> PoolResult<()> {
        while self.capacity_bytes() >= keep_bytes.saturating_add(CHUNK_BYTES) {
            let Some(Held { chunk, pins }) = self.chunks.last() else {
                break;
            };
            if *pins != Pins::Nobody {
                self.unpin(chunk)?;
            }
            self.chunks.pop();
        }
        Ok(())
    }

    /// Gives the ring back. A context must be current, and no copy under way there.
    fn drop_ring(&mut self) -> PoolResult<()> {
        if let Some(ring) = &self.ring {
            self.unpin(&ring.chunk)?;
        }
        self.ring = None;
        Ok(())
    }

    /// A pause is complete that has saved contents up to `end_bytes` here, and some in the file or none.
    pub(crate) fn used(&mut self, end_bytes: u64, is_file_used: bool) {
        self.used = (end_bytes, is_file_used);
    }

    /// After a pause that came to nothing: gives back what the last completed one did not use, and what lies behind
    /// `live_bytes`. What the driver will not unpin stays for the next pause. A context must be current, and nothing
    /// saved behind that.
    pub(crate) fn give_back_unused(&mut self, live_bytes: u64) {
        let (end_bytes, is_file_used) = self.used;
        let shrunk = self.shrink_to(end_bytes.max(live_bytes));
        let dropped = if is_file_used { Ok(()) } else { self.drop_ring() };
        if let Err(error) = shrunk.and(dropped) {
            tracing::error!(%error, "host memory stays for the next pause");
        }
    }

    /// Calls `each` with host pointer and length of every piece of `place`.
    fn pieces(
        &self,
        place: &Range<u64>,
        mut each: impl FnMut(NonNull<u8>, u64, u64) -> PoolResult<()>,
    ) -> PoolResult<()> {
        let size_bytes = place.end - place.start;
        let mut done = 0;
        while done < size_bytes {
            let at = place.start + done;
            let within = at % CHUNK_BYTES;
            let length = (CHUNK_BYTES - within).min(size_bytes - done);
            // CAST: an index of a chunk that exists; the next line panics otherwise, before any copy.
            let chunk = &self.chunks[(at / CHUNK_BYTES) as usize].chunk;
            // SAFETY: `within` is less than the chunk's length.
            let pointer = unsafe { chunk.start.add(within as usize) };
            each(pointer, done, length)?;
            done += length;
        }
        Ok(())
    }

    /// Where `place` lies, when that is one piece.
    pub(crate) fn one_piece(&self, place: &Range<u64>) -> Option<NonNull<u8>> {
        let mut pieces = Vec::new();
        self.pieces(place, |pointer, _, _| {
            pieces.push(pointer);
            Ok(())
        })
        .ok()?;
        if pieces.len() == 1 { pieces.pop() } else { None }
    }

    /// Copies what lies at `place` out, which is as long as `target`. No copy of the driver's may be under way there.
    fn read_place(&self, place: &Range<u64>, target: &mut [u8]) {
        let mut left = &mut *target;
        let copied = self.pieces(place, |pointer, _, length| {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            // The pieces make up exactly the target.
            if let Some(part) = left.split_off_mut(..length) {
                let to = part.as_mut_ptr();
                // SAFETY: the piece lies in a live chunk, which `target` is no part of, and nobody writes it now.
                unsafe { to.copy_from_nonoverlapping(pointer.as_ptr(), part.len()) };
            }
            Ok(())
        });
        debug_assert!(copied.is_ok() && left.is_empty(), "nothing in the closure fails");
    }

    /// Copies saved contents out, from the byte `start` of their allocation on, from here or from the file. No copy of
    /// the driver's may be under way there.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`].
    pub(crate) fn read(&self, saved: &Saved, start: u64, target: &mut [u8]) -> PoolResult<()> {
        let end = start + target.len() as u64;
        let mut left = target;
        for part in saved.parts_of(start..end) {
            let size_bytes = match &part {
                Part::Stored(extent) => extent.size_bytes,
                Part::Zeros(zeros) => zeros.end - zeros.start,
            };
            // The parts make up exactly the target.
            let length = usize::try_from(size_bytes).unwrap_or(usize::MAX).min(left.len());
            let (bytes, rest) = left.split_at_mut(length);
            match (part, saved.store, self.disk.file()) {
                (Part::Zeros(_), _, _) => bytes.fill(0),
                (Part::Stored(extent), Store::Host, _) => self.read_place(&extent.place(), bytes),
                (Part::Stored(extent), Store::File, Some(file)) => file.read(extent.at, bytes)?,
                (Part::Stored(extent), Store::File, None) => {
                    return Err(self.disk.nothing_to_read(&extent.place()));
                }
            }
            left = rest;
        }
        Ok(())
    }

    /// Starts copies of a part of the allocation at `source` to its place in the arena, on a stream of `copies` that
    /// was taken last.
    ///
    /// # Safety
    /// `source` stays mapped, and the arena's place untouched, until the stream is done.
    pub(crate) unsafe fn save(
        &self,
        source: VaRange,
        extent: Extent,
        copies: &CopyStreams<'_, D>,
    ) -> PoolResult<()> {
        let stream = copies.taken();
        let source = source.part(&extent.part());
        self.pieces(&extent.place(), |pointer, offset, length| {
            let from = VaRange::new(DeviceAddress(source.start.0 + offset), length);
            // SAFETY: the piece lies in a live chunk; the caller keeps both ends valid.
            unsafe { self.driver.copy_to_host(pointer, from, stream) }.about(
                || format!("saving of {}", source.start),
                length,
                Some(copies.device()),
            )
        })
    }

    /// Starts copies from the arena back to a part of the allocation at `target`, on a stream of `copies` that was
    /// taken last.
    ///
    /// # Safety
    /// `target` stays mapped, and the arena's place untouched, until the stream is done.
    pub(crate) unsafe fn restore(
        &self,
        target: VaRange,
        extent: Extent,
        copies: &CopyStreams<'_, D>,
    ) -> PoolResult<()> {
        let stream = copies.taken();
        let target = target.part(&extent.part());
        self.pieces(&extent.place(), |pointer, offset, length| {
            let to = VaRange::new(DeviceAddress(target.start.0 + offset), length);
            // SAFETY: the piece lies in a live chunk; the caller keeps both ends valid.
            unsafe { self.driver.copy_to_device(to, pointer, stream) }.about(
                || format!("restoring of {}", target.start),
                length,
                Some(copies.device()),
            )
        })
    }
}

fn memory_refused(source: io::Error) -> PoolError {
    PoolError::HostMemoryRefused { size_bytes: CHUNK_BYTES, source }
}

impl<D: Driver> Drop for HostArena<D> {
    fn drop(&mut self) {
        let dropped = self.drop_ring();
        if let Err(error) = self.shrink_to(0).and(dropped) {
            tracing::error!(%error, "host memory stays pinned");
            // Unmapping pinned memory would pull it from under the driver: keep it for good.
            let ring = self.ring.take().map(|ring| ring.chunk);
            let chunks = self.chunks.drain(..).map(|held| held.chunk);
            chunks.chain(ring).for_each(Chunk::keep_for_good);
        }
    }
}
