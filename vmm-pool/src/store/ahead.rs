//! Host memory that comes in while the application runs, one chunk at a time.
//!
//! A thread that brings a chunk in holds no lock meanwhile: neither for the touching nor for the pinning. A pause that needs
//! more than what is there takes the chunk that is on its way, as far as it has come, so that never two grow the arena
//! at the same time.
//!
//! ```text
//!   nothing --begin--> on its way --deliver--> here --take--> nothing
//!                          `------- dropped ------------------^
//! ```
//!
//! Lock order: `table` is a leaf.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::Held;
use super::chunk::{CHUNK_BYTES, missing_chunks};

/// How long a pause waits for the chunk that is on its way, before it brings one in itself: the driver may have the
/// chunk, and be busy with something else.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(2);

/// What is known of an arena without its lock, and the chunk that is on its way.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    table: Mutex<Table>,
    changed: Condvar,
    /// The thread that brings a chunk in hands it over as it is: a pause waits for it, or the process ends.
    is_urgent: AtomicBool,
    /// Nothing is brought in any more: the process ends.
    has_ended: AtomicBool,
    /// Nothing is brought in, nor given back, for now: the process's own driver calls are held back.
    is_held: AtomicBool,
}

#[derive(Debug, Default)]
struct Table {
    stage: Stage,
    held: HeldFigures,
}

/// Host memory that an arena holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldFigures {
    /// Without the ring.
    pub(crate) chunk_bytes: u64,
    /// The last chunk's.
    pub(crate) last_chunk_bytes: u64,
    pub(crate) has_ring: bool,
    /// What the last completed pause used, and what there was to keep then.
    pub(crate) used: Option<Used>,
}

/// What a completed pause used of the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) end_bytes: u64,
    /// All own memory whose contents go to host memory, whether it left or not.
    pub(crate) kept_bytes: u64,
}

impl HeldFigures {
    /// The chunk to bring in next if `[0, end_bytes)` is wanted, and the ring or not.
    pub(super) fn missing(self, end_bytes: u64, wants_ring: bool) -> Option<Coming> {
        if wants_ring && !self.has_ring {
            return Some(Coming { chunk_bytes: CHUNK_BYTES, is_for_ring: true });
        }
        let chunk_bytes = missing_chunks(self.chunk_bytes, end_bytes).next()?;
        Some(Coming { chunk_bytes, is_for_ring: false })
    }

    /// The size of that chunk, in bytes; 0 if nothing is missing.
    pub(crate) fn missing_chunk_bytes(self, end_bytes: u64, wants_ring: bool) -> u64 {
        self.missing(end_bytes, wants_ring).map_or(0, |missing| missing.chunk_bytes)
    }

    /// What the arena would hold with all that is missing, in bytes; what has no use counts only if it is part of a chunk that has.
    pub(crate) fn wanted_bytes(self, end_bytes: u64, wants_ring: bool) -> u64 {
        let ring_bytes = if wants_ring { CHUNK_BYTES } else { 0 };
        let anew_bytes = missing_chunks(0, end_bytes).sum::<u64>();
        let missing_bytes = missing_chunks(self.chunk_bytes, end_bytes).sum::<u64>();
        let all_bytes = self.chunk_bytes + missing_bytes;
        ring_bytes + if missing_bytes == 0 { all_bytes.min(anew_bytes) } else { all_bytes }
    }

    /// All of it, in bytes.
    pub(crate) fn bytes(self) -> u64 {
        self.chunk_bytes + if self.has_ring { CHUNK_BYTES } else { 0 }
    }
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Nothing,
    OnItsWay(Coming),
    Here(Delivered),
}

/// A chunk that was brought in, and what for.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) held: Held,
    pub(super) is_for_ring: bool,
}

/// A chunk that somebody brings in, or has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Coming {
    pub(super) chunk_bytes: u64,
    pub(super) is_for_ring: bool,
}

/// The right, and the duty, to bring one chunk in. Dropped without delivery, nothing came of it.
#[derive(Debug)]
pub(crate) struct Claim {
    ahead: Arc<Ahead>,
    pub(super) coming: Coming,
}

