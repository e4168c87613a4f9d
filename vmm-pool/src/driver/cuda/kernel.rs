//! Our own kernels: compiled by the driver for a device, in its primary context, when they are first asked for.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{DEVICES_MAX, LoadError, RealSymbol, check, driver_table};
use crate::driver::fingerprint::{KERNEL, KERNEL_NAME, KERNEL_THREADS, PieceSlot};
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

/// The kernels of all devices.
pub(super) struct Kernels {
    /// None where the driver has not all that it takes.
    calls: Option<Calls>,
    /// The fingerprint kernel of each device; null where it is not loaded.
    fingerprints: [AtomicPtr<c_void>; DEVICES_MAX],
}

impl Kernels {
    pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Self {
        Self {
            calls: Calls::look_up(find).ok(),
            fingerprints: [const { AtomicPtr::new(std::ptr::null_mut()) }; DEVICES_MAX],
        }
    }

    /// The primary context of `device` has ended, or may, and what was loaded there with it.
    pub(super) fn forget(&self, device: DeviceOrdinal) {
        let known = usize::try_from(device.0).ok().and_then(|index| self.fingerprints.get(index));
        if let Some(known) = known {
            known.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// The fingerprint kernel of `device`, whose primary context is current. Memory that the driver takes for it stays
    /// until that context ends.
    fn loaded(&self, calls: &Calls, device: DeviceOrdinal) -> DriverResult<*mut c_void> {
        let invalid = DriverError { op: DriverOp::ModuleLoad, code: DriverCode::INVALID_DEVICE };
        let index = usize::try_from(device.0).map_err(|_| invalid)?;
        let known = self.fingerprints.get(index).ok_or(invalid)?;
        let function = known.load(Ordering::Acquire);
        if !function.is_null() {
            return Ok(function);
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is a valid out-pointer; the text is terminated and lives as long as the program.
        let code = unsafe { (calls.module_load)(&raw mut module, KERNEL.as_ptr().cast()) };
        check(DriverOp::ModuleLoad, code)?;
        let mut function = std::ptr::null_mut();
        let name = KERNEL_NAME.as_ptr();
        // SAFETY: `function` is a valid out-pointer, the module has just been loaded, the name is terminated.
        let code = unsafe { (calls.module_get_function)(&raw mut function, module, name) };
        check(DriverOp::ModuleGetFunction, code)?;
        known.store(function, Ordering::Release);
        Ok(function)
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
        let refused = |op, code| DriverError { op, code };
        let Some(calls) = &self.calls else {
            return Err(refused(DriverOp::ModuleLoad, DriverCode::NOT_SUPPORTED));
        };
        let too_many = refused(DriverOp::LaunchKernel, DriverCode::INVALID_VALUE);
        // The first dimension of a grid has 31 bits.
        let blocks = i32::try_from(slots.len()).map_err(|_| too_many)?.unsigned_abs();
        if blocks == 0 {
            return Ok(());
        }
        let function = self.loaded(calls, device)?;
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
