//! Plain device memory: allocation, and sharing by `cudaIpc`.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;

use sublet_cuda_driver::{Answer, blocks, ipc, vmm};
use tenants::member::IPC_LIBRARY;
use vmm_pool::Native;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode};
use vmm_pool::gate::Passage;
use vmm_pool::sync::lock;

use super::context::device_of;
use super::graph::capture_of;
use super::{
    Address, SUCCESS, instead, late_frees, look_at, range, stream_value, with_caller, write_out,
};
use crate::contexts::{self, pointer_of, with_current};
use crate::driver::call_driver;
use crate::look::Names;
use crate::peers;
use crate::runtime::{self, Member, answered, class_of_caller};
use crate::saver;
use sublet_interpose::Pointer;

/// Waits for work that may use the block at `address`, in any context. The current context stays the same.
pub(crate) fn settle(member: &Member, address: DeviceAddress) -> DriverCode {
    let (current, owner) =
        (contexts::current_context(), member.pool().holdings().block_context(address));
    if owner.is_some() && owner == current {
        return DriverCode(settle_here());
    }
    if let Some(owner) = owner {
        let code = with_current(pointer_of(owner), settle_here).unwrap_or(SUCCESS);
        if code != SUCCESS {
            return DriverCode(code);
        }
    }
    let device = member.pool().holdings().block_device(address);
    match device.filter(|device| contexts::current_device() != Ok(*device)) {
        Some(device) => settle_device(device),
        None => DriverCode(settle_here()),
    }
}

/// Waits for the work that may use paged memory of `device`. It may be work of any of its contexts.
fn settle_paged(device: DeviceOrdinal) -> DriverCode {
    let is_alone = contexts::own().is_empty() && contexts::current_device() == Ok(device);
    if is_alone { DriverCode(settle_here()) } else { settle_device(device) }
}

/// Waits for the work of every context of `device`.
fn settle_device(device: DeviceOrdinal) -> DriverCode {
    let own = contexts::own().into_iter().map(pointer_of);
    let is_used = contexts::has_primary_context(device.0);
    let primary = is_used.then(|| contexts::primary_context(device.0)).flatten();
    for context in own.filter(|context| device_of(*context) == Some(device)).chain(primary) {
        let code = with_current(context, settle_here).unwrap_or(SUCCESS);
        if code != SUCCESS {
            return DriverCode(code);
        }
    }
    DriverCode::SUCCESS
}

/// Waits for the work of the current context.
fn settle_here() -> c_int {
    if let Some(_wait) = runtime::CAPTURES.counts().wait() {
        let code = call_driver!(cuCtxSynchronize());
        if DriverCode(code) != DriverCode::STREAM_CAPTURE_UNSUPPORTED {
            return code;
        }
    }
    settle_beside_captures()
}

/// Waits for the work of the current context by a free of the driver's memory, if a stream of the context may be under capture. A
/// wait for a context spoils all captures in it, in any mode and by any thread. A free waits too, and the driver allows it on
/// exactly the threads on which it would allow the requested free.
fn settle_beside_captures() -> c_int {
    // The first size gets a mapping of its own, and the second fits into memory that the driver has already.
    for bytes in [2_usize << 20, 1] {
        let mut probe: Address = 0;
        let made = call_driver!(cuMemAlloc_v2(&raw mut probe, bytes));
        match DriverCode(made) {
            DriverCode::SUCCESS => return call_driver!(cuMemFree_v2(probe)),
            DriverCode::OUT_OF_MEMORY => {}
            code => return code.0,
        }
    }
    // Memory is so short that the free is more important than the capture.
    call_driver!(cuCtxSynchronize())
}

with_caller! {
    /// Allocates plain device memory.
    cuMemAlloc_v2(address: *mut Address, size: usize) => mem_alloc
}

unsafe extern "C" fn mem_alloc(
    address: *mut Address,
    size: usize,
    _unused2: usize,
    _unused3: usize,
    _unused4: usize,
    caller: usize,
) -> c_int {
    let driver = || call_driver!(cuMemAlloc_v2(address, size));
    if address.is_null() || size == 0 {
        return driver();
    }
    // Without a current context the driver's error is the right one.
    let Ok(device) = contexts::current_device() else {
        return driver();
    };
    if saver::refuses(size) {
        return DriverCode::OUT_OF_MEMORY.0;
    }
    answered(
        runtime::join,
        |member| {
            let library = class_of_caller(caller);
            let accessors = &runtime::ACCESSORS;
            if let Some(reason) =
                blocks::stays_native(size as u64, library, || peers::may_be_outside(member))
            {
                let _pass = member.gate().pass(Passage::Use);
                let counted = match blocks::take_room(member, device, size as u64) {
                    Ok(counted) => counted,
                    Err(code) => return Answer::Refused(code),
                };
                let code = DriverCode(driver());
                if let Err(code) = code.ok() {
                    return Answer::Refused(code);
                }
                // SAFETY: the call succeeded, so it wrote the address.
                let made = DeviceAddress(unsafe { address.read() });
                let (size_bytes, context) = (size as u64, contexts::listed_current());
                let native = Native { size_bytes, device, context, reason, counted };
                member.pool().natives().allocated(made, native);
                return Answer::Done(());
            }
            // From now on, pauses and frees wait for the work of this context.
            let context = contexts::listed_current();
            let paged = runtime::WINDOWS.allocate(member, device, size as u64, library);
            if let Some(paged) = paged {
                return paged.map(|made| write_out!(address, made.0));
            }
            late_frees::settle();
            let made = blocks::allocate(member, accessors, device, context, size as u64, library);
            made.map(|made| write_out!(address, made.0))
        },
        driver,
    )
}

