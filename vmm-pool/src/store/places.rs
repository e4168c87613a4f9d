//! The places of an allocation's saved contents: a list of extents, without the parts that are zero. Readers of the
//! contents do not need the arena's lock.
//!
//! ```text
//!   allocation:  [data    ][zeros        ][data ]
//!   extents:     [at 0    ]               [at 96]      in a store; what lies between them reads as zeros
//! ```

#![expect(unsafe_code, reason = "looks at host memory that the driver copies to and from")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::chunk::Chunk;
use super::{HeldFile, Store};
use crate::deferred::InUse;
use crate::driver::Fingerprint;
use crate::error::PoolResult;

/// A part of an allocation, and its place in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// The offset of its first byte in the allocation.
    pub(crate) start: u64,
    pub(crate) size_bytes: u64,
    /// The offset of its first byte in the store.
    pub(crate) at: u64,
}

impl Extent {
    /// Returns its end in the allocation: one past its last byte.
    pub(crate) fn end(self) -> u64 {
        self.start + self.size_bytes
    }

    /// Returns its range in the allocation.
    pub(crate) fn part(self) -> Range<u64> {
        self.start..self.end()
    }

    /// Returns its range in the store.
    pub(crate) fn place(self) -> Range<u64> {
        self.at..self.at + self.size_bytes
    }

    /// Returns the part of it inside `part`.
    pub(crate) fn within(self, part: &Range<u64>) -> Option<Self> {
        let start = self.start.max(part.start);
        let end = self.end().min(part.end);
        let size_bytes = end.checked_sub(start).filter(|size_bytes| *size_bytes > 0)?;
        Some(Self { start, size_bytes, at: self.at + (start - self.start) })
    }
}

/// Adds `next`, which begins behind all of `extents`. Merges it with the last one if both are adjacent in the
/// allocation and in the store.
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

/// The places of one allocation's saved contents, and their fingerprints if those are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) store: Store,
    /// The extents, in order and apart. Saved bytes in none of them are zero.
    pub(crate) extents: Arc<[Extent]>,
    /// The fingerprints of the pieces in the store, if they are known.
    pub(crate) prints: Option<Arc<Prints>>,
}

impl Saved {
    /// Returns its places in the store, in the order of the allocation.
    pub(crate) fn places(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.extents.iter().map(|extent| extent.place())
    }

    /// Counts its bytes that are in the store.
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.size_bytes).sum()
    }

    /// Returns all of `part` in order: parts in the store, and parts that are zero.
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

    /// Splits `parts` into extents in the store, and ranges that are zero.
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

    /// Counts the bytes of `parts` that are in the store.
    pub(crate) fn stored_bytes(&self, parts: &[Range<u64>]) -> u64 {
        self.split(parts).0.iter().map(|extent| extent.size_bytes).sum()
    }
}

/// A part of an allocation whose contents are saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The part is in the store.
    Stored(Extent),
    /// The part is zero and is in no store. The range is by offset in the allocation.
    Zeros(Range<u64>),
}

/// A piece of host memory that somebody uses. Its chunk is neither given back nor unmapped before the piece is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    chunk: Arc<Chunk>,
    /// The offset in the chunk, in bytes.
    within: usize,
    /// The range in the place that was looked up, in bytes.
    pub(crate) part: Range<u64>,
}

impl Piece {
    /// Makes the piece for `part` of a place. It begins `within` bytes into `chunk`.
    pub(super) fn new(chunk: &Arc<Chunk>, within: u64, part: Range<u64>) -> Self {
        let within = usize::try_from(within).unwrap_or(usize::MAX);
        let end = within.checked_add(usize::try_from(part.end - part.start).unwrap_or(usize::MAX));
        assert!(end.is_some_and(|end| end <= chunk.length), "beyond its chunk");
        // INVARIANT: it lies inside the chunk.
        Self { chunk: Arc::clone(chunk), within, part }
    }

