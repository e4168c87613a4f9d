//! The layout of saved contents: the places in the host arena, or in the file, where a pause puts them.
//!
//! Contents that are set aside have a place already and keep it. Other contents go into the first gap that holds them,
//! in the table's order. So a pause of everything fills the arena from end to end. If a copy of the last pause is kept,
//! the next pause of the same memory replaces it piece by piece ([`super::pieces`]). Pieces without a place get one.

use std::ops::Range;
use std::sync::Arc;

use super::pieces::{Survey, Wish};
use super::{Ledger, Row, RowTable, Rows, merged};
use crate::driver::VaRange;
use crate::ids::AllocationId;
use crate::ids::VirtualHandle;
use crate::store::{Copies, Extent, Saved, Store, append};

/// The places in one store for all contents of a selection that must be saved there.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// The allocations to be saved, in the table's order.
    pub(crate) placed: Vec<Placed>,
    /// The end of all contents in the store, old and new.
    pub(crate) end_bytes: u64,
}

/// The place for the contents of one allocation, and the parts of them that must be copied there.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) row: VirtualHandle,
    pub(crate) saved: Saved,
    /// The extents that must be copied, in order and apart.
    pub(crate) copied: Vec<Extent>,
    /// The number of its bytes that are zero.
    pub(crate) zero_bytes: u64,
    /// True if its retained copy has all this already.
    pub(crate) is_same: bool,
}

impl Placed {
    /// Counts the bytes that are copied.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.copied.iter().map(|extent| extent.size_bytes).sum()
    }
}

impl Layout {
    /// Makes the layout for all of `rows`. `survey` has the fingerprints of their contents. `copies` says which
    /// retained copies stay.
    pub(crate) fn of(
        table: &RowTable,
        rows: &Rows,
        store: Store,
        survey: &Survey,
        copies: Copies,
    ) -> Self {
        let mut taken = Vec::new();
        let mut wishes = Vec::new();
        for row in table.iter() {
            let is_wanted = rows.save_to(row, store);
            let before = row.backing().retained_in(store, copies, is_wanted);
            if is_wanted {
                let (size_bytes, parts) = (row.size_bytes(), row.copied_parts());
                let fresh = survey.of(row.handle());
                let wish = Wish::of(size_bytes, &parts, fresh, before);
                taken.extend(wish.kept.iter().map(|extent| extent.place()));
                wishes.push((row.handle(), before, wish));
            } else {
                let held = row.saved().filter(|saved| saved.store == store).or(before);
                taken.extend(held.into_iter().flat_map(Saved::places));
            }
        }
        let sizes = wishes.iter().enumerate().flat_map(|(index, (_, _, wish))| {
            wish.missing.iter().map(move |part| (index, part.end - part.start))
        });
        let Places { places, end_bytes } = Places::find(taken, sizes);
        let mut places = places.into_iter().map(|(_, at)| at);
        let placed = wishes.into_iter().map(|(row, before, wish)| {
            let new = wish.missing.iter().zip(places.by_ref()).map(|(part, at)| Extent {
                start: part.start,
                size_bytes: part.end - part.start,
                at,
            });
            placed(row, store, before, &new.collect::<Vec<_>>(), &wish)
        });
        Self { placed: placed.collect(), end_bytes }
    }

    /// Returns the places that something is copied to, in order and apart.
    pub(crate) fn copied_places(&self) -> Vec<Range<u64>> {
        let copied = self.placed.iter().flat_map(|placed| &placed.copied);
        merged(copied.map(|extent| extent.place()).collect())
    }
}

/// Turns `wish` into a [`Placed`], with `new` places for what is missing.
fn placed(
    row: VirtualHandle,
    store: Store,
    before: Option<&Saved>,
    new: &[Extent],
    wish: &Wish,
) -> Placed {
    let extents: Vec<Extent> = if new.is_empty() {
        wish.kept.clone()
    } else {
        let mut all = [wish.kept.as_slice(), new].concat();
        all.sort_by_key(|extent| extent.start);
        let mut extents = Vec::with_capacity(all.len());
        for extent in all {
            append(&mut extents, extent);
        }
        extents
    };
    let mut copied = Vec::new();
    let mut left = extents.as_slice();
    for part in &wish.changed {
        while let [first, rest @ ..] = left
            && first.end() <= part.start
        {
            left = rest;
        }
        let within = left.iter().map_while(|extent| extent.within(part));
        for extent in within {
            append(&mut copied, extent);
        }
    }
    let is_same = copied.is_empty()
        && wish.prints.is_some()
        && before.is_some_and(|before| {
            *before.extents == *extents
                && (before.prints.as_ref().zip(wish.prints.as_ref()))
                    .is_some_and(|(before, now)| before == now)
        });
    let saved = match before.filter(|_| is_same) {
        Some(before) => before.clone(),
        None => Saved { store, extents: extents.into(), prints: wish.prints.clone() },
    };
    Placed { row, saved, copied, zero_bytes: wish.zero_bytes, is_same }
}

