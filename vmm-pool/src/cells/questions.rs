//! Questions about addresses, answered for what callers hold there.

use super::this_thread;
use crate::driver::{DeviceAddress, Driver, VaRange};
use crate::ledger::{Facts, Known};
use crate::pool::{Entered, Pool, Use};
use crate::slabs::Place;

impl<D: Driver> Pool<D> {
    /// Who can answer a question about `address` now. Passes no gate, and waits for nothing.
    pub fn who_answers(&self, address: DeviceAddress) -> Known {
        let place = self.slabs().place(address);
        let cell = match place {
            Place::Nothing => return Known::Nobody,
            Place::Elsewhere | Place::Alone => return self.who_knows(address),
            Place::Cell { range, .. } => range,
        };
        match self.who_knows(address) {
            // The reservation is ours, and the caller's is as long as the cell.
            Known::Away(facts) => {
                Known::Away(Facts { mapping: cell, block_bytes: Some(cell.size_bytes), ..facts })
            }
            known @ (Known::Elsewhere | Known::Here(_) | Known::Nobody) => known,
        }
    }

    /// The cell that is mapped at `address`.
    pub fn cell_range(&self, address: DeviceAddress) -> Option<VaRange> {
        match self.slabs().place(address) {
            Place::Cell { range, .. } => Some(range),
            Place::Elsewhere | Place::Alone | Place::Nothing => None,
        }
    }

    /// May [`Entered::take_addresses`] have some for this thread? Passes no gate.
    pub fn has_addresses(&self, size_bytes: u64) -> bool {
        self.slabs().aimed(this_thread(), size_bytes).is_some()
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else: those
    /// of [`Pool::range_of`], and cells. Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_seen(&self, address: DeviceAddress) -> Option<VaRange> {
        self.cell_range(address).or_else(|| self.range_of(address))
    }
}

impl<D: Driver> Entered<'_, D, Use> {
    /// Addresses for the cell that this thread has just got, or asked about, where it asks for as many bytes. None where the
    /// driver is to give them.
    ///
    /// # Driver calls
    /// None for a cell's first addresses. `cuMemAddressReserve` and `cuMemMap`, for the whole slab, where all that it has are
    /// taken.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn take_addresses(&self, size_bytes: u64, alignment: u64) -> Option<DeviceAddress> {
        let thread = this_thread();
        let (aimed, spot) = {
            let mut slabs = self.pool.slabs();
            let aimed = slabs.aimed(thread, size_bytes);
            (aimed, slabs.take_spot(thread, size_bytes, alignment))
        };
        let aimed = aimed?;
        if spot.is_some() {
            return spot;
        }
        self.further_window(aimed, alignment);
        let mut slabs = self.pool.slabs();
        let spot = slabs.take_spot(thread, size_bytes, alignment);
        slabs.aim(thread, None);
        spot
    }
}
