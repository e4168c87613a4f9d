//! Cells: small allocations of a library, made as parts of slabs ([`crate::slabs`]).
//!
//! The driver cannot map a part of an allocation. So a slab is mapped as a whole, in a window of ours, as soon as it exists.
//! The addresses that the library requests next are the cell's in that window. The library then maps the cell, gives access,
//! unmaps, releases, and frees the addresses. None of that needs a driver call, except the first access of a device. `placing`
//! has the other cases.
//!
//! The calls of [`Front`] are for what callers hold, cells or not. The calls of [`Entered`] and [`Inside`] are for rows alone.
//! The table's lock is a leaf: no call to the driver or the ledger is made under it.

mod filling;
mod making;
mod placing;
mod sharing;

use std::thread::ThreadId;

use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverError, DriverOp, VaRange,
};
use vmm_pool::{
    Borrowed, Class, Entered, Export, Front, FrontView, ImportSource, Inside, LIBRARY_TAGS,
    NewMemory, Part, PoolError, PoolResult, SlabTotals, VirtualHandle,
};

use self::placing::TRIES_MAX;
use crate::slabs::{AccessPlan, Occupant, Recipe, Slabs, StandsFor, Wanted};

const NEXT: &str = "set SUBLET_SLABS=0 where this library needs it";

fn refused(op: DriverOp, code: DriverCode, object: String, size_bytes: u64) -> PoolError {
    PoolError::Driver { object, size_bytes, device: None, source: DriverError { op, code } }
}

fn this_thread() -> ThreadId {
    std::thread::current().id()
}

impl<D: Driver> Front<D> for Slabs {
    /// Makes a cell if the memory may be one, and otherwise an allocation of its own. A slab is made for the first cell, and
    /// for each cell that finds no room.
    fn create(&self, entered: &Entered<'_, D>, new: NewMemory) -> PoolResult<VirtualHandle> {
        let NewMemory { size_bytes, prop, class, is_alone } = new;
        self.table().aim(this_thread(), None);
        if is_alone {
            return entered.create(size_bytes, &prop, class);
        }
        let recipe = Recipe { prop, class };
        let wanted = self.table().wanted(size_bytes, &recipe);
        if let Wanted::Cell { slab_bytes } = wanted
            && let Some(cell) = self.cell(entered, size_bytes, &recipe, slab_bytes)
        {
            self.table().aim(this_thread(), Some(cell));
            return Ok(cell);
        }
        let vacancies = self.table().vacancies(size_bytes, &recipe);
        let again = vacancies.into_iter().find_map(|(key, row, part)| {
            entered.check_here(row).is_ok().then(|| self.table().refill(key, part))?
        });
        again.map_or_else(|| entered.create(size_bytes, &prop, recipe.class), Ok)
    }

    fn release(&self, inside: &Inside<'_, D>, handle: VirtualHandle) -> PoolResult<()> {
        if !handle.is_of_front() {
            return inside.release(handle);
        }
        let released = {
            let mut slabs = self.table();
            match slabs.held(handle) {
                StandsFor::Row(row) => Err(row),
                StandsFor::Cell(cell) => Ok(slabs.release(cell.handle)),
            }
        };
        match released {
            Err(row) => inside.release(row),
            Ok(None) => Err(PoolError::StaleHandle { handle: handle.raw() }),
            Ok(Some(ended)) => {
                self.take_down(inside, ended);
                Ok(())
            }
        }
    }

    fn retain_at(&self, inside: &Inside<'_, D>, at: DeviceAddress) -> PoolResult<VirtualHandle> {
        let (place, retained) = {
            let mut slabs = self.table();
            (slabs.windows.place(at), slabs.retain_at(at))
        };
        match place {
            Occupant::Elsewhere | Occupant::Alone => inside.retain_at(at),
            Occupant::Cell { .. } | Occupant::Nothing => retained.ok_or_else(|| {
                let object = format!("nothing mapped at {at}");
                refused(DriverOp::Map, DriverCode::INVALID_VALUE, object, 0)
            }),
        }
    }

    fn properties(
        &self,
        inside: &Inside<'_, D>,
        held: VirtualHandle,
    ) -> PoolResult<AllocationProp> {
        let held = self.table().held(held);
        match held {
            StandsFor::Cell(cell) => Ok(cell.prop),
            StandsFor::Row(row) => inside.properties(row),
        }
    }

    /// Maps a cell at its own addresses without a driver call. `cuMemMap` for a slab in a room; `cuMemsetD8Async` for a cell at
    /// the addresses of a former cell; `cuMemCreate` for a cell that becomes an allocation of its own.
    fn map(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        if handle.is_of_front() {
            self.map_cell(entered, range, offset_bytes, handle)
        } else {
            self.map_row(entered, range, offset_bytes, handle)
        }
    }

