//! What stays as it is while another thread's driver call is about it: cells and rows whose bytes are on their way, the places they are on
//! their way to, and rows that calls are about.

use super::{CellAt, Ended, Part, Recipe, Table, Under};
use crate::VirtualHandle;
use crate::driver::{DeviceAddress, VaRange};

// Cells.
impl Table {
    /// Nobody can map the cell or hand it on until [`Table::let_go`], or it is elsewhere; nor does it end before that. How many references it
    /// has, which are not going to be more, and the cell as it is, which stays so; none where it cannot leave.
    pub(crate) fn hold_still(&mut self, handle: VirtualHandle) -> Option<(u32, CellAt)> {
        let found = self.cell_at(handle).filter(|found| self.can_leave(*found))?;
        let cell = self.cell_mut(found.handle)?;
        cell.is_still = true;
        Some((cell.references, found))
    }

    /// See [`Table::hold_still`]. What nobody holds any more comes out.
    pub(crate) fn let_go(&mut self, handle: VirtualHandle) -> Ended {
        if let Some(cell) = self.cell_mut(handle) {
            cell.is_still = false;
        }
        self.end_unheld(handle)
    }

    /// [`Table::hold_still`] for a cell that is to move to `range`, and for its place there, which comes out. None where it cannot go there.
    pub(crate) fn hold_to_move(
        &mut self,
        handle: VirtualHandle,
        range: VaRange,
    ) -> Option<VirtualHandle> {
        let found = self.cell_at(handle).filter(|found| self.can_leave(*found))?;
        let recipe = self.recipe_of(found.slab)?.clone();
        let place = self.hold_place(range, &recipe)?;
        self.hold_still(handle);
        Some(place)
    }

    /// Keeps `range` for what is like `recipe` and is on its way there: until then a cell that nobody has is there, and is still, so that the slab stays
    /// and nothing else comes there. [`Table::let_go`] ends that, [`Table::move_cell`] and [`Table::take_in`] put what it is for in its
    /// place. None where something is there, or was that another process may hold.
    pub(crate) fn hold_place(&mut self, range: VaRange, recipe: &Recipe) -> Option<VirtualHandle> {
        let (key, offset_bytes) = self.free_place(range, recipe)?;
        let part = Part { offset_bytes, size_bytes: range.size_bytes };
        if !self.is_home && self.slabs.get(&key)?.is_abroad(part) {
            return None;
        }
        let place = self.add_cell(key, part, true)?;
        let cell = self.cell_mut(place)?;
        (cell.references, cell.is_fresh, cell.is_still) = (0, false, true);
        Some(place)
    }

    /// The place that [`Table::hold_place`] keeps at `range`, and its window; none where the caller's addresses are gone.
    pub(super) fn place_held(&self, place: VirtualHandle, range: VaRange) -> Option<(u64, CellAt)> {
        let window = self.vacant_window(range).ok()?;
        let held = self.cell_at(place)?;
        let Under::Slab(key, base) = window.under else { return None };
        let is_there = key == held.slab && held.part.at(DeviceAddress(base)) == range;
        is_there.then_some((window.range.start.0, held))
    }

    /// Are bytes of `part` of a slab of ours on their way?
    pub(crate) fn is_part_still(&self, key: super::SlabKey, part: Part) -> bool {
        let own = self.slabs.get(&key).filter(|slab| slab.new.recipe.is_some());
        let inside = own.filter(|slab| part.end().is_some_and(|end| end <= slab.new.size_bytes));
        inside.is_some_and(|slab| slab.cells_in(part).any(|cell| cell.is_still))
    }

    /// The row of the slab of ours that is mapped at `address`.
    pub(crate) fn row_under(&self, address: DeviceAddress) -> Option<VirtualHandle> {
        let Under::Slab(key, _) = self.window_at(address)?.under else { return None };
        let slab = self.slabs.get(&key).filter(|slab| slab.new.recipe.is_some())?;
        Some(slab.new.row)
    }
}

/// What is known of a row that is no slab's.
#[derive(Debug, Default)]
pub(super) struct RowUse {
    /// Calls that have found that it is a row, and are not over.
    calls: u32,
    /// For one that is being made a cell: references that were given back meanwhile.
    still: Option<u32>,
}

// Rows.
impl Table {
    /// A call is about the row, until [`Table::end_row_call`]: meanwhile it is not made a cell. False where that is under way.
    pub(crate) fn begin_row_call(&mut self, row: VirtualHandle) -> bool {
        if self.is_row_still(row) {
            return false;
        }
        self.row_uses.entry(row).or_default().calls += 1;
        true
    }

    /// See [`Table::begin_row_call`].
    pub(crate) fn end_row_call(&mut self, row: VirtualHandle) {
        if let Some(found) = self.row_uses.get_mut(&row) {
            found.calls = found.calls.saturating_sub(1);
            if found.calls == 0 && found.still.is_none() {
                self.row_uses.remove(&row);
            }
        }
    }

    /// Holds the row still: nobody maps it, hands it on, or gives it back. False where a call is about it.
    pub(super) fn hold_row(&mut self, row: VirtualHandle) -> bool {
        let is_free = !self.row_uses.contains_key(&row);
        if is_free {
            self.row_uses.insert(row, RowUse { calls: 0, still: Some(0) });
        }
        is_free
    }

    /// Is the row being made a cell?
    pub(crate) fn is_row_still(&self, row: VirtualHandle) -> bool {
        self.row_uses.get(&row).is_some_and(|found| found.still.is_some())
    }

    /// The row has one reference less from when it is let go. False where it is not still.
    pub(crate) fn release_still(&mut self, row: VirtualHandle) -> bool {
        let released = self.row_uses.get_mut(&row).and_then(|found| found.still.as_mut());
        released.map(|released| *released += 1).is_some()
    }

    /// The row is a cell, or comes to be none. How many references were given back meanwhile, which it still has.
    pub(crate) fn let_row_go(&mut self, row: VirtualHandle) -> u32 {
        self.row_uses.remove(&row).and_then(|found| found.still).unwrap_or(0)
    }
}
