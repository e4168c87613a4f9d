//! What a report says of a table.

use super::{Chunk, ChunkPlace, Chunks};

impl Chunks {
    /// Where each chunk is, as [`crate::paging::PageReport::chunks`] has it.
    pub(in crate::paging) fn letters(&self) -> String {
        let letter = |chunk: &Chunk| match chunk.place {
            ChunkPlace::Coming => 'i',
            ChunkPlace::Away if chunk.spans == 0 => '-',
            ChunkPlace::Away => 'a',
            ChunkPlace::Here | ChunkPlace::Going if chunk.coming.is_some() => 'i',
            ChunkPlace::Here | ChunkPlace::Going if chunk.out.is_some() => 'o',
            ChunkPlace::Here | ChunkPlace::Going if chunk.is_clean() => 'h',
            ChunkPlace::Here | ChunkPlace::Going => 'w',
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
