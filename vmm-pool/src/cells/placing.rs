//! Where memory is mapped. A cell at its own addresses takes nothing. For all else there are these ways, the first that goes:
//!
//! | what is mapped | where | way |
//! | --- | --- | --- |
//! | a cell | a room | its slab is mapped there, so that it lies at the room's spot |
//! | a cell that is mapped nowhere and that no other process knows of | where no slab is | it becomes an allocation of its own, with its bytes |
//! | the same, or such an allocation | a spot in a slab's window | it moves there, with its bytes; cells there that are mapped nowhere and known to nobody else become allocations of their own |
//!
//! The rest is refused, and the refusal names the switch.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{NEXT, RowCall, refused};
use crate::VirtualHandle;
use crate::driver::{AccessDesc, DeviceOrdinal, Driver, DriverCode, DriverOp, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::ledger::Row;
use crate::pool::{Entered, Use};
use crate::slabs::{CellAt, Ended, Held, MapPlan, Recipe, Table};

/// How long a call waits for another thread's driver call, about the same memory.
const OTHERS_MAX: Duration = Duration::from_secs(20);
/// How often a call finds that what it has prepared is not so any more. Only other threads that use the same memory at the same time can
/// do that.
pub(super) const TRIES_MAX: usize = 32;

/// Is it done?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Done,
    /// Things are otherwise now: ask again.
    Again,
}

fn cannot(code: DriverCode, range: VaRange) -> PoolError {
    refused(DriverOp::Map, code, format!("mapping at {}", range.start), range.size_bytes)
}

