//! The functions that the pool answers, under the driver's names and signatures.
//!
//! Each takes C arguments apart, asks the adapter, and writes results back; a null out-pointer goes to the
//! driver, whose error it then is. Calls that make memory carry the caller's return address along, by
//! which the caller's library is known.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

use sublet_nccl::{Answer, vmm};
use sublet_torch_allocator::{blocks, ipc};
use tenants::gate::Passage;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, HANDLE_TYPE_POSIX_FD,
    VaRange,
};

use crate::hooks::{Pointer, call_driver};
use crate::lookup;
use crate::runtime::{self, Member, answered, class_of_caller};

type Handle = c_ulonglong;
type Address = u64;

const SUCCESS: c_int = DriverCode::SUCCESS.0;

/// A range from C arguments.
fn range(start: Address, size: usize) -> VaRange {
    VaRange::new(DeviceAddress(start), size as u64)
}

/// Writes a result through a caller's out-pointer that the caller of this function has checked.
macro_rules! write_out {
    ($pointer:expr, $value:expr) => {{
        let value = $value;
        // SAFETY: the caller's out-pointer for one value of this type, checked not to be null.
        unsafe { $pointer.write(value) }
    }};
}

/// A function that jumps to `$body` with the caller's return address as sixth argument. Functions with up
/// to five integer arguments keep theirs where they are.
macro_rules! with_caller {
    ($(#[$doc:meta])* $symbol:ident => $body:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol() {
            naked_asm!("mov r9, qword ptr [rsp]", "jmp {body}", body = sym $body)
        }
    };
}

with_caller! {
    /// Creates physical memory.
    cuMemCreate => mem_create
}

unsafe extern "C" fn mem_create(
    handle: *mut Handle,
    size: usize,
    prop: *const AllocationProp,
    flags: c_ulonglong,
    _unused: usize,
    caller: usize,
) -> c_int {
    let driver = || {
        call_driver!(cuMemCreate(
            handle => *mut Handle, size => usize, prop => *const AllocationProp,
            flags => c_ulonglong
        ))
    };
    if handle.is_null() || flags != 0 {
        return driver();
    }
    // SAFETY: the caller's pointer to a structure of this layout, or null.
    let Some(prop) = (unsafe { prop.as_ref() }) else {
        return driver();
    };
    answered(
        runtime::join,
        |member| {
            let library = class_of_caller(caller);
            vmm::create(member, size as u64, prop, library).map(|value| write_out!(handle, value))
        },
        driver,
    )
}

/// Gives back one reference of a handle.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRelease(handle: Handle) -> c_int {
    answered(
        runtime::member,
        |member| vmm::release(member, handle),
        || call_driver!(cuMemRelease(handle => Handle)),
    )
}

/// Maps a handle.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemMap(
    start: Address,
    size: usize,
    offset: usize,
    handle: Handle,
    flags: c_ulonglong,
) -> c_int {
    answered(
        runtime::member,
        |member| vmm::map(member, range(start, size), offset as u64, handle),
        || {
            call_driver!(cuMemMap(
                start => Address, size => usize, offset => usize, handle => Handle,
                flags => c_ulonglong
            ))
        },
    )
}

/// Unmaps a range.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemUnmap(start: Address, size: usize) -> c_int {
    answered(
        runtime::member,
        |member| vmm::unmap(member, range(start, size)),
        || call_driver!(cuMemUnmap(start => Address, size => usize)),
    )
}

/// Frees a reservation.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressFree(start: Address, size: usize) -> c_int {
    answered(
        runtime::member,
        |member| vmm::address_free(member, range(start, size)),
        || call_driver!(cuMemAddressFree(start => Address, size => usize)),
    )
}

/// Sets who may reach a range.
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
    let driver = || {
        call_driver!(cuMemSetAccess(
            start => Address, size => usize, access => *const AccessDesc, count => usize
        ))
    };
    if access.is_null() || count == 0 {
        return driver();
    }
    // SAFETY: the caller's array of `count` structures of this layout.
    let access = unsafe { std::slice::from_raw_parts(access, count) };
    answered(runtime::member, |member| vmm::set_access(member, range(start, size), access), driver)
}

/// Turns a handle into a descriptor: a ticket, for memory of ours.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    shareable: *mut c_void,
    handle: Handle,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    let driver = || {
        call_driver!(cuMemExportToShareableHandle(
            shareable => *mut c_void, handle => Handle, kind => c_int, flags => c_ulonglong
        ))
    };
    if shareable.is_null() || flags != 0 {
        return driver();
    }
    let target: *mut RawFd = shareable.cast();
    answered(
        runtime::member,
        |member| {
            if kind != HANDLE_TYPE_POSIX_FD {
                let known = vmm::properties(member, handle);
                return known.and_refuse(DriverCode::NOT_SUPPORTED);
            }
            vmm::export(member, handle).map(|fd| write_out!(target, fd.into_raw_fd()))
        },
        driver,
    )
}

