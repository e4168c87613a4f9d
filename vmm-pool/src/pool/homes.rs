//! The rows of paged memory, which leaves its device and comes back chunk by chunk while its process runs. The caller
//! that moves a chunk has a [`StillChunk`](crate::StillChunk) of it.

use super::{Pool, new_id};
use crate::driver::{AccessDesc, AllocationProp, DeviceOrdinal, Driver, VaRange};
use crate::error::PoolResult;
use crate::ids::VirtualHandle;
use crate::ledger::{Class, NewRow, Origin, Row};

impl<D: Driver> Pool<D> {
    /// Adds a chunk whose home is mapped at `range`. It is off its device and nothing of it is saved, so it is zero.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    pub fn insert_with_home(
        &self,
        device: DeviceOrdinal,
        range: VaRange,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let (size_bytes, prop) = (range.size_bytes, frame_prop(device));
        let id = new_id(size_bytes, Some(device))?;
        let new = NewRow { id, size_bytes, prop, origin: Origin::Own, class };
        Ok(self.ledger().insert_with_home(new, range, &[AccessDesc::read_write(device)]))
    }

    /// Removes the chunk and its home. The chunk is mapped nowhere.
    pub fn remove_with_home(&self, row: VirtualHandle) {
        let mut ledger = self.ledger();
        let starts: Vec<_> = ledger.rows.get(row).into_iter().flat_map(Row::mapped_at).collect();
        let mut garbage = ledger.forget_mappings(&starts);
        garbage.extend(ledger.drop_reference(row).ok().flatten());
        drop(ledger);
        self.dispose_quietly(garbage);
    }

    /// Must the chunk stay at its home? Other holders of its pages do not wait for the caller that moves it. A pin does
    /// not hold a chunk that `is_given_up`: its memory is released, and its user has freed it.
    pub fn stays_home(&self, row: VirtualHandle, is_given_up: bool) -> bool {
        self.ledger().rows.get(row).is_some_and(|row| {
            let is_pinned = row.reason_to_stay().is_some() && !is_given_up;
            is_pinned || row.is_shared() || row.mapped_at().len() > 1
        })
    }

    /// Does the chunk have a place of its own in host memory?
    pub fn has_own_place(&self, row: VirtualHandle) -> bool {
        self.ledger().rows.get(row).is_some_and(Row::has_own_place)
    }

    /// Returns the end of host memory that holds a place for all memory with a home, and for `more` chunks of
    /// `size_bytes`.
    pub fn end_with_homes(&self, more: usize, size_bytes: u64) -> u64 {
        self.ledger().end_with_homes(more, size_bytes)
    }
}

/// Returns the properties of the memory of chunks on `device`. This memory cannot be shared with other processes.
pub fn frame_prop(device: DeviceOrdinal) -> AllocationProp {
    AllocationProp { requested_handle_types: 0, ..AllocationProp::pinned_on(device) }
}
