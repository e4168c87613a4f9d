//! The places where memory is mapped. An allocation of its own is mapped where the driver accepts it, unless a slab is mapped
//! there. For a cell:
//!
//! | what is mapped | where | way |
//! | --- | --- | --- |
//! | a cell | its own addresses | no driver call is made: its slab is mapped there |
//! | a cell | a room | its slab is mapped there, so that the cell is at the room's spot |
//! | a cell that nobody has mapped or shared yet | a spot in a slab's window where no cell is | the cell moves there: it has no
//! contents to bring, and the old contents there are cleared |
//! | the same | where no slab is | it becomes an allocation of its own |
//!
//! The rest is refused, and the refusal names the setting that helps.

use std::time::{Duration, Instant};

use vmm_pool::driver::{Driver, DriverCode, DriverOp, VaRange};
use vmm_pool::{Entered, PoolError, PoolResult, VirtualHandle};

use super::filling::clear;
use super::{NEXT, refused};
use crate::slabs::{CellAt, Ended, MapPlan, Recipe, SlabTable, Slabs, StandsFor};

/// The longest wait of a call for another thread's driver call about the same window.
const OTHERS_MAX: Duration = Duration::from_secs(20);
/// The most tries of a call. A try fails when the state that it has prepared does not hold any more. Only other threads that
/// use the same memory simultaneously can cause that.
pub(super) const TRIES_MAX: usize = 32;

fn cannot(code: DriverCode, range: VaRange) -> PoolError {
    refused(DriverOp::Map, code, format!("mapping at {}", range.start), range.size_bytes)
}

