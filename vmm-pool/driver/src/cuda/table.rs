//! The functions of the driver that we call, looked up by name.

#![expect(unsafe_code, reason = "takes the addresses of driver functions")]

use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::NonNull;

use super::Context;
use crate::{AccessDesc, AllocationProp, DriverError};

/// The name by which every program opens the driver.
pub(super) const LIBRARY_NAME: &str = "libcuda.so.1";

/// Why there is no driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no `libcuda.so.1` on this machine, or the loader does not look there. The program runs without
    /// Sublet. Start a container with the GPUs (`--gpus all`).
    #[error(
        "no NVIDIA driver here: {LIBRARY_NAME} could not be opened ({reason}); install the driver, or \
         set LD_LIBRARY_PATH to its folder"
    )]
    NoLibrary {
        /// The loader's words.
        reason: String,
    },
    /// The driver lacks a call that Sublet needs: it is too old. Update the driver; `nvidia-smi` shows its version.
    #[error("{LIBRARY_NAME} has no {symbol}: Sublet needs driver 12.0 or newer; update the driver")]
    NoSymbol {
        /// The call.
        symbol: &'static str,
    },
    /// `cuInit` failed: no GPU is visible, or the kernel modules of the driver are not loaded. `nvidia-smi` and
    /// `sublet doctor` show the reason.
    #[error("the driver did not start: {0}; see `nvidia-smi`")]
    Init(#[source] DriverError),
}

/// A pointer to a function of the driver, as looked up by name.
pub type RealSymbol = NonNull<c_void>;

macro_rules! driver_table {
    ($table:ident; $($field:ident : $symbol:ident ( $($arg:ty),* $(,)? );)*) => {
        pub(super) struct $table { $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_int,)* }

        impl $table {
            pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Result<Self, LoadError> {
                Ok(Self { $(
                    $field: {
                        const NAME: &str = concat!(stringify!($symbol), "\0");
                        let name = CStr::from_bytes_with_nul(NAME.as_bytes())
                            .unwrap_or(c"");
                        let found = find(name)
                            .ok_or(LoadError::NoSymbol { symbol: stringify!($symbol) })?;
                        // SAFETY: `found` is the driver's function of this name, whose parameters and
                        // result the table declares as the CUDA driver API documents them.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> c_int,
                            >(found.as_ptr())
                        }
                    },
                )* })
            }
        }
    };
}

pub(super) use driver_table;

driver_table! {
    Table;
    init: cuInit(c_uint);
    driver_get_version: cuDriverGetVersion(*mut c_int);
    device_get_count: cuDeviceGetCount(*mut c_int);
    device_get_attribute: cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    device_get_uuid: cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
    primary_context_retain: cuDevicePrimaryCtxRetain(*mut Context, c_int);
    primary_context_release: cuDevicePrimaryCtxRelease_v2(c_int);
    primary_context_get_state: cuDevicePrimaryCtxGetState(c_int, *mut c_uint, *mut c_int);
    context_set_current: cuCtxSetCurrent(Context);
    exchange_capture_mode: cuThreadExchangeStreamCaptureMode(*mut c_int);
    context_synchronize: cuCtxSynchronize();
    stream_is_capturing: cuStreamIsCapturing(u64, *mut c_int);
    mem_get_info: cuMemGetInfo_v2(*mut usize, *mut usize);
    get_granularity: cuMemGetAllocationGranularity(*mut usize, *const AllocationProp, c_int);
    address_reserve: cuMemAddressReserve(*mut u64, usize, usize, u64, c_ulonglong);
    address_free: cuMemAddressFree(u64, usize);
    create: cuMemCreate(*mut u64, usize, *const AllocationProp, c_ulonglong);
    release: cuMemRelease(u64);
    get_properties: cuMemGetAllocationPropertiesFromHandle(*mut AllocationProp, u64);
    map: cuMemMap(u64, usize, usize, u64, c_ulonglong);
    unmap: cuMemUnmap(u64, usize);
    set_access: cuMemSetAccess(u64, usize, *const AccessDesc, usize);
    export: cuMemExportToShareableHandle(*mut c_void, u64, c_int, c_ulonglong);
    import: cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_int);
    host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    host_unregister: cuMemHostUnregister(*mut c_void);
    stream_create: cuStreamCreate(*mut u64, c_uint);
    stream_destroy: cuStreamDestroy_v2(u64);
    stream_synchronize: cuStreamSynchronize(u64);
    event_create: cuEventCreate(*mut u64, c_uint);
    event_destroy: cuEventDestroy_v2(u64);
    event_record: cuEventRecord(u64, u64);
    event_query: cuEventQuery(u64);
    event_synchronize: cuEventSynchronize(u64);
    stream_wait_event: cuStreamWaitEvent(u64, u64, c_uint);
    copy_to_host: cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, u64);
    copy_to_device: cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, u64);
    copy_between: cuMemcpyDtoDAsync_v2(u64, u64, usize, u64);
    fill: cuMemsetD8Async(u64, u8, usize, u64);
    default_pool: cuDeviceGetDefaultMemPool(*mut u64, c_int);
    pool_trim: cuMemPoolTrimTo(u64, usize);
    graph_mem_trim: cuDeviceGraphMemTrim(c_int);
}
