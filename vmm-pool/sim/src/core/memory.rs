//! Physical memory, addresses and host memory: the tables, and their use of the node.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::Core;
use crate::blocks::{Block, BlockName};
use crate::memory::{Coded, GRANULARITY_BYTES, MappingInfo, Whose, io_code};
use sublet_driver::{
    ALLOCATION_KIND_PINNED, AccessDesc, AllocationFlags, AllocationProp, DeviceAddress,
    DeviceOrdinal, DriverCode, HANDLE_TYPE_POSIX_FD, Location, LocationKind, RawHandle, VaRange,
};

const PUBLISHED_MAGIC: &[u8; 8] = b"simipc01";

/// The name of a live allocation without flags, for another process to open. The name does not hold the memory.
#[derive(Clone, Copy, Debug)]
pub struct PublishedName(BlockName);

impl PublishedName {
    /// The name as the bytes of a `CUipcMemHandle`.
    pub fn to_bytes(self) -> [u8; 64] {
        let BlockName { id, size_bytes, prop } = self.0;
        let words =
            [prop.kind, prop.requested_handle_types, prop.location.kind.0, prop.location.id];
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(PUBLISHED_MAGIC);
        bytes[8..24].copy_from_slice(&id);
        bytes[24..32].copy_from_slice(&size_bytes.to_le_bytes());
        for (place, word) in bytes[32..48].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a name from `bytes`, if they hold one.
    pub fn from_bytes(bytes: &[u8; 64]) -> Option<Self> {
        if !bytes.starts_with(PUBLISHED_MAGIC) {
            return None;
        }
        let word = |at: usize| Some(i32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self(BlockName {
            id: bytes[8..24].try_into().ok()?,
            size_bytes: u64::from_le_bytes(bytes[24..32].try_into().ok()?),
            prop: AllocationProp {
                kind: word(32)?,
                requested_handle_types: word(36)?,
                location: Location { kind: LocationKind(word(40)?), id: word(44)? },
                win32_handle_metadata: 0,
                flags: AllocationFlags::default(),
            },
        }))
    }

    /// Size of the allocation in bytes.
    pub fn size_bytes(self) -> u64 {
        self.0.size_bytes
    }
}

impl Core {
    // Physical memory.

    fn check_vmm(&self) -> Coded<()> {
        if self.options.virtual_memory { Ok(()) } else { Err(DriverCode::NOT_SUPPORTED) }
    }

    /// Returns `prop` with the node's number of the device.
    fn to_node(&self, prop: &AllocationProp) -> Coded<AllocationProp> {
        let mut prop = *prop;
        if let Some(device) = prop.location.as_device() {
            let index = self.device(device)?.index;
            prop.location.id = i32::try_from(index).map_err(|_| DriverCode::INVALID_DEVICE)?;
        }
        Ok(prop)
    }

    /// Returns `prop` with this process's number of the device.
    fn as_seen_here(&self, prop: &AllocationProp) -> Coded<AllocationProp> {
        let mut prop = *prop;
        if prop.location.kind == LocationKind::DEVICE {
            let ordinal = self
                .devices
                .iter()
                .position(|device| i32::try_from(device.index) == Ok(prop.location.id))
                .ok_or(DriverCode::INVALID_DEVICE)?;
            prop.location.id = i32::try_from(ordinal).map_err(|_| DriverCode::INVALID_DEVICE)?;
        }
        Ok(prop)
    }

    pub(super) fn make_block(&self, size_bytes: u64, prop: &AllocationProp) -> Coded<Block> {
        self.node
            .create_block(size_bytes, self.to_node(prop)?)
            .map_err(|e| io_code(&e))?
            .ok_or(DriverCode::OUT_OF_MEMORY)
    }

    /// Checks the properties of a new allocation. Returns its granularity in bytes.
    ///
    /// # Errors
    /// As [`sublet_driver::Driver::allocation_granularity`].
    pub fn check_prop(&self, prop: &AllocationProp) -> Coded<u64> {
        self.check_vmm()?;
        match prop.location.kind {
            LocationKind::DEVICE => drop(self.to_node(prop)?),
            LocationKind::HOST | LocationKind::HOST_NUMA_CURRENT | LocationKind::HOST_NUMA => {}
            _ => return Err(DriverCode::INVALID_VALUE),
        }
        if prop.kind != ALLOCATION_KIND_PINNED {
            return Err(DriverCode::INVALID_VALUE);
        }
        if prop.requested_handle_types & !HANDLE_TYPE_POSIX_FD != 0 {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        Ok(GRANULARITY_BYTES)
    }

    /// As [`sublet_driver::Driver::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create_memory(&self, size_bytes: u64, prop: &AllocationProp) -> Coded<RawHandle> {
        let granularity = self.check_prop(prop)?;
        if size_bytes == 0 || !size_bytes.is_multiple_of(granularity) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let block = self.make_block(size_bytes, prop)?;
        Ok(self.write().add_handle(block, *prop, Whose::Own))
    }

