//! The pieces of an allocation that a pause has to save. The pause leaves out pieces that are zero, and pieces that a
//! copy in host memory has already. It saves the rest.
//!
//! | piece | pause | resume |
//! | --- | --- | --- |
//! | zero (only zeros have this fingerprint) | no place, no copy | filled by the device |
//! | as in the copy that host memory still has | keeps its place, no copy | copied back |
//! | anything else | copied to its place, or to a new one | copied back |
//!
//! The comparison is of contents: it does not matter where memory was mapped meanwhile. The retained copy of a row is
//! forgotten before any of it is overwritten. A new copy is valid only when a resume commits. So no fingerprint stays
//! for bytes that are gone. A copy is also forgotten when somebody was given its place to read, and when a pause lacks
//! the room. Memory that may not be readable as a whole, as far as the ledger knows, is copied as a whole: a kernel
//! that reads memory without access rights ends its context.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::driver::Fingerprint;
use crate::ids::VirtualHandle;
use crate::store::{Extent, Prints, Saved, append};

/// The most unchanged bytes between changed ones that are copied too: for fewer bytes, one copy more costs as much as
/// the bytes.
const BRIDGED_BYTES_MAX: u64 = 128 << 10;

/// The fingerprints of device memory while the devices stand still. They cover the memory that was read.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    prints: HashMap<VirtualHandle, Arc<Prints>>,
}

impl Survey {
    /// Returns the fingerprints of `row`, if it was read.
    pub(crate) fn of(&self, row: VirtualHandle) -> Option<&Arc<Prints>> {
        self.prints.get(&row)
    }

    pub(crate) fn insert(&mut self, row: VirtualHandle, prints: Prints) {
        self.prints.insert(row, Arc::new(prints));
    }

    /// Removes all fingerprints, because they are not valid any more.
    pub(crate) fn clear(&mut self) {
        self.prints.clear();
    }
}

/// The work that is needed to save one allocation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wish {
    /// The extents that keep their places.
    pub(crate) kept: Vec<Extent>,
    /// The parts that need a place.
    pub(crate) missing: Vec<Range<u64>>,
    /// The parts that must be copied: all that is missing, and all that has changed.
    pub(crate) changed: Vec<Range<u64>>,
    /// The size of the parts that are left out because they are zero, in bytes.
    pub(crate) zero_bytes: u64,
    /// The fingerprints of the pieces; none if they are unknown.
    pub(crate) prints: Option<Arc<Prints>>,
}

impl Wish {
    /// Computes the work to save `parts` of an allocation of `size_bytes`. `before` is its last copy, and `fresh` has
    /// the fingerprints of its contents now.
    pub(crate) fn of(
        size_bytes: u64,
        parts: &[Range<u64>],
        fresh: Option<&Arc<Prints>>,
        before: Option<&Saved>,
    ) -> Self {
        let Some(fresh) = fresh else {
            return Self::without_survey(size_bytes, parts, before);
        };
        let known = before.and_then(|before| before.prints.as_ref());
        let known = known.filter(|known| known.piece_bytes == fresh.piece_bytes);
        let is_whole = matches!(parts, [only] if *only == (0..size_bytes));
        if let (Some(before), Some(known), true) = (before, known, is_whole)
            && known.values == fresh.values
        {
            let kept = before.extents.to_vec();
            let held: u64 = kept.iter().map(|extent| extent.size_bytes).sum();
            let prints = Some(Arc::clone(known));
            return Self { kept, zero_bytes: size_bytes - held, prints, ..Self::default() };
        }
        let mut pieces = Pieces::new(before, known.map(Arc::as_ref));
        let mut values = None;
        let mut wanted = parts.iter().peekable();
        let begins = (0..size_bytes).step_by(usize::try_from(fresh.piece_bytes).unwrap_or(1));
        for (index, (begin, print)) in begins.zip(&fresh.values).enumerate() {
            let piece = begin..(begin + fresh.piece_bytes).min(size_bytes);
            while wanted.next_if(|part| part.end <= piece.start).is_some() {}
            if wanted.peek().is_some_and(|part| part.start < piece.end) {
                pieces.add(index, piece, *print);
            } else {
                // Nobody needs this piece: other contents may get its place from now on.
                let values = values.get_or_insert_with(|| fresh.values.clone());
                values[index] = Fingerprint::UNKNOWN;
            }
        }
        let piece_bytes = fresh.piece_bytes;
        let prints = match values {
            Some(values) => Arc::new(Prints { piece_bytes, values }),
            None => Arc::clone(fresh),
        };
        Self { prints: Some(prints), ..pieces.wish }
    }

