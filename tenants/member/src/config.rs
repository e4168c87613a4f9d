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

/// The default time that opening memory of another tenant waits while that tenant is paused.
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
    /// The time that opening memory of another tenant waits while that tenant is paused, or on its way.
    pub family_wait: Duration,
    /// The settings by which the tenant takes turns.
    pub turns: TurnSettings,
    /// Start of the command line, for people.
    pub command: String,
    /// Version of the library, the same in all processes of a tenant.
    pub version: String,
    /// The limits on the host memory that a pause may take, asked at each pause.
    pub host_limits: fn() -> Vec<HostLimit>,
    /// On which NUMA node a device is; none where the machine has one only, or does not say.
    pub node_of: fn(PciAddress) -> Option<u32>,
    /// Contexts that the application has made for itself, asked at each pause: their work must end too.
    pub own_contexts: fn() -> Vec<RawContext>,
    /// The process's stream captures: no pause begins while there are any.
    pub captures: Arc<Captures>,
    /// Parts of own memory whose contents nobody needs, asked at each pause, while nothing of the application's
    /// can reach a device. Answers within a bounded time.
    pub unused: fn() -> Vec<VaRange>,
    /// Why work of this process may reach a device past its gate, asked at each pause. Then only the process
    /// itself may ask for one, which knows when it launches nothing.
    pub ungated: fn() -> Option<String>,
    /// Why device memory of this process may be pinned where nobody sees it, and what would help; asked at each pause
    /// that is to take some away.
    pub unseen_pins: fn() -> Option<String>,
    /// Why NCCL's memory cannot leave while the process runs on: work may need it that is not held back.
    pub unseen_nccl: fn() -> Option<String>,
    /// Why the driver could not bring this process back from a deep pause, as far as the pool does not know; asked before one.
    pub unfreezable: fn() -> Option<String>,
    /// The way to call the driver about processes of tenants, where that is possible from here. Asked when it is
    /// needed.
    pub checkpointer: fn() -> Option<Arc<dyn Checkpointer>>,
    /// The number of threads that bring new host memory in. With none, it comes in as contents are copied there.
    pub toucher_threads: usize,
    /// The count of what the tenant's processes hold together, where it takes part in one.
    pub counting: Option<Arc<dyn Counting>>,
}

impl MemberConfig {
    /// Makes settings from what must be given, with defaults for the rest. By default there is no family, and the
    /// tenant is fair and does not queue. Host memory has no limit and lies anywhere.
    /// The application has no contexts of its own, and nothing is known to be unused. All work is gated, and no pins
    /// and no work of NCCL's are unseen. Nothing keeps the process from a deep pause, and there is no way to the driver
    /// for one. One thread brings new host memory in, and nothing is counted.
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

/// Why a process could not join.
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
