//! Processes with which this one shares memory: the owners of its imports, the holders of its own memory, and whether they
//! still live. A name that is missing from the run directory does not prove that its process has ended.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;
use vmm_pool::{LostImports, PeerId, Pool};

use super::Missing;
use crate::{notes::Notes, presence::Presence};
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::references::Partner;
use sublet_protocol::transport::{Connection, TransportError, Watched, command_of, has_ended};

/// A process from which memory was imported, or to which memory was given.
#[derive(Debug)]
pub(super) struct Sharer {
    /// The id that the kernel gives, if the process has one in our namespace.
    pid: Option<u32>,
    /// Start of its command line.
    command: String,
    /// Its tenant, if that is another one.
    tenant: Option<TenantName>,
    /// The handle that reports its end; none if the end cannot be known.
    process: Option<Watched>,
}

impl Sharer {
    fn at(connection: &Connection, tenant: Option<TenantName>) -> Self {
        let pid = connection.peer().pid();
        // The end of a process does not tell the end of a member that it left behind: this peer is another member of this same
        // process.
        let is_own = pid == Some(std::process::id());
        let process = if is_own { None } else { connection.process().into_watched() };
        Self { pid, command: pid.map(command_of).unwrap_or_default(), tenant, process }
    }
}

impl fmt::Display for Sharer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} ({})", self.command)?,
            None => f.write_str("a process of another pid namespace")?,
        }
        self.tenant.as_ref().map_or(Ok(()), |tenant| write!(f, " of tenant '{tenant}'"))
    }
}

/// The owners of imported memory, also after their end, and the holders of own memory. Its locks are leaves: a connection is
/// taken out for use and returned.
#[derive(Debug)]
pub(crate) struct Sharers<D: Driver> {
    pool: Arc<Pool<D>>,
    pub(super) presence: Arc<Presence>,
    known: Mutex<HashMap<MemberId, Sharer>>,
    /// The tenants of owners that are in another tenant.
    pub(super) lenders: Mutex<HashMap<MemberId, TenantName>>,
    /// Unused connections to owners.
    pub(super) idle: Mutex<HashMap<MemberId, Connection>>,
}

impl<D: Driver> Sharers<D> {
    pub(super) fn new(pool: Arc<Pool<D>>, presence: Arc<Presence>) -> Self {
        let (known, lenders, idle) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { pool, presence, known, lenders, idle }
    }

    /// Connects to `owner`. The kernel tells which process and which command that is. Both are remembered beyond its end.
    pub(super) fn connect(
        &self,
        owner: MemberId,
        deadline: Instant,
    ) -> Result<Connection, TransportError> {
        let connection = Connection::connect(&self.place_of(owner), deadline)?;
        // The answer of this peer becomes memory that this process writes to.
        connection.check_neighbour()?;
        self.note(owner, &connection);
        Ok(connection)
    }

    /// Records `other`, at the other end of `connection`, before memory is shared with it.
    pub(super) fn note(&self, other: MemberId, connection: &Connection) {
        let is_watched = |known: &Sharer| known.process.is_some();
        if lock(&self.known).get(&other).is_none_or(|known| !is_watched(known)) {
            let known = Sharer::at(connection, self.lender(other));
            lock(&self.known).insert(other, known);
        }
    }

    /// All processes of the tenant with which this one shares memory, except for those that it knows to have ended. `holders`
    /// hold memory that it owns.
    pub(crate) fn living(&self, holders: &BTreeSet<PeerId>) -> Vec<Partner> {
        let owners = self.pool.holdings().import_owners().into_iter().map(MemberId::from);
        let mut all: BTreeSet<_> = owners.filter(|owner| self.lender(*owner).is_none()).collect();
        all.extend(holders.iter().copied().map(MemberId::from));
        let living = all.into_iter().filter(|other| !self.has_ended(*other));
        let partner = |member| {
            let pid = lock(&self.known).get(&member).and_then(|known| known.pid);
            Partner { member, pid }
        };
        living.map(partner).collect()
    }

    /// `owner` in words, if this process has connected to it before.
    pub(super) fn known_owner(&self, owner: MemberId) -> Option<String> {
        lock(&self.known).get(&owner).map(ToString::to_string)
    }

    /// `owner` in words.
    pub(super) fn owner_in_words(&self, owner: MemberId) -> String {
        self.known_owner(owner)
            .unwrap_or_else(|| format!("the process at {}", self.place_of(owner).display()))
    }

    /// Has `other` ended? The process itself tells, or its name leads to no listener. If the process cannot be watched, only
    /// its name tells. A missing name counts only if names stay. It does not count after the tenant's directory was removed,
    /// when others may not have made their names again yet.
    pub(super) fn has_ended(&self, other: MemberId) -> bool {
        let path = self.place_of(other);
        let told = lock(&self.known)
            .get(&other)
            .and_then(|known| Some(known.process.as_ref()?.has_ended()));
        let is_gone =
            || told.is_none() && path.symlink_metadata().is_err() && self.presence.names_stay();
        told == Some(true) || has_ended(&path) || is_gone()
    }

    /// The ended owners of imports.
    fn dead_owners(&self) -> Vec<(MemberId, String)> {
        let owners = self.pool.holdings().import_owners().into_iter().map(MemberId::from);
        let dead = owners.filter(|owner| self.has_ended(*owner));
        dead.map(|owner| (owner, self.owner_in_words(owner))).collect()
    }

