//! The life of cells: who gets one, its place in a slab, and the things that end with it.

use std::collections::{BTreeMap, BTreeSet};

use vmm_pool::driver::{AccessDesc, DeviceAddress, VaRange};
use vmm_pool::{Part, VirtualHandle};

use super::{
    Cell, Ended, NewSlab, Occupant, Recipe, SHARE, SLAB_BYTES_MAX, SLAB_BYTES_MIN, Slab, SlabKey,
    SlabTable, Under, Wanted, Window,
};

impl Slab {
    pub(super) fn put(&mut self, offset_bytes: u64, cell: Cell) {
        self.live_bytes += cell.size_bytes;
        // A cell at a spot of an older slab may be beyond all bytes that were given out. Nobody else gets those bytes.
        self.next_bytes = self.next_bytes.max(offset_bytes + cell.size_bytes);
        self.cells.insert(offset_bytes, cell);
    }

    fn take(&mut self, offset_bytes: u64) -> Option<Cell> {
        let cell = self.cells.remove(&offset_bytes)?;
        self.live_bytes -= cell.size_bytes;
        Some(cell)
    }

    pub(super) fn is_of(&self, recipe: &Recipe) -> bool {
        self.new.recipe.as_ref().is_some_and(|(own, _)| own == recipe)
    }

    /// Is there room for a cell of this size?
    fn has_room(&self, size_bytes: u64) -> bool {
        let unit = self.new.recipe.as_ref().map_or(0, |(_, unit)| *unit);
        unit != 0
            && size_bytes.is_multiple_of(unit)
            && size_bytes <= self.new.size_bytes - self.next_bytes
    }
}

impl SlabTable {
    /// Decides whether a caller that requests memory gets a cell or an allocation of its own.
    pub(crate) fn wanted(&self, size_bytes: u64, recipe: &Recipe) -> Wanted {
        if !self.is_on || !recipe.is_for_cells(size_bytes) {
            return Wanted::Alone;
        }
        debug_assert!(self.are_sums_right(), "sums of live and vacant bytes");
        let (mut live_bytes, mut dead_bytes) = (0, 0);
        for slab in self.slabs.values().filter(|slab| slab.is_of(recipe)) {
            live_bytes += slab.live_bytes;
            // A caller that keeps the addresses of ended cells means to use them again.
            let windows = self.windows_of(slab).filter(|window| !window.is_room);
            let kept_bytes = windows.map(Window::vacant_bytes).sum();
            dead_bytes += (slab.next_bytes - slab.live_bytes).saturating_sub(kept_bytes);
        }
        if dead_bytes > live_bytes / SHARE + SLAB_BYTES_MAX {
            return Wanted::Alone;
        }
        let slab_bytes = (live_bytes / SHARE)
            .next_multiple_of(SLAB_BYTES_MIN)
            .clamp(SLAB_BYTES_MIN, SLAB_BYTES_MAX)
            .max(size_bytes.next_multiple_of(SLAB_BYTES_MIN));
        Wanted::Cell { slab_bytes }
    }

    /// Returns the slabs that have room for such a cell, with their rows.
    pub(crate) fn with_room(
        &self,
        size_bytes: u64,
        recipe: &Recipe,
    ) -> Vec<(SlabKey, VirtualHandle)> {
        let fit =
            self.slabs.iter().filter(|(_, slab)| slab.is_of(recipe) && slab.has_room(size_bytes));
        fit.map(|(&key, slab)| (key, slab.new.row)).collect()
    }

    /// Enters a slab that is mapped at `window`, with `rights` there.
    pub(crate) fn insert(
        &mut self,
        new: NewSlab,
        window: VaRange,
        rights: &[AccessDesc],
    ) -> SlabKey {
        self.last_key += 1;
        let key = SlabKey(self.last_key);
        let (next_bytes, cells, windows) = (0, BTreeMap::new(), BTreeSet::new());
        let abroad = BTreeMap::new();
        let slab = Slab { new, next_bytes, cells, live_bytes: 0, windows, abroad };
        self.slabs.insert(key, slab);
        let rights = rights.iter().map(|right| (right.location, right.flags)).collect();
        let under = Under::Slab(key, window.start.0);
        self.windows.insert(Window::new(window, under, rights));
        if let Some(slab) = self.slabs.get_mut(&key) {
            slab.windows.insert(window.start.0);
        }
        key
    }

