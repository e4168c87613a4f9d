//! The holds that other processes have on an allocation: its tickets (which are open, and which have been redeemed),
//! and its leases.
//!
//! A ticket holds its memory as a descriptor of the driver's would: for as long as it is open anywhere. The pool knows
//! that only of watched tickets. Any other ticket holds its memory until somebody has redeemed it.
//!
//! A process of another tenant that has memory of this one open holds a *lease* for each allocation. A lease is a file
//! whose lock lasts until its holder has released the memory to the driver, or has ended. No pause releases memory
//! while a lease of it is open. While the pool is frozen, no lease is given.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use super::row::LENT;
use super::shares::TicketWatch;
use super::{Ledger, Row, RowTable, Selection};
use crate::driver::RawHandle;
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};

/// The largest number of watched tickets: each needs a descriptor.
pub(super) const WATCHES_MAX: usize = 256;

/// The number of tickets that a check of all watched tickets must make room for, or else the next check is delayed. A
/// check makes a system call for each ticket.
const LOOK_EVERY: usize = 64;

/// The last serial number of a ticket, and the allocations with watched tickets.
#[derive(Debug, Default)]
pub(super) struct Watches {
    last_serial: u64,
    /// The number of tickets that were watched at the last check, or have been added since.
    pub(super) count: usize,
    /// The rows that had watched tickets at the last check, or have some since.
    rows: BTreeSet<VirtualHandle>,
    /// The number of tickets until the next check for room.
    next_look: usize,
}

impl Watches {
    /// Counts one more ticket to watch. Is it time to check for room?
    fn is_look_due(&mut self) -> bool {
        if self.count < WATCHES_MAX {
            return false;
        }
        self.next_look = self.next_look.saturating_sub(1);
        self.next_look == 0
    }

    /// Adds `count` watched tickets of `row`.
    fn add(&mut self, row: VirtualHandle, count: usize) {
        if count > 0 {
            self.count += count;
            self.rows.insert(row);
        }
    }

    /// Returns all rows with watched tickets, and resets the count for a new one.
    fn take(&mut self) -> BTreeSet<VirtualHandle> {
        self.count = 0;
        std::mem::take(&mut self.rows)
    }
}

/// The data that a ticket for an allocation must carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its identity.
    pub id: AllocationId,
    /// Its size.
    pub size_bytes: u64,
    /// The serial number of the ticket. Redeeming the ticket once releases its hold on the memory; so does closing it,
    /// if it is watched. 0 for memory of another process: such a ticket holds nothing.
    pub serial: u64,
    /// The process that owns the allocation, if it is not this one.
    pub owner: Option<PeerId>,
    /// The exported part, unless that is the whole allocation.
    pub part: Option<Part>,
}

/// A part of an allocation, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The offset of the part in the allocation, in bytes.
    pub offset_bytes: u64,
    /// The length of the part, in bytes.
    pub size_bytes: u64,
}

impl Ledger {
    /// Counts a ticket for `handle`. From now on the ticket keeps the memory, even if another thread releases the
    /// handle. Returns no driver's handle if there is a descriptor already, or if another process owns the memory.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Offloaded`].
    pub(crate) fn begin_export(
        &mut self,
        handle: VirtualHandle,
    ) -> PoolResult<(Export, Option<RawHandle>)> {
        let row = self.rows.find(handle)?;
        let (id, size_bytes, owner) = (row.id(), row.size_bytes(), row.owner());
        let export = Export { id, size_bytes, serial: 0, owner, part: None };
        if !row.is_own() {
            return Ok((export, None));
        }
        let raw = if row.sharing().is_exported() { None } else { row.raw() };
        if raw.is_none() && !row.sharing().is_exported() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        self.watches.last_serial += 1;
        let serial = self.watches.last_serial;
        self.rows.change([handle], |row| row.sharing_mut().tickets.add(serial));
        Ok((Export { serial, ..export }, raw))
    }

