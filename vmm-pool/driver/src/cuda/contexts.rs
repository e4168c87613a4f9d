//! The context that the driver is called in, the end of our references to it, and our own kernel in it. The kernel takes
//! fingerprints. The driver compiles it for a device when it is first needed.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{Context, CudaDriver, DEVICES_MAX, LoadError, RealSymbol, check, driver_table};
use crate::fingerprint::{KERNEL, KERNEL_NAME, KERNEL_THREADS, Keys, PieceSlot};
use crate::{
    DeviceOrdinal, Driver as _, DriverCode, DriverError, DriverOp, DriverResult, RawContext,
    RawStream,
};

impl CudaDriver {
    fn retained(&self, device: DeviceOrdinal) -> DriverResult<&AtomicPtr<c_void>> {
        let invalid =
            DriverError { op: DriverOp::PrimaryContextRetain, code: DriverCode::INVALID_DEVICE };
        let index = usize::try_from(device.0).map_err(|_| invalid)?;
        self.contexts.get(index).ok_or(invalid)
    }

    /// Returns the application's own context to work in on `device`, if there is no primary one.
    pub(super) fn stand_in(&self, device: DeviceOrdinal) -> DriverResult<Option<RawContext>> {
        if !self.retained(device)?.load(Ordering::Acquire).is_null() {
            return Ok(None);
        }
        let Some(own) = (self.own_context)(device) else { return Ok(None) };
        let place = usize::try_from(device.0).ok().and_then(|index| self.stands_in.get(index));
        // The streams of a step belong to the context in which the step began. A primary context that was made since does not
        // change that.
        let is_used = place.is_some_and(|place| place.load(Ordering::Acquire) == own.0);
        if !is_used && self.has_primary_context(device).unwrap_or(true) {
            return Ok(None);
        }
        if let Some(place) = place {
            place.store(own.0, Ordering::Release);
        }
        Ok(Some(own))
    }

    /// Makes the kernels load again if they are loaded in another context than the one to work in.
    pub(super) fn settle_kernels(&self, device: DeviceOrdinal) -> DriverResult<()> {
        let now = self.stand_in(device)?.map_or(0, |own| own.0);
        // The device is one of these: its context has just been looked at.
        let known = usize::try_from(device.0).ok().and_then(|index| self.kernels_in.get(index));
        if known.is_some_and(|known| known.swap(now, Ordering::AcqRel) != now) {
            self.kernels.forget(device);
        }
        Ok(())
    }

    /// Records that the application has ended a context of its own, with everything loaded there.
    #[doc(alias = "cuCtxDestroy")]
    pub fn own_context_ended(&self, context: RawContext) {
        for (device, known) in (0..).zip(&self.kernels_in) {
            if known.load(Ordering::Acquire) == context.0 {
                self.kernels.forget(DeviceOrdinal(device));
            }
        }
    }

    pub(super) fn primary_context(&self, device: DeviceOrdinal) -> DriverResult<Context> {
        let retained = self.retained(device)?;
        let known = retained.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(known);
        }
        let mut context: Context = std::ptr::null_mut();
        // SAFETY: `context` is a valid out-pointer for the call.
        let code = unsafe { (self.table.primary_context_retain)(&raw mut context, device.0) };
        check(DriverOp::PrimaryContextRetain, code)?;
        let empty = std::ptr::null_mut();
        match retained.compare_exchange(empty, context, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(context),
            // Another thread has retained the context meanwhile. A second reference would keep the context alive when it is
            // released.
            Err(known) => {
                // SAFETY: gives up the reference that was just taken, and no other.
                let code = unsafe { (self.table.primary_context_release)(device.0) };
                check(DriverOp::PrimaryContextRelease, code)?;
                Ok(known)
            }
        }
    }

    /// Gives back our reference to the primary context of `device`, if there is one. The application has given back what may be
    /// its last reference. The next use retains the context again.
    ///
    /// # Errors
    /// The error that the driver returned.
    #[doc(alias = "cuDevicePrimaryCtxRelease")]
    pub fn let_primary_context_go(&self, device: DeviceOrdinal) -> DriverResult<()> {
        let retained = self.retained(device)?;
        self.kernels.forget(device);
        if retained.swap(std::ptr::null_mut(), Ordering::AcqRel).is_null() {
            return Ok(());
        }
        // SAFETY: no pointer is passed; the reference was ours.
        let code = unsafe { (self.table.primary_context_release)(device.0) };
        check(DriverOp::PrimaryContextRelease, code)
    }

    /// Records that the application has reset the primary context of `device`, with all references to it. The next use retains
    /// it again.
    #[doc(alias = "cuDevicePrimaryCtxReset")]
    pub fn primary_context_was_reset(&self, device: DeviceOrdinal) {
        self.kernels.forget(device);
        if let Ok(retained) = self.retained(device) {
            retained.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}

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
    /// `None` where the driver lacks a function that the kernel needs.
    calls: Option<Calls>,
    /// The function for each device; null where it is not loaded.
    functions: [AtomicPtr<c_void>; DEVICES_MAX],
}

impl Kernels {
    pub(super) fn look_up(find: &dyn Fn(&CStr) -> Option<RealSymbol>) -> Self {
        let none = |_device| AtomicPtr::new(std::ptr::null_mut());
        Self { calls: Calls::look_up(find).ok(), functions: std::array::from_fn(none) }
    }

    /// Returns the entry of one device.
    fn of(&self, device: DeviceOrdinal) -> Option<&AtomicPtr<c_void>> {
        self.functions.get(usize::try_from(device.0).ok()?)
    }

    /// Forgets the kernel of `device`: its primary context has ended, or may end, with everything loaded there.
    pub(super) fn forget(&self, device: DeviceOrdinal) {
        if let Some(known) = self.of(device) {
            known.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// Returns the kernel of `device`, whose primary context is current. Loading it takes some time. The memory that the driver
    /// takes for it stays until that context ends.
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

    /// Returns the address at which a device reaches host memory. Memory that is not pinned is refused.
    fn seen_by_device(calls: &Calls, host: *mut c_void) -> DriverResult<u64> {
        let mut at = 0_u64;
        // SAFETY: `at` is a valid out-pointer; the host's memory is not touched.
        let code = unsafe { (calls.host_get_device_pointer)(&raw mut at, host, 0) };
        check(DriverOp::HostGetDevicePointer, code).map(|()| at)
    }

    /// See [`crate::Driver::fingerprint`].
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
