//! Chunks that are filled at addresses of the pager's own, copied out, or whose device is asked if they were written.

use std::sync::Arc;

use super::super::PageError;
use super::super::prints::Prints;
use super::{Answered, Copied, Mark, Out, Table};

impl Table {
    /// A copy of all of it is over.
    pub(in crate::paging) fn copied_out(&mut self, id: usize) {
        let chunk = &mut self.chunks[id];
        chunk.saved_version = Some(chunk.version);
        chunk.copied = Copied::default();
        self.counts.copied_out += 1;
    }

    /// A copy of all of it has begun, which is over when `mark` is.
    pub(in crate::paging) fn copying_out(
        &mut self,
        id: usize,
        mark: Arc<Mark>,
        question: Option<usize>,
    ) {
        let chunk = &mut self.chunks[id];
        let version = chunk.version;
        chunk.out = Some(Out { mark, version, question, is_copy: true });
        chunk.copied = Copied::default();
        self.counts.copied_out += 1;
    }

    /// Its place in host memory has nothing.
    pub(in crate::paging) fn forget_copy(&mut self, id: usize) {
        self.chunks[id].saved_version = None;
        self.forget_prints(id);
    }

    /// It is filled at these addresses for copies, and that is over when `mark` is.
    pub(in crate::paging) fn filling(&mut self, id: usize, slot: usize, mark: Option<Arc<Mark>>) {
        let chunk = &mut self.chunks[id];
        chunk.aside = Some(slot);
        chunk.coming = mark;
    }

    /// Addresses for copies that nothing is filled at. `None` if all `count` are in use.
    pub(in crate::paging) fn free_slot(&self, count: usize) -> Option<usize> {
        let used: Vec<_> = self.chunks.iter().filter_map(|chunk| chunk.aside).collect();
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

    /// It is at the addresses for copies no more.
    pub(in crate::paging) fn left_aside(&mut self, id: usize) {
        self.chunks[id].aside = None;
    }

    /// The driver does not take it from there. Who waits for it is told.
    pub(in crate::paging) fn stuck(&mut self, id: usize, error: Arc<PageError>) {
        let chunk = &mut self.chunks[id];
        chunk.is_refused = true;
        chunk.failure = Some((chunk.failures() + 1, error));
    }

    /// Could its device say that its place has what it has?
    pub(in crate::paging) fn prints_to_compare(&self, id: usize) -> Option<Prints> {
        let chunk = &self.chunks[id];
        chunk.copied.prints.clone().filter(|_| chunk.copied.is_unsure && !chunk.is_freed)
    }

    /// The device is asked, and has answered when `mark` is over.
    pub(in crate::paging) fn asking(&mut self, id: usize, mark: Arc<Mark>, question: usize) {
        let chunk = &mut self.chunks[id];
        let version = chunk.version;
        chunk.out = Some(Out { mark, version, question: Some(question), is_copy: false });
    }

    /// A question that nobody has asked and not been told.
    pub(in crate::paging) fn free_question(&self, count: usize) -> Option<usize> {
        let outs = self.chunks.iter().filter_map(|chunk| chunk.out.as_ref()?.question);
        let used: Vec<_> = outs.chain(self.answered.iter().map(|told| told.question)).collect();
        (0..count).find(|question| !used.contains(question))
    }

    /// What was answered, to be told with [`Table::told`].
    pub(in crate::paging) fn take_answered(&mut self) -> Vec<Answered> {
        std::mem::take(&mut self.answered)
    }

    /// The device has said that it had these.
    pub(in crate::paging) fn told(&mut self, answered: Answered, prints: Prints) {
        let Answered { id, version, is_copy, .. } = answered;
        let chunk = &mut self.chunks[id];
        if is_copy {
            chunk.copied.prints = Some(prints);
            return;
        }
        let is_same = chunk.copied.prints.as_ref() == Some(&prints);
        if is_same && !chunk.is_freed {
            chunk.saved_version = Some(version);
            self.counts.unchanged += 1;
        }
        chunk.copied.is_unsure &= is_same && chunk.version != version;
    }

    /// Somebody else may have written to the place of a chunk.
    pub(in crate::paging) fn forget_prints(&mut self, id: usize) {
        self.chunks[id].copied = Copied::default();
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

    /// What a stream must wait for before it uses these.
    pub(in crate::paging) fn awaited_by(&self, ids: &[usize]) -> Vec<Arc<Mark>> {
        let awaited = ids.iter().flat_map(|&id| self.chunks[id].awaited().cloned());
        let mut awaited: Vec<_> = awaited.collect();
        awaited.dedup_by(|one, other| Arc::ptr_eq(one, other));
        awaited
    }

    /// Chunks that somebody uses.
    pub(in crate::paging) fn held(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.holders > 0).count()
    }
}
