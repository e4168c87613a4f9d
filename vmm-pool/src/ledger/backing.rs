//! The backing of an allocation: physical memory while it is on its device, its contents, and copies of them.

use std::ops::Range;

use super::residency::{Change, Kept, Residency};
use crate::deferred::Physical;
use crate::store::{Copies, Saved, Store};

/// Smallest unused part that is worth leaving out: below, a copy more costs as much as the bytes.
const UNUSED_BYTES_MIN: u64 = 1 << 20;

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Backing {
    residency: Residency,
    /// While it is on its device: the copy of the last pause that is still in host memory.
    retained: Option<Retained>,
    /// Somebody may read its saved contents where they lie, until it is back.
    is_lent: bool,
    /// It leaves and comes back while its process runs, and has a place of its own in host memory for that: the copy that is retained,
    /// whose bytes may be old.
    has_home: bool,
}

/// A copy in host memory of what an allocation held when it was paused.
#[derive(Debug)]
struct Retained {
    saved: Saved,
    /// Readers may ask for it: it stays whatever the next pause needs.
    is_for_readers: bool,
}

impl Backing {
    pub(super) fn new(handle: Physical) -> Self {
        let residency = Residency::Resident { handle, unused: Vec::new() };
        Self { residency, retained: None, is_lent: false, has_home: false }
    }

    /// Memory that is to have a place of its own. It is away, and nothing of it is saved: it is zero.
    pub(super) fn with_home() -> Self {
        let kept = Kept { is_set_aside: true, ..Kept::default() };
        let residency = Residency::Offloaded { kept };
        Self { residency, retained: None, is_lent: false, has_home: true }
    }

    pub(crate) fn has_home(&self) -> bool {
        self.has_home
    }

    /// The place of its own in host memory.
    pub(super) fn own_place(&self) -> Option<&Saved> {
        self.retained.as_ref().filter(|_| self.has_home).map(|kept| &kept.saved)
    }

    /// Its own place is this, also while it is on its device.
    pub(super) fn move_in(&mut self, saved: Saved) {
        self.retained = Some(Retained { saved, is_for_readers: false });
    }

    /// The handle, while it is on its device.
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

    /// Is it on its device, which alone has its contents, with no pause or resume of it under way?
    pub(crate) fn is_at_rest(&self) -> bool {
        matches!(self.residency, Residency::Resident { .. })
    }

    /// Does its device have its contents? Not while they come back: what is saved are the contents until then.
    pub(crate) fn has_contents(&self) -> bool {
        self.residency.has_contents()
    }

    /// Is it on its device again, and its contents are what is saved of it?
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

    /// Parts, by offset, whose contents are not saved, or need not be.
    pub(super) fn unused(&self) -> &[Range<u64>] {
        self.residency.unused()
    }

    /// The parts whose contents are saved and put back, by offset, of an allocation of `size_bytes`.
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

    /// The change of its residency, in place, which it must have. A handle that comes out must be released.
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

    /// Its saved contents are about to be written to its memory. That may be memory which a pause could not release.
    pub(super) fn begin_refill(&mut self) {
        if self.has_contents() && self.saved().is_some() {
            let _none = self.change(Change::Refilled);
        }
    }

    /// Its contents, or a copy of them, in `store`, when they are there.
    pub(crate) fn held_in(&self, store: Store) -> Option<&Saved> {
        let retained = self.retained.as_ref().map(|retained| &retained.saved);
        self.saved().or(retained).filter(|saved| saved.store == store)
    }

    /// The copy of the last pause in `store`, while it is on its device, where one stays that keeps `copies`.
    /// `is_wanted` says whether this is memory of that pause.
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

    /// The copy of the last pause that is kept for readers, while it is on its device.
    pub(crate) fn retained(&self) -> Option<&Saved> {
        self.retained.as_ref().filter(|kept| kept.is_for_readers).map(|kept| &kept.saved)
    }

    /// It is back on its device: its copy in host memory is kept for readers, or for the next pause, or not.
    /// A copy for the next pause alone goes where nothing is kept for that. This rule holds for memory that has been
    /// back for longer too.
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

    /// Somebody was given the place of its copy, and may write there: nobody takes fingerprints of it for its bytes.
    pub(super) fn forget_prints(&mut self) {
        self.is_lent = true;
        self.residency.forget_prints();
        if let Some(kept) = &mut self.retained {
            kept.saved.prints = None;
        }
    }

    /// Forgets the copy of it, which is about to be written over or given up.
    pub(super) fn forget_copy(&mut self) {
        self.retained = None;
    }

    /// Returns the store of its copy of the last pause, if it has one.
    pub(super) fn copy_store(&self) -> Option<Store> {
        self.retained.as_ref().map(|kept| kept.saved.store)
    }

    /// Gives its copy up, unless it stays in a pause that keeps `copies`. Says how much it held.
    pub(super) fn give_copy_up(&mut self, copies: Copies, is_wanted: bool) -> u64 {
        let stays = self.copy_stays(copies, is_wanted);
        let goes = self.retained.take_if(|_| !stays);
        goes.map_or(0, |kept| kept.saved.extents.iter().map(|extent| extent.size_bytes).sum())
    }

    /// Returns the place of its contents in host memory, if it is away and nobody was given that place.
    pub(super) fn movable(&self) -> Option<&Saved> {
        let in_memory = self.saved().filter(|saved| saved.store == Store::Host);
        // What comes back while its process runs may be wanted any moment, by a thread that reads no file.
        let is_away = self.handle().is_none() && !self.is_lent && !self.has_home;
        in_memory.filter(|saved| is_away && !saved.extents.is_empty())
    }

    /// Its contents, which are away, lie there from now on. The places that they had are free. False when it has changed
    /// meanwhile.
    pub(super) fn spill_to(&mut self, saved: Saved) -> bool {
        let moves = self.movable().is_some();
        if moves {
            self.retained = None;
            let _none = self.change(Change::Spilled(saved));
        }
        moves
    }
}
