//! Deep pauses: the driver takes the contexts of a tenant's processes off the GPUs behind a pause, and brings them back before a resume.
//! The coordinator knows of it by its door, [`sublet_coordinator::Contexts`].

#![forbid(unsafe_code)]

mod by_command;
mod freezing;

use std::time::Duration;

use sublet_protocol::checkpoints::Call;

pub use by_command::{ByCommand, SUBCOMMAND, serve};
pub use freezing::contexts;

/// The time limit of a checkpoint or a restore, for which the driver has no timeout. By what was measured, it is enough
/// for 8 TiB of pinned host memory.
const DRIVER_TIMEOUT: Duration = Duration::from_mins(3);
/// Beyond the timeout that the driver is told, for its answer.
const ANSWER_MARGIN: Duration = Duration::from_secs(5);

/// The time that a call may take.
fn limit(call: Call) -> Duration {
    match call {
        Call::Lock(timeout) => timeout + ANSWER_MARGIN,
        Call::Checkpoint | Call::Restore | Call::Unlock => DRIVER_TIMEOUT,
    }
}

/// The word for a call, by which reports list its time.
fn word(call: Call) -> &'static str {
    match call {
        Call::Lock(_) => "lock",
        Call::Checkpoint => "checkpoint",
        Call::Restore => "restore",
        Call::Unlock => "unlock",
    }
}
