//! The table of rows: one for each allocation, found by its handle or its identity.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;

use slab::Slab;

use super::backing::Backing;
use super::residency::Change;
use super::{LostImports, NewRow, Row, Rows};
use crate::budget::Charge;
use crate::deferred::Physical;
use crate::driver::DeviceOrdinal;
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};

/// The rows of one process. Its methods change rows alone. Changes that also depend on mappings, or on whether the
/// process is frozen, are methods of the ledger.
#[derive(Debug, Default)]
pub(crate) struct RowTable {
    rows: Slab<Row>,
    by_id: HashMap<AllocationId, VirtualHandle>,
    /// The number of own allocations on each device that has some.
    own_on: BTreeMap<DeviceOrdinal, usize>,
    next_generation: u32,
}

impl RowTable {
    /// Adds a row for memory that was just created or imported, with one reference.
    pub(crate) fn insert(&mut self, new: NewRow, physical: Physical) -> VirtualHandle {
        self.enter(new, Backing::new(physical))
    }

    /// Adds a row with this backing.
    pub(super) fn enter(&mut self, new: NewRow, backing: Backing) -> VirtualHandle {
        self.next_generation = (self.next_generation + 1) & VirtualHandle::GENERATION_MASK;
        let id = new.id;
        let vacant = self.rows.vacant_entry();
        let handle = VirtualHandle::new(vacant.key(), self.next_generation);
        let row = vacant.insert(Row::new(new, handle, backing));
        if let (true, Some(device)) = (row.is_own(), row.device()) {
            *self.own_on.entry(device).or_insert(0) += 1;
        }
        // Two threads may import the same allocation simultaneously: its identity finds the first.
        self.by_id.entry(id).or_insert(handle);
        handle
    }

    /// Returns the row of `handle`, if there is one.
    pub(crate) fn get(&self, handle: VirtualHandle) -> Option<&Row> {
        self.rows.get(handle.index()).filter(|row| row.handle() == handle)
    }

    pub(super) fn get_mut(&mut self, handle: VirtualHandle) -> Option<&mut Row> {
        self.rows.get_mut(handle.index()).filter(|row| row.handle() == handle)
    }

    /// Returns the row of `handle`, or an error.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    pub(crate) fn find(&self, handle: VirtualHandle) -> PoolResult<&Row> {
        self.get(handle).ok_or(PoolError::StaleHandle { handle: handle.raw() })
    }

    /// Returns the row of this identity.
    pub(crate) fn by_id(&self, id: AllocationId) -> Option<&Row> {
        self.by_id.get(&id).and_then(|&handle| self.get(handle))
    }

    pub(super) fn by_id_mut(&mut self, id: AllocationId) -> Option<&mut Row> {
        let handle = self.by_id.get(&id).copied()?;
        self.get_mut(handle)
    }

    /// Returns all rows, in an order that stays the same while no row is added or removed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().map(|(_, row)| row)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Row> {
        self.rows.iter_mut().map(|(_, row)| row)
    }

    /// Returns the rows of `rows` that still exist, in the same order.
    pub(crate) fn among<'a>(&'a self, rows: &'a Rows) -> impl Iterator<Item = &'a Row> + use<'a> {
        rows.handles().filter_map(|handle| self.get(handle))
    }

    /// Changes the rows of `handles` that still exist with `each`.
    pub(super) fn change(
        &mut self,
        handles: impl IntoIterator<Item = VirtualHandle>,
        mut each: impl FnMut(&mut Row),
    ) {
        for handle in handles {
            self.get_mut(handle).into_iter().for_each(&mut each);
        }
    }

    /// Removes the row of `handle`, if `goes` returns true for it.
    pub(super) fn take(
        &mut self,
        handle: VirtualHandle,
        goes: impl FnOnce(&Row) -> bool,
    ) -> Option<Row> {
        self.get(handle).filter(|row| goes(row))?;
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

    /// Returns the devices with this process's own memory. Imports do not count: they are on their owners' devices, and
    /// touching such a device would make a context there, which costs some 500 MiB.
    pub(crate) fn devices(&self) -> BTreeSet<DeviceOrdinal> {
        self.own_on.keys().copied().collect()
    }

    /// Adds a reference; false if the row is gone.
    pub(crate) fn add_reference(&mut self, handle: VirtualHandle) -> bool {
        self.get_mut(handle).map(Row::add_reference).is_some()
    }

    /// Replaces the memory of `handle` with `physical`, if nobody has used it yet. Returns the old memory.
    ///
    /// # Errors
    /// `physical` itself.
    pub(crate) fn exchange_untouched(
        &mut self,
        handle: VirtualHandle,
        physical: Physical,
    ) -> Result<Physical, Physical> {
        let row = self.get_mut(handle).filter(|row| row.is_untouched_host());
        match row.and_then(|row| row.backing_mut().handle_mut()) {
            Some(place) => Ok(std::mem::replace(place, physical)),
            None => Err(physical),
        }
    }

    /// Makes all own memory on its device count against a budget, unless it counts already.
    pub(crate) fn charge_all(
        &mut self,
        make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        for row in self.iter_mut() {
            if let (true, Some(physical)) = (row.is_own(), row.backing_mut().handle_mut()) {
                physical.charge_with(&make);
            }
        }
    }

    /// Ends one registration. Allocations that have ended are skipped.
    pub(crate) fn unregister(&mut self, handles: &[VirtualHandle]) {
        self.change(handles.iter().copied(), Row::unregister);
    }

    /// Returns the descriptor for a process that fetches `id` again: a copy of the kept one, or without room for a copy
    /// the kept one itself. None if the driver must make one; then call [`RowTable::fetched`].
    pub(crate) fn export_at_hand(&mut self, id: AllocationId) -> Option<OwnedFd> {
        let sharing = self.by_id_mut(id)?.sharing_mut();
        sharing.copy_of_export().or_else(|| sharing.take_export())
    }

    /// Keeps the descriptor that the driver made for `id`. Returns a descriptor that is not needed.
    pub(crate) fn keep_export(&mut self, id: AllocationId, fd: OwnedFd) -> Option<OwnedFd> {
        match self.by_id_mut(id) {
            Some(row) => row.sharing_mut().keep_export(fd),
            None => Some(fd),
        }
    }

    /// Records that `importer` has fetched `id` again.
    pub(crate) fn fetched(&mut self, id: AllocationId, importer: PeerId) {
        self.by_id_mut(id).into_iter().for_each(|row| row.sharing_mut().add_importer(importer));
    }

    /// Adds a reference to `id`, if this process holds it and it is not lost. For own memory this redeems the ticket
    /// `serial`. Returns the handle, and a descriptor that is kept for nobody any more.
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

    /// Gives up imports that are not resident and that `choose` picks, by identity and owner: they are lost. Returns
    /// their number and their bytes.
    pub(crate) fn give_up(&mut self, choose: impl Fn(AllocationId, PeerId) -> bool) -> LostImports {
        let mut lost = LostImports::default();
        for row in self.iter_mut() {
            if !row.is_resident() && row.owner().is_some_and(|owner| choose(row.id(), owner)) {
                lost.count += 1;
                lost.bytes += row.size_bytes();
                if !row.is_lost() {
                    let _none = row.backing_mut().change(Change::GivenUp);
                }
            }
        }
        lost
    }
}
