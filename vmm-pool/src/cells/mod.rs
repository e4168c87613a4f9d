//! Cells: small allocations of a library's own, made as parts of slabs ([`crate::slabs`]), so that a pause and a resume
//! see few large allocations where the library sees many.
//!
//! The driver cannot map a part of an allocation. So a slab is mapped as a whole, in a window of ours, as soon as it is
//! there, and the addresses that the library asks for next are the cell's in that window. What the library then does with
//! the cell (map, give access, unmap, release, free the addresses) takes no driver call but the first access of a device.
//! The other ways are in `placing`.
//!
//! Methods of [`Cells`] are for what callers hold, cells or not; those of [`Entered`] are for rows alone. The table's lock is a
//! leaf: nothing is asked of the driver or the ledger under it.

mod filling;
mod placing;
mod questions;
mod sharing;

use std::thread::ThreadId;

use crate::VirtualHandle;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverError, DriverOp, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ledger::{Class, Row};
use crate::pool::{Entered, Kind, Use};
use crate::slabs::{AccessPlan, Ended, NewSlab, Occupant, Recipe, SlabKey, StandsFor, Wanted};

const NEXT: &str = "set SUBLET_SLABS=0 where this library needs it";

fn refused(op: DriverOp, code: DriverCode, object: String, size_bytes: u64) -> PoolError {
    PoolError::Driver { object, size_bytes, device: None, source: DriverError { op, code } }
}

fn this_thread() -> ThreadId {
    std::thread::current().id()
}

/// Calls about what callers hold, cells or not.
#[derive(Debug)]
pub struct Cells<'a, D: Driver, K: Kind>(&'a Entered<'a, D, K>);

impl<D: Driver, K: Kind> Entered<'_, D, K> {
    /// The calls for handles and addresses that may be cells'.
    pub fn cells(&self) -> Cells<'_, D, K> {
        Cells(self)
    }
}

