//! The functions that torch's `CUDAPluggableAllocator` calls. All their memory is pool memory, whatever its size, and belongs to
//! the region of the calling thread.

#![expect(unsafe_code, reason = "exports C functions and calls the driver")]

use std::ffi::c_int;

use sublet_cuda_driver::{Answer, blocks, caller};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode};

use crate::driver::call_driver;
use crate::{contexts, replaced, runtime, saver};
use sublet_interpose::Pointer;

/// Runs `work` with the device's primary context current, whatever context is current now. `None` without a usable driver or
/// device.
fn on_device<T>(device: c_int, work: impl FnOnce() -> T) -> Option<T> {
    let context = contexts::primary_context(device)?;
    let done = contexts::with_current(context, || runtime::netted(work))?;
    done.inspect_err(|_| tracing::error!(device, "torch's allocator failed inside of us")).ok()
}

fn allocate(size_bytes: u64, device: c_int) -> Option<DeviceAddress> {
    let size = usize::try_from(size_bytes).ok()?;
    if saver::refuses(size) {
        return None;
    }
    if let Some(member) = runtime::join() {
        let accessors = &runtime::ACCESSORS;
        let (device, context) = (DeviceOrdinal(device), contexts::listed_current());
        let made = blocks::allocate(member, accessors, device, context, size_bytes, caller::TORCH);
        return match made {
            Answer::Done(address) => Some(address),
            Answer::Refused(_) | Answer::AskDriver => None,
        };
    }
    let mut address: u64 = 0;
    let code = call_driver!(cuMemAlloc_v2(&raw mut address => *mut u64, size => usize));
    (code == DriverCode::SUCCESS.0).then_some(DeviceAddress(address))
}

fn free(address: DeviceAddress) -> DriverCode {
    DriverCode(runtime::answered(
        runtime::member,
        |member| blocks::free(member, address, || replaced::settle(member, address)),
        || call_driver!(cuMemFree_v2(address.0 => u64)),
    ))
}

/// Allocates `size` bytes on `device`; null when `size` is not positive or there is no memory.
///
/// # Safety
/// The stream is not used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_torch_malloc(
    size: isize,
    device: c_int,
    _stream: Pointer,
) -> Pointer {
    let null = std::ptr::null_mut();
    let Some(size_bytes) = u64::try_from(size).ok().filter(|size| *size > 0) else {
        return null;
    };
    let made = on_device(device, || allocate(size_bytes, device)).flatten();
    let address = made.and_then(|address| usize::try_from(address.0).ok());
    address.map_or(null, std::ptr::with_exposed_provenance_mut)
}

/// Frees memory of [`sublet_torch_malloc`], after the device's work. Nothing happens for null.
///
/// # Safety
/// `ptr` came from [`sublet_torch_malloc`] for this device and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_torch_free(
    ptr: Pointer,
    _size: isize,
    device: c_int,
    _stream: Pointer,
) {
    if ptr.is_null() {
        return;
    }
    let address = DeviceAddress(ptr.expose_provenance() as u64);
    match on_device(device, || free(address)) {
        Some(DriverCode::SUCCESS) => {}
        // At the end of a process, the driver ends before torch frees its last blocks.
        code => tracing::debug!(?code, device, address = address.0, "torch's block was not freed"),
    }
}
