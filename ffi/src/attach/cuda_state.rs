//! The state of CUDA in a process before an attach: contexts, and runtimes that have filled their tables.

#![expect(unsafe_code, reason = "calls the driver and the CUDA runtime")]

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::NonNull;

use vmm_pool::driver::{DeviceOrdinal, DriverCode};

use super::Device;
use crate::driver::call_driver;
use crate::interposed::INTERPOSED;
use crate::{contexts, replaced};
use sublet_interpose::{Pointer, loader};

/// The most devices in one process, a guard against a wrong answer of the driver.
const DEVICES_MAX: c_int = 64;

/// Counts the process's devices. `None` if the driver, which is loaded, has not been initialised. Does not initialise it.
fn device_count() -> Option<c_int> {
    let mut count: c_int = 0;
    done(call_driver!(cuDeviceGetCount(&raw mut count => *mut c_int)))?;
    Some(count.min(DEVICES_MAX))
}

fn done(code: c_int) -> Option<()> {
    DriverCode(code).ok().ok()
}

/// True when the driver, which is loaded, has been initialised in this process.
pub(super) fn driver_is_up() -> bool {
    device_count().is_some()
}

/// Returns the devices whose primary context exists already, with their used bytes. Creates no context; the caller's current one
/// stays. The driver must be initialised.
pub(super) fn devices() -> Vec<Device> {
    let all = 0..device_count().unwrap_or(0);
    all.filter(|&device| contexts::has_primary_context(device)).filter_map(used).collect()
}

fn used(device: c_int) -> Option<Device> {
    let mut context: Pointer = std::ptr::null_mut();
    // This adds a reference to an existing context, for the time of the query.
    done(
        call_driver!(cuDevicePrimaryCtxRetain(&raw mut context => *mut Pointer, device => c_int)),
    )?;
    let (mut free, mut total): (usize, usize) = (0, 0);
    let asked = contexts::with_current(context, || {
        done(call_driver!(cuMemGetInfo_v2(
            &raw mut free => *mut usize, &raw mut total => *mut usize
        )))
    });
    done(call_driver!(cuDevicePrimaryCtxRelease_v2(device => c_int)))?;
    asked?.map(|()| Device { device, used_bytes: total.saturating_sub(free) as u64 })
}

/// Notes which devices had been given access to which devices' plain memory before the attach. The driver has no query for that.
/// So access is enabled where it may be, and disabled immediately if it was not enabled before. The caller's current context
/// stays. The driver must be initialised.
pub(super) fn learn_peer_access() {
    let all = 0..device_count().unwrap_or(0);
    let contexts: Vec<(c_int, Pointer)> = all
        .filter_map(|device| Some((device, contexts::existing_primary_context(device)?)))
        .collect();
    for &(accessor, context) in &contexts {
        contexts::with_current(context, || {
            for &(owner, peer) in contexts.iter().filter(|(owner, _)| *owner != accessor) {
                if had_access(accessor, owner, peer) {
                    replaced::may_reach(DeviceOrdinal(owner), DeviceOrdinal(accessor));
                }
            }
        });
    }
}

/// Did the current context, on device `accessor`, have access to the context `peer` on device `owner`?
fn had_access(accessor: c_int, owner: c_int, peer: Pointer) -> bool {
    let mut may: c_int = 0;
    let asked = call_driver!(cuDeviceCanAccessPeer(
        &raw mut may => *mut c_int, accessor => c_int, owner => c_int
    ));
    if asked != DriverCode::SUCCESS.0 || may == 0 {
        return false;
    }
    match DriverCode(call_driver!(cuCtxEnablePeerAccess(peer => Pointer, 0 => c_uint))) {
        DriverCode::PEER_ACCESS_ALREADY_ENABLED => true,
        DriverCode::SUCCESS => {
            let code = call_driver!(cuCtxDisablePeerAccess(peer => Pointer));
            if code != DriverCode::SUCCESS.0 {
                tracing::warn!(code, accessor, owner, "access that was tried out stays enabled");
            }
            false
        }
        _ => false,
    }
}

/// The owner of the functions in a shared CUDA runtime's table of driver functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Table {
    /// The library at that path is no CUDA runtime.
    NoRuntime,
    /// Our functions.
    Ours,
    /// The driver's own functions.
    Drivers,
    /// The runtime returned this error instead.
    Silent(c_int),
}

/// Queries the library at `path`, if it is a CUDA runtime, for a function of the driver. The runtime answers with the pointer to
/// `cuGetProcAddress` that it keeps. The driver must be initialised: otherwise the runtime would start it.
pub(super) fn table_of(path: &str) -> Table {
    let table = |file: CString| {
        loader::with_function(&file, c"cudaGetDriverEntryPoint", |function| ask(function, path))
    };
    CString::new(path).ok().and_then(table).unwrap_or(Table::NoRuntime)
}

fn ask(function: NonNull<c_void>, path: &str) -> Table {
    /// `cudaGetDriverEntryPoint` of 12.0; 11.3 to 11.8 take no fourth argument and ignore it.
    type EntryPoint =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_ulonglong, *mut c_int) -> c_int;
    // The search includes dependencies, so this checks that the function is in this very library.
    if loader::file_of(function.as_ptr().expose_provenance()).as_deref() != Some(path) {
        return Table::NoRuntime;
    }
    // SAFETY: the address is the runtime's function of this name, whose signature is this.
    let function = unsafe { std::mem::transmute::<*mut c_void, EntryPoint>(function.as_ptr()) };
    let (mut found, mut status): (*mut c_void, c_int) = (std::ptr::null_mut(), 0);
    // SAFETY: the name is terminated and both out-pointers are valid.
    let code = unsafe { function(c"cuMemAlloc".as_ptr(), &raw mut found, 0, &raw mut status) };
    if code != 0 || found.is_null() {
        return Table::Silent(code);
    }
    if INTERPOSED.provider().exchanged(found) == found && loader::is_own(found.expose_provenance())
    {
        Table::Ours
    } else {
        Table::Drivers
    }
}
