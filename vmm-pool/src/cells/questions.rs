//! Questions about addresses, answered for what callers hold there.

use super::{Cells, this_thread};
use crate::driver::{DeviceAddress, Driver, VaRange};
use crate::ledger::{Facts, Known, LIBRARY_TAGS};
use crate::pool::{Pool, Use};
use crate::slabs::Occupant;

impl<D: Driver> Pool<D> {
    /// Tells who can answer a question about `address` now. Passes no gate, and waits for nothing.
    pub fn who_answers(&self, address: DeviceAddress) -> Known {
        let (place, reserved, rights, is_vacant) = {
            let slabs = self.slabs().table();
            let place = slabs.windows.place(address);
            if place == Occupant::Elsewhere {
                drop(slabs);
                return self.holdings().who_knows(address);
            }
            let (reserved, rights) =
                (slabs.windows.spot_at(address), slabs.windows.rights_at(address));
            (place, reserved, rights, slabs.windows.is_vacant(address))
        };
        // Where a caller has a whole window, and nothing in it, the driver sees the same.
        if place == Occupant::Nothing && (reserved.is_none() || !is_vacant) {
            return Known::Nobody;
        }
        match self.holdings().who_knows(address) {
            // The reservation is ours, and the caller's is a part of it.
            Known::Away(facts) => {
                let (mapping, number) = match place {
                    Occupant::Cell { range, handle } => (range, handle.raw()),
                    Occupant::Elsewhere | Occupant::Alone | Occupant::Nothing => {
                        (facts.mapping, facts.number)
                    }
                };
                let access = rights.unwrap_or(facts.access);
                Known::Away(Facts { mapping, number, reserved, access, ..facts })
            }
            known @ (Known::Elsewhere | Known::Here(_) | Known::Nobody) => known,
        }
    }

    /// A number that the memory at `address` has alone, wherever it is.
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    pub fn memory_number(&self, address: DeviceAddress) -> Option<u64> {
        let place = self.slabs().table().windows.place(address);
        match place {
            Occupant::Cell { handle, .. } => Some(handle.raw()),
            Occupant::Elsewhere | Occupant::Alone | Occupant::Nothing => {
                self.ledger().mapped_at(address).map(|(_, row)| row.handle().raw())
            }
        }
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else: those
    /// of [`crate::Holdings::range_of`], and cells. Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_seen(&self, address: DeviceAddress) -> Option<VaRange> {
        self.slabs().cell_range(address).or_else(|| self.holdings().range_of(address))
    }
}

impl<D: Driver> Cells<'_, D, Use> {
    /// Addresses for a caller of `library`'s: those of the cell that this thread has just got, where it asks for as many bytes; a room for any that its
    /// memory may go to, where it has cells. None where the driver is to give them.
    ///
    /// # Driver calls
    /// None for a cell's first addresses. `cuMemAddressReserve` for a room.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn take_addresses(
        &self,
        size_bytes: u64,
        alignment: u64,
        library: &str,
    ) -> Option<DeviceAddress> {
        if !LIBRARY_TAGS.contains(&library) {
            return None;
        }
        let room_bytes = {
            let mut slabs = self.0.pool.slabs().table();
            let spot = slabs.take_spot(this_thread(), size_bytes, alignment);
            if spot.is_some() {
                return spot;
            }
            slabs.room_bytes(size_bytes, alignment)?
        };
        let reserved = self.0.pool.driver.address_reserve(room_bytes, alignment, DeviceAddress(0));
        match reserved {
            Ok(start) => {
                let range = VaRange::new(start, room_bytes);
                Some(self.0.pool.slabs().table().add_room(range, size_bytes))
            }
            Err(error) => {
                tracing::debug!(%error, "no room for a slab around addresses");
                None
            }
        }
    }
}