with_caller! {
    /// Turns a descriptor into a handle: a ticket is redeemed with its owner.
    cuMemImportFromShareableHandle => mem_import
}

unsafe extern "C" fn mem_import(
    handle: *mut Handle,
    shareable: *mut c_void,
    kind: c_int,
    _unused3: usize,
    _unused4: usize,
    caller: usize,
) -> c_int {
    let driver = || {
        call_driver!(cuMemImportFromShareableHandle(
            handle => *mut Handle, shareable => *mut c_void, kind => c_int
        ))
    };
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

/// The handle of what is mapped at an address.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(
    handle: *mut Handle,
    address: *mut c_void,
) -> c_int {
    let driver =
        || call_driver!(cuMemRetainAllocationHandle(handle => *mut Handle, address => *mut c_void));
    if handle.is_null() {
        return driver();
    }
    answered(
        runtime::member,
        |member| {
            let address = DeviceAddress(address.addr() as u64);
            vmm::retain(member, address).map(|value| write_out!(handle, value))
        },
        driver,
    )
}

/// What a handle was created with.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    prop: *mut AllocationProp,
    handle: Handle,
) -> c_int {
    let driver = || {
        call_driver!(cuMemGetAllocationPropertiesFromHandle(
            prop => *mut AllocationProp, handle => Handle
        ))
    };
    if prop.is_null() {
        return driver();
    }
    answered(
        runtime::member,
        |member| vmm::properties(member, handle).map(|value| write_out!(prop, value)),
        driver,
    )
}

/// Base and size of the allocation at an address.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut Address,
    size: *mut usize,
    address: Address,
) -> c_int {
    answered(
        runtime::member,
        |member| {
            vmm::address_range(member, DeviceAddress(address)).map(|found| {
                if !base.is_null() {
                    write_out!(base, found.start.0);
                }
                if !size.is_null() {
                    // CAST: 64-bit targets only; the driver's own sizes are of this type.
                    write_out!(size, found.size_bytes as usize);
                }
            })
        },
        || {
            call_driver!(cuMemGetAddressRange_v2(
                base => *mut Address, size => *mut usize, address => Address
            ))
        },
    )
}

/// The driver's current device of this thread.
fn current_device() -> Result<DeviceOrdinal, DriverCode> {
    let mut device: c_int = 0;
    let code = call_driver!(cuCtxGetDevice(&raw mut device => *mut c_int));
    DriverCode(code).ok().map(|()| DeviceOrdinal(device))
}

with_caller! {
    /// Allocates plain device memory.
    cuMemAlloc_v2 => mem_alloc
}

unsafe extern "C" fn mem_alloc(
    address: *mut Address,
    size: usize,
    _unused2: usize,
    _unused3: usize,
    _unused4: usize,
    caller: usize,
) -> c_int {
    let driver = || call_driver!(cuMemAlloc_v2(address => *mut Address, size => usize));
    if address.is_null() || size == 0 {
        return driver();
    }
    // Without a current context the driver's error is the right one.
    let Ok(device) = current_device() else {
        return driver();
    };
    answered(
        runtime::join,
        |member| {
            let library = class_of_caller(caller);
            let accessors = runtime::accessors();
            match blocks::allocate(member, accessors, device, size as u64, library) {
                blocks::Allocation::Made(made) => Answer::Done(write_out!(address, made.0)),
                blocks::Allocation::Refused(code) => Answer::Refused(code),
                blocks::Allocation::LeftToDriver(reason) => {
                    let _pass = member.gate().pass(Passage::Use);
                    let code = DriverCode(driver());
                    if let Err(code) = code.ok() {
                        return Answer::Refused(code);
                    }
                    // SAFETY: the call succeeded, so it wrote the address.
                    let made = DeviceAddress(unsafe { address.read() });
                    blocks::note_native(member, made, size as u64, device, reason);
                    Answer::Done(())
                }
            }
        },
        driver,
    )
}

/// Frees plain device memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: Address) -> c_int {
    answered(
        runtime::member,
        |member| free_block(member, address, || call_driver!(cuCtxSynchronize())),
        || call_driver!(cuMemFree_v2(address => Address)),
    )
}

fn free_block(member: &Member, address: Address, settle: impl FnOnce() -> c_int) -> Answer<()> {
    match blocks::free(member, DeviceAddress(address), || DriverCode(settle())) {
        None => Answer::AskDriver,
        Some(DriverCode::SUCCESS) => Answer::Done(()),
        Some(code) => Answer::Refused(code),
    }
}

