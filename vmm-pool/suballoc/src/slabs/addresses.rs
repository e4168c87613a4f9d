//! The addresses of cells: spots in windows, the mappings there, and the sums that are kept for a window. Also rights: the
//! driver has rights for a whole slab in a window. Callers see for each cell the rights that they have set on it.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, Location, VaRange};
use vmm_pool::{Part, VirtualHandle};

use super::{
    AccessPlan, Before, CELL_BYTES_MAX, Cell, CellAt, Ended, Item, MapPlan, ROOM_BYTES,
    ROOM_UNIT_BYTES, Recipe, Slab, SlabKey, SlabTable, Under, Window, item_under,
};

// Giving addresses out.
impl SlabTable {
    /// Records that this thread is likely to request addresses for this cell next, or for none of ours.
    pub(crate) fn aim(&mut self, thread: ThreadId, handle: Option<VirtualHandle>) {
        match handle.filter(|handle| self.cells.contains_key(handle)) {
            Some(handle) => self.aims.insert(thread, handle),
            None => self.aims.remove(&thread),
        };
    }

    /// Returns the cell that this thread is likely to request addresses for, if its size is `size_bytes`.
    pub(crate) fn aimed(&self, thread: ThreadId, size_bytes: u64) -> Option<CellAt> {
        let found = self.cell_at(*self.aims.get(&thread)?)?;
        (found.part.size_bytes == size_bytes).then_some(found)
    }

    /// Gives the thread addresses for the cell that it has aimed at. They are in the window that the cell's slab came with, if
    /// nobody has any there. `None` if somebody has, or if they do not begin at a multiple of `alignment`.
    pub(crate) fn take_spot(
        &mut self,
        thread: ThreadId,
        size_bytes: u64,
        alignment: u64,
    ) -> Option<DeviceAddress> {
        let found = self.aimed(thread, size_bytes)?;
        let slab = self.slabs.get(&found.slab)?;
        let (window, start) = self.windows_of(slab).find_map(|window| {
            let Under::Slab(_, base) = window.under else { return None };
            let start = base + found.part.offset_bytes;
            let fits = !window.is_room
                && (alignment == 0 || start.is_multiple_of(alignment))
                && !window.has_spot_in(found.part);
            fits.then_some((window.range.start.0, start))
        })?;
        let spot = VaRange::new(DeviceAddress(start), size_bytes);
        self.windows.get_mut(window)?.put_spot(spot);
        self.aims.remove(&thread);
        Some(DeviceAddress(start))
    }

    /// Returns the bytes to reserve for a room with a spot of `size_bytes`, at a multiple of `alignment`. `None` if such a room
    /// cannot be made, or nobody needs any.
    pub(crate) fn room_bytes(&self, size_bytes: u64, alignment: u64) -> Option<u64> {
        let is_needed = self.is_on || !self.slabs.is_empty();
        let fits = (1..=CELL_BYTES_MAX).contains(&size_bytes)
            && size_bytes.is_multiple_of(ROOM_UNIT_BYTES)
            && (alignment == 0 || (alignment.is_power_of_two() && alignment <= ROOM_BYTES));
        (is_needed && fits).then_some(2 * ROOM_BYTES)
    }

    /// Enters a room, and returns the spot of `size_bytes` in its middle.
    pub(crate) fn add_room(&mut self, range: VaRange, size_bytes: u64) -> DeviceAddress {
        let start = range.start.0 + ROOM_BYTES;
        let mut room = Window::new(range, Under::Nothing, BTreeMap::new());
        room.is_room = true;
        room.put_spot(VaRange::new(DeviceAddress(start), size_bytes));
        self.windows.insert(room);
        DeviceAddress(start)
    }

    /// Frees the caller's addresses, which are one spot with nothing mapped. `None` if they are not such a spot. Returns the
    /// addresses that nobody needs any more.
    pub(crate) fn free_spot(&mut self, range: VaRange) -> Option<Ended> {
        let start = self.windows.window_at(range.start)?.range.start.0;
        let window = self.windows.get_mut(start)?;
        if window.spots.get(&range.start.0) != Some(&range.size_bytes) || window.has_item_in(range)
        {
            return None;
        }
        window.take_spot(range.start);
        let mut ended = Ended::default();
        if window.spots.is_empty() && window.under == Under::Nothing {
            ended.windows.extend(self.windows.remove(start));
        }
        Some(ended)
    }
}

