//! The sizes of an arena's host memory, and the chunk that another thread populates for it. Both can be read without
//! the arena's lock.
//!
//! That thread holds no lock while it touches and pins. A pause waits for the chunk before it grows the arena, so that
//! never two threads do so simultaneously.
//!
//! Lock order: `known` is a leaf.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::chunk::{CHUNK_BYTES, missing_chunks};
use sublet_sync::sync::lock;

/// The state that is known without the arena's lock: see the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    known: Mutex<Account>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Account {
    held: HeldFigures,
    coming: Option<Coming>,
    /// True while nothing may be populated or given back: the process's own driver calls are blocked, or the process
    /// ends.
    is_held: bool,
}

/// Host memory that an arena holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldFigures {
    /// The size of all chunks without the ring.
    pub(crate) chunk_bytes: u64,
    /// The size of the last chunk.
    pub(crate) last_chunk_bytes: u64,
    pub(crate) has_ring: bool,
    /// The part that the last completed pause used, and how much there was to keep then.
    pub(crate) used: Option<Used>,
}

/// The part of the chunks that a completed pause used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) end_bytes: u64,
    /// The size of all own memory whose contents go to host memory, whether the pause took it or not.
    pub(crate) kept_bytes: u64,
}

impl HeldFigures {
    /// Returns the next chunk to populate if `[0, end_bytes)` is wanted, and the ring if `wants_ring`.
    pub(crate) fn missing(self, end_bytes: u64, wants_ring: bool) -> Option<Coming> {
        if wants_ring && !self.has_ring {
            return Some(Coming { chunk_bytes: CHUNK_BYTES, is_for_ring: true });
        }
        let chunk_bytes = missing_chunks(self.chunk_bytes, end_bytes).next()?;
        Some(Coming { chunk_bytes, is_for_ring: false })
    }

    /// Counts the bytes that the arena would hold with all that is missing. Memory without a use counts only if another
    /// part of its chunk has one.
    pub(crate) fn wanted_bytes(self, end_bytes: u64, wants_ring: bool) -> u64 {
        let ring_bytes = if wants_ring { CHUNK_BYTES } else { 0 };
        let anew_bytes = missing_chunks(0, end_bytes).sum::<u64>();
        let missing_bytes = missing_chunks(self.chunk_bytes, end_bytes).sum::<u64>();
        let all_bytes = self.chunk_bytes + missing_bytes;
        ring_bytes + if missing_bytes == 0 { all_bytes.min(anew_bytes) } else { all_bytes }
    }

    /// Returns the size of the chunks and the ring, in bytes.
    pub(crate) fn bytes(self) -> u64 {
        self.chunk_bytes + if self.has_ring { CHUNK_BYTES } else { 0 }
    }
}

/// A chunk that a thread populates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Coming {
    pub(crate) chunk_bytes: u64,
    pub(crate) is_for_ring: bool,
}

/// The right, and the duty, to populate one chunk. It ends when the arena has the chunk, or when populating fails.
#[derive(Debug)]
pub(crate) struct Claim {
    incoming: Arc<Incoming>,
    pub(crate) coming: Coming,
}

impl Incoming {
    /// Returns the sizes of what the arena holds.
    pub(crate) fn figures(&self) -> HeldFigures {
        lock(&self.known).held
    }

    /// Returns the same sizes, with the chunk that is being populated.
    pub(super) fn expected(&self) -> HeldFigures {
        let Account { mut held, coming, .. } = *lock(&self.known);
        if let Some(Coming { chunk_bytes, is_for_ring }) = coming {
            held.has_ring |= is_for_ring;
            held.chunk_bytes += if is_for_ring { 0 } else { chunk_bytes };
        }
        held
    }

    /// Records what the arena holds.
    pub(super) fn note(&self, held: HeldFigures) {
        lock(&self.known).held = held;
    }

    /// Begins to populate one chunk, by the holder of the claim. None while another chunk is being populated, or if
    /// nothing may be.
    pub(crate) fn begin(self: &Arc<Self>, coming: Coming) -> Option<Claim> {
        let mut known = lock(&self.known);
        let begins = !known.is_held && known.coming.is_none();
        begins.then(|| {
            known.coming = Some(coming);
            Claim { incoming: Arc::clone(self), coming }
        })
    }

    /// Waits for the chunk that is being populated while that `matters`, for at most `timeout`. Returns whether none is
    /// being populated any more.
    pub(crate) fn wait(&self, timeout: Duration, matters: impl Fn(HeldFigures) -> bool) -> bool {
        let waits = |known: &mut Account| known.coming.is_some() && matters(known.held);
        let waited = self.changed.wait_timeout_while(lock(&self.known), timeout, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.coming.is_none()
    }

    /// Stops populating and giving back, until [`Self::go_on`]. Waits for the chunk that is being populated, for at
    /// most `timeout`. Returns whether none is any more.
    pub(crate) fn hold(&self, timeout: Duration) -> bool {
        lock(&self.known).is_held = true;
        self.wait(timeout, |_| true)
    }

    /// Ends [`Self::hold`].
    pub(crate) fn go_on(&self) {
        lock(&self.known).is_held = false;
    }

    /// Is populating stopped? See [`Self::hold`].
    pub(crate) fn is_held(&self) -> bool {
        lock(&self.known).is_held
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.incoming.known).coming = None;
        self.incoming.changed.notify_all();
    }
}
