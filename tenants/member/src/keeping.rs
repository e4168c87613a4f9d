//! The door for what a crate above does with saved contents and host memory, outside of pauses and resumes.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vmm_pool::driver::Driver;

use super::Member;
use super::failures::PID;
use sublet_protocol::wire::{
    Failure, FailureKind, HostProgress, HostStep, Reply, SaveStep, SpillStep,
};

/// The part of it that the thread which speaks asks. Waits for nothing.
pub trait Keeping<D: Driver>: Debug + Send + Sync {
    /// Takes a step with the host memory of the next pause, and says how far that is.
    fn host(self: Arc<Self>, step: HostStep) -> HostProgress;

    /// To be called every now and then.
    fn look(self: Arc<Self>);

    /// The process ends: waits a bounded time for a driver call that is under way.
    fn end(&self);

    /// Its part for the thread that works.
    fn desk(&self, member: &Arc<Member<D>>) -> Box<dyn Desk>;
}

/// The part of it that the thread which works asks, between steps of pauses and resumes.
pub trait Desk: Debug + Send {
    /// Does one step for `connection`, and answers for it.
    fn save(&mut self, connection: u64, step: SaveStep) -> Reply;

    /// Does one step, unless nobody waits for it any more, and answers for it.
    ///
    /// # Errors
    /// The answer of a step that failed.
    fn spill(&mut self, step: SpillStep, is_called_off: &AtomicBool) -> Result<Reply, Failure>;

    /// Saved contents move: what reads them ends.
    fn stop(&mut self);

    /// This connection, which had requested one of these steps, is closed.
    fn close(&mut self, connection: u64);
}

/// The refusal of a process that has no such part.
pub(super) fn not_kept() -> Failure {
    // A program joined by the Rust crate `sublet-member` alone, which has no preparing, saving or moving of contents.
    // Nothing was changed. Join by `tenants::keep`.
    FailureKind::Unknown
        .because(format!("process {PID} does nothing with saved contents but pause and resume"))
}
