//! The questions to a process, each with one kind of answer, and the reasons for a refusal.

use std::os::fd::OwnedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};
use vmm_pool::AllocationId;

use super::{
    Drained, FDS_PER_MESSAGE_MAX, FetchPurpose, HostProgress, Idleness, Lending, MemberInfo,
    MemberStats, Needed, PhaseReport, Reply, Request, RoundEnd, SaveProgress, SpillProgress,
};
use crate::code::Code;
use crate::cut::{CutReport, Limits, Seen};
use crate::error_text::chain;
use crate::identity::MemberId;
use crate::phase::{Action, Order, Phase};
use crate::saving::{DirName, SaveDirError};
use crate::scope::Scope;
use crate::state::InvalidTransition;
use crate::stepping::{Activity, SeenActivity, StepOrder};

/// Longest payload of a process's statistics, in bytes: room for the most and longest tags that a process may have, on a GPU.
pub const STATS_BYTES_MAX: usize = 2 << 20;

impl Request {
    /// The longest payload of an answer, in bytes, if that is shorter than the limit of any message.
    pub fn reply_bytes_max(&self) -> Option<usize> {
        match self {
            Self::Hello
            | Self::Stats
            | Self::Needs(_)
            | Self::AwaitConsent(_)
            | Self::GiveUp(_)
            | Self::Withdraw(_)
            | Self::FetchFds(_)
            | Self::Host(_)
            | Self::Count
            | Self::Spill(_)
            | Self::Idle(_) => Some(STATS_BYTES_MAX),
            // These answers list shared memory by allocation, and the waits of lanes.
            Self::Phase(_) | Self::Cut(_) | Self::Step(_) | Self::Save(_) | Self::Lent(_) => None,
        }
    }
}

/// A question to another process's agent.
pub trait Ask {
    /// The answer, if the question is not refused with a [`Failure`].
    type Answer;

    /// The question as it is sent.
    fn to_request(&self) -> Request;

    /// Returns the number of descriptors that may come with the answer.
    fn fds_max(&self) -> usize {
        0
    }

    /// The answer in `reply` and the descriptors with it; `None` if `reply` answers another question.
    fn answer_in(&self, reply: Reply, fds: Vec<OwnedFd>) -> Option<Self::Answer>;

    /// As [`Ask::answer_in`], or the reason why the question is refused.
    fn outcome_in(&self, reply: Reply, fds: Vec<OwnedFd>) -> Option<Result<Self::Answer, Failure>> {
        if let Reply::Failed(failure) = reply {
            return Some(Err(failure));
        }
        self.answer_in(reply, fds).map(Ok)
    }
}

/// Questions that are answered with one value.
macro_rules! asks {
    ($($question:ident -> $answer:ty: |$ask:pat_param| $request:expr, $reply:pat => $value:expr;)*) => {$(
        impl Ask for $question {
            type Answer = $answer;

            fn to_request(&self) -> Request {
                let $ask = self;
                $request
            }

            fn answer_in(&self, reply: Reply, _fds: Vec<OwnedFd>) -> Option<$answer> {
                if let $reply = reply { Some($value) } else { None }
            }
        }
    )*};
}

asks! {
    Hello -> MemberInfo: |_| Request::Hello, Reply::Member(info) => info;
    Stats -> MemberStats: |_| Request::Stats, Reply::Stats(stats) => *stats;
    Count -> (): |_| Request::Count, Reply::Counts => ();
    LookIdle -> Idleness: |ask| Request::Idle(*ask), Reply::Idleness(idleness) => idleness;
    Needs -> Needed: |ask| Request::Needs(ask.clone()), Reply::Needs(needed) => needed;
    Hold -> CutReport: |ask| Request::Cut(ask.clone()), Reply::Cut(report) => *report;
    StepOn -> Activity: |ask| Request::Step(ask.clone()), Reply::Activity(activity) => *activity;
    AwaitConsent -> (): |ask| Request::AwaitConsent(*ask), Reply::Consented => ();
    GiveUp -> (): |ask| Request::GiveUp(ask.clone()), Reply::Noted => ();
    Withdraw -> RoundEnd: |ask| Request::Withdraw(*ask), Reply::Told(told) => told;
    AskLent -> Lending: |ask| Request::Lent(ask.clone()), Reply::Lent(lending) => *lending;
    SaveStep -> SaveProgress: |ask| Request::Save(ask.clone()), Reply::Saving(progress) => *progress;
    SpillStep -> SpillProgress: |ask| Request::Spill(*ask), Reply::Spilled(progress) => *progress;
    HostStep -> HostProgress: |ask| Request::Host(*ask), Reply::Host(progress) => *progress;
}

