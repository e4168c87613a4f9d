//! The contents of a chunk, and what lies in its place in host memory.

use std::ops::RangeInclusive;

use crate::prints::Prints;

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The number of writes since the chunk was given out. Before the first write its contents are zero.
    version: u64,
    /// The version that its place has.
    saved: Option<u64>,
    /// Of what lies there, if nobody but the pager has written there since.
    prints: Option<Prints>,
    /// The chunk was used since its place was current, and may have been written: its device can say.
    is_unsure: bool,
}

impl Contents {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Has nobody written them, and nobody copied them?
    fn is_untouched(&self) -> bool {
        self.version == 0 && self.saved.is_none()
    }

    /// Would nothing be lost if the chunk left now?
    pub(super) fn is_clean(&self) -> bool {
        self.version == 0 || self.saved == Some(self.version)
    }

    /// Can its device say if they are still as they were?
    pub(super) fn is_known(&self) -> bool {
        self.prints.is_some() || self.is_untouched()
    }

    /// May the place have them, though somebody may have written?
    pub(super) fn may_be_saved(&self) -> bool {
        self.prints.is_some() && self.is_unsure
    }

    /// Were they this version when there was nothing to copy?
    pub(super) fn was_clean(&self, version: u64) -> bool {
        self.saved == Some(version) || self.is_untouched()
    }

    /// A use of the chunk, which may have written, is over, or will be.
    pub(super) fn used(&mut self) {
        self.is_unsure |= self.saved == Some(self.version);
        self.version += 1;
    }

    /// This version lies in its place.
    pub(super) fn saved(&mut self, version: u64) {
        self.saved = Some(version);
    }

    /// Its place has contents with these prints.
    pub(super) fn set_prints(&mut self, prints: Prints) {
        self.prints = Some(prints);
    }

    /// Compares what the device has said that this version had with what its place has.
    pub(super) fn compare(&mut self, version: u64, prints: &Prints) -> bool {
        let is_same = self.prints.as_ref() == Some(prints);
        self.is_unsure &= is_same && self.version != version;
        is_same
    }

    /// Its pieces, from the first to the last, that are another than they were.
    pub(super) fn others(&self, now: &Prints) -> Option<RangeInclusive<usize>> {
        let is_other = |piece: &usize| match &self.prints {
            Some(before) => before[*piece] != now[*piece] && now[*piece].is_known(),
            None => !now[*piece].is_zero(),
        };
        let mut others = (0..now.len()).filter(is_other);
        let first = others.next()?;
        Some(first..=others.next_back().unwrap_or(first))
    }

    /// Somebody has written whom nobody has seen: they are copied out again.
    pub(super) fn written_unseen(&mut self) {
        self.version += 1;
        self.forget_prints();
    }

    /// Somebody else may have written to its place, which has nothing any more if that `is_gone`.
    pub(super) fn forget_copy(&mut self, is_gone: bool) {
        self.saved = self.saved.filter(|_| !is_gone);
        self.forget_prints();
    }

    /// Nobody knows what its place has.
    pub(super) fn forget_prints(&mut self) {
        self.prints = None;
        self.is_unsure = false;
    }
}