instead! {
    /// Frees plain device memory.
    cuMemFree_v2(address: Address), by |member| {
        if late_frees::is_going(member, address) {
            return Answer::Refused(DriverCode::INVALID_VALUE);
        }
        let address = DeviceAddress(address);
        let paged = runtime::WINDOWS.free(member, address, settle_paged);
        paged.unwrap_or_else(|| blocks::free(member, address, || settle(member, address)))
    }
}

macro_rules! free_async {
    ($symbol:ident, $launch:ident, $wait:ident) => {
        /// Frees memory when a stream reaches this point.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(address: Address, stream: Pointer) -> c_int {
            answered(
                runtime::member,
                |member| {
                    // A graph frees memory that its own nodes have created, which is no block.
                    let capture = capture_of(stream_value(stream, stringify!($symbol)));
                    let (paged, place) = (&runtime::WINDOWS, DeviceAddress(address));
                    if paged.has(place) {
                        // It waits, as the caller itself could, because others may get the addresses next.
                        let waited = capture.is_none().then(|| {
                            let (pool, wait) = (member.pool(), || call_driver!($wait(stream => Pointer)));
                            let _asking = pool.door().pass();
                            pool.driver().beside_captures(wait)
                        });
                        let code = DriverCode(waited.unwrap_or(DriverCode::INVALID_VALUE.0));
                        let freed = paged.free(member, place, |_| code);
                        return freed.unwrap_or(Answer::AskDriver);
                    }
                    late_frees::free(member, address, |function, data| match capture {
                        Some(_) => DriverCode::INVALID_VALUE.0,
                        None => call_driver!($launch(
                            stream => Pointer, function => extern "C" fn(Pointer),
                            data => Pointer
                        )),
                    })
                },
                || {
                    // This is memory of the driver, which may be freed while all of the pool's memory is paused.
                    let _pass = runtime::member().map(|member| member.gate().pass(Passage::GiveUp));
                    call_driver!($symbol(address, stream))
                },
            )
        }
    };
}

free_async!(cuMemFreeAsync, cuLaunchHostFunc, cuStreamSynchronize);
free_async!(cuMemFreeAsync_ptsz, cuLaunchHostFunc_ptsz, cuStreamSynchronize_ptsz);

instead! {
    /// Writes a handle by which another process can open plain memory.
    cuIpcGetMemHandle(handle: *mut [u8; ipc::HANDLE_BYTES], address: Address), unless handle.is_null(),
    by |member| ipc::handle_of(member, DeviceAddress(address)).map(|made| write_out!(handle, made))
}

/// `CUipcMemHandle` is passed by value: a structure of 64 bytes, which the ABI puts on the stack.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IpcHandle([u8; ipc::HANDLE_BYTES]);

/// Memory that this process has open by the driver's own handles, and how often.
static OPENED_BY_DRIVER: Mutex<BTreeMap<Address, usize>> = Mutex::new(BTreeMap::new());

/// Returns why the driver could not restore this process from a deep pause. Driver 580: its restore fails with
/// `CUDA_ERROR_INVALID_VALUE` while such memory is open.
pub(crate) fn unfreezable() -> Option<String> {
    let count = lock(&OPENED_BY_DRIVER).len();
    (count > 0).then(|| {
        format!(
            "{count} allocations are open by cudaIpc handles of the driver's own: of processes that do not run under Sublet (start those in the \
             same tenant, or in one of its family), or of allocations under 1 MiB"
        )
    })
}

macro_rules! ipc_open {
    ($symbol:ident) => {
        /// Opens another process's plain memory.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            address: *mut Address,
            handle: IpcHandle,
            flags: c_uint,
        ) -> c_int {
            let driver = || {
                let code = call_driver!($symbol(address, handle, flags));
                if code == 0 {
                    // SAFETY: the driver has written there.
                    *lock(&OPENED_BY_DRIVER).entry(unsafe { *address }).or_default() += 1;
                }
                code
            };
            if address.is_null() {
                return driver();
            }
            let Ok(device) = contexts::current_device() else {
                return driver();
            };
            answered(
                runtime::join,
                |member| {
                    let accessors = &runtime::ACCESSORS;
                    let opened = ipc::open(member, accessors, &handle.0, device, IPC_LIBRARY);
                    opened.map(|made| {
                        if let Some(context) = contexts::listed_current() {
                            member.pool().holdings().set_block_context(made, context);
                        }
                        write_out!(address, made.0);
                    })
                },
                driver,
            )
        }
    };
}

ipc_open!(cuIpcOpenMemHandle);
ipc_open!(cuIpcOpenMemHandle_v2);

/// Closes what [`cuIpcOpenMemHandle_v2`] opened.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcCloseMemHandle(address: Address) -> c_int {
    answered(
        runtime::member,
        |member| {
            let address = DeviceAddress(address);
            ipc::close(member, address, || settle(member, address))
        },
        || {
            let code = call_driver!(cuIpcCloseMemHandle(address));
            if code == 0 {
                let mut all = lock(&OPENED_BY_DRIVER);
                if let Some(times) = all.remove(&address).filter(|times| *times > 1) {
                    all.insert(address, times - 1);
                }
            }
            code
        },
    )
}

/// Writes a handle by which a network card reaches memory. The memory's pages must stay from then on.
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
    let driver = || call_driver!(cuMemGetHandleForAddressRange(handle, start, size, kind, flags));
    // Paged memory is first moved to the device, and cannot leave before it is known to stay.
    let named = [range(start, size)];
    let names = Names::Ranges(&named);
    let _here = match look_at("cuMemGetHandleForAddressRange", names, std::ptr::null_mut()) {
        Ok(here) => here,
        Err(code) => return code,
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