// Mapping memory.
impl SlabTable {
    /// Plans the mapping of the cell at `range`, which has the size of the cell. A mapping that needs no steps is recorded.
    pub(crate) fn map(&mut self, handle: VirtualHandle, range: VaRange) -> MapPlan {
        let Some(found) = self.cell_at(handle) else {
            // The cell has become an allocation of its own just now, or has ended.
            return MapPlan::StandAlone;
        };
        if self.cell_mut(handle).is_some_and(|cell| cell.before == Before::Late) {
            return MapPlan::Busy;
        }
        let otherwise = if found.can_leave { MapPlan::StandAlone } else { MapPlan::Odd };
        if !self.windows.meets_window(range) {
            return otherwise;
        }
        let window = match self.windows.vacant_window(range) {
            Ok(window) => window,
            Err(plan) => return plan,
        };
        let (whole, is_empty) = (window.range, window.items.is_empty());
        let start = whole.start.0;
        let is_all =
            window.spots.len() == 1 && window.spots.get(&range.start.0) == Some(&range.size_bytes);
        match window.under {
            Under::Changing if self.is_stuck(range.start) => MapPlan::Stuck,
            Under::Changing => MapPlan::Busy,
            Under::Slab(key, base)
                if key == found.slab && range.start.0 == base + found.part.offset_bytes =>
            {
                self.set_mapped(range, handle);
                let is_unclean =
                    self.cell_mut(handle).is_some_and(|cell| cell.before == Before::Unclean);
                if is_unclean { MapPlan::Clear } else { MapPlan::Done }
            }
            Under::Slab(key, base) => {
                let offset_bytes = range.start.0.saturating_sub(base);
                if self.put_at(found, key, Part { offset_bytes, ..found.part }) {
                    self.set_mapped(range, handle);
                    MapPlan::Clear
                } else {
                    MapPlan::Odd
                }
            }
            // A cell without contents can just as well be an allocation of its own.
            Under::Nothing if found.can_leave => MapPlan::StandAlone,
            Under::Nothing => {
                let base = range.start.0.checked_sub(found.part.offset_bytes);
                let slab_bytes = self.slabs[&found.slab].new.size_bytes;
                let mounted = base.map(|base| VaRange::new(DeviceAddress(base), slab_bytes));
                // No part of the room outside the slab is left where a caller could map something.
                let fits = |mounted: &VaRange| {
                    is_empty && whole.contains(*mounted) && (is_all || *mounted == whole)
                };
                match mounted.filter(fits) {
                    Some(mounted) => {
                        self.windows.set_under(start, Under::Changing);
                        // The cell, and its slab with it, lives until it is unmapped again.
                        self.set_mapped(range, handle);
                        MapPlan::Fill { row: found.row, window: start, mounted }
                    }
                    None => MapPlan::Odd,
                }
            }
        }
    }

    /// Lists the vacancies of `size_bytes`: for each the slab, its row and the part. A vacancy is a spot whose addresses a
    /// caller keeps with nothing mapped, as the owner of a suspended communicator does. A device without room for another slab
    /// still has these bytes. They count also if no more slabs are made: an allocation of its own could not be mapped there.
    pub(crate) fn vacancies(
        &self,
        size_bytes: u64,
        recipe: &Recipe,
    ) -> Vec<(SlabKey, VirtualHandle, Part)> {
        if !recipe.is_for_cells(size_bytes) {
            return Vec::new();
        }
        let of_window = |window: &Window| {
            let Under::Slab(key, base) = window.under else { return Vec::new() };
            let Some(slab) = self.slabs.get(&key).filter(|slab| slab.is_of(recipe)) else {
                return Vec::new();
            };
            let spots = window.spots.iter().filter(|(_, spot_bytes)| **spot_bytes == size_bytes);
            let parts = spots.map(|(start, _)| Part { offset_bytes: start - base, size_bytes });
            let free = parts.filter(|part| self.is_free(slab, *part, None));
            free.map(|part| (key, slab.new.row, part)).collect()
        };
        self.windows.all().filter(|window| !window.is_room).flat_map(of_window).collect()
    }

