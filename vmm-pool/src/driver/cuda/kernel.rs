//! Our own kernels: compiled by the driver for a device, in its primary context, when they are first asked for.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{DEVICES_MAX, LoadError, RealSymbol, check, driver_table};
use crate::driver::fingerprint::{
    COPY_BLOCKS, COPY_NAME, COPY_THREADS, KERNEL, KERNEL_NAME, KERNEL_THREADS, Keys, PieceSlot,
    WORD_BYTES,
};
use crate::driver::{
    DeviceOrdinal, DriverCode, DriverError, DriverOp, DriverResult, RawStream, VaRange,
};

driver_table! {
    Calls;
    module_load: cuModuleLoadData(*mut *mut c_void, *const c_void);
    module_get_function: cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char);
    host_get_device_pointer: cuMemHostGetDevicePointer_v2(*mut u64, *mut c_void, c_uint);
    launch_kernel: cuLaunchKernel(
        *mut c_void,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        u64,
        *mut *mut c_void,
        *mut *mut c_void,
    );
}

/// One of ours, by its place in tables.
#[derive(Clone, Copy)]
enum Kernel {
    Fingerprint,
    Copy,
}

const NAMES: [&CStr; 2] = [KERNEL_NAME, COPY_NAME];

/// The kernels of all devices.
pub(super) struct Kernels {
    /// None where the driver has not all that it takes.
    calls: Option<Calls>,
    /// Each kernel of each device; null where it is not loaded.
    functions: [[AtomicPtr<c_void>; NAMES.len()]; DEVICES_MAX],
}

impl Kernels {
    pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Self {
        let none = || [const { AtomicPtr::new(std::ptr::null_mut()) }; NAMES.len()];
        let functions = std::array::from_fn(|_device| none());
        Self { calls: Calls::look_up(find).ok(), functions }
    }

    /// Those of one device.
    fn of(&self, device: DeviceOrdinal) -> Option<&[AtomicPtr<c_void>; NAMES.len()]> {
        self.functions.get(usize::try_from(device.0).ok()?)
    }

    /// The primary context of `device` has ended, or may, and what was loaded there with it.
    pub(super) fn forget(&self, device: DeviceOrdinal) {
        for known in self.of(device).into_iter().flatten() {
            known.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// A kernel of `device`, whose primary context is current: all are loaded at once, which takes its time. Memory that the
    /// driver takes for them stays until that context ends.
    fn loaded(
        &self,
        calls: &Calls,
        device: DeviceOrdinal,
        which: Kernel,
    ) -> DriverResult<*mut c_void> {
        let invalid = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::INVALID_DEVICE };
        let known = self.of(device).ok_or(invalid)?;
        let function = known[which as usize].load(Ordering::Acquire);
        if !function.is_null() {
            return Ok(function);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a valid out-pointer; the text is terminated and lives as long as the program.
        let code = unsafe { (calls.module_load)(&raw mut module, KERNEL.as_ptr().cast()) };
        check(DriverOp::ModuleLoad, code)?;
        let found = NAMES.map(|name| {
            let mut function = std::ptr::null_mut();
            // SAFETY: `function` is a valid out-pointer, the module has just been loaded, the name is terminated.
            let code =
                unsafe { (calls.module_get_function)(&raw mut function, module, name.as_ptr()) };
            check(DriverOp::ModuleGetFunction, code).map(|()| function)
        });
        for (known, function) in known.iter().zip(found) {
            known.store(function.unwrap_or(std::ptr::null_mut()), Ordering::Release);
        }
        // What is missing of the other one is its own affair.
        found[which as usize]
    }

    /// The calls.
    fn calls(&self) -> DriverResult<&Calls> {
        let missing = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::NOT_SUPPORTED };
        self.calls.as_ref().ok_or(missing)
    }

    /// Where a device finds host memory, which is refused where it is not pinned.
    fn seen_by_device(calls: &Calls, host: *mut c_void) -> DriverResult<u64> {
        let mut at = 0_u64;
        // SAFETY: `at` is a valid out-pointer; the host's memory is not touched.
        let code = unsafe { (calls.host_get_device_pointer)(&raw mut at, host, 0) };
        check(DriverOp::HostGetDevicePointer, code).map(|()| at)
    }

    /// Starts `function` as so many blocks of so many threads.
    ///
    /// # Safety
    /// It is of the context of `stream`, and takes `parameters`, which point to live values: the driver reads them before this
    /// returns. What it touches stays valid until the stream is done.
    unsafe fn launch(
        calls: &Calls,
        function: *mut c_void,
        (blocks, threads): (u32, u32),
        stream: RawStream,
        parameters: &mut [*mut c_void],
    ) -> DriverResult<()> {
        // SAFETY: as the caller vouches.
        let code = unsafe {
            (calls.launch_kernel)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(DriverOp::LaunchKernel, code)
    }

    /// See [`crate::driver::Driver::copy_to_device_by_kernel`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn copy_to_device(
        &self,
        device: DeviceOrdinal,
        target: VaRange,
        source: NonNull<u8>,
        stream: RawStream,
    ) -> DriverResult<()> {
        let calls = self.calls()?;
        let misaligned =
            DriverError { op: DriverOp::LaunchKernel, code: DriverCode::INVALID_VALUE };
        let host = source.as_ptr().expose_provenance() as u64;
        if !(host | target.start.0 | target.size_bytes).is_multiple_of(WORD_BYTES) {
            return Err(misaligned);
        }
        let mut words = target.size_bytes / WORD_BYTES;
        if words == 0 {
            return Ok(());
        }
        let function = self.loaded(calls, device, Kernel::Copy)?;
        let mut from = Self::seen_by_device(calls, source.as_ptr().cast())?;
        let mut to = target.start.0;
        let mut parameters = [
            (&raw mut to).cast::<c_void>(),
            (&raw mut from).cast::<c_void>(),
            (&raw mut words).cast::<c_void>(),
        ];
        let grid = (COPY_BLOCKS, COPY_THREADS);
        // SAFETY: the function is of this device's context and takes two addresses and a number of words; the caller keeps
        // both sides valid until the stream is done.
        unsafe { Self::launch(calls, function, grid, stream, &mut parameters) }
    }

    /// See [`crate::driver::Driver::fingerprint`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn fingerprint(
        &self,
        device: DeviceOrdinal,
        slots: NonNull<[PieceSlot]>,
        stream: RawStream,
    ) -> DriverResult<()> {
        let calls = self.calls()?;
        let too_many = DriverError { op: DriverOp::LaunchKernel, code: DriverCode::INVALID_VALUE };
        // The first dimension of a grid has 31 bits.
        let blocks = i32::try_from(slots.len()).map_err(|_| too_many)?.unsigned_abs();
        if blocks == 0 {
            return Ok(());
        }
        let function = self.loaded(calls, device, Kernel::Fingerprint)?;
        let mut at = Self::seen_by_device(calls, slots.as_ptr().cast())?;
        let mut keys = Keys::of_process();
        let mut parameters = [(&raw mut at).cast::<c_void>(), (&raw mut keys).cast::<c_void>()];
        let grid = (blocks, KERNEL_THREADS);
        // SAFETY: the function is of this device's context and takes one address and the keys by value; the caller keeps what the
        // address points to valid, and the pieces mapped, until the stream is done.
        unsafe { Self::launch(calls, function, grid, stream, &mut parameters) }
    }
}