    fn unmap(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        let mut slabs = self.table();
        if !slabs.windows.meets_window(range) {
            drop(slabs);
            return inside.unmap(range);
        }
        let unmapped = slabs.unmap(range);
        drop(slabs);
        let Some((rows, ended)) = unmapped else {
            let object = format!("no whole mapping at {}", range.start);
            let code = DriverCode::INVALID_VALUE;
            return Err(refused(DriverOp::Unmap, code, object, range.size_bytes));
        };
        self.take_down(inside, ended);
        let mut outcome = Ok(());
        for row in rows {
            if let Err(error) = inside.unmap(row) {
                self.table().windows.put_item(row, None);
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }

    /// Sets access rights. A device that gets rights to a cell gets them to the whole slab, and keeps them. Callers see the
    /// rights that were set on the cell.
    fn set_access(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        access: &[AccessDesc],
    ) -> PoolResult<()> {
        let mut slabs = self.table();
        match slabs.plan_access(range, access) {
            AccessPlan::Done => Ok(()),
            AccessPlan::Rows => {
                drop(slabs);
                entered.set_access(range, access)
            }
            AccessPlan::Grant { window, mounted } => {
                let wider = slabs.windows.wider(window, access);
                drop(slabs);
                entered.set_access(mounted, &wider)?;
                self.table().windows.granted(window, range, access);
                Ok(())
            }
            AccessPlan::Refused(code) => {
                let object = format!("rights to what is mapped at {}", range.start);
                Err(refused(DriverOp::SetAccess, code, object, range.size_bytes))
            }
        }
    }

    fn has_addresses(&self, size_bytes: u64, alignment: u64, library: &str) -> bool {
        if !LIBRARY_TAGS.contains(&library) {
            return false;
        }
        let slabs = self.table();
        slabs.aimed(this_thread(), size_bytes).is_some()
            || slabs.room_bytes(size_bytes, alignment).is_some()
    }

    /// Returns the addresses of the cell that this thread has just got, if it requests as many bytes. Otherwise it returns a
    /// room for any memory that may be mapped there, if the process has cells.
    fn take_addresses(
        &self,
        entered: &Entered<'_, D>,
        size_bytes: u64,
        alignment: u64,
        library: &str,
    ) -> Option<DeviceAddress> {
        if !LIBRARY_TAGS.contains(&library) {
            return None;
        }
        let room_bytes = {
            let mut slabs = self.table();
            let spot = slabs.take_spot(this_thread(), size_bytes, alignment);
            if spot.is_some() {
                return spot;
            }
            slabs.room_bytes(size_bytes, alignment)?
        };
        let driver = entered.pool().driver();
        let reserved = driver.address_reserve(room_bytes, alignment, DeviceAddress(0));
        let told = |error: &_| tracing::debug!(%error, "no room for a slab around addresses");
        let range = VaRange::new(reserved.inspect_err(told).ok()?, room_bytes);
        Some(self.table().add_room(range, size_bytes))
    }

    fn free_addresses(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        let mut slabs = self.table();
        if !slabs.windows.meets_window(range) {
            drop(slabs);
            return inside.check_address_free(range).and(Err(PoolError::NotOurs));
        }
        let freed = slabs.free_spot(range);
        drop(slabs);
        let ended = freed.ok_or_else(|| {
            let object = format!("addresses at {}", range.start);
            refused(DriverOp::AddressFree, DriverCode::INVALID_VALUE, object, range.size_bytes)
        })?;
        self.take_down(inside, ended);
        Ok(())
    }

    fn export(&self, entered: &Entered<'_, D>, handle: VirtualHandle) -> PoolResult<Export> {
        for _ in 0..TRIES_MAX {
            let held = {
                let mut slabs = self.table();
                let held = slabs.held(handle);
                if let StandsFor::Cell(cell) = held
                    && !cell.is_unplaced
                {
                    slabs.share(handle);
                }
                held
            };
            match held {
                StandsFor::Row(row) => return entered.export(row),
                // A caller that maps the cell later, at any address, can still do so.
                StandsFor::Cell(cell) if cell.is_unplaced => self.stand_alone(entered, cell)?,
                StandsFor::Cell(cell) => {
                    return Ok(Export { part: Some(cell.part), ..entered.export(cell.row)? });
                }
            }
        }
        let object = "allocation that other threads use meanwhile".to_owned();
        Err(refused(DriverOp::Export, DriverCode::NOT_READY, object, 0))
    }

    fn import_held(
        &self,
        entered: &Entered<'_, D>,
        of: &Export,
    ) -> PoolResult<Option<VirtualHandle>> {
        self.table().aim(this_thread(), None);
        let Some(row) = entered.import_held(of.id, of.serial) else {
            return Ok(None);
        };
        of.part.map_or(Ok(row), |part| self.hold_part(entered, of.id, row, part)).map(Some)
    }

    fn import(
        &self,
        entered: &Entered<'_, D>,
        source: ImportSource,
        lent: Borrowed,
        class: Class,
        part: Option<Part>,
    ) -> PoolResult<VirtualHandle> {
        self.table().aim(this_thread(), None);
        let row = entered.import(source, lent, class)?;
        part.map_or(Ok(row), |part| self.hold_part(entered, source.id, row, part))
    }

    fn seen_at(&self, address: DeviceAddress) -> Option<FrontView> {
        self.table().windows.seen_at(address)
    }

    fn totals(&self) -> SlabTotals {
        self.table().totals()
    }
}
