//! The table of slabs: the small allocations of a library that are neighbours in one large allocation of the pool.
//!
//! ```text
//!   slab, one row of the ledger     | cell | cell | dead | cell |   tail, never written   |
//!   window, a reservation that it   | spot | spot |      | spot |                         |
//!   is mapped in as a whole
//! ```
//!
//! A *cell* is the memory of one `cuMemCreate`: a part of a slab, with a handle of its own. A *spot* is the addresses of one
//! `cuMemAddressReserve`. It is the cell's own offset in a window of its slab, or the middle of a *room*. A room is a window
//! with nothing in it. It has so much before and behind the spot that any slab can be mapped with any of its cells at the spot.
//! A slab ends with its last cell. Its bytes are given out once, from the first on, so nobody has written the contents of a new
//! cell.
//!
//! Why: the driver takes 20 to 60 us, on the whole machine, for each call about an object, and NCCL has hundreds of objects of
//! 2 MiB a rank. Pause, resume, sharing, budgets and saved contents know only the slab. The exceptions:
//!
//! * A caller may unmap and release its memory at a spot, and map new memory at the same addresses (`ncclCommSuspend`). The
//!   bytes there are cleared and given out again. If another process may hold the old cell, that waits until a communicator is
//!   suspended.
//! * An importer maps a slab once, in a window of its own. The driver has rights for a whole window. Callers see for each cell
//!   there the rights that were set on it.
//! * A cell that nobody has mapped or shared has no contents, and may become an allocation of its own. Memory of `ncclMemAlloc`
//!   stands alone from the start, because its caller may map it a second time.
//! * A slab that is set aside receives nothing new. A slab that the driver does not unmap keeps its window, and is offered
//!   again.
//!
//! Like the ledger, the table calls nobody. [`crate::cells`] makes the driver agree with the table.
//!
//! # Invariants
//! 1. Cells of a slab do not overlap, and end within it. While a cell lives, the table finds the cell by its handle, and the
//!    handle by the cell.
//! 2. Each mapping in a window is inside a spot. If the window holds a slab, all mappings are of cells of that slab, each at its
//!    offset there. Otherwise all are of allocations that stand alone. The spots of a window with a slab are inside the slab.
//! 3. A cell lives while it has a reference or is mapped. It never moves once it was mapped or shared.
//! 4. During a driver call about a window, the window is [`Under::Changing`]: other calls about the window wait.
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

/// The largest cell. Larger allocations stand alone.
pub(crate) const CELL_BYTES_MAX: u64 = 32 << 20;
/// The size of the first slab, and the largest size.
const SLAB_BYTES_MIN: u64 = 16 << 20;
const SLAB_BYTES_MAX: u64 = 128 << 20;
/// A new slab is this fraction of the live bytes, and this fraction of the live bytes may be dead.
const SHARE: u64 = 4;
/// Rooms are for reservations of a multiple of this; the driver decides about others.
const ROOM_UNIT_BYTES: u64 = 2 << 20;
/// The bytes of a room before its spot, and as many from the start of the spot to the end of the room.
const ROOM_BYTES: u64 = SLAB_BYTES_MAX;

/// The properties that all cells of a slab share.
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

/// The name of a slab in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlabKey(u64);

/// The facts about a slab that are known when it is made.
#[derive(Debug)]
pub(crate) struct NewSlab {
    pub(crate) row: VirtualHandle,
    pub(crate) id: AllocationId,
    pub(crate) size_bytes: u64,
    pub(crate) prop: AllocationProp,
    /// For a slab whose cells are made here: the properties that its cells share, and their unit.
    pub(crate) recipe: Option<(Recipe, u64)>,
}

#[derive(Debug)]
struct Slab {
    new: NewSlab,
    /// The offset at which the next cell begins.
    next_bytes: u64,
    /// The cells by offset.
    cells: BTreeMap<u64, Cell>,
    /// The sum of the sizes of the cells.
    live_bytes: u64,
    /// The starts of the windows that the slab is mapped in.
    windows: BTreeSet<u64>,
    /// Former places of cells that other processes may still hold: offset to size.
    abroad: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Cell {
    handle: VirtualHandle,
    size_bytes: u64,
    references: u32,
    /// The number of the cell's mappings.
    mapped: u32,
    /// Nobody can have written the cell.
    is_fresh: bool,
    /// Other processes may know of the cell.
    is_shared: bool,
    before: Before,
}

/// The contents that a former cell has left in the bytes of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// There are none.
    Nothing,
    /// They are not cleared yet.
    Unclean,
    /// A fill of the bytes did not end in time, and may happen at any moment: the bytes belong to nobody any more.
    Late,
}

impl Cell {
    fn new(handle: VirtualHandle, size_bytes: u64, references: u32) -> Self {
        let (mapped, is_fresh, is_shared, before) = (0, false, false, Before::Nothing);
        Self { handle, size_bytes, references, mapped, is_fresh, is_shared, before }
    }

    /// May the cell move? It has no contents, and nobody sees where it is.
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
    /// A driver call about the window is under way.
    Changing,
}

#[derive(Debug)]
struct Window {
    range: VaRange,
    /// Is it a room? Then its slab leaves with the last unmapping there.
    is_room: bool,
    under: Under,
    /// The ranges that callers were given: start address to size.
    spots: BTreeMap<u64, u64>,
    /// Cells and allocations that callers have mapped, by start address.
    items: BTreeMap<u64, Item>,
    /// The sum of the sizes in `spots`. `item_bytes` is the sum of the sizes in `items`.
    spot_bytes: u64,
    item_bytes: u64,
    /// The rights that are set on the whole slab there.
    rights: BTreeMap<Location, i32>,
}

