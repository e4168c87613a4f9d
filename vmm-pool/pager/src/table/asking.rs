//! Chunks that are being filled at addresses of the pager's own or copied out, and questions to a device whether a chunk was
//! written.
//!
//! *Checks*, which are off by default, find writes that nobody has shown. An idle chunk that equals its copy leaves without
//! another copy. With checks its device first takes its fingerprints. If the chunk differs from its copy, a kernel wrote it.
//! That kernel had the address from somewhere else than its arguments. Such a chunk is reported, and copied out. Nothing is
//! mapped read-only: calls do not say whether they write. A write to read-only memory would end the context instead of naming
//! anything.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::super::prints::Prints;
use super::{Answered, Chunk, Mark, Out, WindowChunks};

/// A question for fingerprints. It is answered when its event is over.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) question: usize,
    pub(crate) mark: Arc<Mark>,
}

/// The most writes that are remembered.
const UNSEEN_MAX: usize = 256;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    pub(crate) is_on: bool,
    /// The last chunk of which its device has said that it equals its copy, if it has not been used since.
    pub(super) passed: Option<usize>,
    pub(crate) found: Vec<Unseen>,
}

/// A write that nobody has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unseen {
    pub(crate) id: usize,
    /// The pieces of the chunk that differ, from the first to the last.
    pub(crate) pieces: RangeInclusive<usize>,
    /// From the last use of the chunk before the write to the window's last use when it was found, as numbers of uses.
    pub(crate) uses: RangeInclusive<u64>,
}

impl WindowChunks {
    /// Must the chunk be compared with its copy before it may leave?
    pub(crate) fn needs_check(&self, id: usize) -> bool {
        if !self.checks.is_on || self.checks.passed == Some(id) {
            return false;
        }
        let chunk = &self.chunks[id];
        chunk.contents.is_known() && chunk.is_clean() && !chunk.is_freed()
    }

    /// May the chunk give its frame away now? The driver and the ledger may still refuse.
    pub(crate) fn is_ready(&self, id: usize) -> bool {
        self.chunks[id].is_clean() && !self.needs_check(id)
    }

    /// Compares the fingerprints of a chunk that was the same as its copy when the device was asked.
    fn check(&mut self, id: usize, prints: &Prints) -> Option<Unseen> {
        let chunk = &mut self.chunks[id];
        let uses = chunk.last..=self.clock;
        let Some(pieces) = chunk.contents.others(prints) else {
            self.checks.passed = Some(id);
            return None;
        };
        chunk.contents.written_unseen();
        let unseen = Unseen { id, pieces, uses };
        if self.checks.found.len() < UNSEEN_MAX {
            self.checks.found.push(unseen.clone());
        }
        Some(unseen)
    }

    /// Records that a copy of the whole chunk has begun. It is over when `mark` is, or already over without one.
    pub(crate) fn copying_out(&mut self, id: usize, mark: Option<Arc<Mark>>, asked: Option<Asked>) {
        self.chunks[id].begin_out(true, mark, asked);
        self.demand.forget(id);
        self.figures.copied_out += 1;
    }

    /// Records that the device is asked before anything is copied.
    pub(crate) fn asking(&mut self, id: usize, asked: Asked) {
        self.chunks[id].begin_out(false, None, Some(asked));
        self.demand.forget(id);
    }

    /// Returns the index of a free slot for copies. `None` if all `count` are in use.
    pub(crate) fn free_slot(&self, count: usize) -> Option<usize> {
        let used = self.chunks.iter().filter_map(Chunk::slot).map(|(slot, _)| slot);
        let used: Vec<_> = used.chain(self.lost_slots.iter().copied()).collect();
        (0..count).find(|slot| !used.contains(slot))
    }

    /// Is any chunk being filled?
    pub(crate) fn is_any_filled(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.slot().is_some())
    }

    /// Returns a chunk that is full, and the index of its slot for copies.
    pub(crate) fn full(&self) -> Option<(usize, usize)> {
        let mut all = self.chunks.iter().enumerate();
        all.find_map(|(id, chunk)| Some((id, chunk.slot().filter(|(_, is_full)| *is_full)?.0)))
    }

    /// Is the device to say whether the chunk's place in host memory has its contents?
    pub(crate) fn is_to_compare(&self, id: usize) -> bool {
        let chunk = &self.chunks[id];
        (chunk.contents.may_be_saved() && !chunk.is_freed()) || self.needs_check(id)
    }

    /// Returns the index of a question that is not under way, and whose last answer was read.
    pub(crate) fn free_question(&self, count: usize) -> Option<usize> {
        let outs = self.chunks.iter().filter_map(|chunk| chunk.out()?.question);
        let used: Vec<_> =
            outs.chain(self.answered.iter().map(|(_, question, _)| *question)).collect();
        (0..count).find(|question| !used.contains(question))
    }

    /// Takes the answered questions. Their answers go to [`WindowChunks::told`].
    pub(crate) fn take_answered(&mut self) -> Vec<Answered> {
        std::mem::take(&mut self.answered)
    }

    /// Takes the fingerprints that the device has reported. Returns a write that nobody has shown.
    pub(crate) fn told(&mut self, answered: &Answered, prints: Prints) -> Option<Unseen> {
        let (id, _, Out { version, is_copy, .. }) = *answered;
        let chunk = &mut self.chunks[id];
        let is_freed = chunk.is_freed();
        if is_copy {
            chunk.contents.set_prints(prints);
            return None;
        }
        if self.checks.is_on && chunk.contents.was_clean(version) {
            return if is_freed { None } else { self.check(id, &prints) };
        }
        if chunk.contents.compare(version, &prints) && !is_freed {
            chunk.contents.saved(version);
            self.figures.unchanged += 1;
        }
        None
    }

    /// Holds these chunks if they are on the device and there is room for all who use them. Returns whether they are held.
    pub(crate) fn hold_if_here(&mut self, ids: &[usize]) -> bool {
        // If all resident chunks fit, these fit too.
        let fits = self.resident <= self.demand.frames() || self.fits(ids);
        let is_so = fits && self.are_here(ids);
        if is_so {
            self.hold(ids);
        }
        is_so
    }

    /// Forgets announcements: the order of uses has changed.
    pub(crate) fn forget_promises(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.is_promised = false);
        let chunks = &self.chunks;
        self.demand.forget_all_but(|id| chunks[id].is_held());
    }

    /// Returns the events that a stream must wait for before it uses these chunks, which are here. The stream may write a chunk
    /// that is being copied out or compared.
    pub(crate) fn awaited_by(&self, ids: &[usize]) -> Vec<Arc<Mark>> {
        let awaited = ids.iter().flat_map(|&id| self.chunks[id].under_way().iter().cloned());
        let mut awaited: Vec<_> = awaited.collect();
        awaited.dedup_by(|one, other| Arc::ptr_eq(one, other));
        awaited
    }
}
