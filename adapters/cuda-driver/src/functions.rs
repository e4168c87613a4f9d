//! Every driver function that we stand in for, and the version that introduced it.
//!
//! The code that exports the functions reads this table. Tests compare it with NVIDIA's header and with the exported functions.

/// A driver function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// The exported name, with its ABI suffix.
    pub symbol: &'static str,
    /// The name that `cuGetProcAddress` accepts.
    pub base: &'static str,
    /// The version that returns exactly this function from `cuGetProcAddress`.
    pub version: i32,
    /// Does it use the per-thread default stream (`_ptsz`, `_ptds`)?
    pub per_thread: bool,
}

impl Function {
    /// Returns the flag that gets exactly this function from `cuGetProcAddress`.
    pub fn stream_flag(&self) -> u64 {
        if self.per_thread { FLAG_PER_THREAD } else { FLAG_LEGACY }
    }
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const FLAG_PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const FLAG_LEGACY: u64 = 1;

/// Splits an exported name into its base name and whether it is the per-thread variant.
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

/// The beginning that all names of [`FUNCTIONS`] share.
pub const PREFIX: &str = "cu";

/// Passes every function that we stand in for to the macro `$take`, grouped by our treatment, each with its version.
///
/// A function that waits has its arguments and the memory that it touches. Both are in words of the crate that makes hooks.
#[macro_export]
macro_rules! driver_functions {
    ($take:ident) => {
        $take! {
            // A call that names all memory that it touches waits for that memory alone. Any other call waits for all memory.
            // Paged memory that a call touches is on the device for the stream that it works on.
            waiting {
                cuLaunchKernel 4000 | cuLaunchKernel_ptsz 7000 (
                    function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
                    parameters: Pointer, extra: Pointer
                )
                    looks [Names::Kernel { function, parameters, extra }, stream];
                cuLaunchKernelEx 11_060 | cuLaunchKernelEx_ptsz 11_060 (
                    config: Pointer, function: Pointer, parameters: Pointer, extra: Pointer
                )
                    looks [Names::Kernel { function, parameters, extra }, look::stream_of(config)];
                cuLaunchCooperativeKernel 9000 | cuLaunchCooperativeKernel_ptsz 9000 (
                    function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
                    parameters: Pointer
                )
                    looks [Names::Kernel { function, parameters, extra: std::ptr::null_mut() }, stream];
                cuLaunch 2000 (function: Pointer);
                cuLaunchGrid 2000 (function: Pointer, width: c_int, height: c_int);
                cuLaunchGridAsync 2000 (function: Pointer, width: c_int, height: c_int, stream: Pointer);
                cuLaunchCooperativeKernelMultiDevice 9000 (launches: Pointer, devices: c_uint, flags: c_uint);
                cuMemcpy 4000 | cuMemcpy_ptds 7000 (
                    target: u64, source: u64, bytes: usize
                ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
                    copies [target source bytes];
                cuMemcpyPeer 4000 | cuMemcpyPeer_ptds 7000 (
                    target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize
                ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM;
                cuMemcpyHtoD_v2 3020 | cuMemcpyHtoD_v2_ptds 7000 (
                    target: u64, source: Pointer, bytes: usize
                ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
                    copies [target source bytes];
                cuMemcpyDtoH_v2 3020 | cuMemcpyDtoH_v2_ptds 7000 (
                    target: Pointer, source: u64, bytes: usize
                ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
                    copies [target source bytes];
                cuMemcpyDtoD_v2 3020 | cuMemcpyDtoD_v2_ptds 7000 (
                    target: u64, source: u64, bytes: usize
                ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
                    copies [target source bytes];
                cuMemcpyDtoA_v2 3020 | cuMemcpyDtoA_v2_ptds 7000 (
                    target: Pointer, target_offset: usize, source: u64, bytes: usize
                ) touches [touched(source, bytes)] on NO_STREAM;
                cuMemcpyAtoD_v2 3020 | cuMemcpyAtoD_v2_ptds 7000 (
                    target: u64, source: Pointer, source_offset: usize, bytes: usize
                ) touches [touched(target, bytes)] on NO_STREAM;
                cuMemcpy2D_v2 3020 | cuMemcpy2D_v2_ptds 7000
                | cuMemcpy2DUnaligned_v2 3020 | cuMemcpy2DUnaligned_v2_ptds 7000 (copy: Pointer)
                    looks [Names::Records(copy, &COPY_2D, 1), NO_STREAM];
                cuMemcpy3D_v2 3020 | cuMemcpy3D_v2_ptds 7000 (copy: Pointer)
                    looks [Names::Records(copy, &COPY_3D, 1), NO_STREAM];
                cuMemcpy3DPeer 4000 | cuMemcpy3DPeer_ptds 7000 (copy: Pointer)
                    looks [Names::Records(copy, &COPY_3D, 1), NO_STREAM];
                cuMemsetD8_v2 3020 | cuMemsetD8_v2_ptds 7000 (
                    target: u64, value: u8, count: usize
                ) touches [touched(target, count)] on NO_STREAM;
                cuMemsetD16_v2 3020 | cuMemsetD16_v2_ptds 7000 (
                    target: u64, value: u16, count: usize
                ) touches [touched(target, count.saturating_mul(2))] on NO_STREAM;
                cuMemsetD32_v2 3020 | cuMemsetD32_v2_ptds 7000 (
                    target: u64, value: c_uint, count: usize
                ) touches [touched(target, count.saturating_mul(4))] on NO_STREAM;
                cuMemsetD2D8_v2 3020 | cuMemsetD2D8_v2_ptds 7000 (
                    target: u64, pitch: usize, value: u8, width: usize, height: usize
                ) touches [touched(target, rows_bytes(pitch, width, height))] on NO_STREAM;
                cuMemsetD2D16_v2 3020 | cuMemsetD2D16_v2_ptds 7000 (
                    target: u64, pitch: usize, value: u16, width: usize, height: usize
                ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(2), height))] on NO_STREAM;
                cuMemsetD2D32_v2 3020 | cuMemsetD2D32_v2_ptds 7000 (
                    target: u64, pitch: usize, value: c_uint, width: usize, height: usize
                ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(4), height))] on NO_STREAM;
                cuMemcpyAsync 4000 | cuMemcpyAsync_ptsz 7000 (
                    target: u64, source: u64, bytes: usize, stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream
                    copies [target source bytes stream];
                cuMemcpyPeerAsync 4000 | cuMemcpyPeerAsync_ptsz 7000 (
                    target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize,
                    stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream;
                cuMemcpyHtoDAsync_v2 3020 | cuMemcpyHtoDAsync_v2_ptsz 7000 (
                    target: u64, source: Pointer, bytes: usize, stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream
                    copies [target source bytes stream];
                cuMemcpyDtoHAsync_v2 3020 | cuMemcpyDtoHAsync_v2_ptsz 7000 (
                    target: Pointer, source: u64, bytes: usize, stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream
                    copies [target source bytes stream];
                cuMemcpyDtoDAsync_v2 3020 | cuMemcpyDtoDAsync_v2_ptsz 7000 (
                    target: u64, source: u64, bytes: usize, stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream
                    copies [target source bytes stream];
                cuMemcpy2DAsync_v2 3020 | cuMemcpy2DAsync_v2_ptsz 7000 (copy: Pointer, stream: Pointer)
                    looks [Names::Records(copy, &COPY_2D, 1), stream];
                cuMemcpy3DAsync_v2 3020 | cuMemcpy3DAsync_v2_ptsz 7000 (copy: Pointer, stream: Pointer)
                    looks [Names::Records(copy, &COPY_3D, 1), stream];
                cuMemcpy3DPeerAsync 4000 | cuMemcpy3DPeerAsync_ptsz 7000 (copy: Pointer, stream: Pointer)
                    looks [Names::Records(copy, &COPY_3D, 1), stream];
                cuMemsetD8Async 3020 | cuMemsetD8Async_ptsz 7000 (
                    target: u64, value: u8, count: usize, stream: Pointer
                ) touches [touched(target, count)] on stream;
                cuMemsetD16Async 3020 | cuMemsetD16Async_ptsz 7000 (
                    target: u64, value: u16, count: usize, stream: Pointer
                ) touches [touched(target, count.saturating_mul(2))] on stream;
                cuMemsetD32Async 3020 | cuMemsetD32Async_ptsz 7000 (
                    target: u64, value: c_uint, count: usize, stream: Pointer
                ) touches [touched(target, count.saturating_mul(4))] on stream;
                cuMemsetD2D8Async 3020 | cuMemsetD2D8Async_ptsz 7000 (
                    target: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Pointer
                ) touches [touched(target, rows_bytes(pitch, width, height))] on stream;
                cuMemsetD2D16Async 3020 | cuMemsetD2D16Async_ptsz 7000 (
                    target: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Pointer
                ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(2), height))] on stream;
                cuMemsetD2D32Async 3020 | cuMemsetD2D32Async_ptsz 7000 (
                    target: u64, pitch: usize, value: c_uint, width: usize, height: usize, stream: Pointer
                ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(4), height))] on stream;
                cuMemcpyBatchAsync 12_080 | cuMemcpyBatchAsync_ptsz 12_080 (
                    targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
                    indices: Pointer, attribute_count: usize, fail_index: Pointer, stream: Pointer
                )
                    looks [Names::Lists([targets, sources], sizes, count), stream]
                    tells fail_index;
                cuMemcpyBatchAsync_v2 13_000 | cuMemcpyBatchAsync_v2_ptsz 13_000 (
                    targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
                    indices: Pointer, attribute_count: usize, stream: Pointer
                )
                    looks [Names::Lists([targets, sources], sizes, count), stream];
                cuMemcpy3DBatchAsync 12_080 | cuMemcpy3DBatchAsync_ptsz 12_080 (
                    count: usize, operations: Pointer, fail_index: Pointer, flags: c_ulonglong,
                    stream: Pointer
                )
                    looks [Names::Records(operations, &OPERATION_3D, count), stream]
                    tells fail_index;
                cuMemcpy3DBatchAsync_v2 13_000 | cuMemcpy3DBatchAsync_v2_ptsz 13_000 (
                    count: usize, operations: Pointer, flags: c_ulonglong, stream: Pointer
                )
                    looks [Names::Records(operations, &OPERATION_3D, count), stream];
                cuFabricCpyBatchAsync 13_050 | cuFabricCpyBatchAsync_ptsz 13_050 (
                    count: usize, operations: Pointer, flags: c_ulonglong, stream: Pointer
                )
                    looks [Names::Records(operations, &FABRIC_COPY, count), stream];
                cuMemcpyWithAttributesAsync 13_020 | cuMemcpyWithAttributesAsync_ptsz 13_020 (
                    target: u64, source: u64, bytes: usize, attributes: Pointer, stream: Pointer
                ) touches [touched(target, bytes), touched(source, bytes)] on stream;
                cuMemcpy3DWithAttributesAsync 13_020 | cuMemcpy3DWithAttributesAsync_ptsz 13_020 (
                    operation: Pointer, flags: c_ulonglong, stream: Pointer
                )
                    looks [Names::Records(operation, &OPERATION_3D, 1), stream];
                cuMemBatchDecompressAsync 12_060 | cuMemBatchDecompressAsync_ptsz 12_060 (
                    operations: Pointer, count: usize, flags: c_uint, error_index: Pointer, stream: Pointer
                )
                    looks [Names::Records(operations, &DECOMPRESSION, count), stream]
                    tells error_index;
                cuStreamWaitValue32 8000 | cuStreamWaitValue32_ptsz 8000
                | cuStreamWaitValue32_v2 11_070 | cuStreamWaitValue32_v2_ptsz 11_070
                | cuStreamWriteValue32 8000 | cuStreamWriteValue32_ptsz 8000
                | cuStreamWriteValue32_v2 11_070 | cuStreamWriteValue32_v2_ptsz 11_070 (
                    stream: Pointer, address: u64, value: c_uint, flags: c_uint
                ) touches [touched(address, 4)] on stream;
                cuStreamWaitValue64 9000 | cuStreamWaitValue64_ptsz 9000
                | cuStreamWaitValue64_v2 11_070 | cuStreamWaitValue64_v2_ptsz 11_070
                | cuStreamWriteValue64 9000 | cuStreamWriteValue64_ptsz 9000
                | cuStreamWriteValue64_v2 11_070 | cuStreamWriteValue64_v2_ptsz 11_070 (
                    stream: Pointer, address: u64, value: u64, flags: c_uint
                ) touches [touched(address, 8)] on stream;
                cuStreamBatchMemOp 8000 | cuStreamBatchMemOp_ptsz 8000
                | cuStreamBatchMemOp_v2 11_070 | cuStreamBatchMemOp_v2_ptsz 11_070 (
                    stream: Pointer, count: c_uint, operations: Pointer, flags: c_uint
                )
                    looks [Names::Records(operations, &MEMORY_OPERATION, count as usize), stream];
            }
            asking {
                cuStreamQuery 2000 | cuStreamQuery_ptsz 7000 (stream: Pointer);
                cuStreamSynchronize 2000 | cuStreamSynchronize_ptsz 7000 (stream: Pointer);
                cuEventQuery 2000 (event: Pointer);
                cuEventSynchronize 2000 (event: Pointer);
                cuEventElapsedTime 2000 (milliseconds: Pointer, start: Pointer, end: Pointer);
                cuEventElapsedTime_v2 12_080 (milliseconds: Pointer, start: Pointer, end: Pointer);
                cuCtxSynchronize 2000 ();
                cuCtxSynchronize_v2 13_000 (context: Pointer);
            }
            // Answered from the pool, or followed.
            replaced {
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
            lookup {
                cuGetProcAddress 11_030;
                cuGetProcAddress_v2 12_000;
            }
        }
    };
}

macro_rules! table {
    ($($kind:ident { $(
        $symbol:ident $version:literal $(| $alike:ident $alike_version:literal)* $(( $($arguments:tt)* ))?
        $(touches $touched:tt on $place:ident)? $(copies $copy:tt)? $(looks $look:tt)? $(tells $index:ident)?;
    )* })*) => {
        /// The table.
        pub const FUNCTIONS: &[Function] = &[$($(
            of(stringify!($symbol), $version),
            $(of(stringify!($alike), $alike_version),)*
        )*)*];
    };
}

driver_functions!(table);

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
    fn each_function_has_one_row_and_a_name_of_the_drivers() {
        let names: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.symbol).collect();
        assert_eq!(names.len(), FUNCTIONS.len());
        assert!(names.iter().all(|name| name.starts_with(PREFIX)));
    }
}
