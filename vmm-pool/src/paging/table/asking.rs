//! Chunks that are filled at addresses of the pager's own, copied out, or whose device is asked if they were written.
//!
//! *Checks*, which are off by default, look for writes that nobody has shown. An idle chunk that is as its copy leaves without
//! another copy. With checks its device is asked first, by fingerprints: a chunk that is another than its copy was written by a kernel
//! that had its address from somewhere else than its arguments, or outside of a use. It is named, and copied out. Nothing is mapped
//! read-only: calls do not say if they write, and a write to what is read-only ends the context instead of naming anything.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::super::prints::Prints;
use super::{Answered, Copied, Mark, Out, WindowChunks};

/// A question for fingerprints, which was answered when its event is over.
#[derive(Debug)]
pub(in crate::paging) struct Asked {
    pub(in crate::paging) question: usize,
    pub(in crate::paging) mark: Arc<Mark>,
}

/// Writes that are remembered at most.
const UNSEEN_MAX: usize = 256;

/// See the head of this module.
#[derive(Debug, Default)]
pub(in crate::paging) struct Checks {
    pub(in crate::paging) is_on: bool,
    /// The chunk whose device has said last that it is as its copy, if it has not been used since.
    passed: Option<usize>,
    pub(in crate::paging) found: Vec<Unseen>,
}

impl Checks {
    /// Somebody is about to use a chunk.
    pub(super) fn used(&mut self, id: usize) {
        if self.passed == Some(id) {
            self.passed = None;
        }
    }
}

/// A write that nobody has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::paging) struct Unseen {
    pub(in crate::paging) id: usize,
    /// From the first to the last piece of the chunk that is another than it was.
    pub(in crate::paging) pieces: RangeInclusive<usize>,
    /// The last use of the chunk before it, and the last of all when it was found, counted in the window.
    pub(in crate::paging) uses: RangeInclusive<u64>,
}

impl WindowChunks {
    /// Is it to be compared with its copy before it may leave?
    pub(in crate::paging) fn needs_check(&self, id: usize) -> bool {
        if !self.checks.is_on || self.checks.passed == Some(id) {
            return false;
        }
        let chunk = &self.chunks[id];
        let is_known = chunk.copied.prints.is_some() || chunk.is_untouched();
        is_known && chunk.is_clean() && !chunk.is_freed
    }

    /// May it give its frame away now, but for what the driver and the ledger say?
    pub(in crate::paging) fn is_ready(&self, id: usize) -> bool {
        self.chunks[id].is_clean() && !self.needs_check(id)
    }

    /// A device has said what a chunk has that was as its copy when it was asked.
    fn check(&mut self, id: usize, prints: &Prints) -> Option<Unseen> {
        let uses = self.chunks[id].last..=self.clock;
        let chunk = &mut self.chunks[id];
        let copied = chunk.copied.prints.as_ref();
        let is_other = |piece: &usize| match copied {
            Some(copied) => copied[*piece] != prints[*piece] && prints[*piece].is_known(),
            None => !prints[*piece].is_zero(),
        };
        let mut others = (0..prints.len()).filter(is_other);
        let Some(first) = others.next() else {
            self.checks.passed = Some(id);
            return None;
        };
        let pieces = first..=others.next_back().unwrap_or(first);
        // It is copied out again.
        chunk.version += 1;
        chunk.copied = Copied::default();
        let unseen = Unseen { id, pieces, uses };
        if self.checks.found.len() < UNSEEN_MAX {
            self.checks.found.push(unseen.clone());
        }
        Some(unseen)
    }

    /// A copy of all of it has begun, which is over when `mark` is, or was over without one.
    pub(in crate::paging) fn copying_out(
        &mut self,
        id: usize,
        mark: Option<Arc<Mark>>,
        asked: Option<Asked>,
    ) {
        let chunk = &mut self.chunks[id];
        let (version, question) = (chunk.version, asked.as_ref().map(|asked| asked.question));
        let marks: Vec<_> = mark.into_iter().chain(asked.map(|asked| asked.mark)).collect();
        if marks.is_empty() {
            chunk.saved_version = Some(version);
        } else {
            chunk.out = Some(Out { marks, version, question, is_copy: true });
        }
        chunk.copied = Copied::default();
        self.counts.copied_out += 1;
    }

