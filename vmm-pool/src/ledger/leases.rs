//! Memory of this process that processes of other tenants have open.
//!
//! Each of them holds a *lease* for each allocation: a file whose lock lasts until its holder has given the memory back to
//! the driver, or has ended. No pause takes memory away while a lease of it is open, and while the pool is frozen none
//! is given.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use super::{Ledger, Row, Selection, TicketWatch};
use crate::error::PoolResult;
use crate::{AllocationId, PeerId};

/// What tells whether a borrower holds an allocation still.
#[derive(Debug)]
pub struct Lease {
    /// Who holds it.
    pub borrower: PeerId,
    /// Tells whether it is open.
    pub watch: TicketWatch,
}

/// What one borrower has open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentTotals {
    /// Allocations that it opened by a `cudaIpc` handle.
    pub handles: u64,
    /// Allocations that it imported by a ticket.
    pub tickets: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The leases of one allocation.
#[derive(Debug, Default)]
pub(super) struct Leases(Vec<Lent>);

#[derive(Debug)]
struct Lent {
    lease: Lease,
    by_ticket: bool,
}

impl Leases {
    /// One more. Those that have ended go.
    pub(super) fn add(&mut self, lease: Lease, by_ticket: bool) {
        self.drop_closed();
        self.0.push(Lent { lease, by_ticket });
    }

    fn drop_closed(&mut self) {
        self.0.retain(|lent| lent.lease.watch.is_open());
    }
}

impl Ledger {
    /// `lease.borrower` holds `id` from now on, by the ticket `serial`, or by a handle where that is 0. What comes out is as
    /// in [`Ledger::redeemed`].
    ///
    /// # Errors
    /// As [`Ledger::find_for_importer`].
    pub(crate) fn lent(
        &mut self,
        id: AllocationId,
        serial: u64,
        lease: Lease,
    ) -> PoolResult<(Option<OwnedFd>, Option<Row>)> {
        let handle = self.find_for_importer(id)?.handle();
        let fd = self.row_mut(handle).and_then(|row| {
            row.add_lease(lease, serial != 0);
            row.use_ticket(serial)
        });
        Ok((fd, self.take_garbage(handle)))
    }

    /// What of `selection` that a pause would take each borrower has open. Leases that have ended go.
    pub(crate) fn lent_of(&mut self, selection: &Selection) -> BTreeMap<PeerId, LentTotals> {
        let mut all: BTreeMap<PeerId, LentTotals> = BTreeMap::new();
        for (_, row) in &mut self.rows {
            if !(row.can_leave() && selection.has(row)) {
                continue;
            }
            let size_bytes = row.size_bytes();
            let leases = row.leases();
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