#[derive(Debug)]
struct Item {
    size_bytes: u64,
    /// The cell; `None` for an allocation that stands alone.
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
    /// The cell has no contents, and nobody sees where it is: it may move, or become an allocation of its own.
    pub(crate) can_leave: bool,
    /// In addition, nobody has been told an address of the cell.
    pub(crate) is_unplaced: bool,
}

/// The kind of memory that a caller is to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// A cell of an existing slab, or of a new one of this size.
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
    /// A place in a window where the caller has nothing mapped.
    Nothing,
}

/// The steps that a mapping needs, or the obstacle to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapPlan {
    /// No steps: the mapping is recorded.
    Done,
    /// The slab has to be mapped at `mounted` in the window that begins at `window`; then [`SlabTable::filled`].
    Fill { row: VirtualHandle, window: u64, mounted: VaRange },
    /// The old contents are to be cleared; then [`SlabTable::cleared`].
    Clear,
    /// The memory is an allocation of its own, or is to become one, and is mapped as one.
    StandAlone,
    /// Another thread changes the mappings there: call again.
    Busy,
    /// The driver would not unmap the old mapping, which is to be offered to it again.
    Stuck,
    /// The driver would refuse the call too.
    Wrong,
    /// The mapping is impossible with slabs.
    Odd,
}

/// The mappings, the row and the addresses that are to be taken down.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// The ranges at which slabs leave windows, each with the start of its window.
    pub(crate) mounted: Vec<(u64, VaRange)>,
    /// The row of a slab that nobody has any more.
    pub(crate) row: Option<VirtualHandle>,
    /// Reservations that nobody has any more.
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

/// The steps that are needed to set rights on a range, or the reason why it cannot be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessPlan {
    /// No steps: the rights are recorded.
    Done,
    /// The rights are set on the mapping at `mounted`, in the window that begins at `window`; then [`Windows::granted`].
    Grant { window: u64, mounted: VaRange },
    /// The rights are set where they were requested, on allocations that stand alone.
    Rows,
    /// The call is refused with this code.
    Refused(DriverCode),
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct SlabTable {
    is_on: bool,
    /// Are other processes known to have given up the cells that have ended here?
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

/// The table of slabs of a process, and its answers to callers. Its lock is a leaf.
#[derive(Debug, Default)]
pub struct Slabs {
    table: Mutex<SlabTable>,
    /// Notified when a window that was busy has been settled.
    pub(crate) changed: Condvar,
}

impl Slabs {
    /// Locks the table. Do not lock it under the ledger's lock, nor the ledger under it. Poisoning is ignored, as for the
    /// ledger.
    pub(crate) fn table(&self) -> MutexGuard<'_, SlabTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether small allocations of libraries are made as parts of slabs from now on. Existing cells stay cells. Off at
    /// first. Imports of parts work either way.
    pub fn use_slabs(&self, are_used: bool) {
        self.table().is_on = are_used;
    }

    /// See [`Slabs::use_slabs`].
    pub fn uses_slabs(&self) -> bool {
        self.table().is_on
    }

    /// Allows new memory at addresses of cells that were shared. Call this if all processes give up memory that they share by
    /// parts of slabs, before any of them makes it again at the same addresses. A communicator that is suspended does so.
    /// Without this call such addresses take no new memory, because a holder of the old memory would see it.
    pub fn take_shared_addresses_again(&self) {
        self.table().is_home = true;
    }
}

// Questions.
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

    /// Returns the windows that the slab is mapped in.
    fn windows_of<'a>(&'a self, slab: &'a Slab) -> impl Iterator<Item = &'a Window> {
        slab.windows.iter().filter_map(|start| self.windows.get(*start))
    }

    /// Has anybody been told addresses of this part?
    fn has_spot_in(&self, slab: &Slab, part: Part) -> bool {
        self.windows_of(slab).any(|window| window.has_spot_in(part))
    }

    /// Returns the row of our slab that is mapped at `address`.
    pub(crate) fn row_under(&self, address: DeviceAddress) -> Option<VirtualHandle> {
        let Under::Slab(key, _) = self.windows.window_at(address)?.under else { return None };
        let slab = self.slabs.get(&key).filter(|slab| slab.new.recipe.is_some())?;
        Some(slab.new.row)
    }

    /// Returns the slab with this identity, and its row.
    pub(crate) fn slab_of(&self, id: AllocationId) -> Option<(SlabKey, VirtualHandle)> {
        let found = self.slabs.iter().find(|(_, slab)| slab.new.id == id);
        found.map(|(&key, slab)| (key, slab.new.row))
    }

    /// Counts slabs, cells and their bytes.
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

// Changes by which memory leaves a window.
impl SlabTable {
    /// Records that other processes may know of the cell from now on.
    pub(crate) fn share(&mut self, handle: VirtualHandle) {
        if let Some(cell) = self.cell_mut(handle) {
            cell.is_shared = true;
        }
    }

    /// Turns the cell into an allocation of its own, `row`, which has as many references. Returns what its slab does not need
    /// any more. `None`, without a change, if the cell has changed since it was found.
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

    /// Has the window at `address` a mapping that the driver would not take back?
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
