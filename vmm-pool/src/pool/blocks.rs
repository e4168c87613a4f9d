//! Plain device allocations (`cuMemAlloc`) made from pool memory, so that they can be paused.

#![expect(unsafe_code, reason = "unmaps, releases and frees through the driver")]

use super::{Entered, Inside};
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverError,
    DriverOp, Location, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::VirtualHandle;
use crate::ledger::{Block, Class, Mapping};

impl<D: Driver> Entered<'_, D> {
    /// A block of at least `size_bytes` on the device of `prop`, mapped and reachable by `accessors`.
    ///
    /// # Errors
    /// [`PoolError::Driver`]; nothing is left behind.
    ///
    /// # Driver calls
    /// `cuMemGetAllocationGranularity`, `cuMemCreate`, `cuMemAddressReserve`, `cuMemMap`,
    /// `cuMemSetAccess`.
    #[doc(alias = "cuMemAlloc")]
    pub fn block_allocate(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        accessors: &[DeviceOrdinal],
        class: Class,
    ) -> PoolResult<DeviceAddress> {
        let device = prop.location.as_device();
        let block = || "new block".to_owned();
        let granularity =
            self.pool.driver.allocation_granularity(prop).about(block, size_bytes, device)?;
        let too_large = DriverError { op: DriverOp::Create, code: DriverCode::OUT_OF_MEMORY };
        let padded_bytes =
            granularity.round_up(size_bytes).ok_or(too_large).about(block, size_bytes, device)?;
        let handle = self.create(padded_bytes, prop, class)?;
        let reserved = self.pool.driver.address_reserve(padded_bytes, 0, DeviceAddress(0));
        let reserved = reserved.inspect_err(|_| self.abandon(None, handle));
        let address = reserved.about(block, padded_bytes, device)?;
        let range = VaRange::new(address, padded_bytes);
        let access: Vec<_> = accessors.iter().map(|&who| AccessDesc::read_write(who)).collect();
        if let Err(error) = self.block_map(range, handle, &access) {
            self.abandon(Some(range), handle);
            return Err(error);
        }
        // From here on the mapping alone keeps the block alive.
        let garbage = self.pool.ledger().become_block(handle, size_bytes);
        self.pool.dispose_quietly(garbage);
        Ok(address)
    }

    fn block_map(
        &self,
        range: VaRange,
        handle: VirtualHandle,
        access: &[AccessDesc],
    ) -> PoolResult<()> {
        self.map(range, 0, handle)?;
        self.set_access(range, access)
    }

    /// Gives up what was made and cannot be used: nobody has seen it yet. What the driver keeps goes at the next pause.
    pub fn abandon(&self, range: Option<VaRange>, handle: VirtualHandle) {
        if let Some(range) = range {
            let (starts, _) = self.pool.mapped_in(range);
            let garbage = self.pool.ledger().forget_mappings(&starts);
            self.pool.dispose_quietly(garbage);
            if let Err(error) = self.pool.deferred.free_range(range) {
                tracing::error!(%error, "addresses stay until the next pause");
            }
        }
        if let Err(error) = self.release(handle) {
            tracing::error!(%error, "memory stays until the next pause");
        }
    }

    /// Maps `handle` (an import) as a block at an address of the driver's choosing, and takes over the
    /// caller's reference: from here on the mapping alone keeps it. One that `accessor` has open already is
    /// not mapped again: its address is returned, and it takes one more [`Inside::block_close`].
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Driver`]; the reference is used up either way.
    ///
    /// # Driver calls
    /// `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
    pub fn block_open(
        &self,
        handle: VirtualHandle,
        size_bytes: u64,
        accessor: DeviceOrdinal,
    ) -> PoolResult<DeviceAddress> {
        if let Some(start) = self.block_open_once_more(handle, accessor)? {
            self.release(handle)?;
            return Ok(start);
        }
        let range = self.block_open_at_new_range(handle, accessor)?;
        let asked_bytes = if size_bytes == 0 { range.size_bytes } else { size_bytes };
        self.pool.ledger().become_opened(handle, range.start.0, asked_bytes);
        // The mapping keeps the memory, so that this makes no driver call.
        self.release(handle)?;
        Ok(range.start)
    }

    /// Lets those of `guests` reach the block that begins at `address` that the driver lets, and that do not yet.
    ///
    /// # Driver calls
    /// `cuMemSetAccess` for each.
    pub fn block_admit(&self, address: DeviceAddress, guests: &[DeviceOrdinal]) {
        let (range, wanted): (_, Vec<_>) = {
            let ledger = self.pool.ledger();
            let Some(mapping) = ledger.mappings.get(address.0) else { return };
            let lacks =
                |guest: &&DeviceOrdinal| mapping.rights_of(Location::device(**guest)).is_none();
            (mapping.range(), guests.iter().filter(lacks).copied().collect())
        };
        for guest in wanted {
            if let Err(error) = self.set_access(range, &[AccessDesc::read_write(guest)]) {
                tracing::debug!(%error, %guest, "opened memory is out of this device's reach");
            }
        }
    }

    /// The address at which `accessor` has `handle` open already, counted once more. Two threads that open it
    /// for the first time simultaneously get an address each, and close each.
    fn block_open_once_more(
        &self,
        handle: VirtualHandle,
        accessor: DeviceOrdinal,
    ) -> PoolResult<Option<DeviceAddress>> {
        let mut ledger = self.pool.ledger();
        let place = Location::device(accessor);
        let is_open = |found: &&Mapping| found.opened() > 0 && found.rights_of(place).is_some();
        let open = ledger.mappings.of(ledger.rows.find(handle)?).find(is_open);
        let Some(start) = open.map(|mapping| mapping.range().start) else {
            return Ok(None);
        };
        let _opened = ledger.mappings.change_opened(start.0, 1);
        Ok(Some(start))
    }

    fn block_open_at_new_range(
        &self,
        handle: VirtualHandle,
        accessor: DeviceOrdinal,
    ) -> PoolResult<VaRange> {
        let size_bytes = self.pool.ledger().rows.find(handle)?.size_bytes();
        let about = || "address for an opened block".to_owned();
        let reserved = self.pool.driver.address_reserve(size_bytes, 0, DeviceAddress(0));
        let reserved = reserved.inspect_err(|_| self.abandon(None, handle));
        let address = reserved.about(about, size_bytes, Some(accessor))?;
        let range = VaRange::new(address, size_bytes);
        let mapped = self.block_map(range, handle, &[AccessDesc::read_write(accessor)]);
        mapped.map(|()| range).inspect_err(|_| self.abandon(Some(range), handle))
    }

    /// Lets `accessor` reach every block of `owner`, as `cuCtxEnablePeerAccess` does for plain memory; and, where the
    /// driver lets it, what was opened there of other processes' blocks.
    ///
    /// # Errors
    /// [`PoolError::Driver`] for the first block that could not be opened; all others are that are not away. One that another thread frees meanwhile is none.
    ///
    /// # Driver calls
    /// `cuMemSetAccess` for each block.
    pub fn open_blocks_to(&self, owner: DeviceOrdinal, accessor: DeviceOrdinal) -> PoolResult<()> {
        let place = Location::device(owner);
        let (blocks, opened): (Vec<_>, Vec<_>) = {
            let ledger = self.pool.ledger();
            let blocks = ledger.mappings.all().filter_map(|mapping| {
                let row = ledger.rows.get(mapping.allocation())?;
                row.block_size_bytes()?;
                let is_owners = row.device() == Some(owner);
                let is_open_there = mapping.opened() > 0 && mapping.rights_of(place).is_some();
                (is_owners || is_open_there)
                    .then(|| (Block::of(mapping), mapping.is_present(), is_owners))
            });
            // What is away comes last, and only if the driver has refused nothing: it gets its rights when it comes back, and
            // would not come back with one that is refused.
            let mut blocks: Vec<_> = blocks.collect();
            blocks.sort_by_key(|(_, is_present, _)| !is_present);
            blocks.into_iter().partition(|(.., is_owners)| *is_owners)
        };
        let access = [AccessDesc::read_write(accessor)];
        let mut all = Ok(());
        for (block, is_present, _) in blocks {
            if all.is_err() && !is_present {
                continue;
            }
            let opened = self.set_access(block.range, &access);
            let is_there = || self.pool.ledger().mappings.block(block).is_some();
            all = all.and(opened.or_else(|error| if is_there() { Err(error) } else { Ok(()) }));
        }
        for (block, is_present, _) in opened {
            if (is_present || all.is_ok())
                && let Err(error) = self.set_access(block.range, &access)
            {
                tracing::debug!(%error, %accessor, "opened memory is out of this device's reach");
            }
        }
        all
    }
}

