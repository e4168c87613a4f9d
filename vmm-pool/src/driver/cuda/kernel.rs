//! Our own kernels: compiled by the driver for a device, in its primary context, when they are first asked for.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{DEVICES_MAX, LoadError, RealSymbol, check, driver_table};
use crate::driver::fingerprint::{
    COPY_BLOCKS, COPY_NAME, COPY_THREADS, KERNEL, KERNEL_NAME, KERNEL_THREADS, PieceSlot,
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

/// One of ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Fingerprint,
    Copy,
}

/// The kernels of all devices.
pub(super) struct Kernels {
    /// None where the driver has not all that it takes.
    calls: Option<Calls>,
    /// The two of each device; null where they are not loaded.
    fingerprints: [AtomicPtr<c_void>; DEVICES_MAX],
    copies: [AtomicPtr<c_void>; DEVICES_MAX],
}

impl Kernels {
    pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Self {
        Self {
            calls: Calls::look_up(find).ok(),
            fingerprints: [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX],
            copies: [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX],
        }
    }

    /// The primary context of `device` has ended, or may, and what was loaded there with it.
    pub(super) fn forget(&self, device: DeviceOrdinal) {
        let index = usize::try_from(device.0).unwrap_or(usize::MAX);
        for known in [&self.fingerprints, &self.copies].into_iter().filter_map(|all| all.get(index))
        {
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
        let index = usize::try_from(device.0).map_err(|_| invalid)?;
        let known = |kernel| match kernel {
            Kernel::Fingerprint => self.fingerprints.get(index).ok_or(invalid),
            Kernel::Copy => self.copies.get(index).ok_or(invalid),
        };
        let function = known(which)?.load(Ordering::Acquire);
        if !function.is_null() {
            return Ok(function);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a valid out-pointer; the text is terminated and lives as long as the program.
        let code = unsafe { (calls.module_load)(&raw mut module, KERNEL.as_ptr().cast()) };
        check(DriverOp::ModuleLoad, code)?;
        let mut wanted = Ok(std::ptr::null_mut());
        for (kernel, name) in [(Kernel::Fingerprint, KERNEL_NAME), (Kernel::Copy, COPY_NAME)] {
            let mut function = std::ptr::null_mut();
            // SAFETY: `function` is a valid out-pointer, the module has just been loaded, the name is terminated.
            let code =
                unsafe { (calls.module_get_function)(&raw mut function, module, name.as_ptr()) };
            let found = check(DriverOp::ModuleGetFunction, code);
            if found.is_ok() {
                known(kernel)?.store(function, Ordering::Release);
            }
            // What is missing of the other one is its own affair.
            if kernel == which {
                wanted = found.map(|()| function);
            }
        }
        wanted
    }

    /// The calls.
    fn calls(&self) -> DriverResult<&Calls> {
        let missing = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::NOT_SUPPORTED };
        self.calls.as_ref().ok_or(missing)
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
        let mut from = 0_u64;
        // SAFETY: `from` is a valid out-pointer; host memory that is not pinned is refused.
        let code = unsafe {
            (calls.host_get_device_pointer)(&raw mut from, source.as_ptr().cast::<c_void>(), 0)
        };
        check(DriverOp::HostGetDevicePointer, code)?;
        let mut to = target.start.0;
        let mut parameters = [
            (&raw mut to).cast::<c_void>(),
            (&raw mut from).cast::<c_void>(),
            (&raw mut words).cast::<c_void>(),
        ];
        // SAFETY: the function is of this device's context and takes two addresses and a number of words, which the driver
        // reads before the call returns; the caller keeps both sides valid until the stream is done.
        let code = unsafe {
            (calls.launch_kernel)(
                function,
                COPY_BLOCKS,
                1,
                1,
                COPY_THREADS,
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
        let mut at = 0_u64;
        let host = slots.as_ptr().cast::<c_void>();
        // SAFETY: `at` is a valid out-pointer; host memory that is not pinned is refused.
        let code = unsafe { (calls.host_get_device_pointer)(&raw mut at, host, 0) };
        check(DriverOp::HostGetDevicePointer, code)?;
        let mut parameters = [(&raw mut at).cast::<c_void>()];
        // SAFETY: the function is of this device's context and takes one address, which the driver reads before the
        // call returns; the caller keeps what it points to valid, and the pieces mapped, until the stream is done.
        let code = unsafe {
            (calls.launch_kernel)(
                function,
                blocks,
                1,
                1,
                KERNEL_THREADS,
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
}
