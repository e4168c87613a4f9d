//! Memory with an address from birth: device, pool, host, and other processes'.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::sim::Work;
use vmm_pool::driver::{DeviceOrdinal, DriverCode, RawStream};

use crate::abi::{Coded, In, Out, driver_api};
use crate::allocations::Origin;
use crate::sim;

const POOL_FIRST: u64 = 0x6500_0000;
const POOL_STEP: u64 = 0x10;
/// `CU_MEMHOSTALLOC_*` and `CU_MEMHOSTREGISTER_*` bits that exist.
const HOST_FLAGS: u32 = 0xf;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const HOST_PORTABLE: u32 = 1;

/// Unit of the rows of pitched memory.
const PITCH_BYTES: u64 = 512;
/// The largest element of an array: four numbers of 32 bits.
const ELEMENT_BYTES_MAX: u64 = 16;

/// The part of `CUDA_ARRAY3D_DESCRIPTOR` that matters here, at its place.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Array3d {
    sides: [u64; 3],
}

/// The same of `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Array2d {
    sides: [u64; 2],
}

/// A `CUipcMemHandle`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IpcHandle([u8; 64]);

fn pool_of(device: DeviceOrdinal) -> u64 {
    POOL_FIRST + u64::from(device.0.unsigned_abs()) * POOL_STEP
}

fn device_of_pool(pool: u64) -> Coded<DeviceOrdinal> {
    let ordinal = pool
        .checked_sub(POOL_FIRST)
        .map(|offset| offset / POOL_STEP)
        .and_then(|ordinal| i32::try_from(ordinal).ok())
        .ok_or(DriverCode::INVALID_VALUE)?;
    sim::get()?.device(ordinal).map_err(|_| DriverCode::INVALID_VALUE)
}

fn pool_allocate(
    address: Out<u64>,
    bytes: u64,
    device: DeviceOrdinal,
    stream: RawStream,
) -> Coded<()> {
    let sim = sim::get()?;
    let made = sim.pool_allocate(device, bytes)?;
    sim.hold_for_graph(stream, made);
    address.put(made)
}

fn allocate_host(address: Out<u64>, bytes: u64, flags: u32) -> Coded<()> {
    if flags & !HOST_FLAGS != 0 {
        return Err(DriverCode::INVALID_VALUE);
    }
    let sim = sim::get()?;
    sim.forbid_in_capture()?;
    address.put(sim.allocate_host(bytes)?)
}

/// Managed memory alone moves. Here it is on the device already.
fn prefetch(address: u64, bytes: u64, stream: u64) -> Coded<()> {
    let sim = sim::get()?;
    sim.stream(stream)?;
    let entry = sim.allocation_at(address).filter(|entry| entry.origin == Origin::Managed);
    let end = address.checked_add(bytes).ok_or(DriverCode::INVALID_VALUE)?;
    if entry.is_some_and(|entry| end <= entry.range.end().0) {
        Ok(())
    } else {
        Err(DriverCode::INVALID_VALUE)
    }
}

fn prefetch_all(addresses: In<u64>, sizes: In<u64>, count: u64, stream: u64) -> Coded<()> {
    let parts = addresses.list(count)?.into_iter().zip(sizes.list(count)?);
    parts.into_iter().try_for_each(|(address, bytes)| prefetch(address, bytes, stream))
}

fn open_published(address: Out<u64>, handle: IpcHandle, flags: u32) -> Coded<()> {
    // `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS` is the only flag, and must be there.
    if flags != 1 {
        return Err(DriverCode::INVALID_VALUE);
    }
    address.put(sim::get()?.open_published(handle.0)?)
}

