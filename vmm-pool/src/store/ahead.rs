//! Host memory that comes in on another thread, one chunk at a time: for the next pause, while the application runs, or for
//! the pause under way, ahead of its copies.
//!
//! A thread that brings a chunk in holds no lock meanwhile: neither for the touching nor for the pinning. A pause that needs
//! more than what is there takes the chunk that is on its way, as far as it has come, so that never two grow the arena
//! at the same time.
//!
//! ```text
//!   begin (next pause)  --.--> on its way --deliver--> here, a queue --take--> the arena's
//!   wanted (this pause) --'        '----- dropped: nothing comes of it
//! ```
//!
//! Lock order: `table` is a leaf.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{HeldChunk, Pins};
use super::chunk::{BringIn, CHUNK_BYTES, Chunk, missing_chunks};

/// The time that a pause waits for the chunk that is on its way, before it brings one in itself: the driver may have
/// the chunk, and be busy with something else.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Chunks that are here ahead of the one that the pause under way pins.
const CHUNKS_AHEAD: usize = 2;

/// The state of an arena that is known without its lock, and the chunks that come in.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    table: Mutex<ChunksAhead>,
    changed: Condvar,
    /// The thread that brings a chunk in hands it over as it is: a pause waits for it, or the process ends.
    is_urgent: AtomicBool,
    /// Nothing is brought in any more: the process ends.
    has_ended: AtomicBool,
    /// Nothing is brought in, nor given back, for now: the process's own driver calls are held back.
    is_held: AtomicBool,
}

#[derive(Debug, Default)]
struct ChunksAhead {
    on_its_way: Option<Coming>,
    /// In the order in which they came.
    here: VecDeque<Delivered>,
    /// Sizes of the chunks that the pause under way needs and nobody brings in yet, in bytes.
    wanted: VecDeque<u64>,
    held: HeldFigures,
}

impl ChunksAhead {
    fn figures(&self) -> HeldFigures {
        self.here.iter().fold(self.held, |held, (_, coming)| held.with(*coming))
    }
}

/// Host memory that an arena holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldFigures {
    /// Without the ring.
    pub(crate) chunk_bytes: u64,
    /// The last chunk's.
    pub(crate) last_chunk_bytes: u64,
    pub(crate) has_ring: bool,
    /// The part that the last completed pause used, and the size of what there was to keep then.
    pub(crate) used: Option<Used>,
}

/// The part of the chunks that a completed pause used.
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

    /// Counts the bytes that the arena would hold with all that is missing. Memory that has no use counts only if it is
    /// part of a chunk that has some.
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

    fn with(mut self, Coming { chunk_bytes, is_for_ring }: Coming) -> Self {
        if is_for_ring {
            self.has_ring = true;
        } else {
            self.last_chunk_bytes = chunk_bytes;
            self.chunk_bytes += chunk_bytes;
        }
        self
    }
}

/// A chunk that was brought in, and what for.
pub(super) type Delivered = (HeldChunk, Coming);

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
    /// Once it is delivered.
    held: Option<HeldChunk>,
}

impl Ahead {
    fn table(&self) -> MutexGuard<'_, ChunksAhead> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the figures of what the arena holds, with chunks that are here and not yet taken.
    pub(crate) fn figures(&self) -> HeldFigures {
        self.table().figures()
    }

    /// The same, with the chunk that is on its way.
    pub(super) fn expected(&self) -> HeldFigures {
        let table = self.table();
        table.on_its_way.map_or(table.figures(), |coming| table.figures().with(coming))
    }

    /// The arena says what it holds.
    pub(super) fn note(&self, held: HeldFigures) {
        self.table().held = held;
    }

    /// One chunk is to be brought in, by the holder of the claim. None while another one is.
    pub(super) fn begin(self: &Arc<Self>, coming: Coming) -> Option<Claim> {
        self.begin_in(&mut self.table(), coming)
    }

    fn begin_in(self: &Arc<Self>, table: &mut ChunksAhead, coming: Coming) -> Option<Claim> {
        if self.has_ended() || self.is_held() || table.on_its_way.is_some() {
            return None;
        }
        // Who waits for it raises this again.
        self.is_urgent.store(false, Ordering::Relaxed);
        table.on_its_way = Some(coming);
        Some(Claim { ahead: Arc::clone(self), coming, held: None })
    }

