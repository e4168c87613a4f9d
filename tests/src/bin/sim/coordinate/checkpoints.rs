//! The driver's part of deep pauses, on the simulated node. One of its calls may fail.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sublet_tests::Outcome;
use tenants::checkpoints::{Call, CheckpointError, Checkpointer, ProcessState};
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::SimNode;

/// The calls that can fail.
pub(crate) const CALLS: [&str; 4] = [
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
];

/// A call that fails once.
#[derive(Clone, Debug)]
pub(crate) struct Fails {
    pub(crate) call: &'static str,
    /// So many that are made before it do not.
    left: Arc<AtomicU64>,
    fired: Arc<AtomicU64>,
}

impl Fails {
    /// The one behind so many others fails.
    pub(crate) fn behind(call: &'static str, others: u64) -> Self {
        Self { call, left: Arc::new((others + 1).into()), fired: Arc::default() }
    }

    /// How often it has failed.
    pub(crate) fn fired(&self) -> u64 {
        self.fired.load(Ordering::Relaxed)
    }

    fn now(&self, call: &str) -> bool {
        let fails = self.call == call && self.left.fetch_sub(1, Ordering::Relaxed) == 1;
        self.fired.fetch_add(u64::from(fails), Ordering::Relaxed);
        fails
    }
}

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct NodeCheckpoints {
    node: SimNode,
    fails: Option<Fails>,
}

impl NodeCheckpoints {
    pub(crate) fn open(node: &Path, fails: Option<Fails>) -> Outcome<Arc<dyn Checkpointer>> {
        Ok(Arc::new(Self { node: SimNode::open(node)?, fails }))
    }
}

impl Checkpointer for NodeCheckpoints {
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
        let call = "cuCheckpointProcessGetState";
        let state = self.node.process_state(pid);
        state.map_err(|code| CheckpointError::Driver { call, code })
    }

    fn make(&self, call: Call, pid: u32) -> Result<(), CheckpointError> {
        let fails = self.fails.as_ref().is_some_and(|fails| fails.now(call.name()));
        let made = match call {
            Call::Lock(_) | Call::Checkpoint | Call::Restore | Call::Unlock if fails => {
                Err(DriverCode::UNKNOWN)
            }
            Call::Lock(timeout) => self.node.lock_process(pid, Some(timeout)),
            Call::Checkpoint => self.node.checkpoint_process(pid),
            Call::Restore => self.node.restore_process(pid),
            Call::Unlock => self.node.unlock_process(pid),
        };
        made.map_err(|code| CheckpointError::Driver { call: call.name(), code })
    }
}
