//! The messages of the pause protocol.
//!
//! One request, one reply, in order, on each connection. Encoding is postcard behind the frame of
//! [`crate::transport`]; the decoder is total: any bytes give a message or an error. Lists and strings
//! are bounded by the frame's length limit.

use serde::{Deserialize, Serialize};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::{AllocationId, PoolReport};

use crate::cut::{CutReport, Limits, Seat, Seen};
use crate::host_memory::HostNeed;
use crate::identity::MemberId;
use crate::references::{References, Stay};
use crate::saving::DirName;
use crate::saving::map::SaveAccount;
use crate::scope::Scope;

/// Changes whenever a message does. Processes of different versions refuse each other by name.
pub const PROTOCOL_VERSION: u16 = 7;

/// What one process asks of another's agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Who are you? Answered with [`Reply::Member`].
    Hello,
    /// What do you hold? Answered with [`Reply::Stats`].
    Stats,
    /// Take one step of a pause or resume. Answered with [`Reply::PhaseDone`] or [`Reply::Failed`].
    Phase {
        /// The step.
        phase: Phase,
        /// Which pause or resume it belongs to, by a random number.
        round: u64,
        /// Which memory it is about, the same in all steps.
        scope: Scope,
        /// Of [`Phase::Save`]: shared memory that stays where it is. Empty for other steps.
        stays: Vec<Stay>,
        /// Give up, and answer so, after this long.
        timeout_ms: u64,
    },
    /// Before a pause: launch no more than `limits` admits until told otherwise, or until I hang up, and
    /// say where you stand. Answered with [`Reply::Cut`], or [`Reply::Failed`].
    Cut {
        /// Up to which count each lane may be launched.
        limits: Limits,
        /// What I know: answer when this is no longer so.
        seen: Seen,
        /// Answer after this long in any case, or when I ask for something else.
        wait_ms: u64,
    },
    /// Wait until the application of this process has itself asked for `action` (it stands in
    /// `ncclPause` or `ncclResume`). Answered with [`Reply::Consented`] or [`Reply::Failed`].
    AwaitConsent {
        /// What the application must have asked for.
        action: Action,
        /// Give up, and answer so, after this long.
        timeout_ms: u64,
    },
    /// The `action` that your application asked for and waits in will not happen now: let it go on with
    /// an error that says why. Answered with [`Reply::Noted`].
    GiveUp {
        /// What the application asked for.
        action: Action,
        /// One sentence.
        why: String,
    },
    /// The coordinator of `round` has ended, or is silent, and I settle what it began: take no step of it any more,
    /// and settle it too. What were you told in it? Answered with [`Reply::Member`].
    Withdraw {
        /// Which pause or resume.
        round: u64,
    },
    /// Descriptors for these allocations of yours, which I import. At most [`FDS_PER_MESSAGE_MAX`].
    /// Answered with [`Reply::Fds`], as many descriptors beside it, in the same order.
    FetchFds {
        /// The allocations.
        allocations: Vec<AllocationId>,
        /// Why.
        purpose: FetchPurpose,
        /// Who asks.
        importer: MemberId,
    },
    /// Write what a pause has saved of you to files, a step at a time. It ends with this connection, and with any
    /// other step of a pause or resume. Answered with [`Reply::Saving`] or [`Reply::Failed`].
    Save(SaveStep),
}

/// One step of writing saved contents to files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveStep {
    /// Say how much it is; write nothing yet.
    Begin {
        /// Where to.
        dir: DirName,
    },
    /// Write on for at most this long.
    WriteOn {
        /// How long.
        for_ms: u64,
    },
    /// Remove what is written, as far as it is not whole.
    CallOff,
}

/// Why descriptors are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchPurpose {
    /// To redeem a ticket.
    Redeem {
        /// Which of the owner's tickets; 0 where it holds nothing.
        serial: u64,
    },
    /// Once more, for what a pause made the importer give up. No ticket is used up.
    Again,
}

