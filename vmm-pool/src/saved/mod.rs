//! Reads contents that a pause has saved, while their memory is off its device. Moves such contents to the file.

mod spill;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

pub use spill::Spilled;

use crate::driver::{DeviceAddress, Driver, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::ids::AllocationId;
use crate::ledger::Row;
use crate::pool::{HostMemory, Pool};
use crate::store::{Located, Part, Saved, SavedPart, Store};

/// The reason why saved contents cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// `sublet.host_copy` got a range that is not wholly memory that Sublet keeps. Nothing was copied. Give the
    /// address and size of an allocation.
    #[error("no allocations of this process under Sublet hold all of {0}..{1}")]
    NotOurs(DeviceAddress, DeviceAddress),
    /// `sublet.host_copy` reads saved contents, and this memory is on the GPU. Nothing was copied. Read it there, or
    /// pause it first.
    #[error("the memory at {0} is on its device: read it there, or pause it first")]
    Resident(DeviceAddress),
    /// The contents were discarded, or are in a file. In C, `sublet_host_copy_out` reads files. Nothing was copied.
    #[error("the contents at {0} were not kept in host memory: their region's policy is another")]
    NotKept(DeviceAddress),
    /// The saved bytes lie in several pieces, or some are zero and have no place. Nothing was copied. In C, call
    /// `sublet_host_copy_out`; Python does that for you.
    #[error("the saved contents at {0} lie in several pieces of host memory: copy them out")]
    InPieces(DeviceAddress),
    /// The saved contents are in a file, and the disk did not read them. Its answer follows. Nothing was copied.
    #[error("the saved contents at {0} cannot be read from their file: {1}")]
    Unreadable(DeviceAddress, std::io::ErrorKind),
}

/// A part of one allocation whose contents are saved.
struct Piece {
    saved: Saved,
    part: Range<u64>,
}

impl PartialEq for Piece {
    /// Are these the same contents, which nobody has overwritten since?
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.saved.extents, &other.saved.extents) && self.part == other.part
    }
}

/// Reads contents that pauses have saved.
#[derive(Debug)]
pub struct SavedContents<'a, D: Driver> {
    pool: &'a Pool<D>,
    /// True if the copy for readers is read too, of memory that is back on its device.
    or_retained: bool,
}

impl<D: Driver> Pool<D> {
    /// Returns a reader of the saved contents of memory that is off its device.
    pub fn saved(&self) -> SavedContents<'_, D> {
        SavedContents { pool: self, or_retained: false }
    }

    /// Returns a reader that also reads the copy of the last pause, while memory is back on its device. Such a copy
    /// exists if copies are kept ([`crate::CopyPolicy::retain`]), until the next pause or resume of the memory begins.
    pub fn saved_or_retained(&self) -> SavedContents<'_, D> {
        SavedContents { pool: self, or_retained: true }
    }
}

impl<D: Driver> SavedContents<'_, D> {
    /// Returns the place in host memory of the contents of `range`. The place is valid until a resume of this memory
    /// begins. Parts that were unused during the pause have undefined contents. The call fails while a pause or resume
    /// is under way. The next pause copies all of `range` again, whether or not it has changed.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn at(&self, range: VaRange) -> Result<NonNull<u8>, SavedError> {
        let arena = self.pool.host_memory().arena();
        if self.pool.gate().is_shut() {
            // The memory is being moved, so a place returned now would be invalid soon.
            return Err(SavedError::Resident(range.start));
        }
        let pieces = self.pieces(range)?;
        if pieces.iter().any(|piece| piece.saved.store == Store::File) {
            return Err(SavedError::NotKept(range.start));
        }
        let parts = pieces.iter().flat_map(|piece| piece.saved.parts_of(piece.part.clone()));
        let places = parts.map(|part| match part {
            Part::Stored(extent) => Some(extent.place()),
            Part::Zeros(_) => None,
        });
        let place = places.reduce(|before, next| {
            let (before, next) = (before?, next?);
            (before.end == next.start).then_some(before.start..next.end)
        });
        let found = place.flatten().map(|place| arena.pieces_of(&place)).unwrap_or_default();
        let [found] = &found[..] else { return Err(SavedError::InPieces(range.start)) };
        let found = found.start();
        // The caller can write to the place. The next pause must not treat these contents as unchanged.
        self.pool.ledger().lend_copies(range);
        Ok(found)
    }

    /// Copies the contents from address `start` on to `target`, also contents that are in a file.
    ///
    /// # Errors
    /// [`SavedError`], but not [`SavedError::InPieces`]. The contents of `target` are then undefined.
    pub fn read(&self, start: DeviceAddress, target: &mut [u8]) -> Result<(), SavedError> {
        let range = VaRange::new(start, target.len() as u64);
        let refused = |error| {
            let kind = if let PoolError::FileUnreadable { source, .. } = &error {
                source.kind()
            } else if let PoolError::FileCorrupted { .. } = &error {
                std::io::ErrorKind::InvalidData
            } else {
                return SavedError::NotKept(start);
            };
            SavedError::Unreadable(start, kind)
        };
        loop {
            let (pieces, located) = {
                let arena = self.pool.host_memory().arena();
                let pieces = self.pieces(range)?;
                let located =
                    pieces.iter().map(|piece| arena.locate(&piece.saved, piece.part.clone()));
                let located: PoolResult<Vec<Vec<Located>>> = located.collect();
                (pieces, located.map_err(refused)?.concat())
            };
            let read = Located::read(&located, target);
            // A pause may have put other contents in these places meanwhile.
            if self.pieces(range)? == pieces {
                return read.map_err(refused);
            }
        }
    }

    /// Finds the pieces with the contents of `range`. The range may span several allocations that are mapped side by
    /// side, as blocks of expandable segments are.
    fn pieces(&self, range: VaRange) -> Result<Vec<Piece>, SavedError> {
        let ledger = self.pool.ledger();
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end() {
            let found = ledger.mapped_at(at);
            let (mapping, row) = found.ok_or(SavedError::NotOurs(range.start, range.end()))?;
            let saved = if row.is_resident() {
                let retained = row.backing().retained().filter(|_| self.or_retained);
                retained.ok_or(SavedError::Resident(at))?.clone()
            } else {
                row.saved().ok_or(SavedError::NotKept(at))?.clone()
            };
            let mapped = mapping.range();
            let begin = at.0 - mapped.start.0;
            let end = mapped.end().0.min(range.end().0) - mapped.start.0;
            pieces.push(Piece { saved, part: begin..end });
            at = DeviceAddress(mapped.start.0 + end);
        }
        Ok(pieces)
    }
}

impl<D: Driver> HostMemory<D> {
    /// Finds the place of a part of an allocation's saved contents. None if the allocation is gone, or has no saved
    /// contents. Call it while no step of a pause or resume is under way.
    ///
    /// # Errors
    /// [`PoolError::FileUnreadable`] if there is no file.
    pub fn part_of(&self, id: AllocationId, part: Range<u64>) -> PoolResult<Option<SavedPart>> {
        let arena = self.arena();
        let mut ledger = self.holdings.ledger();
        let saved = ledger.rows.by_id(id).and_then(Row::saved).cloned();
        let Some(saved) = saved else { return Ok(None) };
        let located = arena.locate(&saved, part)?;
        Ok(Some(SavedPart { located, _kept: ledger.keep_places(vec![saved]) }))
    }
}
