//! The driver's calls about other processes: where one stands, and taking its contexts off the devices and back.
//!
//! The driver lets no process make them about itself, and a process whose contexts are away may make none. So a process of a job has a child make
//! them, which is the `sublet` command and has no other part in the job (`tenants/deep`).

use std::time::Duration;

use vmm_pool::driver::DriverCode;
pub use vmm_pool::driver::ProcessState;

/// Why the driver did not do its part for one process.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// There is no driver here that can.
    #[error("{reason}")]
    Unavailable { reason: String },
    /// The driver refused to freeze or restore a process. The message has the call and the driver's code. The
    /// contents are kept. The next command tries again.
    #[error("{call} failed with {code}")]
    Driver { call: &'static str, code: DriverCode },
    /// The driver gave no answer while it froze or restored a process, and may still be busy. The contents are kept.
    /// The next command continues.
    #[error("{call} did not return within {} s", waited.as_secs())]
    Silent {
        call: &'static str,
        /// For how long it was waited for.
        waited: Duration,
    },
    /// The process is not in the state that the driver needs before it can freeze or restore it. The contents are
    /// kept. The next command continues.
    #[error("the driver says that it is {state:?}")]
    State { state: ProcessState },
}

/// There is no driver here that can, for this `reason`.
pub fn unavailable(reason: String) -> CheckpointError {
    CheckpointError::Unavailable { reason }
}

/// A call of the driver's that moves another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Has the process's driver calls wait from now on. Waits for those under way, for so long at most: then it fails, and the process runs on.
    Lock(Duration),
    /// Takes what a locked process has on devices off them. Blocks as long as that takes.
    Checkpoint,
    /// Undoes that. Blocks as long as that takes; when it fails with `OUT_OF_MEMORY` it can be tried again.
    Restore,
    /// Lets the calls of a locked process go on.
    Unlock,
}

impl Call {
    /// The driver's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock(_) => "cuCheckpointProcessLock",
            Self::Checkpoint => "cuCheckpointProcessCheckpoint",
            Self::Restore => "cuCheckpointProcessRestore",
            Self::Unlock => "cuCheckpointProcessUnlock",
        }
    }
}

/// The calls of the driver's that are about another process, by its id in this pid namespace. From any thread.
pub trait Checkpointer: std::fmt::Debug + Send + Sync {
    /// Returns where a process stands, as the driver says. Does not wait for the process.
    ///
    /// # Errors
    /// [`CheckpointError`].
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError>;

    /// Makes `call` about a process.
    ///
    /// # Errors
    /// [`CheckpointError`].
    fn make(&self, call: Call, pid: u32) -> Result<(), CheckpointError>;
}
