//! The other processes that may hold an allocation, and the descriptor that is kept for them.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};

use super::shares::{Leases, Tickets};
use crate::ids::PeerId;
use sublet_driver::descriptors::UninheritedFd;

/// The sharing of one allocation: see the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    pub(super) tickets: Tickets,
    /// The leases of processes of other tenants that have it open.
    pub(crate) leases: Leases,
    /// The processes that may hold it, because they were given a descriptor since it was last created.
    importers: BTreeSet<PeerId>,
    /// From its restoring to the end of that resume: the processes that have fetched it again. They become the
    /// importers.
    fetched: Option<BTreeSet<PeerId>>,
    /// True once importers have given it up with its tag. They fetch it when the tag is restored, wherever it is
    /// meanwhile.
    is_owed_by_tag: bool,
    /// The driver's descriptor for the importers, kept from the issue of a ticket to its redemption.
    exported: Option<UninheritedFd>,
}

impl Sharing {
    /// Are importers without it until its tag is restored?
    pub(crate) fn is_owed_by_tag(&self) -> bool {
        self.is_owed_by_tag
    }

    /// Records that the process runs on and importers are without this memory, until its tag is restored.
    pub(super) fn owe_by_tag(&mut self) {
        self.is_owed_by_tag |= self.has_importers();
    }

    pub(super) fn has_importers(&self) -> bool {
        !self.importers.is_empty()
    }

    pub(crate) fn importers(&self) -> Vec<PeerId> {
        self.importers.iter().copied().collect()
    }

    pub(crate) fn add_importer(&mut self, importer: PeerId) {
        self.importers.insert(importer);
        if let Some(fetched) = &mut self.fetched {
            fetched.insert(importer);
        }
    }

    pub(crate) fn is_exported(&self) -> bool {
        self.exported.is_some()
    }

    /// Returns a copy of the descriptor kept for importers. `None` if there is none, or no room for a copy.
    pub(crate) fn copy_of_export(&self) -> Option<OwnedFd> {
        self.exported.as_ref()?.as_fd().try_clone_to_owned().ok()
    }

    pub(super) fn keep_export(&mut self, fd: OwnedFd) -> Option<OwnedFd> {
        self.exported.replace(fd.into()).map(UninheritedFd::into_inner)
    }

    pub(super) fn take_export(&mut self) -> Option<OwnedFd> {
        self.exported.take().map(UninheritedFd::into_inner)
    }

    /// Redeems the ticket `serial`. After the last ticket, returns the descriptor that was kept for tickets.
    pub(super) fn use_ticket(&mut self, serial: u64) -> Option<OwnedFd> {
        self.tickets.redeem(serial);
        if self.tickets.await_somebody() { None } else { self.take_export() }
    }

    /// Removes closed tickets. If no unredeemed ticket is left, returns the descriptor that was kept for tickets.
    pub(super) fn drop_closed_tickets(&mut self) -> Option<OwnedFd> {
        let has_dropped = self.tickets.drop_closed() > 0;
        if has_dropped && !self.tickets.await_somebody() { self.take_export() } else { None }
    }

    /// Begins the fetching: from now on the importers that fetch it are recorded.
    pub(super) fn begin_fetching(&mut self) {
        self.fetched.get_or_insert_default();
    }

    /// Ends the fetching, because the memory leaves its device. Returns the descriptor that was kept for importers.
    pub(super) fn call_off_fetching(&mut self) -> Option<OwnedFd> {
        self.fetched = None;
        self.take_export()
    }

    /// Ends the fetching: exactly the processes that have fetched it are its importers from now on. If importers are
    /// without it until its tag is restored, this happens only if `is_tag_back`.
    pub(super) fn end_fetching(&mut self, is_tag_back: bool) {
        let fetched = self.fetched.take();
        if self.is_owed_by_tag && !is_tag_back {
            return;
        }
        self.is_owed_by_tag = false;
        if let Some(fetched) = fetched {
            self.importers = fetched;
        }
    }
}
