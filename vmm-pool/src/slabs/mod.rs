//! The table of slabs: which small allocations of a library's are neighbours in one large allocation of the pool's.
//!
//! ```text
//!   slab, one row of the ledger     | cell | cell | dead | cell |   tail, never written   |
//!   window, a reservation that it   | spot | spot |      | spot |                         |
//!   is mapped in as a whole
//! ```
//!
//! A *cell* is what one `cuMemCreate` got: a part of a slab, with a handle of its own. A *spot* is where a caller has been
//! told that the cell's addresses are: the cell's own offset in a window of its slab. A slab ends with its last cell. Its bytes
//! are given out once, from the first on, so what a new cell holds nobody has written.
//!
//! Like the ledger, it calls nobody. [`crate::cells`] makes the driver agree.
//!
//! # Invariants
//! 1. Cells of a slab do not overlap, and end within it. A cell's handle is in the table as long as it lives, and both
//!    ways.
//! 2. A window is as large as its slab. What a spot holds of a cell lies at that cell's offset.
//! 3. A cell lives while it has a reference, or is mapped at a spot.

mod addresses;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread::ThreadId;

use crate::driver::{
    ALLOCATION_KIND_PINNED, AccessDesc, AllocationProp, DeviceAddress, DriverCode,
    HANDLE_TYPE_POSIX_FD, Location, VaRange,
};
use crate::ledger::{Class, LIBRARY_TAGS};
use crate::report::{Contents, SlabTotals};
use crate::{AllocationId, VirtualHandle};

/// Larger allocations stand alone.
pub(crate) const CELL_BYTES_MAX: u64 = 32 << 20;
/// The first slab, and the largest.
const SLAB_BYTES_MIN: u64 = 16 << 20;
const SLAB_BYTES_MAX: u64 = 128 << 20;
/// A new slab is this part of what lives, and this part of what lives may be dead.
const SHARE: u64 = 4;

/// Cells of one slab are alike in this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    pub(crate) prop: AllocationProp,
    pub(crate) class: Class,
}

impl Recipe {
    /// May memory like this be a cell?
    pub(crate) fn is_for_cells(&self, size_bytes: u64) -> bool {
        let Self { prop, class } = self;
        LIBRARY_TAGS.contains(&class.tag.as_str())
            && class.contents == Contents::Keep
            && prop.kind == ALLOCATION_KIND_PINNED
            && prop.requested_handle_types == HANDLE_TYPE_POSIX_FD
            && prop.location.as_device().is_some()
            && (1..=CELL_BYTES_MAX).contains(&size_bytes)
    }
}

/// Names a slab in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlabKey(u64);

/// A part of an allocation, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins in the allocation.
    pub offset_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
}

impl Part {
    fn end(self) -> Option<u64> {
        self.offset_bytes.checked_add(self.size_bytes)
    }

    fn meets(self, other: Self) -> bool {
        self.offset_bytes < other.offset_bytes + other.size_bytes
            && other.offset_bytes < self.offset_bytes + self.size_bytes
    }

    /// It, where it begins at `start`.
    fn at(self, start: DeviceAddress) -> VaRange {
        VaRange::new(DeviceAddress(start.0 + self.offset_bytes), self.size_bytes)
    }
}

/// What is known of a slab when it is made.
#[derive(Debug)]
pub(crate) struct NewSlab {
    pub(crate) row: VirtualHandle,
    pub(crate) id: AllocationId,
    pub(crate) size_bytes: u64,
    pub(crate) prop: AllocationProp,
    /// For one that cells are made of here: what they are alike in, and their unit.
    pub(crate) recipe: Option<(Recipe, u64)>,
}

#[derive(Debug)]
struct Slab {
    new: NewSlab,
    /// Where the next cell begins.
    next_bytes: u64,
    /// By offset.
    cells: BTreeMap<u64, Cell>,
    /// Starts of its windows.
    windows: BTreeSet<u64>,
}