    /// As [`sublet_driver::Driver::release`], but safe: no address depends on a handle.
    ///
    /// # Errors
    /// As there.
    pub fn release_memory(&self, handle: RawHandle) -> Coded<()> {
        let dead = self.write().release(handle)?;
        drop(dead);
        Ok(())
    }

    /// As [`sublet_driver::Driver::export_fd`].
    ///
    /// # Errors
    /// As there.
    pub fn export_memory(&self, handle: RawHandle) -> Coded<OwnedFd> {
        let memory = self.read();
        if memory.prop_of(handle)?.requested_handle_types & HANDLE_TYPE_POSIX_FD == 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        memory.block_of(handle)?.export().map_err(|e| io_code(&e))
    }

    /// Returns a descriptor that holds the memory at `address` and cannot be imported (a DMA-BUF).
    ///
    /// # Errors
    /// `INVALID_VALUE` when nothing is mapped there.
    pub fn export_for_dma(&self, address: DeviceAddress) -> Coded<OwnedFd> {
        self.read()
            .mapped_block(address)
            .ok_or(DriverCode::INVALID_VALUE)?
            .export_read_only()
            .map_err(|e| io_code(&e))
    }

    /// As [`sublet_driver::Driver::import_fd`].
    ///
    /// # Errors
    /// As there; `INVALID_DEVICE` when the memory is of a device that this process does not see.
    pub fn import_memory(&self, fd: BorrowedFd<'_>) -> Coded<RawHandle> {
        self.check_vmm()?;
        let block = self.node.import_block(fd).ok().flatten().ok_or(DriverCode::INVALID_VALUE)?;
        let prop = self.as_seen_here(&block.name().prop)?;
        // Driver 580: only the process that created memory can export it.
        let prop = AllocationProp { requested_handle_types: 0, ..prop };
        Ok(self.write().add_handle(block, prop, Whose::Imported))
    }

    fn adopt(&self, block: Block) -> Coded<RawHandle> {
        let prop = self.as_seen_here(&block.name().prop)?;
        Ok(self.write().add_handle(block, prop, Whose::Opened))
    }

    /// Counts the handles of this process that are imports, and those that were opened by a published name.
    pub fn foreign(&self) -> (u32, u32) {
        self.read().foreign()
    }

    /// Returns the name of the memory mapped at `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` when nothing is mapped there.
    pub fn publish(&self, address: DeviceAddress) -> Coded<PublishedName> {
        self.read()
            .mapped_block(address)
            .map(|block| PublishedName(*block.name()))
            .ok_or(DriverCode::INVALID_VALUE)
    }

    /// Opens a handle for published memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` when nobody holds it any more.
    pub fn open_published(&self, name: PublishedName) -> Coded<RawHandle> {
        let block = self
            .node
            .open_block(&name.0)
            .map_err(|e| io_code(&e))?
            .ok_or(DriverCode::INVALID_VALUE)?;
        self.adopt(block)
    }

    /// Returns the properties that the memory of `handle` was created with.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a handle that is none.
    pub fn prop_of(&self, handle: RawHandle) -> Coded<AllocationProp> {
        self.read().prop_of(handle)
    }

    /// Adds a reference to the handle mapped at `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` when nothing is mapped there.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain_at(&self, address: DeviceAddress) -> Coded<RawHandle> {
        self.write().retain_at(address)
    }

    // Addresses.

    /// As [`sublet_driver::Driver::address_reserve`].
    ///
    /// # Errors
    /// As there.
    pub fn reserve(
        &self,
        size_bytes: u64,
        alignment_bytes: u64,
        hint: DeviceAddress,
    ) -> Coded<DeviceAddress> {
        self.check_vmm()?;
        self.write().reserve(size_bytes, alignment_bytes, hint)
    }

    /// As [`sublet_driver::Driver::address_free`], but safe: work that still uses the addresses fails
    /// with `ILLEGAL_ADDRESS`.
    ///
    /// # Errors
    /// As there.
    pub fn free_addresses(&self, range: VaRange) -> Coded<()> {
        self.last_words.note("addresses freed", range);
        self.write().free(range)
    }

    /// As [`sublet_driver::Driver::map`].
    ///
    /// # Errors
    /// As there.
    pub fn map_memory(&self, range: VaRange, handle: RawHandle) -> Coded<()> {
        self.last_words.note("map", range);
        self.write().map(range, handle)
    }

    /// As [`sublet_driver::Driver::unmap`], but safe: it does not wait for work that still uses the addresses. That work fails
    /// with `ILLEGAL_ADDRESS`, and so does its device's context.
    ///
    /// # Errors
    /// As there.
    pub fn unmap_memory(&self, range: VaRange) -> Coded<()> {
        self.read().check_unmap(range)?;
        self.last_words.note("unmap", range);
        self.pull_from_under_work(range);
        let dead = self.write().unmap(range)?;
        drop(dead);
        Ok(())
    }