    /// Has a thread bring in what the pause under way needs of `[0, end_bytes)`, a little ahead of what is taken, so that
    /// touching, pinning and copying run at the same time. Without a thread to be had, the pause does it all.
    pub(super) fn begin_growth(self: &Arc<Self>, how: BringIn, end_bytes: u64) {
        let wanted = missing_chunks(self.expected().chunk_bytes, end_bytes).collect();
        self.table().wanted = wanted;
        let ahead = Arc::clone(self);
        let bring_in = move || {
            while let Some(claim) = ahead.begin_wanted() {
                // What the system refuses the pause tries itself, and tells.
                if let Ok(chunk) = Chunk::new(&how, claim.size_bytes(), claim.is_urgent()) {
                    claim.deliver(HeldChunk::new(chunk));
                }
            }
        };
        if !self.table().wanted.is_empty()
            && let Err(error) = sublet_sync::threads::spawn("sublet-arena", bring_in, |_| {})
        {
            tracing::debug!(%error, "no thread to bring host memory in ahead");
        }
    }

    /// The pause needs no more: what came for it and was not taken goes.
    pub(crate) fn end_growth(&self) {
        self.table().wanted.clear();
        self.changed.notify_all();
        let mut table = self.wait_while(HAND_OVER_TIMEOUT, |_| true);
        table.here.retain(|(held, _)| held.pins != Pins::Nobody);
    }

    /// The next chunk that the pause needs, when it is time for it. None when it needs no more.
    fn begin_wanted(self: &Arc<Self>) -> Option<Claim> {
        let is_early = |table: &mut ChunksAhead| {
            let is_busy = table.on_its_way.is_some() || table.here.len() >= CHUNKS_AHEAD;
            is_busy && !table.wanted.is_empty()
        };
        let waited = self.changed.wait_timeout_while(self.table(), HAND_OVER_TIMEOUT, is_early);
        let mut table = waited.unwrap_or_else(PoisonError::into_inner).0;
        let &chunk_bytes = table.wanted.front()?;
        let claim = self.begin_in(&mut table, Coming { chunk_bytes, is_for_ring: false })?;
        table.wanted.pop_front();
        Some(claim)
    }

    /// The first chunk that is here; waits for nothing.
    pub(super) fn take_here(&self) -> Option<Delivered> {
        let delivered = self.table().here.pop_front();
        self.changed.notify_all();
        delivered
    }

    /// The same, or the chunk that is on its way, as far as it has come within a bounded time. Else the caller brings one in: of
    /// this size in bytes, if the pause said what it needs.
    pub(super) fn take_soon(&self) -> Result<Delivered, Option<u64>> {
        let mut table = self.wait_while(HAND_OVER_TIMEOUT, |table| table.here.is_empty());
        self.changed.notify_all();
        table.here.pop_front().ok_or_else(|| table.wanted.pop_front())
    }

    /// Waits for the chunk that is on its way, as long as `waits` says so too.
    fn wait_while(
        &self,
        timeout: Duration,
        waits: impl Fn(&ChunksAhead) -> bool,
    ) -> MutexGuard<'_, ChunksAhead> {
        let deadline = Instant::now() + timeout;
        let mut table = self.table();
        while table.on_its_way.is_some() && waits(&table) {
            self.is_urgent.store(true, Ordering::Relaxed);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table =
                self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        table
    }

    /// Nothing is brought in from now on; waits a while for what is on its way.
    pub(crate) fn end(&self, timeout: Duration) {
        self.has_ended.store(true, Ordering::Relaxed);
        drop(self.wait_while(timeout, |_| true));
    }

    /// Nothing is brought in, nor given back, until [`Self::go_on`]. Waits a while for what is on its way: has it come?
    pub(crate) fn hold(&self, timeout: Duration) -> bool {
        self.is_held.store(true, Ordering::SeqCst);
        self.wait_while(timeout, |_| true).on_its_way.is_none()
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
    pub(crate) fn size_bytes(&self) -> u64 {
        self.coming.chunk_bytes
    }

    /// Raised when the chunk is to be handed over as it is.
    pub(super) fn is_urgent(&self) -> &AtomicBool {
        &self.ahead.is_urgent
    }

    /// The chunk is there to be taken.
    pub(super) fn deliver(mut self, held: HeldChunk) {
        self.held = Some(held);
        // What is dropped now tells the waiters.
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        {
            let mut table = self.ahead.table();
            table.on_its_way = None;
            let coming = self.coming;
            table.here.extend(self.held.take().map(|held| (held, coming)));
        }
        self.ahead.changed.notify_all();
    }
}
