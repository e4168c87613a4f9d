//! Where cells are: spots in windows, and what is mapped and allowed there.

use std::thread::ThreadId;

use super::{AccessPlan, Cell, CellAt, Ended, Holds, MapPlan, Part, Recipe, SlabKey, Spot, Table};
use crate::VirtualHandle;
use crate::driver::{AccessDesc, DeviceAddress, DriverCode, VaRange};

impl Table {
    /// This thread is likely to want addresses for the cell next; or for nothing of ours.
    pub(crate) fn aim(&mut self, thread: ThreadId, handle: Option<VirtualHandle>) {
        match handle.filter(|handle| self.cells.contains_key(handle)) {
            Some(handle) => self.aims.insert(thread, handle),
            None => self.aims.remove(&thread),
        };
    }

    /// The cell that this thread wants addresses for, where they are as long as it.
    pub(crate) fn aimed(&self, thread: ThreadId, size_bytes: u64) -> Option<CellAt> {
        let found = self.cell_at(*self.aims.get(&thread)?)?;
        (found.part.size_bytes == size_bytes).then_some(found)
    }

    /// Gives the thread addresses for the cell that it has aimed at: those in a window of its slab where nobody has any
    /// there. None where there is no such window, or they do not begin at a multiple of `alignment`.
    pub(crate) fn take_spot(
        &mut self,
        thread: ThreadId,
        size_bytes: u64,
        alignment: u64,
    ) -> Option<DeviceAddress> {
        let found = self.aimed(thread, size_bytes)?;
        let slab = self.slabs.get(&found.slab)?;
        let fits = |start: &&u64| {
            let window = self.windows.get(start);
            let start = **start + found.part.offset_bytes;
            (alignment == 0 || start.is_multiple_of(alignment))
                && window.is_some_and(|window| !window.has_spot_in(found.part))
        };
        let start = *slab.windows.iter().find(fits)?;
        let spot = Spot { size_bytes, holds: Holds::Nothing };
        self.windows.get_mut(&start)?.spots.insert(found.part.offset_bytes, spot);
        self.aims.remove(&thread);
        Some(found.part.at(DeviceAddress(start)).start)
    }

    /// What it takes to map the cell at `range`. What takes nothing is recorded.
    pub(crate) fn map(&mut self, handle: VirtualHandle, range: VaRange) -> MapPlan {
        let Some(found) = self.cell_at(handle) else {
            return MapPlan::Refused;
        };
        let is_fresh = self.cell_mut(handle).is_some_and(|cell| cell.is_fresh);
        let can_leave = is_fresh && self.slabs[&found.slab].new.recipe.is_some();
        let otherwise = if can_leave { MapPlan::StandAlone } else { MapPlan::Refused };
        let Some(window) = self.window_at(range.start) else {
            return otherwise;
        };
        let (start, slab) = (window.range.start.0, window.slab);
        let offset = range.start.0 - start;
        let has_spot = window.spots.get(&offset).is_some_and(|spot| {
            spot.holds == Holds::Nothing && spot.size_bytes == range.size_bytes
        });
        if !has_spot {
            return MapPlan::Refused;
        }
        match slab {
            Some(key) if key == found.slab && offset == found.part.offset_bytes => {
                self.set_mapped(start, offset, handle);
                MapPlan::Done
            }
            Some(key) => self.plan_taking_over(found, key, start, offset, can_leave),
            None => {
                let fits = window.range.size_bytes == self.slabs[&found.slab].new.size_bytes
                    && offset == found.part.offset_bytes
                    && window.spots.values().all(|spot| spot.holds != Holds::Alone);
                let fill = MapPlan::Fill { row: found.row, window: window.range };
                if fits && !can_leave { fill } else { otherwise }
            }
        }
    }

    fn set_mapped(&mut self, window: u64, offset: u64, handle: VirtualHandle) {
        let window = self.windows.get_mut(&window);
        if let Some(spot) = window.and_then(|window| window.spots.get_mut(&offset)) {
            spot.holds = Holds::Cell(handle);
        }
        if let Some(cell) = self.cell_mut(handle) {
            cell.mapped += 1;
            cell.is_fresh = false;
        }
    }