/// Descriptors that one message may carry: the kernel takes 253 (`SCM_MAX_FD`).
pub const FDS_PER_MESSAGE_MAX: usize = 250;

/// An agent's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Hello`].
    Member(MemberInfo),
    /// To [`Request::Stats`].
    Stats(Box<MemberStats>),
    /// To [`Request::Cut`].
    Cut(Box<CutReport>),
    /// This phase is complete. It is named, so that an answer given twice is not taken for the next one's.
    PhaseDone(Phase, PhaseReport),
    /// The application asked for the action itself.
    Consented,
    /// To [`Request::GiveUp`].
    Noted,
    /// Descriptors travel beside this message; `count` says how many.
    Fds {
        /// How many.
        count: u32,
        /// When tickets were redeemed: the tag of each allocation, in the same order.
        tags: Vec<String>,
        /// Allocations asked for again that this process does not have any more. No descriptor comes for them.
        missing: Vec<AllocationId>,
    },
    /// To [`Request::Save`].
    Saving(Box<SaveProgress>),
    /// The request was not carried out; the process is as before the request unless `failure` says so.
    Failed(Failure),
}

/// How far a process is with writing saved contents to files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveProgress {
    /// What it has.
    pub account: SaveAccount,
    /// Bytes of [`SaveAccount::saved_bytes`] that are written.
    pub written_bytes: u64,
    /// How far it is.
    pub stage: SaveStage,
}

/// See [`SaveProgress`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveStage {
    /// It runs, and has all its memory: there is nothing to write.
    Nothing,
    /// There is more to write.
    Writing,
    /// All is written.
    Written {
        /// The name of its map in the directory.
        map: String,
    },
    /// Nothing is being written, and what was not whole is removed.
    CalledOff,
}

/// The two things that can be done to a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Action {
    /// Give the memory up.
    Pause,
    /// Take it back.
    Resume,
}

/// The steps of a pause and of a resume. All processes of a tenant finish one before any starts the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Pause 1: hold back new work; calls under way leave. Refused during stream capture.
    CloseGate,
    /// Pause 2: wait until the devices have nothing left to do, hand nothing out from now on, and say what is held of
    /// shared memory.
    Drain,
    /// Pause 3: save contents to host memory and files, and unmap. Every handle is kept.
    Save,
    /// Pause 4, the point of no return: release imports and own memory.
    Release,
    /// Pause 5: compare the device's free memory with what was released.
    Verify,
    /// Undo of pause 1 to 3: map again, then open the gate. Nobody else is needed for that.
    AbortPause,
    /// Resume 1: create all memory, or none.
    CreateOwn,
    /// Resume 2: map it at its old addresses, put contents back, export what peers will import.
    Restore,
    /// Resume 3: import peers' memory at its old addresses.
    Import,
    /// In place of [`Phase::Import`]: the same, but what was imported from processes that have ended, or that do not
    /// have it any more, is left out for ever. Its addresses stay reserved and unmapped.
    ImportFromLiving,
    /// Resume 4: open the gate.
    Activate,
    /// Undo of resume 1 to 3: release everything again, contents kept. Tells what a resume needs on each
    /// device and what is free there; of a paused process, which it leaves as it is, too.
    AbortResume,
    /// The coordinator of what is under way has ended: find out from the others how far they were told to
    /// go, and go the same way. Nothing is done when nothing is under way.
    Settle,
}

impl Phase {
    /// Is this the point of no return of its pause or resume, or behind it? Nobody is asked for such a
    /// step before everybody has done all steps before.
    pub fn is_decided(self) -> bool {
        match self {
            Self::Release | Self::Verify | Self::Activate => true,
            Self::CloseGate
            | Self::Drain
            | Self::Save
            | Self::AbortPause
            | Self::CreateOwn
            | Self::Restore
            | Self::Import
            | Self::ImportFromLiving
            | Self::AbortResume
            | Self::Settle => false,
        }
    }
}

