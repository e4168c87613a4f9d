//! The driver's calls about other processes: they tell a process's state, take its contexts off the devices, and restore them.
//!
//! The driver lets no process make these calls about itself, and a process whose contexts are off the devices may make none. So
//! a process of a job has a child make them. The child is the `sublet` command, and has no other part in the job
//! (`tenants/deep`).

use std::time::Duration;

use vmm_pool::driver::DriverCode;
pub use vmm_pool::driver::ProcessState;

/// The reason why the driver did not freeze or restore one process.
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
        /// The time for which the caller waited.
        waited: Duration,
    },
    /// The process is not in the state that the driver needs before it can freeze or restore it. The contents are
    /// kept. The next command continues.
    #[error("the driver says that it is {state:?}")]
    State { state: ProcessState },
}

/// The error for a machine without a driver that can do this, with the `reason`.
pub fn unavailable(reason: String) -> CheckpointError {
    CheckpointError::Unavailable { reason }
}

/// A driver call that freezes or restores another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Makes the process's driver calls wait from now on. Waits this long at most for calls under way. After that it fails, and
    /// the process runs on.
    Lock(Duration),
    /// Takes all that a locked process has on devices off them. Blocks until that is done.
    Checkpoint,
    /// Undoes a checkpoint. Blocks until that is done. After a failure with `OUT_OF_MEMORY` it can be tried again.
    Restore,
    /// Lets the calls of a locked process go on.
    Unlock,
}

impl Call {
    /// The driver's name of this call.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock(_) => "cuCheckpointProcessLock",
            Self::Checkpoint => "cuCheckpointProcessCheckpoint",
            Self::Restore => "cuCheckpointProcessRestore",
            Self::Unlock => "cuCheckpointProcessUnlock",
        }
    }
}

/// The driver's calls about another process, named by its id in this pid namespace. From any thread.
pub trait Checkpointer: std::fmt::Debug + Send + Sync {
    /// Returns the state of a process, as the driver reports it. Does not wait for the process.
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
