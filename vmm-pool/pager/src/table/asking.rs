//! Chunks that are filled at addresses of the pager's own, copied out, or whose device is asked if they were written.
//!
//! *Checks*, which are off by default, look for writes that nobody has shown. An idle chunk that is as its copy leaves without
//! another copy. With checks its device is asked first, by fingerprints: a chunk that is another than its copy was written by a kernel
//! that had its address from somewhere else than its arguments. It is named, and copied out. Nothing is mapped
//! read-only: calls do not say if they write, and a write to what is read-only ends the context instead of naming anything.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::super::prints::Prints;
use super::{Answered, Chunk, Mark, Out, WindowChunks};

/// A question for fingerprints, which was answered when its event is over.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) question: usize,
    pub(crate) mark: Arc<Mark>,
}

/// Writes that are remembered at most.
const UNSEEN_MAX: usize = 256;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    pub(crate) is_on: bool,
    /// The chunk whose device has said last that it is as its copy, if it has not been used since.
    pub(super) passed: Option<usize>,
    pub(crate) found: Vec<Unseen>,
}

/// A write that nobody has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unseen {
    pub(crate) id: usize,
    /// From the first to the last piece of the chunk that is another than it was.
    pub(crate) pieces: RangeInclusive<usize>,
    /// The last use of the chunk before it, and the last of all when it was found, counted in the window.
    pub(crate) uses: RangeInclusive<u64>,
}

impl WindowChunks {
    /// Is it to be compared with its copy before it may leave?
    pub(crate) fn needs_check(&self, id: usize) -> bool {
        if !self.checks.is_on || self.checks.passed == Some(id) {
            return false;
        }
        let chunk = &self.chunks[id];
        chunk.contents.is_known() && chunk.is_clean() && !chunk.is_freed()
    }

    /// May it give its frame away now, but for what the driver and the ledger say?
    pub(crate) fn is_ready(&self, id: usize) -> bool {
        self.chunks[id].is_clean() && !self.needs_check(id)
    }

    /// A device has said what a chunk has that was as its copy when it was asked.
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

    /// A copy of all of it has begun, which is over when `mark` is, or was over without one.
    pub(crate) fn copying_out(&mut self, id: usize, mark: Option<Arc<Mark>>, asked: Option<Asked>) {
        self.chunks[id].begin_out(true, mark, asked);
        self.demand.forget(id);
        self.figures.copied_out += 1;
    }

    /// The device is asked, before anything is copied.
    pub(crate) fn asking(&mut self, id: usize, asked: Asked) {
        self.chunks[id].begin_out(false, None, Some(asked));
        self.demand.forget(id);
    }

    /// Addresses for copies that nothing is filled at. `None` if all `count` are in use.
    pub(crate) fn free_slot(&self, count: usize) -> Option<usize> {
        let used = self.chunks.iter().filter_map(Chunk::slot).map(|(slot, _)| slot);
        let used: Vec<_> = used.chain(self.lost_slots.iter().copied()).collect();
        (0..count).find(|slot| !used.contains(slot))
    }

    /// Is anything being filled?
    pub(crate) fn is_any_filled(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.slot().is_some())
    }

    /// One that is full, and where.
    pub(crate) fn full(&self) -> Option<(usize, usize)> {
        let mut all = self.chunks.iter().enumerate();
        all.find_map(|(id, chunk)| Some((id, chunk.slot().filter(|(_, is_full)| *is_full)?.0)))
    }

    /// Is its device to say if its place has what it has?
    pub(crate) fn is_to_compare(&self, id: usize) -> bool {
        let chunk = &self.chunks[id];
        (chunk.contents.may_be_saved() && !chunk.is_freed()) || self.needs_check(id)
    }

    /// A question that nobody has asked and not been told.
    pub(crate) fn free_question(&self, count: usize) -> Option<usize> {
        let outs = self.chunks.iter().filter_map(|chunk| chunk.out()?.question);
        let used: Vec<_> =
            outs.chain(self.answered.iter().map(|(_, question, _)| *question)).collect();
        (0..count).find(|question| !used.contains(question))
    }

    /// The answer, to be told with [`WindowChunks::told`].
    pub(crate) fn take_answered(&mut self) -> Vec<Answered> {
        std::mem::take(&mut self.answered)
    }

    /// The device has said that it had these. A write comes out that nobody has shown.
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

    /// Are these on the device, with room for who uses them too? Then they are held.
    pub(crate) fn hold_if_here(&mut self, ids: &[usize]) -> bool {
        // As long as all that is here fits, so do these.
        let fits = self.resident <= self.demand.frames() || self.fits(ids);
        let is_so = fits && self.are_here(ids);
        if is_so {
            self.hold(ids);
        }
        is_so
    }

    /// The order of uses is another than it was.
    pub(crate) fn forget_promises(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.is_promised = false);
        let chunks = &self.chunks;
        self.demand.forget_all_but(|id| chunks[id].is_held());
    }

    /// Returns the events that a stream must wait for before it uses these chunks, which are here: it may write what is copied
    /// out, or compared.
    pub(crate) fn awaited_by(&self, ids: &[usize]) -> Vec<Arc<Mark>> {
        let awaited = ids.iter().flat_map(|&id| self.chunks[id].under_way().iter().cloned());
        let mut awaited: Vec<_> = awaited.collect();
        awaited.dedup_by(|one, other| Arc::ptr_eq(one, other));
        awaited
    }
}