    /// Returns a part of the piece, by offset.
    pub(crate) fn part(&self, part: Range<u64>) -> Self {
        assert!(part.end <= self.part.end - self.part.start, "beyond its piece");
        Self::new(&self.chunk, self.within as u64 + part.start, part)
    }

    /// Returns the address, for the driver.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: inside the chunk.
        unsafe { self.chunk.start.add(self.within) }
    }

    fn length(&self) -> usize {
        // The length fits a `usize`, as `new` has checked.
        usize::try_from(self.part.end - self.part.start).unwrap_or(0)
    }

    /// Returns a reference that keeps the piece where it is.
    pub(crate) fn in_use(&self) -> InUse {
        Arc::clone(&self.chunk) as InUse
    }

    /// Returns the bytes of the piece. No copy of the driver's may be under way there.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: live, for the chunk is; all of it can be read, and nobody writes it now.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.length()) }
    }
}

/// The place of a part of saved contents.
#[derive(Clone, Debug)]
pub(crate) enum Located {
    /// In no store: this number of bytes is zero.
    Zeros(u64),
    /// In host memory.
    InMemory(Piece),
    /// In the file.
    InFile(HeldFile, Extent),
}

impl Located {
    fn size_bytes(&self) -> u64 {
        match self {
            Self::Zeros(bytes) => *bytes,
            Self::InMemory(piece) => piece.part.end - piece.part.start,
            Self::InFile(_, extent) => extent.size_bytes,
        }
    }

    /// Copies all of `located` to `target`, which has the same size. If the driver copies to a piece meanwhile, the
    /// bytes read there are undefined.
    ///
    /// # Errors
    /// [`crate::PoolError::FileUnreadable`], [`crate::PoolError::FileCorrupted`].
    pub(crate) fn read(located: &[Self], target: &mut [u8]) -> PoolResult<()> {
        let mut left = target;
        for part in located {
            // The parts make up exactly the target.
            let length = usize::try_from(part.size_bytes()).unwrap_or(usize::MAX).min(left.len());
            let (bytes, rest) = left.split_at_mut(length);
            match part {
                Self::Zeros(_) => bytes.fill(0),
                // SAFETY: the piece is live and as long, and `target` is no part of its chunk.
                Self::InMemory(piece) => unsafe {
                    bytes.as_mut_ptr().copy_from_nonoverlapping(piece.start().as_ptr(), length);
                },
                Self::InFile(file, extent) => file.read(extent.at, bytes)?,
            }
            left = rest;
        }
        Ok(())
    }
}

/// A part of an allocation's saved contents, to be read. While this lives, no other contents get its places, and a
/// pager does not overwrite them.
#[derive(Debug)]
pub struct SavedPart {
    pub(crate) located: Vec<Located>,
    pub(crate) _kept: Arc<Vec<Saved>>,
}

impl SavedPart {
    /// Returns all bytes in order, in pieces. They are borrowed from host memory if all are there, or else read into
    /// `buffer`.
    ///
    /// # Errors
    /// [`crate::PoolError::FileUnreadable`], [`crate::PoolError::FileCorrupted`].
    pub fn read<'a>(&'a self, buffer: &'a mut Vec<u8>) -> PoolResult<Vec<&'a [u8]>> {
        // The driver copies nothing to or from these pieces now.
        let in_memory = |located: &'a Located| {
            if let Located::InMemory(piece) = located { Some(piece.bytes()) } else { None }
        };
        if let Some(pieces) = self.located.iter().map(in_memory).collect() {
            return Ok(pieces);
        }
        let size_bytes: u64 = self.located.iter().map(Located::size_bytes).sum();
        buffer.resize(usize::try_from(size_bytes).unwrap_or(usize::MAX), 0);
        Located::read(&self.located, buffer)?;
        Ok(vec![buffer])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Saved {
        /// All of an allocation in one piece.
        pub(crate) fn whole(store: Store, at: u64, size_bytes: u64) -> Self {
            Self { store, extents: [extent(0, size_bytes, at)].into(), prints: None }
        }
    }

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
