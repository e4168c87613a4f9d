//! Was a chunk written by calls that may have? Its device says, by fingerprints of its pieces.
//!
//! A launch does not say if it writes what it names. So while a chunk is copied out its fingerprints are taken, on another stream.
//! With checks the copy waits for them. The next time they are taken first: where they are the same, its place has its contents. So frozen weights are copied out once.
//!
//! A pause may write to the place of a chunk. It unmaps the chunk then, so fingerprints count only if the chunk has been mapped
//! all the time since, but for the pager's own doing.

#![expect(unsafe_code, reason = "asks devices through the driver")]

use std::ptr::NonNull;
use std::sync::Arc;

use vmm_pool::driver::{DeviceOrdinal, Driver, Fingerprint, PieceSlot, RawStream, VaRange};
use vmm_pool::{Describe, Pinned, PoolResult};

/// Pieces of a chunk: each is one block of threads.
pub(super) const PIECES: usize = 64;
/// Chunks that are asked about simultaneously at most. Each waits for room next to the kernels that run, which takes longer than a copy.
pub(super) const QUESTIONS: usize = 8;

/// The fingerprints of what a chunk held.
pub(super) type Prints = Arc<[Fingerprint]>;

/// Pinned memory for questions.
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

    /// Asks for the fingerprints of a chunk that stays mapped until `stream` has passed; nobody is asked by this number now.
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

    /// The answer, once the stream has passed.
    pub(super) fn answer(&mut self, number: usize) -> Prints {
        let slots = self.pinned.slots(number * PIECES..(number + 1) * PIECES);
        slots.iter().map(|slot| slot.print()).collect()
    }

    /// The stream may not have passed: the memory stays pinned for good.
    pub(super) fn keep_for_good(self) {
        self.pinned.keep_for_good();
    }
}