/// Asks a process for its identity and state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello;

/// Asks a process for its statistics: the memory that it holds, and its last pause and resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats;

/// Tells a process to count its memory against the tenant's budgets from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count;

/// Asks whether the devices of a process have nothing left to do. The process looks only if it launched nothing for that long.
/// The look closes its gate for some milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookIdle {
    /// The time without a launch, in microseconds.
    pub quiet_us: u64,
}

/// Asks a process how much memory a resume of `scope` needs on each of its devices, and how much is free there. Nothing is
/// changed. A process on its way to another state refuses. So does a process whose tenant's budget lacks the memory for a
/// resume by tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// The memory to resume.
    pub scope: Scope,
    /// The time after which the process gives up, and answers so.
    pub timeout_ms: u64,
    /// Is the free memory of all devices of the process wanted, also of devices on which nothing is released?
    pub all_devices: bool,
}

/// Tells a process to do one step of a pause or resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakePhase {
    /// The pause or resume that it belongs to, by a random number.
    pub round: u64,
    /// Does no other process take part?
    pub alone: bool,
    /// The step.
    pub order: Order,
    /// The time after which the process gives up, and answers so.
    pub timeout_ms: u64,
}

impl Ask for TakePhase {
    type Answer = PhaseReport;

    fn to_request(&self) -> Request {
        Request::Phase(self.clone())
    }

    fn answer_in(&self, reply: Reply, _fds: Vec<OwnedFd>) -> Option<PhaseReport> {
        let Reply::PhaseDone(phase, done) = reply else { return None };
        (phase == self.order.phase()).then_some(done.report)
    }
}

/// Tells a process to do the step in which its devices finish their work, and to report the memory that a pause will move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain(pub TakePhase);

impl Ask for Drain {
    type Answer = (PhaseReport, Drained);

    fn to_request(&self) -> Request {
        self.0.to_request()
    }

    fn answer_in(&self, reply: Reply, _fds: Vec<OwnedFd>) -> Option<(PhaseReport, Drained)> {
        let Reply::PhaseDone(Phase::Drain, done) = reply else { return None };
        Some((done.report, *done.drained?))
    }
}

/// Before a pause: tells a process to launch no more than `limits` admit, until further orders or the end of the connection,
/// and to report its position.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The launch count up to which each lane may go.
    pub limits: Limits,
    /// The facts that the caller knows. The process answers when they change.
    pub seen: Seen,
    /// The process answers after this time in any case, or on another request of the caller.
    pub wait_ms: u64,
}

/// After the gate was closed for a pause: tells a process to do this step, and to report its activity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOn {
    /// The pause that it belongs to, by a random number.
    pub round: u64,
    /// The calls that the process may make.
    pub step: StepOrder,
    /// The facts that the caller knows. The process answers when they change, or when the step's calls are made.
    pub seen: SeenActivity,
    /// The process answers after this time in any case, or on another request of the caller.
    pub wait_ms: u64,
}

/// Tells a process to wait until its application has itself requested `action`, and waits in that call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitConsent {
    /// The action that the application must have requested.
    pub action: Action,
    /// The time after which the process gives up, and answers so.
    pub timeout_ms: u64,
}

/// Tells a process that the `action` which its application requested will not happen now. The waiting call of the application
/// returns an error with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiveUp {
    /// The action that the application requested.
    pub action: Action,
    /// The reason, in one sentence.
    pub why: String,
}

