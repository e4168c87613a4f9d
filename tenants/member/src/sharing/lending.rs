//! Memory that this process gives to others: to processes of its own tenant, which take part in its pauses, and on lease to
//! processes of other tenants of its family, which do not.
//!
//! Only the agent thread does this. So the loans that it reports after the gate was closed are complete: a process that is not
//! active lends nothing.

use std::os::fd::OwnedFd;

use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;
use vmm_pool::{AllocationId, Lease, LentTotals, LostImports, PoolError, Selection};

use super::Sharing;
use crate::clients::Client;
use crate::failures::{PID, faulted, frozen, pool_failure};
use sublet_protocol::family::{Standing, admit};
use sublet_protocol::identity::{FamilyName, MemberId, TenantName};
use sublet_protocol::region;
use sublet_protocol::scope::Scope;
use sublet_protocol::ticket;
use sublet_protocol::wire::{
    Borrower, FDS_PER_MESSAGE_MAX, Failure, FailureKind, FetchFds, FetchPurpose, Lending, Lent,
    MemberState, Wanted,
};

/// The library name of memory that was opened by a `cudaIpc` handle.
pub const IPC_LIBRARY: &str = "ipc";

/// The number of remembered borrowers above which borrowers without memory are forgotten.
const BORROWERS_KEPT: usize = 64;

/// The memory that an importer gets.
#[derive(Default)]
pub(crate) struct HandedOut {
    pub(crate) fds: Vec<OwnedFd>,
    /// The tags of redeemed tickets.
    pub(crate) tags: Vec<String>,
    /// The allocations that this process does not have any more.
    pub(crate) missing: Vec<AllocationId>,
    /// The devices of lent memory.
    pub(crate) devices: Vec<String>,
}

/// A process of another tenant to which memory was lent.
#[derive(Clone, Debug)]
pub(super) struct KnownBorrower {
    tenant: TenantName,
    pid: Option<u32>,
}

impl<D: Driver> Sharing<D> {
    /// Returns descriptors of the memory that the importer at `client` requests.
    pub(crate) fn hand_out(
        &self,
        fetch: &FetchFds,
        client: &mut Client,
    ) -> Result<HandedOut, Failure> {
        let fds_max =
            if fetch.borrower.is_some() { FDS_PER_MESSAGE_MAX / 2 } else { FDS_PER_MESSAGE_MAX };
        if fetch.allocations.len() > fds_max {
            // A process requests more pieces of shared memory than one message may hold. No memory was given. This is
            // a fault of Sublet, or another program is connected.
            return Err(FailureKind::Unknown.because(format!(
                "{} descriptors in one request, and {fds_max} are the limit",
                fetch.allocations.len()
            )));
        }
        match &fetch.borrower {
            None => self.hand_out_inside(fetch, client),
            Some(borrower) => self.lend(fetch, borrower, client),
        }
    }

    /// Gives memory to a process of the own tenant.
    fn hand_out_inside(&self, fetch: &FetchFds, client: &mut Client) -> Result<HandedOut, Failure> {
        let FetchFds { allocations, purpose, importer, .. } = fetch;
        let dir = self.presence.dir();
        self.presence.check_importer(client, *importer, Some(dir), dir.tenant())?;
        match self.lifecycle.state() {
            MemberState::Faulted => return Err(faulted()),
            MemberState::Deep => return Err(frozen(self.presence.tenant())),
            MemberState::Active
            | MemberState::Offloading
            | MemberState::Paused
            | MemberState::Restoring => {}
        }
        self.sharers.note(*importer, &client.connection);
        let pool = &self.pool;
        let mut handed = HandedOut::default();
        for &id in allocations {
            let fd = match *purpose {
                FetchPurpose::Redeem { serial } => {
                    // Read before: redeeming may be the last use of the allocation in this process.
                    let tag = pool.holdings().tag_of(id);
                    let fd = pool.redeem(id, serial, (*importer).into());
                    fd.inspect(|_| handed.tags.push(tag))
                }
                FetchPurpose::Again => pool.hand_out(id, (*importer).into()),
            };
            match fd {
                Ok(fd) => handed.fds.push(fd),
                Err(error) => handed.note_missing(id, &error)?,
            }
        }
        Ok(handed)
    }

    /// Gives memory to a process of another tenant, under leases.
    fn lend(
        &self,
        fetch: &FetchFds,
        borrower: &Borrower,
        client: &mut Client,
    ) -> Result<HandedOut, Failure> {
        let FetchFds { allocations, purpose, importer, .. } = fetch;
        let tenant = self.admitted(borrower)?;
        let dir = self.presence.run_dir().existing_tenant(&tenant).ok().flatten();
        self.presence.check_importer(client, *importer, dir.as_ref(), &tenant)?;
        self.may_lend()?;
        let pid = client.connection.peer().pid();
        self.note_borrower(*importer, KnownBorrower { tenant, pid });
        let pool = &self.pool;
        let mut handed = HandedOut::default();
        for &id in allocations {
            let serial = match *purpose {
                FetchPurpose::Redeem { serial } => serial,
                FetchPurpose::Again => 0,
            };
            // Read before: redeeming may be the last use of the allocation in this process.
            let device = pool.holdings().device_of(id);
            let device = device.map(|device| pool.devices().uuid(device)).unwrap_or_default();
            let (lease, watch) = ticket::lease().map_err(|error| {
                // The owner has no file descriptor left to share its memory. No memory was given. Raise the limit
                // (`ulimit -n`), or close files in that process.
                FailureKind::Driver.because(format!(
                    "process {PID} can lend no more ({error}): raise its limit of open files (ulimit -n), or close \
                     what is open"
                ))
            })?;
            match pool.lend(id, serial, Lease { borrower: (*importer).into(), watch }) {
                Ok(fd) => {
                    handed.fds.extend([fd, lease]);
                    handed.devices.push(device);
                }
                Err(PoolError::Offloaded { tag }) => {
                    return Err(self.lender_away(&format!("memory of tag '{tag}' is paused")));
                }
                Err(error) => handed.note_missing(id, &error)?,
            }
        }
        Ok(handed)
    }

