//! Cells: small allocations of a library's own, made as parts of slabs ([`crate::slabs`]), so that a pause and a resume
//! see few large allocations where the library sees many.
//!
//! The driver cannot map a part of an allocation. So a slab is mapped as a whole, in a window of ours, as soon as it is
//! there, and the addresses that the library asks for next are the cell's in that window. What the library then does with
//! the cell (map, give access, unmap, release, free the addresses) takes no driver call but the first access of a device.
//! What does not go that way stands alone, as any other allocation, or is refused where it cannot any more.
//!
//! Methods here are for what callers hold, cells or not; those of [`crate::pool`] are for rows alone. The table's lock is a
//! leaf: nothing is asked of the driver or the ledger under it.

mod clearing;
mod questions;
mod sharing;

use std::collections::HashSet;
use std::thread::ThreadId;

use crate::VirtualHandle;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverError, DriverOp, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ledger::{Class, Row};
use crate::pool::{Entered, Kind, Pool, Use};
use crate::slabs::{
    AccessPlan, CellAt, Ended, Held, MapPlan, NewSlab, Place, Recipe, SlabKey, Wanted,
};

const NEXT: &str = "unset SUBLET_SLABS where this library needs it";

fn refused(op: DriverOp, code: DriverCode, object: String, size_bytes: u64) -> PoolError {
    PoolError::Driver { object, size_bytes, device: None, source: DriverError { op, code } }
}

fn this_thread() -> ThreadId {
    std::thread::current().id()
}