impl Ahead {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the arena holds, with a chunk that is here and not yet taken.
    pub(crate) fn figures(&self) -> HeldFigures {
        let table = self.table();
        let mut held = table.held;
        match &table.stage {
            Stage::Here(delivered) if delivered.is_for_ring => held.has_ring = true,
            Stage::Here(delivered) => {
                held.last_chunk_bytes = delivered.held.chunk.size_bytes();
                held.chunk_bytes += held.last_chunk_bytes;
            }
            Stage::Nothing | Stage::OnItsWay(_) => {}
        }
        held
    }

    /// The arena says what it holds.
    pub(super) fn note(&self, held: HeldFigures) {
        self.table().held = held;
    }

    /// The chunk that is on its way or here.
    pub(super) fn coming(&self) -> Option<Coming> {
        match &self.table().stage {
            Stage::Nothing => None,
            Stage::OnItsWay(coming) => Some(*coming),
            Stage::Here(Delivered { held, is_for_ring }) => {
                let chunk_bytes = held.chunk.size_bytes();
                Some(Coming { chunk_bytes, is_for_ring: *is_for_ring })
            }
        }
    }

    /// One chunk is to be brought in, by the holder of the claim. None while another one is.
    pub(super) fn begin(self: &Arc<Self>, coming: Coming) -> Option<Claim> {
        let mut table = self.table();
        let is_over = self.has_ended() || self.is_held();
        if is_over || !matches!(table.stage, Stage::Nothing) {
            return None;
        }
        table.stage = Stage::OnItsWay(coming);
        Some(Claim { ahead: Arc::clone(self), coming })
    }

    /// The chunk that is here; waits for nothing.
    pub(super) fn take_here(&self) -> Option<Delivered> {
        let mut table = self.table();
        match std::mem::take(&mut table.stage) {
            Stage::Here(delivered) => Some(delivered),
            stage @ (Stage::Nothing | Stage::OnItsWay(_)) => {
                table.stage = stage;
                None
            }
        }
    }

    /// The chunk that is on its way, as far as it has come within a bounded time.
    pub(super) fn take_soon(&self) -> Option<Delivered> {
        self.wait_until_settled(HAND_OVER_TIMEOUT);
        self.take_here()
    }

    fn wait_until_settled(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut table = self.table();
        while matches!(table.stage, Stage::OnItsWay(_)) {
            self.is_urgent.store(true, Ordering::Relaxed);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table =
                self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.is_urgent.store(self.has_ended.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Nothing is brought in from now on; waits a while for what is on its way.
    pub(crate) fn end(&self, timeout: Duration) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.wait_until_settled(timeout);
    }

    /// Nothing is brought in, nor given back, until [`Self::go_on`]. Waits a while for what is on its way: has it come?
    pub(crate) fn hold(&self, timeout: Duration) -> bool {
        self.is_held.store(true, Ordering::SeqCst);
        self.wait_until_settled(timeout);
        !matches!(self.table().stage, Stage::OnItsWay(_))
    }

    /// Ends [`Self::hold`].
    pub(crate) fn go_on(&self) {
        self.is_held.store(false, Ordering::SeqCst);
    }

    /// See [`Self::hold`].
    pub(crate) fn is_held(&self) -> bool {
        self.is_held.load(Ordering::SeqCst)
    }

    /// Is nothing brought in any more?
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

impl Claim {
    /// In bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.coming.chunk_bytes
    }

    /// Raised when the chunk is to be handed over as it is.
    pub(super) fn is_urgent(&self) -> &AtomicBool {
        &self.ahead.is_urgent
    }

    /// The chunk is there to be taken.
    pub(super) fn deliver(self, held: Held) {
        let delivered = Delivered { held, is_for_ring: self.coming.is_for_ring };
        self.ahead.table().stage = Stage::Here(delivered);
        // What is dropped now tells the waiters.
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        {
            let mut table = self.ahead.table();
            if matches!(table.stage, Stage::OnItsWay(_)) {
                table.stage = Stage::Nothing;
            }
        }
        self.ahead.changed.notify_all();
    }
}
