//! Driver codes and the error that carries them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A result code of the driver (`CUresult`), kept as an integer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(transparent)]
pub struct DriverCode(pub i32);

macro_rules! driver_codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        impl DriverCode {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// NVIDIA's name for the code, if this build knows it.
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $($value => Some($text),)* _ => None }
            }
        }
    };
}

driver_codes! {
    /// The call did what it was asked.
    SUCCESS = 0, "CUDA_SUCCESS";
    /// An argument is wrong.
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    /// No memory of the asked kind is free now.
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    /// `cuInit` has not been called, or failed.
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    /// The process is ending and the driver with it.
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    /// `libcuda.so.1` is a stub, not a driver.
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
    /// There is no GPU.
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    /// The ordinal names no GPU.
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    /// No context is current, or it is not usable.
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    /// The two devices do not reach each other's memory.
    PEER_ACCESS_UNSUPPORTED = 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    /// Peer access was switched on before.
    PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    /// Peer access was not switched on.
    PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    /// Memory of the device has an error that it cannot correct.
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
    /// A link between devices has an error that it cannot correct.
    NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE";
    /// An error of the device was contained; the context is gone.
    CONTAINED = 226, "CUDA_ERROR_CONTAINED";
    /// A handle is not one of the driver's.
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    /// The object is not in a state for this call.
    ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE";
    /// A call of the operating system failed.
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    /// A name was not found.
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    /// Work is still under way.
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    /// A kernel touched an address that is not mapped.
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    /// A kernel ran longer than the system lets it.
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
    /// The context has been destroyed.
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    /// An assertion in a kernel failed.
    ASSERT = 710, "CUDA_ERROR_ASSERT";
    /// The host range was registered before.
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    /// The host range is not registered.
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    /// The stack of a kernel is broken.
    HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR";
    /// A kernel met an instruction that is none.
    ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION";
    /// A kernel touched an address that is not aligned for it.
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
    /// A kernel touched an address of the wrong space.
    INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE";
    /// The program counter of a kernel left its code.
    INVALID_PC = 718, "CUDA_ERROR_INVALID_PC";
    /// A kernel failed while it ran.
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    /// The operation is not permitted.
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    /// This driver or device cannot do it.
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    /// Not allowed while a stream is being captured.
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    /// The default stream waits for a stream that is being captured.
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    /// The event was recorded last in a stream that is being captured.
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT";
    /// The driver could not say what went wrong.
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
}

impl DriverCode {
    /// `Ok` for success, the code otherwise.
    ///
    /// # Errors
    /// `self`, when it is not [`DriverCode::SUCCESS`].
    pub fn ok(self) -> Result<(), Self> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self) }
    }
}

impl fmt::Debug for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "driver code {}", self.0),
        }
    }
}

