//! Memory that has an address from birth: `cuMemAlloc`, the stream-ordered pool, opened IPC memory, and
//! host memory of ours.

use std::collections::BTreeMap;

use vmm_pool::driver::sim::PublishedName;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode, VaRange};

use crate::abi::Coded;
use crate::contexts::current_or_none;
use crate::sim::{Sim, lock};

const PAGE_BYTES: u64 = 4096;

/// How an allocation came about, and so how it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocManaged`.
    Managed,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuIpcOpenMemHandle`, so many times.
    Ipc {
        /// Its published name.
        name: [u8; 64],
        /// Calls of open without close.
        opened: u64,
    },
}

/// One allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    /// What is mapped.
    pub(crate) range: VaRange,
    /// What was wanted, in bytes.
    pub(crate) asked_bytes: u64,
    pub(crate) device: DeviceOrdinal,
    pub(crate) context: u64,
    pub(crate) origin: Origin,
}

#[derive(Debug, Default)]
pub(crate) struct Allocations {
    by_start: BTreeMap<u64, Allocation>,
    /// Memory that the pool keeps for later.
    idle: Vec<Allocation>,
    /// Host memory, by its first aligned address.
    host: BTreeMap<u64, Vec<u8>>,
}

impl Allocations {
    fn at(&self, address: u64) -> Option<&Allocation> {
        let (start, allocation) = self.by_start.range(..=address).next_back()?;
        (address - start < allocation.asked_bytes.max(1)).then_some(allocation)
    }
}

impl Sim {
    /// The allocation at `address`.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<Allocation> {
        lock(&self.allocations).at(address).copied()
    }

    fn insert(&self, allocation: Allocation) -> u64 {
        let start = allocation.range.start.0;
        lock(&self.allocations).by_start.insert(start, allocation);
        start
    }

    /// Memory of the current device.
    pub(crate) fn allocate(&self, asked_bytes: u64) -> Coded<u64> {
        self.allocate_as(Origin::Plain, asked_bytes)
    }

    /// The same, which comes about as `origin` says.
    pub(crate) fn allocate_as(&self, origin: Origin, asked_bytes: u64) -> Coded<u64> {
        let device = self.current_device()?;
        let range = self.core.allocate(device, asked_bytes)?;
        Ok(self.insert(Allocation {
            range,
            asked_bytes,
            device,
            context: current_or_none(),
            origin,
        }))
    }

    /// Frees memory of `cuMemAlloc` or of the pool, after the work of its device.
    pub(crate) fn free(&self, start: u64) -> Coded<()> {
        let allocation = lock(&self.allocations)
            .by_start
            .get(&start)
            .copied()
            .filter(|entry| !matches!(entry.origin, Origin::Ipc { .. }))
            .ok_or(DriverCode::INVALID_VALUE)?;
        self.core.wait_device(allocation.device)?;
        lock(&self.allocations).by_start.remove(&start);
        self.core.deallocate(allocation.range)
    }

    /// Frees what belongs to a context that ends.
    pub(crate) fn free_all_of(&self, context: u64) -> Coded<()> {
        let gone: Vec<VaRange> = {
            let mut allocations = lock(&self.allocations);
            let starts: Vec<u64> = allocations
                .by_start
                .values()
                .filter(|entry| entry.context == context)
                .map(|entry| entry.range.start.0)
                .collect();
            starts
                .iter()
                .filter_map(|start| allocations.by_start.remove(start))
                .map(|entry| entry.range)
                .collect()
        };
        gone.into_iter().try_for_each(|range| self.core.deallocate(range))
    }

    // The stream-ordered pool: one per device.

    /// Memory from the pool of `device`: a block that it keeps, or a new one.
    pub(crate) fn pool_allocate(&self, device: DeviceOrdinal, asked_bytes: u64) -> Coded<u64> {
        let kept = {
            let mut allocations = lock(&self.allocations);
            let found = allocations
                .idle
                .iter()
                .rposition(|entry| entry.device == device && entry.range.size_bytes >= asked_bytes);
            found.map(|index| allocations.idle.remove(index).range)
        };
        let range = match kept {
            Some(range) => range,
            None => self.core.allocate(device, asked_bytes)?,
        };
        Ok(self.insert(Allocation {
            range,
            asked_bytes,
            device,
            context: current_or_none(),
            origin: Origin::Pool,
        }))
    }

    /// Lets the pool keep the memory at `start` for later.
    pub(crate) fn pool_keep(&self, start: u64) -> Coded<()> {
        let mut allocations = lock(&self.allocations);
        let allocation = allocations.by_start.remove(&start).ok_or(DriverCode::INVALID_VALUE)?;
        allocations.idle.push(allocation);
        Ok(())
    }

    /// Gives back what the pool of `device` keeps beyond `keep_bytes`.
    pub(crate) fn pool_trim(&self, device: DeviceOrdinal, keep_bytes: u64) -> Coded<()> {
        let mut gone = Vec::new();
        {
            let mut allocations = lock(&self.allocations);
            let mut kept = 0_u64;
            allocations.idle.retain(|entry| {
                let stays = entry.device != device || kept + entry.range.size_bytes <= keep_bytes;
                if !stays {
                    gone.push(entry.range);
                } else if entry.device == device {
                    kept += entry.range.size_bytes;
                }
                stays
            });
        }
        gone.into_iter().try_for_each(|range| self.core.deallocate(range))
    }

    // Memory of other processes.

    /// The bytes by which another process opens the allocation at `address`.
    pub(crate) fn publish(&self, address: u64) -> Coded<[u8; 64]> {
        let allocation = self
            .allocation_at(address)
            .filter(|entry| entry.origin == Origin::Plain)
            .ok_or(DriverCode::INVALID_VALUE)?;
        let name = self.core.publish(allocation.range.start)?;
        Ok(name.to_bytes())
    }

    /// Opens memory of another process, or once more what is open already.
    pub(crate) fn open_published(&self, name: [u8; 64]) -> Coded<u64> {
        let device = self.current_device()?;
        let published = PublishedName::from_bytes(&name).ok_or(DriverCode::INVALID_VALUE)?;
        let mut allocations = lock(&self.allocations);
        for entry in allocations.by_start.values_mut() {
            if let Origin::Ipc { name: known, opened } = &mut entry.origin
                && *known == name
            {
                *opened += 1;
                return Ok(entry.range.start.0);
            }
            // One's own memory cannot be opened.
            let own = self.core.publish(entry.range.start)?;
            if own.to_bytes() == name {
                return Err(DriverCode::INVALID_CONTEXT);
            }
        }
        drop(allocations);
        let handle = self.core.open_published(published)?;
        let range = self.core.attach(handle, published.size_bytes())?;
        Ok(self.insert(Allocation {
            range,
            asked_bytes: range.size_bytes,
            device,
            context: current_or_none(),
            origin: Origin::Ipc { name, opened: 1 },
        }))
    }

    /// Closes memory of another process; it goes with the last close.
    pub(crate) fn close_published(&self, start: u64) -> Coded<()> {
        let range = {
            let mut allocations = lock(&self.allocations);
            let entry = allocations.by_start.get_mut(&start).ok_or(DriverCode::INVALID_VALUE)?;
            let Origin::Ipc { opened, .. } = &mut entry.origin else {
                return Err(DriverCode::INVALID_VALUE);
            };
            *opened -= 1;
            if *opened > 0 {
                return Ok(());
            }
            let range = entry.range;
            allocations.by_start.remove(&start);
            range
        };
        self.core.deallocate(range)
    }

    // Host memory.

    /// Zeroed host memory, aligned to pages and registered.
    pub(crate) fn allocate_host(&self, size_bytes: u64) -> Coded<u64> {
        self.current_device()?;
        let padded = size_bytes
            .checked_add(PAGE_BYTES)
            .and_then(|size| usize::try_from(size).ok())
            .filter(|_| size_bytes > 0)
            .ok_or(DriverCode::INVALID_VALUE)?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(padded).map_err(|_| DriverCode::OUT_OF_MEMORY)?;
        memory.resize(padded, 0_u8);
        let first = memory.as_mut_ptr().expose_provenance() as u64;
        let start = first.next_multiple_of(PAGE_BYTES);
        self.core.register_host(start, size_bytes, None)?;
        lock(&self.allocations).host.insert(start, memory);
        Ok(start)
    }

    pub(crate) fn free_host(&self, start: u64) -> Coded<()> {
        let memory =
            lock(&self.allocations).host.remove(&start).ok_or(DriverCode::INVALID_VALUE)?;
        self.core.unregister_host(start)?;
        drop(memory);
        Ok(())
    }

    /// The first address and length of the memory at `address`, as `cuMemGetAddressRange` tells.
    pub(crate) fn address_range(&self, address: u64) -> Coded<VaRange> {
        if let Some(allocation) = self.allocation_at(address) {
            return Ok(VaRange::new(allocation.range.start, allocation.asked_bytes));
        }
        self.core
            .mapping_at(DeviceAddress(address))
            .map(|mapping| mapping.range)
            .ok_or(DriverCode::NOT_FOUND)
    }
}
