//! Memory that stays with the driver: stream-ordered, managed and pitched memory, and arrays.
//!
//! A process that allocates such memory joins its tenant, so that a pause sees the process, and its memory is counted under its
//! reason. New memory of this kind waits while the other memory is paused: otherwise a pause would free less than it reports.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint, c_void};

use sublet_cuda_driver::blocks::{self, stays};
use vmm_pool::Native;
use vmm_pool::budget::Counted;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Location, LocationKind};
use vmm_pool::gate::{Pass, Passage};

use super::context::device_of;
use super::graph::capture_of;
use super::{Address, STREAM_PER_THREAD, SUCCESS, stream_value};
use crate::contexts;
use crate::driver::call_driver;
use crate::runtime;
use sublet_interpose::Pointer;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;
/// The bytes that all devices so far pad rows of pitched memory to. The driver's pitch is the one that counts.
const PITCH_BYTES: usize = 512;
/// `CU_DEVICE_CPU`.
const DEVICE_CPU: c_int = -1;

/// Passes the gate for new memory. The first call joins the tenant.
fn pass() -> Option<Pass<'static>> {
    runtime::join().map(|member| member.gate().pass(Passage::Use))
}

/// Takes bytes of the tenant's budget on `device`, or returns the code for the call.
fn room_on(device: Option<DeviceOrdinal>, bytes: usize) -> Result<Counted, c_int> {
    match (runtime::member(), device) {
        (Some(member), Some(device)) => {
            blocks::take_room(member, device, bytes as u64).map_err(|code| code.0)
        }
        _ => Ok(Counted::Yes(None)),
    }
}

/// As [`room_on`], for the current context's device.
fn room(bytes: usize) -> Result<Counted, c_int> {
    room_on(contexts::current_device().ok(), bytes)
}

/// Counts memory that the driver has just created.
fn count(
    address: u64,
    bytes: usize,
    device: Option<DeviceOrdinal>,
    reason: &'static str,
    counted: Counted,
) {
    let device = device.or_else(|| contexts::current_device().ok());
    if let (Some(member), Some(device)) = (runtime::member(), device) {
        let (size_bytes, context) = (bytes as u64, contexts::listed_current());
        let native = Native { size_bytes, device, context, reason, counted };
        member.pool().natives().allocated(DeviceAddress(address), native);
    }
}

/// Returns the address that the driver has written to an out-pointer.
fn made(place: *mut Address) -> Option<Address> {
    // SAFETY: the caller's out-pointer, which the driver has just written.
    let address = (!place.is_null()).then(|| unsafe { place.read_unaligned() });
    address.filter(|address| *address != 0)
}

/// Returns the device of stream-ordered memory that the driver has created: the pool's, whatever context is current.
fn device_of_memory(address: Address) -> Option<DeviceOrdinal> {
    let mut device: c_int = 0;
    let place = (&raw mut device).cast::<c_void>();
    let code = call_driver!(cuPointerGetAttribute(
        place => *mut c_void, DEVICE_ORDINAL => c_int, address => Address
    ));
    (code == SUCCESS).then_some(DeviceOrdinal(device))
}

/// Returns the device whose pool a stream uses: the stream's own, whatever context is current.
fn device_of_stream(stream: usize) -> Option<DeviceOrdinal> {
    let mut context: Pointer = std::ptr::null_mut();
    let handle: Pointer = std::ptr::with_exposed_provenance_mut(stream);
    let is_default = stream <= STREAM_PER_THREAD;
    if is_default
        || call_driver!(cuStreamGetCtx(handle => Pointer, &raw mut context => *mut Pointer))
            != SUCCESS
    {
        return contexts::current_device().ok();
    }
    device_of(context)
}

/// The device of stream-ordered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolOf {
    /// The stream's.
    Stream,
    /// A caller's pool, whose device cannot be queried. So the memory is allocated first.
    Caller,
}