    /// A fresh cell is to be mapped where another one of `key` was, or could have been.
    fn plan_taking_over(
        &self,
        found: CellAt,
        key: SlabKey,
        window: u64,
        offset: u64,
        can_leave: bool,
    ) -> MapPlan {
        let (Some(own), Some(there)) = (self.slabs.get(&found.slab), self.slabs.get(&key)) else {
            return MapPlan::Refused;
        };
        let is_alike = own.new.recipe.is_some() && own.new.recipe == there.new.recipe;
        let is_vacant = !there.cells.contains_key(&offset);
        // Mapped at another window still, by nobody's reference: then it lives.
        if can_leave && is_alike && is_vacant {
            let start = DeviceAddress(window);
            let part = Part { offset_bytes: offset, size_bytes: found.part.size_bytes };
            return MapPlan::TakeOver { range: part.at(start) };
        }
        MapPlan::Refused
    }

    /// Moves a fresh cell to where it is mapped, at `range`, whose bytes are clear, and records the mapping. None
    /// where something is there meanwhile. What its slab needs no more comes out.
    pub(crate) fn take_over(&mut self, handle: VirtualHandle, range: VaRange) -> Option<Ended> {
        if self.map(handle, range) != (MapPlan::TakeOver { range }) {
            return None;
        }
        let found = self.cell_at(handle)?;
        let window = self.window_at(range.start)?;
        let (start, key) = (window.range.start.0, window.slab?);
        let offset = range.start.0 - start;
        let references = self.cell_mut(handle)?.references;
        self.take_cell(found.slab, found.part.offset_bytes);
        let size_bytes = range.size_bytes;
        let cell = Cell { handle, size_bytes, references, mapped: 0, is_fresh: false };
        self.slabs.get_mut(&key)?.cells.insert(offset, cell);
        self.cells.insert(handle, (key, offset));
        self.set_mapped(start, offset, handle);
        Some(self.end_empty(found.slab))
    }

    /// Which kind of cell could be mapped at `range`, a spot of a slab that lives where no cell is.
    pub(crate) fn vacant(&self, range: VaRange) -> Option<&Recipe> {
        let window = self.window_at(range.start)?;
        let offset = range.start.0 - window.range.start.0;
        let spot = window.spots.get(&offset)?;
        let slab = self.slabs.get(&window.slab?)?;
        let is_free = spot.holds == Holds::Nothing && !slab.cells.contains_key(&offset);
        let (recipe, _) = slab.new.recipe.as_ref()?;
        (is_free && spot.size_bytes == range.size_bytes).then_some(recipe)
    }

    /// Makes a cell that is mapped at `range`, whose bytes are clear, of what was the row `handle`, which has one reference. False
    /// where something is there meanwhile.
    pub(crate) fn take_in(&mut self, handle: VirtualHandle, range: VaRange) -> bool {
        if self.vacant(range).is_none() {
            return false;
        }
        let place = self.window_at(range.start).and_then(|window| {
            let start = window.range.start.0;
            Some((window.slab?, start, range.start.0 - start))
        });
        let Some((key, start, offset)) = place else {
            return false;
        };
        let Some(slab) = self.slabs.get_mut(&key) else {
            return false;
        };
        let size_bytes = range.size_bytes;
        slab.cells
            .insert(offset, Cell { handle, size_bytes, references: 1, mapped: 0, is_fresh: false });
        self.cells.insert(handle, (key, offset));
        self.set_mapped(start, offset, handle);
        true
    }

    /// May an allocation that stands alone be mapped at `range`? Not over a slab, nor outside a spot. Where it may, it is
    /// recorded.
    pub(crate) fn map_alone(&mut self, range: VaRange) -> bool {
        if !self.meets_window(range) {
            return true;
        }
        let Some(window) = self.window_at(range.start).filter(|found| found.slab.is_none()) else {
            return false;
        };
        let (start, offset) = (window.range.start.0, range.start.0 - window.range.start.0);
        let spot = self.windows.get_mut(&start).and_then(|found| found.spots.get_mut(&offset));
        let is_free =
            |spot: &&mut Spot| spot.size_bytes == range.size_bytes && spot.holds == Holds::Nothing;
        spot.filter(is_free).map(|spot| spot.holds = Holds::Alone).is_some()
    }