    /// Makes a cell in a vacancy, unless that is taken meanwhile. The old contents are cleared when the cell is mapped.
    pub(crate) fn refill(&mut self, key: SlabKey, part: Part) -> Option<VirtualHandle> {
        self.slabs.get(&key).filter(|slab| self.is_free(slab, part, None))?;
        let handle = self.add_cell(key, part, true)?;
        self.cell_mut(handle)?.before = Before::Unclean;
        Some(handle)
    }

    /// Is `part` free? It then has no cell but `mover`, and never had one that another process may hold.
    fn is_free(&self, slab: &Slab, part: Part, mover: Option<VirtualHandle>) -> bool {
        slab.cells_in(part).all(|cell| Some(cell.handle) == mover)
            && (self.is_home || !slab.is_abroad(part))
    }

    /// Moves the cell, which can leave, to `part` of the slab `key`. False if a cell is there, or was there and another process
    /// may hold it.
    fn put_at(&mut self, found: CellAt, key: SlabKey, part: Part) -> bool {
        let recipe = self.recipe_of(found.slab).filter(|_| found.can_leave);
        let is_alike = recipe.is_some() && recipe == self.recipe_of(key);
        let there = self.slabs.get(&key).filter(|_| is_alike);
        if !there.is_some_and(|there| self.is_free(there, part, Some(found.handle))) {
            return false;
        }
        self.take_cell(found.slab, found.part.offset_bytes);
        if let Some(slab) = self.slabs.get_mut(&key) {
            let cell = Cell::new(found.handle, part.size_bytes, found.references);
            slab.put(part.offset_bytes, Cell { before: Before::Unclean, ..cell });
        }
        self.cells.insert(found.handle, (key, part.offset_bytes));
        true
    }

    pub(crate) fn recipe_of(&self, key: SlabKey) -> Option<&Recipe> {
        self.slabs.get(&key)?.new.recipe.as_ref().map(|(recipe, _)| recipe)
    }

    fn set_mapped(&mut self, range: VaRange, handle: VirtualHandle) {
        self.windows.put_item(range, Some(handle));
        if let Some(cell) = self.cell_mut(handle) {
            cell.mapped += 1;
            cell.is_fresh = false;
        }
    }

    /// Records the driver's answer about mapping the slab of `handle` at `mounted` in the window, so that the cell is mapped at
    /// `range`. Returns what is to be taken down.
    pub(crate) fn filled(
        &mut self,
        handle: VirtualHandle,
        range: VaRange,
        (window, mounted): (u64, VaRange),
        is_filled: bool,
    ) -> Ended {
        self.windows.set_under(window, Under::Nothing);
        if !is_filled {
            return self.unmap_item(range.start, Some(handle));
        }
        let Some(found) = self.cell_at(handle) else {
            // Another thread has unmapped the cell and given it back. Its slab may have ended too. So the new mapping goes.
            self.windows.set_under(window, Under::Changing);
            return Ended { mounted: vec![(window, mounted)], ..Ended::default() };
        };
        self.windows.set_under(window, Under::Slab(found.slab, mounted.start.0));
        if let Some(slab) = self.slabs.get_mut(&found.slab) {
            slab.windows.insert(window);
        }
        let left = self.leave_room(window);
        Ended { mounted: left.into_iter().collect(), ..Ended::default() }
    }

    /// Holds the cell for good, with its bytes: a fill of the bytes did not end in time.
    pub(crate) fn late(&mut self, handle: VirtualHandle) {
        if let Some(cell) = self.cell_mut(handle) {
            cell.mapped += 1;
            cell.before = Before::Late;
        }
    }

    /// Records that the old contents of `range` are cleared, or could not be cleared: then the cell is not mapped there. The
    /// slab that the cell belonged to before ends if it has no cells left.
    pub(crate) fn cleared(
        &mut self,
        (before, handle): (SlabKey, VirtualHandle),
        range: VaRange,
        is_clear: bool,
    ) -> Ended {
        let mut ended = self.end_empty(before);
        if is_clear {
            if let Some(cell) = self.cell_mut(handle) {
                cell.before = Before::Nothing;
            }
        } else {
            ended.add(self.unmap_item(range.start, Some(handle)));
        }
        ended
    }

