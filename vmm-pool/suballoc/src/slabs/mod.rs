//! The table of slabs: which small allocations of a library's are neighbours in one large allocation of the pool's.
//!
//! ```text
//!   slab, one row of the ledger     | cell | cell | dead | cell |   tail, never written   |
//!   window, a reservation that it   | spot | spot |      | spot |                         |
//!   is mapped in as a whole
//! ```
//!
//! A *cell* is what one `cuMemCreate` got: a part of a slab, with a handle of its own. A *spot* is what a caller got of one
//! `cuMemAddressReserve`: the cell's own offset in a window of its slab, or the middle of a *room*, a window with nothing in it and
//! so much before and behind the spot that any slab can be mapped with any cell of its at the spot. A slab ends with its last
//! cell. Its bytes are given out once, from the first on, so what a new cell holds nobody has written.
//!
//! Why: the driver takes 20 to 60 us, on the whole machine, for each call about an object, and NCCL has hundreds of 2 MiB a
//! rank. Pause, resume, sharing, budgets and saved contents know only the slab. What bends the rule:
//!
//! * Bytes at a spot whose caller unmaps and releases, and maps new memory at the same addresses (`ncclCommSuspend`), are
//!   cleared and given out again. If another process may hold the old cell, that waits until a communicator is suspended.
//! * An importer maps a slab once, in a window of its own. The driver has rights of a whole window; each cell there is *said*
//!   to have what was set on it.
//! * A cell that nobody has mapped or shared has no bytes, and may become an allocation of its own. What `ncclMemAlloc` makes
//!   stands alone from the start, because its caller may map it a second time.
//! * Nothing comes to a slab that is set aside. One that the driver does not unmap keeps its window, and is offered again.
//!
//! Like the ledger, it calls nobody. [`crate::cells`] makes the driver agree.
//!
//! # Invariants
//! 1. Cells of a slab do not overlap, and end within it. A cell's handle is in the table as long as it lives, and both
//!    ways.
//! 2. What is mapped in a window lies in a spot, and is all of cells of the slab that the window holds, each at its offset there, or
//!    all of allocations that stand alone, where it holds no slab. The spots of a window with a slab lie inside the slab.
//! 3. A cell lives while it has a reference or is mapped. It never moves once it was mapped or shared.
//! 4. While the driver is asked about a window, it is [`Under::Changing`]: a call that wants something of it waits.
//! 5. An allocation of its own never becomes a cell.

mod addresses;
mod living;
mod windows;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use vmm_pool::driver::{
    ALLOCATION_KIND_PINNED, AllocationProp, DeviceAddress, DriverCode, HANDLE_TYPE_POSIX_FD,
    Location, VaRange,
};
use vmm_pool::{AllocationId, Class, Contents, LIBRARY_TAGS, Part, SlabTotals, VirtualHandle};

use self::windows::Windows;

/// Larger allocations stand alone.
pub(crate) const CELL_BYTES_MAX: u64 = 32 << 20;
/// The first slab, and the largest.
const SLAB_BYTES_MIN: u64 = 16 << 20;
const SLAB_BYTES_MAX: u64 = 128 << 20;
/// A new slab is this part of what lives, and this part of what lives may be dead.
const SHARE: u64 = 4;
/// Rooms are for reservations of a multiple of this; the driver judges others.
const ROOM_UNIT_BYTES: u64 = 2 << 20;
/// The bytes of a room before its spot, and as many from the start of the spot to the end of the room.
const ROOM_BYTES: u64 = SLAB_BYTES_MAX;

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

/// The facts about a slab that are known when it is made.
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
    /// The offset at which the next cell begins.
    next_bytes: u64,
    /// By offset.
    cells: BTreeMap<u64, Cell>,
    /// The sum of the sizes of the cells.
    live_bytes: u64,
    /// Starts of the windows that it is mapped in.
    windows: BTreeSet<u64>,
    /// Former places of cells that other processes may still hold: sizes, by offset.
    abroad: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Cell {
    handle: VirtualHandle,
    size_bytes: u64,
    references: u32,
    /// The number of the cell's mappings.
    mapped: u32,
    /// Nobody can have written it.
    is_fresh: bool,
    /// Other processes may have heard of it.
    is_shared: bool,
    before: Before,
}

/// The contents of a cell's bytes from the cell that had them before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// There are none.
    Nothing,
    /// They are not cleared yet.
    Unclean,
    /// A fill of them did not end in time, and may come at any moment: the bytes are nobody's any more.
    Late,
}

impl Cell {
    fn new(handle: VirtualHandle, size_bytes: u64, references: u32) -> Self {
        let (mapped, is_fresh, is_shared, before) = (0, false, false, Before::Nothing);
        Self { handle, size_bytes, references, mapped, is_fresh, is_shared, before }
    }

    /// May it lie elsewhere from now on? It has no bytes, and nobody sees where it is.
    fn can_leave(&self) -> bool {
        self.is_fresh && self.mapped == 0 && !self.is_shared
    }
}