/// Allocates stream-ordered memory with `allocate`. If it does not fit the budget, `free` frees it again.
fn stream_ordered(
    (address, bytes): (*mut Address, usize),
    stream: usize,
    pool: PoolOf,
    allocate: impl FnOnce() -> c_int,
    free: impl FnOnce(Address) -> c_int,
) -> c_int {
    let _pass = pass();
    // Memory of a graph is created and freed by its launches.
    if capture_of(stream).is_some() {
        return allocate();
    }
    let known = (pool == PoolOf::Stream).then(|| device_of_stream(stream)).flatten();
    let before = match known.map(|device| room_on(Some(device), bytes)).transpose() {
        Ok(before) => before,
        Err(code) => return code,
    };
    // SAFETY: the caller's out-pointer.
    let untouched = (!address.is_null()).then(|| unsafe { address.read_unaligned() });
    let code = allocate();
    let Some(made) = made(address).filter(|_| code == SUCCESS) else {
        return code;
    };
    let device = known.or_else(|| device_of_memory(made));
    let counted = match before.map_or_else(|| room_on(device, bytes), Ok) {
        Ok(counted) => counted,
        Err(refused) => {
            let code = free(made);
            if let Some(untouched) = untouched {
                // SAFETY: as above. What is refused leaves it as it was.
                unsafe { address.write_unaligned(untouched) };
            }
            if code != SUCCESS {
                tracing::warn!(code, "stream-ordered memory beyond the budget stays");
            }
            return refused;
        }
    };
    count(made, bytes, device, stays::STREAM_ORDERED, counted);
    code
}

macro_rules! allocate_async {
    ($symbol:ident ( $($arg:ident : $ty:ty),* ) of $pool:ident, $free:ident) => {
        /// Allocates memory in the order of a stream.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            address: *mut Address,
            bytes: usize,
            $($arg: $ty,)*
            stream: Pointer,
        ) -> c_int {
            let allocate = || {
                call_driver!($symbol(address, bytes, $($arg,)* stream))
            };
            let free = |made| call_driver!($free(made => Address, stream => Pointer));
            let value = stream_value(stream, stringify!($symbol));
            runtime::caught(|| {
                stream_ordered((address, bytes), value, PoolOf::$pool, allocate, free)
            })
        }
    };
}

allocate_async!(cuMemAllocAsync() of Stream, cuMemFreeAsync);
allocate_async!(cuMemAllocAsync_ptsz() of Stream, cuMemFreeAsync_ptsz);
allocate_async!(cuMemAllocFromPoolAsync(pool: Pointer) of Caller, cuMemFreeAsync);
allocate_async!(cuMemAllocFromPoolAsync_ptsz(pool: Pointer) of Caller, cuMemFreeAsync_ptsz);

/// Allocates managed memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(
    address: *mut Address,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    runtime::caught(|| {
        let _pass = pass();
        let code = call_driver!(cuMemAllocManaged(address, bytes, flags));
        if let Some(address) = made(address).filter(|_| code == SUCCESS) {
            count(address, bytes, None, stays::MANAGED, Counted::No);
        }
        code
    })
}

/// Allocates rows of memory, each padded to the device's pitch.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    address: *mut Address,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> c_int {
    runtime::caught(|| {
        let _pass = pass();
        let row_bytes = width.div_ceil(PITCH_BYTES).saturating_mul(PITCH_BYTES);
        let counted = match room(row_bytes.saturating_mul(height)) {
            Ok(counted) => counted,
            Err(code) => return code,
        };
        let code = call_driver!(cuMemAllocPitch_v2(address, pitch, width, height, element));
        if let Some(address) = made(address).filter(|_| code == SUCCESS && !pitch.is_null()) {
            // SAFETY: the caller's out-pointer, which the driver has just written.
            let pitch = unsafe { pitch.read_unaligned() };
            count(address, pitch.saturating_mul(height), None, stays::PITCHED, counted);
        }
        code
    })
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Array3dDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: such an array has no memory until some is mapped.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;

/// Returns the bytes of an array's elements, without padding of the device. A height or depth of 0 means a lower dimension.
fn array_bytes(sides: [usize; 3], format: c_int, channels: c_uint) -> usize {
    // `CUarray_format`: of 8, 16 and 32 bits, without and with a sign; half and float. Others are compressed or planar.
    let bytes = match format {
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => 1,
    };
    let channels = usize::try_from(channels).unwrap_or(1);
    sides.iter().fold(bytes * channels, |all, side| all.saturating_mul((*side).max(1)))
}

