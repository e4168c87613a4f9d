//! A device's memory, and the part of it that the tenant can get: within its budget, if any, and with the memory of others in
//! turns. Libraries size their caches by these figures.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::c_int;

use vmm_pool::budget::Figure;
use vmm_pool::driver::{CudaDriver, DeviceOrdinal, Driver as _};

use super::{SUCCESS, late_frees, size_t};
use crate::driver::{DRIVER, call_driver};
use crate::{contexts, environment, runtime};

/// Returns the bytes that the tenant may hold on `device` and those that it holds. None without a budget there. A
/// process that asks before it has memory joins its tenant for the answer.
fn within(device: DeviceOrdinal) -> Option<(u64, u64)> {
    let member = runtime::member().or_else(|| {
        let may_count = environment::current().has_budgets() || runtime::others_count();
        if may_count { runtime::join() } else { None }
    })?;
    let Figure { budget_bytes, held_bytes } = member.pool().budget().figure(device)?;
    budget_bytes.map(|budget_bytes| (budget_bytes, held_bytes))
}

/// Returns the free memory of the current context's device that the tenant can get, and the total: no more than its budget
/// allows.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    if runtime::member().is_some() {
        late_frees::settle();
    }
    let code = call_driver!(cuMemGetInfo_v2(free, total));
    if code != SUCCESS {
        return code;
    }
    let device = contexts::current_device().ok();
    if let Some(device) = device.filter(|_| !free.is_null() && !total.is_null()) {
        add_others(device, free, total);
    }
    if let Some((budget_bytes, held_bytes)) = device.and_then(within) {
        lower(free, size_t(budget_bytes.saturating_sub(held_bytes)));
        lower(total, size_t(budget_bytes));
    }
    code
}

/// Adds the memory that others in turns would free to the free memory.
fn add_others(device: DeviceOrdinal, free: *mut usize, total: *mut usize) {
    let uuid = || {
        let driver = CudaDriver::from_symbols(&|name| DRIVER.symbol(name)).ok()?;
        driver.device_uuid(device).ok()
    };
    let others_bytes = runtime::others_give(uuid, || {
        // If this call fails, the figures of the first one stay.
        call_driver!(cuMemGetInfo_v2(free, total));
    });
    if others_bytes == 0 {
        return;
    }
    // SAFETY: the caller's out-pointer, which the driver has just written.
    let free_bytes = unsafe { free.read_unaligned() };
    // SAFETY: as above.
    let total_bytes = unsafe { total.read_unaligned() };
    let all = free_bytes.saturating_add(size_t(others_bytes)).min(total_bytes);
    // SAFETY: as above.
    unsafe { free.write_unaligned(all) };
}

/// Returns the total memory of a device: no more than the tenant's budget.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    let code = call_driver!(cuDeviceTotalMem_v2(bytes, device));
    if code != SUCCESS {
        return code;
    }
    if let Some((budget_bytes, _)) = within(DeviceOrdinal(device)) {
        lower(bytes, size_t(budget_bytes));
    }
    code
}

/// Writes `most` instead of anything greater.
fn lower(place: *mut usize, most: usize) {
    if place.is_null() {
        return;
    }
    // SAFETY: the caller's out-pointer, which the driver has just written.
    let value = unsafe { place.read_unaligned() };
    // SAFETY: as above.
    unsafe { place.write_unaligned(value.min(most)) };
}
