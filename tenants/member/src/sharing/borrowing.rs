//! Processes of other tenants of the family from which this one borrows memory: their sockets, and the time to wait for a
//! paused one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;

use super::{ImportError, Sharers, Sharing};
use crate::AGENT_TIMEOUT;
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::run_dir::SOCKET_EXTENSION;
use sublet_protocol::wire::Borrower;

impl<D: Driver> Sharing<D> {
    /// The tenant of `owner`, which a handle names without its tenant. It is our own tenant, unless a process of that identity
    /// is in another tenant of our run directory. Contacts no process.
    pub fn tenant_of(&self, owner: MemberId) -> TenantName {
        let own = self.presence.tenant();
        if owner == self.presence.id() || self.presence.dir().has_member(owner) {
            return own.clone();
        }
        if let Some(tenant) = self.sharers.lender(owner) {
            return tenant;
        }
        let run_dir = self.presence.run_dir();
        let is_there = |tenant: &TenantName| {
            let dir = run_dir.existing_tenant(tenant).ok().flatten();
            dir.is_some_and(|dir| dir.has_member(owner))
        };
        let tenants = run_dir.tenants().unwrap_or_default();
        tenants.into_iter().find(is_there).unwrap_or_else(|| own.clone())
    }
}

impl<D: Driver> Sharers<D> {
    /// Records the tenant of `owner`, `theirs`, before memory of it is opened. A process that names no family contacts no other
    /// tenant.
    pub(super) fn approach(&self, owner: MemberId, theirs: &TenantName) -> Result<(), ImportError> {
        let refused = || ImportError::OtherTenant {
            theirs: theirs.to_string(),
            ours: self.presence.tenant().to_string(),
        };
        self.presence.family().ok_or_else(refused)?;
        // The socket is in a directory that is ours alone, like our own socket.
        let dir = self.presence.run_dir().existing_tenant(theirs).ok().flatten();
        let path = dir.as_ref().and_then(|dir| dir.socket_path(owner).ok());
        path.ok_or_else(|| ImportError::NoLender { theirs: theirs.to_string() })?;
        lock(&self.lenders).insert(owner, theirs.clone());
        Ok(())
    }

    /// The tenant of `owner`, if memory of it was requested and its tenant is another one.
    pub(super) fn lender(&self, owner: MemberId) -> Option<TenantName> {
        lock(&self.lenders).get(&owner).cloned()
    }

    /// All processes of other tenants from which memory was requested, and that are not known to have ended.
    pub(super) fn known_lenders(&self) -> Vec<(MemberId, TenantName)> {
        lock(&self.lenders).iter().map(|(id, tenant)| (*id, tenant.clone())).collect()
    }

    /// Returns the socket path where the agent of `owner` listens. The owner may be of another tenant.
    pub(super) fn place_of(&self, owner: MemberId) -> PathBuf {
        let Some(tenant) = self.lender(owner) else { return self.presence.socket_path_of(owner) };
        let dir = self.presence.run_dir().path().join(tenant.as_str());
        dir.join(format!("{owner}.{SOCKET_EXTENSION}"))
    }

    /// Returns this process's description of itself for `owner`; none if the owner is in the same tenant.
    pub(super) fn as_borrower(&self, owner: MemberId) -> Option<Borrower> {
        self.lender(owner)?;
        let family = self.presence.family().map(ToString::to_string);
        Some(Borrower { tenant: self.presence.tenant().to_string(), family })
    }

    /// Returns the deadline until which an open may wait for `owner`. There is none for an owner of the own tenant. The open
    /// then waits as long as a call at the own gate. An owner of another tenant pauses independently, so the open has a
    /// deadline.
    pub(super) fn open_deadline(&self, owner: MemberId) -> Option<Instant> {
        self.lender(owner).map(|_| Instant::now() + self.presence.config().family_wait)
    }

    /// Returns the longest time in which `owner` must answer an open.
    pub(super) fn answer_timeout(&self, owner: MemberId) -> Duration {
        let family_wait = || self.presence.config().family_wait;
        self.lender(owner).map_or(AGENT_TIMEOUT, |_| AGENT_TIMEOUT.min(family_wait()))
    }
}
