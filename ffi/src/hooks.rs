//! Our functions instead of the driver's, and those of them that only wait.
//!
//! | what we do | means | where |
//! | --- | --- | --- |
//! | wait | passes the gate as soon as what it touches is there, then calls the driver with the same arguments | `waiting!` below |
//! | ask | waits only while the process is frozen, then calls the driver with the same arguments | `asking!` below |
//! | replace | answered from the pool, or passed on when it is not about memory of ours | [`crate::replaced`] |
//! | pass | not hooked, for the reason given | `PASSED` in the completeness test |
//!
//! The table of `sublet_cuda_driver::functions` says which functions there are, by name and version. Each row of it has
//! one exported function of the driver's own name (for libraries that link the driver directly). That function is also
//! the entry that `dlsym` and `cuGetProcAddress` answer with. The completeness test holds the table against every
//! function that NVIDIA's header declares.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use sublet_interpose::provider::Hook;
use vmm_pool::driver::{DeviceAddress, VaRange};
use vmm_pool::gate::Passage;

use crate::driver::call_driver;
use crate::look::{self, Names, StaysInUse};
use crate::records::{
    COPY_2D, COPY_3D, DECOMPRESSION, FABRIC_COPY, MEMORY_OPERATION, OPERATION_3D,
};
use crate::replaced::copies::{Refused, copy_in_place, is_copy, is_refused, opens_blocks};
use crate::replaced::refusals::{away_in, refuse};
use crate::replaced::stream_value;
use crate::{replaced, runtime};
use sublet_interpose::Pointer;

/// A value of the driver's interface that is an address.
trait Place: Copy {
    fn address(self) -> u64;
}

impl Place for u64 {
    fn address(self) -> u64 {
        self
    }
}

impl Place for Pointer {
    fn address(self) -> u64 {
        self.addr() as u64
    }
}

/// `bytes` from `place` on, which a call touches.
fn touched(place: impl Place, bytes: usize) -> VaRange {
    VaRange::new(DeviceAddress(place.address()), bytes as u64)
}

/// The bytes from the first to the last of `rows` rows of `width`, which begin `pitch` apart.
fn rows_bytes(pitch: usize, width: usize, rows: usize) -> usize {
    if width == 0 || rows == 0 {
        return 0;
    }
    pitch.saturating_mul(rows.saturating_sub(1)).saturating_add(width)
}

/// Says to a caller whose batch is refused that this is not for one of its operations alone.
fn of_none_alone(index: Pointer) {
    if !index.is_null() {
        // SAFETY: the caller's place for an index.
        unsafe { index.cast::<usize>().write(usize::MAX) };
    }
}

/// For calls that name none.
const NO_STREAM: Pointer = std::ptr::null_mut();

/// Calls in a frame of its own. A thread that is cancelled unwinds through a function of the C interface only if that has nothing of
/// its own to drop; otherwise the process ends.
#[inline(never)]
fn apart(call: &impl Fn() -> c_int) -> c_int {
    call()
}

macro_rules! waiting_function {
    (
        $symbol:ident ( $($arg:ident : $ty:ty),* )
        [ $($touched:expr),* ] [ $($copy:tt)* ] [ $($look:tt)* ] $index:tt
    ) => {
        /// Waits until what it touches is there, then calls the driver.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            const IS_COPY: bool = is_copy(stringify!($symbol));
            let call = || {
                let seen = waiting_function!(@look $symbol [ $($look)* ] $index);
                let member = runtime::member();
                let pass =
                    member.map(|member| waiting_function!(@pass member, $symbol [ $($touched),* ]));
                waiting_function!(@aside member, pass, $symbol [ $($look)* ] $index);
                let code = call_driver!($symbol($($arg),*));
                drop(seen);
                drop(pass);
                code
            };
            // No net for panics: a thread that is cancelled while it waits unwinds through here, and must not be caught.
            let mut code = apart(&call);
            if IS_COPY && is_refused(code) {
                if opens_blocks() {
                    code = apart(&call);
                }
                waiting_function!(@copy $symbol, code, call [ $($copy)* ]);
            }
            code
        }
    };
    (@look $symbol:ident [] []) => { None::<StaysInUse> };
    (@look $symbol:ident [ $names:expr, $stream:expr ] [ $($index:ident)? ]) => {
        if look::is_on() {
            match replaced::look_at(stringify!($symbol), $names, $stream) {
                Ok(seen) => seen,
                Err(code) => {
                    $(of_none_alone($index);)?
                    return code;
                }
            }
        } else {
            None
        }
    };
    (@aside $member:ident, $pass:ident, $symbol:ident [] []) => {};
    (@aside $member:ident, $pass:ident, $symbol:ident [ $names:expr, $stream:expr ] [ $($index:ident)? ]) => {
        if let Some(member) = $member
            && member.pool().runs_without_some()
            && let Some(away) = away_in(member, $names, stream_value($stream, stringify!($symbol)))
        {
            drop($pass);
            $(of_none_alone($index);)?
            return refuse(member, stringify!($symbol), &away);
        }
    };
    (@copy $symbol:ident, $code:ident, $call:ident []) => {};
    (@copy $symbol:ident, $code:ident, $call:ident [ $target:ident $source:ident $bytes:ident $($stream:ident)? ]) => {
        if is_refused($code) {
            let stream: Option<Pointer> = None $(.or(Some($stream)))?;
            let symbol = stringify!($symbol);
            let is_per_thread = symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
            let (target, source) = ($target.address(), $source.address());
            let copy = Refused { target, source, bytes: $bytes, stream, is_per_thread };
            $code = copy_in_place(copy, $code, $call);
        }
    };
    (@pass $member:ident, $symbol:ident []) => {
        $member.gate().pass_for(stringify!($symbol), Passage::Use)
    };
    (@pass $member:ident, $symbol:ident [ $($touched:expr),+ ]) => {
        $member.pool().pass_touching(stringify!($symbol), &[$($touched),+])
    };
}