impl<D: Driver> Entered<'_, D, Use> {
    /// Maps the whole of what `handle` stands for.
    ///
    /// # Errors
    /// As [`Entered::map`]; [`PoolError::Driver`] too for what cannot be mapped there because of a slab.
    ///
    /// # Driver calls
    /// `cuMemMap` for what stands alone, and for a slab in a room. None for a cell where its addresses are. What moves takes those of
    /// [`Entered::create`], a view, and a copy.
    #[doc(alias = "cuMemMap")]
    pub fn map_cell(
        &self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        for _ in 0..TRIES_MAX {
            let held = self.pool.slabs().held(handle);
            let step = match held {
                Held::Row(row) => self.map_row(range, offset_bytes, row)?,
                Held::Cell(cell) => self.place_cell(range, offset_bytes, cell)?,
            };
            if step == Step::Done {
                return Ok(());
            }
        }
        Err(cannot(DriverCode::NOT_READY, range))
    }

    /// What `ask` says once nobody is changing what it is about.
    pub(super) fn settled<T>(&self, mut ask: impl FnMut(&mut Table) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + OTHERS_MAX;
        let mut slabs = self.pool.slabs();
        loop {
            if let Some(answer) = ask(&mut slabs) {
                return Some(answer);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let waited = self.pool.slabs_changed.wait_timeout(slabs, left);
            slabs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn changed<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let done = change(&mut self.pool.slabs());
        self.pool.slabs_changed.notify_all();
        done
    }

    /// What the driver refuses of any allocation of `whole_bytes`, in its order.
    fn check_call(&self, range: VaRange, offset_bytes: u64, whole_bytes: u64) -> PoolResult<()> {
        let in_window = {
            let slabs = self.pool.slabs();
            slabs.meets_window(range).then(|| slabs.is_taken(range))
        };
        let is_taken = in_window.unwrap_or_else(|| self.pool.ledger().has_mapping_in(range));
        if is_taken {
            return Err(cannot(DriverCode::INVALID_VALUE, range));
        }
        if offset_bytes != 0 || range.size_bytes < whole_bytes {
            return Err(cannot(DriverCode::NOT_SUPPORTED, range));
        }
        if range.size_bytes > whole_bytes {
            return Err(cannot(DriverCode::INVALID_VALUE, range));
        }
        Ok(())
    }

    fn place_cell(&self, range: VaRange, offset_bytes: u64, cell: CellAt) -> PoolResult<Step> {
        if let Err(error) = self.is_there(cell.row) {
            // Its slab may have ended since it was looked for, and it with another thread's help stand alone.
            let is_as_before = self.pool.slabs().held(cell.handle) == Held::Cell(cell);
            return if is_as_before { Err(error) } else { Ok(Step::Again) };
        }
        self.check_call(range, offset_bytes, cell.part.size_bytes)?;
        let Some(plan) = self.plan(range, |slabs| slabs.map(cell.handle, range))? else {
            return Ok(Step::Again);
        };
        match plan {
            MapPlan::Done => Ok(Step::Done),
            MapPlan::Fill { row, window, mounted } => {
                self.fill_room(cell, range, row, (window, mounted))
            }
            MapPlan::StandAlone => self.stand_alone(cell.handle).map(|()| Step::Again),
            MapPlan::Into { evicted } if evicted.is_empty() => self.move_cell(range, cell),
            MapPlan::Into { evicted } => self.evict(evicted),
            MapPlan::Wrong => Err(cannot(DriverCode::INVALID_VALUE, range)),
            MapPlan::Stuck => self.unmap_stuck(range).map(|()| Step::Again),
            MapPlan::Odd => Err(self.odd(range, "cell of a slab that is in use")),
            MapPlan::Busy => Err(cannot(DriverCode::NOT_READY, range)),
        }
    }

    /// What `ask` says of a mapping at `range` once nobody is changing what it is about, where the slab that is there has its memory. None
    /// where another slab is there by then.
    fn plan(
        &self,
        range: VaRange,
        mut ask: impl FnMut(&mut Table) -> MapPlan,
    ) -> PoolResult<Option<MapPlan>> {
        let under = self.pool.slabs().row_under(range.start);
        if let Some(row) = under
            && let Err(error) = self.is_there(row)
        {
            let is_as_before = self.pool.slabs().row_under(range.start) == under;
            return if is_as_before { Err(error) } else { Ok(None) };
        }
        let plan = self.settled(|slabs| {
            if slabs.row_under(range.start) == under {
                ask(slabs).settled().map(Some)
            } else {
                Some(None)
            }
        });
        plan.ok_or_else(|| cannot(DriverCode::NOT_READY, range))
    }

    /// Offers the driver once more to unmap what it would not, around `range`.
    fn unmap_stuck(&self, range: VaRange) -> PoolResult<()> {
        self.take_down(Ended::default());
        if !self.pool.slabs().is_stuck(range.start) {
            return Ok(());
        }
        let object = format!(
            "mapping at {}, where the driver does not unmap what was there: try again, or {NEXT}",
            range.start
        );
        Err(refused(DriverOp::Map, DriverCode::NOT_READY, object, range.size_bytes))
    }

    fn odd(&self, range: VaRange, what: &str) -> PoolError {
        self.pool.slabs().note_refused(range.size_bytes);
        let object = format!("{what}, to be mapped at {}: {NEXT}", range.start);
        refused(DriverOp::Map, DriverCode::NOT_SUPPORTED, object, range.size_bytes)
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

    fn fill_room(
        &self,
        cell: CellAt,
        range: VaRange,
        row: VirtualHandle,
        place: (u64, VaRange),
    ) -> PoolResult<Step> {
        let made = self.map(place.1, 0, row);
        let (is_mapped, ended) =
            self.changed(|slabs| slabs.filled(cell.handle, range, place, made.is_ok()));
        self.take_down(ended);
        made.map(|()| if is_mapped { Step::Done } else { Step::Again })
    }

    /// The cells become allocations of their own.
    fn evict(&self, evicted: Vec<VirtualHandle>) -> PoolResult<Step> {
        for handle in evicted {
            match self.stand_alone(handle) {
                // It has ended meanwhile, and is in nobody's way any more.
                Ok(()) | Err(PoolError::StaleHandle { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Step::Again)
    }

    /// The cell becomes an allocation of its own, which its handle stands for from now on, where it can leave.
    pub(super) fn stand_alone(&self, handle: VirtualHandle) -> PoolResult<()> {
        let held = self.pool.slabs().hold_still(handle);
        let Some((references, cell)) = held else {
            return Ok(());
        };
        let row = match self.own_row(cell) {
            Ok(row) => row,
            Err(error) => {
                self.let_go(cell.handle);
                return Err(error);
            }
        };
        // Nobody can take one more while it is still.
        for _ in 1..references {
            self.pool.ledger().add_reference(row);
        }
        let left = self.changed(|slabs| {
            slabs.begin_row_call(row);
            slabs.stand_alone(cell.handle, row)
        });
        // Until it has no more references than it should.
        let call = RowCall { pool: self.pool, row };
        let left_references = left.as_ref().map_or(0, |(left, _)| *left);
        for _ in left_references..references {
            self.release(row)?;
        }
        drop(call);
        let Some((_, ended)) = left else {
            return Err(PoolError::StaleHandle { handle: cell.handle.raw() });
        };
        self.take_down(ended);
        // In this order: what another thread adds meanwhile is not among those that are looked for.
        let known = self.pool.slabs().rows_alone();
        let living: HashSet<_> = self.pool.ledger().rows().map(Row::handle).collect();
        self.pool.slabs().forget_alone(|row| !known.contains(&row) || living.contains(&row));
        Ok(())
    }

    /// New memory with the bytes of the cell, which is held still.
    fn own_row(&self, cell: CellAt) -> PoolResult<VirtualHandle> {
        let class = self.pool.ledger().find(cell.row)?.class().clone();
        let row = self.create(cell.part.size_bytes, &cell.prop, class)?;
        let source = if cell.is_fresh { None } else { self.pool.slabs().bytes_of(cell.handle) };
        let Some(source) = source else {
            return Ok(row);
        };
        self.pool.slabs().note_copied(cell.part.size_bytes);
        let device = cell.prop.location.as_device();
        let copy = |view| self.fill(view, Some(source.start), device);
        let copied = self.with_view(row, source.size_bytes, device, copy);
        copied.map(|()| row).inspect_err(|_| self.release_quietly(row))
    }

    /// Has `work` done with `row` mapped where its device reaches it.
    fn with_view(
        &self,
        row: VirtualHandle,
        size_bytes: u64,
        device: Option<DeviceOrdinal>,
        work: impl FnOnce(VaRange) -> PoolResult<()>,
    ) -> PoolResult<()> {
        let access: Vec<_> = device.map(AccessDesc::read_write).into_iter().collect();
        // Used up where that fails.
        self.pool.ledger().add_reference(row);
        let view = self.map_window(row, size_bytes, 0, &access)?;
        let done = work(view);
        // It unmaps the view, frees its addresses, and gives the reference back.
        self.abandon(Some(view), row);
        done
    }

    /// The cell is not still any more.
    fn let_go(&self, handle: VirtualHandle) {
        let ended = self.changed(|slabs| slabs.let_go(handle));
        self.take_down(ended);
    }

    /// The cell moves to `range`, in the window of a slab, where nobody has anything. Both slabs stay until it has.
    fn move_cell(&self, range: VaRange, cell: CellAt) -> PoolResult<Step> {
        let (place, source) = {
            let mut slabs = self.pool.slabs();
            let place = slabs.hold_to_move(cell.handle, range);
            // Another thread may have written to it since it was looked for.
            let is_fresh = matches!(slabs.held(cell.handle), Held::Cell(now) if now.is_fresh);
            let source = if is_fresh { None } else { slabs.bytes_of(cell.handle) };
            if place.is_some() && source.is_some() {
                slabs.note_copied(range.size_bytes);
            }
            (place, source)
        };
        let Some(place) = place else {
            return Ok(Step::Again);
        };
        let device = cell.prop.location.as_device();
        let filled = self.fill(range, source.map(|source| source.start), device);
        let moved = filled
            .is_ok()
            .then(|| self.changed(|slabs| slabs.move_cell(cell.handle, place, range)));
        let Some(ended) = moved.flatten() else {
            self.let_go(place);
            self.let_go(cell.handle);
            return filled.map(|()| Step::Again);
        };
        self.take_down(ended);
        Ok(Step::Done)
    }

    fn map_row(&self, range: VaRange, offset_bytes: u64, row: VirtualHandle) -> PoolResult<Step> {
        let is_in_window = self.pool.slabs().meets_window(range);
        let described = {
            let ledger = self.pool.ledger();
            ledger.find(row).map(|found| {
                let recipe = Recipe { prop: *found.prop(), class: found.class().clone() };
                (recipe, found.size_bytes())
            })
        };
        let (recipe, size_bytes) = match described {
            Ok(described) => described,
            // Another thread has made it a cell since it was looked for.
            Err(_) if self.pool.slabs().held(row) != Held::Row(row) => return Ok(Step::Again),
            Err(error) => return Err(error),
        };
        if is_in_window {
            if let Err(error) = self.is_there(row) {
                let is_as_before = self.pool.slabs().held(row) == Held::Row(row);
                return if is_as_before { Err(error) } else { Ok(Step::Again) };
            }
            self.check_call(range, offset_bytes, size_bytes)?;
        }
        let plan = self.plan(range, |slabs| {
            if slabs.held(row) == Held::Row(row) {
                slabs.map_alone(range, row, &recipe)
            } else {
                MapPlan::Done
            }
        })?;
        match plan {
            Some(MapPlan::StandAlone) => {
                let _call = RowCall { pool: self.pool, row };
                let mapped = self.map(range, offset_bytes, row);
                if mapped.is_err() && is_in_window {
                    self.pool.slabs().not_mapped_alone(range);
                }
                mapped.map(|()| Step::Done)
            }
            Some(MapPlan::Into { evicted }) => {
                let step = self.take_in(range, row, &recipe, evicted);
                let released = self.changed(|slabs| {
                    let released = slabs.let_row_go(row);
                    slabs.begin_row_call(row);
                    released
                });
                let _call = RowCall { pool: self.pool, row };
                // What the caller has given back is said to be done.
                for _ in 0..released {
                    self.release_quietly(row);
                }
                step
            }
            Some(MapPlan::Wrong) => Err(cannot(DriverCode::INVALID_VALUE, range)),
            Some(MapPlan::Stuck) => self.unmap_stuck(range).map(|()| Step::Again),
            Some(MapPlan::Busy) => Err(cannot(DriverCode::NOT_READY, range)),
            // The handle is a cell's by now.
            Some(MapPlan::Done) | None => Ok(Step::Again),
            Some(MapPlan::Odd | MapPlan::Fill { .. }) => {
                Err(self.odd(range, "allocation in place of a cell of a slab"))
            }
        }
    }

    /// Makes a cell of `row`, which is held still, at addresses of cells that are gone or can leave.
    fn take_in(
        &self,
        range: VaRange,
        row: VirtualHandle,
        recipe: &Recipe,
        evicted: Vec<VirtualHandle>,
    ) -> PoolResult<Step> {
        // No call is about it, so what is seen of it stays so.
        let standing = self.pool.ledger().find(row)?.unplaced();
        let Some((references, is_touched)) = standing else {
            return Err(self.odd(range, "allocation that is in use, in place of a cell of a slab"));
        };
        if !evicted.is_empty() {
            return self.evict(evicted);
        }
        let Some(place) = self.pool.slabs().hold_place(range, recipe) else {
            return Ok(Step::Again);
        };
        let device = recipe.prop.location.as_device();
        let filled = if is_touched {
            self.pool.slabs().note_copied(range.size_bytes);
            let copy = |view: VaRange| self.fill(range, Some(view.start), device);
            self.with_view(row, range.size_bytes, device, copy)
        } else {
            self.fill(range, None, device)
        };
        let is_in =
            filled.is_ok() && self.changed(|slabs| slabs.take_in(row, references, place, range));
        if !is_in {
            self.let_go(place);
            return filled.map(|()| Step::Again);
        }
        // The handle is the cell's from now on.
        for _ in 0..references {
            self.release_quietly(row);
        }
        Ok(Step::Done)
    }

    fn release_quietly(&self, row: VirtualHandle) {
        if let Err(error) = self.release(row) {
            tracing::error!(%error, "memory that nobody has stays until the next pause");
        }
    }
}