    pub(super) fn add_cell(
        &mut self,
        key: SlabKey,
        part: Part,
        is_new: bool,
    ) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key)?;
        self.last_cell += 1;
        let handle = VirtualHandle::of_front(self.last_cell);
        let cell =
            Cell { is_fresh: is_new, is_shared: !is_new, ..Cell::new(handle, part.size_bytes, 1) };
        slab.put(part.offset_bytes, cell);
        self.cells.insert(handle, (key, part.offset_bytes));
        Some(handle)
    }

    /// Makes the next bytes of a slab a new cell, if there is still room.
    pub(crate) fn carve(&mut self, key: SlabKey, size_bytes: u64) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key).filter(|slab| slab.has_room(size_bytes))?;
        let part = Part { offset_bytes: slab.next_bytes, size_bytes };
        slab.next_bytes += size_bytes;
        self.add_cell(key, part, true)
    }

    /// Adds a reference to the cell at `part` of a slab. Makes the cell if nobody here has held it, or holds it any more.
    /// `None` if no cell can be there.
    pub(crate) fn hold_part(&mut self, key: SlabKey, part: Part) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key)?;
        if let Some(cell) = slab.cells.get_mut(&part.offset_bytes) {
            if cell.size_bytes != part.size_bytes {
                return None;
            }
            cell.references += 1;
            return Some(cell.handle);
        }
        let end = part
            .offset_bytes
            .checked_add(part.size_bytes)
            .filter(|end| part.size_bytes > 0 && *end <= slab.new.size_bytes)?;
        let is_given_out = slab.new.recipe.is_none() || end <= slab.next_bytes;
        if !is_given_out || slab.cells_in(part).next().is_some() {
            return None;
        }
        self.add_cell(key, part, false)
    }

    /// Adds a reference to the cell that is mapped at `address`.
    pub(crate) fn retain_at(&mut self, address: DeviceAddress) -> Option<VirtualHandle> {
        let Occupant::Cell { handle, .. } = self.windows.place(address) else { return None };
        self.cell_mut(handle)?.references += 1;
        Some(handle)
    }

    pub(super) fn cell_mut(&mut self, handle: VirtualHandle) -> Option<&mut Cell> {
        let (key, offset) = self.cells.get(&handle)?;
        self.slabs.get_mut(key)?.cells.get_mut(offset)
    }

    /// Removes a reference. `None` when there was none.
    pub(crate) fn release(&mut self, handle: VirtualHandle) -> Option<Ended> {
        let cell = self.cell_mut(handle).filter(|cell| cell.references > 0)?;
        cell.references -= 1;
        Some(self.end_unheld(handle))
    }

    /// Ends the cell if nothing holds it, and its slab with the last cell.
    pub(super) fn end_unheld(&mut self, handle: VirtualHandle) -> Ended {
        let is_held = |cell: &mut Cell| cell.references + cell.mapped > 0;
        let is_held = self.cell_mut(handle).is_none_or(is_held);
        let place = self.cells.get(&handle).copied();
        let Some((key, offset)) = place.filter(|_| !is_held) else {
            return Ended::default();
        };
        self.take_cell(key, offset);
        self.end_empty(key)
    }

    pub(super) fn take_cell(&mut self, key: SlabKey, offset: u64) {
        let Some(slab) = self.slabs.get_mut(&key) else { return };
        let Some(cell) = slab.take(offset) else { return };
        if cell.is_shared {
            slab.abroad.insert(offset, cell.size_bytes);
        }
        self.cells.remove(&cell.handle);
        self.aims.retain(|_, aim| *aim != cell.handle);
        // Bytes are given out again if nobody was told an address of them, or has written them.
        let is_last = offset + cell.size_bytes == slab.next_bytes;
        let part = Part { offset_bytes: offset, size_bytes: cell.size_bytes };
        let has_spot = self.has_spot_in(&self.slabs[&key], part);
        if cell.is_fresh
            && !cell.is_shared
            && is_last
            && !has_spot
            && let Some(slab) = self.slabs.get_mut(&key)
        {
            slab.next_bytes = offset;
        }
    }

    /// Ends a slab without cells. Windows in which callers have spots stay, empty.
    pub(crate) fn end_empty(&mut self, key: SlabKey) -> Ended {
        if self.slabs.get(&key).is_none_or(|slab| !slab.cells.is_empty()) {
            return Ended::default();
        }
        let Some(slab) = self.slabs.remove(&key) else {
            return Ended::default();
        };
        let mut ended = Ended { row: Some(slab.new.row), ..Ended::default() };
        for start in slab.windows {
            ended.mounted.extend(self.windows.dismount(start, slab.new.size_bytes));
        }
        ended
    }
}
