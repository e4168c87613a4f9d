//! How callers use their cells. Where a size of theirs is used in ways that cost a copy each time, or that slabs refuse, there are no
//! more cells of that size: who is odd pays for it a few times, and not for ever.

use std::collections::BTreeMap;

use super::Table;

/// So many odd uses of a size end its cells.
pub(crate) const ODD_MAX: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Habits {
    /// Odd uses, by size in bytes.
    odd: BTreeMap<u64, u32>,
    /// Sizes that have become odd, of which nobody was told yet.
    news: Vec<u64>,
}

impl Habits {
    /// Are cells of this size used in odd ways?
    pub(super) fn are_odd(&self, size_bytes: u64) -> bool {
        self.odd.get(&size_bytes).is_some_and(|uses| *uses >= ODD_MAX)
    }

    fn count(&mut self, size_bytes: u64, uses: u32) {
        let was_odd = self.are_odd(size_bytes);
        let known = self.odd.entry(size_bytes).or_default();
        *known = known.saturating_add(uses);
        if !was_odd && self.are_odd(size_bytes) {
            self.news.push(size_bytes);
        }
    }
}

impl Table {
    /// Memory of this size was copied, because of where its caller wanted it.
    pub(crate) fn note_copied(&mut self, size_bytes: u64) {
        self.habits.count(size_bytes, 1);
    }

    /// Memory of this size was refused, because it is of a slab.
    pub(crate) fn note_refused(&mut self, size_bytes: u64) {
        self.habits.count(size_bytes, ODD_MAX);
    }

    /// A size in bytes of which no cells are made any more, once each.
    pub(crate) fn take_odd_size(&mut self) -> Option<u64> {
        self.habits.news.pop()
    }
}
