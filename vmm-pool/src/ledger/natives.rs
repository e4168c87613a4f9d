//! Memory that stays with the driver and is only counted; and what of either kind counts against a budget.

use super::Ledger;
use crate::budget::{Charge, Counted};
use crate::driver::{DeviceAddress, DeviceOrdinal, RawContext};

/// A plain allocation that the pool only counts.
#[derive(Debug)]
pub(crate) struct Native {
    pub(crate) size_bytes: u64,
    pub(crate) device: DeviceOrdinal,
    /// The context in which it was allocated, if that is known.
    pub(crate) context: Option<RawContext>,
    pub(crate) reason: &'static str,
    pub(crate) counted: Counted,
}

impl Ledger {
    /// Counts a plain allocation that was left to the driver.
    pub(crate) fn add_native(&mut self, address: DeviceAddress, native: Native) {
        self.natives.insert(address.0, native);
    }

    /// Forgets one.
    pub(crate) fn remove_native(&mut self, address: DeviceAddress) {
        self.natives.remove(&address.0);
    }

    /// Has all own memory that is on its device, and does not count yet, count against a budget.
    pub(crate) fn charge_all(
        &mut self,
        make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        for (_, row) in &mut self.rows {
            if let (true, Some(physical)) = (row.is_own(), row.backing_mut().handle_mut()) {
                physical.charge_with(&make);
            }
        }
        for native in self.natives.values_mut() {
            if let Counted::Yes(charge @ None) = &mut native.counted {
                *charge = make(native.size_bytes, Some(native.device));
            }
        }
    }
}
