//! Our functions take and return what the driver's do, as NVIDIA's header has it.
//!
//! Compared with the bindings of `cudarc`, which are made from that header: how many arguments there are does not compile
//! otherwise, and each is passed alike. What a pointer points to is not compared: the structures that we read have checks of
//! their own in `vmm-pool`.

use std::collections::BTreeSet;

use cudarc::driver::sys;
use sublet_cuda_driver::functions::FUNCTIONS;
use vmm_pool::driver::Location;

use crate::hooks::asks::*;
use crate::hooks::waits::*;
use crate::hooks::{ASKING, WAITING};
use crate::interposed::*;
use crate::replaced::*;

/// The way in which the C interface of x86-64 passes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    /// In an integer register, of this many bytes.
    Integer(usize),
    /// In an integer register, as an address.
    Address,
    /// In memory, of this size and alignment.
    Structure(usize, usize),
}

trait Value {
    const PASSED: Passed;
}

impl<T> Value for *const T {
    const PASSED: Passed = Passed::Address;
}

impl<T> Value for *mut T {
    const PASSED: Passed = Passed::Address;
}

macro_rules! values {
    (integers { $($integer:ty,)* } structures { $($structure:ty,)* }) => {
        $(impl Value for $integer {
            const PASSED: Passed = Passed::Integer(size_of::<$integer>());
        })*
        $(impl Value for $structure {
            const PASSED: Passed = Passed::Structure(size_of::<$structure>(), align_of::<$structure>());
        })*
    };
}

values! {
    integers {
        u8,
        u16,
        u32,
        u64,
        usize,
        i32,
        sys::CUdevice_attribute,
        sys::CUmemAllocationHandleType,
        sys::CUmemRangeHandleType,
        sys::CUpointer_attribute,
        sys::CUresult,
        sys::CUstreamCaptureMode,
    }
    structures {
        IpcHandle,
        Location,
        sys::CUipcMemHandle,
        sys::CUmemLocation,
    }
}

/// The ways in which a function passes its arguments, and its result, which is the last.
trait Signature {
    fn passed(self) -> Vec<Passed>;
}

macro_rules! signatures {
    ($(($($argument:ident)*),)*) => {$(
        impl<$($argument: Value,)* R: Value> Signature for unsafe fn($($argument),*) -> R {
            fn passed(self) -> Vec<Passed> {
                vec![$($argument::PASSED,)* R::PASSED]
            }
        }
        impl<$($argument: Value,)* R: Value> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn passed(self) -> Vec<Passed> {
                vec![$($argument::PASSED,)* R::PASSED]
            }
        }
    )*};
}

signatures! {
    (),
    (A),
    (A B),
    (A B C),
    (A B C D),
    (A B C D E),
    (A B C D E F),
    (A B C D E F G),
    (A B C D E F G H),
    (A B C D E F G H I),
    (A B C D E F G H I J),
    (A B C D E F G H I J K),
}

