//! The figures of a chunk for a report.

use super::{Chunk, ChunkPlace};

impl Chunk {
    /// Its place, as [`crate::paging::PageReport::chunks`] has it.
    pub(in crate::paging) fn letter(&self) -> char {
        match self.place {
            ChunkPlace::Coming => 'i',
            ChunkPlace::Away if self.spans == 0 => '-',
            ChunkPlace::Away => 'a',
            ChunkPlace::Here | ChunkPlace::Going if self.coming.is_some() => 'i',
            ChunkPlace::Here | ChunkPlace::Going if self.out.is_some() => 'o',
            ChunkPlace::Here | ChunkPlace::Going if self.is_clean() => 'h',
            ChunkPlace::Here | ChunkPlace::Going => 'w',
        }
    }

    /// Is it a part of a span?
    pub(in crate::paging) fn is_owned(&self) -> bool {
        self.spans > 0
    }

    /// May it not leave?
    pub(in crate::paging) fn stays(&self) -> bool {
        self.stays.is_some()
    }
}
