//! The driver calls that Sublet itself makes: one trait, implemented by a real driver and by a simulated one.
//!
//! A driver carries out each call as given. It does not retry, cache, count or log above `trace`. It knows no tenant, and does
//! not repeat the checks of the pool. Methods that can pull memory from under running work are `unsafe`. The owning types of
//! the pool are the safe way to reach them.
//!
//! Every method may be called from any thread and takes no lock of ours. Calls marked *blocks* may wait
//! for the device; all others return promptly.

#![expect(unsafe_code, reason = "declares the driver methods that can pull memory from under work")]

mod cuda;
pub mod descriptors;
mod error;
mod fingerprint;
pub mod nodes;
mod types;

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

pub use cuda::{CudaDriver, LoadError, RealSymbol};
pub use error::{DriverCode, DriverError, DriverOp};
pub use fingerprint::{Fingerprint, Keys, PieceSlot, WORD_BYTES, is_zero};
pub use types::{
    ALLOCATION_KIND_PINNED, AccessDesc, AllocationFlags, AllocationProp, DeviceAddress,
    DeviceAttribute, DeviceOrdinal, DeviceUuid, DriverVersion, Granularity, HANDLE_TYPE_FABRIC,
    HANDLE_TYPE_POSIX_FD, Location, LocationKind, MemoryInfo, PciAddress, PinnedFor, ProcessState,
    RawContext, RawEvent, RawHandle, RawStream, VaRange,
};

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// The driver calls of a pool, one method each.
pub trait Driver: Debug + Send + Sync + 'static {
    /// Returns the CUDA version that the driver supports.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuDriverGetVersion")]
    fn version(&self) -> DriverResult<DriverVersion>;

    /// Counts the devices that this process sees.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuDeviceGetCount")]
    fn device_count(&self) -> DriverResult<i32>;

    /// Returns an attribute of `device`.
    ///
    /// # Errors
    /// `INVALID_DEVICE` for an ordinal without a device; `INVALID_VALUE` for an attribute that the driver does not know.
    #[doc(alias = "cuDeviceGetAttribute")]
    fn device_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32>;

    /// Returns a name of the device that all processes of the machine share, whatever ordinal they use. An instance of MIG has
    /// a name of its own.
    ///
    /// # Errors
    /// `INVALID_DEVICE` for an ordinal without a device.
    #[doc(alias = "cuDeviceGetUuid_v2")]
    fn device_uuid(&self, device: DeviceOrdinal) -> DriverResult<DeviceUuid>;

    /// Makes the primary context of `device` current on this thread, and retains it on first use. If there is none, the
    /// application may work there in a context of its own. Then that context is made current, and no new one is made.
    ///
    /// Call this before the calls below that say *context*. The thread must be one of ours: an application's thread would see
    /// its context change.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    #[doc(alias = "cuCtxSetCurrent")]
    fn make_current(&self, device: DeviceOrdinal) -> DriverResult<()>;

    /// Is there a primary context of `device` in this process, retained by anybody? The call makes none.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuDevicePrimaryCtxGetState")]
    fn has_primary_context(&self, device: DeviceOrdinal) -> DriverResult<bool>;

    /// Lets calls of this thread run during captures of other threads. Otherwise some calls would end those captures. The
    /// thread must be one of ours.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuThreadExchangeStreamCaptureMode")]
    fn stand_beside_captures(&self) -> DriverResult<()>;

    /// Makes a context that the application made current on this thread. The thread must be one of ours.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` for a context that is gone.
    #[doc(alias = "cuCtxSetCurrent")]
    fn make_own_context_current(&self, context: RawContext) -> DriverResult<()>;

    /// Returns the memory of the current context's device. *Context.*
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuMemGetInfo")]
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Waits for all work submitted to the current context. *Context. Blocks* without limit.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_IMPLICIT` if a captured stream of the context waits for the default stream: the capture goes on.
    /// `STREAM_CAPTURE_UNSUPPORTED` if another stream is captured: the wait has ended that capture. Otherwise the error that
    /// the driver returned, including the failure of earlier work.
    #[doc(alias = "cuCtxSynchronize")]
    fn synchronize(&self) -> DriverResult<()>;

    /// Returns the smallest granularity of allocations with `prop`.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    fn allocation_granularity(&self, prop: &AllocationProp) -> DriverResult<Granularity>;

    /// Reserves addresses. `hint` is a preferred address, which the driver may ignore.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a zero or misaligned size, or an alignment that is no power of two;
    /// `OUT_OF_MEMORY` when the address space is used up.
    #[doc(alias = "cuMemAddressReserve")]
    fn address_reserve(
        &self,
        size_bytes: u64,
        alignment_bytes: u64,
        hint: DeviceAddress,
    ) -> DriverResult<DeviceAddress>;

    /// Frees a whole reservation.
    ///
    /// # Safety
    /// Nothing may use addresses of `range` any more.
    ///
    /// # Errors
    /// `INVALID_VALUE` when `range` is not exactly one reservation or something is still mapped in it.
    #[doc(alias = "cuMemAddressFree")]
    unsafe fn address_free(&self, range: VaRange) -> DriverResult<()>;

    /// Creates physical memory.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`; `INVALID_VALUE` for a zero or misaligned size; `INVALID_DEVICE`;
    /// `NOT_SUPPORTED` for properties the device cannot give.
    #[doc(alias = "cuMemCreate")]
    fn create(&self, size_bytes: u64, prop: &AllocationProp) -> DriverResult<RawHandle>;

    /// Creates host memory that processes share, from a file instead of the driver's allocator. `cuCheckpointProcessRestore`
    /// restores such memory, and threads of the host may use it while the process is frozen. All methods accept its handle. It
    /// can be mapped only at addresses of [`Driver::reserve_for_host_file`].
    ///
    /// # Errors
    /// `NOT_SUPPORTED` unless `prop` is memory of a NUMA node that is shared as a descriptor, and all devices use the host's
    /// addresses for registered memory; `OUT_OF_MEMORY`, also if the process may have no more files.
    fn create_host_file(
        &self,
        _size_bytes: u64,
        _prop: &AllocationProp,
    ) -> DriverResult<RawHandle> {
        Err(DriverError { op: DriverOp::Create, code: DriverCode::NOT_SUPPORTED })
    }

    /// Reserves addresses where only `handle` of [`Driver::create_host_file`], or an import of one, may be mapped. This call
    /// reports every refusal for lack of memory or rights.
    ///
    /// # Errors
    /// `INVALID_VALUE` for another handle, or an alignment that is no power of two; `OUT_OF_MEMORY`; the error of
    /// `cuMemHostRegister`.
    fn reserve_for_host_file(
        &self,
        _handle: RawHandle,
        _alignment_bytes: u64,
    ) -> DriverResult<DeviceAddress> {
        Err(DriverError { op: DriverOp::AddressReserve, code: DriverCode::NOT_SUPPORTED })
    }

    /// Frees a whole reservation of [`Driver::reserve_for_host_file`]. `None` if `range` is no such reservation.
    ///
    /// # Errors
    /// As [`Driver::address_free`].
    fn free_of_host_file(&self, _range: VaRange) -> Option<DriverResult<()>> {
        None
    }

    /// Gives back one reference of `handle`. The memory is freed when its last handle, mapping, import and exported descriptor
    /// is gone, in all processes.
    ///
    /// # Safety
    /// The caller owns the reference and uses `handle` no more.
    ///
    /// # Errors
    /// `INVALID_VALUE` if `handle` is no handle.
    #[doc(alias = "cuMemRelease")]
    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()>;

    /// Returns the properties that the memory of `handle` was created with, also for imports.
    ///
    /// # Errors
    /// `INVALID_VALUE` if `handle` is no handle.
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    fn properties(&self, handle: RawHandle) -> DriverResult<AllocationProp>;

    /// Maps the whole of `handle` at `range`, without access.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the range is misaligned, outside a reservation, mapped already, or not the
    /// size of the handle (`NOT_SUPPORTED` on driver 580 for a smaller size or an offset).
    #[doc(alias = "cuMemMap")]
    fn map(&self, range: VaRange, handle: RawHandle) -> DriverResult<()>;

    /// Unmaps all mappings that are wholly inside `range`.
    ///
    /// # Safety
    /// No work on any device may use addresses of `range` until they are mapped again.
    ///
    /// # Errors
    /// `INVALID_VALUE` when `range` cuts through a mapping or holds none.
    #[doc(alias = "cuMemUnmap")]
    unsafe fn unmap(&self, range: VaRange) -> DriverResult<()>;

    /// Sets access rights to the mappings in `range`. Places that are not named keep their rights.
    ///
    /// # Errors
    /// `INVALID_VALUE` when part of `range` is not mapped, or for an unknown place or flag.
    #[doc(alias = "cuMemSetAccess")]
    fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> DriverResult<()>;

    /// Returns a file descriptor that holds a reference to the memory of `handle`.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the handle was created without that handle type.
    #[doc(alias = "cuMemExportToShareableHandle")]
    fn export_fd(&self, handle: RawHandle) -> DriverResult<OwnedFd>;

    /// Returns a handle for the memory that `fd` holds; `fd` stays the caller's.
    ///
    /// # Errors
    /// `INVALID_VALUE` (or `INVALID_HANDLE`) when `fd` is not an export of a driver.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    fn import_fd(&self, fd: BorrowedFd<'_>) -> DriverResult<RawHandle>;

    /// Pins host memory so that copies of `contexts` run at full speed. *Context.*
    ///
    /// # Safety
    /// `[start, start + size_bytes)` stays mapped until [`Driver::host_unregister`].
    ///
    /// # Errors
    /// `HOST_MEMORY_ALREADY_REGISTERED`; `OUT_OF_MEMORY`; `INVALID_VALUE`.
    #[doc(alias = "cuMemHostRegister")]
    unsafe fn host_register(
        &self,
        start: NonNull<u8>,
        size_bytes: usize,
        contexts: PinnedFor,
    ) -> DriverResult<()>;

    /// Ends a registration made at exactly `start`.
    ///
    /// # Safety
    /// No copy uses the range any more.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED`.
    #[doc(alias = "cuMemHostUnregister")]
    unsafe fn host_unregister(&self, start: NonNull<u8>) -> DriverResult<()>;

    /// Makes a stream of the current context that does not wait for the default stream. *Context.*
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuStreamCreate")]
    fn stream_create(&self) -> DriverResult<RawStream>;

    /// Ends a stream; its work still completes.
    ///
    /// # Safety
    /// The caller owns `stream` and uses it no more.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuStreamDestroy")]
    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()>;

    /// Waits for the work of `stream`. *Blocks.*
    ///
    /// # Errors
    /// The error that the driver returned, including the failure of earlier work.
    #[doc(alias = "cuStreamSynchronize")]
    fn stream_synchronize(&self, stream: RawStream) -> DriverResult<()>;

    /// Is the work of `stream` recorded into a graph?
    ///
    /// # Errors
    /// `STREAM_CAPTURE_IMPLICIT` for the default stream, if a captured stream waits for it; other errors that the driver
    /// returned.
    #[doc(alias = "cuStreamIsCapturing")]
    fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool>;

    /// Makes an event of the current context, without timing. A wait for it sleeps. *Context.*
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuEventCreate")]
    fn event_create(&self) -> DriverResult<RawEvent>;

    /// Ends an event. Waits of streams that were queued on it stay valid.
    ///
    /// # Safety
    /// The caller owns `event` and uses it no more.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuEventDestroy_v2")]
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()>;

    /// Makes `event` stand for all work of `stream` so far. Its former meaning ends. On a stream that is captured it stands for
    /// a place in the graph, and can be neither queried nor waited for.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when `stream` is of another context than `event`; other errors that the driver returned.
    #[doc(alias = "cuEventRecord")]
    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()>;

    /// Is the work done that `event` stands for? True for an event that was never recorded.
    ///
    /// # Errors
    /// The error that the driver returned, including the failure of earlier work.
    #[doc(alias = "cuEventQuery")]
    fn event_is_done(&self, event: RawEvent) -> DriverResult<bool>;

    /// Waits for the work that `event` stands for now. *Blocks.*
    ///
    /// # Errors
    /// As [`Driver::event_is_done`].
    #[doc(alias = "cuEventSynchronize")]
    fn event_synchronize(&self, event: RawEvent) -> DriverResult<()>;

    /// Makes all later work of `stream` wait for the work that `event` stands for now, on the same device or another. A later
    /// record does not change that.
    ///
    /// # Errors
    /// The error that the driver returned. `STREAM_CAPTURE_ISOLATION` for a stream that is captured.
    #[doc(alias = "cuStreamWaitEvent")]
    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()>;

    /// Starts a copy of `source` to host memory.
    ///
    /// The current context's device must have access to `source`, whatever device `stream` belongs to. With no context current,
    /// the device of `stream` must have access.
    ///
    /// # Safety
    /// `target` is valid for writes of `source.size_bytes` bytes, and nobody else touches them, until the stream has passed the
    /// copy; `source` stays mapped until then.
    ///
    /// # Errors
    /// `INVALID_VALUE` without that access; other errors that the driver returned.
    #[doc(alias = "cuMemcpyDtoHAsync")]
    unsafe fn copy_to_host(
        &self,
        target: NonNull<u8>,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()>;

    /// Starts a copy of host memory to `target`. The rule about access of [`Driver::copy_to_host`] applies to `target`.
    ///
    /// # Safety
    /// `source` is valid for reads of `target.size_bytes` bytes, and nobody writes them, until the stream has passed the copy;
    /// `target` stays mapped until then.
    ///
    /// # Errors
    /// `INVALID_VALUE` without that access; other errors that the driver returned.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    unsafe fn copy_to_device(
        &self,
        target: VaRange,
        source: NonNull<u8>,
        stream: RawStream,
    ) -> DriverResult<()>;

    /// Starts a copy of `source` to memory of the same size at `target`, on the same device or another. The rule about access
    /// of [`Driver::copy_to_host`] applies to both, and the device of `stream` must have access too.
    ///
    /// # Safety
    /// Both stay mapped until the stream has passed the copy. Until then nobody else touches the bytes at `target`, or writes
    /// those at `source`.
    ///
    /// # Errors
    /// `INVALID_VALUE` without that access; other errors that the driver returned.
    #[doc(alias = "cuMemcpyDtoDAsync")]
    unsafe fn copy_between(
        &self,
        target: DeviceAddress,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()>;

    /// Starts filling `target` with zeros.
    ///
    /// # Safety
    /// `target` stays mapped until the stream has passed the fill, and nobody else touches it.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the stream's device has no access; other errors that the driver returned.
    #[doc(alias = "cuMemsetD8Async")]
    unsafe fn fill_with_zeros(&self, target: VaRange, stream: RawStream) -> DriverResult<()>;

    /// Starts taking the fingerprints of pieces. Each of `slots` names one piece, and has its answer when `stream` has passed.
    /// `stream` is of the current primary context of `device`. The first call for a device makes the driver compile the kernel
    /// for it, which takes some 0.1 s once, and some device memory for good. *Context.*
    ///
    /// # Safety
    /// Until the stream has passed: `slots` stay valid and registered by [`Driver::host_register`], and nobody else touches
    /// them; every piece stays mapped, with rights for `device` to read all of it. A kernel that reads without the right ends
    /// its context.
    ///
    /// # Errors
    /// `INVALID_VALUE` for host memory that is not registered; `NOT_SUPPORTED` for a driver without a function that this needs;
    /// other errors that the driver returned. The error names the call that failed.
    #[doc(alias = "cuLaunchKernel")]
    #[doc(alias = "cuModuleLoadData")]
    unsafe fn fingerprint(
        &self,
        device: DeviceOrdinal,
        slots: NonNull<[PieceSlot]>,
        stream: RawStream,
    ) -> DriverResult<()>;

    /// Returns unused memory of the device's stream-ordered pool and graph pool to the driver.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuMemPoolTrimTo")]
    #[doc(alias = "cuDeviceGraphMemTrim")]
    fn trim_pools(&self, device: DeviceOrdinal) -> DriverResult<()>;
}
