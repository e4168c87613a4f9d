//! The hold that others may have on an allocation: its tickets (which are open, and which have been redeemed), and its
//! leases.
//!
//! A ticket holds its memory as a descriptor of the driver's would: for as long as it is open anywhere. That is known of a
//! ticket that is watched. Any other holds it until somebody has redeemed it.
//!
//! Each process of another tenant that has memory of this one open holds a *lease* for each allocation: a file whose lock lasts until
//! its holder has given the memory back to the driver, or has ended. No pause takes memory away while a lease of it is open, and while
//! the pool is frozen none is given.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use super::row::LENT;
use super::shares::TicketWatch;
use super::{Ledger, Row, RowTable, Selection};
use crate::driver::RawHandle;
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};

/// The largest number of tickets that are watched: each takes a descriptor.
pub(super) const WATCHES_MAX: usize = 256;

/// For how many tickets a look at all that are watched must have made room, or is not taken again: it is a question to the
/// kernel for each.
const LOOK_EVERY: usize = 64;

/// Serial numbers of tickets, and which allocations have some that are watched.
#[derive(Debug, Default)]
pub(super) struct Watches {
    last_serial: u64,
    /// The number of tickets watched at the last look, and since.
    pub(super) count: usize,
    /// Rows that had watched tickets then, or have since.
    rows: BTreeSet<VirtualHandle>,
    /// The number of further tickets before those that are watched are looked at for room.
    next_look: usize,
}

impl Watches {
    /// One ticket more is to be watched. Is it time to look for room?
    fn is_look_due(&mut self) -> bool {
        if self.count < WATCHES_MAX {
            return false;
        }
        self.next_look = self.next_look.saturating_sub(1);
        self.next_look == 0
    }

    /// So many tickets of `row` are watched.
    fn add(&mut self, row: VirtualHandle, count: usize) {
        if count > 0 {
            self.count += count;
            self.rows.insert(row);
        }
    }

    /// All that had some; they are counted again from none.
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
    /// The serial number of the ticket. Redeeming the ticket once, or closing it where it is watched, lets the memory
    /// go that it holds. 0 for memory of another process, of which a ticket holds nothing.
    pub serial: u64,
    /// The process that owns it, if that is another one.
    pub owner: Option<PeerId>,
    /// The part of it that was exported, unless that is the whole.
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
    /// Counts a ticket for `handle`. From now on it keeps the memory, whatever another thread releases. No driver's handle comes out
    /// where there is a descriptor already, or it is another process's to give.
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

    /// The ticket `serial` for `id` lasts until it is closed, which `watch` tells. Without room for one more watch it lasts
    /// until it is redeemed, as one that is not watched.
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

    /// Drops tickets that have been closed; descriptors that were kept for them alone come out.
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

    /// As [`Ledger::drop_closed_tickets`]; memory that nothing else held comes out too.
    pub(crate) fn end_closed_tickets(&mut self) -> (Vec<OwnedFd>, Vec<Row>) {
        if self.watches.count == 0 {
            return Default::default();
        }
        let spare = self.drop_closed_tickets();
        let ended = self.rows.iter().filter(|row| row.is_garbage(self.is_frozen)).map(Row::handle);
        let ended: Vec<_> = ended.collect();
        (spare, ended.into_iter().filter_map(|handle| self.take_garbage(handle)).collect())
    }

    /// The driver gave no descriptor for a ticket, which nobody was given then.
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
    /// Allocations that it opened by a `cudaIpc` handle.
    pub handles: u64,
    /// Allocations that it imported by a ticket.
    pub tickets: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl RowTable {
    /// Has a pause leave what borrowers have open now of the memory in `selection`, until the process runs again.
    pub(crate) fn leave_lent(&mut self, selection: &Selection) {
        for row in self.iter_mut().filter(|row| row.can_leave() && selection.has(row)) {
            let leases = &mut row.sharing_mut().leases;
            leases.drop_closed();
            if !leases.0.is_empty() {
                row.set_stays(Some(LENT));
            }
        }
    }

    /// Sums up what each borrower has open of the memory in `selection` that a pause would take. Leases that have ended
    /// go.
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
                // Opened twice at the same moment, it is one allocation still.
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