/// Tells a process that the coordinator of `round` has ended or is silent, and that the caller settles the round. The process
/// does no further step of that coordinator, and settles too. It answers with its last order about the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdraw {
    /// The number of the pause or resume.
    pub round: u64,
}

/// Fetches descriptors for allocations of a process, which the caller imports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchFds {
    /// The allocations, at most [`FDS_PER_MESSAGE_MAX`], and half as many for a borrower.
    pub allocations: Vec<AllocationId>,
    /// The reason for the request.
    pub purpose: FetchPurpose,
    /// The process that asks.
    pub importer: MemberId,
    /// The other tenant of that process; none if it is the owner's own tenant.
    pub borrower: Option<Borrower>,
}

/// The tenant and the family of an importer of another tenant, by the importer's own statement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrower {
    /// Its tenant.
    pub tenant: String,
    /// The family that the importer names.
    pub family: Option<String>,
}

/// The descriptors that an owner sent.
#[derive(Debug)]
pub struct SentFds {
    /// The number of descriptors that the owner says it has sent.
    pub count: usize,
    /// The received descriptors, in the order of the requested allocations. A borrower gets two for each allocation: the
    /// driver's and the lease.
    pub fds: Vec<OwnedFd>,
    /// When tickets were redeemed: the tag of each allocation, in the same order.
    pub tags: Vec<String>,
    /// Allocations requested again that the owner does not have any more. No descriptor is sent for them.
    pub missing: Vec<AllocationId>,
    /// For a borrower: the device of each allocation, in the same order, by its machine-wide name.
    pub devices: Vec<String>,
}

impl Ask for FetchFds {
    type Answer = SentFds;

    fn to_request(&self) -> Request {
        Request::FetchFds(self.clone())
    }

    fn fds_max(&self) -> usize {
        let each = if self.borrower.is_some() { 2 } else { 1 };
        (each * self.allocations.len()).min(FDS_PER_MESSAGE_MAX)
    }

    fn answer_in(&self, reply: Reply, fds: Vec<OwnedFd>) -> Option<SentFds> {
        let Reply::Fds { count, tags, missing, devices } = reply else { return None };
        Some(SentFds { count: usize::try_from(count).ok()?, fds, tags, missing, devices })
    }
}

/// Asks a process which memory of `scope` processes of other tenants have open. Nothing is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskLent {
    /// The memory to pause.
    pub scope: Scope,
}

/// Tells a process to write its saved contents to files, one step at a time. The writing ends with this connection, and with
/// any other step of a pause or resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveStep {
    /// Report the size; write nothing yet.
    Begin {
        /// The directory to write to.
        dir: DirName,
    },
    /// Continue writing for at most this long.
    WriteOn {
        /// The time, in milliseconds.
        for_ms: u64,
    },
    /// Remove incomplete files.
    CallOff,
}

/// Tells a process that has opted in and is paused to move some saved contents from host memory to a file, and to report the
/// rest. The caller holds the lock of the process's tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillStep {
    /// The approximate bytes to move; 0 moves nothing and only gets the answer.
    pub most_bytes: u64,
}

impl SpillStep {
    /// The longest duration of one step: the worker thread does nothing else meanwhile. The caller waits for longer.
    pub const TIME_MAX: Duration = Duration::from_mins(1);
}

/// Tells a process to prepare the host memory of its next pause while the application runs. The preparation goes on when this
/// connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostStep {
    /// Report the missing memory and its limits; begin nothing.
    Need,
    /// Begin, unless it has begun, and report the progress.
    Begin,
    /// Report the progress.
    Look,
    /// End; prepared memory stays.
    CallOff,
}

/// Why a request was not carried out, by what the asker can do about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The kind of failure.
    pub kind: FailureKind,
    /// One sentence: operation, object, size, device, code, next step.
    #[serde(deserialize_with = "crate::error_text::from_peer")]
    pub message: String,
}

/// A failure as people's programs read it.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct ShownFailure<'a> {
    /// Why, in one word.
    code: Code,
    /// Of a GPU that is too full: how much more must be free.
    missing_bytes: Option<u64>,
    /// Why, in words.
    message: &'a str,
}