macro_rules! driver_ops {
    ($($(#[$doc:meta])* $variant:ident => $symbol:literal,)*) => {
        /// A driver call, for errors, counters and fault injection.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum DriverOp { $($(#[$doc])* $variant,)* }

        impl DriverOp {
            /// All operations, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The driver's name for the call.
            pub fn symbol(self) -> &'static str {
                match self { $(Self::$variant => $symbol,)* }
            }
        }
    };
}

driver_ops! {
    /// Load and initialise the driver.
    Init => "cuInit",
    /// Ask for the driver's version.
    DriverGetVersion => "cuDriverGetVersion",
    /// Count the devices.
    DeviceGetCount => "cuDeviceGetCount",
    /// Ask for a device attribute.
    DeviceGetAttribute => "cuDeviceGetAttribute",
    /// Ask what two devices can do together.
    /// Ask for the machine-wide name of a device.
    DeviceGetUuid => "cuDeviceGetUuid",
    /// Ask for the primary context of a device.
    PrimaryContextRetain => "cuDevicePrimaryCtxRetain",
    /// Give back the primary context of a device.
    PrimaryContextRelease => "cuDevicePrimaryCtxRelease",
    /// Ask whether a device has a primary context.
    PrimaryContextGetState => "cuDevicePrimaryCtxGetState",
    /// Make a context current.
    ContextSetCurrent => "cuCtxSetCurrent",
    /// Set the captures that calls of a thread may disturb.
    ExchangeCaptureMode => "cuThreadExchangeStreamCaptureMode",
    /// Wait for all work of a device.
    ContextSynchronize => "cuCtxSynchronize",
    /// Ask how much memory is free.
    MemoryGetInfo => "cuMemGetInfo",
    /// Ask for the granularity of allocations.
    GetAllocationGranularity => "cuMemGetAllocationGranularity",
    /// Reserve addresses.
    AddressReserve => "cuMemAddressReserve",
    /// Free reserved addresses.
    AddressFree => "cuMemAddressFree",
    /// Create physical memory.
    Create => "cuMemCreate",
    /// Give a handle back.
    Release => "cuMemRelease",
    /// Ask for the properties that a handle was created with.
    GetProperties => "cuMemGetAllocationPropertiesFromHandle",
    /// Map a handle.
    Map => "cuMemMap",
    /// Unmap addresses.
    Unmap => "cuMemUnmap",
    /// Set access rights to a mapping.
    SetAccess => "cuMemSetAccess",
    /// Turn a handle into a file descriptor.
    Export => "cuMemExportToShareableHandle",
    /// Turn a file descriptor into a handle.
    Import => "cuMemImportFromShareableHandle",
    /// Pin host memory.
    HostRegister => "cuMemHostRegister",
    /// Unpin host memory.
    HostUnregister => "cuMemHostUnregister",
    /// Make a stream.
    StreamCreate => "cuStreamCreate",
    /// End a stream.
    StreamDestroy => "cuStreamDestroy",
    /// Wait for a stream.
    StreamSynchronize => "cuStreamSynchronize",
    /// Ask whether a stream is captured.
    StreamIsCapturing => "cuStreamIsCapturing",
    /// Make an event.
    EventCreate => "cuEventCreate",
    /// End an event.
    EventDestroy => "cuEventDestroy",
    /// Make an event stand for the work of a stream so far.
    EventRecord => "cuEventRecord",
    /// Ask whether the work that an event stands for is done.
    EventQuery => "cuEventQuery",
    /// Wait for the work that an event stands for.
    EventSynchronize => "cuEventSynchronize",
    /// Make a stream wait for the work that an event stands for.
    StreamWaitEvent => "cuStreamWaitEvent",
    /// Copy from the device.
    CopyToHost => "cuMemcpyDtoHAsync",
    /// Copy to the device.
    CopyToDevice => "cuMemcpyHtoDAsync",
    /// Copy from one device to another.
    CopyBetween => "cuMemcpyDtoDAsync",
    /// Return unused memory of stream-ordered pools.
    PoolTrim => "cuMemPoolTrimTo",
    /// Fill device memory.
    Fill => "cuMemsetD8Async",
    /// Compile and load kernels.
    ModuleLoad => "cuModuleLoadData",
    /// Find a kernel.
    ModuleGetFunction => "cuModuleGetFunction",
    /// Ask for a device's address of pinned host memory.
    HostGetDevicePointer => "cuMemHostGetDevicePointer",
    /// Launch a kernel.
    LaunchKernel => "cuLaunchKernel",
}

impl fmt::Display for DriverOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}

/// A driver call that failed. The layer above adds the object, its size and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} returned {code}")]
pub struct DriverError {
    /// The call.
    pub op: DriverOp,
    /// The code that the call returned.
    pub code: DriverCode,
}

impl DriverError {
    /// Could the same call succeed later, when memory is free again?
    pub fn is_transient(self) -> bool {
        self.code == DriverCode::OUT_OF_MEMORY || self.code == DriverCode::NOT_READY
    }

    /// Is the context unusable, so that only the end of the process helps?
    ///
    /// The codes after which, by the CUDA driver API manual (`CUresult`), "the process must be terminated and
    /// relaunched", and those that say that the context or the driver is gone.
    pub fn poisons_context(self) -> bool {
        matches!(
            self.code,
            DriverCode::ILLEGAL_ADDRESS
                | DriverCode::LAUNCH_TIMEOUT
                | DriverCode::ASSERT
                | DriverCode::HARDWARE_STACK_ERROR
                | DriverCode::ILLEGAL_INSTRUCTION
                | DriverCode::MISALIGNED_ADDRESS
                | DriverCode::INVALID_ADDRESS_SPACE
                | DriverCode::INVALID_PC
                | DriverCode::LAUNCH_FAILED
                | DriverCode::ECC_UNCORRECTABLE
                | DriverCode::NVLINK_UNCORRECTABLE
                | DriverCode::CONTAINED
                | DriverCode::CONTEXT_IS_DESTROYED
                | DriverCode::DEINITIALIZED
        )
    }
}
