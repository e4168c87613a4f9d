//! The settings of a process that joins its tenant, and the errors of joining.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::driver::{PciAddress, RawContext, VaRange};
use vmm_pool::support::Unsupported;

use super::captures::Captures;
use super::counting::Counting;
use sublet_protocol::checkpoints::Checkpointer;
use sublet_protocol::class::TurnSettings;
use sublet_protocol::host_memory::HostLimit;
use sublet_protocol::identity::{FamilyName, TenantName};
use sublet_protocol::run_dir::{RunDir, RunDirError};

/// The default time for which an open of another tenant's memory waits while that tenant is paused.
pub const FAMILY_WAIT: Duration = Duration::from_secs(30);

/// The settings of a process that joins its tenant.
#[derive(Clone, Debug)]
pub struct MemberConfig {
    /// The directory where tenants live.
    pub run_dir: RunDir,
    /// The tenant to join.
    pub tenant: TenantName,
    /// Tenants that name the same family may open each other's memory.
    pub family: Option<FamilyName>,
    /// The time for which an open of another tenant's memory waits while that tenant is paused, or is being paused or resumed.
    pub family_wait: Duration,
    /// The settings by which the tenant takes turns.
    pub turns: TurnSettings,
    /// Start of the command line, for people.
    pub command: String,
    /// Version of the library, the same in all processes of a tenant.
    pub version: String,
    /// Returns the limits on the host memory that a pause may use. Called at each pause.
    pub host_limits: fn() -> Vec<HostLimit>,
    /// Returns the NUMA node of a device; none if the machine has only one node, or does not tell.
    pub node_of: fn(PciAddress) -> Option<u32>,
    /// Returns the contexts that the application has made itself. Called at each pause: their work must end too.
    pub own_contexts: fn() -> Vec<RawContext>,
    /// The process's stream captures: no pause begins while there are any.
    pub captures: Arc<Captures>,
    /// Returns the parts of own memory whose contents are not needed. Called at each pause, while no work of the application
    /// can reach a device. Answers within a bounded time.
    pub unused: fn() -> Vec<VaRange>,
    /// Returns the reason why work of this process may reach a device past its gate. Called at each pause. With a reason, only
    /// the process itself may request a pause, because it knows when it launches nothing.
    pub ungated: fn() -> Option<String>,
    /// Returns the reason why device memory of this process may have pins that Sublet does not see, and a remedy. Called at
    /// each pause that releases memory.
    pub unseen_pins: fn() -> Option<String>,
    /// Returns the reason why NCCL's memory cannot be released while the process runs on: work that is not held back may need
    /// it.
    pub unseen_nccl: fn() -> Option<String>,
    /// Returns a reason, unknown to the pool, why the driver could not restore this process after a deep pause. Called before
    /// one.
    pub unfreezable: fn() -> Option<String>,
    /// Returns access to the driver's calls about other processes, if that is possible from here. Called when needed.
    pub checkpointer: fn() -> Option<Arc<dyn Checkpointer>>,
    /// The number of threads that prepare new host memory. With none, the memory is prepared while contents are copied there.
    pub toucher_threads: usize,
    /// The count of the memory that the tenant's processes hold together, if this process takes part in one.
    pub counting: Option<Arc<dyn Counting>>,
}

impl MemberConfig {
    /// Makes settings from the required values, with defaults for the rest. By default there is no family, and the tenant is
    /// fair and does not queue. Host memory has no limit and may be on any node. The application has no contexts of its own,
    /// and no memory is known to be unused. All work is gated, and there are no unseen pins and no unseen work of NCCL. Nothing
    /// prevents a deep pause of the process, and there is no access to the driver for one. One thread prepares new host memory,
    /// and nothing is counted.
    pub fn new(run_dir: RunDir, tenant: TenantName, command: &str, version: &str) -> Self {
        Self {
            run_dir,
            tenant,
            family: None,
            family_wait: FAMILY_WAIT,
            turns: TurnSettings::default(),
            command: command.to_owned(),
            version: version.to_owned(),
            host_limits: Vec::new,
            node_of: |_| None,
            own_contexts: Vec::new,
            captures: Arc::default(),
            unused: Vec::new,
            ungated: || None,
            unseen_pins: || None,
            unseen_nccl: || None,
            unfreezable: || None,
            checkpointer: || None,
            toucher_threads: 1,
            counting: None,
        }
    }
}

/// The reason why a process could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The driver lacks what a pause needs.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The run directory is not usable.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// The system gave the process no thread, pipe or randomness. The job runs without Sublet. Raise `ulimit -u` or
    /// `ulimit -n`, then start it again.
    #[error("{what} could not be had: {source}")]
    System {
        /// The resource that was requested.
        what: &'static str,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}