    /// Plans the mapping of an allocation of its own at `range`. In a window the mapping is recorded ([`MapPlan::Done`]), and
    /// [`SlabTable::not_mapped_alone`] removes that record.
    pub(crate) fn map_alone(&mut self, range: VaRange) -> MapPlan {
        if !self.windows.meets_window(range) {
            return MapPlan::StandAlone;
        }
        let window = match self.windows.vacant_window(range) {
            Ok(window) => window,
            Err(plan) => return plan,
        };
        match window.under {
            Under::Changing if self.is_stuck(range.start) => MapPlan::Stuck,
            Under::Changing => MapPlan::Busy,
            Under::Slab(..) => MapPlan::Odd,
            Under::Nothing => {
                self.windows.put_item(range, None);
                MapPlan::Done
            }
        }
    }

    /// Removes the record of a mapping at `range` that the driver has refused, of an allocation that stands alone.
    pub(crate) fn not_mapped_alone(&mut self, range: VaRange) {
        self.windows.take_item(range.start, None);
    }
}

impl Slab {
    /// May other processes hold a former cell in `part`?
    pub(super) fn is_abroad(&self, part: Part) -> bool {
        let before_its_end = self.abroad.range(..part.offset_bytes + part.size_bytes);
        before_its_end
            .into_iter()
            .any(|(offset, size_bytes)| offset + size_bytes > part.offset_bytes)
    }

    /// Returns the cells that have bytes in `part`.
    pub(super) fn cells_in(&self, part: Part) -> impl Iterator<Item = &Cell> {
        let before_its_end = self.cells.range(..part.offset_bytes + part.size_bytes);
        let met = before_its_end
            .filter(move |(offset, cell)| *offset + cell.size_bytes > part.offset_bytes);
        met.map(|(_, cell)| cell)
    }
}

// Unmapping memory.
impl SlabTable {
    /// Removes the mappings inside `range`, which meets a window. Returns the ranges of allocations that stand alone, for their
    /// owner to unmap. `None` if nothing is mapped there, or if `range` cuts a mapping.
    pub(crate) fn unmap(&mut self, range: VaRange) -> Option<(Vec<VaRange>, Ended)> {
        let window = self.windows.window_at(range.start)?;
        let (start, whole) = (window.range.start.0, window.range);
        let met: Vec<(VaRange, Option<VirtualHandle>)> = window
            .items
            .range(..range.end().0)
            .filter(|(at, item)| **at + item.size_bytes > range.start.0)
            .map(|(&at, item)| (VaRange::new(DeviceAddress(at), item.size_bytes), item.cell))
            .collect();
        let is_cut = met.iter().any(|(item, _)| !range.contains(*item));
        if !whole.contains(range) || met.is_empty() || is_cut {
            return None;
        }
        let (mut rows, mut ended) = (Vec::new(), Ended::default());
        for (item, cell) in met {
            if cell.is_none() {
                rows.push(item);
            }
            ended.add(self.unmap_item(item.start, cell));
        }
        ended.mounted.extend(self.leave_room(start));
        Some((rows, ended))
    }

    /// Removes the mapping at `at` of `cell`, or of an allocation of its own, if it is there.
    fn unmap_item(&mut self, at: DeviceAddress, cell: Option<VirtualHandle>) -> Ended {
        let is_taken = self.windows.take_item(at, cell);
        let Some(handle) = cell.filter(|_| is_taken) else { return Ended::default() };
        if let Some(cell) = self.cell_mut(handle) {
            cell.mapped -= 1;
        }
        self.end_unheld(handle)
    }

    /// Takes the slab out of a room in which none of its cells is mapped.
    fn leave_room(&mut self, start: u64) -> Option<(u64, VaRange)> {
        let window = self.windows.get(start)?;
        let Under::Slab(key, _) = window.under else { return None };
        if !window.is_room || !window.items.is_empty() {
            return None;
        }
        let slab = self.slabs.get_mut(&key)?;
        slab.windows.remove(&start);
        let size_bytes = slab.new.size_bytes;
        self.windows.dismount(start, size_bytes)
    }
}

// The contents of a window, and the sums that are kept for it.
impl Window {
    pub(super) fn new(range: VaRange, under: Under, rights: BTreeMap<Location, i32>) -> Self {
        let (spots, items) = (BTreeMap::new(), BTreeMap::new());
        let (is_room, spot_bytes, item_bytes) = (false, 0, 0);
        Self { range, is_room, under, spots, items, spot_bytes, item_bytes, rights }
    }

    /// Records that a caller was given `range`.
    pub(super) fn put_spot(&mut self, range: VaRange) {
        self.spots.insert(range.start.0, range.size_bytes);
        self.spot_bytes += range.size_bytes;
    }

