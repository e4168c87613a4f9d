//! The copies of a pause into the arena, and of a resume out of it.
//!
//! When more than one chunk of those that a pause will use is not pinned, the last of them is brought in and
//! pinned, and serves as the ring for all before it; what belongs there itself is copied last, straight, when
//! the ring is done. So the ring takes no memory of its own, and nothing is pinned that is unpinned again.
//!
//! ```text
//!   linear offset:  0 ............ chunk ............ 2*chunk ............ 3*chunk
//!   saved pieces:   [A      ][B ][C                      ][D   ]
//!   first pause:    through the ring .................. | straight
//! ```

#![expect(unsafe_code, reason = "starts copies between devices and host memory")]

use std::ptr::NonNull;

use super::arena::HostArena;
use super::chunk::{Chunk, HostPlace};
use super::ring::{DeviceStream, Mark, Ring};
use super::{PinFor, length_of};
use crate::driver::{DeviceAddress, Driver, RawStream, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::vacate::StepLog;

/// Where saved contents lie in the arena: `[offset, offset + size)` of its linear space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) offset_bytes: u64,
}

/// A ring, and the chunk that its slots lie in.
#[derive(Debug)]
pub(super) struct OpenRing<D: Driver> {
    ring: Ring<D>,
    chunk: usize,
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

impl<D: Driver> HostArena<D> {
    /// Makes ready for a pause that saves to `[0, end_bytes)`, in any order that comes to the last chunk last.
    /// A context of `pin_for` must be current, and nothing saved.
    pub(crate) fn begin_saving(
        &mut self,
        log: &mut StepLog,
        end_bytes: u64,
        pin_for: PinFor,
    ) -> PoolResult<()> {
        self.call_pinner_off(log);
        while self.capacity_bytes() < end_bytes {
            let chunk = Chunk::map(self.chunk_length());
            self.chunks.push(chunk.map_err(|source| PoolError::HostMemoryRefused {
                size_bytes: self.chunk_bytes(),
                source,
            })?);
        }
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
    pub(crate) fn end_saving(&mut self, log: &mut StepLog) {
        if let Some(open) = self.ring.take() {
            self.kept_events = log.measured("end the ring", || open.ring.end());
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
        self.wait_for(log, mark)?;
        self.end_saving(log);
        Ok(())
    }

    /// Sends what [`HostArena::save`] was last given on its way. The mark stands for it and all before it.
    pub(crate) fn flush(&mut self, log: &mut StepLog) -> PoolResult<Mark> {
        self.ring.as_mut().map_or(Ok(Mark::default()), |open| open.ring.flush(log))
    }

    /// Waits until everything before `mark` that goes through the ring is in its final place.
    pub(crate) fn wait_for(&mut self, log: &mut StepLog, mark: Mark) -> PoolResult<()> {
        let Some(open) = &mut self.ring else {
            return Ok(());
        };
        log.timed("wait for the ring", |_| open.ring.wait_for(mark))
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
