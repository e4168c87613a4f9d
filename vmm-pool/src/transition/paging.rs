//! One chunk of a window out of its device, or back, while the process runs ([`crate::paging`]). The states are those of any
//! allocation, and so are the changes.

#![expect(unsafe_code, reason = "unmaps through the driver")]

use super::still::StillChunk;
use crate::deferred::Physical;
use crate::driver::{AccessDesc, AllocationProp, DeviceOrdinal, Driver, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ledger::{Mapping, Presence, Remount};
use crate::pool::Entered;

impl<D: Driver> StillChunk<'_, D> {
    /// Unmaps the chunk, whose contents lie in its place, or are nobody's. Its memory comes out.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: it is where it was.
    ///
    /// # Driver calls
    /// `cuMemUnmap`.
    pub(crate) fn leave(self, has_contents: bool) -> PoolResult<Option<Physical>> {
        self.unmap()?;
        Ok(self.pool.ledger().rows.left_home(self.row, has_contents))
    }

    /// Gives the chunk memory and maps it: at `aside` alone if there is such, which are addresses of the pager's, so that nobody else's
    /// work can touch it while it is filled. Its contents are not there yet. [`StillChunk::came`] comes next, behind
    /// [`StillChunk::leave_aside`] and [`StillChunk::land`] where they are due, or [`StillChunk::did_not_come`].
    ///
    /// # Errors
    /// [`PoolError::Driver`]: nothing is mapped at `aside`.
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`.
    pub(crate) fn come(&self, physical: Physical, aside: Option<VaRange>) -> PoolResult<()> {
        let spare = self.pool.ledger().rows.returned(self.row, physical);
        if let Some(spare) = spare {
            // A try of before has left it its own.
            self.give_back(spare);
        }
        let Some(aside) = aside else { return self.land() };
        let Remount { raw, access, device, .. } = self.remount()?;
        let about = || format!("chunk at {}", self.range.start);
        self.pool.driver.map(aside, raw).about(about, aside.size_bytes, device)?;
        let set = self.pool.driver.set_access(aside, &access);
        if set.is_err()
            && let Err(error) = self.leave_aside(aside)
        {
            tracing::error!(%error, "addresses for copies of a chunk are lost");
        }
        set.about(about, aside.size_bytes, device)
    }

    /// Takes the chunk from the addresses where it was filled. No copy of it is under way.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: it is there still.
    ///
    /// # Driver calls
    /// `cuMemUnmap`.
    pub(crate) fn leave_aside(&self, aside: VaRange) -> PoolResult<()> {
        // SAFETY: the addresses are the pager's own, and its copies there are over.
        let unmapped = unsafe { self.pool.driver.unmap(aside) };
        unmapped.about(|| format!("chunk at {} for copies", aside.start), aside.size_bytes, None)
    }

    /// Maps the chunk, which has memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`.
    pub(crate) fn land(&self) -> PoolResult<()> {
        let Remount { range, raw, access, device, presence } = self.remount()?;
        let (start, about) = (range.start.0, || format!("chunk at {}", range.start));
        if presence == Presence::Absent {
            self.pool.driver.map(range, raw).about(about, range.size_bytes, device)?;
            self.pool.ledger().mappings.set_presence(start, Presence::Bare);
        }
        if presence != Presence::Whole {
            let set = self.pool.driver.set_access(range, &access);
            set.about(about, range.size_bytes, device)?;
            self.pool.ledger().mappings.set_presence(start, Presence::Whole);
        }
        Ok(())
    }

    /// The contents of the chunk are there, or on their way.
    pub(crate) fn came(self) {
        self.pool.ledger().rows.came_home(self.row);
    }

    /// The contents of the chunk do not come: it is away as before, and its memory goes back to the driver. No copy of it
    /// is under way. What the driver does not unmap is for the next try.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`.
    pub(crate) fn did_not_come(self) {
        if let Err(error) = self.unmap() {
            tracing::error!(%error, "a chunk that is away stays mapped until it is wanted");
        }
        let physical = self.pool.ledger().did_not_come_home(self.row);
        if let Some(physical) = physical {
            self.give_back(physical);
        }
    }

    fn remount(&self) -> PoolResult<Remount> {
        self.pool.ledger().to_remount(self.range.start.0)?.ok_or(PoolError::NotOurs)
    }

    /// Unmaps the chunk if it is mapped.
    fn unmap(&self) -> PoolResult<()> {
        let (range, start) = (self.range, self.range.start.0);
        if !self.pool.ledger().mappings.get(start).is_some_and(Mapping::is_present) {
            return Ok(());
        }
        self.pool.ledger().mappings.begin_leaving(start);
        // SAFETY: `self` proves that no work uses the range, and that none will before it is mapped again.
        let unmapped = unsafe { self.pool.driver.unmap(range) };
        match &unmapped {
            Ok(()) => self.pool.ledger().mappings.set_presence(start, Presence::Absent),
            Err(_) => self.pool.ledger().mappings.call_off_leaving(start),
        }
        unmapped.about(|| format!("chunk at {}", range.start), range.size_bytes, None)
    }

    fn give_back(&self, physical: Physical) {
        if let Err(error) = self.pool.deferred.release(physical) {
            tracing::error!(%error, "the driver keeps memory of a chunk until the next pause");
        }
    }
}

impl<D: Driver> Entered<'_, D> {
    /// Makes memory for a chunk.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    pub(crate) fn make_frame(
        &self,
        device: DeviceOrdinal,
        size_bytes: u64,
    ) -> PoolResult<Physical> {
        let about = || "memory for paging".to_owned();
        let mut made = self.make(size_bytes, &frame_prop(device), about)?;
        // Counting may have begun meanwhile.
        made.charge_with(|bytes, device| self.pool.budget.charge_anyway(device, bytes));
        Ok(made)
    }

    /// Gives the memory of a chunk back to the driver.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: it goes at the next pause.
    ///
    /// # Driver calls
    /// `cuMemRelease`.
    pub(crate) fn release_frame(&self, frame: Physical) -> PoolResult<()> {
        let (size_bytes, device) = frame.extent();
        let released = self.pool.deferred.release(frame);
        released.about(|| "memory for paging".to_owned(), size_bytes, device)
    }
}

/// Returns the properties of the memory that makes up chunks on `device`. No other process can be given this memory.
pub(crate) fn frame_prop(device: DeviceOrdinal) -> AllocationProp {
    AllocationProp { requested_handle_types: 0, ..AllocationProp::pinned_on(device) }
}

/// Returns the access rights to chunks on `device`.
pub(crate) fn frame_access(device: DeviceOrdinal) -> [AccessDesc; 1] {
    [AccessDesc::read_write(device)]
}