macro_rules! pairs {
    ($(#[$doc:meta])* $name:ident: $($symbol:ident [$($argument:tt)*];)*) => {
        $(#[$doc])*
        fn $name() -> Vec<(&'static str, [Vec<Passed>; 2])> {
            vec![$((
                stringify!($symbol),
                [
                    ($symbol as unsafe extern "C" fn($($argument),*) -> _).passed(),
                    (sys::$symbol as unsafe fn($($argument),*) -> _).passed(),
                ],
            ),)*]
        }
    };
}

pairs! {
    /// The functions that the bindings have: how ours are called, and how the driver's are.
    bound:
    cuStreamQuery[_];
    cuStreamSynchronize[_];
    cuEventQuery[_];
    cuEventSynchronize[_];
    cuEventElapsedTime[_ _ _];
    cuEventElapsedTime_v2[_ _ _];
    cuCtxSynchronize[];
    cuLaunchKernel[_ _ _ _ _ _ _ _ _ _ _];
    cuLaunchKernelEx[_ _ _ _];
    cuLaunchCooperativeKernel[_ _ _ _ _ _ _ _ _ _];
    cuLaunch[_];
    cuLaunchGrid[_ _ _];
    cuLaunchGridAsync[_ _ _ _];
    cuLaunchCooperativeKernelMultiDevice[_ _ _];
    cuMemcpy[_ _ _];
    cuMemcpyPeer[_ _ _ _ _];
    cuMemcpyHtoD_v2[_ _ _];
    cuMemcpyDtoH_v2[_ _ _];
    cuMemcpyDtoD_v2[_ _ _];
    cuMemcpyDtoA_v2[_ _ _ _];
    cuMemcpyAtoD_v2[_ _ _ _];
    cuMemcpy2D_v2[_];
    cuMemcpy2DUnaligned_v2[_];
    cuMemcpy3D_v2[_];
    cuMemcpy3DPeer[_];
    cuMemsetD8_v2[_ _ _];
    cuMemsetD16_v2[_ _ _];
    cuMemsetD32_v2[_ _ _];
    cuMemsetD2D8_v2[_ _ _ _ _];
    cuMemsetD2D16_v2[_ _ _ _ _];
    cuMemsetD2D32_v2[_ _ _ _ _];
    cuMemcpyAsync[_ _ _ _];
    cuMemcpyPeerAsync[_ _ _ _ _ _];
    cuMemcpyHtoDAsync_v2[_ _ _ _];
    cuMemcpyDtoHAsync_v2[_ _ _ _];
    cuMemcpyDtoDAsync_v2[_ _ _ _];
    cuMemcpy2DAsync_v2[_ _];
    cuMemcpy3DAsync_v2[_ _];
    cuMemcpy3DPeerAsync[_ _];
    cuMemsetD8Async[_ _ _ _];
    cuMemsetD16Async[_ _ _ _];
    cuMemsetD32Async[_ _ _ _];
    cuMemsetD2D8Async[_ _ _ _ _ _];
    cuMemsetD2D16Async[_ _ _ _ _ _];
    cuMemsetD2D32Async[_ _ _ _ _ _];
    cuMemcpyBatchAsync[_ _ _ _ _ _ _ _ _];
    cuMemcpy3DBatchAsync[_ _ _ _ _];
    cuMemBatchDecompressAsync[_ _ _ _ _];
    cuStreamWaitValue32_v2[_ _ _ _];
    cuStreamWaitValue64_v2[_ _ _ _];
    cuStreamWriteValue32_v2[_ _ _ _];
    cuStreamWriteValue64_v2[_ _ _ _];
    cuStreamBatchMemOp_v2[_ _ _ _];
    cuMemAllocAsync[_ _ _];
    cuMemAllocFromPoolAsync[_ _ _ _];
    cuMemGetAccess[_ _ _];
    cuArray3DCreate_v2[_ _];
    cuArrayCreate_v2[_ _];
    cuArrayDestroy[_];
    cuMemAllocManaged[_ _ _];
    cuMemAllocPitch_v2[_ _ _ _ _];
    cuMemPrefetchAsync[_ _ _ _];
    cuMemPrefetchAsync_v2[_ _ _ _ _];
    cuCtxCreate_v2[_ _ _];
    cuCtxCreate_v3[_ _ _ _ _];
    cuCtxCreate_v4[_ _ _ _];
    cuCtxDestroy_v2[_];
    cuCtxDetach[_];
    cuCtxDisablePeerAccess[_];
    cuCtxEnablePeerAccess[_ _];
    cuDeviceGetAttribute[_ _ _];
    cuDeviceTotalMem_v2[_ _];
    cuDevicePrimaryCtxRelease_v2[_];
    cuDevicePrimaryCtxReset_v2[_];
    cuDevicePrimaryCtxRetain[_ _];
    cuGetProcAddress_v2[_ _ _ _ _];
    cuGraphAddChildGraphNode[_ _ _ _ _];
    cuGraphAddNode[_ _ _ _ _];
    cuGraphAddNode_v2[_ _ _ _ _ _];
    cuGraphClone[_ _];
    cuGraphDestroy[_];
    cuGraphExecChildGraphNodeSetParams[_ _ _];
    cuGraphExecDestroy[_];
    cuGraphExecUpdate_v2[_ _ _];
    cuGraphInstantiateWithFlags[_ _ _];
    cuGraphInstantiateWithParams[_ _ _];
    cuGraphLaunch[_ _];
    cuIpcCloseMemHandle[_];
    cuIpcGetMemHandle[_ _];
    cuIpcOpenMemHandle_v2[_ _ _];
    cuMemAddressFree[_ _];
    cuMemAddressReserve[_ _ _ _ _];
    cuMemAlloc_v2[_ _];
    cuMemCreate[_ _ _ _];
    cuMemExportToShareableHandle[_ _ _ _];
    cuMemFreeAsync[_ _];
    cuMemFree_v2[_];
    cuMemGetAddressRange_v2[_ _ _];
    cuMemGetAllocationPropertiesFromHandle[_ _];
    cuMemGetInfo_v2[_ _];
    cuMemGetHandleForAddressRange[_ _ _ _ _];
    cuMemImportFromShareableHandle[_ _ _];
    cuMemMap[_ _ _ _ _];
    cuMemRelease[_];
    cuMemRetainAllocationHandle[_ _];
    cuMemSetAccess[_ _ _ _];
    cuMemUnmap[_ _];
    cuMulticastCreate[_ _];
    cuPointerGetAttribute[_ _ _];
    cuPointerGetAttributes[_ _ _ _];
    cuStreamBeginCaptureToGraph[_ _ _ _ _ _];
    cuStreamBeginCapture_v2[_ _];
    cuLibraryUnload[_];
    cuModuleUnload[_];
    cuStreamDestroy_v2[_];
    cuStreamEndCapture[_ _];
}

macro_rules! twins {
    ($($per_thread:ident = $legacy:ident [$($argument:tt)*];)*) => {
        /// Those for the per-thread default stream, which no bindings have. Each has the type of its legacy twin, or this
        /// does not compile. Functions that only wait are made in pairs (`waiting!`), and not listed.
        fn per_thread() -> Vec<&'static str> {
            $(
                let _same = [
                    $per_thread as unsafe extern "C" fn($($argument),*) -> _,
                    $legacy as unsafe extern "C" fn($($argument),*) -> _,
                ];
            )*
            vec![$(stringify!($per_thread),)*]
        }
    };
}

twins! {
    cuMemAllocAsync_ptsz = cuMemAllocAsync[_ _ _];
    cuMemAllocFromPoolAsync_ptsz = cuMemAllocFromPoolAsync[_ _ _ _];
    cuMemDiscardAndPrefetchBatchAsync_ptsz = cuMemDiscardAndPrefetchBatchAsync[_ _ _ _ _ _ _ _];
    cuMemPrefetchAsync_ptsz = cuMemPrefetchAsync[_ _ _ _];
    cuMemPrefetchAsync_v2_ptsz = cuMemPrefetchAsync_v2[_ _ _ _ _];
    cuMemPrefetchBatchAsync_ptsz = cuMemPrefetchBatchAsync[_ _ _ _ _ _ _ _];
    cuGraphInstantiateWithParams_ptsz = cuGraphInstantiateWithParams[_ _ _];
    cuGraphLaunch_ptsz = cuGraphLaunch[_ _];
    cuMemFreeAsync_ptsz = cuMemFreeAsync[_ _];
    cuStreamBeginCaptureToGraph_ptsz = cuStreamBeginCaptureToGraph[_ _ _ _ _ _];
    cuStreamBeginRecaptureToGraph_ptsz = cuStreamBeginRecaptureToGraph[_ _ _ _ _];
    cuStreamBeginCapture_ptsz = cuStreamBeginCapture[_];
    cuStreamBeginCapture_v2_ptsz = cuStreamBeginCapture_v2[_ _];
    cuStreamEndCapture_ptsz = cuStreamEndCapture[_ _];
}

/// Functions that the bindings do not have, each with why. Nothing checks their signatures.
const UNBOUND: &[(&str, &[&str])] = &[
    (
        "newer than CUDA 12.8, whose header the bindings that we build with are made from",
        &[
            "cuCtxSynchronize_v2",
            "cuMemcpyBatchAsync_v2",
            "cuMemcpy3DBatchAsync_v2",
            "cuFabricCpyBatchAsync",
            "cuMemcpyWithAttributesAsync",
            "cuMemcpy3DWithAttributesAsync",
            "cuGraphAddNode_v3",
            "cuLogicalEndpointCreate",
            "cuLogicalEndpointIdReserve",
            "cuLogicalEndpointImport",
            "cuMemDiscardAndPrefetchBatchAsync",
            "cuMemPrefetchBatchAsync",
            "cuStreamBeginRecaptureToGraph",
        ],
    ),
    (
        "older forms, which the header of CUDA 12.8 has under their plain names no more",
        &[
            "cuCtxCreate",
            "cuCtxDestroy",
            "cuStreamBeginCapture",
            "cuStreamDestroy",
            "cuDevicePrimaryCtxRelease",
            "cuIpcOpenMemHandle",
            "cuDevicePrimaryCtxReset",
            "cuStreamWaitValue32",
            "cuStreamWaitValue64",
            "cuStreamWriteValue32",
            "cuStreamWriteValue64",
            "cuStreamBatchMemOp",
            "cuGetProcAddress",
            "cuGraphExecUpdate",
            "cuGraphInstantiate",
            "cuGraphInstantiate_v2",
        ],
    ),
];

#[test]
fn our_functions_are_called_as_the_drivers_are() {
    for (name, [ours, drivers]) in bound() {
        assert_eq!(ours, drivers, "{name}");
    }
}

#[test]
fn every_function_of_the_table_is_compared_or_listed() {
    let unbound = UNBOUND.iter().flat_map(|(_, names)| *names).copied();
    let is_made_in_pairs = |symbol| WAITING.iter().chain(ASKING).any(|hook| hook.symbol == symbol);
    let made_in_pairs =
        FUNCTIONS.iter().filter(|twin| twin.per_thread && is_made_in_pairs(twin.symbol));
    let all: Vec<&str> = bound()
        .into_iter()
        .map(|(name, _)| name)
        .chain(per_thread())
        .chain(made_in_pairs.map(|twin| twin.symbol))
        .chain(unbound)
        .collect();
    let names: BTreeSet<&str> = all.iter().copied().collect();
    assert_eq!(names.len(), all.len(), "one is listed twice");
    assert_eq!(names, FUNCTIONS.iter().map(|function| function.symbol).collect());
}
