//! Where saved contents of an allocation lie: a list of extents, with nothing for what is zero.
//!
//! ```text
//!   allocation:  [data    ][zeros        ][data ]
//!   extents:     [at 0    ]               [at 96]      in a store; what lies between them reads as zeros
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::Store;
use crate::driver::Fingerprint;

/// A part of an allocation, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Where it begins in the allocation.
    pub(crate) start: u64,
    pub(crate) size_bytes: u64,
    /// Where it begins in the store.
    pub(crate) at: u64,
}

impl Extent {
    /// One past its last byte in the allocation.
    pub(crate) fn end(self) -> u64 {
        self.start + self.size_bytes
    }

    /// By offset in the allocation.
    pub(crate) fn part(self) -> Range<u64> {
        self.start..self.end()
    }

    /// By offset in the store.
    pub(crate) fn place(self) -> Range<u64> {
        self.at..self.at + self.size_bytes
    }

    /// What of it lies in `part`.
    pub(crate) fn within(self, part: &Range<u64>) -> Option<Self> {
        let start = self.start.max(part.start);
        let end = self.end().min(part.end);
        let size_bytes = end.checked_sub(start).filter(|size_bytes| *size_bytes > 0)?;
        Some(Self { start, size_bytes, at: self.at + (start - self.start) })
    }
}

/// Adds `next`, which begins behind all of `extents`, to the last one where it goes on in both spaces.
pub(crate) fn append(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if last.end() == next.start && last.place().end == next.at => {
            last.size_bytes += next.size_bytes;
        }
        _ => extents.push(next),
    }
}

/// Fingerprints of the pieces of one allocation, in order. The last piece may be smaller than the others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Prints {
    pub(crate) piece_bytes: u64,
    pub(crate) values: Box<[Fingerprint]>,
}

/// Where saved contents of one allocation lie, and what they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) store: Store,
    /// In order and apart. What is saved and in none of them is zero.
    pub(crate) extents: Arc<[Extent]>,
    /// What the pieces in the store hold, where that is known.
    pub(crate) prints: Option<Arc<Prints>>,
}

impl Saved {
    /// All of an allocation in one piece.
    #[cfg(test)]
    pub(crate) fn whole(store: Store, at: u64, size_bytes: u64) -> Self {
        Self { store, extents: [Extent { start: 0, size_bytes, at }].into(), prints: None }
    }

    /// Where it lies, in the order of the allocation.
    pub(crate) fn places(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.extents.iter().map(|extent| extent.place())
    }

    /// All of `part` in order: what is in the store, and what is zero.
    pub(crate) fn parts_of(&self, part: Range<u64>) -> impl Iterator<Item = Part> + '_ {
        let first = self.extents.partition_point(|extent| extent.end() <= part.start);
        let mut extents = self.extents[first..].iter();
        let mut next = extents.next().and_then(|extent| extent.within(&part));
        let mut at = part.start;
        std::iter::from_fn(move || {
            if at >= part.end {
                return None;
            }
            match next {
                Some(extent) if extent.start == at => {
                    at = extent.end();
                    next = extents.next().and_then(|extent| extent.within(&part));
                    Some(Part::Stored(extent))
                }
                _ => {
                    let end = next.map_or(part.end, |extent| extent.start);
                    let zeros = Range { start: at, end };
                    at = end;
                    Some(Part::Zeros(zeros))
                }
            }
        })
    }

    /// What of `parts` is in the store, and what is zero.
    pub(crate) fn split(&self, parts: &[Range<u64>]) -> (Vec<Extent>, Vec<Range<u64>>) {
        let (mut extents, mut zeros) = (Vec::new(), Vec::new());
        for part in parts.iter().flat_map(|part| self.parts_of(part.clone())) {
            match part {
                Part::Stored(extent) => extents.push(extent),
                Part::Zeros(range) => zeros.push(range),
            }
        }
        (extents, zeros)
    }

    /// How much of `parts` is in the store.
    pub(crate) fn stored_bytes(&self, parts: &[Range<u64>]) -> u64 {
        self.split(parts).0.iter().map(|extent| extent.size_bytes).sum()
    }
}

/// A part of an allocation whose contents are saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It lies there.
    Stored(Extent),
    /// It is zero, by offset in the allocation, and lies nowhere.
    Zeros(Range<u64>),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, size_bytes: u64, at: u64) -> Extent {
        Extent { start, size_bytes, at }
    }

    #[test]
    fn a_part_is_given_out_in_order_with_the_zeros_between() {
        let extents = [extent(10, 10, 100), extent(30, 20, 50)].into();
        let saved = Saved { store: Store::Host, extents, prints: None };
        let parts = |part| saved.parts_of(part).collect::<Vec<_>>();
        let zeros = |start, end| Part::Zeros(Range { start, end });
        let stored = |start, size, at| Part::Stored(extent(start, size, at));
        assert_eq!(
            parts(0..60),
            [zeros(0, 10), stored(10, 10, 100), zeros(20, 30), stored(30, 20, 50), zeros(50, 60)]
        );
        assert_eq!(parts(12..18), [stored(12, 6, 102)]);
        assert_eq!(parts(15..35), [stored(15, 5, 105), zeros(20, 30), stored(30, 5, 50)]);
        assert_eq!(parts(20..30), [zeros(20, 30)]);
        assert_eq!(parts(50..51), [zeros(50, 51)]);
        assert_eq!(parts(5..5), []);
        assert_eq!(saved.stored_bytes(&[0..15, 40..60]), 15);
        assert_eq!(saved.places().collect::<Vec<_>>(), [100..110, 50..70]);
    }

    #[test]
    fn neighbours_are_one_only_where_they_are_so_in_both_spaces() {
        let mut extents = vec![extent(0, 10, 0)];
        append(&mut extents, extent(10, 10, 10));
        append(&mut extents, extent(20, 10, 40));
        append(&mut extents, extent(40, 10, 50));
        assert_eq!(extents, [extent(0, 20, 0), extent(20, 10, 40), extent(40, 10, 50)]);
    }
}