// Making and giving up.
impl<D: Driver> Cells<'_, D, Use> {
    /// Creates memory: a cell where it may be one, an allocation of its own otherwise.
    ///
    /// # Errors
    /// As [`crate::Entered::create`].
    ///
    /// # Driver calls
    /// `cuMemCreate` for an allocation of its own. For a slab, which the first cell needs and each that finds no room,
    /// `cuMemGetAllocationGranularity`, `cuMemCreate`, `cuMemAddressReserve`, `cuMemMap` and `cuMemSetAccess`. None for
    /// other cells.
    #[doc(alias = "cuMemCreate")]
    pub fn create_cell(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let recipe = Recipe { prop: *prop, class };
        let wanted = self.0.pool.slabs().table().wanted(size_bytes, &recipe);
        if let Wanted::Cell { slab_bytes } = wanted
            && let Some(cell) = self.cell(size_bytes, &recipe, slab_bytes)
        {
            self.0.pool.slabs().table().aim(this_thread(), Some(cell));
            return Ok(cell);
        }
        self.0.pool.slabs().table().aim(this_thread(), None);
        let vacancies = self.0.pool.slabs().table().vacancies(size_bytes, &recipe);
        let again = vacancies.into_iter().find_map(|(key, row, part)| {
            self.is_here(row).then(|| self.0.pool.slabs().table().refill(key, part))?
        });
        again.map_or_else(|| self.0.create(size_bytes, prop, recipe.class), Ok)
    }

    /// Is the memory of `row` on its device?
    fn is_here(&self, row: VirtualHandle) -> bool {
        self.0.pool.ledger().rows.get(row).is_some_and(Row::is_resident)
    }

    /// Creates an allocation of its own, of which it is known that it is to be mapped where a cell cannot be.
    ///
    /// # Errors
    /// As [`crate::Entered::create`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    pub fn create_alone(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        self.0.pool.slabs().table().aim(this_thread(), None);
        self.0.create(size_bytes, prop, class)
    }

    fn cell(&self, size_bytes: u64, recipe: &Recipe, slab_bytes: u64) -> Option<VirtualHandle> {
        let with_room = self.0.pool.slabs().table().with_room(size_bytes, recipe);
        let carved = with_room.into_iter().find_map(|(key, row)| {
            self.is_here(row).then(|| self.0.pool.slabs().table().carve(key, size_bytes))?
        });
        if carved.is_some() {
            return carved;
        }
        let key = match self.make_slab(slab_bytes, size_bytes, recipe) {
            Ok(key) => key?,
            Err(error) => {
                tracing::debug!(%error, "no slab could be made: the allocation stands alone");
                return None;
            }
        };
        let cell = self.0.pool.slabs().table().carve(key, size_bytes);
        if cell.is_none() {
            let ended = self.0.pool.slabs().table().end_empty(key);
            self.take_down(ended);
        }
        cell
    }

    /// A slab with room for a cell of `cell_bytes`; none where the device's unit does not divide that.
    fn make_slab(
        &self,
        slab_bytes: u64,
        cell_bytes: u64,
        recipe: &Recipe,
    ) -> PoolResult<Option<SlabKey>> {
        let (prop, device) = (&recipe.prop, recipe.prop.location.as_device());
        let about = || "new slab".to_owned();
        let unit =
            self.0.pool.driver.allocation_granularity(prop).about(about, slab_bytes, device)?;
        let (Some(size_bytes), Some(device)) = (unit.round_up(slab_bytes), device) else {
            return Ok(None);
        };
        if !cell_bytes.is_multiple_of(unit.size_bytes) {
            return Ok(None);
        }
        let row = self.0.create(size_bytes, prop, recipe.class.clone())?;
        let access = [AccessDesc::read_write(device)];
        let window = self.map_window(row, size_bytes, unit.size_bytes, &access)?;
        let id = self.0.pool.ledger().rows.find(row)?.id();
        let recipe = Some((recipe.clone(), unit.size_bytes));
        let new = NewSlab { row, id, size_bytes, prop: *prop, recipe };
        Ok(Some(self.0.pool.slabs().table().insert(new, window, &access)))
    }

    /// Maps the slab `row`, whose reference is used up where that fails, in a new window.
    fn map_window(
        &self,
        row: VirtualHandle,
        size_bytes: u64,
        alignment_bytes: u64,
        access: &[AccessDesc],
    ) -> PoolResult<VaRange> {
        let reserved =
            self.0.pool.driver.address_reserve(size_bytes, alignment_bytes, DeviceAddress(0));
        let start = match reserved {
            Ok(start) => start,
            Err(error) => {
                self.0.abandon(None, row);
                return Err(error).about(|| "window of a slab".to_owned(), size_bytes, None);
            }
        };
        let window = VaRange::new(start, size_bytes);
        let mapped = self.0.map(window, 0, row).and_then(|()| match access {
            [] => Ok(()),
            access => self.0.set_access(window, access),
        });
        mapped.map(|()| window).inspect_err(|_| self.0.abandon(Some(window), row))
    }

    /// Sets who may reach what is mapped in `range`. A device that gets rights to one cell gets them to its slab, and keeps them there; it is
    /// said to have what was set.
    ///
    /// # Errors
    /// As [`crate::Entered::set_access`]; [`PoolError::Driver`] too where a part of a window has nothing mapped.
    ///
    /// # Driver calls
    /// `cuMemSetAccess`, for a slab once a device.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_cell_access(&self, range: VaRange, access: &[AccessDesc]) -> PoolResult<()> {
        let (plan, wider) = {
            let mut slabs = self.0.pool.slabs().table();
            let plan = if slabs.windows.meets_window(range) {
                slabs.plan_access(range, access)
            } else {
                AccessPlan::Rows
            };
            let wider = match plan {
                AccessPlan::Grant { window, .. } => slabs.windows.wider(window, access),
                AccessPlan::Done | AccessPlan::Rows | AccessPlan::Refused(_) => Vec::new(),
            };
            (plan, wider)
        };
        match plan {
            AccessPlan::Done => Ok(()),
            AccessPlan::Rows => self.0.set_access(range, access),
            AccessPlan::Grant { window, mounted } => {
                self.0.set_access(mounted, &wider)?;
                self.0.pool.slabs().table().windows.granted(window, range, access);
                Ok(())
            }
            AccessPlan::Refused(code) => {
                let object = format!("rights to what is mapped at {}", range.start);
                Err(refused(DriverOp::SetAccess, code, object, range.size_bytes))
            }
        }
    }
}