    /// Computes the work without fingerprints. All of `parts` is copied, to one place, or to the old places and new
    /// ones for the rest.
    fn without_survey(size_bytes: u64, parts: &[Range<u64>], before: Option<&Saved>) -> Self {
        let kept = before.map(|before| before.extents.to_vec()).unwrap_or_default();
        let mut missing = Vec::new();
        let mut begin = 0;
        for extent in &kept {
            missing.push(begin..extent.start);
            begin = extent.end();
        }
        missing.push(begin..size_bytes);
        missing.retain(|part| part.start < part.end);
        Self { kept, missing, changed: parts.to_vec(), ..Self::default() }
    }
}

/// Pieces of an allocation, added in order.
struct Pieces<'a> {
    held: &'a [Extent],
    known: Option<&'a Prints>,
    wish: Wish,
    /// The last run of adjacent pieces that are all saved.
    data_since: Option<Range<u64>>,
}

impl<'a> Pieces<'a> {
    fn new(before: Option<&'a Saved>, known: Option<&'a Prints>) -> Self {
        let held = before.map(|before| &*before.extents).unwrap_or_default();
        Self { held, known, wish: Wish::default(), data_since: None }
    }

    fn add(&mut self, index: usize, piece: Range<u64>, print: Fingerprint) {
        if print.is_zero() {
            self.wish.zero_bytes += piece.end - piece.start;
            return;
        }
        match &mut self.data_since {
            Some(run) if run.end == piece.start => run.end = piece.end,
            run => *run = Some(piece.clone()),
        }
        while let [first, rest @ ..] = self.held
            && first.end() <= piece.start
        {
            self.held = rest;
        }
        let held = self.held.first().and_then(|extent| extent.within(&piece));
        let whole = held.filter(|extent| extent.part() == piece);
        let Some(extent) = whole else {
            extend(&mut self.wish.missing, piece.clone());
            return self.add_changed(piece);
        };
        append(&mut self.wish.kept, extent);
        let before = self.known.and_then(|known| known.values.get(index));
        if before != Some(&print) {
            self.add_changed(piece);
        }
    }

    fn add_changed(&mut self, piece: Range<u64>) {
        let data_start = self.data_since.as_ref().map_or(piece.start, |run| run.start);
        match self.wish.changed.last_mut() {
            Some(last) if last.end >= data_start && piece.start - last.end <= BRIDGED_BYTES_MAX => {
                last.end = piece.end;
            }
            _ => self.wish.changed.push(piece),
        }
    }
}

