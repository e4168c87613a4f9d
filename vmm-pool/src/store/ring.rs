//! Slots of pinned host memory. Contents pass through them between devices and the file ([`super::ContentsFile`]).

#![expect(unsafe_code, reason = "looks at host memory that the driver copies to and from")]

use std::sync::Arc;

use super::chunk::{CHUNK_BYTES, Chunk};
use super::places::Piece;

/// The size of a slot, in bytes: the most that is written or read in one piece.
pub(crate) const SLOT_BYTES: u64 = SLOT_LENGTH as u64;
/// The same size, as a `usize`.
const SLOT_LENGTH: usize = 32 << 20;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(SLOT_BYTES), "a ring is one chunk");

/// A part of the ring. One owner has it at a time.
///
/// # Invariants
/// 1. Nobody else has a piece of its bytes, except copies of the driver's.
/// 2. A thread that starts a copy to or from these bytes waits for its end before it passes the slot on.
#[derive(Debug)]
pub struct Slot(pub(crate) Piece);

/// Returns all slots of a ring. Nobody else may have a piece of the ring.
pub(super) fn slots(ring: &Arc<Chunk>) -> Vec<Slot> {
    let part = |at| Slot(Piece::new(ring, at, 0..SLOT_BYTES));
    // INVARIANT: each slot is made once.
    (0..CHUNK_BYTES).step_by(SLOT_LENGTH).map(part).collect()
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl AsMut<[u8]> for Slot {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: live as long as the slot and its own (invariant 1), no copy under way (2), and all of it can be read; the slot is
        // borrowed for it alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), SLOT_LENGTH) }
    }
}
