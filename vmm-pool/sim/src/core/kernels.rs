//! Our own kernels, as the simulated devices run them.

#![expect(
    unsafe_code,
    reason = "a kernel reads and writes at addresses whose mapping was just checked"
)]

use std::sync::atomic::Ordering;

use super::{Core, Touch};
use crate::memory::Coded;
use sublet_driver::{
    DeviceAddress, DeviceOrdinal, DriverCode, Fingerprint, Keys, PieceSlot, VaRange, WORD_BYTES,
};

impl Core {
    /// Are our kernels loaded on `device`?
    pub(crate) fn has_kernels(&self, device: DeviceOrdinal) -> bool {
        self.device(device).is_ok_and(|entry| entry.has_kernels.load(Ordering::Acquire))
    }

    /// Loads our kernels on `device`.
    pub(crate) fn load_kernels(&self, device: DeviceOrdinal) -> Coded<()> {
        self.device(device)?.has_kernels.store(true, Ordering::Release);
        Ok(())
    }

    /// Are all slots in registered host memory?
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn check_slots(&self, first: u64, count: usize) -> Coded<()> {
        let size_bytes = (count * size_of::<PieceSlot>()) as u64;
        self.check_registered(VaRange::new(DeviceAddress(first), size_bytes))
    }

    /// Is the whole range in registered host memory?
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn check_registered(&self, range: VaRange) -> Coded<()> {
        let registered = self.host_range_at(range.start.0);
        if registered.is_some_and(|known| known.contains(range)) {
            Ok(())
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    /// Takes the fingerprints by `keys` for the `count` slots from `first` on, as `device` would.
    ///
    /// # Safety
    /// The slots are live memory of this process, and nobody else touches them.
    ///
    /// # Errors
    /// `INVALID_VALUE` for slots that are not registered; `MISALIGNED_ADDRESS`; `ILLEGAL_ADDRESS` for a piece that the
    /// device may not read all of, or that is no device memory.
    pub unsafe fn fingerprint(
        &self,
        device: DeviceOrdinal,
        (first, count): (u64, usize),
        keys: Keys,
    ) -> Coded<()> {
        self.check_slots(first, count)?;
        let address = usize::try_from(first).map_err(|_| DriverCode::INVALID_VALUE)?;
        let slots: *mut PieceSlot = std::ptr::with_exposed_provenance_mut(address);
        if !slots.is_aligned() {
            return Err(DriverCode::MISALIGNED_ADDRESS);
        }
        for index in 0..count {
            // SAFETY: there are `count` of them.
            let slot = unsafe { slots.add(index) };
            // SAFETY: live and aligned, and the caller's to give.
            let piece = unsafe { slot.read() }.piece();
            let print = self.fingerprint_of(device, piece, keys)?;
            // SAFETY: as above.
            unsafe { slot.write(PieceSlot::answering(print)) };
        }
        Ok(())
    }

    fn fingerprint_of(
        &self,
        device: DeviceOrdinal,
        piece: VaRange,
        keys: Keys,
    ) -> Coded<Fingerprint> {
        let VaRange { start, size_bytes } = piece;
        if !start.0.is_multiple_of(WORD_BYTES) || !size_bytes.is_multiple_of(WORD_BYTES) {
            return Err(DriverCode::MISALIGNED_ADDRESS);
        }
        if self.reservation_at(start).is_none() {
            return Err(DriverCode::ILLEGAL_ADDRESS);
        }
        let _guard = self.access(device, &[(piece, Touch::Read)])?;
        let illegal = |_| DriverCode::ILLEGAL_ADDRESS;
        let length = usize::try_from(size_bytes).map_err(illegal)?;
        let at = std::ptr::with_exposed_provenance(usize::try_from(start.0).map_err(illegal)?);
        // SAFETY: readable and mapped as long as the guard lives. Others may write there, as on a device; the bytes
        // are only looked at.
        Ok(keys.print(unsafe { std::slice::from_raw_parts(at, length) }))
    }
}
