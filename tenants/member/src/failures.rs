//! The failures of phases. Each has a kind, which tells what can be done about it, and one sentence.

use std::fmt;

use vmm_pool::driver::{DriverCode, DriverOp};
use vmm_pool::gate::WaitingCall;
use vmm_pool::{DrainError, PoolError};

use super::sharing::ImportError;
use sublet_protocol::identity::TenantName;
use sublet_protocol::stepping::{HeldCall, at_work, not_idle};
use sublet_protocol::wire::{Failure, FailureKind, Phase};

/// The number of this process, for messages.
pub const PID: OwnPid = OwnPid;

/// See [`PID`].
#[derive(Clone, Copy, Debug)]
pub struct OwnPid;

impl fmt::Display for OwnPid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::process::id())
    }
}

pub(super) fn wrong_state(message: String) -> Failure {
    Failure { kind: FailureKind::WrongState, message }
}

/// The number of calls that an error names.
const NAMED_MAX: usize = 4;

/// Makes the failure of a drain. `waiting` are the threads at the gate.
pub(super) fn drain_failure(error: &DrainError, waiting: &[WaitingCall]) -> Failure {
    let (kind, message) = match error {
        DrainError::Deadline { seen } => {
            let calls = waiting.iter().map(|call| HeldCall::new(call.call.name(), call.waited));
            let calls: Vec<_> = calls.take(NAMED_MAX).collect();
            let busy: Vec<_> = seen.busy.iter().map(ToString::to_string).collect();
            let what = at_work(seen.inside as u64, &busy, waiting.len() as u64, &calls);
            (FailureKind::DrainTimeout, not_idle(format_args!("process {PID}"), what))
        }
        DrainError::CalledOff => (
            FailureKind::CalledOff,
            format!(
                "process {PID}: the wait for the device was called off, because the pause failed elsewhere"
            ),
        ),
        DrainError::InCapture { count } => return in_capture(*count),
        DrainError::NoThread { .. } => (FailureKind::DrainTimeout, error.to_string()),
        DrainError::Driver { source, .. } if source.poisons_context() => {
            return context_lost(source);
        }
        DrainError::Driver { place, source } => {
            (FailureKind::Driver, format!("process {PID}: work on {place} failed: {source}"))
        }
    };
    Failure { kind, message }
}

/// The process was capturing a CUDA graph until the deadline. The job runs on. Pause again after the capture, or give
/// a longer `--timeout`.
pub(super) fn in_capture(count: usize) -> Failure {
    FailureKind::InCapture.because(format!(
        "process {PID} is capturing {count} stream(s): pause again when the capture has ended"
    ))
}

/// The driver refuses every call after this code; often a kernel of the job has touched a wrong address. Device
/// memory that was not saved is lost. The process can neither be paused nor resumed. `sublet save TENANT DIR` writes
/// the saved contents to files. Then end the process.
pub(super) fn context_lost(error: &dyn std::error::Error) -> Failure {
    FailureKind::Faulted.because(format!(
            "process {PID}: its CUDA context is lost ({error}), and with it what its device memory held: end the \
             process"
        ))
}

/// An earlier failure has lost memory of this process. It can neither be paused nor resumed. `sublet save TENANT DIR`
/// writes its saved contents to files. Then end the process.
pub(super) fn faulted() -> Failure {
    FailureKind::Faulted
        .because(format!("process {PID} is faulted: something of it was lost before; end it"))
}

/// The request needs the driver, and the process has no CUDA context during a deep pause. Its contents are kept.
/// `sublet resume TENANT` brings the context back.
pub(super) fn frozen(tenant: &TenantName) -> Failure {
    FailureKind::NotNow.because(format!(
            "process {PID} is in a deep pause, with nothing on any GPU: `sublet resume {tenant}` brings it back"
        ))
}

/// This is a fault of Sublet. The process runs on, and can neither be paused nor resumed any more. Its log with
/// `SUBLET_LOG=debug` helps us. End the process.
pub(super) fn failed_inside(phase: Option<Phase>, panic: &str) -> Failure {
    FailureKind::Faulted.because(format!(
            "process {PID}: Sublet failed inside, in step '{}' ({panic}); the process runs on and can neither be paused \
             nor resumed any more: end it, and report this",
            phase.map_or("cut", Phase::label)
        ))
}

/// A pause failed, and the driver refused a call while Sublet undid it. The process stands still, and nothing is
/// lost. `sublet resume TENANT` tries again.
pub(super) fn not_undone_yet(failure: &Failure) -> Failure {
    failure.kind.because(format!(
            "the pause is not undone yet: {failure}. Nothing is lost, and the process stands still: run `sublet \
             resume` for its tenant to go back"
    ))
}

/// Turns an error of the pool into the failure for the asking process.
pub fn pool_failure(error: &PoolError) -> Failure {
    if error.poisons_context() {
        return context_lost(error);
    }
    let kind = match error {
        PoolError::OutOfDeviceMemory { needed_bytes, free_bytes, .. } => {
            let missing_bytes = needed_bytes.saturating_sub(*free_bytes);
            FailureKind::OutOfDeviceMemory { missing_bytes }
        }
        PoolError::OverBudget { asked_bytes, held_bytes, budget_bytes, .. } => {
            let wanted_bytes = held_bytes.saturating_add(*asked_bytes);
            let missing_bytes = wanted_bytes.saturating_sub(*budget_bytes);
            FailureKind::OutOfDeviceMemory { missing_bytes }
        }
        PoolError::OutOfHostMemory { .. }
        | PoolError::HostMemoryRefused { .. }
        | PoolError::OutOfDisk { .. }
        | PoolError::FileRefused { .. } => FailureKind::OutOfHostMemory,
        PoolError::MissingImport { .. } => FailureKind::PeerGone,
        PoolError::Driver { source, .. }
            if source.op == DriverOp::HostRegister && source.code == DriverCode::OUT_OF_MEMORY =>
        {
            FailureKind::OutOfHostMemory
        }
        PoolError::Frozen => FailureKind::NotNow,
        PoolError::Disowned { .. } | PoolError::Offloaded { .. } => FailureKind::WrongState,
        PoolError::NotOurs
        | PoolError::StaleHandle { .. }
        | PoolError::FileUnreadable { .. }
        | PoolError::FileCorrupted { .. }
        | PoolError::Driver { .. } => FailureKind::Driver,
    };
    Failure { kind, message: format!("process {PID}: {error}") }
}

pub(super) fn import_failure(error: &ImportError) -> Failure {
    let kind = match error {
        ImportError::Pool(error) => return pool_failure(error),
        // The owner has the memory, and its driver refused the call once.
        ImportError::Refused(failure) if failure.kind == FailureKind::Driver => FailureKind::Driver,
        ImportError::Refused(failure) if failure.kind == FailureKind::NotNow => FailureKind::NotNow,
        ImportError::LenderAway { .. } => FailureKind::LenderAway,
        ImportError::Refused(_)
        | ImportError::OtherTenant { .. }
        | ImportError::NoLender { .. }
        | ImportError::OtherDevice { .. }
        | ImportError::Stale { .. }
        | ImportError::NoTicket { .. }
        | ImportError::NotMemory { .. }
        | ImportError::Owner { .. }
        | ImportError::OwnerEnded { .. }
        | ImportError::Missing { .. }
        | ImportError::Miscounted { .. } => FailureKind::PeerGone,
    };
    Failure { kind, message: format!("process {PID}: {error}") }
}