// Making and giving up.
impl<D: Driver> Entered<'_, D, Use> {
    /// Creates memory: a cell where it may be one, an allocation of its own otherwise.
    ///
    /// # Errors
    /// As [`Entered::create`].
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
        let wanted = self.pool.slabs().wanted(size_bytes, &recipe);
        if let Wanted::Cell { slab_bytes } = wanted
            && let Some(cell) = self.cell(size_bytes, &recipe, slab_bytes)
        {
            self.pool.slabs().aim(this_thread(), Some(cell));
            return Ok(cell);
        }
        self.pool.slabs().aim(this_thread(), None);
        self.create(size_bytes, prop, recipe.class)
    }

    fn cell(&self, size_bytes: u64, recipe: &Recipe, slab_bytes: u64) -> Option<VirtualHandle> {
        let with_room = self.pool.slabs().with_room(size_bytes, recipe);
        let carved = with_room.into_iter().find_map(|(key, row)| {
            let is_there = self.pool.ledger().row(row).is_some_and(Row::is_resident);
            if is_there { self.pool.slabs().carve(key, size_bytes) } else { None }
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
        let cell = self.pool.slabs().carve(key, size_bytes);
        if cell.is_none() {
            let ended = self.pool.slabs().end_empty(key);
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
            self.pool.driver.allocation_granularity(prop).about(about, slab_bytes, device)?;
        let (Some(size_bytes), Some(device)) = (unit.round_up(slab_bytes), device) else {
            return Ok(None);
        };
        if !cell_bytes.is_multiple_of(unit.size_bytes) {
            return Ok(None);
        }
        let row = self.create(size_bytes, prop, recipe.class.clone())?;
        let access = [AccessDesc::read_write(device)];
        let window = self.map_window(row, size_bytes, unit.size_bytes, &access)?;
        let id = self.pool.ledger().find(row)?.id();
        let recipe = Some((recipe.clone(), unit.size_bytes));
        let new = NewSlab { row, id, size_bytes, prop: *prop, recipe };
        Ok(Some(self.pool.slabs().insert(new, window, &access)))
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
            self.pool.driver.address_reserve(size_bytes, alignment_bytes, DeviceAddress(0));
        let start = match reserved {
            Ok(start) => start,
            Err(error) => {
                self.abandon(None, row);
                return Err(error).about(|| "window of a slab".to_owned(), size_bytes, None);
            }
        };
        let window = VaRange::new(start, size_bytes);
        let mapped = self.map(window, 0, row).and_then(|()| match access {
            [] => Ok(()),
            access => self.set_access(window, access),
        });
        mapped.map(|()| window).inspect_err(|_| self.abandon(Some(window), row))
    }

    /// The cell becomes an allocation of its own, which its handle stands for from now on.
    fn stand_alone(&self, cell: CellAt) -> PoolResult<VirtualHandle> {
        let class = self.pool.ledger().find(cell.row)?.class().clone();
        let row = self.create(cell.part.size_bytes, &cell.prop, class)?;
        let ended = self.pool.slabs().stand_alone(cell.handle, row);
        let Some(ended) = ended else {
            self.release(row)?;
            return Err(PoolError::StaleHandle { handle: cell.handle.raw() });
        };
        self.take_down(ended);
        let living: HashSet<_> = self.pool.ledger().rows().map(Row::handle).collect();
        self.pool.slabs().forget_alone(|row| living.contains(&row));
        Ok(row)
    }

    /// Maps the whole of what `handle` stands for.
    ///
    /// # Errors
    /// As [`Entered::map`]; [`PoolError::Driver`] too for a cell that cannot be mapped there.
    ///
    /// # Driver calls
    /// `cuMemMap` for what stands alone, and once for a slab in a further window. None for a cell where its addresses are.
    #[doc(alias = "cuMemMap")]
    pub fn map_cell(
        &self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        let held = self.pool.slabs().held(handle);
        let cell = match held {
            Held::Row(row) => return self.map_row(range, offset_bytes, row),
            Held::Cell(cell) => cell,
        };
        let about = || format!("cell of a slab, to be mapped at {}", range.start);
        let cannot = |code| refused(DriverOp::Map, code, about(), range.size_bytes);
        if offset_bytes != 0 || range.size_bytes < cell.part.size_bytes {
            return Err(cannot(DriverCode::NOT_SUPPORTED));
        }
        if range.size_bytes > cell.part.size_bytes {
            return Err(cannot(DriverCode::INVALID_VALUE));
        }
        self.is_there(cell.row)?;
        let plan = self.pool.slabs().map(cell.handle, range);
        match plan {
            MapPlan::Done => Ok(()),
            MapPlan::Fill { row, window } => {
                let filled = self.map(window, 0, row);
                if filled.is_ok() && !self.pool.slabs().add_window(cell.slab, window, &[]) {
                    self.unmap(window)?;
                }
                // Another thread may have filled it.
                if self.pool.slabs().map(cell.handle, range) == MapPlan::Done {
                    return Ok(());
                }
                filled.and(Err(cannot(DriverCode::INVALID_VALUE)))
            }
            MapPlan::StandAlone => {
                let row = self.stand_alone(cell)?;
                self.map_row(range, 0, row)
            }
            MapPlan::TakeOver { range } => {
                self.clear(range, cell.prop.location.as_device())?;
                let taken = self.pool.slabs().take_over(cell.handle, range);
                self.take_down(taken.ok_or_else(|| cannot(DriverCode::INVALID_VALUE))?);
                Ok(())
            }
            MapPlan::Refused => Err(refused(
                DriverOp::Map,
                DriverCode::NOT_SUPPORTED,
                format!("{}, which are not its addresses: {NEXT}", about()),
                range.size_bytes,
            )),
        }
    }

    /// Is the memory of `row` on its device, as far as is known?
    fn is_there(&self, row: VirtualHandle) -> PoolResult<()> {
        let ledger = self.pool.ledger();
        let row = ledger.find(row)?;
        if row.is_resident() {
            return Ok(());
        }
        if row.is_set_aside() && !row.is_lost() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        let object = "cell of a slab that is not there".to_owned();
        Err(refused(DriverOp::Map, DriverCode::NOT_READY, object, row.size_bytes()))
    }

    fn map_row(&self, range: VaRange, offset_bytes: u64, row: VirtualHandle) -> PoolResult<()> {
        let is_in_window = {
            let mut slabs = self.pool.slabs();
            if slabs.map_alone(range) { Some(slabs.meets_window(range)) } else { None }
        };
        let Some(is_in_window) = is_in_window else {
            return self.take_in(range, offset_bytes, row);
        };
        let mapped = self.map(range, offset_bytes, row);
        if mapped.is_err() && is_in_window {
            let _nothing = self.pool.slabs().unmap(range);
        }
        mapped
    }

    /// Makes a cell of `row`, which nobody has used yet, at addresses of one that is gone.
    fn take_in(&self, range: VaRange, offset_bytes: u64, row: VirtualHandle) -> PoolResult<()> {
        let cannot = || {
            let object = format!("allocation over a slab at {}: {NEXT}", range.start);
            refused(DriverOp::Map, DriverCode::INVALID_VALUE, object, range.size_bytes)
        };
        let (is_untouched, device, own) = {
            let ledger = self.pool.ledger();
            let row = ledger.find(row)?;
            let is_whole = offset_bytes == 0 && row.size_bytes() == range.size_bytes;
            let own = Recipe { prop: *row.prop(), class: row.class().clone() };
            (is_whole && row.is_untouched(), row.device(), own)
        };
        let is_alike = self.pool.slabs().vacant(range).is_some_and(|recipe| *recipe == own);
        if !is_untouched || !is_alike {
            return Err(cannot());
        }
        self.clear(range, device)?;
        if !self.pool.slabs().take_in(row, range) {
            return Err(cannot());
        }
        // The handle is the cell's from now on.
        self.release(row)
    }

    /// Sets who may reach what is mapped in `range`. A device that gets rights to one cell gets them to its slab.
    ///
    /// # Errors
    /// As [`Entered::set_access`]; [`PoolError::Driver`] too where rights would be taken from a part of a slab.
    ///
    /// # Driver calls
    /// `cuMemSetAccess`, for a slab once a device.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_cell_access(&self, range: VaRange, access: &[AccessDesc]) -> PoolResult<()> {
        let plan = {
            let slabs = self.pool.slabs();
            if slabs.meets_window(range) {
                slabs.plan_access(range, access)
            } else {
                AccessPlan::Rows
            }
        };
        match plan {
            AccessPlan::Done => Ok(()),
            AccessPlan::Rows => self.set_access(range, access),
            AccessPlan::Grant(window) => {
                self.set_access(window, access)?;
                self.pool.slabs().granted(window, access);
                Ok(())
            }
            AccessPlan::Refused(code) => {
                let object = format!("rights to a part of a slab at {}: {NEXT}", range.start);
                Err(refused(DriverOp::SetAccess, code, object, range.size_bytes))
            }
        }
    }
}

impl<D: Driver, K: Kind> Entered<'_, D, K> {
    /// Gives back one reference of what `handle` stands for.
    ///
    /// # Errors
    /// As [`Entered::release`].
    ///
    /// # Driver calls
    /// Those of [`Entered::release`]; for the last cell of a slab also `cuMemUnmap` and `cuMemAddressFree`.
    #[doc(alias = "cuMemRelease")]
    pub fn release_cell(&self, handle: VirtualHandle) -> PoolResult<()> {
        let released = {
            let mut slabs = self.pool.slabs();
            match slabs.held(handle) {
                Held::Row(row) => Err(row),
                Held::Cell(cell) => Ok(slabs.release(cell.handle)),
            }
        };
        match released {
            Err(row) => self.release(row),
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
    /// As [`Entered::retain_at`]; [`PoolError::Driver`] for addresses of ours that nobody has.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain_cell_at(&self, address: DeviceAddress) -> PoolResult<VirtualHandle> {
        let (place, retained) = {
            let mut slabs = self.pool.slabs();
            (slabs.place(address), slabs.retain_at(address))
        };
        match place {
            Place::Elsewhere | Place::Alone => self.retain_at(address),
            Place::Cell { .. } | Place::Nothing => retained.ok_or_else(|| {
                let object = format!("nothing mapped at {address}");
                refused(DriverOp::Map, DriverCode::INVALID_VALUE, object, 0)
            }),
        }
    }

    /// What `handle` was created with. The addresses that this thread asks for next may be the cell's.
    ///
    /// # Errors
    /// As [`Entered::properties`].
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub fn cell_properties(&self, handle: VirtualHandle) -> PoolResult<AllocationProp> {
        let held = {
            let mut slabs = self.pool.slabs();
            let held = slabs.held(handle);
            let aim = match held {
                Held::Cell(cell) => Some(cell.handle),
                Held::Row(_) => None,
            };
            slabs.aim(this_thread(), aim);
            held
        };
        match held {
            Held::Cell(cell) => Ok(cell.prop),
            Held::Row(row) => self.properties(row),
        }
    }

    /// Unmaps what is mapped inside `range`.
    ///
    /// # Errors
    /// As [`Entered::unmap`]; [`PoolError::Driver`] too for a part of a cell, and where nothing is mapped at addresses of
    /// ours.
    ///
    /// # Driver calls
    /// As [`Entered::release_cell`].
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap_cells(&self, range: VaRange) -> PoolResult<()> {
        let unmapped = {
            let mut slabs = self.pool.slabs();
            if slabs.meets_window(range) { Some(slabs.unmap(range)) } else { None }
        };
        let Some(unmapped) = unmapped else {
            return self.unmap(range);
        };
        let Some((rows, ended)) = unmapped else {
            let object = format!("no whole mapping at {}", range.start);
            let code = DriverCode::INVALID_VALUE;
            return Err(refused(DriverOp::Unmap, code, object, range.size_bytes));
        };
        for ended in ended {
            self.take_down(ended);
        }
        let mut outcome = Ok(());
        for row in rows {
            if let Err(error) = self.unmap(row) {
                self.pool.slabs().stays_mapped(row);
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
            let mut slabs = self.pool.slabs();
            if slabs.meets_window(range) { Some(slabs.free_spot(range)) } else { None }
        };
        let ended = match freed {
            None if !self.address_free_is_refused(range) => return Err(PoolError::NotOurs),
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
        if ended.is_nothing() {
            return;
        }
        let mut all = self.pool.slabs().take_refused();
        all.push(ended);
        for ended in all {
            if let Err((left, error)) = self.try_take_down(ended) {
                tracing::error!(%error, "a slab that nobody has stays until the next one ends");
                self.pool.slabs().keep_refused(left);
            }
        }
    }

    fn try_take_down(&self, mut ended: Ended) -> Result<(), (Ended, PoolError)> {
        if let Some((row, mapped)) = &mut ended.slab {
            while let Some(window) = mapped.last().copied() {
                match self.unmap(window) {
                    Ok(()) | Err(PoolError::NotOurs) => mapped.pop(),
                    Err(error) => return Err((ended, error)),
                };
            }
            if let Err(error) = self.release(*row) {
                // It is gone from the ledger, and offered to the driver again.
                tracing::error!(%error, "memory of a slab stays until the next pause");
            }
        }
        for window in ended.windows {
            if let Err(error) = self.pool.deferred.free_addresses(window) {
                tracing::error!(%error, "addresses of a slab stay until the next pause");
            }
        }
        Ok(())
    }
}

impl<D: Driver> Pool<D> {
    /// Are small allocations of libraries' own made as parts of slabs from now on? Those that are stay so. Off at first.
    /// Imports are understood either way.
    pub fn use_slabs(&self, are_used: bool) {
        self.slabs().set_on(are_used);
    }
}