macro_rules! free_async {
    ($symbol:ident, $synchronize:ident) => {
        /// Frees memory when a stream reaches this point. A block of the pool is freed at once, after the
        /// stream's work.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(address: Address, stream: Pointer) -> c_int {
            answered(
                runtime::member,
                |member| {
                    free_block(member, address, || call_driver!($synchronize(stream => Pointer)))
                },
                || {
                    let _pass = runtime::member().map(|member| member.gate().pass(Passage::Use));
                    call_driver!($symbol(address => Address, stream => Pointer))
                },
            )
        }
    };
}

free_async!(cuMemFreeAsync, cuStreamSynchronize);
free_async!(cuMemFreeAsync_ptsz, cuStreamSynchronize_ptsz);

/// A handle by which another process can open plain memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(
    handle: *mut [u8; ipc::HANDLE_BYTES],
    address: Address,
) -> c_int {
    let driver = || {
        call_driver!(cuIpcGetMemHandle(
            handle => *mut [u8; ipc::HANDLE_BYTES], address => Address
        ))
    };
    if handle.is_null() {
        return driver();
    }
    answered(
        runtime::member,
        |member| match ipc::handle_of(member, DeviceAddress(address)) {
            Some(made) => Answer::Done(write_out!(handle, made)),
            None => Answer::AskDriver,
        },
        driver,
    )
}

/// `CUipcMemHandle` is passed by value: a structure of 64 bytes, which the ABI puts on the stack.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IpcHandle([u8; ipc::HANDLE_BYTES]);

/// Opens another process's plain memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    address: *mut Address,
    handle: IpcHandle,
    flags: c_uint,
) -> c_int {
    let driver = || {
        call_driver!(cuIpcOpenMemHandle_v2(
            address => *mut Address, handle => IpcHandle, flags => c_uint
        ))
    };
    if address.is_null() {
        return driver();
    }
    let Ok(device) = current_device() else {
        return driver();
    };
    answered(
        runtime::join,
        |member| match ipc::open(member, &handle.0, device, "ipc") {
            Some(opened) => vmm::of_import(opened).map(|made| write_out!(address, made.0)),
            None => Answer::AskDriver,
        },
        driver,
    )
}

/// Closes what [`cuIpcOpenMemHandle_v2`] opened.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcCloseMemHandle(address: Address) -> c_int {
    answered(
        runtime::member,
        |member| free_block(member, address, || call_driver!(cuCtxSynchronize())),
        || call_driver!(cuIpcCloseMemHandle(address => Address)),
    )
}

/// A handle by which a network card reaches memory: its pages must then stay.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    start: Address,
    size: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    let driver = || {
        call_driver!(cuMemGetHandleForAddressRange(
            handle => *mut c_void, start => Address, size => usize, kind => c_int,
            flags => c_ulonglong
        ))
    };
    answered(
        runtime::member,
        |member| {
            let _pass = member.gate().pass(Passage::Use);
            match DriverCode(driver()) {
                DriverCode::SUCCESS => {
                    vmm::pin_for_rdma(member, range(start, size));
                    Answer::Done(())
                }
                code => Answer::Refused(code),
            }
        },
        driver,
    )
}

/// Facts about a pointer.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    address: Address,
) -> c_int {
    let _pass = runtime::member().map(|member| member.gate().pass(Passage::Use));
    let code = call_driver!(cuPointerGetAttribute(
        data => *mut c_void, attribute => c_int, address => Address
    ));
    if code == SUCCESS {
        correct_attribute(data, attribute, address);
    }
    code
}

/// Several facts about a pointer.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut c_int,
    data: *mut *mut c_void,
    address: Address,
) -> c_int {
    let _pass = runtime::member().map(|member| member.gate().pass(Passage::Use));
    let code = call_driver!(cuPointerGetAttributes(
        count => c_uint, attributes => *mut c_int, data => *mut *mut c_void, address => Address
    ));
    if code == SUCCESS {
        for index in 0..count as usize {
            // SAFETY: the driver has read this many of the caller's attributes.
            let attribute = unsafe { attributes.add(index).read() };
            // SAFETY: and written through this many of its pointers.
            let target = unsafe { data.add(index).read() };
            correct_attribute(target, attribute, address);
        }
    }
    code
}

/// A block is larger than was asked for; its size as an attribute must be what was asked for.
fn correct_attribute(data: *mut c_void, attribute: c_int, address: Address) {
    const RANGE_SIZE: c_int = 12;
    if attribute != RANGE_SIZE || data.is_null() {
        return;
    }
    let block = runtime::member().and_then(|member| {
        let address = DeviceAddress(address);
        member.pool().is_block(address).then(|| member.pool().range_of(address)).flatten()
    });
    if let Some(block) = block {
        let size: *mut usize = data.cast();
        // CAST: 64-bit targets only; the driver's own sizes are of this type.
        write_out!(size, block.size_bytes as usize);
    }
}

