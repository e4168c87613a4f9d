//! Where in the host arena, or in the file, a pause puts what it saves there.
//!
//! Contents that are set aside lie there already and stay where they are. What is saved beside them goes into
//! the first gap that holds it, in the table's order, so that a pause of everything fills the arena from end
//! to end. Where a copy of the last pause is kept for readers, the next one of the same memory takes its place.

use std::ops::Range;

use super::{Ledger, Row, Selection, merged};
use crate::VirtualHandle;
use crate::store::Store;

/// Places in one store for all of a selection that has to be saved there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// An allocation, and where its contents begin.
    pub(crate) places: Vec<(VirtualHandle, u64)>,
    /// Where the last of all contents ends, old and new.
    pub(crate) end_bytes: u64,
}

impl Layout {
    pub(crate) fn of(ledger: &Ledger, selection: &Selection, store: Store) -> Self {
        let is_wanted =
            |row: &&Row| row.is_resident() && selection.has(row) && row.is_saved_to(store);
        let (wanted, others): (Vec<&Row>, Vec<&Row>) = ledger.rows().partition(is_wanted);
        let (again, new): (Vec<&Row>, Vec<&Row>) =
            wanted.into_iter().partition(|row| row.retained_in(store).is_some());
        let again: Vec<_> =
            again.into_iter().filter_map(|row| Some((row, row.retained_in(store)?))).collect();
        let taken = others.into_iter().filter_map(|row| row.place_in(store));
        let taken = taken.chain(again.iter().map(|(_, place)| place.clone())).collect();
        let new = new.into_iter().map(|row| (row.handle(), row.size_bytes()));
        let mut layout = Self::place(taken, new);
        layout.places.extend(again.into_iter().map(|(row, place)| (row.handle(), place.start)));
        layout
    }

    fn place(
        mut taken: Vec<Range<u64>>,
        wanted: impl Iterator<Item = (VirtualHandle, u64)>,
    ) -> Self {
        taken.sort_by_key(|range| range.start);
        let mut end_bytes = 0;
        let mut gaps = Vec::new();
        for range in taken {
            if end_bytes < range.start {
                gaps.push(end_bytes..range.start);
            }
            end_bytes = range.end.max(end_bytes);
        }
        let mut gaps = Gaps::new(gaps);
        let mut places = Vec::new();
        for (key, size_bytes) in wanted {
            let place = gaps.take(size_bytes).unwrap_or_else(|| {
                let behind = end_bytes;
                // OVERFLOW: sizes of allocations that exist on one machine.
                end_bytes += size_bytes;
                behind
            });
            places.push((key, place));
        }
        Self { places, end_bytes }
    }
}

/// Gaps in order. The first one that holds a size is found without a look at those before it, since a pause
/// asks for each allocation, and there can be as many gaps.
struct Gaps {
    gaps: Vec<Range<u64>>,
    /// How much fits at once, as a binary tree: the root is at 1, below `n` are `2 * n` and `2 * n + 1`, and the
    /// lowest level is the gaps. Each node has the larger of those below.
    largest_bytes: Vec<u64>,
}

impl Gaps {
    fn new(gaps: Vec<Range<u64>>) -> Self {
        let leaves = gaps.len().next_power_of_two();
        let mut largest_bytes = vec![0; leaves];
        largest_bytes.extend(gaps.iter().map(|gap| gap.end - gap.start));
        largest_bytes.resize(2 * leaves, 0);
        let mut all = Self { gaps, largest_bytes };
        for node in (1..leaves).rev() {
            all.update(node);
        }
        all
    }

    fn update(&mut self, node: usize) {
        let below = [2 * node, 2 * node + 1].map(|node| self.largest_bytes[node]);
        self.largest_bytes[node] = below[0].max(below[1]);
    }

    /// The begin of the first gap that holds `size_bytes`, which is smaller by that from now on.
    fn take(&mut self, size_bytes: u64) -> Option<u64> {
        if self.largest_bytes[1] < size_bytes {
            return None;
        }
        let leaves = self.largest_bytes.len() / 2;
        let mut node = 1;
        while node < leaves {
            node *= 2;
            // Then the other one holds it, for the one above does.
            if self.largest_bytes[node] < size_bytes {
                node += 1;
            }
        }
        let gap = self.gaps.get_mut(node - leaves)?;
        let place = gap.start;
        gap.start += size_bytes;
        self.largest_bytes[node] = gap.end - gap.start;
        while node > 1 {
            node /= 2;
            self.update(node);
        }
        Some(place)
    }
}