impl Slabs {
    /// Maps the whole memory that our `handle` stands for.
    pub(super) fn map_cell<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        for _ in 0..TRIES_MAX {
            let (held, under) = {
                let slabs = self.table();
                (slabs.held(handle), slabs.row_under(range.start))
            };
            let cell = match held {
                StandsFor::Row(row) => return self.map_row(entered, range, offset_bytes, row),
                StandsFor::Cell(cell) => cell,
            };
            for row in std::iter::once(cell.row).chain(under) {
                entered.check_here(row)?;
            }
            self.check_call(entered, range, offset_bytes, cell.part.size_bytes)?;
            match self.settled(entered, range, |slabs| slabs.map(handle, range))? {
                MapPlan::Done => return Ok(()),
                MapPlan::Clear => {
                    let device = cell.prop.location.as_device();
                    let cleared = clear(entered, range, device, || self.table().late(handle));
                    let ended = self.changed(|slabs| {
                        slabs.cleared((cell.slab, handle), range, cleared.is_ok())
                    });
                    self.take_down(entered, ended);
                    return cleared;
                }
                MapPlan::Fill { row, window, mounted } => {
                    let made = entered.map(mounted, 0, row);
                    let place = (window, mounted);
                    let ended =
                        self.changed(|slabs| slabs.filled(handle, range, place, made.is_ok()));
                    self.take_down(entered, ended);
                    return made;
                }
                MapPlan::StandAlone => self.stand_alone(entered, cell)?,
                MapPlan::Odd | MapPlan::Busy | MapPlan::Stuck | MapPlan::Wrong => {
                    return Err(odd(range, "cell of a slab that is in use"));
                }
            }
        }
        Err(cannot(DriverCode::NOT_READY, range))
    }

    /// Does [`Entered::map`] for an allocation that is no cell.
    pub(super) fn map_row<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        offset_bytes: u64,
        row: VirtualHandle,
    ) -> PoolResult<()> {
        let plan = self.settled(entered, range, |slabs| slabs.map_alone(range))?;
        if !matches!(plan, MapPlan::StandAlone | MapPlan::Done) {
            return Err(odd(range, "allocation, at addresses of a cell of a slab,"));
        }
        let mapped = entered.map(range, offset_bytes, row);
        if mapped.is_err() && plan == MapPlan::Done {
            self.table().not_mapped_alone(range);
        }
        mapped
    }

    /// Returns the plan for `range`. First waits until no other thread's driver call changes the mappings there, and the driver
    /// has taken back the old ones. Refuses plans that cannot work, and waits that take too long.
    fn settled<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        mut plan: impl FnMut(&mut SlabTable) -> MapPlan,
    ) -> PoolResult<MapPlan> {
        let deadline = Instant::now() + OTHERS_MAX;
        loop {
            let mut slabs = self.table();
            let plan = plan(&mut slabs);
            if plan == MapPlan::Stuck {
                drop(slabs);
                self.unmap_stuck(entered, range)?;
            } else if plan == MapPlan::Busy {
                let left = deadline.checked_duration_since(Instant::now());
                let left = left.ok_or_else(|| cannot(DriverCode::NOT_READY, range))?;
                drop(self.changed.wait_timeout(slabs, left));
            } else if plan == MapPlan::Wrong {
                return Err(cannot(DriverCode::INVALID_VALUE, range));
            } else {
                return Ok(plan);
            }
        }
    }

    fn changed<T>(&self, change: impl FnOnce(&mut SlabTable) -> T) -> T {
        let done = change(&mut self.table());
        self.changed.notify_all();
        done
    }

    /// Makes the checks that the driver makes for any allocation of `whole_bytes`, in the driver's order.
    fn check_call<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        offset_bytes: u64,
        whole_bytes: u64,
    ) -> PoolResult<()> {
        let in_window = {
            let slabs = self.table();
            slabs.windows.meets_window(range).then(|| slabs.windows.is_taken(range))
        };
        let is_taken = in_window.unwrap_or_else(|| entered.pool().holdings().has_mapping_in(range));
        let code = if is_taken || offset_bytes == 0 && range.size_bytes > whole_bytes {
            DriverCode::INVALID_VALUE
        } else if offset_bytes != 0 || range.size_bytes < whole_bytes {
            DriverCode::NOT_SUPPORTED
        } else {
            return Ok(());
        };
        Err(cannot(code, range))
    }

    /// Offers the driver again the mappings around `range` that it would not unmap.
    fn unmap_stuck<D: Driver>(&self, entered: &Entered<'_, D>, range: VaRange) -> PoolResult<()> {
        self.take_down(entered, Ended::default());
        if !self.table().is_stuck(range.start) {
            return Ok(());
        }
        let object = format!(
            "mapping at {}, where the driver does not unmap what was there: try again, or {NEXT}",
            range.start
        );
        Err(refused(DriverOp::Map, DriverCode::NOT_READY, object, range.size_bytes))
    }

    /// Turns the cell, which nobody has mapped or shared, into an allocation of its own. Its handle stands for that allocation
    /// from now on. Nothing happens if the cell has been mapped or shared meanwhile.
    pub(super) fn stand_alone<D: Driver>(
        &self,
        entered: &Entered<'_, D>,
        cell: CellAt,
    ) -> PoolResult<()> {
        let Some(Recipe { prop, class }) = self.table().recipe_of(cell.slab).cloned() else {
            return Ok(());
        };
        let row = entered.create(cell.part.size_bytes, &prop, class)?;
        for _ in 1..cell.references {
            entered.retain(row);
        }
        let ended = self.changed(|slabs| slabs.stand_alone(cell, row));
        let Some(ended) = ended else {
            return (0..cell.references).try_for_each(|_| entered.release(row));
        };
        self.take_down(entered, ended);
        // The order matters: an entry that another thread adds meanwhile is not among those that are looked for.
        let mut gone: Vec<_> = self.table().alone.values().copied().collect();
        gone.retain(|row| entered.properties(*row).is_err());
        self.table().alone.retain(|_, row| !gone.contains(row));
        Ok(())
    }
}

fn odd(range: VaRange, what: &str) -> PoolError {
    let object = format!("{what} to be mapped at {}: {NEXT}", range.start);
    refused(DriverOp::Map, DriverCode::NOT_SUPPORTED, object, range.size_bytes)
}
