//! The real driver, loaded at run time: builds and starts with no CUDA installed.
//!
//! Only types and constants come from `cudarc`. Its functions return a Rust `enum`, which a code newer than its bindings would
//! make undefined. So the calls here go through a table of our own, with plain integers. A caller that can look names up fills
//! the table. [`CudaDriver::load`] opens `libcuda.so.1`. The preload object hands in the driver's own pointers, past its own
//! hooks.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64};

mod contexts;
mod host_files;
mod table;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use self::contexts::Kernels;
use self::host_files::HostFiles;
use self::table::{LIBRARY_NAME, Table, driver_table};
pub use self::table::{LoadError, RealSymbol};
use super::fingerprint::PieceSlot;
use super::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceAttribute, DeviceOrdinal, DeviceUuid, Driver,
    DriverCode, DriverError, DriverOp, DriverResult, DriverVersion, Granularity,
    HANDLE_TYPE_POSIX_FD, MemoryInfo, PinnedFor, RawContext, RawEvent, RawHandle, RawStream,
    VaRange,
};

const DEVICES_MAX: usize = 64;
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`.
const EVENT_PLAIN: c_uint = 3;
const HOST_REGISTER_PORTABLE: c_uint = 1;
const CAPTURE_MODE_RELAXED: c_int = 2;
const GRANULARITY_MINIMUM: c_int = 0;

type Context = *mut c_void;

/// `CU_STREAM_LEGACY`.
const STREAM_LEGACY: u64 = 1;

/// The driver of this machine.
pub struct CudaDriver {
    table: Table,
    /// The primary contexts that we have retained, for good unless the application resets one. Null: none is retained.
    contexts: [AtomicPtr<c_void>; DEVICES_MAX],
    /// Host memory that the driver did not allocate.
    host_files: HostFiles,
    /// Our own kernels, loaded in those contexts.
    kernels: Kernels,
    /// For each device: the context that the kernels are loaded in, where that is not the primary one.
    kernels_in: [AtomicU64; DEVICES_MAX],
    /// For each device: the application's own context that calls work in; 0 for none.
    stands_in: [AtomicU64; DEVICES_MAX],
    /// Returns a context of the application's own to work in, for a device without a primary one.
    own_context: fn(DeviceOrdinal) -> Option<RawContext>,
    // Keeps the library open for as long as the table points into it. `None` when the process itself opened the library, which
    // then never closes.
    library: Option<libloading::Library>,
}

impl std::fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDriver").field("library", &self.library).finish_non_exhaustive()
    }
}

impl CudaDriver {
    /// Opens and initialises the driver of this machine.
    ///
    /// # Errors
    /// [`LoadError`], which says what is missing.
    ///
    /// # Driver calls
    /// `cuInit`.
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: opening the driver runs NVIDIA's initialisers, which need nothing from us.
        let library = unsafe { libloading::Library::new(LIBRARY_NAME) }
            .map_err(|error| LoadError::NoLibrary { reason: error.to_string() })?;
        let mut driver = Self::from_symbols(&|name| {
            // SAFETY: only the address is taken; nothing is called through this type.
            let symbol = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok()?;
            // SAFETY: the symbol's value is the function's address.
            let address = unsafe { symbol.try_as_raw_ptr() }?;
            NonNull::new(address)
        })?;
        driver.library = Some(library);
        driver.init().map_err(LoadError::Init)?;
        Ok(driver)
    }

    /// Makes a driver whose functions `find` looks up by their exact C names. The driver is not initialised: the process that
    /// found the functions does that.
    ///
    /// # Errors
    /// [`LoadError::NoSymbol`] for the first function that `find` does not know.
    pub fn from_symbols(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Result<Self, LoadError> {
        Ok(Self {
            table: Table::look_up(find)?,
            contexts: [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX],
            host_files: HostFiles::default(),
            kernels: Kernels::look_up(find),
            kernels_in: [const { AtomicU64::new(0) }; DEVICES_MAX],
            stands_in: [const { AtomicU64::new(0) }; DEVICES_MAX],
            own_context: |_| None,
            library: None,
        })
    }

    /// Lets the driver work in the context that `own_context` names, where a device has no primary one. A primary context would
    /// cost some 500 MB of the device. `own_context` is called often.
    #[must_use]
    pub fn with_own_contexts(self, own_context: fn(DeviceOrdinal) -> Option<RawContext>) -> Self {
        Self { own_context, ..self }
    }

    /// Initialises the driver for this process; harmless when it is initialised already.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuInit")]
    pub fn init(&self) -> DriverResult<()> {
        // SAFETY: no pointer is passed.
        check(DriverOp::Init, unsafe { (self.table.init)(0) })
    }

    /// Makes a call that might spoil a stream capture of the caller's, on a thread that may be the caller's.
    pub fn beside_captures(&self, call: impl FnOnce() -> c_int) -> c_int {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is a valid place for the old mode.
        let is_relaxed = unsafe { (self.table.exchange_capture_mode)(&raw mut mode) } == 0;
        let code = call();
        if is_relaxed {
            // SAFETY: as before; the thread gets its own mode back.
            let _refused = unsafe { (self.table.exchange_capture_mode)(&raw mut mode) };
        }
        code
    }
}

fn check(op: DriverOp, code: c_int) -> DriverResult<()> {
    tracing::trace!(op = op.symbol(), code);
    DriverCode(code).ok().map_err(|code| DriverError { op, code })
}

/// Returns the value that the driver writes to the place that `ask` gives it.
fn told<T: Default>(op: DriverOp, ask: impl FnOnce(*mut T) -> c_int) -> DriverResult<T> {
    let mut value = T::default();
    check(op, ask(&raw mut value)).map(|()| value)
}

fn about<T>(op: DriverOp, outcome: Result<T, DriverCode>) -> DriverResult<T> {
    outcome.map_err(|code| DriverError { op, code })
}

/// Converts `bytes` to a C `size_t`. Lossless: the crate builds for 64-bit Linux only.
fn size_t(bytes: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Driver for CudaDriver {
    fn version(&self) -> DriverResult<DriverVersion> {
        // SAFETY: `version` is a valid out-pointer.
        let ask = |version| unsafe { (self.table.driver_get_version)(version) };
        told(DriverOp::DriverGetVersion, ask).map(DriverVersion)
    }

    fn device_count(&self) -> DriverResult<i32> {
        // SAFETY: `count` is a valid out-pointer.
        told(DriverOp::DeviceGetCount, |count| unsafe { (self.table.device_get_count)(count) })
    }

    fn device_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        // SAFETY: `value` is a valid out-pointer; unknown attributes are refused by the driver.
        let ask =
            |value| unsafe { (self.table.device_get_attribute)(value, attribute.0, device.0) };
        told(DriverOp::DeviceGetAttribute, ask)
    }

    fn device_uuid(&self, device: DeviceOrdinal) -> DriverResult<DeviceUuid> {
        // SAFETY: `CUuuid` is 16 bytes, which `uuid` holds.
        let ask = |uuid| unsafe { (self.table.device_get_uuid)(uuid, device.0) };
        told(DriverOp::DeviceGetUuid, ask).map(DeviceUuid)
    }

    fn make_current(&self, device: DeviceOrdinal) -> DriverResult<()> {
        // The driver refuses a context that has ended unseen.
        if let Some(own) = self.stand_in(device)?
            && self.make_own_context_current(own).is_ok()
        {
            return Ok(());
        }
        let context = self.primary_context(device)?;
        // SAFETY: the context was retained above and is never released; one that was reset is refused by the driver.
        check(DriverOp::ContextSetCurrent, unsafe { (self.table.context_set_current)(context) })
    }

    fn has_primary_context(&self, device: DeviceOrdinal) -> DriverResult<bool> {
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: both are valid out-pointers.
        let code = unsafe {
            (self.table.primary_context_get_state)(device.0, &raw mut flags, &raw mut is_active)
        };
        check(DriverOp::PrimaryContextGetState, code)?;
        Ok(is_active != 0)
    }

    fn stand_beside_captures(&self) -> DriverResult<()> {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is a valid place for the old mode.
        let code = unsafe { (self.table.exchange_capture_mode)(&raw mut mode) };
        check(DriverOp::ExchangeCaptureMode, code)
    }

    fn make_own_context_current(&self, context: RawContext) -> DriverResult<()> {
        let address = usize::try_from(context.0).unwrap_or(0);
        let context: Context = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the application made the context; one that is gone is refused by the driver.
        check(DriverOp::ContextSetCurrent, unsafe { (self.table.context_set_current)(context) })
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both are valid out-pointers.
        let code = unsafe { (self.table.mem_get_info)(&raw mut free, &raw mut total) };
        check(DriverOp::MemoryGetInfo, code)?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn synchronize(&self) -> DriverResult<()> {
        let mut status = 0;
        // SAFETY: `status` is a valid out-pointer. During a capture the driver refuses the question, and lets the capture be.
        let asked = unsafe { (self.table.stream_is_capturing)(STREAM_LEGACY, &raw mut status) };
        if DriverCode(asked) == DriverCode::STREAM_CAPTURE_IMPLICIT {
            return check(DriverOp::ContextSynchronize, asked);
        }
        // SAFETY: no pointer is passed.
        check(DriverOp::ContextSynchronize, unsafe { (self.table.context_synchronize)() })
    }

    fn allocation_granularity(&self, prop: &AllocationProp) -> DriverResult<Granularity> {
        // SAFETY: `bytes` is a valid out-pointer and `prop` has the layout of the C structure.
        let ask = |bytes| unsafe { (self.table.get_granularity)(bytes, prop, GRANULARITY_MINIMUM) };
        let bytes = told(DriverOp::GetAllocationGranularity, ask)?;
        Ok(Granularity { size_bytes: bytes as u64 })
    }

    fn address_reserve(
        &self,
        size_bytes: u64,
        alignment_bytes: u64,
        hint: DeviceAddress,
    ) -> DriverResult<DeviceAddress> {
        let (size, alignment) = (size_t(size_bytes), size_t(alignment_bytes));
        // SAFETY: `start` is a valid out-pointer; the driver checks the rest.
        let ask =
            |start| unsafe { (self.table.address_reserve)(start, size, alignment, hint.0, 0) };
        told(DriverOp::AddressReserve, ask).map(DeviceAddress)
    }

    unsafe fn address_free(&self, range: VaRange) -> DriverResult<()> {
        // SAFETY: the caller vouches that nothing uses the range; the driver checks that it is whole.
        let code = unsafe { (self.table.address_free)(range.start.0, size_t(range.size_bytes)) };
        check(DriverOp::AddressFree, code)
    }

    fn create(&self, size_bytes: u64, prop: &AllocationProp) -> DriverResult<RawHandle> {
        // SAFETY: `handle` is a valid out-pointer and `prop` has the layout of the C structure.
        let ask = |handle| unsafe { (self.table.create)(handle, size_t(size_bytes), prop, 0) };
        told(DriverOp::Create, ask).map(RawHandle)
    }

    fn create_host_file(&self, size_bytes: u64, prop: &AllocationProp) -> DriverResult<RawHandle> {
        let made = if self.devices_use_host_addresses()? {
            self.host_files.create(size_bytes, prop)
        } else {
            Err(DriverCode::NOT_SUPPORTED)
        };
        about(DriverOp::Create, made)
    }

    fn reserve_for_host_file(
        &self,
        handle: RawHandle,
        alignment_bytes: u64,
    ) -> DriverResult<DeviceAddress> {
        self.reserve_and_register(handle, alignment_bytes)
    }

    fn free_of_host_file(&self, range: VaRange) -> Option<DriverResult<()>> {
        self.free_host_place(range)
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        if handle.is_of_host_file() {
            return about(DriverOp::Release, self.host_files.release(handle));
        }
        // SAFETY: the caller gives up its reference.
        check(DriverOp::Release, unsafe { (self.table.release)(handle.0) })
    }

    fn properties(&self, handle: RawHandle) -> DriverResult<AllocationProp> {
        if handle.is_of_host_file() {
            return about(DriverOp::GetProperties, self.host_files.properties(handle));
        }
        let mut prop = AllocationProp::pinned_on(DeviceOrdinal(0));
        // SAFETY: `prop` has the layout of the C structure; a handle that is none is refused.
        let code = unsafe { (self.table.get_properties)(&raw mut prop, handle.0) };
        check(DriverOp::GetProperties, code)?;
        Ok(prop)
    }

    fn map(&self, range: VaRange, handle: RawHandle) -> DriverResult<()> {
        if handle.is_of_host_file() {
            return about(DriverOp::Map, self.host_files.map(range, handle));
        }
        // SAFETY: mapping takes nothing away; the driver refuses ranges that are mapped or not reserved.
        let code =
            unsafe { (self.table.map)(range.start.0, size_t(range.size_bytes), 0, handle.0, 0) };
        check(DriverOp::Map, code)
    }

    unsafe fn unmap(&self, range: VaRange) -> DriverResult<()> {
        if let Some(mapping) = self.host_files.mapping_at(range.start) {
            return self.unmap_host_file(mapping.start);
        }
        // SAFETY: the caller vouches that no work uses the range.
        let code = unsafe { (self.table.unmap)(range.start.0, size_t(range.size_bytes)) };
        check(DriverOp::Unmap, code)
    }

    fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> DriverResult<()> {
        if let Some(mapping) = self.host_files.mapping_at(range.start) {
            let device = access.iter().find_map(|desc| desc.location.as_device());
            let register = |device| self.register_host_file(mapping.start, Some(device));
            return device.map_or(Ok(()), register);
        }
        let size = size_t(range.size_bytes);
        // SAFETY: pointer and count describe the slice; `AccessDesc` has the layout of the C structure.
        let code =
            unsafe { (self.table.set_access)(range.start.0, size, access.as_ptr(), access.len()) };
        check(DriverOp::SetAccess, code)
    }

    fn export_fd(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        if handle.is_of_host_file() {
            return about(DriverOp::Export, self.host_files.export(handle));
        }
        let mut fd = MaybeUninit::<RawFd>::uninit();
        let target = fd.as_mut_ptr().cast();
        // SAFETY: for this handle type the driver writes one `int`, which `fd` holds.
        let code = unsafe { (self.table.export)(target, handle.0, HANDLE_TYPE_POSIX_FD, 0) };
        check(DriverOp::Export, code)?;
        // SAFETY: the call succeeded, so it wrote the descriptor.
        let fd = unsafe { fd.assume_init() };
        // SAFETY: the descriptor is new and ours alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // The descriptor holds memory: a program that is started meanwhile must not inherit it.
        if let Err(errno) = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
            tracing::warn!(%errno, "programs that are started meanwhile hold memory");
        }
        Ok(fd)
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> DriverResult<RawHandle> {
        if let Some(handle) = self.host_files.import(fd) {
            return Ok(handle);
        }
        // The driver takes the number itself instead of a pointer.
        let number = std::ptr::without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap_or(0));
        // SAFETY: `handle` is a valid out-pointer; the descriptor stays open during the call.
        let ask = |handle| unsafe { (self.table.import)(handle, number, HANDLE_TYPE_POSIX_FD) };
        told(DriverOp::Import, ask).map(RawHandle)
    }

    unsafe fn host_register(
        &self,
        start: NonNull<u8>,
        size_bytes: usize,
        contexts: PinnedFor,
    ) -> DriverResult<()> {
        let flags = match contexts {
            PinnedFor::CurrentContext => 0,
            PinnedFor::AllContexts => HOST_REGISTER_PORTABLE,
        };
        let pointer = start.as_ptr().cast();
        // SAFETY: the caller keeps the range mapped until it is unregistered.
        let register = || unsafe { (self.table.host_register)(pointer, size_bytes, flags) };
        let code = self.beside_captures(register);
        check(DriverOp::HostRegister, code)
    }

    unsafe fn host_unregister(&self, start: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: the caller vouches that no copy uses the range.
        let unregister = || unsafe { (self.table.host_unregister)(start.as_ptr().cast()) };
        let code = self.beside_captures(unregister);
        check(DriverOp::HostUnregister, code)
    }

    fn stream_create(&self) -> DriverResult<RawStream> {
        // SAFETY: `stream` is a valid out-pointer of pointer size.
        let ask = |stream| unsafe { (self.table.stream_create)(stream, STREAM_NON_BLOCKING) };
        told(DriverOp::StreamCreate, ask).map(RawStream)
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the caller gives the stream up.
        check(DriverOp::StreamDestroy, unsafe { (self.table.stream_destroy)(stream.0) })
    }

    fn stream_synchronize(&self, stream: RawStream) -> DriverResult<()> {
        // SAFETY: a stream that is none is refused by the driver; ours are never reused after destroy.
        let code = self.beside_captures(|| unsafe { (self.table.stream_synchronize)(stream.0) });
        check(DriverOp::StreamSynchronize, code)
    }

    fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        // SAFETY: `status` is a valid out-pointer; a stream that is none is refused by the driver.
        let ask = |status| unsafe { (self.table.stream_is_capturing)(stream.0, status) };
        told(DriverOp::StreamIsCapturing, ask).map(|status| status != 0)
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        // SAFETY: `event` is a valid out-pointer of pointer size.
        let ask = |event| unsafe { (self.table.event_create)(event, EVENT_PLAIN) };
        told(DriverOp::EventCreate, ask).map(RawEvent)
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: the caller gives the event up.
        check(DriverOp::EventDestroy, unsafe { (self.table.event_destroy)(event.0) })
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        // SAFETY: no pointer is passed; what is none of the driver's is refused.
        let code = unsafe { (self.table.event_record)(event.0, stream.0) };
        check(DriverOp::EventRecord, code)
    }

    fn event_is_done(&self, event: RawEvent) -> DriverResult<bool> {
        // SAFETY: as for `event_record`.
        let code = self.beside_captures(|| unsafe { (self.table.event_query)(event.0) });
        if DriverCode(code) == DriverCode::NOT_READY {
            return Ok(false);
        }
        check(DriverOp::EventQuery, code).map(|()| true)
    }

    fn event_synchronize(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: as for `event_record`.
        let code = self.beside_captures(|| unsafe { (self.table.event_synchronize)(event.0) });
        check(DriverOp::EventSynchronize, code)
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()> {
        // SAFETY: as for `event_record`.
        let code = unsafe { (self.table.stream_wait_event)(stream.0, event.0, 0) };
        check(DriverOp::StreamWaitEvent, code)
    }

    unsafe fn copy_to_host(
        &self,
        target: NonNull<u8>,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()> {
        let (pointer, size) = (target.as_ptr().cast(), size_t(source.size_bytes));
        // SAFETY: the caller keeps both ends valid until the stream has passed the copy.
        let code = unsafe { (self.table.copy_to_host)(pointer, source.start.0, size, stream.0) };
        check(DriverOp::CopyToHost, code)
    }

    unsafe fn copy_to_device(
        &self,
        target: VaRange,
        source: NonNull<u8>,
        stream: RawStream,
    ) -> DriverResult<()> {
        let (pointer, size) = (source.as_ptr().cast_const().cast(), size_t(target.size_bytes));
        // SAFETY: the caller keeps both ends valid until the stream has passed the copy.
        let code = unsafe { (self.table.copy_to_device)(target.start.0, pointer, size, stream.0) };
        check(DriverOp::CopyToDevice, code)
    }

    unsafe fn copy_between(
        &self,
        target: DeviceAddress,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()> {
        let size = size_t(source.size_bytes);
        // SAFETY: the caller keeps both ends valid until the stream has passed the copy.
        let code = unsafe { (self.table.copy_between)(target.0, source.start.0, size, stream.0) };
        check(DriverOp::CopyBetween, code)
    }

    unsafe fn fill_with_zeros(&self, target: VaRange, stream: RawStream) -> DriverResult<()> {
        let size = size_t(target.size_bytes);
        // SAFETY: the caller keeps the range mapped until the stream has passed the fill.
        let code = unsafe { (self.table.fill)(target.start.0, 0, size, stream.0) };
        check(DriverOp::Fill, code)
    }

    unsafe fn fingerprint(
        &self,
        device: DeviceOrdinal,
        slots: NonNull<[PieceSlot]>,
        stream: RawStream,
    ) -> DriverResult<()> {
        self.settle_kernels(device)?;
        // SAFETY: as the caller vouches.
        unsafe { self.kernels.fingerprint(device, slots, stream) }
    }

    fn trim_pools(&self, device: DeviceOrdinal) -> DriverResult<()> {
        // SAFETY: `pool` is a valid out-pointer of pointer size.
        let ask = |pool| unsafe { (self.table.default_pool)(pool, device.0) };
        let pool = told(DriverOp::PoolTrim, ask)?;
        // SAFETY: the driver gave this pool, which lives as long as the device.
        check(DriverOp::PoolTrim, unsafe { (self.table.pool_trim)(pool, 0) })?;
        // SAFETY: no pointer is passed.
        check(DriverOp::PoolTrim, unsafe { (self.table.graph_mem_trim)(device.0) })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static MODE: Cell<c_int> = const { Cell::new(0) };
        static SPOILT: Cell<bool> = const { Cell::new(false) };
    }

    extern "C" fn exchange(mode: *mut c_int) -> c_int {
        // SAFETY: the table's function takes a valid place.
        let place = unsafe { &mut *mode };
        *place = MODE.replace(*place);
        0
    }

    /// A query or wait on a thread that captures: seen on driver 580 (`gpu-tests/captured_calls.py`).
    extern "C" fn spoils(_: u64) -> c_int {
        SPOILT.set(SPOILT.get() || MODE.get() != CAPTURE_MODE_RELAXED);
        if MODE.get() == CAPTURE_MODE_RELAXED { 0 } else { 900 }
    }

    #[test]
    fn questions_and_waits_leave_a_capture_of_the_calling_thread_alone() {
        let driver = CudaDriver::from_symbols(&|name| {
            let is_exchange = name == c"cuThreadExchangeStreamCaptureMode";
            let function =
                if is_exchange { exchange as *mut c_void } else { spoils as *mut c_void };
            NonNull::new(function)
        });
        let driver = driver.unwrap();
        assert_eq!(driver.event_is_done(RawEvent(1)), Ok(true));
        assert_eq!(driver.event_synchronize(RawEvent(1)), Ok(()));
        assert_eq!(driver.stream_synchronize(RawStream(1)), Ok(()));
        assert!(!SPOILT.get());
        assert_eq!(MODE.get(), 0, "the thread has its own mode back");
    }
}