#[derive(Debug)]
struct Cell {
    handle: VirtualHandle,
    size_bytes: u64,
    references: u32,
    /// At how many spots it is mapped.
    mapped: u32,
    /// Nobody can have written it, and no other process has heard of it.
    is_fresh: bool,
}

#[derive(Debug)]
struct Window {
    range: VaRange,
    /// What is mapped there. None where its slab has ended, and callers still have spots.
    slab: Option<SlabKey>,
    /// By offset.
    spots: BTreeMap<u64, Spot>,
    /// What is set on all of it.
    rights: BTreeMap<Location, i32>,
}

#[derive(Debug)]
struct Spot {
    size_bytes: u64,
    holds: Holds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    Cell(VirtualHandle),
    /// An allocation that stands alone, in a window without a slab.
    Alone,
}

/// What a caller's handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// A part of a slab.
    Cell(CellAt),
    /// A row of the ledger: this one.
    Row(VirtualHandle),
}

/// Where a cell lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellAt {
    pub(crate) handle: VirtualHandle,
    pub(crate) slab: SlabKey,
    /// The slab's row.
    pub(crate) row: VirtualHandle,
    pub(crate) part: Part,
    pub(crate) prop: AllocationProp,
    /// Nobody can have written it, no other process has heard of it, and nobody has been told an address of it.
    pub(crate) is_unplaced: bool,
}

/// What a caller is to be given for new memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// A cell of one of these slabs, in this order, or of a new one of this size.
    Cell { slab_bytes: u64 },
    /// An allocation of its own.
    Alone,
}

/// Who answers for a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// No window is there.
    Elsewhere,
    /// A cell, mapped here.
    Cell { range: VaRange, handle: VirtualHandle },
    /// An allocation of its own, mapped in a window that its slab has left.
    Alone,
    /// A window in which the caller has nothing mapped at this address.
    Nothing,
}

/// What a mapping of a cell takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapPlan {
    /// Nothing: it is recorded.
    Done,
    /// The slab has to be mapped in this window, which has none; then it is asked again.
    Fill { row: VirtualHandle, window: VaRange },
    /// The cell can be an allocation of its own, and is mapped as one.
    StandAlone,
    /// The cell takes the place of one that is gone, at these addresses, which have to be cleared.
    TakeOver { range: VaRange },
    /// It cannot be.
    Refused,
}

/// What is to be taken down: all that the slab had, where nobody has it any more.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// The slab's row, and where it was mapped.
    pub(crate) slab: Option<(VirtualHandle, Vec<VaRange>)>,
    /// Addresses that nobody has any more.
    pub(crate) windows: Vec<VaRange>,
}

impl Ended {
    /// Is there nothing to take down?
    pub(crate) fn is_nothing(&self) -> bool {
        self.slab.is_none() && self.windows.is_empty()
    }
}

/// What rights on a range take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessPlan {
    /// All have them.
    Done,
    /// They are set on this window.
    Grant(VaRange),
    /// They are set where they were asked for, on allocations that stand alone.
    Rows,
    /// It cannot be, for this reason.
    Refused(DriverCode),
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Table {
    is_on: bool,
    last_key: u64,
    last_cell: u64,
    slabs: BTreeMap<SlabKey, Slab>,
    /// By start address.
    windows: BTreeMap<u64, Window>,
    cells: HashMap<VirtualHandle, (SlabKey, u64)>,
    /// Cells that have become allocations of their own: the row behind each handle.
    alone: HashMap<VirtualHandle, VirtualHandle>,
    /// What each thread is likely to want addresses for next.
    aims: HashMap<ThreadId, VirtualHandle>,
    /// What the driver would not take back.
    refused: Vec<Ended>,
}

// What is asked.
impl Table {
    /// Are cells made here?
    pub(crate) fn set_on(&mut self, is_on: bool) {
        self.is_on = is_on;
    }

