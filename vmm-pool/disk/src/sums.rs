//! Checksums of the file's contents. They detect a disk that returns other bytes, before anybody uses those bytes.
//!
//! Each checksum covers a block: at most [`BLOCK_BYTES`] of one allocation. So freeing one allocation leaves the blocks
//! of others whole, and a reader of a few bytes need not read much more.
//!
//! Lock order: `blocks` is a leaf.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

use vmm_pool::sync::lock;

/// The size of the longest block, in bytes.
const BLOCK_BYTES: u64 = 2 << 20;

/// A block's range in the file, and the CRC-32 of its bytes (the one of zlib).
pub(super) type Block = (Range<u64>, u32);

/// The blocks of a file, by their first offset.
#[derive(Debug, Default)]
pub(super) struct Sums(Mutex<BTreeMap<u64, Block>>);

impl Sums {
    /// Records the checksums of `bytes`, which are written at `offset_bytes`. They are the contents of allocations, one
    /// behind the other, with the lengths `lengths_bytes`.
    pub(super) fn note(&self, offset_bytes: u64, bytes: &[u8], lengths_bytes: &[u64]) {
        let mut made = Vec::new();
        let (mut at, mut rest) = (offset_bytes, bytes);
        for &length_bytes in lengths_bytes {
            let end = at + length_bytes;
            while at < end && !rest.is_empty() {
                let next = end.min((at + 1).next_multiple_of(BLOCK_BYTES));
                let length = usize::try_from(next - at).unwrap_or(rest.len()).min(rest.len());
                let (block, behind) = rest.split_at(length);
                made.push((at..next, crc32fast::hash(block)));
                (at, rest) = (next, behind);
            }
        }
        let Some(last) = made.last() else { return };
        self.forget(&(offset_bytes..last.0.end));
        lock(&self.0).extend(made.into_iter().map(|block| (block.0.start, block)));
    }

    /// Returns the blocks that overlap `place`, in order.
    pub(super) fn over(&self, place: &Range<u64>) -> Vec<Block> {
        let blocks = lock(&self.0);
        let before = blocks.range(..place.start).next_back();
        let before = before.filter(|(_, block)| block.0.end > place.start);
        before
            .into_iter()
            .chain(blocks.range(place.clone()))
            .map(|(_, block)| block.clone())
            .collect()
    }

    /// Removes the blocks that overlap `place`: the file no longer has those contents.
    pub(super) fn forget(&self, place: &Range<u64>) {
        let gone = self.over(place);
        let mut blocks = lock(&self.0);
        for (block, _) in gone {
            blocks.remove(&block.start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(sums: &Sums, place: Range<u64>) -> Vec<Range<u64>> {
        sums.over(&place).into_iter().map(|(block, _)| block).collect()
    }

    #[test]
    fn blocks_end_with_their_allocation_and_at_multiples_of_their_size() {
        let sums = Sums::default();
        let length = 3 * BLOCK_BYTES + 100;
        let bytes: Vec<u8> = (0..length).map(|index| u8::try_from(index % 251).unwrap()).collect();
        let begin = BLOCK_BYTES / 2;
        sums.note(begin, &bytes, &[100, length - 100]);
        let expected = [
            begin..begin + 100,
            begin + 100..BLOCK_BYTES,
            BLOCK_BYTES..2 * BLOCK_BYTES,
            2 * BLOCK_BYTES..3 * BLOCK_BYTES,
            3 * BLOCK_BYTES..begin + length,
        ];
        assert_eq!(places(&sums, 0..u64::MAX), expected);
        for (block, crc32) in sums.over(&(0..u64::MAX)) {
            let [start, end] =
                [block.start, block.end].map(|at| usize::try_from(at - begin).unwrap());
            let mut own = bytes[start..end].to_vec();
            assert_eq!(crc32fast::hash(&own), crc32);
            own[7] ^= 1;
            assert_ne!(crc32fast::hash(&own), crc32);
        }
        // A byte in the middle of one, and the seam between two.
        assert_eq!(places(&sums, BLOCK_BYTES + 5..BLOCK_BYTES + 6), [expected[2].clone()]);
        assert_eq!(places(&sums, BLOCK_BYTES - 1..BLOCK_BYTES + 1).len(), 2);
        assert_eq!(places(&sums, 0..begin), [Range { start: 0, end: 0 }; 0]);
    }

    #[test]
    fn what_is_written_again_or_given_up_is_forgotten() {
        let sums = Sums::default();
        sums.note(0, &[1; 30], &[10, 10, 10]);
        sums.note(10, &[2; 10], &[10]);
        assert_eq!(places(&sums, 0..100), [0..10, 10..20, 20..30]);
        assert_eq!(sums.over(&(10..20))[0].1, crc32fast::hash(&[2; 10]));
        sums.forget(&(0..20));
        assert_eq!(places(&sums, 0..100), [Range { start: 20, end: 30 }]);
        sums.note(15, &[3; 10], &[10]);
        assert_eq!(places(&sums, 0..100), [Range { start: 15, end: 25 }]);
    }
}