    /// Watches the ticket `serial` for `id` with `watch`: it lasts until it is closed. Without room for one more watch
    /// it lasts until it is redeemed, as a ticket that is not watched.
    pub(crate) fn watch_ticket(
        &mut self,
        id: AllocationId,
        serial: u64,
        watch: TicketWatch,
    ) -> Vec<OwnedFd> {
        let mut spare = Vec::new();
        if self.watches.is_look_due() {
            spare = self.drop_closed_tickets();
            self.watches.next_look = LOOK_EVERY.saturating_sub(WATCHES_MAX - self.watches.count);
        }
        let has_room = self.watches.count < WATCHES_MAX;
        let row = self.rows.by_id_mut(id).filter(|_| has_room);
        let watched = row
            .and_then(|row| row.sharing_mut().tickets.watch(serial, watch).then(|| row.handle()));
        if let Some(handle) = watched {
            self.watches.add(handle, 1);
        }
        spare
    }

    /// Removes closed tickets. Returns the descriptors that were kept for them alone.
    fn drop_closed_tickets(&mut self) -> Vec<OwnedFd> {
        let mut spare = Vec::new();
        for handle in self.watches.take() {
            let Some(row) = self.rows.get_mut(handle) else { continue };
            spare.extend(row.sharing_mut().drop_closed_tickets());
            let count = row.sharing().tickets.watched();
            self.watches.add(handle, count);
        }
        spare
    }

    pub(crate) fn has_watched_tickets(&self) -> bool {
        self.watches.count > 0
    }

    /// As [`Ledger::drop_closed_tickets`]. Also returns the memory that nothing else held.
    pub(crate) fn end_closed_tickets(&mut self) -> (Vec<OwnedFd>, Vec<Row>) {
        if self.watches.count == 0 {
            return Default::default();
        }
        let spare = self.drop_closed_tickets();
        let ended = self.rows.iter().filter(|row| row.is_garbage(self.is_frozen)).map(Row::handle);
        let ended: Vec<_> = ended.collect();
        (spare, ended.into_iter().filter_map(|handle| self.take_garbage(handle)).collect())
    }

    /// Removes a ticket that nobody was given, for example because the driver made no descriptor for it.
    pub(crate) fn export_failed(&mut self, id: AllocationId, serial: u64) -> Option<Row> {
        let row = self.rows.by_id_mut(id)?;
        row.sharing_mut().tickets.take_back(serial);
        let handle = row.handle();
        self.take_garbage(handle)
    }
}

// Leases.

/// The totals of the memory that one borrower has open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentTotals {
    /// The number of allocations that it opened by a `cudaIpc` handle.
    pub handles: u64,
    /// The number of allocations that it imported by a ticket.
    pub tickets: u64,
    /// The size of all of them, in bytes.
    pub bytes: u64,
}

impl RowTable {
    /// Marks the memory in `selection` that borrowers have open now: a pause leaves it in place until the process runs
    /// again.
    pub(crate) fn leave_lent(&mut self, selection: &Selection) {
        for row in self.iter_mut().filter(|row| row.can_leave() && selection.has(row)) {
            let leases = &mut row.sharing_mut().leases;
            leases.drop_closed();
            if !leases.0.is_empty() {
                row.set_stays(Some(LENT));
            }
        }
    }

    /// Sums up the memory in `selection` that each borrower has open and that a pause would release. Removes leases
    /// that have ended.
    pub(crate) fn lent_of(&mut self, selection: &Selection) -> BTreeMap<PeerId, LentTotals> {
        let mut all: BTreeMap<PeerId, LentTotals> = BTreeMap::new();
        for row in self.iter_mut() {
            if !((row.can_leave() || row.is_left_lent()) && selection.has(row)) {
                continue;
            }
            let size_bytes = row.size_bytes();
            let leases = &mut row.sharing_mut().leases;
            leases.drop_closed();
            let mut counted = Vec::new();
            for lent in &leases.0 {
                let borrower = lent.lease.borrower;
                let totals = all.entry(borrower).or_default();
                // An allocation that is opened twice simultaneously counts once.
                if !counted.contains(&borrower) {
                    counted.push(borrower);
                    totals.bytes += size_bytes;
                    totals.handles += u64::from(!lent.by_ticket);
                    totals.tickets += u64::from(lent.by_ticket);
                }
            }
        }
        all
    }
}