    pub(super) fn take_spot(&mut self, start: DeviceAddress) {
        self.spot_bytes -= self.spots.remove(&start.0).unwrap_or(0);
    }

    /// Records that a caller has mapped a cell, or an allocation that stands alone, in `range`.
    pub(super) fn put_item(&mut self, range: VaRange, cell: Option<VirtualHandle>) {
        let (size_bytes, rights) = (range.size_bytes, BTreeMap::new());
        let before = self.items.insert(range.start.0, Item { size_bytes, cell, rights });
        self.item_bytes += size_bytes;
        self.item_bytes -= before.map_or(0, |before| before.size_bytes);
    }

    pub(super) fn take_item(&mut self, start: DeviceAddress) {
        self.item_bytes -= self.items.remove(&start.0).map_or(0, |item| item.size_bytes);
    }

    /// Returns the bytes of the spots where nothing is mapped.
    pub(super) fn vacant_bytes(&self) -> u64 {
        self.spot_bytes.saturating_sub(self.item_bytes)
    }

    pub(super) fn has_spot_in(&self, part: Part) -> bool {
        let Under::Slab(_, base) = self.under else { return false };
        let range = VaRange::new(DeviceAddress(base + part.offset_bytes), part.size_bytes);
        let before = self.spots.range(..range.end().0).next_back();
        before.is_some_and(|(start, size_bytes)| start + size_bytes > range.start.0)
    }

    pub(super) fn has_item_in(&self, range: VaRange) -> bool {
        let before = self.items.range(..range.end().0).next_back();
        before.is_some_and(|(start, item)| start + item.size_bytes > range.start.0)
    }

    /// Does a single spot hold all of `range`?
    pub(super) fn is_of_spot(&self, range: VaRange) -> bool {
        let under = item_under(&self.spots, range.start.0, |size_bytes| *size_bytes);
        under.is_some_and(|(start, size_bytes)| range.end().0 <= start + size_bytes)
    }
}

impl SlabTable {
    /// Do the stored sums agree with the entries? For assertions.
    pub(super) fn are_sums_right(&self) -> bool {
        let is_slab_right = |slab: &Slab| {
            slab.live_bytes == slab.cells.values().map(|cell| cell.size_bytes).sum::<u64>()
        };
        let is_window_right = |window: &Window| {
            let mapped: u64 = window.items.values().map(|item| item.size_bytes).sum();
            let spots: u64 = window.spots.values().sum();
            (window.spot_bytes, window.item_bytes) == (spots, mapped)
        };
        self.slabs.values().all(is_slab_right) && self.windows.all().all(is_window_right)
    }
}

// Rights.
impl SlabTable {
    /// Plans setting rights on `range`. A device keeps its rights to the slab, whatever is set on a cell.
    pub(crate) fn plan_access(&mut self, range: VaRange, access: &[AccessDesc]) -> AccessPlan {
        if !self.windows.meets_window(range) {
            return AccessPlan::Rows;
        }
        let wrong = AccessPlan::Refused(DriverCode::INVALID_VALUE);
        let Some(window) = self.windows.window_at(range.start) else {
            return wrong;
        };
        let (mut at, mut are_cells) = (range.start.0, true);
        while at < range.end().0 {
            let under = item_under(&window.items, at, |item| item.size_bytes);
            let Some((start, item)) = under else {
                return wrong;
            };
            are_cells &= item.cell.is_some();
            at = start + item.size_bytes;
        }
        let Under::Slab(key, base) = window.under else {
            return AccessPlan::Rows;
        };
        let is_right = |desc: &AccessDesc| {
            matches!(desc.flags, 0 | 1 | 3) && desc.location.as_device().is_some()
        };
        if !are_cells || access.is_empty() || !access.iter().all(is_right) {
            return wrong;
        }
        let held = |desc: &AccessDesc| window.rights.get(&desc.location).copied().unwrap_or(0);
        if access.iter().all(|desc| held(desc) & desc.flags == desc.flags) {
            self.windows.record(range, access);
            return AccessPlan::Done;
        }
        let Some(slab) = self.slabs.get(&key) else {
            return wrong;
        };
        let mounted = VaRange::new(DeviceAddress(base), slab.new.size_bytes);
        AccessPlan::Grant { window: window.range.start.0, mounted }
    }
}
