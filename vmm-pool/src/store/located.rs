//! Where saved contents lie, and reading them there. The arena is not locked meanwhile.

#![expect(unsafe_code, reason = "looks at host memory that the driver copies to and from")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Extent;
use super::chunk::Chunk;
use super::disk::ContentsFile;
use crate::deferred::InUse;
use crate::error::PoolResult;

/// A piece of host memory that somebody uses. Its chunk is neither given back nor unmapped before this is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    chunk: Arc<Chunk>,
    /// Into the chunk, in bytes.
    within: usize,
    /// By offset in the place that was looked up, in bytes.
    pub(crate) part: Range<u64>,
}

impl Piece {
    /// `part` of a place, which lies `within` bytes into `chunk`.
    pub(super) fn new(chunk: &Arc<Chunk>, within: u64, part: Range<u64>) -> Self {
        let within = usize::try_from(within).unwrap_or(usize::MAX);
        let end = within.checked_add(usize::try_from(part.end - part.start).unwrap_or(usize::MAX));
        assert!(end.is_some_and(|end| end <= chunk.length), "beyond its chunk");
        // INVARIANT: it lies inside the chunk.
        Self { chunk: Arc::clone(chunk), within, part }
    }

    /// A part of it, by offset.
    pub(super) fn part(&self, part: Range<u64>) -> Self {
        assert!(part.end <= self.part.end - self.part.start, "beyond its piece");
        Self::new(&self.chunk, self.within as u64 + part.start, part)
    }

    /// For the driver.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: inside the chunk.
        unsafe { self.chunk.start.add(self.within) }
    }

    fn length(&self) -> usize {
        // As long as `usize` says, which `new` has seen.
        usize::try_from(self.part.end - self.part.start).unwrap_or(0)
    }

    /// What keeps it where it is.
    pub(crate) fn in_use(&self) -> InUse {
        Arc::clone(&self.chunk) as InUse
    }

    /// What lies there. No copy of the driver's may be under way there.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: live, for the chunk is; all of it can be read, and nobody writes it now.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.length()) }
    }
}

/// Where a part of saved contents lies.
#[derive(Clone, Debug)]
pub(crate) enum Located {
    /// Nowhere: so many bytes are zero.
    Zeros(u64),
    /// In host memory.
    InMemory(Piece),
    /// In the file.
    InFile(Arc<ContentsFile>, Extent),
}

impl Located {
    fn size_bytes(&self) -> u64 {
        match self {
            Self::Zeros(bytes) => *bytes,
            Self::InMemory(piece) => piece.part.end - piece.part.start,
            Self::InFile(_, extent) => extent.size_bytes,
        }
    }

    /// Copies all of `located` to `target`, which is as long. What a driver is copying there meanwhile is read as nothing meant.
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
                Self::InFile(file, extent) => file.read(extent.at, bytes, false)?,
            }
            left = rest;
        }
        Ok(())
    }
}
