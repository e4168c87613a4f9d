//! The backing of an allocation: physical memory while it is on its device, its contents, and copies of them.

use std::ops::Range;

use super::residency::{Change, Kept, Residency};
use crate::deferred::Physical;
use crate::store::{Copies, Saved, Store};

/// The smallest unused part that is left out. For a smaller part, one copy more costs as much as copying the bytes.
const UNUSED_BYTES_MIN: u64 = 1 << 20;

/// The backing of one allocation: see the head of this module.
#[derive(Debug)]
pub(crate) struct Backing {
    residency: Residency,
    /// While the memory is on its device: the copy of the last pause that is still in host memory.
    retained: Option<Retained>,
    /// True while somebody may read the saved contents in place, until the memory is back on its device.
    is_lent: bool,
    /// True for memory that is paged: it leaves its device and comes back while its process runs. For that it has a
    /// place of its own in host memory. That place is the retained copy, whose bytes may be old.
    has_home: bool,
}

/// A copy in host memory of the contents that an allocation had when it was paused.
#[derive(Debug)]
struct Retained {
    saved: Saved,
    /// True if readers may use the copy: the next pause must keep it.
    is_for_readers: bool,
}

impl Backing {
    pub(super) fn new(handle: Physical) -> Self {
        let residency = Residency::Resident { handle, unused: Vec::new() };
        Self { residency, retained: None, is_lent: false, has_home: false }
    }

    /// Makes the backing of memory with a place of its own. It is off its device and nothing of it is saved, so it is
    /// zero.
    pub(super) fn with_home() -> Self {
        let kept = Kept { is_set_aside: true, ..Kept::default() };
        let residency = Residency::Offloaded { kept };
        Self { residency, retained: None, is_lent: false, has_home: true }
    }

    pub(crate) fn has_home(&self) -> bool {
        self.has_home
    }

    /// Returns its own place in host memory.
    pub(super) fn own_place(&self) -> Option<&Saved> {
        self.retained.as_ref().filter(|_| self.has_home).map(|kept| &kept.saved)
    }

    /// Sets its own place, which it keeps while it is on its device.
    pub(super) fn move_in(&mut self, saved: Saved) {
        self.retained = Some(Retained { saved, is_for_readers: false });
    }

    /// Returns the driver's handle, while the memory is on its device.
    pub(super) fn handle(&self) -> Option<&Physical> {
        self.residency.handle()
    }