    /// Drops everything that is kept for ended processes: connections to them, and the names of those from which no memory is
    /// imported any more.
    pub(crate) fn forget_ended(&self) {
        let mut kept: BTreeSet<MemberId> = lock(&self.idle).keys().copied().collect();
        kept.extend(lock(&self.known).keys().copied());
        let importing = self.pool.holdings().import_owners();
        for owner in kept.into_iter().filter(|owner| self.has_ended(*owner)) {
            lock(&self.idle).remove(&owner);
            if !importing.contains(&owner.into()) {
                lock(&self.known).remove(&owner);
                lock(&self.lenders).remove(&owner);
            }
        }
    }

    /// One sentence for each dead owner whose memory this process had imported and has released.
    pub(crate) fn lost_imports(&self) -> Vec<String> {
        let sentence = |(owner, words): (MemberId, String)| {
            let LostImports { count, bytes } = self.pool.holdings().imports_away(owner.into());
            (count > 0).then(|| {
                format!(
                    "{words} has ended: {bytes} bytes in {count} allocations that were imported from it cannot \
                     come back; end this process, or resume with --without-lost"
                )
            })
        };
        self.dead_owners().into_iter().filter_map(sentence).collect()
    }

    /// Gives up imports from dead owners, and reports each owner in the notes and in one sentence.
    pub(crate) fn leave_lost_out(&self, notes: &Notes) -> Vec<String> {
        let each = self.dead_owners().into_iter().filter_map(|(owner, words)| {
            let lost = self.pool.holdings().give_up_imports(owner.into());
            (lost.count > 0).then(|| note_lost(lost, &format!("{words}, which has ended"), notes))
        });
        each.collect()
    }

    /// Gives up imports that a living owner does not have any more, and reports them in the notes and in one sentence.
    pub(crate) fn leave_missing_out(&self, missing: &Missing, notes: &Notes) -> String {
        let lost = self.pool.holdings().give_up_missing(&missing.ids);
        let owner = format!("{}, which does not have them any more", missing.owner);
        note_lost(lost, &owner, notes)
    }
}

fn note_lost(LostImports { count, bytes }: LostImports, owner: &str, notes: &Notes) -> String {
    let note = format!(
        "{bytes} bytes in {count} allocations that were imported from {owner}, are lost: their addresses are unmapped, and work that \
         touches them fails"
    );
    notes.add(note.clone());
    note
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
    use vmm_pool::driver::{AllocationProp, DeviceOrdinal};
    use vmm_pool::{Class, Contents, VirtualHandle};

    use super::*;
    use crate::{Member, MemberConfig};
    use sublet_coordinator::{Coordinator, Options};
    use sublet_protocol::run_dir::RunDir;
    use sublet_protocol::ticket::Ticket;

    type Process = Arc<Member<SimDriver>>;

    struct Tenant {
        node: SimNode,
        run_dir: RunDir,
        name: TenantName,
        _base: tempfile::TempDir,
    }

    impl Tenant {
        fn new() -> Self {
            let base = tempfile::tempdir().unwrap();
            Self {
                node: SimNode::private(&[8 * GRANULARITY_BYTES]).unwrap(),
                run_dir: RunDir::open(Some(base.path().join("run")), None).unwrap(),
                name: TenantName::new("train").unwrap(),
                _base: base,
            }
        }

        fn join(&self) -> Process {
            let (run_dir, name) = (self.run_dir.clone(), self.name.clone());
            let config = MemberConfig::new(run_dir, name, "python train.py", "0.1.0");
            let driver = SimDriver::new(self.node.clone(), SimOptions::default());
            Member::join(config, Arc::new(driver)).unwrap()
        }
    }

    /// Makes new memory of `owner`, and returns it as `importer` holds it.
    fn share(owner: &Process, importer: &Process, contents: Contents) -> VirtualHandle {
        let class = Class { library: "test", tag: String::new(), contents };
        let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
        let shared = owner.pool().enter().create(GRANULARITY_BYTES, &prop, class).unwrap();
        let fd = owner.sharing.issue_ticket(&owner.pool().enter(), shared).unwrap();
        let ticket = Ticket::read(fd.as_fd()).unwrap().unwrap();
        importer.sharing.redeem_ticket(&importer.pool().enter(), &ticket, "test").unwrap()
    }

    #[test]
    fn nothing_is_kept_for_owners_that_ended_when_their_memory_is_freed() {
        let tenant = Tenant::new();
        let importer = tenant.join();
        for _ in 0..3 {
            let owner = tenant.join();
            let imported = share(&owner, &importer, Contents::Discard);
            owner.leave();
            importer.pool().enter_giving_up().release(imported).unwrap();
        }
        assert_eq!(
            (
                lock(&importer.sharing.sharers().idle).len(),
                lock(&importer.sharing.sharers().known).len()
            ),
            (3, 3)
        );
        let mut coordinator = Coordinator::new(tenant.run_dir, tenant.name, Options::default());
        let _paused = coordinator.pause(&mut |_| {}).unwrap();
        assert_eq!(
            (
                lock(&importer.sharing.sharers().idle).len(),
                lock(&importer.sharing.sharers().known).len()
            ),
            (0, 0)
        );
    }

    #[test]
    fn owners_whose_names_went_with_the_directory_are_not_taken_for_dead() {
        let tenant = Tenant::new();
        let (owner, importer) = (tenant.join(), tenant.join());
        share(&owner, &importer, Contents::Keep);
        std::fs::remove_dir_all(tenant.run_dir.path()).unwrap();
        assert_eq!(importer.sharing.sharers().dead_owners(), []);
        // The importer has its name again, and the owner does not.
        let _again = importer.presence().listen_again().unwrap();
        assert_eq!(importer.sharing.sharers().dead_owners(), []);
        importer.leave();
        owner.leave();
    }
}