macro_rules! asking {
    ($($symbol:ident $(| $alike:ident)* ( $($args:tt)* );)*) => {
        /// Functions that ask the driver if work is over, or wait for it: see [`vmm_pool::asking`].
        pub mod asks {
            use super::*;
            $(asking!(@each [ $symbol $($alike)* ] ( $($args)* ));)*
        }
        /// Their rows.
        pub(crate) const ASKING: &[Hook] = &[$(
            hook_row!(asks::$symbol, $symbol),
            $(hook_row!(asks::$alike, $alike),)*
        )*];
    };
    (@each [ $($symbol:ident)* ] $args:tt) => { $(asking!(@one $symbol $args);)* };
    (@one $symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        /// Waits while the process is frozen, then calls the driver.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            // No net for panics, as above.
            apart(&|| {
                let _asking = runtime::member().map(|member| member.pool().door().pass());
                call_driver!($symbol($($arg => $ty),*))
            })
        }
    };
}

/// The hook of the driver's function `$symbol`, in whose place `$path` stands.
macro_rules! hook_row {
    ($path:path, $symbol:ident) => {
        ::sublet_interpose::provider::Hook {
            symbol: ::sublet_cuda_driver::functions::function(stringify!($symbol)).symbol,
            ours: || ($path as *const ()).expose_provenance(),
        }
    };
}
pub(crate) use hook_row;

macro_rules! waiting {
    ($(
        $symbol:ident $(| $alike:ident)* ( $($args:tt)* )
        $(touches [ $($touched:tt)* ] on $place:ident)? $(copies [ $($copy:tt)* ])? $(looks [ $($look:tt)* ])?
        $(tells $index:ident)?;
    )*) => {
        /// Functions that wait, then call the driver.
        pub mod waits {
            use super::*;
            $(
                waiting!(
                    @each [ $symbol $($alike)* ] ( $($args)* )
                    [ $($($touched)*)? ] [ $($($copy)*)? ]
                    [ $($($look)*)? $(Names::Ranges(&[$($touched)*]), $place)? ]
                    [ $($index)? ]
                );
            )*
        }
        /// Their rows.
        pub(crate) const WAITING: &[Hook] = &[$(
            hook_row!(waits::$symbol, $symbol),
            $(hook_row!(waits::$alike, $alike),)*
        )*];
    };
    (@each [ $($symbol:ident)* ] $args:tt $touched:tt $copy:tt $look:tt $index:tt) => {
        $(waiting_function!($symbol $args $touched $copy $look $index);)*
    };
}