    /// As [`Backing::handle`].
    pub(super) fn handle_mut(&mut self) -> Option<&mut Physical> {
        self.residency.handle_mut()
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self.residency, Residency::Lost)
    }

    /// Is the memory on its device, which alone has its contents, with no pause or resume of it under way?
    pub(crate) fn is_at_rest(&self) -> bool {
        matches!(self.residency, Residency::Resident { .. })
    }

    /// Does its device have the current contents? No while they are being restored: until then the saved contents are
    /// current.
    pub(crate) fn has_contents(&self) -> bool {
        self.residency.has_contents()
    }

    /// Is the memory on its device again, while the saved contents are still the current ones?
    pub(crate) fn is_coming(&self) -> bool {
        self.residency.is_coming()
    }

    pub(super) fn is_set_aside(&self) -> bool {
        self.residency.is_set_aside()
    }

    /// Returns the place of its saved contents, if any.
    pub(crate) fn saved(&self) -> Option<&Saved> {
        self.residency.saved()
    }

    /// Returns the parts, by offset, whose contents are not saved, or need not be.
    pub(super) fn unused(&self) -> &[Range<u64>] {
        self.residency.unused()
    }

    /// Returns the parts, by offset, whose contents are saved and restored, of an allocation of `size_bytes`.
    pub(super) fn copied_parts(&self, size_bytes: u64) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut begin = 0;
        let unused = self.unused().iter();
        for unused in unused.filter(|part| part.end - part.start >= UNUSED_BYTES_MIN) {
            parts.push(begin..unused.start);
            begin = unused.end;
        }
        parts.push(begin..size_bytes);
        parts.retain(|part| part.start < part.end);
        parts
    }

    /// Applies `change` to the residency, which must allow it. The caller must release a handle that is returned.
    pub(super) fn change(&mut self, change: Change) -> Option<Physical> {
        let before = std::mem::replace(&mut self.residency, Residency::Lost);
        let (after, handle) = before.next(change).unwrap_or_else(|state| {
            debug_assert!(false, "a change that is none of {state:?}");
            tracing::error!(
                ?state,
                "memory is not where a step of a pause or resume takes it to be"
            );
            (*state, None)
        });
        self.residency = after;
        handle
    }

    /// Records that the saved contents are about to be written to the memory. A pause may have failed to release that
    /// memory.
    pub(super) fn begin_refill(&mut self) {
        if self.has_contents() && self.saved().is_some() {
            let _none = self.change(Change::Refilled);
        }
    }

    /// Returns the place of its contents, or of a copy of them, in `store`, if there are any.
    pub(crate) fn held_in(&self, store: Store) -> Option<&Saved> {
        let retained = self.retained.as_ref().map(|retained| &retained.saved);
        self.saved().or(retained).filter(|saved| saved.store == store)
    }

    /// Returns the copy of the last pause in `store`, while the memory is on its device, if a pause that keeps `copies`
    /// keeps it. `is_wanted` says whether this is memory of that pause.
    pub(super) fn retained_in(
        &self,
        store: Store,
        copies: Copies,
        is_wanted: bool,
    ) -> Option<&Saved> {
        let retained = self.retained.as_ref().filter(|kept| kept.saved.store == store)?;
        self.copy_stays(copies, is_wanted).then_some(&retained.saved)
    }

    fn copy_stays(&self, copies: Copies, is_wanted: bool) -> bool {
        let is_for_readers = self.retained.as_ref().is_some_and(|kept| kept.is_for_readers);
        let is_for_pauses = copies == Copies::All || (copies == Copies::Needed && is_wanted);
        self.has_home || is_for_readers || is_for_pauses
    }

    /// Returns the copy of the last pause that is kept for readers, while the memory is on its device.
    pub(crate) fn retained(&self) -> Option<&Saved> {
        self.retained.as_ref().filter(|kept| kept.is_for_readers).map(|kept| &kept.saved)
    }

    /// Records that the memory is back on its device. Its copy in host memory is kept for readers, for the next pause,
    /// or not at all. Without `for_pauses`, a copy that only the next pause needs is dropped, also of memory that has
    /// been back for longer.
    pub(super) fn retain_copy(&mut self, for_readers: bool, for_pauses: bool) {
        let is_back = self.handle().is_some();
        if self.has_home {
            if let Some(saved) = self.saved().filter(|_| is_back).cloned() {
                self.move_in(saved);
            }
            return;
        }
        self.is_lent &= !is_back;
        if !for_pauses {
            self.retained.take_if(|kept| !kept.is_for_readers);
        }
        let in_memory = self.saved().filter(|saved| is_back && saved.store == Store::Host);
        let Some(saved) = in_memory else { return };
        let is_kept = for_readers || (for_pauses && saved.prints.is_some());
        let (saved, is_for_readers) = (saved.clone(), for_readers);
        let kept = Retained { saved, is_for_readers };
        self.retained = is_kept.then_some(kept);
    }

    /// Records that somebody was given the place of its copy, and may write there. So its fingerprints do not count any
    /// more.
    pub(super) fn forget_prints(&mut self) {
        self.is_lent = true;
        self.residency.forget_prints();
        if let Some(kept) = &mut self.retained {
            kept.saved.prints = None;
        }
    }

    /// Forgets its copy, which is about to be overwritten or given up.
    pub(super) fn forget_copy(&mut self) {
        self.retained = None;
    }

    /// Returns the store of its copy of the last pause, if it has one.
    pub(super) fn copy_store(&self) -> Option<Store> {
        self.retained.as_ref().map(|kept| kept.saved.store)
    }

    /// Drops its copy, unless a pause that keeps `copies` keeps it. Returns the size of the dropped copy.
    pub(super) fn give_copy_up(&mut self, copies: Copies, is_wanted: bool) -> u64 {
        let stays = self.copy_stays(copies, is_wanted);
        let goes = self.retained.take_if(|_| !stays);
        goes.map_or(0, |kept| kept.saved.extents.iter().map(|extent| extent.size_bytes).sum())
    }

    /// Returns the place of its contents in host memory, if the memory is off its device and nobody was given that
    /// place.
    pub(super) fn movable(&self) -> Option<&Saved> {
        let in_memory = self.saved().filter(|saved| saved.store == Store::Host);
        // Paged memory may be needed at any moment, by a thread that reads no file.
        let is_away = self.handle().is_none() && !self.is_lent && !self.has_home;
        in_memory.filter(|saved| is_away && !saved.extents.is_empty())
    }

    /// Records the new place of saved contents, whose memory is off its device. Their old places are free. False if the
    /// backing has changed meanwhile.
    pub(super) fn spill_to(&mut self, saved: Saved) -> bool {
        let moves = self.movable().is_some();
        if moves {
            self.retained = None;
            let _none = self.change(Change::Spilled(saved));
        }
        moves
    }
}
