//! The driver's functions for virtual memory.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::path::Path;

use sublet_cuda_driver::{Answer, caller, vmm};
use sublet_registrations::device_files::{self, DeviceFile, Looks};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DriverCode, HANDLE_TYPE_POSIX_FD,
};

use super::{Address, Handle, instead, late_frees, range, with_caller, write_out};
use crate::contexts;
use crate::driver::call_driver;
use crate::runtime::{self, Member, answered, class_of_caller, maker_of};
use crate::saver;

/// Checks the flags of a call. The driver knows no flags of these calls yet, and refuses all. A call without flags is `Done`. A
/// call with flags about Sublet's `handle` is refused as the driver would, which must not see the handle. The driver judges any
/// other call.
fn without_flags(member: &Member, handle: Option<Handle>, flags: c_ulonglong) -> Answer<()> {
    match (flags, handle) {
        (0, _) => Answer::Done(()),
        (_, Some(handle)) => vmm::properties(member, handle).and_refuse(DriverCode::INVALID_VALUE),
        (_, None) => Answer::AskDriver,
    }
}

with_caller! {
    /// Creates physical memory.
    cuMemCreate(
        handle: *mut Handle, size: usize, prop: *const AllocationProp, flags: c_ulonglong
    ) => mem_create
}

unsafe extern "C" fn mem_create(
    handle: *mut Handle,
    size: usize,
    prop: *const AllocationProp,
    flags: c_ulonglong,
    _unused: usize,
    caller: usize,
) -> c_int {
    let driver = || call_driver!(cuMemCreate(handle, size, prop, flags));
    if handle.is_null() {
        return driver();
    }
    // SAFETY: the caller's pointer to a structure of this layout, or null.
    let Some(prop) = (unsafe { prop.as_ref() }) else {
        return driver();
    };
    saver::settle();
    answered(
        runtime::join,
        |member| {
            late_frees::settle();
            let (library, purpose) = maker_of(caller);
            if library == caller::NCCL && runtime::SLABS.uses_slabs() {
                spare_slabs_from_cards();
            }
            without_flags(member, None, flags)
                .and_then(|()| vmm::create(member, size as u64, prop, library, purpose))
                .map(|value| write_out!(handle, value))
        },
        driver,
    )
}

/// Keeps NCCL's memory out of slabs once a network card is open. A card holds the whole allocation that contains registered
/// memory, and its contents stay on the device. With separate allocations, registered memory keeps no other memory in place.
/// Memory that is created within milliseconds of the card's opening may still be a part of a slab, which then stays whole.
fn spare_slabs_from_cards() {
    static LOOKS: Looks = Looks::new();
    let Some(open) = LOOKS.open_in(Path::new(device_files::OWN_DESCRIPTORS)) else { return };
    let pins = |kind: &DeviceFile| matches!(kind, DeviceFile::Verbs | DeviceFile::GdrCopy);
    let Some((_, path)) = open.iter().find(|(kind, _)| pins(kind)) else { return };
    runtime::SLABS.use_slabs(false);
    tracing::info!(file = %path.display(), "NCCL's memory is not made as parts of larger allocations: a network card may hold some of it");
}

instead! {
    /// Gives back one reference of a handle.
    cuMemRelease(handle: Handle), by |member| vmm::release(member, handle)
}

instead! {
    /// Maps a handle.
    cuMemMap(start: Address, size: usize, offset: usize, handle: Handle, flags: c_ulonglong),
    by |member| {
        // The work of the current context may use the memory.
        let _listed = contexts::listed_current();
        without_flags(member, Some(handle), flags)
            .and_then(|()| vmm::map(member, range(start, size), offset as u64, handle))
    }
}

instead! {
    /// Unmaps a range.
    cuMemUnmap(start: Address, size: usize), by |member| vmm::unmap(member, range(start, size))
}

