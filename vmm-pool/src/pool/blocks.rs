//! Plain device allocations (`cuMemAlloc`) made from pool memory, so that they can be paused.

#![expect(unsafe_code, reason = "unmaps, releases and frees through the driver")]

use std::collections::{BTreeMap, BTreeSet};

use super::tables::Allocation;
use super::{Class, Pool};
use crate::VirtualHandle;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverError,
    DriverOp, Location, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};

impl<D: Driver> Pool<D> {
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
            self.driver.allocation_granularity(prop).about(block, size_bytes, device)?;
        let too_large = DriverError { op: DriverOp::Create, code: DriverCode::OUT_OF_MEMORY };
        let padded_bytes =
            granularity.round_up(size_bytes).ok_or(too_large).about(block, size_bytes, device)?;
        let (key, handle) = self.create_keyed(padded_bytes, prop, class)?;
        let address = match self.driver.address_reserve(padded_bytes, 0, DeviceAddress(0)) {
            Ok(address) => address,
            Err(error) => {
                self.abandon(None, handle);
                return Err(error).about(block, padded_bytes, device);
            }
        };
        let range = VaRange::new(address, padded_bytes);
        let access: Vec<_> = accessors.iter().map(|&who| AccessDesc::read_write(who)).collect();
        if let Err(error) = self.block_map(range, handle, &access) {
            self.abandon(Some(range), handle);
            return Err(error);
        }
        let mut tables = self.tables();
        let allocation = &mut tables.allocations[key];
        allocation.block_size_bytes = Some(size_bytes);
        // From here on the mapping alone keeps the block alive.
        allocation.references = 0;
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

    /// Gives up what was made for a block that cannot be: nobody has seen it yet.
    fn abandon(&self, range: Option<VaRange>, handle: VirtualHandle) {
        if let Some(range) = range {
            let mut tables = self.tables();
            for start in tables.mappings_inside(range) {
                tables.remove_mapping(start);
            }
            drop(tables);
            if let Err(error) = self.give_back_range(range) {
                tracing::error!(%error, "addresses stay until the next pause");
            }
        }
        if let Err(error) = self.release(handle) {
            tracing::error!(%error, "memory stays until the next pause");
        }
    }

