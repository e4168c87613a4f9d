//! Where in the host arena, or in the file, a pause puts what it saves there.
//!
//! Contents that are set aside lie there already and stay where they are. What is saved beside them goes into
//! the first gap that holds it, in the table's order, so that a pause of everything fills the arena from end
//! to end.

use std::collections::VecDeque;
use std::ops::Range;

use super::Selection;
use crate::pool::is_saved_to;
use crate::pool::tables::{Allocation, Tables};
use crate::staging::{Saved, Store};

/// Places in one store for all of a selection that has to be saved there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Key of an allocation, and where its contents begin.
    pub(crate) places: Vec<(usize, u64)>,
    /// Where the last of all contents ends, old and new.
    pub(crate) end_bytes: u64,
}

impl Layout {
    pub(crate) fn of(tables: &Tables, selection: &Selection, store: Store) -> Self {
        let is_wanted = |found: &Allocation| {
            found.raw.is_some() && selection.has(found) && is_saved_to(store, found)
        };
        let taken = tables.allocations.iter().filter(|(_, found)| !is_wanted(found));
        let taken = taken.filter_map(|(_, found)| place_in(store, found));
        let wanted = tables.allocations.iter().filter(|(_, found)| is_wanted(found));
        Self::place(taken.collect(), wanted.map(|(key, found)| (key, found.size_bytes)))
    }

    fn place(mut taken: Vec<Range<u64>>, wanted: impl Iterator<Item = (usize, u64)>) -> Self {
        taken.sort_by_key(|range| range.start);
        let mut end_bytes = 0;
        let mut gaps = VecDeque::new();
        for range in taken {
            if end_bytes < range.start {
                gaps.push_back(end_bytes..range.start);
            }
            end_bytes = range.end.max(end_bytes);
        }
        let mut places = Vec::new();
        for (key, size_bytes) in wanted {
            let fits = |gap: &Range<u64>| gap.end - gap.start >= size_bytes;
            // OVERFLOW: sizes of allocations that exist on one machine.
            let free = match gaps.iter_mut().find(|gap| fits(gap)) {
                Some(gap) => &mut gap.start,
                None => &mut end_bytes,
            };
            places.push((key, *free));
            *free += size_bytes;
            gaps.retain(|gap| gap.start < gap.end);
        }
        Self { places, end_bytes }
    }
}

/// Where an allocation's contents lie in `store`, when they do.
pub(crate) fn place_in(store: Store, allocation: &Allocation) -> Option<Range<u64>> {
    let Saved { offset_bytes, .. } = allocation.saved.filter(|saved| saved.store == store)?;
    Some(offset_bytes..offset_bytes + allocation.size_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_empty_arena_is_filled_from_end_to_end() {
        let layout = Layout::place(Vec::new(), [(7, 10), (3, 20), (9, 5)].into_iter());
        assert_eq!(layout, Layout { places: vec![(7, 0), (3, 10), (9, 30)], end_bytes: 35 });
    }

    #[test]
    fn gaps_between_what_is_set_aside_are_used_first() {
        let taken = vec![40..50, 10..20];
        let layout = Layout::place(taken, [(1, 15), (2, 10), (3, 10)].into_iter());
        assert_eq!(layout, Layout { places: vec![(1, 20), (2, 0), (3, 50)], end_bytes: 60 });
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
            let layout = Layout::place(taken.clone(), sizes.iter().copied().enumerate());
            let placed = layout.places.iter().map(|&(key, at)| at..at + sizes[key]);
            let mut all: Vec<_> = taken.into_iter().chain(placed).collect();
            all.sort_by_key(|range| range.start);
            prop_assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert_eq!(all.last().map_or(0, |range| range.end), layout.end_bytes);
            prop_assert_eq!(layout.places.len(), sizes.len());
        }
    }
}