driver_api! {
    fn cuMemGetInfo_v2 = "cuMemGetInfo" since 3020 (free: Out<u64>, total: Out<u64>) {
        let sim = sim::get()?;
        let info = sim.core.memory_of(sim.current_device()?)?;
        // Either may be null, as driver 580 has it.
        free.put_if_wanted(info.free_bytes);
        total.put_if_wanted(info.total_bytes);
        Ok(())
    }

    fn cuMemAlloc_v2 = "cuMemAlloc" since 3020 (address: Out<u64>, bytes: u64) {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        address.put(sim.allocate(bytes)?)
    }

    fn cuMemAllocManaged = "cuMemAllocManaged" since 6000
        (address: Out<u64>, bytes: u64, flags: u32)
    {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        // For all, or for the host; memory that moves by itself is kept on the device here.
        if !matches!(flags, 1 | 2) {
            return Err(DriverCode::INVALID_VALUE);
        }
        address.put(sim.allocate_as(Origin::Managed, bytes)?)
    }

    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz = "cuMemPrefetchAsync" since 8000
        (address: u64, bytes: u64, _device: i32, stream: u64)
    {
        prefetch(address, bytes, stream)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz = "cuMemPrefetchAsync" since 12_020
        (address: u64, bytes: u64, _place: u64, _flags: u32, stream: u64)
    {
        prefetch(address, bytes, stream)
    }

    fn cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz
        = "cuMemPrefetchBatchAsync" since 13_000
        (
            addresses: In<u64>,
            sizes: In<u64>,
            count: u64,
            _places: In<u64>,
            _indices: In<u64>,
            _place_count: u64,
            _flags: u64,
            stream: u64,
        )
    {
        prefetch_all(addresses, sizes, count, stream)
    }

    fn cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz
        = "cuMemDiscardAndPrefetchBatchAsync" since 13_000
        (
            addresses: In<u64>,
            sizes: In<u64>,
            count: u64,
            _places: In<u64>,
            _indices: In<u64>,
            _place_count: u64,
            _flags: u64,
            stream: u64,
        )
    {
        prefetch_all(addresses, sizes, count, stream)
    }

    fn cuMemAllocPitch_v2 = "cuMemAllocPitch" since 3020
        (address: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: u32)
    {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        if !matches!(element, 4 | 8 | 16) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH_BYTES).ok_or(DriverCode::INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(DriverCode::INVALID_VALUE)?;
        address.put(sim.allocate(bytes)?)?;
        pitch.put(row)
    }

    fn cuArray3DCreate_v2 = "cuArray3DCreate" since 3020
        (array: Out<u64>, wanted: In<Array3d>)
    {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        let sides = wanted.get()?.sides;
        let elements = sides.iter().try_fold(1_u64, |all, side| all.checked_mul((*side).max(1)));
        let bytes = elements.and_then(|elements| elements.checked_mul(ELEMENT_BYTES_MAX));
        // Its value is the address of its memory, which nobody is told.
        array.put(sim.allocate(bytes.ok_or(DriverCode::INVALID_VALUE)?)?)
    }

    fn cuArrayCreate_v2 = "cuArrayCreate" since 3020 (array: Out<u64>, wanted: In<Array2d>) {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        let sides = wanted.get()?.sides;
        let elements = sides[0].checked_mul(sides[1].max(1));
        let bytes = elements.and_then(|elements| elements.checked_mul(ELEMENT_BYTES_MAX));
        array.put(sim.allocate(bytes.ok_or(DriverCode::INVALID_VALUE)?)?)
    }

    fn cuArrayDestroy = "cuArrayDestroy" since 2000 (array: u64) {
        sim::get()?.free(array)
    }

    fn cuMemFree_v2 = "cuMemFree" since 3020 (address: u64) {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        if address == 0 {
            return Ok(());
        }
        sim.free(address)
    }

    fn cuMemAllocAsync / cuMemAllocAsync_ptsz = "cuMemAllocAsync" since 11020
        (address: Out<u64>, bytes: u64, stream: u64)
    {
        let sim = sim::get()?;
        let stream = sim.stream(stream)?;
        pool_allocate(address, bytes, sim.core.stream_device(stream)?, stream)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz
        = "cuMemAllocFromPoolAsync" since 11020
        (address: Out<u64>, bytes: u64, pool: u64, stream: u64)
    {
        let stream = sim::get()?.stream(stream)?;
        pool_allocate(address, bytes, device_of_pool(pool)?, stream)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz = "cuMemFreeAsync" since 11020
        (address: u64, stream: u64)
    {
        let sim = sim::get()?;
        let stream = sim.stream(stream)?;
        let entry = sim.allocation_at(address).filter(|entry| entry.range.start.0 == address);
        let entry = entry.ok_or(DriverCode::INVALID_VALUE)?;
        // Memory of a graph stays with it: a replay may use it again. A graph frees no other memory.
        if sim.capture_of(stream).is_some() {
            let is_of_graph = entry.origin == Origin::Pool;
            return if is_of_graph { Ok(()) } else { Err(DriverCode::INVALID_VALUE) };
        }
        sim.core.enqueue(stream, Work::new(move |_| sim.pool_keep(address)))
    }

    fn cuDeviceGetDefaultMemPool = "cuDeviceGetDefaultMemPool" since 11020
        (pool: Out<u64>, device: i32)
    {
        pool.put(pool_of(sim::get()?.device(device)?))
    }

    fn cuDeviceGetMemPool = "cuDeviceGetMemPool" since 11020 (pool: Out<u64>, device: i32) {
        pool.put(pool_of(sim::get()?.device(device)?))
    }

    fn cuMemPoolTrimTo = "cuMemPoolTrimTo" since 11020 (pool: u64, keep_bytes: u64) {
        let device = device_of_pool(pool)?;
        sim::get()?.pool_trim(device, keep_bytes)
    }

    fn cuDeviceGraphMemTrim = "cuDeviceGraphMemTrim" since 11040 (device: i32) {
        sim::get()?.device(device).map(drop)
    }

    fn cuDeviceGetGraphMemAttribute = "cuDeviceGetGraphMemAttribute" since 11040
        (device: i32, attribute: i32, value: Out<u64>)
    {
        sim::get()?.device(device)?;
        match attribute {
            0..=3 => value.put(0),
            _ => Err(DriverCode::INVALID_VALUE),
        }
    }

    fn cuMemAllocHost_v2 = "cuMemAllocHost" since 3020 (address: Out<u64>, bytes: u64) {
        allocate_host(address, bytes, 0)
    }

    fn cuMemHostAlloc = "cuMemHostAlloc" since 2020
        (address: Out<u64>, bytes: u64, flags: u32)
    {
        allocate_host(address, bytes, flags)
    }

    fn cuMemFreeHost = "cuMemFreeHost" since 2000 (address: u64) {
        sim::get()?.free_host(address)
    }

    fn cuMemHostRegister_v2 = "cuMemHostRegister" since 6050
        (address: u64, bytes: u64, flags: u32)
    {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        let device = sim.current_device()?;
        if flags & !HOST_FLAGS != 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        let pinned_for = (flags & HOST_PORTABLE == 0).then_some(device);
        sim.core.register_host(address, bytes, pinned_for)
    }

    fn cuMemHostUnregister = "cuMemHostUnregister" since 4000 (address: u64) {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        sim.core.unregister_host(address)
    }

    fn cuMemHostGetDevicePointer_v2 = "cuMemHostGetDevicePointer" since 3020
        (device_address: Out<u64>, address: u64, flags: u32)
    {
        if flags != 0 || sim::get()?.core.host_range_at(address).is_none() {
            return Err(DriverCode::INVALID_VALUE);
        }
        device_address.put(address)
    }

    fn cuIpcGetMemHandle = "cuIpcGetMemHandle" since 4010
        (handle: Out<IpcHandle>, address: u64)
    {
        handle.put(IpcHandle(sim::get()?.publish(address)?))
    }

    fn cuIpcOpenMemHandle = "cuIpcOpenMemHandle" since 4010
        (address: Out<u64>, handle: IpcHandle, flags: u32)
    {
        open_published(address, handle, flags)
    }

    fn cuIpcOpenMemHandle_v2 = "cuIpcOpenMemHandle" since 11000
        (address: Out<u64>, handle: IpcHandle, flags: u32)
    {
        open_published(address, handle, flags)
    }

    fn cuIpcCloseMemHandle = "cuIpcCloseMemHandle" since 4010 (address: u64) {
        let sim = sim::get()?;
        sim.core.wait_device(sim.current_device()?)?;
        sim.close_published(address)
    }
}
