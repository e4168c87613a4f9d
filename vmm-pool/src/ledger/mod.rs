//! The ledger: what device memory exists, which library allocated it, where it is mapped, and where its contents are.
//!
//! ```text
//!   VirtualHandle --> Row --residency--> Physical, the driver's handle (while on its device)
//!                      ^  |
//!                      |  +--mappings--> Mapping [start, start+size) --access--> per place
//!                      +---------------- one allocation, any number of mappings
//! ```
//!
//! It calls nobody: a caller that changes it has made, or is about to make, the driver agree. A row is found by its handle,
//! whose generation makes a look at a row that is gone find nothing.
//!
//! # Invariants
//! 1. Every mapping names a live row, and that row lists the mapping's start; both ways.
//! 2. Mappings do not overlap.
//! 3. A row lives while it has a reference, a mapping, or an open ticket; while it is not
//!    resident also as long as an importer may want it again.
//! 4. A driver's handle is in one row, or in none and then its holder's to release.

mod accounts;
mod backing;
mod block;
mod layout;
mod mapping;
mod moving;
mod paged;
mod pieces;
mod residency;
mod row;
mod selection;
mod sharing;
mod tickets;
mod views;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Weak;

pub use accounts::{
    Holding, HoldingSource, References, Shareable, Stance, StayReason, TagTotals, Unfreezable,
};
use backing::Backing;
pub use block::Block;
pub(crate) use layout::{Layout, Placed};
pub use mapping::{Facts, Known, Sight};
pub(crate) use mapping::{Mapping, Mappings, Presence};
pub(crate) use pieces::Survey;
use residency::Change;
pub use row::Class;
pub(crate) use row::{NewRow, Origin, Row};
pub(crate) use selection::Rows;
pub use selection::{After, LIBRARY_TAGS, Selection, Tags, Whose};
pub(crate) use sharing::Sharing;
use slab::Slab;
use tickets::Watches;
pub use tickets::{Lease, LentTotals, TicketWatch};
use views::Views;

use crate::budget::Charge;
use crate::deferred::Physical;
use crate::driver::{
    AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, DriverError, DriverOp, RawHandle, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::store::Saved;
use crate::{AllocationId, PeerId, VirtualHandle};

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    rows: Slab<Row>,
    by_id: HashMap<AllocationId, VirtualHandle>,
    pub(crate) mappings: Mappings,
    pub(crate) views: Views,
    /// How much own memory there is on each device that has some, in allocations.
    own_on: BTreeMap<DeviceOrdinal, usize>,
    next_generation: u32,
    watches: Watches,
    /// Contents that somebody reads where they lie, who has no lock meanwhile.
    read: Weak<Vec<Saved>>,
    /// Nothing is given to importers: a pause has asked who holds what, or memory is away.
    is_frozen: bool,
}

/// What a recorded mapping needs to be made by the driver again.
#[derive(Debug)]
pub(crate) struct Remount {
    pub(crate) range: VaRange,
    pub(crate) raw: RawHandle,
    pub(crate) access: Vec<AccessDesc>,
    pub(crate) device: Option<DeviceOrdinal>,
    pub(crate) presence: Presence,
}

// Rows and mappings.
impl Ledger {
    /// Enters what has just been created or imported, with one reference.
    pub(crate) fn insert(&mut self, new: NewRow, physical: Physical) -> VirtualHandle {
        self.enter(new, Backing::new(physical))
    }

    fn enter(&mut self, new: NewRow, backing: Backing) -> VirtualHandle {
        self.next_generation = (self.next_generation + 1) & VirtualHandle::GENERATION_MASK;
        let id = new.id;
        let vacant = self.rows.vacant_entry();
        let handle = VirtualHandle::new(vacant.key(), self.next_generation);
        let row = vacant.insert(Row::new(new, handle, backing));
        if let (true, Some(device)) = (row.is_own(), row.device()) {
            *self.own_on.entry(device).or_insert(0) += 1;
        }
        // Two threads may import the same simultaneously: the first is found by its identity.
        self.by_id.entry(id).or_insert(handle);
        handle
    }

