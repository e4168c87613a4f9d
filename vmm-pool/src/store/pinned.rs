//! Host memory of a step's own that devices write to, for as long as the step lasts.

#![expect(unsafe_code, reason = "hands host memory to the driver")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Pins;
use super::arena::{Held, memory_refused, pin_held, unpin};
use super::chunk::{BringIn, new_chunk};
use crate::driver::{Driver, PieceSlot};
use crate::error::PoolResult;

/// See the head of this module. Dropped, it goes, unless the driver keeps it.
///
/// # Invariants
/// 1. The chunk is zeros at first, is in no arena, and no part of it is handed out beyond a borrow.
#[derive(Debug)]
pub(crate) struct Pinned<D: Driver> {
    driver: Arc<D>,
    held: Held,
}

impl<D: Driver> Pinned<D> {
    /// So many bytes, for devices of all contexts. A context must be current on this thread.
    pub(crate) fn new(driver: &Arc<D>, length: usize) -> PoolResult<Self> {
        let (how, size_bytes) = (BringIn { toucher_threads: 1, nodes: Vec::new() }, length as u64);
        let chunk = new_chunk(&how, size_bytes).map_err(memory_refused(size_bytes))?;
        // INVARIANT: new.
        let (driver, mut held) = (Arc::clone(driver), Held::new(chunk));
        pin_held(&*driver, &mut held, Pins::All)?;
        Ok(Self { driver, held })
    }

    /// For the driver.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.held.chunk.start
    }

    /// A part of it as slots, as far as there are so many. No device may be writing there.
    pub(crate) fn slots(&mut self, part: Range<usize>) -> &mut [PieceSlot] {
        let count = self.held.chunk.length / size_of::<PieceSlot>();
        let end = part.end.min(count);
        let start = part.start.min(end);
        // SAFETY: within the chunk, or at its end.
        let first = unsafe { self.start().cast::<PieceSlot>().add(start) };
        // SAFETY: live, aligned to a page and then to a slot, zeros or slots, and this value's own (invariant 1); any bits are a
        // slot.
        unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), end - start) }
    }

    /// The first bytes. No device may be writing there.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        let length = length.min(self.held.chunk.length);
        // SAFETY: live and written to by nobody now (invariant 1).
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), length) }
    }

    /// A device may be writing there still: it stays for good.
    pub(crate) fn keep_for_good(mut self) {
        self.held.clone().keep_for_good();
        self.held.pins = Pins::Nobody;
    }
}

impl<D: Driver> Drop for Pinned<D> {
    fn drop(&mut self) {
        // Who drops it has waited for the devices; see `keep_for_good`.
        if let Err(error) = unpin(&*self.driver, &mut self.held) {
            tracing::error!(%error, size_bytes = self.held.chunk.length, "host memory stays pinned");
            self.held.clone().keep_for_good();
        }
    }
}
