//! The tickets and the leases of one allocation.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd};

use crate::ids::PeerId;
use sublet_driver::descriptors::UninheritedFd;

/// A check whether a ticket, or a lease, is open anywhere.
#[derive(Debug)]
pub struct TicketWatch {
    /// The descriptor that is checked.
    pub fd: UninheritedFd,
    /// Checks whether the ticket or lease is closed. Does not block.
    pub is_closed: fn(BorrowedFd<'_>) -> bool,
}

impl TicketWatch {
    pub(super) fn is_open(&self) -> bool {
        !(self.is_closed)(self.fd.as_fd())
    }
}

#[derive(Debug, Default)]
struct Ticket {
    watch: Option<TicketWatch>,
    is_redeemed: bool,
}

impl Ticket {
    fn holds(&self) -> bool {
        self.watch.as_ref().is_none_or(TicketWatch::is_open)
    }
}

/// The tickets of one allocation, by serial number.
#[derive(Debug, Default)]
pub(super) struct Tickets(BTreeMap<u64, Ticket>);

impl Tickets {
    pub(super) fn add(&mut self, serial: u64) {
        self.0.insert(serial, Ticket::default());
    }

    /// Removes a ticket that nobody was given.
    pub(super) fn take_back(&mut self, serial: u64) {
        self.0.remove(&serial);
    }

    /// Watches the ticket `serial`: from now on it lasts until it is closed. False if there is no such ticket.
    pub(super) fn watch(&mut self, serial: u64, watch: TicketWatch) -> bool {
        let ticket = self.0.get_mut(&serial);
        ticket.map(|ticket| ticket.watch = Some(watch)).is_some()
    }

    /// Records that somebody has redeemed the ticket `serial`.
    pub(super) fn redeem(&mut self, serial: u64) {
        if let Some(ticket) = self.0.get_mut(&serial) {
            ticket.is_redeemed = true;
            if ticket.watch.is_none() {
                self.0.remove(&serial);
            }
        }
    }

    /// Is there a ticket that nobody has redeemed?
    pub(super) fn await_somebody(&self) -> bool {
        self.0.values().any(|ticket| !ticket.is_redeemed)
    }

    /// Does any ticket hold the memory?
    pub(super) fn hold(&self) -> bool {
        self.0.values().any(Ticket::holds)
    }

    /// Removes closed tickets. Returns their number.
    pub(super) fn drop_closed(&mut self) -> usize {
        let before = self.0.len();
        self.0.retain(|_, ticket| ticket.holds());
        before - self.0.len()
    }

    /// Counts the tickets that are watched.
    pub(super) fn watched(&self) -> usize {
        self.0.values().filter(|ticket| ticket.watch.is_some()).count()
    }
}

/// A borrower of an allocation, and the check whether the borrower still holds it.
#[derive(Debug)]
pub struct Lease {
    /// The process that holds the allocation.
    pub borrower: PeerId,
    /// The check whether the lease is open.
    pub watch: TicketWatch,
}

/// The leases of one allocation.
#[derive(Debug, Default)]
pub(crate) struct Leases(pub(super) Vec<Lent>);

#[derive(Debug)]
pub(super) struct Lent {
    pub(super) lease: Lease,
    pub(super) by_ticket: bool,
}

impl Leases {
    /// Adds a lease, and removes those that have ended.
    pub(crate) fn add(&mut self, lease: Lease, by_ticket: bool) {
        self.drop_closed();
        self.0.push(Lent { lease, by_ticket });
    }

    pub(super) fn drop_closed(&mut self) {
        self.0.retain(|lent| lent.lease.watch.is_open());
    }
}
