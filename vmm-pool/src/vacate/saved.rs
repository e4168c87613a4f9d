//! Reading what a pause has saved, while its memory is away.

use std::ptr::NonNull;

use crate::driver::{DeviceAddress, Driver, VaRange};
use crate::pool::Pool;
use crate::staging::Saved;

/// Why saved contents cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// The pool has no mapping that holds the whole range.
    #[error("no allocation of this process under Sublet holds all of {0}..{1}")]
    NotOurs(DeviceAddress, DeviceAddress),
    /// The memory is on its device.
    #[error("the memory at {0} is on its device: read it there, or pause it first")]
    Resident(DeviceAddress),
    /// It is away, and its contents were not kept on the host.
    #[error("the contents at {0} were not kept in host memory: their region's policy is another")]
    NotKept(DeviceAddress),
    /// The saved bytes lie in two pieces.
    #[error("the saved contents at {0} lie in two pieces of host memory: copy them out")]
    InPieces(DeviceAddress),
}

impl<D: Driver> Pool<D> {
    /// Where the saved contents of `range` lie in host memory, while its memory is away. Good until a resume of
    /// it begins; parts that were unused when it was paused hold nothing meant. Waits for a pause or resume
    /// under way.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn saved_at(&self, range: VaRange) -> Result<NonNull<u8>, SavedError> {
        let arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let saved = self.saved_place(range)?;
        arena.one_piece(saved, range.size_bytes).ok_or(SavedError::InPieces(range.start))
    }

    /// Copies the saved contents of the range from `start` on to `target`, as [`Pool::saved_at`].
    ///
    /// # Errors
    /// [`SavedError`], but for [`SavedError::InPieces`]; `target` is untouched then.
    pub fn read_saved(&self, start: DeviceAddress, target: &mut [u8]) -> Result<(), SavedError> {
        let range = VaRange::new(start, target.len() as u64);
        let arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let saved = self.saved_place(range)?;
        arena.read(saved, target);
        Ok(())
    }

    fn saved_place(&self, range: VaRange) -> Result<Saved, SavedError> {
        let tables = self.tables();
        let mapping = tables.mapping_at(range.start).filter(|m| m.range.contains(range));
        let found = mapping.and_then(|m| Some((m, tables.allocations.get(m.allocation)?)));
        let (mapping, found) = found.ok_or(SavedError::NotOurs(range.start, range.end()))?;
        if found.raw.is_some() {
            return Err(SavedError::Resident(range.start));
        }
        let saved = found.saved.ok_or(SavedError::NotKept(range.start))?;
        let offset = range.start.0 - mapping.range.start.0;
        Ok(saved.part(&(offset..offset + range.size_bytes)))
    }
}
