//! The one table of functions that we stand in for, and the functions that only wait.
//!
//! | verdict | means | where |
//! | --- | --- | --- |
//! | wait | passes the gate, then calls the driver with the same arguments | `waiting!` below |
//! | replace | answered from the pool, or passed on when it is not about memory of ours | [`crate::replaced`] |
//! | pass | not hooked, for the reason given | `PASSED` in the completeness test |
//!
//! From each row come an exported function of the driver's own name (for libraries that link the driver
//! directly), the entry that `dlsym` and `cuGetProcAddress` answer with, and the line that the
//! completeness test checks against every function that NVIDIA's header declares.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use sublet_cuda_driver::lookup::{Hook, base_name_const};
use vmm_pool::gate::Passage;

use crate::{real, replaced, runtime};

/// An argument that is only passed on.
pub(crate) type Pointer = *mut c_void;

/// A function of the driver's, looked up when it is first called.
#[derive(Debug)]
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicUsize,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    /// The function's address; `None` where the driver has none of that name, or there is no driver.
    pub(crate) fn address(&self) -> Option<*mut c_void> {
        let known = self.address.load(Ordering::Relaxed);
        if known != 0 {
            return Some(std::ptr::with_exposed_provenance_mut(known));
        }
        let found = real::driver_symbol(self.name)?.as_ptr();
        self.address.store(found.expose_provenance(), Ordering::Relaxed);
        Some(found)
    }
}

/// A C string of an identifier.
macro_rules! c_name {
    ($symbol:ident) => {
        match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        }
    };
}
pub(crate) use c_name;

/// Calls the driver's own function `$symbol`, or returns that the driver is not initialised.
macro_rules! call_driver {
    ($symbol:ident ( $($value:expr => $ty:ty),* $(,)? )) => {{
        static REAL: $crate::hooks::Real = $crate::hooks::Real::new($crate::hooks::c_name!($symbol));
        match REAL.address() {
            Some(address) => {
                // SAFETY: the address is the driver's function of this name, whose signature is this.
                let function = unsafe {
                    ::std::mem::transmute::<
                        *mut ::std::ffi::c_void,
                        unsafe extern "C" fn($($ty),*) -> ::std::ffi::c_int,
                    >(address)
                };
                // SAFETY: the arguments are the caller's own, or ours under the rules of the function.
                unsafe { function($($value),*) }
            }
            None => ::vmm_pool::driver::DriverCode::NOT_INITIALIZED.0,
        }
    }};
}
pub(crate) use call_driver;

macro_rules! waiting_function {
    ($symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        /// Waits until the tenant is active, then calls the driver.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            let call = || {
                let _pass = runtime::member().map(|member| member.gate().pass(Passage::Use));
                call_driver!($symbol($($arg => $ty),*))
            };
            let code = call();
            if replaced::is_refused_copy(stringify!($symbol), code) && replaced::opens_blocks() {
                return call();
            }
            code
        }
    };
}

macro_rules! hook_row {
    ($path:path, $symbol:ident, $version:literal) => {{
        const BASE: (&str, bool) = base_name_const(stringify!($symbol));
        Hook::new(stringify!($symbol), BASE.0, $version, BASE.1, || {
            ($path as *const ()).expose_provenance()
        })
    }};
}

macro_rules! waiting {
    ($($symbol:ident @ $version:literal $(| $per_thread:ident @ $pt_version:literal)?
       ( $($arg:ident : $ty:ty),* );)*) => {
        /// Functions that wait, then call the driver.
        pub mod waits {
            use super::*;
            $(
                waiting_function!($symbol($($arg: $ty),*));
                waiting!(@second $($per_thread)? ( $($arg : $ty),* ));
            )*
        }
        const WAITING: &[Hook] = &[$(
            hook_row!(waits::$symbol, $symbol, $version),
            $(hook_row!(waits::$per_thread, $per_thread, $pt_version),)?
        )*];
    };
    (@second ( $($arg:ident : $ty:ty),* )) => {};
    (@second $symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        waiting_function!($symbol($($arg: $ty),*));
    };
}