    /// The row of `handle`, while it lives.
    pub(crate) fn row(&self, handle: VirtualHandle) -> Option<&Row> {
        self.rows.get(handle.index()).filter(|row| row.handle() == handle)
    }

    fn row_mut(&mut self, handle: VirtualHandle) -> Option<&mut Row> {
        self.rows.get_mut(handle.index()).filter(|row| row.handle() == handle)
    }

    /// The row of `handle`.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    pub(crate) fn find(&self, handle: VirtualHandle) -> PoolResult<&Row> {
        self.row(handle).ok_or(PoolError::StaleHandle { handle: handle.raw() })
    }

    /// The row of this identity.
    pub(crate) fn by_id(&self, id: AllocationId) -> Option<&Row> {
        self.by_id.get(&id).and_then(|&handle| self.row(handle))
    }

    fn by_id_mut(&mut self, id: AllocationId) -> Option<&mut Row> {
        let handle = self.by_id.get(&id).copied()?;
        self.row_mut(handle)
    }

    /// All rows, in an order that holds as long as none comes or goes.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().map(|(_, row)| row)
    }

    /// Those of them that live, in the same order.
    pub(crate) fn rows_in<'a>(&'a self, rows: &'a Rows) -> impl Iterator<Item = &'a Row> + use<'a> {
        rows.handles().filter_map(|handle| self.row(handle))
    }

    /// Has `each` change those that live.
    fn change_in(
        &mut self,
        handles: impl Iterator<Item = VirtualHandle>,
        mut each: impl FnMut(&mut Row),
    ) {
        for handle in handles {
            self.row_mut(handle).into_iter().for_each(&mut each);
        }
    }

    /// The mappings of `row`, in order.
    pub(crate) fn mappings_of(&self, row: &Row) -> impl Iterator<Item = &Mapping> {
        row.mapped_at().filter_map(|start| self.mappings.get(start))
    }

    /// The mapping that holds `address`, with its row.
    pub(crate) fn mapped_at(&self, address: DeviceAddress) -> Option<(&Mapping, &Row)> {
        let mapping = self.mappings.at(address)?;
        Some((mapping, self.row(mapping.allocation())?))
    }

    /// Takes the row out when nothing holds it any more.
    fn take_garbage(&mut self, handle: VirtualHandle) -> Option<Row> {
        if !self.row(handle)?.is_garbage(self.is_frozen) {
            return None;
        }
        let row = self.rows.remove(handle.index());
        if let (true, Some(device)) = (row.is_own(), row.device())
            && let Some(count) = self.own_on.get_mut(&device)
        {
            *count -= 1;
            if *count == 0 {
                self.own_on.remove(&device);
            }
        }
        if self.by_id.get(&row.id()) == Some(&handle) {
            self.by_id.remove(&row.id());
        }
        Some(row)
    }
}

// What applications' calls change. Rows that come out are held by nobody any more.
impl Ledger {
    /// One reference more; false when the row is gone.
    pub(crate) fn add_reference(&mut self, handle: VirtualHandle) -> bool {
        self.row_mut(handle).map(Row::add_reference).is_some()
    }

    /// One reference less.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], also when all references are used up.
    pub(crate) fn drop_reference(&mut self, handle: VirtualHandle) -> PoolResult<Option<Row>> {
        let had_one = self.row_mut(handle).is_some_and(Row::drop_reference);
        if !had_one {
            return Err(PoolError::StaleHandle { handle: handle.raw() });
        }
        Ok(self.take_garbage(handle))
    }

    /// Has `physical` stand behind `handle`, if nobody has used that memory yet. What stood behind it comes out.
    ///
    /// # Errors
    /// `physical` itself.
    pub(crate) fn exchange_untouched(
        &mut self,
        handle: VirtualHandle,
        physical: Physical,
    ) -> Result<Physical, Physical> {
        let row = self.row_mut(handle).filter(|row| row.is_untouched_host());
        match row.and_then(|row| row.backing_mut().handle_mut()) {
            Some(place) => Ok(std::mem::replace(place, physical)),
            None => Err(physical),
        }
    }