    /// The tenant of an importer, if this process may lend to it.
    fn admitted(&self, borrower: &Borrower) -> Result<TenantName, Failure> {
        let no_name = |what: &str| {
            // A request for memory lacks the name of a tenant or family. No memory was given. This is a fault of
            // Sublet, or another program is connected.
            FailureKind::Unknown.because(format!("process {PID}: what asks names no {what}"))
        };
        let tenant = TenantName::new(&borrower.tenant).map_err(|_text| no_name("tenant"))?;
        let family = borrower.family.as_deref().map(FamilyName::new).transpose();
        let family = family.map_err(|_text| no_name("family"))?;
        let ours = Standing { tenant: self.presence.tenant(), family: self.presence.family() };
        let theirs = Standing { tenant: &tenant, family: family.as_ref() };
        admit(ours, theirs).map_err(|error| FailureKind::Unknown.because(error.to_string()))?;
        Ok(tenant)
    }

    /// Refuses to lend unless the process is active: a pause has already counted the loans.
    fn may_lend(&self) -> Result<(), Failure> {
        match self.lifecycle.state() {
            MemberState::Active => Ok(()),
            MemberState::Paused | MemberState::Deep => {
                Err(self.lender_away(&format!("tenant '{}' is paused", self.presence.tenant())))
            }
            state @ (MemberState::Offloading | MemberState::Restoring) => {
                let tenant = self.presence.tenant();
                // The owner of shared memory is being paused or resumed. This tenant is unchanged. When `sublet ps`
                // shows that the owner runs, resume this tenant again.
                Err(FailureKind::NotNow.because(format!(
                    "process {PID} of tenant '{tenant}' is {state:?}: a pause or resume of it is under way"
                )))
            }
            MemberState::Faulted => Err(faulted()),
        }
    }

    /// The tenant that lends the memory is paused. This tenant stays paused. Resume the lender first, with the
    /// command in the message.
    fn lender_away(&self, why: &str) -> Failure {
        let tenant = self.presence.tenant();
        FailureKind::LenderAway.because(format!(
                "{why}, and with it the memory of its process {PID}: resume that first (sublet resume {tenant})"
            ))
    }

    fn note_borrower(&self, importer: MemberId, known: KnownBorrower) {
        if lock(&self.borrowers).len() >= BORROWERS_KEPT {
            let lent = self.pool.holdings().lent(&Selection::Whole);
            lock(&self.borrowers).retain(|id, _| lent.contains_key(&(*id).into()));
        }
        lock(&self.borrowers).insert(importer, known);
    }

    /// Returns the memory of `scope` that other tenants have open, and the released memory here that is borrowed from them.
    /// Also returns the memory of another process of its own tenant that this process has open. Never blocks.
    pub(crate) fn lending(&self, scope: &Scope) -> Lending {
        let mut lent = self.lent(&scope.paused(self.presence.id()));
        lent.extend(self.opened(scope));
        let mut wanted: Vec<Wanted> = Vec::new();
        for (owner, tenant) in self.sharers.known_lenders() {
            let LostImports { count, bytes } = self.pool.holdings().imports_away(owner.into());
            if count > 0 {
                wanted.push(Wanted { tenant: tenant.to_string(), count, bytes });
            }
        }
        let holders = self.pool.holdings().references(&Selection::Whole).holders;
        let partners = self.sharers.living(&holders);
        Lending { lent, wanted, partners }
    }

    /// Returns the memory that this process has open and that another process of its tenant is about to pause by tag. Memory
    /// without which this process has agreed to run does not count.
    fn opened(&self, scope: &Scope) -> Option<Lent> {
        let Scope::Tags { tags, owner: Some(owner) } = scope else { return None };
        let tags = tags.to_pause();
        let mut opened = Lent {
            tenant: self.presence.tenant().to_string(),
            pid: Some(std::process::id()),
            ..Lent::default()
        };
        for (class, bytes) in self.pool.holdings().imports_here((*owner).into()) {
            if tags.has(&class.tag) && !region::runs_without(&class.tag) {
                let is_handle = class.library == IPC_LIBRARY;
                opened.handles += u64::from(is_handle);
                opened.tickets += u64::from(!is_handle);
                opened.bytes += bytes;
            }
        }
        (opened.bytes > 0).then_some(opened)
    }

    /// Returns the memory of `selection` that processes of other tenants have open.
    pub(crate) fn lent(&self, selection: &Selection) -> Vec<Lent> {
        let by_borrower = self.pool.holdings().lent(selection);
        let borrowers = lock(&self.borrowers);
        let named = by_borrower.into_iter().map(|(id, totals)| {
            let LentTotals { handles, tickets, bytes } = totals;
            let known = borrowers.get(&id.into());
            let tenant = known.map(|known| known.tenant.to_string()).unwrap_or_default();
            Lent { tenant, pid: known.and_then(|known| known.pid), handles, tickets, bytes }
        });
        named.collect()
    }
}

impl HandedOut {
    /// Notes that `id` was not handed out because of `error`, if it is missing; other errors fail.
    fn note_missing(&mut self, id: AllocationId, error: &PoolError) -> Result<(), Failure> {
        if !matches!(error, PoolError::StaleHandle { .. }) {
            return Err(pool_failure(error));
        }
        self.missing.push(id);
        Ok(())
    }
}
