//! The contents of a chunk, and of its place in host memory.

use std::ops::RangeInclusive;

use crate::prints::Prints;

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The number of writes since the chunk was given out. Before the first write its contents are zero.
    version: u64,
    /// The version of the contents that its place has.
    saved: Option<u64>,
    /// The fingerprints of the contents in its place, if nobody but the pager has written there since.
    prints: Option<Prints>,
    /// The chunk may have been written by a use since its place was current. Its device can say.
    is_unsure: bool,
}

impl Contents {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Were the contents never written and never copied?
    fn is_untouched(&self) -> bool {
        self.version == 0 && self.saved.is_none()
    }

    /// Could the chunk leave now without a loss?
    pub(super) fn is_clean(&self) -> bool {
        self.version == 0 || self.saved == Some(self.version)
    }

    /// Can its device say whether the contents are unchanged?
    pub(super) fn is_known(&self) -> bool {
        self.prints.is_some() || self.is_untouched()
    }

    /// May its place have the current contents, though a use may have written?
    pub(super) fn may_be_saved(&self) -> bool {
        self.prints.is_some() && self.is_unsure
    }

    /// Was there nothing to copy at this version?
    pub(super) fn was_clean(&self, version: u64) -> bool {
        self.saved == Some(version) || self.is_untouched()
    }

    /// Records a use of the chunk, which is over or will be, and may have written.
    pub(super) fn used(&mut self) {
        self.is_unsure |= self.saved == Some(self.version);
        self.version += 1;
    }

    /// Records that its place has this version.
    pub(super) fn saved(&mut self, version: u64) {
        self.saved = Some(version);
    }

    /// Records the fingerprints of the contents in its place.
    pub(super) fn set_prints(&mut self, prints: Prints) {
        self.prints = Some(prints);
    }

    /// Compares the fingerprints of this version, as the device reported them, with those of its place.
    pub(super) fn compare(&mut self, version: u64, prints: &Prints) -> bool {
        let is_same = self.prints.as_ref() == Some(prints);
        self.is_unsure &= is_same && self.version != version;
        is_same
    }

    /// Returns its pieces that differ, from the first to the last.
    pub(super) fn others(&self, now: &Prints) -> Option<RangeInclusive<usize>> {
        let is_other = |piece: &usize| match &self.prints {
            Some(before) => before[*piece] != now[*piece] && now[*piece].is_known(),
            None => !now[*piece].is_zero(),
        };
        let mut others = (0..now.len()).filter(is_other);
        let first = others.next()?;
        Some(first..=others.next_back().unwrap_or(first))
    }

    /// Records a write that nobody has shown: the contents are copied out again.
    pub(super) fn written_unseen(&mut self) {
        self.version += 1;
        self.forget_prints();
    }

    /// Records that somebody else may have written to its place. If `is_gone`, the place has nothing any more.
    pub(super) fn forget_copy(&mut self, is_gone: bool) {
        self.saved = self.saved.filter(|_| !is_gone);
        self.forget_prints();
    }

    /// Forgets the fingerprints: nobody knows the contents of its place.
    pub(super) fn forget_prints(&mut self) {
        self.prints = None;
        self.is_unsure = false;
    }
}