// A call that names all that it touches waits for no more than that; any other waits for all memory. What it touches of paged memory is there for
// the stream that it works on.
waiting! {
    cuLaunchKernel | cuLaunchKernel_ptsz (
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
        parameters: Pointer, extra: Pointer
    )
        looks [Names::Kernel { function, parameters, extra }, stream];
    cuLaunchKernelEx | cuLaunchKernelEx_ptsz (
        config: Pointer, function: Pointer, parameters: Pointer, extra: Pointer
    )
        looks [Names::Kernel { function, parameters, extra }, look::stream_of(config)];
    cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz (
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Pointer,
        parameters: Pointer
    )
        looks [Names::Kernel { function, parameters, extra: std::ptr::null_mut() }, stream];
    cuLaunch (function: Pointer);
    cuLaunchGrid (function: Pointer, width: c_int, height: c_int);
    cuLaunchGridAsync (function: Pointer, width: c_int, height: c_int, stream: Pointer);
    cuLaunchCooperativeKernelMultiDevice (launches: Pointer, devices: c_uint, flags: c_uint);
    cuMemcpy | cuMemcpy_ptds (
        target: u64, source: u64, bytes: usize
    ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
        copies [target source bytes];
    cuMemcpyPeer | cuMemcpyPeer_ptds (
        target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize
    ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM;
    cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds (
        target: u64, source: Pointer, bytes: usize
    ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
        copies [target source bytes];
    cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds (
        target: Pointer, source: u64, bytes: usize
    ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
        copies [target source bytes];
    cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds (
        target: u64, source: u64, bytes: usize
    ) touches [touched(target, bytes), touched(source, bytes)] on NO_STREAM
        copies [target source bytes];
    cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds (
        target: Pointer, target_offset: usize, source: u64, bytes: usize
    ) touches [touched(source, bytes)] on NO_STREAM;
    cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds (
        target: u64, source: Pointer, source_offset: usize, bytes: usize
    ) touches [touched(target, bytes)] on NO_STREAM;
    cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds
    | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds (copy: Pointer)
        looks [Names::Records(copy, &COPY_2D, 1), NO_STREAM];
    cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds (copy: Pointer)
        looks [Names::Records(copy, &COPY_3D, 1), NO_STREAM];
    cuMemcpy3DPeer | cuMemcpy3DPeer_ptds (copy: Pointer)
        looks [Names::Records(copy, &COPY_3D, 1), NO_STREAM];
    cuMemsetD8_v2 | cuMemsetD8_v2_ptds (
        target: u64, value: u8, count: usize
    ) touches [touched(target, count)] on NO_STREAM;
    cuMemsetD16_v2 | cuMemsetD16_v2_ptds (
        target: u64, value: u16, count: usize
    ) touches [touched(target, count.saturating_mul(2))] on NO_STREAM;
    cuMemsetD32_v2 | cuMemsetD32_v2_ptds (
        target: u64, value: c_uint, count: usize
    ) touches [touched(target, count.saturating_mul(4))] on NO_STREAM;
    cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds (
        target: u64, pitch: usize, value: u8, width: usize, height: usize
    ) touches [touched(target, rows_bytes(pitch, width, height))] on NO_STREAM;
    cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds (
        target: u64, pitch: usize, value: u16, width: usize, height: usize
    ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(2), height))] on NO_STREAM;
    cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds (
        target: u64, pitch: usize, value: c_uint, width: usize, height: usize
    ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(4), height))] on NO_STREAM;
    cuMemcpyAsync | cuMemcpyAsync_ptsz (
        target: u64, source: u64, bytes: usize, stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream
        copies [target source bytes stream];
    cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz (
        target: u64, target_context: Pointer, source: u64, source_context: Pointer, bytes: usize,
        stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream;
    cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz (
        target: u64, source: Pointer, bytes: usize, stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream
        copies [target source bytes stream];
    cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz (
        target: Pointer, source: u64, bytes: usize, stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream
        copies [target source bytes stream];
    cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz (
        target: u64, source: u64, bytes: usize, stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream
        copies [target source bytes stream];
    cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz (copy: Pointer, stream: Pointer)
        looks [Names::Records(copy, &COPY_2D, 1), stream];
    cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz (copy: Pointer, stream: Pointer)
        looks [Names::Records(copy, &COPY_3D, 1), stream];
    cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz (copy: Pointer, stream: Pointer)
        looks [Names::Records(copy, &COPY_3D, 1), stream];
    cuMemsetD8Async | cuMemsetD8Async_ptsz (
        target: u64, value: u8, count: usize, stream: Pointer
    ) touches [touched(target, count)] on stream;
    cuMemsetD16Async | cuMemsetD16Async_ptsz (
        target: u64, value: u16, count: usize, stream: Pointer
    ) touches [touched(target, count.saturating_mul(2))] on stream;
    cuMemsetD32Async | cuMemsetD32Async_ptsz (
        target: u64, value: c_uint, count: usize, stream: Pointer
    ) touches [touched(target, count.saturating_mul(4))] on stream;
    cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz (
        target: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Pointer
    ) touches [touched(target, rows_bytes(pitch, width, height))] on stream;
    cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz (
        target: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Pointer
    ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(2), height))] on stream;
    cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz (
        target: u64, pitch: usize, value: c_uint, width: usize, height: usize, stream: Pointer
    ) touches [touched(target, rows_bytes(pitch, width.saturating_mul(4), height))] on stream;
    cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz (
        targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
        indices: Pointer, attribute_count: usize, fail_index: Pointer, stream: Pointer
    )
        looks [Names::Lists([targets, sources], sizes, count), stream]
        tells fail_index;
    cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz (
        targets: Pointer, sources: Pointer, sizes: Pointer, count: usize, attributes: Pointer,
        indices: Pointer, attribute_count: usize, stream: Pointer
    )
        looks [Names::Lists([targets, sources], sizes, count), stream];
    cuMemcpy3DBatchAsync | cuMemcpy3DBatchAsync_ptsz (
        count: usize, operations: Pointer, fail_index: Pointer, flags: c_ulonglong,
        stream: Pointer
    )
        looks [Names::Records(operations, &OPERATION_3D, count), stream]
        tells fail_index;
    cuMemcpy3DBatchAsync_v2 | cuMemcpy3DBatchAsync_v2_ptsz (
        count: usize, operations: Pointer, flags: c_ulonglong, stream: Pointer
    )
        looks [Names::Records(operations, &OPERATION_3D, count), stream];
    cuFabricCpyBatchAsync | cuFabricCpyBatchAsync_ptsz (
        count: usize, operations: Pointer, flags: c_ulonglong, stream: Pointer
    )
        looks [Names::Records(operations, &FABRIC_COPY, count), stream];
    cuMemcpyWithAttributesAsync | cuMemcpyWithAttributesAsync_ptsz (
        target: u64, source: u64, bytes: usize, attributes: Pointer, stream: Pointer
    ) touches [touched(target, bytes), touched(source, bytes)] on stream;
    cuMemcpy3DWithAttributesAsync | cuMemcpy3DWithAttributesAsync_ptsz (
        operation: Pointer, flags: c_ulonglong, stream: Pointer
    )
        looks [Names::Records(operation, &OPERATION_3D, 1), stream];
    cuMemBatchDecompressAsync | cuMemBatchDecompressAsync_ptsz (
        operations: Pointer, count: usize, flags: c_uint, error_index: Pointer, stream: Pointer
    )
        looks [Names::Records(operations, &DECOMPRESSION, count), stream]
        tells error_index;
    cuStreamWaitValue32 | cuStreamWaitValue32_ptsz
    | cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz
    | cuStreamWriteValue32 | cuStreamWriteValue32_ptsz
    | cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz (
        stream: Pointer, address: u64, value: c_uint, flags: c_uint
    ) touches [touched(address, 4)] on stream;
    cuStreamWaitValue64 | cuStreamWaitValue64_ptsz
    | cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz
    | cuStreamWriteValue64 | cuStreamWriteValue64_ptsz
    | cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz (
        stream: Pointer, address: u64, value: u64, flags: c_uint
    ) touches [touched(address, 8)] on stream;
    cuStreamBatchMemOp | cuStreamBatchMemOp_ptsz
    | cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz (
        stream: Pointer, count: c_uint, operations: Pointer, flags: c_uint
    )
        looks [Names::Records(operations, &MEMORY_OPERATION, count as usize), stream];
}

macro_rules! replacing {
    ($($symbol:ident $version:literal;)*) => {
        /// Functions that are answered from the pool, or pass on what is not about memory of ours.
        pub(crate) const REPLACING: &[Hook] = &[$(hook_row!(replaced::$symbol, $symbol),)*];
    };
}

sublet_cuda_driver::replaced_functions!(replacing);

asking! {
    cuStreamQuery | cuStreamQuery_ptsz (stream: Pointer);
    cuStreamSynchronize | cuStreamSynchronize_ptsz (stream: Pointer);
    cuEventQuery (event: Pointer);
    cuEventSynchronize (event: Pointer);
    cuEventElapsedTime (milliseconds: Pointer, start: Pointer, end: Pointer);
    cuEventElapsedTime_v2 (milliseconds: Pointer, start: Pointer, end: Pointer);
    cuCtxSynchronize ();
    cuCtxSynchronize_v2 (context: Pointer);
}
