//! The other processes that may hold an allocation, and what is kept for them.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};

use super::shares::{Leases, Tickets};
use crate::ids::PeerId;
use sublet_driver::descriptors::UninheritedFd;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    pub(super) tickets: Tickets,
    /// Processes of other tenants that have it open.
    pub(crate) leases: Leases,
    /// Processes that may hold it: those that were given a descriptor since it was last created.
    importers: BTreeSet<PeerId>,
    /// From its restoring to the end of that resume: those that have fetched it again, the importers to come.
    fetched: Option<BTreeSet<PeerId>>,
    /// Importers have given it up by its tag, and come for it when that is brought back, wherever it is meanwhile.
    is_owed_by_tag: bool,
    /// The driver's descriptor for the importers, between issue and redemption.
    exported: Option<UninheritedFd>,
}

impl Sharing {
    /// Are importers without it until its tag is brought back?
    pub(crate) fn is_owed_by_tag(&self) -> bool {
        self.is_owed_by_tag
    }

    /// The process runs on, and importers without it, until its tag is brought back.
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

    /// A copy of the descriptor kept for importers, where there is one and room for another.
    pub(crate) fn copy_of_export(&self) -> Option<OwnedFd> {
        self.exported.as_ref()?.as_fd().try_clone_to_owned().ok()
    }

    pub(super) fn keep_export(&mut self, fd: OwnedFd) -> Option<OwnedFd> {
        self.exported.replace(fd.into()).map(UninheritedFd::into_inner)
    }

    pub(super) fn take_export(&mut self) -> Option<OwnedFd> {
        self.exported.take().map(UninheritedFd::into_inner)
    }

    /// The ticket `serial` is redeemed. With the last the descriptor goes that was kept for them.
    pub(super) fn use_ticket(&mut self, serial: u64) -> Option<OwnedFd> {
        self.tickets.redeem(serial);
        if self.tickets.await_somebody() { None } else { self.take_export() }
    }

    /// Drops tickets that have been closed. With the last that nobody had redeemed the descriptor comes out that was kept for
    /// them.
    pub(super) fn drop_closed_tickets(&mut self) -> Option<OwnedFd> {
        let has_dropped = self.tickets.drop_closed() > 0;
        if has_dropped && !self.tickets.await_somebody() { self.take_export() } else { None }
    }

    /// Importers fetch it again: who they are is counted from now on.
    pub(super) fn begin_fetching(&mut self) {
        self.fetched.get_or_insert_default();
    }

    /// It is leaving: nobody fetches it. A descriptor that was kept for those who would comes out.
    pub(super) fn call_off_fetching(&mut self) -> Option<OwnedFd> {
        self.fetched = None;
        self.take_export()
    }

    /// A process that has fetched it is its importer from now on, and nobody else. Where importers are without it until its
    /// tag is back, that is so if `is_tag_back`.
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
