//! Virtual memory management.

#![expect(unsafe_code, reason = "exports C functions")]

use std::os::fd::{BorrowedFd, IntoRawFd};

use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DriverCode, HANDLE_TYPE_POSIX_FD, Location,
    RawHandle, VaRange,
};

use crate::abi::{Coded, In, Out, driver_api};
use crate::sim;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const RANGE_HANDLE_DMA_BUF: i32 = 1;
const PAGE_BYTES: u64 = 4096;

fn range(address: u64, bytes: u64) -> VaRange {
    VaRange::new(DeviceAddress(address), bytes)
}

fn check_flags(flags: u64) -> Coded<()> {
    if flags == 0 { Ok(()) } else { Err(DriverCode::INVALID_VALUE) }
}

driver_api! {
    fn cuMemGetAllocationGranularity = "cuMemGetAllocationGranularity" since 10020
        (bytes: Out<u64>, prop: In<AllocationProp>, option: i32)
    {
        if !matches!(option, 0 | 1) {
            return Err(DriverCode::INVALID_VALUE);
        }
        bytes.put(sim::get()?.core.check_prop(&prop.get()?)?)
    }

    fn cuMemAddressReserve = "cuMemAddressReserve" since 10020
        (address: Out<u64>, bytes: u64, alignment: u64, hint: u64, flags: u64)
    {
        check_flags(flags)?;
        let core = &sim::get()?.core;
        address.put(core.reserve(bytes, alignment, DeviceAddress(hint))?.0)
    }

    fn cuMemAddressFree = "cuMemAddressFree" since 10020 (address: u64, bytes: u64) {
        sim::get()?.core.free_addresses(range(address, bytes))
    }

    fn cuMemCreate = "cuMemCreate" since 10020
        (handle: Out<u64>, bytes: u64, prop: In<AllocationProp>, flags: u64)
    {
        check_flags(flags)?;
        handle.put(sim::get()?.core.create_memory(bytes, &prop.get()?)?.0)
    }

    fn cuMemRelease = "cuMemRelease" since 10020 (handle: u64) {
        sim::get()?.core.release_memory(RawHandle(handle))
    }

    fn cuMemMap = "cuMemMap" since 10020
        (address: u64, bytes: u64, offset: u64, handle: u64, flags: u64)
    {
        check_flags(flags)?;
        if offset != 0 {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        sim::get()?.core.map_memory(range(address, bytes), RawHandle(handle))
    }

    fn cuMemUnmap = "cuMemUnmap" since 10020 (address: u64, bytes: u64) {
        sim::get()?.core.unmap_memory(range(address, bytes))
    }

    fn cuMemSetAccess = "cuMemSetAccess" since 10020
        (address: u64, bytes: u64, access: In<AccessDesc>, count: u64)
    {
        sim::get()?.core.grant(range(address, bytes), &access.list(count)?)
    }

    fn cuMemGetAccess = "cuMemGetAccess" since 10020
        (flags: Out<u64>, location: In<Location>, address: u64)
    {
        let core = &sim::get()?.core;
        let bits = core.access_of(DeviceAddress(address), location.get()?)?;
        flags.put(u64::from(bits.unsigned_abs()))
    }

    fn cuMemExportToShareableHandle = "cuMemExportToShareableHandle" since 10020
        (target: Out<u8>, handle: u64, kind: i32, flags: u64)
    {
        check_flags(flags)?;
        if kind != HANDLE_TYPE_POSIX_FD {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let fd = sim::get()?.core.export_memory(RawHandle(handle))?;
        target.cast::<i32>().put(fd.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle = "cuMemImportFromShareableHandle" since 10020
        (handle: Out<u64>, source: usize, kind: i32)
    {
        if kind != HANDLE_TYPE_POSIX_FD {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let fd = i32::try_from(source)
            .ok()
            .filter(|fd| *fd >= 0)
            .ok_or(DriverCode::INVALID_VALUE)?;
        // SAFETY: not -1; the caller keeps the descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        handle.put(sim::get()?.core.import_memory(fd)?.0)
    }

    fn cuMemGetAllocationPropertiesFromHandle
        = "cuMemGetAllocationPropertiesFromHandle" since 10020
        (prop: Out<AllocationProp>, handle: u64)
    {
        prop.put(sim::get()?.core.prop_of(RawHandle(handle))?)
    }

    fn cuMemRetainAllocationHandle = "cuMemRetainAllocationHandle" since 11000
        (handle: Out<u64>, address: u64)
    {
        let sim = sim::get()?;
        if sim.allocation_at(address).is_some() {
            return Err(DriverCode::INVALID_VALUE);
        }
        handle.put(sim.core.retain_at(DeviceAddress(address))?.0)
    }

    fn cuMemGetHandleForAddressRange = "cuMemGetHandleForAddressRange" since 11070
        (target: Out<u8>, address: u64, bytes: u64, kind: i32, _flags: u64)
    {
        let sim = sim::get()?;
        let aligned = address.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
        if kind != RANGE_HANDLE_DMA_BUF || bytes == 0 || !aligned {
            return Err(DriverCode::INVALID_VALUE);
        }
        let fd = sim.core.export_for_dma(DeviceAddress(address))?;
        target.cast::<i32>().put(fd.into_raw_fd())
    }

    fn cuMulticastCreate = "cuMulticastCreate" since 12_010 (_handle: Out<u64>, _prop: In<u8>) {
        sim::get()?;
        Err(DriverCode::NOT_SUPPORTED)
    }
}