    /// What `handle` stands for.
    pub(crate) fn held(&self, handle: VirtualHandle) -> Held {
        let handle = self.alone.get(&handle).copied().unwrap_or(handle);
        self.cell_at(handle).map_or(Held::Row(handle), Held::Cell)
    }

    fn cell_at(&self, handle: VirtualHandle) -> Option<CellAt> {
        let &(key, offset_bytes) = self.cells.get(&handle)?;
        let slab = self.slabs.get(&key)?;
        let cell = slab.cells.get(&offset_bytes)?;
        let part = Part { offset_bytes, size_bytes: cell.size_bytes };
        let has_spot = self.spots_of(slab).any(|(offset, _)| offset == offset_bytes);
        Some(CellAt {
            handle,
            slab: key,
            row: slab.new.row,
            part,
            prop: slab.new.prop,
            is_unplaced: cell.is_fresh && slab.new.recipe.is_some() && !has_spot,
        })
    }

    fn spots_of<'a>(&'a self, slab: &'a Slab) -> impl Iterator<Item = (u64, &'a Spot)> {
        let windows = slab.windows.iter().filter_map(|start| self.windows.get(start));
        windows.flat_map(|window| window.spots.iter().map(|(&offset, spot)| (offset, spot)))
    }

    fn window_at(&self, address: DeviceAddress) -> Option<&Window> {
        let (_, window) = self.windows.range(..=address.0).next_back()?;
        window.range.contains_address(address).then_some(window)
    }

    /// Does `range` meet a window?
    pub(crate) fn meets_window(&self, range: VaRange) -> bool {
        let before_its_end = self.windows.range(..range.end().0).next_back();
        before_its_end.is_some_and(|(_, window)| range.start < window.range.end())
    }

    /// Who answers for `address`.
    pub(crate) fn place(&self, address: DeviceAddress) -> Place {
        let Some(window) = self.window_at(address) else {
            return Place::Elsewhere;
        };
        let offset = address.0 - window.range.start.0;
        let before = window.spots.range(..=offset).next_back();
        let Some((&at, spot)) = before.filter(|(at, spot)| offset - **at < spot.size_bytes) else {
            return Place::Nothing;
        };
        let range = window.range.part(&(at..at + spot.size_bytes));
        match spot.holds {
            Holds::Nothing => Place::Nothing,
            Holds::Cell(handle) => Place::Cell { range, handle },
            Holds::Alone => Place::Alone,
        }
    }

    /// The slab of this identity, with its row.
    pub(crate) fn slab_of(&self, id: AllocationId) -> Option<(SlabKey, VirtualHandle)> {
        let found = self.slabs.iter().find(|(_, slab)| slab.new.id == id);
        found.map(|(&key, slab)| (key, slab.new.row))
    }

    /// Bytes and numbers.
    pub(crate) fn totals(&self) -> SlabTotals {
        let mut totals = SlabTotals::default();
        for slab in self.slabs.values() {
            let cells = slab.cells.len() as u64;
            if slab.new.recipe.is_none() {
                totals.imported_slabs += 1;
                totals.imported_cells += cells;
                continue;
            }
            let live_bytes = slab.live_bytes();
            totals.slabs += 1;
            totals.cells += cells;
            totals.slab_bytes += slab.new.size_bytes;
            totals.live_bytes += live_bytes;
            totals.dead_bytes += slab.next_bytes - live_bytes;
            totals.tail_bytes += slab.new.size_bytes - slab.next_bytes;
        }
        totals
    }
}

impl Slab {
    fn live_bytes(&self) -> u64 {
        self.cells.values().map(|cell| cell.size_bytes).sum()
    }

