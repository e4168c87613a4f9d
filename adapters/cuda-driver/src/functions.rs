//! Every function of the driver's that we stand in for, and the version that it came with.
//!
//! A table to be read: by those who export the functions, and by tests that hold it against NVIDIA's header and against
//! what is exported.

/// A function of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// The exported name, with its ABI suffix.
    pub symbol: &'static str,
    /// The name that `cuGetProcAddress` knows it by.
    pub base: &'static str,
    /// The version that `cuGetProcAddress` is asked at to get exactly this function.
    pub version: i32,
    /// Does it use the per-thread default stream (`_ptsz`, `_ptds`)?
    pub per_thread: bool,
}

impl Function {
    /// The flag that `cuGetProcAddress` is asked with to get exactly this function.
    pub fn stream_flag(&self) -> u64 {
        if self.per_thread { FLAG_PER_THREAD } else { FLAG_LEGACY }
    }
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const FLAG_PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const FLAG_LEGACY: u64 = 1;

/// Splits an exported name into base name and whether it is the per-thread variant.
const fn base_name(symbol: &'static str) -> (&'static str, bool) {
    let bytes = symbol.as_bytes();
    let mut end = bytes.len();
    let per_thread = end > 5
        && bytes[end - 5] == b'_'
        && bytes[end - 4] == b'p'
        && bytes[end - 3] == b't'
        && (bytes[end - 2] == b's' || bytes[end - 2] == b'd')
        && (bytes[end - 1] == b'z' || bytes[end - 1] == b's');
    if per_thread {
        end -= 5;
    }
    if end > 3
        && bytes[end - 3] == b'_'
        && bytes[end - 2] == b'v'
        && bytes[end - 1].is_ascii_digit()
    {
        end -= 3;
    }
    let (base, _) = symbol.split_at(end);
    (base, per_thread)
}

const fn of(symbol: &'static str, version: i32) -> Function {
    let (base, per_thread) = base_name(symbol);
    Function { symbol, base, version, per_thread }
}

/// The row of [`FUNCTIONS`] of this exported name.
///
/// # Panics
/// There is none. Meant for constants, which do not compile then.
pub const fn function(symbol: &str) -> Function {
    let mut index = 0;
    while index < FUNCTIONS.len() && !is_same(FUNCTIONS[index].symbol, symbol) {
        index += 1;
    }
    assert!(index < FUNCTIONS.len(), "no function of this name is in the table");
    FUNCTIONS[index]
}

const fn is_same(one: &str, other: &str) -> bool {
    one.len() == other.len() && common_bytes(one, other) == one.len()
}

/// Counts the bytes that both begin with.
const fn common_bytes(one: &str, other: &str) -> usize {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut index = 0;
    while index < one.len() && index < other.len() && one[index] == other[index] {
        index += 1;
    }
    index
}

/// The beginning that all names of [`FUNCTIONS`] share.
pub const PREFIX: &str = {
    let first = FUNCTIONS[0].symbol;
    let (mut bytes, mut index) = (first.len(), 1);
    while index < FUNCTIONS.len() {
        let common = common_bytes(first, FUNCTIONS[index].symbol);
        bytes = if common < bytes { common } else { bytes };
        index += 1;
    }
    first.split_at(bytes).0
};

/// Gives the macro `$rows` the functions that are answered from the pool or followed, each with its version.
#[macro_export]
macro_rules! replaced_functions {
    ($rows:ident) => {
        $rows! {
            cuMemAllocAsync 11_020;
            cuMemAllocAsync_ptsz 11_020;
            cuMemAllocFromPoolAsync 11_020;
            cuMemAllocFromPoolAsync_ptsz 11_020;
            cuMemGetAccess 10_020;
            cuArray3DCreate_v2 3020;
            cuArrayCreate_v2 3020;
            cuArrayDestroy 2000;
            cuCtxCreate 2000;
            cuCtxCreate_v2 3020;
            cuCtxCreate_v3 11_040;
            cuCtxCreate_v4 12_050;
            cuCtxDestroy 2000;
            cuCtxDestroy_v2 4000;
            cuCtxDetach 2000;
            cuCtxDisablePeerAccess 4000;
            cuCtxEnablePeerAccess 4000;
            cuDeviceGetAttribute 2000;
            cuDeviceTotalMem_v2 3020;
            cuDevicePrimaryCtxRelease 7000;
            cuDevicePrimaryCtxRelease_v2 11_000;
            cuDevicePrimaryCtxReset 7000;
            cuDevicePrimaryCtxReset_v2 11_000;
            cuDevicePrimaryCtxRetain 7000;
            cuGraphAddChildGraphNode 10_000;
            cuGraphAddNode 12_020;
            cuGraphAddNode_v2 12_030;
            cuGraphAddNode_v3 13_040;
            cuGraphClone 10_000;
            cuGraphDestroy 10_000;
            cuGraphExecChildGraphNodeSetParams 11_010;
            cuGraphExecDestroy 10_000;
            cuGraphExecUpdate 10_020;
            cuGraphExecUpdate_v2 12_000;
            cuGraphInstantiate 10_000;
            cuGraphInstantiateWithFlags 11_040;
            cuGraphInstantiateWithParams 12_000;
            cuGraphInstantiateWithParams_ptsz 12_000;
            cuGraphInstantiate_v2 11_000;
            cuGraphLaunch 10_000;
            cuGraphLaunch_ptsz 10_000;
            cuIpcCloseMemHandle 4010;
            cuIpcGetMemHandle 4010;
            cuIpcOpenMemHandle 4010;
            cuIpcOpenMemHandle_v2 11_000;
            cuMemAddressFree 10_020;
            cuMemAddressReserve 10_020;
            cuLogicalEndpointCreate 13_030;
            cuLogicalEndpointIdReserve 13_030;
            cuLogicalEndpointImport 13_030;
            cuMemAllocManaged 6000;
            cuMemAllocPitch_v2 3020;
            cuMemAlloc_v2 3020;
            cuMemCreate 10_020;
            cuMemDiscardAndPrefetchBatchAsync 13_000;
            cuMemDiscardAndPrefetchBatchAsync_ptsz 13_000;
            cuMemExportToShareableHandle 10_020;
            cuMemFreeAsync 11_020;
            cuMemFreeAsync_ptsz 11_020;
            cuMemFree_v2 3020;
            cuMemGetAddressRange_v2 3020;
            cuMemGetAllocationPropertiesFromHandle 10_020;
            cuMemGetHandleForAddressRange 11_070;
            cuMemGetInfo_v2 3020;
            cuMemImportFromShareableHandle 10_020;
            cuMemMap 10_020;
            cuMemPrefetchAsync 8000;
            cuMemPrefetchAsync_ptsz 8000;
            cuMemPrefetchAsync_v2 12_020;
            cuMemPrefetchAsync_v2_ptsz 12_020;
            cuMemPrefetchBatchAsync 13_000;
            cuMemPrefetchBatchAsync_ptsz 13_000;
            cuMemRelease 10_020;
            cuMemRetainAllocationHandle 11_000;
            cuMemSetAccess 10_020;
            cuMemUnmap 10_020;
            cuLibraryUnload 12_000;
            cuModuleUnload 2000;
            cuMulticastCreate 12_010;
            cuPointerGetAttribute 4000;
            cuPointerGetAttributes 7000;
            cuStreamBeginCaptureToGraph 12_030;
            cuStreamBeginCaptureToGraph_ptsz 12_030;
            cuStreamBeginCapture 10_000;
            cuStreamBeginCapture_ptsz 10_000;
            cuStreamBeginCapture_v2 10_010;
            cuStreamBeginRecaptureToGraph 13_030;
            cuStreamBeginRecaptureToGraph_ptsz 13_030;
            cuStreamBeginCapture_v2_ptsz 10_010;
            cuStreamDestroy 2000;
            cuStreamDestroy_v2 4000;
            cuStreamEndCapture 10_000;
            cuStreamEndCapture_ptsz 10_000;
        }
    };
}

macro_rules! table {
    ($($symbol:ident $version:literal;)*) => {
        /// The table: what waits at the gate, what looks functions up, and what is answered from the pool or followed.
        pub const FUNCTIONS: &[Function] = &[
            of("cuLaunchKernel", 4000),
            of("cuLaunchKernel_ptsz", 7000),
            of("cuLaunchKernelEx", 11_060),
            of("cuLaunchKernelEx_ptsz", 11_060),
            of("cuLaunchCooperativeKernel", 9000),
            of("cuLaunchCooperativeKernel_ptsz", 9000),
            of("cuLaunch", 2000),
            of("cuLaunchGrid", 2000),
            of("cuLaunchGridAsync", 2000),
            of("cuLaunchCooperativeKernelMultiDevice", 9000),
            of("cuMemcpy", 4000),
            of("cuMemcpy_ptds", 7000),
            of("cuMemcpyPeer", 4000),
            of("cuMemcpyPeer_ptds", 7000),
            of("cuMemcpyHtoD_v2", 3020),
            of("cuMemcpyHtoD_v2_ptds", 7000),
            of("cuMemcpyDtoH_v2", 3020),
            of("cuMemcpyDtoH_v2_ptds", 7000),
            of("cuMemcpyDtoD_v2", 3020),
            of("cuMemcpyDtoD_v2_ptds", 7000),
            of("cuMemcpyDtoA_v2", 3020),
            of("cuMemcpyDtoA_v2_ptds", 7000),
            of("cuMemcpyAtoD_v2", 3020),
            of("cuMemcpyAtoD_v2_ptds", 7000),
            of("cuMemcpy2D_v2", 3020),
            of("cuMemcpy2D_v2_ptds", 7000),
            of("cuMemcpy2DUnaligned_v2", 3020),
            of("cuMemcpy2DUnaligned_v2_ptds", 7000),
            of("cuMemcpy3D_v2", 3020),
            of("cuMemcpy3D_v2_ptds", 7000),
            of("cuMemcpy3DPeer", 4000),
            of("cuMemcpy3DPeer_ptds", 7000),
            of("cuMemsetD8_v2", 3020),
            of("cuMemsetD8_v2_ptds", 7000),
            of("cuMemsetD16_v2", 3020),
            of("cuMemsetD16_v2_ptds", 7000),
            of("cuMemsetD32_v2", 3020),
            of("cuMemsetD32_v2_ptds", 7000),
            of("cuMemsetD2D8_v2", 3020),
            of("cuMemsetD2D8_v2_ptds", 7000),
            of("cuMemsetD2D16_v2", 3020),
            of("cuMemsetD2D16_v2_ptds", 7000),
            of("cuMemsetD2D32_v2", 3020),
            of("cuMemsetD2D32_v2_ptds", 7000),
            of("cuMemcpyAsync", 4000),
            of("cuMemcpyAsync_ptsz", 7000),
            of("cuMemcpyPeerAsync", 4000),
            of("cuMemcpyPeerAsync_ptsz", 7000),
            of("cuMemcpyHtoDAsync_v2", 3020),
            of("cuMemcpyHtoDAsync_v2_ptsz", 7000),
            of("cuMemcpyDtoHAsync_v2", 3020),
            of("cuMemcpyDtoHAsync_v2_ptsz", 7000),
            of("cuMemcpyDtoDAsync_v2", 3020),
            of("cuMemcpyDtoDAsync_v2_ptsz", 7000),
            of("cuMemcpy2DAsync_v2", 3020),
            of("cuMemcpy2DAsync_v2_ptsz", 7000),
            of("cuMemcpy3DAsync_v2", 3020),
            of("cuMemcpy3DAsync_v2_ptsz", 7000),
            of("cuMemcpy3DPeerAsync", 4000),
            of("cuMemcpy3DPeerAsync_ptsz", 7000),
            of("cuMemsetD8Async", 3020),
            of("cuMemsetD8Async_ptsz", 7000),
            of("cuMemsetD16Async", 3020),
            of("cuMemsetD16Async_ptsz", 7000),
            of("cuMemsetD32Async", 3020),
            of("cuMemsetD32Async_ptsz", 7000),
            of("cuMemsetD2D8Async", 3020),
            of("cuMemsetD2D8Async_ptsz", 7000),
            of("cuMemsetD2D16Async", 3020),
            of("cuMemsetD2D16Async_ptsz", 7000),
            of("cuMemsetD2D32Async", 3020),
            of("cuMemsetD2D32Async_ptsz", 7000),
            of("cuMemcpyBatchAsync", 12_080),
            of("cuMemcpyBatchAsync_ptsz", 12_080),
            of("cuMemcpyBatchAsync_v2", 13_000),
            of("cuMemcpyBatchAsync_v2_ptsz", 13_000),
            of("cuMemcpy3DBatchAsync", 12_080),
            of("cuMemcpy3DBatchAsync_ptsz", 12_080),
            of("cuMemcpy3DBatchAsync_v2", 13_000),
            of("cuMemcpy3DBatchAsync_v2_ptsz", 13_000),
            of("cuFabricCpyBatchAsync", 13_050),
            of("cuFabricCpyBatchAsync_ptsz", 13_050),
            of("cuMemcpyWithAttributesAsync", 13_020),
            of("cuMemcpyWithAttributesAsync_ptsz", 13_020),
            of("cuMemcpy3DWithAttributesAsync", 13_020),
            of("cuMemcpy3DWithAttributesAsync_ptsz", 13_020),
            of("cuMemBatchDecompressAsync", 12_060),
            of("cuMemBatchDecompressAsync_ptsz", 12_060),
            of("cuStreamWaitValue32_v2", 11_070),
            of("cuStreamWaitValue32_v2_ptsz", 11_070),
            of("cuStreamWaitValue64_v2", 11_070),
            of("cuStreamWaitValue64_v2_ptsz", 11_070),
            of("cuStreamWriteValue32_v2", 11_070),
            of("cuStreamWriteValue32_v2_ptsz", 11_070),
            of("cuStreamWriteValue64_v2", 11_070),
            of("cuStreamWriteValue64_v2_ptsz", 11_070),
            of("cuStreamBatchMemOp_v2", 11_070),
            of("cuStreamBatchMemOp_v2_ptsz", 11_070),
            of("cuStreamWaitValue32", 8000),
            of("cuStreamWaitValue32_ptsz", 8000),
            of("cuStreamWaitValue64", 9000),
            of("cuStreamWaitValue64_ptsz", 9000),
            of("cuStreamWriteValue32", 8000),
            of("cuStreamWriteValue32_ptsz", 8000),
            of("cuStreamWriteValue64", 9000),
            of("cuStreamWriteValue64_ptsz", 9000),
            of("cuStreamBatchMemOp", 8000),
            of("cuStreamBatchMemOp_ptsz", 8000),
            of("cuStreamQuery", 2000),
            of("cuStreamQuery_ptsz", 7000),
            of("cuStreamSynchronize", 2000),
            of("cuStreamSynchronize_ptsz", 7000),
            of("cuEventQuery", 2000),
            of("cuEventSynchronize", 2000),
            of("cuEventElapsedTime", 2000),
            of("cuEventElapsedTime_v2", 12_080),
            of("cuCtxSynchronize", 2000),
            of("cuCtxSynchronize_v2", 13_000),
            of("cuGetProcAddress", 11_030),
            of("cuGetProcAddress_v2", 12_000),
            $(of(stringify!($symbol), $version),)*
        ];
    };
}

replaced_functions!(table);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn suffixes_come_off_the_base_name() {
        assert_eq!(base_name("cuMemAlloc_v2"), ("cuMemAlloc", false));
        assert_eq!(base_name("cuMemcpyDtoH_v2_ptds"), ("cuMemcpyDtoH", true));
        assert_eq!(base_name("cuLaunchKernel_ptsz"), ("cuLaunchKernel", true));
        assert_eq!(base_name("cuMemCreate"), ("cuMemCreate", false));
    }

    #[test]
    fn each_function_has_one_row_and_is_found_by_its_name() {
        let names: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.symbol).collect();
        assert_eq!(names.len(), FUNCTIONS.len());
        assert!(FUNCTIONS.iter().all(|known| function(known.symbol) == *known));
        assert_eq!(PREFIX, "cu");
    }
}