/// The state of a window: the slab in it, which the driver has mapped there as a whole, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Under {
    /// No slab: allocations that stand alone may be mapped in its spots, or a slab may come.
    Nothing,
    /// This slab, which begins at this address.
    Slab(SlabKey, u64),
    /// The driver is being asked.
    Changing,
}

#[derive(Debug)]
struct Window {
    range: VaRange,
    /// Its slab leaves with what is last unmapped there.
    is_room: bool,
    under: Under,
    /// Ranges that callers were given: sizes, by start address.
    spots: BTreeMap<u64, u64>,
    /// Cells and allocations that callers have mapped, by start address.
    items: BTreeMap<u64, Item>,
    /// The sum of the sizes in `spots`; `item_bytes` is that of `items`.
    spot_bytes: u64,
    item_bytes: u64,
    /// The rights that are set on the whole slab there.
    rights: BTreeMap<Location, i32>,
}

#[derive(Debug)]
struct Item {
    size_bytes: u64,
    /// None of an allocation that stands alone.
    cell: Option<VirtualHandle>,
    /// The rights that callers have set on the item, if it is a cell.
    rights: BTreeMap<Location, i32>,
}

/// The object that a caller's handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandsFor {
    /// A part of a slab.
    Cell(CellAt),
    /// A row of the ledger: this one.
    Row(VirtualHandle),
}

/// The place and the state of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellAt {
    pub(crate) handle: VirtualHandle,
    pub(crate) slab: SlabKey,
    /// The slab's row.
    pub(crate) row: VirtualHandle,
    pub(crate) part: Part,
    pub(crate) prop: AllocationProp,
    pub(crate) references: u32,
    /// It has no bytes, and nobody sees where it is: it may lie elsewhere, or be an allocation of its own.
    pub(crate) can_leave: bool,
    /// The same, and nobody has been told an address of it.
    pub(crate) is_unplaced: bool,
}

/// The kind of new memory that a caller is to be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// A cell of one of these slabs, in this order, or of a new one of this size.
    Cell { slab_bytes: u64 },
    /// An allocation of its own.
    Alone,
}

/// The occupant that answers for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// No window is there.
    Elsewhere,
    /// A cell, mapped here.
    Cell { range: VaRange, handle: VirtualHandle },
    /// An allocation of its own, mapped in a window that its slab has left.
    Alone,
    /// A window in which the caller has nothing mapped at this address.
    Nothing,
}

/// The steps that a mapping takes, or the obstacle to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapPlan {
    /// Nothing: it is recorded.
    Done,
    /// The slab has to be mapped at `mounted` in the window that begins at `window`; then [`SlabTable::filled`].
    Fill { row: VirtualHandle, window: u64, mounted: VaRange },
    /// The memory that was there before is to be cleared; then [`SlabTable::cleared`].
    Clear,
    /// It is, or is to be, an allocation of its own, and is mapped as one.
    StandAlone,
    /// Somebody changes what is there: ask again.
    Busy,
    /// The driver would not unmap what was there: it is to be offered that again.
    Stuck,
    /// The driver would not either.
    Wrong,
    /// It cannot be with slabs.
    Odd,
}

/// The mappings, the row and the addresses that are to be taken down.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// The ranges at which slabs leave windows, each with the start of its window.
    pub(crate) mounted: Vec<(u64, VaRange)>,
    /// The row of a slab that nobody has any more.
    pub(crate) row: Option<VirtualHandle>,
    /// Addresses that nobody has any more.
    pub(crate) windows: Vec<VaRange>,
}

impl Ended {
    fn add(&mut self, other: Self) {
        self.mounted.extend(other.mounted);
        self.windows.extend(other.windows);
        debug_assert!(self.row.is_none() || other.row.is_none(), "two slabs end together");
        self.row = self.row.or(other.row);
    }
}

/// The steps that setting rights on a range takes, or the reason why it cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessPlan {
    /// Nothing: they are recorded.
    Done,
    /// They are set on what is mapped here, in the window that begins at `window`; then [`Windows::granted`].
    Grant { window: u64, mounted: VaRange },
    /// They are set where they were requested, on allocations that stand alone.
    Rows,
    /// It cannot be, for this reason.
    Refused(DriverCode),
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct SlabTable {
    is_on: bool,
    /// Other processes are known to have given up what is gone here.
    is_home: bool,
    last_key: u64,
    last_cell: u64,
    slabs: BTreeMap<SlabKey, Slab>,
    pub(crate) windows: Windows,
    cells: HashMap<VirtualHandle, (SlabKey, u64)>,
    /// Cells that have become allocations of their own: the row behind each handle.
    pub(crate) alone: HashMap<VirtualHandle, VirtualHandle>,
    /// The cell that each thread is likely to want addresses for next.
    aims: HashMap<ThreadId, VirtualHandle>,
    /// Takedowns that the driver has refused.
    pub(crate) refused: Vec<Ended>,
}