macro_rules! create_array {
    ($symbol:ident, $descriptor:ty, |$wanted:ident| $bytes:expr) => {
        /// Makes an array.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(array: *mut Pointer, wanted: *const $descriptor) -> c_int {
            runtime::caught(|| {
                let _pass = pass();
                // SAFETY: the caller's structure of this layout, or null.
                let bytes = unsafe { wanted.as_ref() }.map_or(0, |$wanted| $bytes);
                let counted = match room(bytes) {
                    Ok(counted) => counted,
                    Err(code) => return code,
                };
                let code = call_driver!($symbol(array, wanted));
                if code == SUCCESS
                    && let Some(made) = made(array.cast())
                {
                    count(made, bytes, None, stays::ARRAYS, counted);
                }
                code
            })
        }
    };
}

create_array!(cuArrayCreate_v2, ArrayDescriptor, |wanted| {
    array_bytes([wanted.width, wanted.height, 1], wanted.format, wanted.channels)
});
create_array!(cuArray3DCreate_v2, Array3dDescriptor, |wanted| {
    let sides = [wanted.width, wanted.height, wanted.depth];
    let has_memory = wanted.flags & WITHOUT_MEMORY == 0;
    if has_memory { array_bytes(sides, wanted.format, wanted.channels) } else { 0 }
});

/// Ends an array.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArrayDestroy(array: Pointer) -> c_int {
    runtime::caught(|| {
        if let Some(member) = runtime::member() {
            // This comes before the driver frees the value, which another array may get immediately.
            member.pool().natives().freed(DeviceAddress(array.addr() as u64));
        }
        call_driver!(cuArrayDestroy(array))
    })
}

/// Passes the gate for a move of managed memory. A move to a device waits, as new memory does.
fn pass_prefetch(is_to_device: bool) -> Option<Pass<'static>> {
    let passage = if is_to_device { Passage::Use } else { Passage::GiveUp };
    runtime::member().map(|member| member.gate().pass(passage))
}

macro_rules! prefetch {
    ($first:ident, $second:ident, $batch:ident, $discarding:ident) => {
        /// Moves managed memory.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $first(
            address: Address,
            bytes: usize,
            device: c_int,
            stream: Pointer,
        ) -> c_int {
runtime::caught(|| {
            let _pass = pass_prefetch(device != DEVICE_CPU);
            call_driver!($first(
                address => Address, bytes => usize, device => c_int, stream => Pointer
            ))
})
        }

        /// Moves managed memory.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $second(
            address: Address,
            bytes: usize,
            place: Location,
            flags: c_uint,
            stream: Pointer,
        ) -> c_int {
runtime::caught(|| {
            let _pass = pass_prefetch(place.kind == LocationKind::DEVICE);
            call_driver!($second(
                address => Address, bytes => usize, place => Location, flags => c_uint,
                stream => Pointer
            ))
})
        }

        prefetch!(@batch $batch);
        prefetch!(@batch $discarding);
    };
    (@batch $symbol:ident) => {
        /// Moves managed memory, several ranges in one call.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            addresses: Pointer,
            sizes: Pointer,
            count: usize,
            places: Pointer,
            indices: Pointer,
            place_count: usize,
            flags: u64,
            stream: Pointer,
        ) -> c_int {
runtime::caught(|| {
            let _pass = pass_prefetch(true);
            call_driver!($symbol(addresses, sizes, count, places, indices, place_count, flags, stream))
})
        }
    };
}

prefetch!(
    cuMemPrefetchAsync,
    cuMemPrefetchAsync_v2,
    cuMemPrefetchBatchAsync,
    cuMemDiscardAndPrefetchBatchAsync
);
prefetch!(
    cuMemPrefetchAsync_ptsz,
    cuMemPrefetchAsync_v2_ptsz,
    cuMemPrefetchBatchAsync_ptsz,
    cuMemDiscardAndPrefetchBatchAsync_ptsz
);