    /// Records a mapping that is about to be made. From then on it keeps its memory, whatever another thread
    /// releases.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Offloaded`]; [`PoolError::Driver`] for what the driver would refuse
    /// if it saw all mappings.
    pub(crate) fn begin_mapping(
        &mut self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<(RawHandle, Option<DeviceOrdinal>)> {
        let row = self.find(handle)?;
        // The driver sees no mapping whose memory is away, or that is being made; it is one all the same.
        let is_taken = self.mappings.overlapping(range).next().is_some();
        if !row.is_resident() && row.is_set_aside() && !row.is_lost() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        let allowed = match row.raw() {
            _ if is_taken => Err(DriverCode::INVALID_VALUE),
            // Driver 580 answers so for any offset; see the conformance case of this name.
            _ if offset_bytes != 0 => Err(DriverCode::NOT_SUPPORTED),
            // The gate keeps this call out while memory is away.
            None => Err(DriverCode::NOT_READY),
            Some(raw) => Ok(raw),
        };
        let refused = |code| DriverError { op: DriverOp::Map, code };
        let device = row.device();
        let raw = allowed.map_err(refused).about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            device,
        )?;
        self.mappings.insert(Mapping::new(range, handle));
        if let Some(row) = self.row_mut(handle) {
            row.mapped(range.start.0);
        }
        Ok((raw, device))
    }

    /// Forgets the mappings that begin there.
    pub(crate) fn forget_mappings(&mut self, starts: &[u64]) -> Vec<Row> {
        let mut garbage = Vec::new();
        for start in starts {
            let Some(mapping) = self.mappings.remove(*start) else { continue };
            let handle = mapping.allocation();
            if let Some(row) = self.row_mut(handle) {
                row.unmapped(*start);
            }
            garbage.extend(self.take_garbage(handle));
        }
        garbage
    }

    /// Has all own memory that is on its device, and does not count yet, count against a budget.
    pub(crate) fn charge_all(
        &mut self,
        make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        for (_, row) in &mut self.rows {
            if let (true, Some(physical)) = (row.is_own(), row.backing_mut().handle_mut()) {
                physical.charge_with(&make);
            }
        }
    }

    /// Has a pause leave all that is mapped in `range` in place. Returns how many bytes that is new for.
    pub(crate) fn pin(&mut self, range: VaRange, reason: &'static str) -> u64 {
        let mut bytes = 0;
        self.change_in(self.mapped_in(range).into_iter(), |row| {
            bytes += if row.pin(reason) { row.size_bytes() } else { 0 };
        });
        bytes
    }

    fn mapped_in(&self, range: VaRange) -> Vec<VirtualHandle> {
        self.mappings.overlapping(range).map(Mapping::allocation).collect()
    }

    /// Has a pause leave all that is mapped in `range` in place, until [`Ledger::unregister`] is told the same
    /// allocations, which are returned.
    pub(crate) fn register(&mut self, range: VaRange, reason: &'static str) -> Vec<VirtualHandle> {
        let handles = self.mapped_in(range);
        self.change_in(handles.iter().copied(), |row| row.register(reason));
        handles
    }

    /// The end of one registration. Allocations that have ended are passed over.
    pub(crate) fn unregister(&mut self, handles: &[VirtualHandle]) {
        self.change_in(handles.iter().copied(), Row::unregister);
    }

    /// Makes a block of it: its mapping alone keeps it, and `asked_bytes` is its size for callers.
    pub(crate) fn become_block(&mut self, handle: VirtualHandle, asked_bytes: u64) -> Option<Row> {
        let row = self.row_mut(handle)?;
        row.become_block(asked_bytes);
        let _had_one = row.drop_reference();
        self.take_garbage(handle)
    }

    /// Makes a block that is opened once of the mapping at `start`. The caller keeps its reference.
    pub(crate) fn become_opened(&mut self, handle: VirtualHandle, start: u64, asked_bytes: u64) {
        self.change_in(std::iter::once(handle), |row| row.become_block(asked_bytes));
        self.mappings.open_once(start);
    }
}