    /// Addresses for copies that nothing is filled at. `None` if all `count` are in use.
    pub(in crate::paging) fn free_slot(&self, count: usize) -> Option<usize> {
        let used = self.chunks.iter().filter_map(|chunk| chunk.aside);
        let used: Vec<_> = used.chain(self.lost_slots.iter().copied()).collect();
        (0..count).find(|slot| !used.contains(slot))
    }

    /// Is anything being filled?
    pub(in crate::paging) fn is_any_filled(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.aside.is_some())
    }

    /// One that is full, and where.
    pub(in crate::paging) fn full(&self) -> Option<(usize, usize)> {
        let all = self.chunks.iter().enumerate();
        let mut full = all.filter(|(_, chunk)| chunk.coming.is_none() && !chunk.is_refused);
        full.find_map(|(id, chunk)| Some((id, chunk.aside?)))
    }

    /// Is its device to say if its place has what it has?
    pub(in crate::paging) fn is_to_compare(&self, id: usize) -> bool {
        let chunk = &self.chunks[id];
        let is_unsure = chunk.copied.prints.is_some() && chunk.copied.is_unsure;
        (is_unsure && !chunk.is_freed) || self.needs_check(id)
    }

    /// A question that nobody has asked and not been told.
    pub(in crate::paging) fn free_question(&self, count: usize) -> Option<usize> {
        let outs = self.chunks.iter().filter_map(|chunk| chunk.out.as_ref()?.question);
        let used: Vec<_> = outs.chain(self.answered.iter().map(|told| told.question)).collect();
        (0..count).find(|question| !used.contains(question))
    }

    /// The answer, to be told with [`WindowChunks::told`].
    pub(in crate::paging) fn take_answered(&mut self) -> Vec<Answered> {
        std::mem::take(&mut self.answered)
    }

    /// The device has said that it had these. A write comes out that nobody has shown.
    pub(in crate::paging) fn told(&mut self, answered: Answered, prints: Prints) -> Option<Unseen> {
        let Answered { id, version, is_copy, .. } = answered;
        let chunk = &mut self.chunks[id];
        if is_copy {
            chunk.copied.prints = Some(prints);
            return None;
        }
        let was_clean = chunk.saved_version == Some(version) || chunk.is_untouched();
        if self.checks.is_on && was_clean {
            return if chunk.is_freed { None } else { self.check(id, &prints) };
        }
        let is_same = chunk.copied.prints.as_ref() == Some(&prints);
        if is_same && !chunk.is_freed {
            chunk.saved_version = Some(version);
            self.counts.unchanged += 1;
        }
        chunk.copied.is_unsure &= is_same && chunk.version != version;
        None
    }

    /// Are these on the device, with room for who uses them too? Then they are held.
    pub(in crate::paging) fn hold_if_here(&mut self, ids: &[usize]) -> bool {
        // As long as all that is here fits, so do these.
        let fits = self.resident() <= self.frames || self.fits(ids);
        let is_so = fits && self.are_here(ids);
        if is_so {
            self.hold(ids);
        }
        is_so
    }

    /// The order of uses is another than it was.
    pub(in crate::paging) fn forget_promises(&mut self) {
        for chunk in &mut self.chunks {
            chunk.is_promised = false;
        }
        let chunks = &self.chunks;
        self.queue.retain(|id| chunks[*id].holders > 0);
    }

    /// Returns the events that a stream must wait for before it uses these chunks.
    pub(in crate::paging) fn awaited_by(&self, ids: &[usize]) -> Vec<Arc<Mark>> {
        let awaited = ids.iter().flat_map(|&id| self.chunks[id].awaited().cloned());
        let mut awaited: Vec<_> = awaited.collect();
        awaited.dedup_by(|one, other| Arc::ptr_eq(one, other));
        awaited
    }
}
