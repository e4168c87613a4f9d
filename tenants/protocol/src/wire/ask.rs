//! The questions to a process, each with its one kind of answer, and the reasons for a refusal.

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

/// Longest payload of what a process says of itself, in bytes: all the tags that it may have, each as long as it may be, on a GPU.
pub const STATS_BYTES_MAX: usize = 2 << 20;

impl Request {
    /// The longest payload of an answer to it, in bytes, where that is shorter than any message may be.
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
            // What is shared, allocation by allocation, and what lanes wait for.
            Self::Phase(_) | Self::Cut(_) | Self::Step(_) | Self::Save(_) | Self::Lent(_) => None,
        }
    }
}

/// A question to another process's agent.
pub trait Ask {
    /// The answer to it, where it is not refused with a [`Failure`].
    type Answer;

    /// As it is sent.
    fn to_request(&self) -> Request;

    /// Returns the number of descriptors that may come with the answer.
    fn fds_max(&self) -> usize {
        0
    }

    /// The answer in `reply` and the descriptors with it; `None` when it is one to another question.
    fn answer_in(&self, reply: Reply, fds: Vec<OwnedFd>) -> Option<Self::Answer>;

    /// As [`Ask::answer_in`], or why the question is refused.
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

/// The question who you are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello;

/// The question what you hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats;

/// Count what you hold against the tenant's budgets, from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count;

/// Do your devices have nothing left to do? Looked at, behind a gate that is shut for some milliseconds, only where nothing was launched for so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookIdle {
    /// For how long, in microseconds.
    pub quiet_us: u64,
}

/// The question what a resume of `scope` would need on each of your devices, and what is free there. Nothing is
/// changed. A process that is on its way to another state refuses. So does one whose tenant's budget does not have what
/// comes by tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// The memory that the resume would be about.
    pub scope: Scope,
    /// Give up, and answer so, after this long.
    pub timeout_ms: u64,
    /// Is the free memory of all devices of the process wanted, also of those where nothing of it is away?
    pub all_devices: bool,
}

/// Take one step of a pause or resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakePhase {
    /// The pause or resume that it belongs to, by a random number.
    pub round: u64,
    /// No other process takes part in that.
    pub alone: bool,
    /// The step.
    pub order: Order,
    /// Give up, and answer so, after this long.
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

/// Take the step in which devices run dry, and say what a pause will move.
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

/// Before a pause: launch no more than `limits` admits until told otherwise, or until I hang up, and say where you
/// stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Up to which count each lane may be launched.
    pub limits: Limits,
    /// The facts that I know: answer when they are no longer so.
    pub seen: Seen,
    /// Answer after this long in any case, or when I ask for something else.
    pub wait_ms: u64,
}

/// Behind the shut gate of a pause: do this step, and say what you do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOn {
    /// The pause that it belongs to, by a random number.
    pub round: u64,
    /// The things that you may do.
    pub step: StepOrder,
    /// The facts that I know: answer when they are no longer so, or when the step's calls are made.
    pub seen: SeenActivity,
    /// Answer after this long in any case, or when I ask for something else.
    pub wait_ms: u64,
}

/// Wait until the application of this process has itself requested `action`, and stands still in that call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitConsent {
    /// The action that the application must have requested.
    pub action: Action,
    /// Give up, and answer so, after this long.
    pub timeout_ms: u64,
}

/// The `action` that your application requested and waits in will not happen now: let it go on with an error that
/// says why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiveUp {
    /// The action that the application requested.
    pub action: Action,
    /// One sentence.
    pub why: String,
}

/// The coordinator of `round` has ended, or is silent, and I settle what it began: take no step of it any more, and
/// settle it too. What were you told of its end?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdraw {
    /// The number of the pause or resume.
    pub round: u64,
}

/// Descriptors for these allocations of yours, which I import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchFds {
    /// The allocations, at most [`FDS_PER_MESSAGE_MAX`], and half as many for a borrower.
    pub allocations: Vec<AllocationId>,
    /// Why.
    pub purpose: FetchPurpose,
    /// The process that asks.
    pub importer: MemberId,
    /// Of which other tenant that is; none where it is the owner's own.
    pub borrower: Option<Borrower>,
}

/// The tenant and the family of an importer of another tenant, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrower {
    /// Its tenant.
    pub tenant: String,
    /// The family that it names.
    pub family: Option<String>,
}

/// Descriptors as they came.
#[derive(Debug)]
pub struct SentFds {
    /// The number of descriptors that the owner says it has sent.
    pub count: usize,
    /// The descriptors that came, in the order of the requested allocations. A borrower gets two each: the driver's and
    /// the lease.
    pub fds: Vec<OwnedFd>,
    /// When tickets were redeemed: the tag of each allocation, in the same order.
    pub tags: Vec<String>,
    /// Allocations requested again that the owner does not have any more. No descriptor comes for them.
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

/// The question which memory of `scope` processes of other tenants have open. Nothing is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskLent {
    /// The memory that a pause would be about.
    pub scope: Scope,
}

/// Write what a pause has saved of you to files, a step at a time. It ends with this connection, and with any other
/// step of a pause or resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveStep {
    /// Say how much it is; write nothing yet.
    Begin {
        /// The directory to write to.
        dir: DirName,
    },
    /// Write on for at most this long.
    WriteOn {
        /// The time, in milliseconds.
        for_ms: u64,
    },
    /// Remove what is written, as far as it is not whole.
    CallOff,
}

/// Saved contents in host memory, where your process has opted in and stands paused: move some to a file, and say what is
/// left. The asking process holds the lock of your tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillStep {
    /// About so much; nothing, and the answer alone, where that is 0.
    pub most_bytes: u64,
}

impl SpillStep {
    /// The longest duration of one step: the worker thread does nothing else meanwhile. The asking process waits for longer.
    pub const TIME_MAX: Duration = Duration::from_mins(1);
}

/// Host memory that your next pause takes: bring it in while the application runs. It goes on when this connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostStep {
    /// Say what is missing, and what limits it; begin nothing.
    Need,
    /// Begin, where you have not, and say how far you are.
    Begin,
    /// Say how far you are.
    Look,
    /// End; what is there stays.
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
    /// Not possible in the state the process is in.
    WrongState,
    /// Another process that was needed is gone or silent.
    PeerGone,
    /// It lives, and nobody can reach it: its socket has no name for the moment.
    Nameless,
    /// The application did not ask for the action in time.
    NoConsent,
    /// It was under way, and is no longer wanted: something failed elsewhere.
    CalledOff,
    /// Not while the process is paused, or being paused: ask again when it runs.
    NotNow,
    /// Other processes hold some of the memory: all must take part.
    Shared,
    /// Processes of other tenants have some of the memory open.
    Lent,
    /// The tenant that the memory is borrowed from is paused: that one must be resumed first.
    LenderAway,
    /// The request names something this process does not have.
    Unknown,
    /// The driver failed, or the disk that saved contents are on.
    Driver,
    /// Something was lost; the process should be ended.
    Faulted,
    /// The device could not hold the tenant even if what is to make room for it were away.
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
    /// A failure of this kind, which says `message`.
    pub fn because(self, message: String) -> Failure {
        Failure { kind: self, message }
    }

    /// Returns the additional bytes of device memory that must be free, where that is the cause.
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
