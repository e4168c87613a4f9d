//! The places where memory is mapped. An allocation of its own goes where the driver takes it, unless a slab is mapped
//! there. A cell goes:
//!
//! | what is mapped | where | way |
//! | --- | --- | --- |
//! | a cell | its own addresses | nothing is to be done: its slab is mapped there |
//! | a cell | a room | its slab is mapped there, so that it lies at the room's spot |
//! | a cell that nobody has mapped or shared yet | a spot in a slab's window where no cell is | it is there from now on: it has no bytes to bring, and what was there is cleared |
//! | the same | where no slab is | it becomes an allocation of its own |
//!
//! The rest is refused, and the refusal names the setting that helps.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{Cells, NEXT, refused};
use crate::VirtualHandle;
use crate::driver::{Driver, DriverCode, DriverOp, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::ledger::Row;
use crate::pool::Use;
use crate::slabs::{CellAt, Ended, MapPlan, SlabTable, StandsFor};

/// The longest time that a call waits for another thread's driver call about the same window.
const OTHERS_MAX: Duration = Duration::from_secs(20);
/// The largest number of tries of a call. A try fails when what it has prepared does not hold any more. Only other
/// threads that use the same memory simultaneously can cause that.
pub(super) const TRIES_MAX: usize = 32;

fn cannot(code: DriverCode, range: VaRange) -> PoolError {
    refused(DriverOp::Map, code, format!("mapping at {}", range.start), range.size_bytes)
}

impl<D: Driver> Cells<'_, D, Use> {
    /// Maps the whole of what `handle` stands for.
    ///
    /// # Errors
    /// As [`crate::Entered::map`]; [`PoolError::Driver`] too for what cannot be mapped there because of a slab.
    ///
    /// # Driver calls
    /// `cuMemMap` for what stands alone, and for a slab in a room. None for a cell where its addresses are; `cuMemsetD8Async` for one at the
    /// addresses of another that is gone. `cuMemCreate` for a cell that becomes an allocation of its own.
    #[doc(alias = "cuMemMap")]
    pub fn map_cell(
        &self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        if !handle.is_of_cell() {
            return self.map_row(range, offset_bytes, handle);
        }
        for _ in 0..TRIES_MAX {
            let (held, under) = {
                let slabs = self.0.pool.slabs().table();
                (slabs.held(handle), slabs.row_under(range.start))
            };
            let cell = match held {
                StandsFor::Row(row) => return self.map_row(range, offset_bytes, row),
                StandsFor::Cell(cell) => cell,
            };
            for row in std::iter::once(cell.row).chain(under) {
                self.is_there(row)?;
            }
            self.check_call(range, offset_bytes, cell.part.size_bytes)?;
            match self.settled(range, |slabs| slabs.map(handle, range))? {
                MapPlan::Done => return Ok(()),
                MapPlan::Clear => {
                    let cleared = self.clear(range, cell.prop.location.as_device());
                    let ended = self.changed(|slabs| {
                        slabs.cleared((cell.slab, handle), range, cleared.is_ok())
                    });
                    self.take_down(ended);
                    return cleared;
                }
                MapPlan::Fill { row, window, mounted } => {
                    let made = self.0.map(mounted, 0, row);
                    let place = (window, mounted);
                    let ended =
                        self.changed(|slabs| slabs.filled(handle, range, place, made.is_ok()));
                    self.take_down(ended);
                    return made;
                }
                MapPlan::StandAlone => self.stand_alone(cell)?,
                MapPlan::Stuck => self.unmap_stuck(range)?,
                MapPlan::Busy => return Err(cannot(DriverCode::NOT_READY, range)),
                MapPlan::Wrong => return Err(cannot(DriverCode::INVALID_VALUE, range)),
                MapPlan::Odd => return Err(odd(range, "cell of a slab that is in use")),
            }
        }
        Err(cannot(DriverCode::NOT_READY, range))
    }

    /// [`crate::Entered::map`] of an allocation that is no cell.
    fn map_row(&self, range: VaRange, offset_bytes: u64, row: VirtualHandle) -> PoolResult<()> {
        for _ in 0..TRIES_MAX {
            match self.settled(range, |slabs| slabs.map_alone(range))? {
                MapPlan::StandAlone => return self.0.map(range, offset_bytes, row),
                MapPlan::Done => {
                    let mapped = self.0.map(range, offset_bytes, row);
                    if mapped.is_err() {
                        self.0.pool.slabs().table().not_mapped_alone(range);
                    }
                    return mapped;
                }
                MapPlan::Stuck => self.unmap_stuck(range)?,
                MapPlan::Busy => return Err(cannot(DriverCode::NOT_READY, range)),
                MapPlan::Wrong => return Err(cannot(DriverCode::INVALID_VALUE, range)),
                MapPlan::Odd | MapPlan::Clear | MapPlan::Fill { .. } => {
                    return Err(odd(range, "allocation, at addresses of a cell of a slab,"));
                }
            }
        }
        Err(cannot(DriverCode::NOT_READY, range))
    }

    /// The plan for `range`, once no other thread's driver call changes what is there. [`MapPlan::Busy`] if that takes too long.
    fn settled(
        &self,
        range: VaRange,
        mut plan: impl FnMut(&mut SlabTable) -> MapPlan,
    ) -> PoolResult<MapPlan> {
        let deadline = Instant::now() + OTHERS_MAX;
        let mut slabs = self.0.pool.slabs().table();
        loop {
            let plan = plan(&mut slabs);
            if plan != MapPlan::Busy {
                return Ok(plan);
            }
            let left = deadline
                .checked_duration_since(Instant::now())
                .ok_or_else(|| cannot(DriverCode::NOT_READY, range))?;
            let waited = self.0.pool.slabs().changed.wait_timeout(slabs, left);
            slabs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn changed<T>(&self, change: impl FnOnce(&mut SlabTable) -> T) -> T {
        let done = change(&mut self.0.pool.slabs().table());
        self.0.pool.slabs().changed.notify_all();
        done
    }

    /// Makes the checks that the driver makes for any allocation of `whole_bytes`, in the driver's order.
    fn check_call(&self, range: VaRange, offset_bytes: u64, whole_bytes: u64) -> PoolResult<()> {
        let in_window = {
            let slabs = self.0.pool.slabs().table();
            slabs.windows.meets_window(range).then(|| slabs.windows.is_taken(range))
        };
        let is_taken = in_window.unwrap_or_else(|| self.0.pool.holdings().has_mapping_in(range));
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

    /// Offers the driver once more to unmap what it would not, around `range`.
    fn unmap_stuck(&self, range: VaRange) -> PoolResult<()> {
        self.take_down(Ended::default());
        if !self.0.pool.slabs().table().is_stuck(range.start) {
            return Ok(());
        }
        let object = format!(
            "mapping at {}, where the driver does not unmap what was there: try again, or {NEXT}",
            range.start
        );
        Err(refused(DriverOp::Map, DriverCode::NOT_READY, object, range.size_bytes))
    }

    /// Is the memory of `row` on its device, as far as is known?
    fn is_there(&self, row: VirtualHandle) -> PoolResult<()> {
        let ledger = self.0.pool.ledger();
        let row = ledger.rows.find(row)?;
        if row.is_resident() {
            return Ok(());
        }
        if row.is_set_aside() && !row.is_lost() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        let object = "cell of a slab that is not there".to_owned();
        Err(refused(DriverOp::Map, DriverCode::NOT_READY, object, row.size_bytes()))
    }

    /// The cell, which nobody has mapped or shared, becomes an allocation of its own, which its handle stands for from now on. Nothing
    /// happens if that is not so any more.
    pub(super) fn stand_alone(&self, cell: CellAt) -> PoolResult<()> {
        let class = self.0.pool.ledger().rows.find(cell.row)?.class().clone();
        let row = self.0.create(cell.part.size_bytes, &cell.prop, class)?;
        for _ in 1..cell.references {
            self.0.pool.ledger().rows.add_reference(row);
        }
        let ended = self.changed(|slabs| slabs.stand_alone(cell, row));
        let Some(ended) = ended else {
            return (0..cell.references).try_for_each(|_| self.0.release(row));
        };
        self.take_down(ended);
        // In this order: what another thread adds meanwhile is not among those that are looked for.
        let known = self.0.pool.slabs().table().rows_alone();
        let living: HashSet<_> = self.0.pool.ledger().rows.iter().map(Row::handle).collect();
        self.0
            .pool
            .slabs()
            .table()
            .forget_alone(|row| !known.contains(&row) || living.contains(&row));
        Ok(())
    }
}

fn odd(range: VaRange, what: &str) -> PoolError {
    let object = format!("{what} to be mapped at {}: {NEXT}", range.start);
    refused(DriverOp::Map, DriverCode::NOT_SUPPORTED, object, range.size_bytes)
}