    /// As [`sublet_driver::Driver::set_access`].
    ///
    /// # Errors
    /// As there.
    pub fn grant(&self, range: VaRange, access: &[AccessDesc]) -> Coded<()> {
        for desc in access {
            match desc.location.kind {
                LocationKind::DEVICE => {
                    self.device(DeviceOrdinal(desc.location.id))?;
                }
                LocationKind::HOST | LocationKind::HOST_NUMA | LocationKind::HOST_NUMA_CURRENT => {}
                _ => return Err(DriverCode::INVALID_VALUE),
            }
        }
        let mut memory = self.write();
        if !self.options().peer_access {
            let owner =
                memory.mapping_at(range.start).and_then(|found| found.prop.location.as_device());
            let mut places = access.iter().filter_map(|desc| desc.location.as_device());
            if owner.is_some() && places.any(|place| Some(place) != owner) {
                return Err(DriverCode::PEER_ACCESS_UNSUPPORTED);
            }
        }
        self.last_words.note("access", range);
        memory.set_access(range, access)
    }

    /// Allocates memory of `device` with an address, reachable from all devices, as `cuMemAlloc` does. It needs no virtual
    /// memory management.
    ///
    /// # Errors
    /// `INVALID_VALUE` for zero bytes; `INVALID_DEVICE`; `OUT_OF_MEMORY`.
    #[doc(alias = "cuMemAlloc")]
    pub fn allocate(&self, device: DeviceOrdinal, size_bytes: u64) -> Coded<VaRange> {
        let size_bytes = size_bytes
            .checked_next_multiple_of(GRANULARITY_BYTES)
            .filter(|size| *size > 0)
            .ok_or(DriverCode::INVALID_VALUE)?;
        let mut prop = AllocationProp::pinned_on(device);
        prop.requested_handle_types = 0;
        let block = self.make_block(size_bytes, &prop)?;
        let handle = self.write().add_handle(block, prop, Whose::Own);
        self.attach(handle, size_bytes)
    }

    /// Gives `handle` an address that all devices reach. The mapping then has the only reference to it.
    ///
    /// # Errors
    /// The errors of reserving and mapping; the reference is then given back too.
    pub fn attach(&self, handle: RawHandle, size_bytes: u64) -> Coded<VaRange> {
        let placed = self.attach_mapped(handle, size_bytes);
        self.release_memory(handle)?;
        placed
    }

    fn attach_mapped(&self, handle: RawHandle, size_bytes: u64) -> Coded<VaRange> {
        let mut memory = self.write();
        let start = memory.reserve(size_bytes, 0, DeviceAddress(0))?;
        let range = VaRange::new(start, size_bytes);
        let everybody: Vec<AccessDesc> = (0..self.visible_count())
            .filter_map(|ordinal| i32::try_from(ordinal).ok())
            .map(|ordinal| AccessDesc::read_write(DeviceOrdinal(ordinal)))
            .collect();
        let placed = memory.map(range, handle).and_then(|()| memory.set_access(range, &everybody));
        if let Err(code) = placed {
            // Each step that was done is undone. A refusal of the rest has the same effect. The handle is still held, so no
            // block can come out.
            memory.unmap(range).ok();
            memory.free(range)?;
            return Err(code);
        }
        Ok(range)
    }

    /// Frees memory from [`Self::allocate`] or [`Self::attach`].
    ///
    /// # Errors
    /// `INVALID_VALUE` when `range` is no such memory.
    pub fn deallocate(&self, range: VaRange) -> Coded<()> {
        self.unmap_memory(range)?;
        self.free_addresses(range)
    }

    /// Returns the access flags of `place` at `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` when nothing is mapped there.
    pub fn access_of(&self, address: DeviceAddress, place: Location) -> Coded<i32> {
        self.read().access_of(address, place)
    }

    /// Returns the mapping at `address`.
    pub fn mapping_at(&self, address: DeviceAddress) -> Option<MappingInfo> {
        self.read().mapping_at(address)
    }

    /// Returns the reservation at `address`.
    pub fn reservation_at(&self, address: DeviceAddress) -> Option<VaRange> {
        self.read().reservation_at(address)
    }

    // Host memory.

    /// As [`sublet_driver::Driver::host_register`], but safe: nothing is pinned. `pinned_for` is the device of
    /// the one context that it is for; `None` for all.
    ///
    /// # Errors
    /// As there.
    pub fn register_host(
        &self,
        start: u64,
        size_bytes: u64,
        pinned_for: Option<DeviceOrdinal>,
    ) -> Coded<()> {
        self.write().host_register(start, size_bytes, pinned_for)
    }

    /// As [`sublet_driver::Driver::host_unregister`], but safe, as [`Self::unmap_memory`] is.
    ///
    /// # Errors
    /// As there.
    pub fn unregister_host(&self, start: u64) -> Coded<()> {
        if let Some(range) = self.host_range_at(start).filter(|range| range.start.0 == start) {
            self.pull_from_under_work(range);
        }
        self.write().host_unregister(start)
    }

    /// The registered host memory at `address`.
    pub fn host_range_at(&self, address: u64) -> Option<VaRange> {
        self.read().host_range_at(address)
    }
}
