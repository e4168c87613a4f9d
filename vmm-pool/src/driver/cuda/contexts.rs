//! Which context the driver is called in, and what becomes of our references to it.

#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{Context, CudaDriver, check};
use crate::driver::{
    DeviceOrdinal, Driver as _, DriverCode, DriverError, DriverOp, DriverResult, RawContext,
};

impl CudaDriver {
    fn retained(&self, device: DeviceOrdinal) -> DriverResult<&AtomicPtr<c_void>> {
        let invalid =
            DriverError { op: DriverOp::PrimaryContextRetain, code: DriverCode::INVALID_DEVICE };
        let index = usize::try_from(device.0).map_err(|_| invalid)?;
        self.contexts.get(index).ok_or(invalid)
    }

    /// The context of the application's own to work in on `device`, which has no primary one.
    pub(super) fn stand_in(&self, device: DeviceOrdinal) -> DriverResult<Option<RawContext>> {
        if !self.retained(device)?.load(Ordering::Acquire).is_null() {
            return Ok(None);
        }
        let Some(own) = (self.own_context)(device) else { return Ok(None) };
        let place = usize::try_from(device.0).ok().and_then(|index| self.stands_in.get(index));
        // Streams of a step are of the context that it began in, also if there is a primary one by now.
        let is_used = place.is_some_and(|place| place.load(Ordering::Acquire) == own.0);
        if !is_used && self.has_primary_context(device).unwrap_or(true) {
            return Ok(None);
        }
        if let Some(place) = place {
            place.store(own.0, Ordering::Release);
        }
        Ok(Some(own))
    }

    /// Kernels that are loaded in another context than the one to work in are loaded again.
    pub(super) fn settle_kernels(&self, device: DeviceOrdinal) -> DriverResult<()> {
        let now = self.stand_in(device)?.map_or(0, |own| own.0);
        // The device is one of these: its context has just been looked at.
        let known = usize::try_from(device.0).ok().and_then(|index| self.kernels_in.get(index));
        if known.is_some_and(|known| known.swap(now, Ordering::AcqRel) != now) {
            self.kernels.forget(device);
        }
        Ok(())
    }

    /// Says that the application has ended a context of its own, and with it what was loaded there.
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
            // Another thread has retained it meanwhile. A reference too many would keep the context when it is let go.
            Err(known) => {
                // SAFETY: gives up the reference that was just taken, and no other.
                let code = unsafe { (self.table.primary_context_release)(device.0) };
                check(DriverOp::PrimaryContextRelease, code)?;
                Ok(known)
            }
        }
    }

    /// Gives back our reference to the primary context of `device`, if there is one: the application has given back what
    /// may be its last. The next use retains the context again.
    ///
    /// # Errors
    /// What the driver returned.
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

    /// Says that the application has reset the primary context of `device`, and with it all references to it: the next
    /// use retains it again.
    #[doc(alias = "cuDevicePrimaryCtxReset")]
    pub fn primary_context_was_reset(&self, device: DeviceOrdinal) {
        self.kernels.forget(device);
        if let Ok(retained) = self.retained(device) {
            retained.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}