    /// Maps `handle` (an import) as a block at an address of the driver's choosing, and takes over the
    /// caller's reference: from here on the mapping alone keeps it. One that `accessor` has open already is
    /// not mapped again: its address is returned, and it takes one more [`Pool::block_close`].
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
        {
            let mut tables = self.tables();
            let key = tables.find(handle)?;
            let wanted = if size_bytes == 0 { range.size_bytes } else { size_bytes };
            tables.allocations[key].block_size_bytes = Some(wanted);
            if let Some(mapping) = tables.mappings.get_mut(&range.start.0) {
                mapping.opened = 1;
            }
        }
        // The mapping keeps the memory, so that this makes no driver call.
        self.release(handle)?;
        Ok(range.start)
    }

    /// The address at which `accessor` has `handle` open already, counted once more. Two threads that open it
    /// for the first time at once get an address each, and close each.
    fn block_open_once_more(
        &self,
        handle: VirtualHandle,
        accessor: DeviceOrdinal,
    ) -> PoolResult<Option<DeviceAddress>> {
        let mut tables = self.tables();
        let key = tables.find(handle)?;
        let starts: Vec<u64> = tables.allocations[key].mappings.iter().copied().collect();
        let place = Location::device(accessor);
        for start in starts {
            if let Some(mapping) = tables.mappings.get_mut(&start)
                && mapping.opened > 0
                && mapping.access.contains_key(&place)
            {
                mapping.opened += 1;
                return Ok(Some(mapping.range.start));
            }
        }
        Ok(None)
    }

    fn block_open_at_new_range(
        &self,
        handle: VirtualHandle,
        accessor: DeviceOrdinal,
    ) -> PoolResult<VaRange> {
        let size_bytes = {
            let tables = self.tables();
            let key = tables.find(handle)?;
            tables.allocations[key].size_bytes
        };
        let about = || "address for an opened block".to_owned();
        let reserved = self.driver.address_reserve(size_bytes, 0, DeviceAddress(0));
        let address = match reserved {
            Ok(address) => address,
            Err(error) => {
                self.abandon(None, handle);
                return Err(error).about(about, size_bytes, Some(accessor));
            }
        };
        let range = VaRange::new(address, size_bytes);
        if let Err(error) = self.block_map(range, handle, &[AccessDesc::read_write(accessor)]) {
            self.abandon(Some(range), handle);
            return Err(error);
        }
        Ok(range)
    }

    /// Identity, size asked for and size on the device of the own block that holds `address`. *While
    /// vacated.* What another process owns is not shared further, and the padding behind what was asked for
    /// is nobody's.
    pub fn block_identity(
        &self,
        address: DeviceAddress,
    ) -> Option<(crate::AllocationId, u64, u64)> {
        let tables = self.tables();
        let mapping = tables.mapping_at(address)?;
        let found = tables.allocations.get(mapping.allocation).filter(|found| found.is_own())?;
        let asked_bytes = found.block_size_bytes?;
        let is_inside = address.0 - mapping.range.start.0 < asked_bytes;
        is_inside.then_some((found.id, asked_bytes, found.size_bytes))
    }

    /// Closes what [`Pool::block_open`] opened at `address`; the last close unmaps it. *While vacated.* The
    /// caller has waited for work on it.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when nothing is open there; [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// At the last close, those of [`Pool::block_free`].
    #[doc(alias = "cuIpcCloseMemHandle")]
    pub fn block_close(&self, address: DeviceAddress) -> PoolResult<()> {
        let range = {
            let mut tables = self.tables();
            let mapping = tables.mappings.get_mut(&address.0).filter(|found| found.opened > 0);
            let mapping = mapping.ok_or(PoolError::NotOurs)?;
            // At none it is not opened once more while it is being unmapped.
            mapping.opened -= 1;
            if mapping.opened > 0 {
                return Ok(());
            }
            mapping.range
        };
        self.block_give_up(range).inspect_err(|_| {
            if let Some(mapping) = self.tables().mappings.get_mut(&address.0) {
                mapping.opened = 1;
            }
        })
    }

    /// Counts a plain allocation that was left to the driver, and why.
    pub fn native_allocated(
        &self,
        address: DeviceAddress,
        size_bytes: u64,
        device: DeviceOrdinal,
        reason: &'static str,
    ) {
        let native = super::tables::Native { size_bytes, device, reason };
        self.tables().natives.insert(address.0, native);
    }

    /// Forgets a plain allocation that was counted.
    pub fn native_freed(&self, address: DeviceAddress) {
        self.tables().natives.remove(&address.0);
    }

    /// Frees the block that starts at `address`. *While vacated.* The caller has waited for work on it.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when no block starts there, or it is another process's, which is closed instead;
    /// [`PoolError::Driver`], with the block as before.
    ///
    /// # Driver calls
    /// `cuMemUnmap` and `cuMemRelease` when it is resident, `cuMemAddressFree`.
    #[doc(alias = "cuMemFree")]
    pub fn block_free(&self, address: DeviceAddress) -> PoolResult<()> {
        self.block_give_up(self.block_range(address).ok_or(PoolError::NotOurs)?)
    }

    fn block_give_up(&self, range: VaRange) -> PoolResult<()> {
        self.unmap(range)?;
        // SAFETY: the application gives the block up, and nothing is mapped in the range any more.
        if let Err(error) = unsafe { self.driver.address_free(range) } {
            // The memory is gone, which is what was asked for; the addresses follow.
            tracing::error!(%error, address = %range.start, "addresses stay until the next pause");
            self.strays().ranges.push(range);
        }
        Ok(())
    }

    /// The whole range of the block that starts at `address`, padding included; none for one that
    /// [`Pool::block_open`] opened. *While vacated.*
    pub fn block_range(&self, address: DeviceAddress) -> Option<VaRange> {
        let tables = self.tables();
        let mapping = tables.mappings.get(&address.0).filter(|found| found.opened == 0)?;
        tables.allocations.get(mapping.allocation)?.block_size_bytes?;
        Some(mapping.range)
    }

    /// The device of the block that starts at `address`.
    pub fn block_device(&self, address: DeviceAddress) -> Option<DeviceOrdinal> {
        let tables = self.tables();
        let mapping = tables.mappings.get(&address.0)?;
        tables.allocations.get(mapping.allocation)?.device()
    }

    /// The devices that have blocks.
    pub fn block_devices(&self) -> BTreeSet<DeviceOrdinal> {
        let tables = self.tables();
        let allocations = tables.allocations.iter().map(|(_, found)| found);
        let blocks = allocations.filter(|found| found.block_size_bytes.is_some());
        blocks.filter_map(Allocation::device).collect()
    }

    /// Lets `accessor` reach every block of `owner`, as `cuCtxEnablePeerAccess` does for plain memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`] for the first block that could not be opened; earlier ones stay open.
    ///
    /// # Driver calls
    /// `cuMemSetAccess` for each block.
    pub fn open_blocks_to(&self, owner: DeviceOrdinal, accessor: DeviceOrdinal) -> PoolResult<()> {
        let ranges: Vec<VaRange> = {
            let tables = self.tables();
            tables
                .mappings
                .values()
                .filter(|mapping| {
                    let allocation = &tables.allocations[mapping.allocation];
                    allocation.block_size_bytes.is_some() && allocation.device() == Some(owner)
                })
                .map(|mapping| mapping.range)
                .collect()
        };
        for range in ranges {
            self.set_access(range, &[AccessDesc::read_write(accessor)])?;
        }
        Ok(())
    }

    /// How many blocks there are, by the size asked for; for tests and reports.
    pub fn block_sizes(&self) -> BTreeMap<u64, usize> {
        let tables = self.tables();
        let mut sizes = BTreeMap::new();
        for (_, allocation) in &tables.allocations {
            if let Some(size) = allocation.block_size_bytes {
                *sizes.entry(size).or_insert(0) += 1;
            }
        }
        sizes
    }
}
