//! Fingerprints of chunks: by them a device says whether calls have written a chunk.
//!
//! A launch does not say whether it writes the memory that it names. So the fingerprints of a chunk are taken while it is
//! copied out, on another stream. With checks the copy waits for them. The next time the fingerprints are taken first. If they
//! are the same, the host has the chunk's contents already. So frozen weights are copied out once.
//!
//! A pause may write to a chunk's place in host memory. The pause unmaps the chunk then. So fingerprints count only if nobody
//! but the pager has unmapped the chunk since.

#![expect(unsafe_code, reason = "asks devices through the driver")]

use std::ptr::NonNull;
use std::sync::Arc;

use vmm_pool::driver::{DeviceOrdinal, Driver, Fingerprint, PieceSlot, RawStream, VaRange};
use vmm_pool::{Describe, Pinned, PoolResult};

/// The number of pieces of a chunk: one block of threads handles each.
pub(super) const PIECES: usize = 64;
/// The most chunks that devices are asked about simultaneously. Each question waits for room next to the kernels that run,
/// which takes longer than a copy.
pub(super) const QUESTIONS: usize = 8;

/// The fingerprints of what a chunk held.
pub(super) type Prints = Arc<[Fingerprint]>;

/// Pinned memory for the questions to a device.
#[derive(Debug)]
pub(super) struct Questions<D: Driver> {
    pinned: Pinned<D>,
    driver: Arc<D>,
    device: DeviceOrdinal,
}

impl<D: Driver> Questions<D> {
    /// A context of the device is current.
    pub(super) fn new(driver: &Arc<D>, device: DeviceOrdinal) -> PoolResult<Self> {
        let pinned = Pinned::new(driver, QUESTIONS * PIECES * size_of::<PieceSlot>())?;
        Ok(Self { pinned, driver: Arc::clone(driver), device })
    }

    /// Asks for the fingerprints of a chunk. The chunk stays mapped until `stream` has passed. No other question has this
    /// number now.
    pub(super) fn ask(
        &mut self,
        number: usize,
        chunk: VaRange,
        stream: RawStream,
    ) -> PoolResult<()> {
        let slots = self.pinned.slots(number * PIECES..(number + 1) * PIECES);
        let piece_bytes = chunk.size_bytes / PIECES as u64;
        for (index, slot) in (0..).zip(slots.iter_mut()) {
            let start = index * piece_bytes;
            *slot = PieceSlot::asking(chunk.part(&(start..start + piece_bytes)));
        }
        // SAFETY: the slots are pinned, and looked at when the stream has passed; the caller keeps the chunk mapped.
        let asked = unsafe { self.driver.fingerprint(self.device, NonNull::from(slots), stream) };
        asked.about(|| "fingerprints of a chunk".to_owned(), chunk.size_bytes, Some(self.device))
    }

    /// Returns the answer. The stream has passed.
    pub(super) fn answer(&mut self, number: usize) -> Prints {
        let slots = self.pinned.slots(number * PIECES..(number + 1) * PIECES);
        slots.iter().map(|slot| slot.print()).collect()
    }

    /// Leaves the memory pinned for good: the stream may not have passed.
    pub(super) fn keep_for_good(self) {
        self.pinned.keep_for_good();
    }
}