    fn is_of(&self, recipe: &Recipe) -> bool {
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

// Cells come and go.
impl Table {
    /// What a caller that asks for memory is to be given.
    pub(crate) fn wanted(&self, size_bytes: u64, recipe: &Recipe) -> Wanted {
        if !self.is_on || !recipe.is_for_cells(size_bytes) {
            return Wanted::Alone;
        }
        let (mut live_bytes, mut dead_bytes) = (0, 0);
        for slab in self.slabs.values().filter(|slab| slab.is_of(recipe)) {
            live_bytes += slab.live_bytes();
            // Where callers keep the addresses of what is gone, they mean to come back.
            let kept = slab.windows.iter().filter_map(|start| self.windows.get(start));
            let kept_bytes = kept
                .flat_map(|window| window.spots.values())
                .filter(|spot| spot.holds == Holds::Nothing)
                .map(|spot| spot.size_bytes);
            dead_bytes += (slab.next_bytes - slab.live_bytes()).saturating_sub(kept_bytes.sum());
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

    /// The slabs that have room for such a cell, with their rows.
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
        self.slabs.insert(key, Slab { new, next_bytes, cells, windows });
        let _lives = self.add_window(key, window, rights);
        key
    }

    /// The slab is mapped at `range` too. False when it has ended.
    pub(crate) fn add_window(
        &mut self,
        key: SlabKey,
        range: VaRange,
        rights: &[AccessDesc],
    ) -> bool {
        let Some(slab) = self.slabs.get_mut(&key) else {
            return false;
        };
        slab.windows.insert(range.start.0);
        let rights: BTreeMap<_, _> =
            rights.iter().map(|right| (right.location, right.flags)).collect();
        let spots = self.windows.remove(&range.start.0).map(|window| window.spots);
        let spots = spots.unwrap_or_default();
        self.windows.insert(range.start.0, Window { range, slab: Some(key), spots, rights });
        true
    }

    fn add_cell(&mut self, key: SlabKey, part: Part, is_fresh: bool) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key)?;
        self.last_cell += 1;
        let handle = VirtualHandle::of_cell(self.last_cell);
        let size_bytes = part.size_bytes;
        let cell = Cell { handle, size_bytes, references: 1, mapped: 0, is_fresh };
        slab.cells.insert(part.offset_bytes, cell);
        self.cells.insert(handle, (key, part.offset_bytes));
        Some(handle)
    }

    /// The next bytes of a slab as a new cell, where there is room still.
    pub(crate) fn carve(&mut self, key: SlabKey, size_bytes: u64) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key).filter(|slab| slab.has_room(size_bytes))?;
        let part = Part { offset_bytes: slab.next_bytes, size_bytes };
        slab.next_bytes += size_bytes;
        self.add_cell(key, part, true)
    }

    /// One reference more to the cell at `part` of a slab. One that nobody here has held, or nobody holds any more,
    /// is made. None where no cell can be there.
    pub(crate) fn hold_part(&mut self, key: SlabKey, part: Part) -> Option<VirtualHandle> {
        let slab = self.slabs.get_mut(&key)?;
        if let Some(cell) = slab.cells.get_mut(&part.offset_bytes) {
            if cell.size_bytes != part.size_bytes {
                return None;
            }
            cell.references += 1;
            return Some(cell.handle);
        }
        let end = part.end().filter(|end| part.size_bytes > 0 && *end <= slab.new.size_bytes)?;
        let is_given_out = slab.new.recipe.is_none() || end <= slab.next_bytes;
        let mut others = slab
            .cells
            .iter()
            .map(|(&offset_bytes, cell)| Part { offset_bytes, size_bytes: cell.size_bytes });
        if !is_given_out || others.any(|other| other.meets(part)) {
            return None;
        }
        drop(others);
        self.add_cell(key, part, false)
    }

    /// One reference more to what is mapped at `address`.
    pub(crate) fn retain_at(&mut self, address: DeviceAddress) -> Option<VirtualHandle> {
        let Place::Cell { handle, .. } = self.place(address) else { return None };
        self.cell_mut(handle)?.references += 1;
        Some(handle)
    }

    fn cell_mut(&mut self, handle: VirtualHandle) -> Option<&mut Cell> {
        let (key, offset) = self.cells.get(&handle)?;
        self.slabs.get_mut(key)?.cells.get_mut(offset)
    }

    /// One reference less. None when there was none.
    pub(crate) fn release(&mut self, handle: VirtualHandle) -> Option<Ended> {
        let cell = self.cell_mut(handle).filter(|cell| cell.references > 0)?;
        cell.references -= 1;
        Some(self.end_unheld(handle))
    }

    /// The cell ends where nothing holds it, and its slab with the last.
    fn end_unheld(&mut self, handle: VirtualHandle) -> Ended {
        let is_held = self.cell_mut(handle).is_none_or(|cell| cell.references + cell.mapped > 0);
        let place = self.cells.get(&handle).copied();
        let Some((key, offset)) = place.filter(|_| !is_held) else {
            return Ended::default();
        };
        self.take_cell(key, offset);
        self.end_empty(key)
    }

    fn take_cell(&mut self, key: SlabKey, offset: u64) {
        let Some(slab) = self.slabs.get_mut(&key) else { return };
        let Some(cell) = slab.cells.remove(&offset) else { return };
        self.cells.remove(&cell.handle);
        self.aims.retain(|_, aim| *aim != cell.handle);
        // Bytes that nobody was told an address of, or has written, are given out again.
        let is_last = offset + cell.size_bytes == slab.next_bytes;
        let slab = &self.slabs[&key];
        let has_spot = self.spots_of(slab).any(|(at, _)| at == offset);
        if cell.is_fresh
            && is_last
            && !has_spot
            && let Some(slab) = self.slabs.get_mut(&key)
        {
            slab.next_bytes = offset;
        }
    }

    /// A slab without cells ends. Windows in which callers have spots stay, empty.
    pub(crate) fn end_empty(&mut self, key: SlabKey) -> Ended {
        if self.slabs.get(&key).is_none_or(|slab| !slab.cells.is_empty()) {
            return Ended::default();
        }
        let Some(slab) = self.slabs.remove(&key) else {
            return Ended::default();
        };
        let (mut mapped, mut windows) = (Vec::new(), Vec::new());
        for start in slab.windows {
            let Some(window) = self.windows.get_mut(&start) else { continue };
            mapped.push(window.range);
            window.slab = None;
            window.rights.clear();
            if window.spots.is_empty() {
                windows.push(window.range);
                self.windows.remove(&start);
            }
        }
        Ended { slab: Some((slab.new.row, mapped)), windows }
    }

    /// Other processes may hear of the cell from now on.
    pub(crate) fn shared(&mut self, handle: VirtualHandle) {
        if let Some(cell) = self.cell_mut(handle) {
            cell.is_fresh = false;
        }
    }

    /// The cell is an allocation of its own from now on: `row`. None when it is not unplaced any more. What its slab needs no
    /// more comes out.
    pub(crate) fn stand_alone(
        &mut self,
        handle: VirtualHandle,
        row: VirtualHandle,
    ) -> Option<Ended> {
        let found = self.cell_at(handle)?;
        let is_fresh = self.cell_mut(handle).is_some_and(|cell| cell.is_fresh);
        if !is_fresh {
            return None;
        }
        self.take_cell(found.slab, found.part.offset_bytes);
        self.alone.insert(handle, row);
        Some(self.end_empty(found.slab))
    }

    /// What the driver would not take back, for another try.
    pub(crate) fn take_refused(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.refused)
    }

    /// The driver would not take it back.
    pub(crate) fn keep_refused(&mut self, ended: Ended) {
        self.refused.push(ended);
    }

    /// Forgets handles whose rows are not among the living.
    pub(crate) fn forget_alone(&mut self, lives: impl Fn(VirtualHandle) -> bool) {
        let cells = &self.cells;
        self.alone.retain(|_, row| lives(*row) || cells.contains_key(row));
    }
}

impl Window {
    fn has_spot_in(&self, part: Part) -> bool {
        self.spots.iter().any(|(&offset_bytes, spot)| {
            part.meets(Part { offset_bytes, size_bytes: spot.size_bytes })
        })
    }
}

#[cfg(test)]
mod tests;
