//! Members of a simulated node, and streams that speak to them byte by byte.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use sublet_stage::Place;
use tenants::identity::{FamilyName, TenantName};
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::ticket::Ticket;
use tenants::transport::{Connection, poll_until};
use tenants::wire::{Reply, Request};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _};
use vmm_pool::{Class, VirtualHandle};

/// A member on the simulated driver.
pub(crate) type SimMember = Member<SimDriver>;

/// An upper bound for a busy machine.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// One node and one run directory.
pub(crate) struct Stage {
    pub(crate) run_dir: RunDir,
    place: Place,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let place = Place::new(&[256 << 20]).unwrap();
        Self { run_dir: place.run_dir().clone(), place }
    }

    /// A directory next to the run directory.
    pub(crate) fn base(&self) -> &Path {
        self.place.path()
    }

    pub(crate) fn member(&self, tenant: &str) -> Arc<SimMember> {
        self.relative(tenant, None)
    }

    /// A member that names a family.
    pub(crate) fn relative(&self, tenant: &str, family: Option<&str>) -> Arc<SimMember> {
        self.patient(tenant, family, Duration::from_secs(10))
    }

    /// The same, which waits so long for another tenant.
    pub(crate) fn patient(
        &self,
        tenant: &str,
        family: Option<&str>,
        wait: Duration,
    ) -> Arc<SimMember> {
        let change = |config: &mut MemberConfig| {
            config.family = family.map(|name| FamilyName::new(name).unwrap());
            config.family_wait = wait;
        };
        let member = self.place.join_with(tenant, SimOptions::default(), change).unwrap();
        member.pool().driver().make_current(DeviceOrdinal(0)).unwrap();
        member
    }
}

pub(crate) fn name(tenant: &str) -> TenantName {
    TenantName::new(tenant).unwrap()
}

pub(crate) fn class() -> Class {
    Class { library: "test", ..Class::default() }
}

/// A ticket for fresh memory of `owner`, and the memory's handle.
pub(crate) fn ticket_of(owner: &SimMember) -> (Ticket, VirtualHandle) {
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let handle = owner.pool().enter().create(GRANULARITY_BYTES, &prop, class()).unwrap();
    let fd = owner.sharing().issue_ticket(&owner.pool().enter(), handle).unwrap();
    (Ticket::read(fd.as_fd()).unwrap().unwrap(), handle)
}

/// A bare stream to a member's agent.
pub(crate) fn stream(member: &SimMember) -> UnixStream {
    UnixStream::connect(member.presence().socket_path()).unwrap()
}

/// The member's agent answers a new client.
pub(crate) fn answers(member: &SimMember) {
    let mut connection = Connection::connect(member.presence().socket_path(), soon()).unwrap();
    let (reply, _) = connection.exchange(&Request::Hello, 0, soon()).unwrap();
    assert!(matches!(reply, Reply::Member(info) if info.id == member.presence().id()));
}

/// What arrives until the other end closes; it must, before `deadline`.
pub(crate) fn rest_of(
    stream: &mut (impl std::io::Read + std::os::fd::AsFd),
    deadline: Instant,
) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let ready = poll_until(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)], deadline);
        assert!(ready.unwrap(), "the other end was not closed in time");
        let mut buffer = [0; 4096];
        match stream.by_ref().read(&mut buffer) {
            Ok(0) => return all,
            Ok(length) => all.extend_from_slice(&buffer[..length]),
            // A peer that closes with unread bytes resets the connection.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return all,
            Err(error) => panic!("{error}"),
        }
    }
}