impl<D: Driver, K: Kind> Cells<'_, D, K> {
    /// Gives back one reference of what `handle` stands for.
    ///
    /// # Errors
    /// As [`crate::Entered::release`].
    ///
    /// # Driver calls
    /// Those of [`crate::Entered::release`]; for the last cell of a slab also `cuMemUnmap` and `cuMemAddressFree`.
    #[doc(alias = "cuMemRelease")]
    pub fn release_cell(&self, handle: VirtualHandle) -> PoolResult<()> {
        if !handle.is_of_cell() {
            return self.0.release(handle);
        }
        let released = {
            let mut slabs = self.0.pool.slabs().table();
            match slabs.held(handle) {
                StandsFor::Row(row) => Err(row),
                StandsFor::Cell(cell) => Ok(slabs.release(cell.handle)),
            }
        };
        match released {
            Err(row) => self.0.release(row),
            Ok(None) => Err(PoolError::StaleHandle { handle: handle.raw() }),
            Ok(Some(ended)) => {
                self.take_down(ended);
                Ok(())
            }
        }
    }

    /// One more reference to what is mapped at `address`.
    ///
    /// # Errors
    /// As [`crate::Entered::retain_at`]; [`PoolError::Driver`] for addresses of ours that nobody has.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain_cell_at(&self, address: DeviceAddress) -> PoolResult<VirtualHandle> {
        let (place, retained) = {
            let mut slabs = self.0.pool.slabs().table();
            (slabs.windows.place(address), slabs.retain_at(address))
        };
        match place {
            Occupant::Elsewhere | Occupant::Alone => self.0.retain_at(address),
            Occupant::Cell { .. } | Occupant::Nothing => retained.ok_or_else(|| {
                let object = format!("nothing mapped at {address}");
                refused(DriverOp::Map, DriverCode::INVALID_VALUE, object, 0)
            }),
        }
    }

    /// Returns the properties that `handle` was created with.
    ///
    /// # Errors
    /// As [`crate::Entered::properties`].
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub fn cell_properties(&self, handle: VirtualHandle) -> PoolResult<AllocationProp> {
        let held = self.0.pool.slabs().table().held(handle);
        match held {
            StandsFor::Cell(cell) => Ok(cell.prop),
            StandsFor::Row(row) => self.0.properties(row),
        }
    }

    /// Unmaps what is mapped inside `range`.
    ///
    /// # Errors
    /// As [`crate::Entered::unmap`]; [`PoolError::Driver`] too for a part of a cell, and where nothing is mapped at addresses of
    /// ours.
    ///
    /// # Driver calls
    /// As [`Cells::release_cell`].
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap_cells(&self, range: VaRange) -> PoolResult<()> {
        let unmapped = {
            let mut slabs = self.0.pool.slabs().table();
            if slabs.windows.meets_window(range) { Some(slabs.unmap(range)) } else { None }
        };
        let Some(unmapped) = unmapped else {
            return self.0.unmap(range);
        };
        let Some((rows, ended)) = unmapped else {
            let object = format!("no whole mapping at {}", range.start);
            let code = DriverCode::INVALID_VALUE;
            return Err(refused(DriverOp::Unmap, code, object, range.size_bytes));
        };
        self.take_down(ended);
        let mut outcome = Ok(());
        for row in rows {
            if let Err(error) = self.0.unmap(row) {
                self.0.pool.slabs().table().stays_mapped(row);
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }

    /// Gives up addresses.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] for addresses that are the driver's to free; [`PoolError::Driver`] where something is
    /// mapped there, or they are not what was handed out.
    ///
    /// # Driver calls
    /// None for addresses of a slab that lives; `cuMemAddressFree` for the last of one that has ended.
    #[doc(alias = "cuMemAddressFree")]
    pub fn free_cell_addresses(&self, range: VaRange) -> PoolResult<()> {
        let freed = {
            let mut slabs = self.0.pool.slabs().table();
            if slabs.windows.meets_window(range) { Some(slabs.free_spot(range)) } else { None }
        };
        let ended = match freed {
            None if !self.0.address_free_is_refused(range) => return Err(PoolError::NotOurs),
            None | Some(None) => {
                let object = format!("addresses at {}", range.start);
                let code = DriverCode::INVALID_VALUE;
                return Err(refused(DriverOp::AddressFree, code, object, range.size_bytes));
            }
            Some(Some(ended)) => ended,
        };
        self.take_down(ended);
        Ok(())
    }

    /// Takes down what nobody has any more. The caller's call is done already: what the driver refuses is tried again
    /// with the next.
    fn take_down(&self, ended: Ended) {
        let mut all = self.0.pool.slabs().table().take_refused();
        if !ended.is_nothing() {
            all.push(ended);
        }
        for ended in all {
            if let Some(left) = self.try_take_down(ended) {
                self.0.pool.slabs().table().keep_refused(left);
                // Who waits for that is to know.
                self.0.pool.slabs().changed.notify_all();
            }
        }
    }

    /// Takes `ended` down. Returns the part that the driver would not take.
    fn try_take_down(&self, mut ended: Ended) -> Option<Ended> {
        while let Some((window, mounted)) = ended.mounted.last().copied() {
            match self.0.unmap(mounted) {
                Ok(()) | Err(PoolError::NotOurs) => ended.mounted.pop(),
                Err(error) => {
                    tracing::error!(%error, "a slab that nobody has there stays until the next call like this");
                    return Some(ended);
                }
            };
            ended.windows.extend(self.0.pool.slabs().table().windows.dismounted(window));
            self.0.pool.slabs().changed.notify_all();
        }
        if let Some(row) = ended.row
            && let Err(error) = self.0.release(row)
        {
            // It is gone from the ledger, and offered to the driver again.
            tracing::error!(%error, "memory of a slab stays until the next pause");
        }
        for window in ended.windows {
            if let Err(error) = self.0.pool.deferred.free_addresses(window) {
                tracing::error!(%error, "addresses of a slab stay until the next pause");
            }
        }
        None
    }
}
