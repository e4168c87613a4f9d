//! Moves one chunk of paged memory off its device, or back, while the process runs. The states and changes are those of
//! any allocation.

#![expect(unsafe_code, reason = "unmaps and copies through the driver")]

use std::ops::Range;

use super::copier::{Copier, Transfer};
use super::still::StillChunk;
use crate::copies::{CopyStreams, Way};
use crate::deferred::Physical;
use crate::driver::{DeviceOrdinal, Driver, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::{Mapping, Presence, Remount};
use crate::pool::{Entered, Pool, frame_prop};
use crate::store::{HostBudget, Pins};

impl<D: Driver> StillChunk<'_, D> {
    /// Unmaps the chunk. Its contents are in its place, or nobody needs them. Returns its memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: the chunk is still mapped.
    ///
    /// # Driver calls
    /// `cuMemUnmap`.
    pub fn leave(self, has_contents: bool) -> PoolResult<Option<Physical>> {
        self.unmap()?;
        Ok(self.pool.ledger().rows.left_home(self.row, has_contents))
    }

    /// Gives the chunk memory and maps it at `aside`, which are addresses of the pager's. So no other work can touch it
    /// while it is filled. Its contents are not there yet. [`StillChunk::leave_aside`], [`StillChunk::land`] and
    /// [`StillChunk::came`] must follow, or [`StillChunk::did_not_come`].
    ///
    /// # Errors
    /// [`PoolError::Driver`]: nothing is mapped at `aside`.
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`.
    pub fn come(&self, physical: Physical, aside: VaRange) -> PoolResult<()> {
        let spare = self.pool.ledger().rows.returned(self.row, physical);
        if let Some(spare) = spare {
            // An earlier try has left it memory of its own.
            self.give_back(spare);
        }
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

    /// Unmaps the chunk from the addresses where it was filled. No copy of it may be under way.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: it is still mapped there.
    ///
    /// # Driver calls
    /// `cuMemUnmap`.
    pub fn leave_aside(&self, aside: VaRange) -> PoolResult<()> {
        // SAFETY: the addresses are the pager's own, and its copies there are over.
        let unmapped = unsafe { self.pool.driver.unmap(aside) };
        unmapped.about(|| format!("chunk at {} for copies", aside.start), aside.size_bytes, None)
    }

    /// Maps the chunk, which has memory, at its home.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`.
    pub fn land(&self) -> PoolResult<()> {
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

    /// Records that the contents of the chunk are on its device.
    pub fn came(self) {
        self.pool.ledger().rows.came_home(self.row);
    }

    /// Ends the move without contents: the chunk is off its device as before, and its memory is released. No copy of it
    /// may be under way. If the driver refuses to unmap it, the next try does so.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`.
    pub fn did_not_come(self) {
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
    /// Allocates memory for a chunk.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    pub fn make_frame(&self, device: DeviceOrdinal, size_bytes: u64) -> PoolResult<Physical> {
        let about = || "memory for paging".to_owned();
        let mut made = self.make(size_bytes, &frame_prop(device), about)?;
        // Counting may have begun meanwhile.
        made.charge_with(|bytes, device| self.pool.budget.charge_anyway(device, bytes));
        Ok(made)
    }

    /// Releases the memory of a chunk to the driver.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: the next pause tries again.
    ///
    /// # Driver calls
    /// `cuMemRelease`.
    pub fn release_frame(&self, frame: Physical) -> PoolResult<()> {
        let (size_bytes, device) = frame.extent();
        let released = self.pool.deferred.release(frame);
        released.about(|| "memory for paging".to_owned(), size_bytes, device)
    }
}

/// Copies between chunks on one device and their places in host memory, on one thread.
#[derive(Debug)]
pub struct HomeCopies<'a, D: Driver> {
    copier: Copier<'a, D>,
    device: DeviceOrdinal,
}

impl<'a, D: Driver> HomeCopies<'a, D> {
    /// Makes the value, without a copy under way.
    pub fn new(pool: &'a Pool<D>, device: DeviceOrdinal) -> Self {
        Self { copier: Copier::new(pool), device }
    }

    /// Returns the streams of the device, one for each direction.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuStreamCreate`, the first time.
    pub fn streams(&mut self) -> PoolResult<&mut CopyStreams<'a, D>> {
        self.copier.streams.of(self.device)
    }

    /// Waits for all copies. A failed wait is tried once more. If that fails too, nothing is unmapped before the next
    /// step of the pool has waited.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    pub fn finish_or_leave(&mut self) -> PoolResult<()> {
        self.copier.streams.finish_or_leave()
    }

    /// Starts the copy of the contents of `row` to `aside`, where the chunk is mapped. Returns whether anything is
    /// copied.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Safety
    /// The chunk stays mapped there until the copy has ended, and nobody else uses it, or its place.
    pub unsafe fn start_in(&mut self, row: VirtualHandle, aside: VaRange) -> PoolResult<bool> {
        let saved = {
            let ledger = self.copier.pool.ledger();
            ledger.rows.get(row).and_then(|row| row.saved()).cloned()
        };
        let all = vec![Range { start: 0, end: aside.size_bytes }];
        let (extents, zeros) = match saved {
            Some(saved) => saved.split(&all),
            None => (Vec::new(), all),
        };
        let transfer = Transfer { device: self.device, range: aside, extents };
        self.streams()?.take_for(Way::In)?;
        let log = &mut StepLog::default();
        // SAFETY: as the caller vouches.
        unsafe { self.copier.start_zeros(log, &transfer, &zeros) }?;
        // SAFETY: as the caller vouches.
        unsafe { self.copier.start(log, Way::In, &transfer) }?;
        Ok(!transfer.extents.is_empty())
    }

    /// Starts the copy of the contents of `row` to its place in host memory. Without a place it gets one, if `budget`
    /// allows that. `budget` gets the size of the host memory that is held, in bytes.
    ///
    /// # Errors
    /// [`PoolError::OutOfHostMemory`], [`PoolError::HostMemoryRefused`]; [`PoolError::NotOurs`] if the row has no home;
    /// [`PoolError::Driver`].
    ///
    /// # Safety
    /// As [`HomeCopies::start_in`]; nobody writes to the chunk until the copy has ended.
    pub unsafe fn start_out(
        &mut self,
        row: VirtualHandle,
        budget: &dyn Fn(u64) -> HostBudget,
    ) -> PoolResult<()> {
        let pool = self.copier.pool;
        let home = pool.ledger().take_home_place(row);
        let (range, extent) = home.ok_or(PoolError::NotOurs)?;
        let (log, end_bytes) = (&mut StepLog::default(), extent.place().end);
        let held = pool.host_memory().check_growth(end_bytes, budget).and_then(|()| {
            let devices = pool.holdings().devices();
            let nodes = pool.devices().nodes_of(&devices);
            let mut arena = pool.host_memory().arena();
            arena.set_nodes(nodes);
            arena.grow_to(log, end_bytes, Pins::of(&devices))
        });
        if let Err(error) = held {
            pool.ledger().rows.forget_copy(row);
            return Err(error);
        }
        let transfer = Transfer { device: self.device, range, extents: vec![extent] };
        self.streams()?.take_for(Way::Out)?;
        // SAFETY: as the caller vouches.
        unsafe { self.copier.start(log, Way::Out, &transfer) }
    }
}