waiting! {
    cuLaunchKernel @ 4000 | cuLaunchKernel_ptsz @ 7000 (
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
        parameters: Pointer, extra: Pointer
    );
    cuLaunchKernelEx @ 11060 | cuLaunchKernelEx_ptsz @ 11060 (
        config: Pointer, function: Pointer, parameters: Pointer, extra: Pointer
    );
    cuLaunchCooperativeKernel @ 9000 | cuLaunchCooperativeKernel_ptsz @ 9000 (
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
        parameters: Pointer
    );
    cuMemcpy @ 4000 | cuMemcpy_ptds @ 7000 (target: u64, source: u64, bytes: usize);
    cuMemcpyPeer @ 4000 | cuMemcpyPeer_ptds @ 7000 (
        target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize
    );
    cuMemcpyHtoD_v2 @ 3020 | cuMemcpyHtoD_v2_ptds @ 7000 (
        target: u64, source: Pointer, bytes: usize
    );
    cuMemcpyDtoH_v2 @ 3020 | cuMemcpyDtoH_v2_ptds @ 7000 (
        target: Pointer, source: u64, bytes: usize
    );
    cuMemcpyDtoD_v2 @ 3020 | cuMemcpyDtoD_v2_ptds @ 7000 (target: u64, source: u64, bytes: usize);
    cuMemcpyDtoA_v2 @ 3020 | cuMemcpyDtoA_v2_ptds @ 7000 (
        target: Pointer, target_offset: usize, source: u64, bytes: usize
    );
    cuMemcpyAtoD_v2 @ 3020 | cuMemcpyAtoD_v2_ptds @ 7000 (
        target: u64, source: Pointer, source_offset: usize, bytes: usize
    );
    cuMemcpy2D_v2 @ 3020 | cuMemcpy2D_v2_ptds @ 7000 (copy: Pointer);
    cuMemcpy2DUnaligned_v2 @ 3020 | cuMemcpy2DUnaligned_v2_ptds @ 7000 (copy: Pointer);
    cuMemcpy3D_v2 @ 3020 | cuMemcpy3D_v2_ptds @ 7000 (copy: Pointer);
    cuMemcpy3DPeer @ 4000 | cuMemcpy3DPeer_ptds @ 7000 (copy: Pointer);
    cuMemsetD8_v2 @ 3020 | cuMemsetD8_v2_ptds @ 7000 (target: u64, value: u8, count: usize);
    cuMemsetD16_v2 @ 3020 | cuMemsetD16_v2_ptds @ 7000 (target: u64, value: u16, count: usize);
    cuMemsetD32_v2 @ 3020 | cuMemsetD32_v2_ptds @ 7000 (target: u64, value: c_uint, count: usize);
    cuMemsetD2D8_v2 @ 3020 | cuMemsetD2D8_v2_ptds @ 7000 (
        target: u64, pitch: usize, value: u8, width: usize, height: usize
    );
    cuMemsetD2D16_v2 @ 3020 | cuMemsetD2D16_v2_ptds @ 7000 (
        target: u64, pitch: usize, value: u16, width: usize, height: usize
    );
    cuMemsetD2D32_v2 @ 3020 | cuMemsetD2D32_v2_ptds @ 7000 (
        target: u64, pitch: usize, value: c_uint, width: usize, height: usize
    );
    cuMemcpyAsync @ 4000 | cuMemcpyAsync_ptsz @ 7000 (
        target: u64, source: u64, bytes: usize, stream: Pointer
    );
    cuMemcpyPeerAsync @ 4000 | cuMemcpyPeerAsync_ptsz @ 7000 (
        target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize,
        stream: Pointer
    );
    cuMemcpyHtoDAsync_v2 @ 3020 | cuMemcpyHtoDAsync_v2_ptsz @ 7000 (
        target: u64, source: Pointer, bytes: usize, stream: Pointer
    );
    cuMemcpyDtoHAsync_v2 @ 3020 | cuMemcpyDtoHAsync_v2_ptsz @ 7000 (
        target: Pointer, source: u64, bytes: usize, stream: Pointer
    );
    cuMemcpyDtoDAsync_v2 @ 3020 | cuMemcpyDtoDAsync_v2_ptsz @ 7000 (
        target: u64, source: u64, bytes: usize, stream: Pointer
    );
    cuMemcpy2DAsync_v2 @ 3020 | cuMemcpy2DAsync_v2_ptsz @ 7000 (copy: Pointer, stream: Pointer);
    cuMemcpy3DAsync_v2 @ 3020 | cuMemcpy3DAsync_v2_ptsz @ 7000 (copy: Pointer, stream: Pointer);
    cuMemcpy3DPeerAsync @ 4000 | cuMemcpy3DPeerAsync_ptsz @ 7000 (copy: Pointer, stream: Pointer);
    cuMemsetD8Async @ 3020 | cuMemsetD8Async_ptsz @ 7000 (
        target: u64, value: u8, count: usize, stream: Pointer
    );
    cuMemsetD16Async @ 3020 | cuMemsetD16Async_ptsz @ 7000 (
        target: u64, value: u16, count: usize, stream: Pointer
    );
    cuMemsetD32Async @ 3020 | cuMemsetD32Async_ptsz @ 7000 (
        target: u64, value: c_uint, count: usize, stream: Pointer
    );
    cuMemsetD2D8Async @ 3020 | cuMemsetD2D8Async_ptsz @ 7000 (
        target: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Pointer
    );
    cuMemsetD2D16Async @ 3020 | cuMemsetD2D16Async_ptsz @ 7000 (
        target: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Pointer
    );
    cuMemsetD2D32Async @ 3020 | cuMemsetD2D32Async_ptsz @ 7000 (
        target: u64, pitch: usize, value: c_uint, width: usize, height: usize, stream: Pointer
    );
    cuMemcpyBatchAsync @ 12080 | cuMemcpyBatchAsync_ptsz @ 12080 (
        targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
        indices: Pointer, attribute_count: usize, fail_index: Pointer, stream: Pointer
    );
    cuMemcpyBatchAsync_v2 @ 13000 | cuMemcpyBatchAsync_v2_ptsz @ 13000 (
        targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
        indices: Pointer, attribute_count: usize, stream: Pointer
    );
    cuMemcpy3DBatchAsync @ 12080 | cuMemcpy3DBatchAsync_ptsz @ 12080 (
        count: usize, operations: Pointer, fail_index: Pointer, flags: c_ulonglong,
        stream: Pointer
    );
    cuMemcpy3DBatchAsync_v2 @ 13000 | cuMemcpy3DBatchAsync_v2_ptsz @ 13000 (
        count: usize, operations: Pointer, flags: c_ulonglong, stream: Pointer
    );
    cuMemcpyWithAttributesAsync @ 13020 | cuMemcpyWithAttributesAsync_ptsz @ 13020 (
        target: u64, source: u64, bytes: usize, attributes: Pointer, stream: Pointer
    );
    cuMemcpy3DWithAttributesAsync @ 13020 | cuMemcpy3DWithAttributesAsync_ptsz @ 13020 (
        operation: Pointer, flags: c_ulonglong, stream: Pointer
    );
    cuMemBatchDecompressAsync @ 12060 | cuMemBatchDecompressAsync_ptsz @ 12060 (
        operations: Pointer, count: usize, flags: c_uint, error_index: Pointer, stream: Pointer
    );
    cuStreamWaitValue32_v2 @ 11070 | cuStreamWaitValue32_v2_ptsz @ 11070 (
        stream: Pointer, address: u64, value: c_uint, flags: c_uint
    );
    cuStreamWaitValue64_v2 @ 11070 | cuStreamWaitValue64_v2_ptsz @ 11070 (
        stream: Pointer, address: u64, value: u64, flags: c_uint
    );
    cuStreamWriteValue32_v2 @ 11070 | cuStreamWriteValue32_v2_ptsz @ 11070 (
        stream: Pointer, address: u64, value: c_uint, flags: c_uint
    );
    cuStreamWriteValue64_v2 @ 11070 | cuStreamWriteValue64_v2_ptsz @ 11070 (
        stream: Pointer, address: u64, value: u64, flags: c_uint
    );
    cuStreamBatchMemOp_v2 @ 11070 | cuStreamBatchMemOp_v2_ptsz @ 11070 (
        stream: Pointer, count: c_uint, operations: Pointer, flags: c_uint
    );
    cuStreamWaitValue32 @ 8000 | cuStreamWaitValue32_ptsz @ 8000 (
        stream: Pointer, address: u64, value: c_uint, flags: c_uint
    );
    cuStreamWaitValue64 @ 9000 | cuStreamWaitValue64_ptsz @ 9000 (
        stream: Pointer, address: u64, value: u64, flags: c_uint
    );
    cuStreamWriteValue32 @ 8000 | cuStreamWriteValue32_ptsz @ 8000 (
        stream: Pointer, address: u64, value: c_uint, flags: c_uint
    );
    cuStreamWriteValue64 @ 9000 | cuStreamWriteValue64_ptsz @ 9000 (
        stream: Pointer, address: u64, value: u64, flags: c_uint
    );
    cuStreamBatchMemOp @ 8000 | cuStreamBatchMemOp_ptsz @ 8000 (
        stream: Pointer, count: c_uint, operations: Pointer, flags: c_uint
    );
    cuMemAllocAsync @ 11020 | cuMemAllocAsync_ptsz @ 11020 (
        address: Pointer, bytes: usize, stream: Pointer
    );
    cuMemAllocFromPoolAsync @ 11020 | cuMemAllocFromPoolAsync_ptsz @ 11020 (
        address: Pointer, bytes: usize, pool: Pointer, stream: Pointer
    );
    cuMemGetAccess @ 10020 (flags: Pointer, location: Pointer, address: u64);
}

