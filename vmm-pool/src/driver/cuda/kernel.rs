//! Our own kernel, which takes fingerprints: compiled by the driver for a device, in its primary context, when it is first
//! needed.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{DEVICES_MAX, LoadError, RealSymbol, check, driver_table};
use crate::driver::fingerprint::{KERNEL, KERNEL_NAME, KERNEL_THREADS, Keys, PieceSlot};
use crate::driver::{DeviceOrdinal, DriverCode, DriverError, DriverOp, DriverResult, RawStream};

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

/// The kernel on all devices.
pub(super) struct Kernels {
    /// None where the driver has not all that it takes.
    calls: Option<Calls>,
    /// Of each device; null where it is not loaded.
    functions: [AtomicPtr<c_void>; DEVICES_MAX],
}

impl Kernels {
    pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Self {
        let none = |_device| AtomicPtr::new(std::ptr::null_mut());
        Self { calls: Calls::look_up(find).ok(), functions: std::array::from_fn(none) }
    }

    /// That of one device.
    fn of(&self, device: DeviceOrdinal) -> Option<&AtomicPtr<c_void>> {
        self.functions.get(usize::try_from(device.0).ok()?)
    }

    /// The primary context of `device` has ended, or may, and what was loaded there with it.
    pub(super) fn forget(&self, device: DeviceOrdinal) {
        if let Some(known) = self.of(device) {
            known.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// The kernel of `device`, whose primary context is current: to load it takes its time. Memory that the driver takes
    /// for it stays until that context ends.
    fn loaded(&self, calls: &Calls, device: DeviceOrdinal) -> DriverResult<*mut c_void> {
        let invalid = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::INVALID_DEVICE };
        let known = self.of(device).ok_or(invalid)?;
        let mut function = known.load(Ordering::Acquire);
        if !function.is_null() {
            return Ok(function);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a valid out-pointer; the text is terminated and lives as long as the program.
        let code = unsafe { (calls.module_load)(&raw mut module, KERNEL.as_ptr().cast()) };
        check(DriverOp::ModuleLoad, code)?;
        // SAFETY: `function` is a valid out-pointer, the module has just been loaded, the name is terminated.
        let code =
            unsafe { (calls.module_get_function)(&raw mut function, module, KERNEL_NAME.as_ptr()) };
        check(DriverOp::ModuleGetFunction, code)?;
        known.store(function, Ordering::Release);
        Ok(function)
    }

    /// Where a device finds host memory, which is refused where it is not pinned.
    fn seen_by_device(calls: &Calls, host: *mut c_void) -> DriverResult<u64> {
        let mut at = 0_u64;
        // SAFETY: `at` is a valid out-pointer; the host's memory is not touched.
        let code = unsafe { (calls.host_get_device_pointer)(&raw mut at, host, 0) };
        check(DriverOp::HostGetDevicePointer, code).map(|()| at)
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
        let missing = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::NOT_SUPPORTED };
        let calls = self.calls.as_ref().ok_or(missing)?;
        let too_many = DriverError { op: DriverOp::LaunchKernel, code: DriverCode::INVALID_VALUE };
        // The first dimension of a grid has 31 bits.
        let blocks = i32::try_from(slots.len()).map_err(|_| too_many)?.unsigned_abs();
        if blocks == 0 {
            return Ok(());
        }
        let function = self.loaded(calls, device)?;
        let mut at = Self::seen_by_device(calls, slots.as_ptr().cast())?;
        let mut keys = Keys::of_process();
        let mut parameters = [(&raw mut at).cast::<c_void>(), (&raw mut keys).cast::<c_void>()];
        // SAFETY: the function is of this device's context and takes one address and the keys by value, which the driver reads
        // before this returns; the caller keeps what the address points to valid, and the pieces mapped, until the stream is
        // done.
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