// Sharing.
impl Ledger {
    /// Is nothing given to importers?
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// See [`Ledger::is_frozen`].
    pub(crate) fn freeze(&mut self) {
        self.is_frozen = true;
    }

    /// The process runs. If nothing has moved since [`Ledger::freeze`], what it did not use it may use again; else
    /// [`Ledger::run_on`] has seen to that.
    pub(crate) fn thaw(&mut self) {
        if std::mem::take(&mut self.is_frozen) {
            self.mark_unused(&[]);
        }
    }

    /// An own allocation that importers may be given now.
    ///
    /// # Errors
    /// [`PoolError::Frozen`], [`PoolError::StaleHandle`], [`PoolError::Offloaded`].
    pub(crate) fn find_for_importer(&self, id: AllocationId) -> PoolResult<&Row> {
        if self.is_frozen {
            return Err(PoolError::Frozen);
        }
        let row = self.by_id(id).filter(|row| row.is_own());
        let row = row.ok_or(PoolError::StaleHandle { handle: 0 })?;
        if row.is_resident() && !row.sharing().is_owed_by_tag() {
            return Ok(row);
        }
        Err(PoolError::Offloaded { tag: row.class().tag.clone() })
    }

    /// Somebody holds `id` from now on, by the ticket `serial`, or without one where that is 0; `note` says who. A descriptor that
    /// is kept for nobody any more, and a row that nobody here holds, come out.
    ///
    /// # Errors
    /// As [`Ledger::find_for_importer`].
    pub(crate) fn redeemed(
        &mut self,
        id: AllocationId,
        serial: u64,
        note: impl FnOnce(&mut Sharing),
    ) -> PoolResult<(Option<OwnedFd>, Option<Row>)> {
        let handle = self.find_for_importer(id)?.handle();
        let fd = self.row_mut(handle).and_then(|row| {
            note(row.sharing_mut());
            row.sharing_mut().use_ticket(serial)
        });
        Ok((fd, self.take_garbage(handle)))
    }

    /// What `importer`, which fetches `id` again, is handed: a copy of the descriptor at hand, or without room for one, that
    /// very one. None where the driver is to give one; then [`Ledger::fetched`].
    pub(crate) fn export_at_hand(&mut self, id: AllocationId) -> Option<OwnedFd> {
        let sharing = self.by_id_mut(id)?.sharing_mut();
        sharing.copy_of_export().or_else(|| sharing.take_export())
    }

    /// `importer` has fetched `id` again.
    pub(crate) fn fetched(&mut self, id: AllocationId, importer: PeerId) {
        self.by_id_mut(id).into_iter().for_each(|row| row.sharing_mut().add_importer(importer));
    }

    /// One reference more to `id`, where it is held and not lost. Of own memory the ticket `serial` is redeemed by
    /// that; a descriptor that is kept for nobody any more comes out.
    pub(crate) fn hold_again(
        &mut self,
        id: AllocationId,
        serial: u64,
    ) -> Option<(VirtualHandle, Option<OwnedFd>)> {
        let row = self.by_id_mut(id).filter(|row| !row.is_lost())?;
        row.add_reference();
        let fd = if row.is_own() { row.sharing_mut().use_ticket(serial) } else { None };
        Some((row.handle(), fd))
    }

    /// Gives up imports that are not resident and that `choose` picks, by identity and owner: they are lost. Says how
    /// many, and their bytes.
    pub(crate) fn give_up(&mut self, choose: impl Fn(AllocationId, PeerId) -> bool) -> (u64, u64) {
        let mut lost = (0, 0);
        for (_, row) in &mut self.rows {
            if !row.is_resident() && row.owner().is_some_and(|owner| choose(row.id(), owner)) {
                lost = (lost.0 + 1, lost.1 + row.size_bytes());
                if !row.is_lost() {
                    let _none = row.backing_mut().change(Change::GivenUp);
                }
            }
        }
        lost
    }
}

/// The same bytes as ranges in order, none empty, none touching another.
pub(crate) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| range.start < range.end);
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests;