macro_rules! replacing {
    ($($symbol:ident @ $version:literal;)*) => {
        const REPLACING: &[Hook] = &[$(hook_row!(replaced::$symbol, $symbol, $version),)*];
    };
}

replacing! {
    cuCtxCreate_v2 @ 3020;
    cuCtxCreate_v3 @ 11040;
    cuCtxCreate_v4 @ 12050;
    cuCtxDestroy_v2 @ 4000;
    cuCtxDisablePeerAccess @ 4000;
    cuCtxEnablePeerAccess @ 4000;
    cuDeviceGetAttribute @ 2000;
    cuGetProcAddress @ 11030;
    cuGetProcAddress_v2 @ 12000;
    cuGraphAddChildGraphNode @ 10000;
    cuGraphAddNode @ 12020;
    cuGraphAddNode_v2 @ 12030;
    cuGraphAddNode_v3 @ 13040;
    cuGraphClone @ 10000;
    cuGraphDestroy @ 10000;
    cuGraphExecChildGraphNodeSetParams @ 11010;
    cuGraphExecDestroy @ 10000;
    cuGraphExecUpdate @ 10020;
    cuGraphExecUpdate_v2 @ 12000;
    cuGraphInstantiate @ 10000;
    cuGraphInstantiateWithFlags @ 11040;
    cuGraphInstantiateWithParams @ 12000;
    cuGraphInstantiateWithParams_ptsz @ 12000;
    cuGraphInstantiate_v2 @ 11000;
    cuGraphLaunch @ 10000;
    cuGraphLaunch_ptsz @ 10000;
    cuIpcCloseMemHandle @ 4010;
    cuIpcGetMemHandle @ 4010;
    cuIpcOpenMemHandle_v2 @ 11000;
    cuMemAddressFree @ 10020;
    cuMemAlloc_v2 @ 3020;
    cuMemCreate @ 10020;
    cuMemExportToShareableHandle @ 10020;
    cuMemFreeAsync @ 11020;
    cuMemFreeAsync_ptsz @ 11020;
    cuMemFree_v2 @ 3020;
    cuMemGetAddressRange_v2 @ 3020;
    cuMemGetAllocationPropertiesFromHandle @ 10020;
    cuMemGetHandleForAddressRange @ 11070;
    cuMemImportFromShareableHandle @ 10020;
    cuMemMap @ 10020;
    cuMemRelease @ 10020;
    cuMemRetainAllocationHandle @ 11000;
    cuMemSetAccess @ 10020;
    cuMemUnmap @ 10020;
    cuMulticastCreate @ 12010;
    cuPointerGetAttribute @ 4000;
    cuPointerGetAttributes @ 7000;
    cuStreamBeginCaptureToGraph @ 12030;
    cuStreamBeginCaptureToGraph_ptsz @ 12030;
    cuStreamBeginCapture_v2 @ 10010;
    cuStreamBeginRecaptureToGraph @ 13030;
    cuStreamBeginRecaptureToGraph_ptsz @ 13030;
    cuStreamBeginCapture_v2_ptsz @ 10010;
    cuStreamEndCapture @ 10000;
    cuStreamEndCapture_ptsz @ 10000;
}

/// Further names by which `cuGetProcAddress` gives a function out: from 12.0 on, the name of the oldest form
/// is that of the one with flags.
const RENAMED: &[Hook] =
    &[Hook::new("cuGraphInstantiateWithFlags", "cuGraphInstantiate", 12_000, false, || {
        (replaced::cuGraphInstantiateWithFlags as *const ()).expose_provenance()
    })];

/// Every function we stand in for.
pub(crate) fn all() -> impl Iterator<Item = &'static Hook> {
    REPLACING.iter().chain(WAITING).chain(RENAMED)
}

/// `cuGetProcAddress_v2`.
pub(crate) type GetProcAddressV2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong, *mut c_int) -> c_int;

/// The driver's own `cuGetProcAddress_v2`, where it has one (12.0 and newer).
pub(crate) fn real_cu_get_proc_address_v2() -> Option<GetProcAddressV2> {
    static REAL: Real = Real::new(c"cuGetProcAddress_v2");
    let address = REAL.address()?;
    // SAFETY: the address is the driver's function of this name, whose signature is this.
    Some(unsafe { std::mem::transmute::<*mut c_void, GetProcAddressV2>(address) })
}
