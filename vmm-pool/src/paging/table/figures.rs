//! What a report says of a table.

use super::{Chunk, Place, Table};

impl Table {
    /// Where each chunk is, as [`crate::paging::PageReport::chunks`] has it.
    pub(in crate::paging) fn letters(&self) -> String {
        let letter = |chunk: &Chunk| match chunk.place {
            Place::Coming => 'i',
            Place::Away if chunk.spans == 0 => '-',
            Place::Away => 'a',
            Place::Here | Place::Going if chunk.coming.is_some() => 'i',
            Place::Here | Place::Going if chunk.out.is_some() => 'o',
            Place::Here | Place::Going if chunk.is_clean() => 'h',
            Place::Here | Place::Going => 'w',
        };
        self.chunks.iter().map(letter).collect()
    }

    /// Chunks of spans.
    pub(in crate::paging) fn owned(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.spans > 0).count()
    }

    /// Chunks that may not leave.
    pub(in crate::paging) fn staying(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.stays.is_some()).count()
    }
}