with_caller! {
    /// Reserves addresses.
    cuMemAddressReserve(
        start: *mut Address, size: usize, alignment: usize, hint: Address, flags: c_ulonglong
    ) => address_reserve
}

unsafe extern "C" fn address_reserve(
    start: *mut Address,
    size: usize,
    alignment: usize,
    hint: Address,
    flags: c_ulonglong,
    caller: usize,
) -> c_int {
    let driver = || call_driver!(cuMemAddressReserve(start, size, alignment, hint, flags));
    if start.is_null() || hint != 0 || flags != 0 {
        vmm::reserves_elsewhere();
        return driver();
    }
    answered(
        runtime::member,
        |member| {
            let library = class_of_caller(caller);
            vmm::address_reserve(member, size as u64, alignment as u64, library)
                .map(|address| write_out!(start, address))
        },
        driver,
    )
}

instead! {
    /// Frees a reservation.
    cuMemAddressFree(start: Address, size: usize),
    by |member| vmm::address_free(member, range(start, size))
}

/// A number above the places of any machine: devices and parts of the host.
const PLACES_MAX: usize = 4096;

/// Sets the devices that may reach a range.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    start: Address,
    size: usize,
    access: *const AccessDesc,
    count: usize,
) -> c_int {
    let driver = || call_driver!(cuMemSetAccess(start, size, access, count));
    if access.is_null() || count == 0 {
        return driver();
    }
    if count > PLACES_MAX {
        return DriverCode::INVALID_VALUE.0;
    }
    // SAFETY: the caller's array of `count` structures of this layout.
    let access = unsafe { std::slice::from_raw_parts(access, count) };
    answered(runtime::member, |member| vmm::set_access(member, range(start, size), access), driver)
}

instead! {
    /// Turns a handle into a descriptor: a ticket, for memory of ours.
    cuMemExportToShareableHandle(
        shareable: *mut c_void, handle: Handle, kind: c_int, flags: c_ulonglong
    ), unless shareable.is_null(),
    by |member| {
        if kind != HANDLE_TYPE_POSIX_FD {
            return vmm::properties(member, handle).and_refuse(DriverCode::NOT_SUPPORTED);
        }
        let target: *mut RawFd = shareable.cast();
        without_flags(member, Some(handle), flags)
            .and_then(|()| vmm::export(member, handle))
            .map(|fd| write_out!(target, fd.into_raw_fd()))
    }
}

with_caller! {
    /// Turns a descriptor into a handle: a ticket is redeemed with its owner.
    cuMemImportFromShareableHandle(
        handle: *mut Handle, shareable: *mut c_void, kind: c_int
    ) => mem_import
}

unsafe extern "C" fn mem_import(
    handle: *mut Handle,
    shareable: *mut c_void,
    kind: c_int,
    _unused3: usize,
    _unused4: usize,
    caller: usize,
) -> c_int {
    let driver = || call_driver!(cuMemImportFromShareableHandle(handle, shareable, kind));
    let number = RawFd::try_from(shareable.addr()).unwrap_or(-1);
    if handle.is_null() || kind != HANDLE_TYPE_POSIX_FD || number < 0 {
        return driver();
    }
    // SAFETY: the caller passes a descriptor of its own that stays open during the call; a number that is
    // none makes every use of it fail with EBADF.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    answered(
        runtime::join,
        |member| {
            let library = class_of_caller(caller);
            vmm::import(member, fd, library).map(|value| write_out!(handle, value))
        },
        driver,
    )
}

instead! {
    /// Returns the handle of the memory that is mapped at an address.
    cuMemRetainAllocationHandle(handle: *mut Handle, address: *mut c_void), unless handle.is_null(),
    by |member| {
        let address = DeviceAddress(address.addr() as u64);
        vmm::retain(member, address).map(|value| write_out!(handle, value))
    }
}

instead! {
    /// Returns the properties with which a handle was created.
    cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: Handle),
    unless prop.is_null(),
    by |member| vmm::properties(member, handle).map(|value| write_out!(prop, value))
}