/// The table of a process, and what it says to callers. Its lock is a leaf.
#[derive(Debug, Default)]
pub struct Slabs {
    table: Mutex<SlabTable>,
    /// Something that the table says is busy has been settled.
    pub(crate) changed: Condvar,
}

impl Slabs {
    /// Not to be taken under the ledger's lock, nor that under this one. Poisoning is ignored, as the ledger's is.
    pub(crate) fn table(&self) -> MutexGuard<'_, SlabTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Are small allocations of libraries' own made as parts of slabs from now on? Those that are stay so. Off at first.
    /// Imports are understood either way.
    pub fn use_slabs(&self, are_used: bool) {
        self.table().is_on = are_used;
    }

    /// See [`Slabs::use_slabs`].
    pub fn uses_slabs(&self) -> bool {
        self.table().is_on
    }

    /// Call this if all processes give up memory that they share by parts of slabs, before any makes it again at the same addresses, as a
    /// communicator does that is suspended. Without that such addresses take no new memory, for who held the old one would see it.
    pub fn take_shared_addresses_again(&self) {
        self.table().is_home = true;
    }
}

// What is asked.
impl SlabTable {
    /// Returns the object that `handle` stands for.
    pub(crate) fn held(&self, handle: VirtualHandle) -> StandsFor {
        let handle = self.alone.get(&handle).copied().unwrap_or(handle);
        self.cell_at(handle).map_or(StandsFor::Row(handle), StandsFor::Cell)
    }

    fn cell_at(&self, handle: VirtualHandle) -> Option<CellAt> {
        let &(key, offset_bytes) = self.cells.get(&handle)?;
        let slab = self.slabs.get(&key)?;
        let cell = slab.cells.get(&offset_bytes)?;
        let part = Part { offset_bytes, size_bytes: cell.size_bytes };
        let can_leave = cell.can_leave() && slab.new.recipe.is_some();
        Some(CellAt {
            handle,
            slab: key,
            row: slab.new.row,
            part,
            prop: slab.new.prop,
            references: cell.references,
            can_leave,
            is_unplaced: can_leave && !self.has_spot_in(slab, part),
        })
    }

    /// The windows that the slab is mapped in.
    fn windows_of<'a>(&'a self, slab: &'a Slab) -> impl Iterator<Item = &'a Window> {
        slab.windows.iter().filter_map(|start| self.windows.get(*start))
    }

    /// Has anybody been told addresses of this part?
    fn has_spot_in(&self, slab: &Slab, part: Part) -> bool {
        self.windows_of(slab).any(|window| window.has_spot_in(part))
    }

    /// The row of the slab of ours that is mapped at `address`.
    pub(crate) fn row_under(&self, address: DeviceAddress) -> Option<VirtualHandle> {
        let Under::Slab(key, _) = self.windows.window_at(address)?.under else { return None };
        let slab = self.slabs.get(&key).filter(|slab| slab.new.recipe.is_some())?;
        Some(slab.new.row)
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
            let live_bytes = slab.live_bytes;
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

// What is to leave a window.
impl SlabTable {
    /// Other processes may hear of the cell from now on.
    pub(crate) fn share(&mut self, handle: VirtualHandle) {
        if let Some(cell) = self.cell_mut(handle) {
            cell.is_shared = true;
        }
    }

    /// The cell is an allocation of its own from now on: `row`, which has as many references. What its slab needs no more comes out.
    /// None, and nothing has changed, if the cell is not as it was found.
    pub(crate) fn stand_alone(&mut self, found: CellAt, row: VirtualHandle) -> Option<Ended> {
        let is_as_found = self.cell_at(found.handle).is_some_and(|now| {
            now.can_leave && (now.slab, now.references) == (found.slab, found.references)
        });
        if !is_as_found {
            return None;
        }
        self.take_cell(found.slab, found.part.offset_bytes);
        self.alone.insert(found.handle, row);
        Some(self.end_empty(found.slab))
    }

    /// Is something mapped still in the window at `address` that the driver would not take back?
    pub(crate) fn is_stuck(&self, address: DeviceAddress) -> bool {
        let window = self.windows.window_at(address).map(|window| window.range.start.0);
        let mut left = self.refused.iter().flat_map(|ended| &ended.mounted);
        window.is_some_and(|window| left.any(|(start, _)| *start == window))
    }
}

/// Finds the entry that reaches `at`: it begins at or before `at`, and `size_of` gives its length.
fn item_under<T>(
    all: &BTreeMap<u64, T>,
    at: u64,
    size_of: impl Fn(&T) -> u64,
) -> Option<(u64, &T)> {
    let (&start, found) = all.range(..=at).next_back()?;
    (at - start < size_of(found)).then_some((start, found))
}

#[cfg(test)]
mod tests;