/// What one process did in one phase.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseReport {
    /// Wall time in that process.
    pub elapsed_us: u64,
    /// Driver calls made.
    pub driver_calls: u64,
    /// Device bytes created, released, copied or mapped, whichever the phase is about.
    pub bytes: u64,
    /// Parts of `elapsed_us`, by name, in order.
    pub steps: Vec<(String, u64)>,
    /// Bytes that the phase gave back or took, by device.
    pub devices: Vec<DeviceDelta>,
    /// Things worth telling a person, such as memory that stays and why.
    pub notes: Vec<String>,
    /// Of [`Phase::Drain`]: the host memory that saving will take.
    pub host: Option<HostNeed>,
    /// Of [`Phase::Drain`]: what is held of shared memory.
    pub references: Option<Box<References>>,
}

/// Bytes of one device, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceDelta {
    /// The ordinal in that process.
    pub device: DeviceOrdinal,
    /// The machine-wide name, in hexadecimal.
    pub uuid: String,
    /// Bytes by the tables.
    pub bytes: u64,
    /// Free bytes that the driver reports now.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
}

/// Where a process stands, as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// Running; memory on the device.
    Active,
    /// On the way to [`MemberState::Paused`].
    Offloading,
    /// Waiting at the gate; memory given back.
    Paused,
    /// On the way to [`MemberState::Active`].
    Restoring,
    /// Something was lost; the process should be ended.
    Faulted,
}

/// Who a process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Its random identity.
    pub id: MemberId,
    /// Its process id, as it knows it.
    pub pid: u32,
    /// Start of its command line.
    pub command: String,
    /// Version of its libsublet.
    pub version: String,
    /// Where it stands.
    pub state: MemberState,
    /// Is it held on the way to a cut?
    pub held: bool,
    /// The last step that it was asked for.
    pub asked: Option<Asked>,
    /// The tags of its regions, in order of their names.
    pub tags: Vec<TagBytes>,
}

/// Own memory of one tag in one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagBytes {
    /// The tag.
    pub tag: String,
    /// On the devices.
    pub resident_bytes: u64,
    /// Given up, by a pause of the tag or of everything.
    pub away_bytes: u64,
    /// Imported from other processes, and given up.
    pub imported_away_bytes: u64,
}

/// A step of one pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Which pause or resume, by a random number.
    pub round: u64,
    /// The step.
    pub phase: Phase,
}

/// What a process holds, and how its last pause and resume went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStats {
    /// Who it is.
    pub member: MemberInfo,
    /// What it holds.
    pub pool: PoolReport,
    /// Pauses completed.
    pub pauses: u64,
    /// Resumes completed.
    pub resumes: u64,
    /// Phases of the last pause, in order.
    pub last_pause: Vec<(Phase, PhaseReport)>,
    /// Phases of the last resume, in order.
    pub last_resume: Vec<(Phase, PhaseReport)>,
    /// Its ranks in communicators.
    pub communicators: Vec<Seat>,
    /// What a person should know, such as memory that Sublet cannot manage and why.
    pub notes: Vec<String>,
}

/// Why a request was not carried out, by what the asker can do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub kind: FailureKind,
    /// One sentence: operation, object, size, device, code, next step.
    pub message: String,
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
        /// How much more must be free.
        missing_bytes: u64,
    },
    /// Not possible in the state the process is in.
    WrongState,
    /// Another process that was needed is gone or silent.
    PeerGone,
    /// The application did not ask for the action in time.
    NoConsent,
    /// It was under way, and is no longer wanted: something failed elsewhere.
    CalledOff,
    /// Not while the process is paused, or being paused: ask again when it runs.
    NotNow,
    /// Other processes hold some of the memory: all must take part.
    Shared,
    /// The request names something this process does not have.
    Unknown,
    /// The driver failed, or the disk that saved contents are on.
    Driver,
    /// Something was lost; the process should be ended.
    Faulted,
}