impl Serialize for Failure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind, message } = self;
        if !serializer.is_human_readable() {
            return (kind, message).serialize(serializer);
        }
        let missing_bytes = kind.missing_device_bytes();
        ShownFailure { code: (*kind).into(), missing_bytes, message }.serialize(serializer)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Failure {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Failure".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        ShownFailure::json_schema(generator)
    }
}

/// The kinds of [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FailureKind {
    /// A stream is being captured: try again when the capture has ended.
    InCapture,
    /// The ranks did not reach a common cut in time.
    CutNotReached,
    /// The devices did not finish, or calls did not return, in time.
    DrainTimeout,
    /// The host cannot hold the contents, in its memory or on its disk.
    OutOfHostMemory,
    /// The device cannot hold the tenant now.
    OutOfDeviceMemory {
        /// The additional bytes that must be free.
        missing_bytes: u64,
    },
    /// The state of the process does not allow it.
    WrongState,
    /// Another process that was needed has ended or is silent.
    PeerGone,
    /// The process lives, but its socket has no name for the moment, so no process can reach it.
    Nameless,
    /// The application did not request the action in time.
    NoConsent,
    /// The action was under way, and was called off: another process failed.
    CalledOff,
    /// The process is paused, or being paused: ask again when it runs.
    NotNow,
    /// Other processes hold some of the memory, so all must take part.
    Shared,
    /// Processes of other tenants have some of the memory open.
    Lent,
    /// The tenant that lent the memory is paused, and must be resumed first.
    LenderAway,
    /// The request names something this process does not have.
    Unknown,
    /// The driver failed, or the disk of saved contents failed.
    Driver,
    /// Something was lost; the process should be ended.
    Faulted,
    /// The device could not hold the tenant even if all memory that may make room for it were released.
    DoesNotFit {
        /// The additional bytes that must be free.
        missing_bytes: u64,
    },
}

impl From<InvalidTransition> for Failure {
    fn from(error: InvalidTransition) -> Self {
        FailureKind::WrongState.because(format!("process {}: {error}", std::process::id()))
    }
}

impl From<SaveDirError> for Failure {
    fn from(error: SaveDirError) -> Self {
        let is_full = matches!(error, SaveDirError::Io { .. });
        let kind = if is_full { FailureKind::OutOfHostMemory } else { FailureKind::Unknown };
        kind.because(format!("process {}: {}", std::process::id(), chain(&error)))
    }
}

impl FailureKind {
    /// Makes a failure of this kind with `message`.
    pub fn because(self, message: String) -> Failure {
        Failure { kind: self, message }
    }

    /// Returns the additional bytes of device memory that must be free, if that is the cause.
    pub fn missing_device_bytes(self) -> Option<u64> {
        if let Self::OutOfDeviceMemory { missing_bytes } | Self::DoesNotFit { missing_bytes } = self
        {
            Some(missing_bytes)
        } else {
            None
        }
    }
}

impl From<FailureKind> for Code {
    fn from(kind: FailureKind) -> Self {
        match kind {
            FailureKind::InCapture => Self::InCapture,
            FailureKind::CutNotReached | FailureKind::DrainTimeout => Self::NotInTime,
            FailureKind::OutOfHostMemory => Self::HostFull,
            FailureKind::OutOfDeviceMemory { .. } | FailureKind::DoesNotFit { .. } => Self::GpuFull,
            FailureKind::PeerGone | FailureKind::Nameless => Self::NoAnswer,
            FailureKind::NoConsent => Self::NoConsent,
            FailureKind::CalledOff => Self::CalledOff,
            FailureKind::WrongState | FailureKind::NotNow | FailureKind::Unknown => {
                Self::WrongState
            }
            FailureKind::Shared | FailureKind::Lent | FailureKind::LenderAway => Self::Shared,
            FailureKind::Driver => Self::Driver,
            FailureKind::Faulted => Self::Lost,
        }
    }
}