impl<D: Driver> Inside<'_, D> {
    /// Identity, requested size and size on the device of the own block that holds `address`. What another process owns is not shared further, and the padding behind what was requested
    /// is nobody's.
    pub fn block_identity(
        &self,
        address: DeviceAddress,
    ) -> Option<(crate::AllocationId, u64, u64)> {
        let ledger = self.pool.ledger();
        let (mapping, row) = ledger.mapped_at(address).filter(|(_, row)| row.is_own())?;
        let asked_bytes = row.block_size_bytes()?;
        let is_inside = address.0 - mapping.range().start.0 < asked_bytes;
        is_inside.then_some((row.id(), asked_bytes, row.size_bytes()))
    }

    /// Closes what [`Entered::block_open`] opened at `address`; the last close unmaps it. The
    /// caller has waited for work on it.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when nothing is open there; [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// At the last close, those of [`Inside::block_free`].
    #[doc(alias = "cuIpcCloseMemHandle")]
    pub fn block_close(&self, address: DeviceAddress) -> PoolResult<()> {
        let block = {
            let mut ledger = self.pool.ledger();
            // At none it is not opened once more while it is being unmapped.
            let left = ledger.mappings.change_opened(address.0, -1).ok_or(PoolError::NotOurs)?;
            match ledger.mappings.get(address.0) {
                Some(mapping) if left == 0 => Block::of(mapping),
                Some(_) | None => return Ok(()),
            }
        };
        self.block_give_up(block).inspect_err(|_| self.pool.ledger().mappings.open_once(address.0))
    }

    /// Frees the block that starts at `address`. The caller has waited for work on it.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when no block starts there, or it is another process's, which is closed instead;
    /// [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// `cuMemUnmap` and `cuMemRelease` when it is resident, `cuMemAddressFree`.
    #[doc(alias = "cuMemFree")]
    pub fn block_free(&self, address: DeviceAddress) -> PoolResult<()> {
        self.block_give_up(self.pool.holdings.block_at(address).ok_or(PoolError::NotOurs)?)
    }

    /// Frees `block`, as [`Inside::block_free`] does. Of callers in several threads one frees it; the others are told that
    /// it is not ours, also when another block lies at its address by then.
    ///
    /// # Errors
    /// As [`Inside::block_free`].
    ///
    /// # Driver calls
    /// As [`Inside::block_free`].
    pub fn block_give_up(&self, block: Block) -> PoolResult<()> {
        if !self.pool.ledger().mappings.claim(block) {
            return Err(PoolError::NotOurs);
        }
        let range = block.range;
        self.unmap(range).inspect_err(|_| self.pool.ledger().mappings.claim_ends(block))?;
        // SAFETY: the application gives the block up, and nothing is mapped in the range any more.
        if let Err(error) = unsafe { self.pool.driver.address_free(range) } {
            // The memory is gone, which is what was requested; the addresses follow.
            tracing::error!(%error, address = %range.start, "addresses stay until the next pause");
            self.pool.deferred.free_range_later(range);
        }
        Ok(())
    }
}