impl Ledger {
    /// Where saved contents lie in `store`, in order and apart.
    pub(crate) fn places_in(&self, store: Store) -> Vec<Range<u64>> {
        merged(self.rows().filter_map(|row| row.place_in(store)).collect())
    }

    /// The places of `layout` that will be written, in order and apart.
    pub(crate) fn parts_of(&self, layout: &Layout) -> Vec<Range<u64>> {
        let placed = layout.places.iter().filter_map(|&(handle, offset_bytes)| {
            let parts = self.row(handle)?.copied_parts().into_iter();
            Some(parts.map(move |part| offset_bytes + part.start..offset_bytes + part.end))
        });
        merged(placed.flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::scaling::assert_not_quadratic;

    fn row(index: usize) -> VirtualHandle {
        VirtualHandle::new(index, 1)
    }

    /// The first gap that holds each, found by going through all of them.
    fn place_one_by_one(taken: &[Range<u64>], sizes: &[u64]) -> Layout {
        let mut free = 0;
        let mut gaps = Vec::new();
        for range in taken {
            gaps.push(free..range.start);
            free = range.end;
        }
        gaps.push(free..u64::MAX);
        let mut end_bytes = free;
        let place = |(key, size_bytes): (usize, &u64)| {
            let gap = gaps.iter_mut().find(|gap| gap.end - gap.start >= *size_bytes).unwrap();
            let place = gap.start;
            gap.start += size_bytes;
            end_bytes = end_bytes.max(gap.start);
            (row(key), place)
        };
        Layout { places: sizes.iter().enumerate().map(place).collect(), end_bytes }
    }

    #[test]
    fn many_gaps_take_no_longer_each_than_few() {
        // One of a unit before each content; every second asks for more, so that it looks at all gaps for nothing.
        assert_not_quadratic(|count| {
            let taken: Vec<_> = (0..count as u64).map(|at| 2 * at + 1..2 * at + 2).collect();
            move || {
                let sizes = (0..count).map(|key| (row(key), 1 + (key as u64 + 1) % 2));
                Layout::place(taken.clone(), sizes);
            }
        });
    }

    #[test]
    fn an_empty_arena_is_filled_from_end_to_end() {
        let layout =
            Layout::place(Vec::new(), [(row(7), 10), (row(3), 20), (row(9), 5)].into_iter());
        assert_eq!(
            layout,
            Layout { places: vec![(row(7), 0), (row(3), 10), (row(9), 30)], end_bytes: 35 }
        );
    }

    #[test]
    fn gaps_between_what_is_set_aside_are_used_first() {
        let taken = vec![40..50, 10..20];
        let layout = Layout::place(taken, [(row(1), 15), (row(2), 10), (row(3), 10)].into_iter());
        assert_eq!(
            layout,
            Layout { places: vec![(row(1), 20), (row(2), 0), (row(3), 50)], end_bytes: 60 }
        );
    }

    proptest! {
        #[test]
        fn no_two_contents_overlap_and_none_lies_behind_the_end(
            gaps in prop::collection::vec((0u64..50, 1u64..50), 0..20),
            sizes in prop::collection::vec(1u64..60, 0..40),
        ) {
            let mut at = 0;
            let taken: Vec<_> = gaps.iter().map(|(gap, size)| {
                let range = at + gap..at + gap + size;
                at = range.end;
                range
            }).collect();
            let one_by_one = place_one_by_one(&taken, &sizes);
            let layout = Layout::place(taken.clone(), sizes.iter().enumerate().map(|(key, &size)| (row(key), size)));
            let placed = layout.places.iter().map(|&(key, at)| at..at + sizes[key.index()]);
            let mut all: Vec<_> = taken.into_iter().chain(placed).collect();
            all.sort_by_key(|range| range.start);
            prop_assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert_eq!(all.last().map_or(0, |range| range.end), layout.end_bytes);
            prop_assert_eq!(layout.places.len(), sizes.len());
            prop_assert_eq!(layout, one_by_one);
        }
    }
}