/// The device that a context is for.
fn device_of(context: Pointer) -> Option<DeviceOrdinal> {
    if call_driver!(cuCtxPushCurrent_v2(context => Pointer)) != SUCCESS {
        return None;
    }
    let device = current_device().ok();
    let mut popped: Pointer = std::ptr::null_mut();
    if call_driver!(cuCtxPopCurrent_v2(&raw mut popped => *mut Pointer)) != SUCCESS {
        tracing::error!("a context that was pushed could not be popped");
    }
    device
}

/// Gives the current context access to another's plain memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(peer: Pointer, flags: c_uint) -> c_int {
    let code = call_driver!(cuCtxEnablePeerAccess(peer => Pointer, flags => c_uint));
    if code == SUCCESS {
        if let (Ok(accessor), Some(owner)) = (current_device(), device_of(peer)) {
            let opened = match runtime::member() {
                Some(member) => runtime::accessors().enable(member, owner, accessor),
                None => {
                    runtime::accessors().record(owner, accessor);
                    Ok(())
                }
            };
            if let Err(error) = opened {
                tracing::error!(%error, %owner, %accessor, "peer access is incomplete");
            }
        }
    }
    code
}

/// Takes the current context's access to another's plain memory away.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDisablePeerAccess(peer: Pointer) -> c_int {
    let code = call_driver!(cuCtxDisablePeerAccess(peer => Pointer));
    if code == SUCCESS {
        if let (Ok(accessor), Some(owner)) = (current_device(), device_of(peer)) {
            runtime::accessors().disable(owner, accessor);
        }
    }
    code
}

/// What a device can do, less what a pause could not undo.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let code = call_driver!(cuDeviceGetAttribute(
        value => *mut c_int, attribute => c_int, device => c_int
    ));
    if code == SUCCESS && !value.is_null() && vmm::hidden_attribute(attribute) {
        write_out!(value, 0);
    }
    code
}

/// Multicast objects cannot be paused yet; devices say so, and this is for who does not ask them.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMulticastCreate(_handle: *mut Handle, _prop: *const c_void) -> c_int {
    if let Some(member) = runtime::join() {
        member.note(
            "a library asked for a multicast object, which cannot be paused yet; it was refused"
                .to_owned(),
        );
    }
    DriverCode::NOT_SUPPORTED.0
}

macro_rules! begin_capture {
    ($symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        /// Begins a capture; no pause starts until it ends.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(stream: Pointer, $($arg: $ty),*) -> c_int {
            let member = runtime::member();
            let _pass = member.map(|member| member.gate().pass(Passage::Use));
            let code = call_driver!($symbol(stream => Pointer, $($arg => $ty),*));
            if let (Some(member), SUCCESS) = (member, code) {
                runtime::captures().begun(member, stream.addr() as u64);
            }
            code
        }
    };
}

begin_capture!(cuStreamBeginCapture_v2(mode: c_int));
begin_capture!(cuStreamBeginCapture_v2_ptsz(mode: c_int));
begin_capture!(cuStreamBeginCaptureToGraph(
    graph: Pointer, dependencies: Pointer, data: Pointer, count: usize, mode: c_int
));
begin_capture!(cuStreamBeginCaptureToGraph_ptsz(
    graph: Pointer, dependencies: Pointer, data: Pointer, count: usize, mode: c_int
));

macro_rules! end_capture {
    ($symbol:ident) => {
        /// Ends a capture.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(stream: Pointer, graph: Pointer) -> c_int {
            let code = call_driver!($symbol(stream => Pointer, graph => Pointer));
            // A failed end ends the capture too.
            if let Some(member) = runtime::member() {
                runtime::captures().ended(member, stream.addr() as u64);
            }
            code
        }
    };
}

end_capture!(cuStreamEndCapture);
end_capture!(cuStreamEndCapture_ptsz);

/// The driver's function for a name and version, or ours in its place.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    answer: *mut Pointer,
    version: c_int,
    flags: c_ulonglong,
) -> c_int {
    let code = call_driver!(cuGetProcAddress(
        name => *const c_char, answer => *mut Pointer, version => c_int, flags => c_ulonglong
    ));
    // SAFETY: the driver has just written the caller's out-pointer.
    unsafe { lookup::exchange_answer(code, answer) };
    code
}

/// As [`cuGetProcAddress`], also telling why a name was not found.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    answer: *mut Pointer,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let code = call_driver!(cuGetProcAddress_v2(
        name => *const c_char, answer => *mut Pointer, version => c_int, flags => c_ulonglong,
        status => *mut c_int
    ));
    // SAFETY: the driver has just written the caller's out-pointer.
    unsafe { lookup::exchange_answer(code, answer) };
    code
}