/// Places for contents, in the gaps between the places that are used.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Places<K> {
    /// The key of each request and the start of its place, in the order of requests.
    pub(super) places: Vec<(K, u64)>,
    /// The end of all places, old and new.
    pub(super) end_bytes: u64,
}

impl<K> Places<K> {
    pub(super) fn find(mut taken: Vec<Range<u64>>, wanted: impl Iterator<Item = (K, u64)>) -> Self {
        taken.sort_unstable_by_key(|range| range.start);
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

/// Gaps in order. The search for the first gap of a size does not visit the gaps before it: a pause searches once for
/// each allocation, and there can be as many gaps as allocations.
struct Gaps {
    gaps: Vec<Range<u64>>,
    /// The sizes of the largest gaps, as a binary tree. The root is at 1. The children of `n` are `2 * n` and
    /// `2 * n + 1`. The leaves are the gaps. Each node has the larger of its children's sizes.
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

    /// Returns the start of the first gap that holds `size_bytes`, and shortens the gap by that size.
    fn take(&mut self, size_bytes: u64) -> Option<u64> {
        if self.largest_bytes[1] < size_bytes {
            return None;
        }
        let leaves = self.largest_bytes.len() / 2;
        let mut node = 1;
        while node < leaves {
            node *= 2;
            // Then the other child holds it, because the parent does.
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
    /// Returns the places in `store` of saved contents and copies, in order and apart. Places that somebody still reads
    /// count too.
    pub(crate) fn places_in(&self, store: Store) -> Vec<Range<u64>> {
        let held = self.rows.iter().filter_map(|row| row.backing().held_in(store));
        let read = self.read.upgrade();
        let read = read.iter().flat_map(|read| read.iter()).filter(|saved| saved.store == store);
        merged(held.chain(read).flat_map(Saved::places).collect())
    }

    /// Keeps the places of `read` while the returned value lives, also if their memory is freed: no other contents get
    /// them. Only one caller may use this at a time: the thread that takes the steps of pauses.
    pub(crate) fn keep_places(&mut self, read: Vec<Saved>) -> Arc<Vec<Saved>> {
        let read = Arc::new(read);
        self.read = Arc::downgrade(&read);
        read
    }

    /// Records that somebody was given the places of the copies of all that is mapped in `range`.
    pub(crate) fn lend_copies(&mut self, range: VaRange) {
        self.rows.change(self.mapped_in(range), |row| row.backing_mut().forget_prints());
    }
}

impl RowTable {
    /// Returns the end of all saved contents and copies in `store`; 0 if there are none.
    pub(crate) fn end_in(&self, store: Store) -> u64 {
        let held = self.iter().filter_map(|row| row.backing().held_in(store));
        held.flat_map(Saved::places).map(|place| place.end).max().unwrap_or(0)
    }

    /// Returns contents in host memory that may be moved, up to `most_bytes` and at least one allocation, and the bytes
    /// of all such contents. Contents at the end of host memory come first. Host memory is given back from its end, in
    /// whole chunks, whose ends `chunk_end` returns. So contents in front of any that stay are not moved: that would
    /// free no host memory.
    pub(crate) fn movable(
        &self,
        most_bytes: u64,
        chunk_end: impl Fn(u64) -> u64,
    ) -> (Vec<(AllocationId, Saved)>, u64) {
        let end = |saved: &Saved| saved.places().map(|place| place.end).max().unwrap_or(0);
        let stays = self.iter().filter(|row| row.movable().is_none());
        let stays =
            stays.filter_map(|row| row.backing().held_in(Store::Host)).map(end).max().unwrap_or(0);
        let kept_bytes = chunk_end(stays);
        let of = |row: &Row| Some((row.id(), row.movable()?.clone()));
        let mut all: Vec<_> = self.iter().filter_map(of).collect();
        all.retain(|(_, saved)| end(saved) > kept_bytes);
        all.sort_by_key(|(_, saved)| std::cmp::Reverse(end(saved)));
        let all_bytes = all.iter().map(|(_, saved)| saved.bytes()).sum();
        let mut taken = 0;
        let first = all.into_iter().take_while(|(_, saved)| {
            let is_wanted = taken == 0 || taken + saved.bytes() <= most_bytes;
            taken += saved.bytes();
            is_wanted
        });
        (first.collect(), all_bytes)
    }

    /// Records the new place of the contents of `id`. False if it is gone, or back on its device, meanwhile.
    pub(crate) fn spilled(&mut self, id: AllocationId, saved: Saved) -> bool {
        self.by_id_mut(id).is_some_and(|row| row.backing_mut().spill_to(saved))
    }

    /// Keeps the copies of restored memory for readers, for the next pause, or not at all.
    pub(crate) fn retain_copies(&mut self, rows: &Rows, for_readers: bool, for_pauses: bool) {
        for row in self.iter_mut() {
            if rows.has(row) || !row.backing().is_coming() {
                row.backing_mut().retain_copy(for_readers, for_pauses);
            }
        }
    }

    /// Forgets each copy that a save by `layout` changes, in any byte or in its place. The save is about to begin.
    /// Until all is saved, such a place has a mix of old and new contents.
    pub(crate) fn forget_copies(&mut self, layout: &Layout) {
        let changed = layout.placed.iter().filter(|placed| !placed.is_same);
        self.change(changed.map(|placed| placed.row), |row| row.backing_mut().forget_copy());
    }

    /// Forgets the copy of this allocation.
    pub(crate) fn forget_copy(&mut self, handle: VirtualHandle) {
        self.change([handle], |row| row.backing_mut().forget_copy());
    }

    /// Drops copies that only the next pause could use, except those that a pause of `rows` with `copies` keeps.
    /// Returns their size in bytes.
    pub(crate) fn give_copies_up(&mut self, rows: &Rows, copies: Copies) -> u64 {
        let mut bytes = 0;
        for row in self.iter_mut() {
            let store = row.backing().copy_store();
            let is_wanted = store.is_some_and(|store| rows.save_to(row, store));
            bytes += row.backing_mut().give_copy_up(copies, is_wanted);
        }
        bytes
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
    fn place_one_by_one(taken: &[Range<u64>], sizes: &[u64]) -> Places<VirtualHandle> {
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
        Places { places: sizes.iter().enumerate().map(place).collect(), end_bytes }
    }

    #[test]
    fn many_gaps_take_no_longer_each_than_few() {
        // One of a unit before each content; every second asks for more, so that it looks at all gaps for nothing.
        assert_not_quadratic(|count| {
            let taken: Vec<_> = (0..count as u64).map(|at| 2 * at + 1..2 * at + 2).collect();
            move || {
                let sizes = (0..count).map(|key| (row(key), 1 + (key as u64 + 1) % 2));
                Places::find(taken.clone(), sizes);
            }
        });
    }

    #[test]
    fn an_empty_arena_is_filled_from_end_to_end() {
        let layout =
            Places::find(Vec::new(), [(row(7), 10), (row(3), 20), (row(9), 5)].into_iter());
        assert_eq!(
            layout,
            Places { places: vec![(row(7), 0), (row(3), 10), (row(9), 30)], end_bytes: 35 }
        );
    }

    #[test]
    fn gaps_between_what_is_set_aside_are_used_first() {
        let taken = vec![40..50, 10..20];
        let layout = Places::find(taken, [(row(1), 15), (row(2), 10), (row(3), 10)].into_iter());
        assert_eq!(
            layout,
            Places { places: vec![(row(1), 20), (row(2), 0), (row(3), 50)], end_bytes: 60 }
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
            let layout = Places::find(taken.clone(), sizes.iter().enumerate().map(|(key, &size)| (row(key), size)));
            let placed = layout.places.iter().map(|&(key, at)| at..at + sizes[key.index()]);
            let mut all: Vec<_> = taken.into_iter().chain(placed).collect();
            all.sort_by_key(|range| range.start);
            prop_assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert_eq!(all.last().map_or(0, |range| range.end), layout.end_bytes);
            prop_assert_eq!(layout.places.len(), sizes.len());
            prop_assert_eq!(layout, one_by_one);
        }

        #[test]
        fn in_whatever_order_it_is_saved_it_takes_no_more_than_was_said(
            gaps in prop::collection::vec((0u64..50, 1u64..50), 0..20),
            sizes in prop::collection::vec((1u64..60, any::<u16>()), 0..40),
        ) {
            let mut at = 0;
            let mut taken: Vec<_> = gaps.iter().map(|(gap, size)| {
                let range = at + gap..at + gap + size;
                at = range.end;
                range
            }).collect();
            let said = at + sizes.iter().map(|(size, _)| *size).sum::<u64>();
            let mut order: Vec<usize> = (0..sizes.len()).collect();
            order.sort_by_key(|&key| sizes[key].1);
            for key in order {
                let size = sizes[key].0;
                let layout = Places::find(taken.clone(), std::iter::once((row(key), size)));
                prop_assert!(layout.end_bytes <= said);
                let place = layout.places[0].1;
                taken.push(place..place + size);
            }
        }
    }
}
