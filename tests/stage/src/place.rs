//! A simulated node with a run directory.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tempfile::TempDir;
use tenants::identity::TenantName;
use tenants::keep;
use tenants::member::{ImportError, Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::ticket::Ticket;
use vmm_pool::VirtualHandle;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, MemoryInfo};

/// A member over the simulated driver, as one process has.
pub type Process = Arc<Member<SimDriver>>;

/// One node and one run directory, under a directory that goes when this is dropped.
#[derive(Debug)]
pub struct Place {
    node: SimNode,
    observer: SimDriver,
    run_dir: OnceLock<RunDir>,
    /// Last, so that the directory goes after all that uses it.
    dir: TempDir,
}

impl Place {
    /// A node with one device per capacity in bytes.
    pub fn new(capacities_bytes: &[u64]) -> io::Result<Self> {
        let base = base_dir(capacities_bytes.iter().sum())?;
        let dir = tempfile::Builder::new().prefix("sublet-").tempdir_in(base)?;
        let node = SimNode::create(dir.path().join("node"), capacities_bytes)?;
        let observer = SimDriver::new(node.clone(), SimOptions::default());
        Ok(Self { node, observer, run_dir: OnceLock::new(), dir })
    }

    /// The directory of it all.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of the node.
    pub fn node_path(&self) -> PathBuf {
        self.path().join("node")
    }

    /// Where tenants live. Not there until somebody makes it.
    pub fn run_dir_path(&self) -> PathBuf {
        self.path().join("run")
    }

    /// Where tenants live, made when it is first needed.
    pub fn run_dir(&self) -> &RunDir {
        self.run_dir.get_or_init(|| {
            let opened = RunDir::open(Some(self.run_dir_path()), None);
            opened.unwrap_or_else(|error| panic!("{error}"))
        })
    }

    /// A driver of one more process.
    pub fn driver(&self, options: SimOptions) -> SimDriver {
        SimDriver::new(self.node.clone(), options)
    }

    /// A process that joins `tenant`.
    pub fn join(&self, tenant: &str, options: SimOptions) -> io::Result<Process> {
        self.join_with(tenant, options, |_| {})
    }

    /// As [`Place::join`], with settings as `change` leaves them.
    pub fn join_with(
        &self,
        tenant: &str,
        options: SimOptions,
        change: impl FnOnce(&mut MemberConfig),
    ) -> io::Result<Process> {
        self.join_keeping(tenant, options, |config, _| change(config))
    }

    /// The same, with what it does with saved contents and host memory besides.
    pub fn join_keeping(
        &self,
        tenant: &str,
        options: SimOptions,
        change: impl FnOnce(&mut MemberConfig, &mut keep::Settings),
    ) -> io::Result<Process> {
        let tenant = TenantName::new(tenant).unwrap_or_else(|error| panic!("{error}"));
        let mut config =
            MemberConfig::new(self.run_dir().clone(), tenant, "python train.py", "0.1.0");
        // A member's threads keep it until the program ends: only what contents take comes in.
        config.toucher_threads = 0;
        let mut keeps = keep::Settings::default();
        change(&mut config, &mut keeps);
        let member = keep::join(config, keeps, Arc::new(self.driver(options)));
        let member = member.map_err(io::Error::other)?;
        // Contents that go to files stay in memory, as the devices' do.
        member.pool().host_memory().set_file_dir("/dev/shm".into());
        Ok(member)
    }

    /// What any process sees of a device's memory.
    pub fn memory(&self, device: DeviceOrdinal) -> io::Result<MemoryInfo> {
        let looked = self.observer.memory_of(device);
        looked.map_err(|code| io::Error::other(format!("{device:?}: {code}")))
    }

    /// Bytes of a device that somebody holds.
    pub fn used_bytes(&self, device: DeviceOrdinal) -> io::Result<u64> {
        let info = self.memory(device)?;
        Ok(info.total_bytes - info.free_bytes)
    }
}

/// Redeems the ticket `fd` in `importer`, as its driver calls do.
pub fn redeem(importer: &Process, fd: &OwnedFd) -> Result<VirtualHandle, ImportError> {
    let read = Ticket::read(fd.as_fd()).unwrap_or_else(|error| panic!("{error}"));
    let ticket = read.unwrap_or_else(|| panic!("{fd:?} is no ticket"));
    importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test")
}

/// `/dev/shm`, or the directory for temporary files where that is too small, as in some containers.
fn base_dir(wanted_bytes: u64) -> io::Result<PathBuf> {
    let shared = PathBuf::from("/dev/shm");
    let room = nix::sys::statvfs::statvfs(&shared)
        .map(|found| found.blocks_available().saturating_mul(found.fragment_size()));
    if room.is_ok_and(|room| room > wanted_bytes) {
        return Ok(shared);
    }
    let other = std::env::temp_dir();
    if other.is_dir() {
        return Ok(other);
    }
    let text = "neither /dev/shm nor the directory for temporary files can hold the node";
    Err(io::Error::other(text))
}