    /// Takes down what is mapped at spots inside `range`, which meets a window. Says which ranges hold allocations
    /// that stand alone, for their owner to unmap. None where nothing is mapped there, or `range` cuts through
    /// something.
    pub(crate) fn unmap(&mut self, range: VaRange) -> Option<(Vec<VaRange>, Vec<Ended>)> {
        let window = self.window_at(range.start)?;
        let (start, whole) = (window.range.start.0, window.range);
        let met: Vec<(u64, VaRange, Holds)> = window
            .spots
            .iter()
            .map(|(&at, spot)| (at, whole.part(&(at..at + spot.size_bytes)), spot.holds))
            .filter(|(_, spot, holds)| {
                *holds != Holds::Nothing && spot.start < range.end() && range.start < spot.end()
            })
            .collect();
        let is_cut = met.iter().any(|(_, spot, _)| !range.contains(*spot));
        if !whole.contains(range) || met.is_empty() || is_cut {
            return None;
        }
        let (mut rows, mut ended) = (Vec::new(), Vec::new());
        for (at, spot, holds) in met {
            let place = self.windows.get_mut(&start).and_then(|found| found.spots.get_mut(&at));
            if let Some(place) = place {
                place.holds = Holds::Nothing;
            }
            match holds {
                Holds::Nothing => {}
                Holds::Alone => rows.push(spot),
                Holds::Cell(handle) => {
                    if let Some(cell) = self.cell_mut(handle) {
                        cell.mapped -= 1;
                    }
                    ended.push(self.end_unheld(handle));
                }
            }
        }
        Some((rows, ended))
    }

    /// An allocation that stands alone is still mapped at `range`.
    pub(crate) fn stays_mapped(&mut self, range: VaRange) {
        let Some(window) = self.window_at(range.start).map(|found| found.range.start.0) else {
            return;
        };
        let spot = self.windows.get_mut(&window);
        let spot = spot.and_then(|found| found.spots.get_mut(&(range.start.0 - window)));
        if let Some(spot) = spot {
            spot.holds = Holds::Alone;
        }
    }

    /// The caller gives the addresses up, which are one spot with nothing mapped. None where they are not. Addresses that
    /// nobody needs any more come out.
    pub(crate) fn free_spot(&mut self, range: VaRange) -> Option<Ended> {
        let window = self.window_at(range.start)?;
        let (start, whole) = (window.range.start.0, window.range);
        let window = self.windows.get_mut(&start)?;
        let spot = window.spots.get(&(range.start.0 - start))?;
        if spot.size_bytes != range.size_bytes || spot.holds != Holds::Nothing {
            return None;
        }
        window.spots.remove(&(range.start.0 - start));
        let mut ended = Ended::default();
        if window.spots.is_empty() && window.slab.is_none() {
            self.windows.remove(&start);
            ended.windows.push(whole);
        }
        Some(ended)
    }

    /// What rights on `range`, which meets a window, take.
    pub(crate) fn plan_access(&self, range: VaRange, access: &[AccessDesc]) -> AccessPlan {
        let Some(window) = self.window_at(range.start) else {
            return AccessPlan::Refused(DriverCode::INVALID_VALUE);
        };
        let mut at = range.start.0 - window.range.start.0;
        let end = at + range.size_bytes;
        let mut are_cells = true;
        while at < end {
            let before = window.spots.range(..=at).next_back();
            let under = before.filter(|(start, spot)| at - **start < spot.size_bytes);
            let Some((start, spot)) = under.filter(|(_, spot)| spot.holds != Holds::Nothing) else {
                return AccessPlan::Refused(DriverCode::INVALID_VALUE);
            };
            are_cells &= spot.holds != Holds::Alone;
            at = start + spot.size_bytes;
        }
        if !are_cells {
            return AccessPlan::Rows;
        }
        let held = |desc: &AccessDesc| window.rights.get(&desc.location).copied().unwrap_or(0);
        if access.iter().any(|desc| held(desc) & !desc.flags != 0) {
            return AccessPlan::Refused(DriverCode::NOT_SUPPORTED);
        }
        let is_there = access.iter().all(|desc| held(desc) == desc.flags);
        if is_there { AccessPlan::Done } else { AccessPlan::Grant(window.range) }
    }

    /// These rights are set on the window.
    pub(crate) fn granted(&mut self, window: VaRange, access: &[AccessDesc]) {
        if let Some(window) = self.windows.get_mut(&window.start.0) {
            window.rights.extend(access.iter().map(|desc| (desc.location, desc.flags)));
        }
    }
}
