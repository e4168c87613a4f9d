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
    /// Allocates a block of at least `size_bytes` on the device of `prop`. It is mapped, and `accessors` can access it.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: nothing stays allocated.
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

    /// Gives up new memory that cannot be used: nobody has seen it yet. The next pause retries what the driver refuses
    /// to release.
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

    /// Maps `handle` (an import) as a block at an address that the driver chooses. Takes over the caller's reference:
    /// from here on only the mapping keeps the block. If `accessor` has the block open already, it is not mapped again:
    /// its address is returned, and it needs one more [`Inside::block_close`].
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
        // The mapping keeps the memory, so this makes no driver call.
        self.release(handle)?;
        Ok(range.start)
    }

    /// Gives `guests` access to the block at `address`, unless they have it already or the driver refuses.
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

    /// Returns the address where `accessor` has `handle` open already, and counts one more open. Two threads that open
    /// it for the first time simultaneously get different addresses, and close both.
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

    /// Gives `accessor` access to every block of `owner`, as `cuCtxEnablePeerAccess` does for plain memory. Where the
    /// driver allows it, also to other processes' blocks that are open there.
    ///
    /// # Errors
    /// [`PoolError::Driver`] for the first block that the driver refused. All other blocks have the access then, except
    /// those off their device. A block that another thread frees meanwhile is no error.
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
            // Blocks off their device come last, and only if the driver has refused nothing. They get their rights when
            // a resume maps them, and that would fail with a right that the driver refuses.
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
    /// Returns the identity, requested size and size on the device of the own block that holds `address`. None for
    /// another process's block, which is not shared further, and for the padding behind the requested size.
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

    /// Closes the block that [`Entered::block_open`] opened at `address`. The last close unmaps it. The caller has
    /// waited for work on it.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] if nothing is open there; [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// At the last close, those of [`Inside::block_free`].
    #[doc(alias = "cuIpcCloseMemHandle")]
    pub fn block_close(&self, address: DeviceAddress) -> PoolResult<()> {
        let block = {
            let mut ledger = self.pool.ledger();
            // With 0 opens, nobody can open the block again while it is being unmapped.
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
    /// [`PoolError::NotOurs`] if no block starts there, or if it is another process's, which must be closed instead;
    /// [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// `cuMemUnmap` and `cuMemRelease` when it is resident, `cuMemAddressFree`.
    #[doc(alias = "cuMemFree")]
    pub fn block_free(&self, address: DeviceAddress) -> PoolResult<()> {
        self.block_give_up(self.pool.holdings.block_at(address).ok_or(PoolError::NotOurs)?)
    }

    /// Frees `block`, as [`Inside::block_free`] does. If several threads do so, one frees it. The others get
    /// [`PoolError::NotOurs`], also if another block has its address by then.
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
            // The memory is freed, as requested. The addresses are freed later.
            tracing::error!(%error, address = %range.start, "addresses stay until the next pause");
            self.pool.deferred.free_range_later(range);
        }
        Ok(())
    }
}
