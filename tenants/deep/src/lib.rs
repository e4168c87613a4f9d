//! Deep pauses: the driver removes the contexts of a tenant's processes from the GPUs after a pause, and restores them before a
//! resume. The coordinator uses this crate through the trait [`sublet_coordinator::Contexts`].

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
/// The time for an answer, in addition to the timeout that the driver gets.
const ANSWER_MARGIN: Duration = Duration::from_secs(5);

/// Returns the longest time of a call.
fn limit(call: Call) -> Duration {
    match call {
        Call::Lock(timeout) => timeout + ANSWER_MARGIN,
        Call::Checkpoint | Call::Restore | Call::Unlock => DRIVER_TIMEOUT,
    }
}

/// Returns the name of a call, under which reports list its time.
fn word(call: Call) -> &'static str {
    match call {
        Call::Lock(_) => "lock",
        Call::Checkpoint => "checkpoint",
        Call::Restore => "restore",
        Call::Unlock => "unlock",
    }
}
