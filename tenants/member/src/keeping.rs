//! The interface for a crate above that works on saved contents and host memory, outside of pauses and resumes.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vmm_pool::driver::Driver;

use super::Member;
use super::failures::PID;
use sublet_protocol::wire::{
    Failure, FailureKind, HostProgress, HostStep, Reply, SaveStep, SpillStep,
};

/// The part that the agent thread calls. Never blocks.
pub trait Keeping<D: Driver>: Debug + Send + Sync {
    /// Does a step with the host memory of the next pause, and reports the progress.
    fn host(self: Arc<Self>, step: HostStep) -> HostProgress;

    /// Does periodic work. The agent calls it from time to time.
    fn look(self: Arc<Self>);

    /// Prepares for the end of the process: waits a bounded time for a driver call under way.
    fn end(&self);

    /// Makes the part for the worker thread.
    fn desk(&self, member: &Arc<Member<D>>) -> Box<dyn Desk>;
}

/// The part that the worker thread calls, between steps of pauses and resumes.
pub trait Desk: Debug + Send {
    /// Does one step for `connection`, and answers.
    fn save(&mut self, connection: u64, step: SaveStep) -> Reply;

    /// Does one step, unless no process waits for it any more, and answers.
    ///
    /// # Errors
    /// The answer of a step that failed.
    fn spill(&mut self, step: SpillStep, is_called_off: &AtomicBool) -> Result<Reply, Failure>;

    /// Ends all reads of saved contents, because the contents will move.
    fn stop(&mut self);

    /// Handles the end of a connection that had requested one of these steps.
    fn close(&mut self, connection: u64);
}

/// The refusal of a process without this interface.
pub(super) fn not_kept() -> Failure {
    // A program joined by the Rust crate `sublet-member` alone, which has no preparing, saving or moving of contents.
    // Nothing was changed. Join by `tenants::keep`.
    FailureKind::Unknown
        .because(format!("process {PID} does nothing with saved contents but pause and resume"))
}