fn extend(parts: &mut Vec<Range<u64>>, next: Range<u64>) {
    match parts.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => parts.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::assert_not_quadratic;
    use crate::store::Store;

    const PIECE: u64 = 64 << 10;

    fn prints(bytes: &[u8]) -> Arc<Prints> {
        let of = |byte: &u8| Fingerprint::of(&[*byte; 16]);
        Arc::new(Prints { piece_bytes: PIECE, values: bytes.iter().map(of).collect() })
    }

    fn pieces(range: Range<u64>) -> Range<u64> {
        range.start * PIECE..range.end * PIECE
    }

    fn extent(start: u64, count: u64, at: u64) -> Extent {
        Extent { start: start * PIECE, size_bytes: count * PIECE, at: at * PIECE }
    }

    fn saved(extents: &[Extent], bytes: &[u8]) -> Saved {
        Saved { store: Store::Host, extents: extents.into(), prints: Some(prints(bytes)) }
    }

    fn wish(parts: &[Range<u64>], fresh: &[u8], before: Option<&Saved>) -> Wish {
        Wish::of(fresh.len() as u64 * PIECE, parts, Some(&prints(fresh)), before)
    }

    #[test]
    fn zeros_need_no_place_and_the_rest_one_for_each_run() {
        let wish = wish(&[pieces(0..6)], &[0, 1, 2, 0, 0, 3], None);
        assert_eq!(wish.missing, [pieces(1..3), pieces(5..6)]);
        assert_eq!(wish.changed, wish.missing);
        assert_eq!((wish.zero_bytes, wish.kept.len()), (3 * PIECE, 0));
    }

    #[test]
    fn what_a_copy_has_is_not_copied_again() {
        let before = saved(&[extent(0, 2, 7), extent(3, 1, 20)], &[1, 2, 0, 3]);
        let same = wish(&[pieces(0..4)], &[1, 2, 0, 3], Some(&before));
        assert_eq!(same.kept, [extent(0, 2, 7), extent(3, 1, 20)]);
        assert_eq!((same.missing.len(), same.changed.len(), same.zero_bytes), (0, 0, PIECE));

        // One has changed, one is zero, and one is zero no more.
        let after = wish(&[pieces(0..4)], &[1, 0, 4, 5], Some(&before));
        assert_eq!(after.kept, [extent(0, 1, 7), extent(3, 1, 20)]);
        assert_eq!(after.missing, [pieces(2..3)]);
        assert_eq!(after.changed, [pieces(2..4)]);
    }

    #[test]
    fn little_that_is_unchanged_between_changes_is_copied_along() {
        let bytes = [1; 12];
        let before = saved(&[extent(0, 12, 0)], &bytes);
        let mut after = bytes;
        for changed in [0, 3, 7, 8] {
            after[changed] = 2;
        }
        let wish = wish(&[pieces(0..12)], &after, Some(&before));
        assert_eq!(wish.changed, [pieces(0..4), pieces(7..9)]);
        // Zeros between are none of it.
        let before = saved(&[extent(0, 1, 0), extent(2, 1, 1)], &[1, 0, 1]);
        let wish = super::tests::wish(&[pieces(0..3)], &[2, 0, 2], Some(&before));
        assert_eq!(wish.changed, [pieces(0..1), pieces(2..3)]);
    }

    #[test]
    fn what_nobody_needs_has_no_place_and_counts_as_unknown() {
        let before = saved(&[extent(0, 4, 0)], &[1, 2, 3, 4]);
        // Half of the second piece is of worth.
        let parts = [0..PIECE + PIECE / 2, 3 * PIECE..4 * PIECE];
        let wish = wish(&parts, &[1, 2, 3, 4], Some(&before));
        assert_eq!(wish.kept, [extent(0, 2, 0), extent(3, 1, 3)]);
        assert_eq!((wish.changed.len(), wish.missing.len()), (0, 0));
        let known: Vec<_> =
            wish.prints.unwrap().values.iter().map(|print| print.is_known()).collect();
        assert_eq!(known, [true, true, false, true]);
    }

    #[test]
    fn a_copy_in_other_pieces_is_a_place_and_no_more() {
        let mut before = saved(&[extent(0, 2, 5)], &[1, 2]);
        before.prints = Some(Arc::new(Prints {
            piece_bytes: 2 * PIECE,
            ..Prints { piece_bytes: 0, values: prints(&[1]).values.clone() }
        }));
        let wish = wish(&[pieces(0..2)], &[1, 2], Some(&before));
        assert_eq!((wish.kept, wish.changed), (vec![extent(0, 2, 5)], vec![pieces(0..2)]));
    }

    #[test]
    fn many_pieces_take_no_longer_each_than_few() {
        // Every second one has changed, and every third is zero.
        assert_not_quadratic(|count| {
            let values = |seed: u8| -> Vec<u8> {
                let value = |index: usize| match (index % 3, index % 2) {
                    (0, _) => 0,
                    (_, 0) => seed,
                    (_, _) => 1,
                };
                (0..count).map(value).collect()
            };
            let size_bytes = count as u64 * PIECE;
            let first = Wish::of(
                size_bytes,
                &[Range { start: 0, end: size_bytes }],
                Some(&prints(&values(2))),
                None,
            );
            let place = |part: &Range<u64>| Extent {
                start: part.start,
                size_bytes: part.end - part.start,
                at: part.start,
            };
            let before = Saved {
                store: Store::Host,
                extents: first.missing.iter().map(place).collect(),
                prints: first.prints,
            };
            let fresh = prints(&values(3));
            move || {
                let parts = [Range { start: 0, end: size_bytes }];
                let wish = Wish::of(size_bytes, &parts, Some(&fresh), Some(&before));
                assert!(wish.missing.is_empty() && !wish.changed.is_empty());
            }
        });
    }

    #[test]
    fn without_a_look_all_is_copied_and_what_has_no_place_gets_one() {
        let whole = Wish::of(4 * PIECE, &[Range { start: PIECE, end: 2 * PIECE }], None, None);
        assert_eq!((whole.missing, whole.changed), (vec![pieces(0..4)], vec![pieces(1..2)]));
        let before = saved(&[extent(1, 1, 9), extent(3, 1, 2)], &[0, 1, 0, 2]);
        let again = Wish::of(4 * PIECE, &[pieces(0..4)], None, Some(&before));
        assert_eq!(again.missing, [pieces(0..1), pieces(2..3)]);
        assert_eq!((again.kept, again.changed), (before.extents.to_vec(), vec![pieces(0..4)]));
        assert_eq!(again.prints, None);
    }
}
