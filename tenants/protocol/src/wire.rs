//! The messages of the pause protocol.
//!
//! One request, one reply, in order, on each connection. Encoding is postcard behind the frame of
//! [`crate::transport`]; the decoder is total: any bytes give a message or an error. Lists and strings
//! are bounded by the frame's length limit.

mod ask;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::{AllocationId, CopiedBytes, KeptBytes, LIBRARY_TAGS, PinnedBytes, PoolReport};

use crate::class::{Class, Weight};
use crate::cut::{CutReport, Rank};
use crate::host_memory::{HostLimit, HostNeed};
use crate::identity::{MemberId, id_text};
use crate::references::{Partner, References};
use crate::region::{TAG_BYTES_MAX, TAGS_MAX};
use crate::saving::SaveAccount;
use crate::scope::TagNames;
use crate::stepping::Activity;

pub use crate::phase::{Action, Order, Phase, Told, Window};
pub use crate::state::MemberState;
pub use ask::{
    Ask, AskLent, AwaitConsent, Borrower, Count, Drain, Failure, FailureKind, FetchFds, GiveUp,
    Hello, Hold, HostStep, LookIdle, Needs, STATS_BYTES_MAX, SaveStep, SentFds, SpillStep, Stats,
    StepOn, TakePhase, Withdraw,
};

/// The version changes whenever a message does. Processes of different versions refuse each other by name.
pub const PROTOCOL_VERSION: u16 = 32;

/// A request of one process to another's agent, as it is sent. Each request has a type of its own, with its answer ([`Ask`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// [`Hello`], answered with [`Reply::Member`].
    Hello,
    /// [`Stats`], answered with [`Reply::Stats`].
    Stats,
    /// Answered with [`Reply::Needs`].
    Needs(Needs),
    /// Answered with [`Reply::PhaseDone`].
    Phase(TakePhase),
    /// Answered with [`Reply::Cut`].
    Cut(Hold),
    /// Answered with [`Reply::Activity`].
    Step(StepOn),
    /// Answered with [`Reply::Consented`].
    AwaitConsent(AwaitConsent),
    /// Answered with [`Reply::Noted`].
    GiveUp(GiveUp),
    /// Answered with [`Reply::Told`].
    Withdraw(Withdraw),
    /// Answered with [`Reply::Fds`], and as many descriptors with it.
    FetchFds(FetchFds),
    /// Answered with [`Reply::Saving`].
    Save(SaveStep),
    /// Answered with [`Reply::Host`].
    Host(HostStep),
    /// Answered with [`Reply::Lent`].
    Lent(AskLent),
    /// [`Count`], answered with [`Reply::Counts`].
    Count,
    /// Answered with [`Reply::Spilled`].
    Spill(SpillStep),
    /// Answered with [`Reply::Idleness`].
    Idle(LookIdle),
}

/// The reason for fetching descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchPurpose {
    /// To redeem a ticket.
    Redeem {
        /// The number of the ticket among the owner's; 0 if the owner keeps no memory for it.
        serial: u64,
    },
    /// To open memory again that the importer released in a pause. No ticket is used up.
    Again,
}

/// Descriptors that one message may carry: the kernel allows 253 (`SCM_MAX_FD`).
pub const FDS_PER_MESSAGE_MAX: usize = 250;

/// An agent's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Hello`].
    Member(MemberInfo),
    /// To [`Request::Stats`].
    Stats(Box<MemberStats>),
    /// To [`Request::Needs`].
    Needs(Needed),
    /// To [`Request::Cut`].
    Cut(Box<CutReport>),
    /// To [`Request::Step`].
    Activity(Box<Activity>),
    /// To [`Request::Phase`]: this phase is complete. The phase is named, so that a repeated answer does not count for the next
    /// phase.
    PhaseDone(Phase, PhaseAnswer),
    /// To [`Request::Withdraw`].
    Told(RoundEnd),
    /// To [`Request::AwaitConsent`].
    Consented,
    /// To [`Request::GiveUp`].
    Noted,
    /// To [`Request::FetchFds`]. Descriptors travel with this message; `count` is their number. Memory lent to another tenant
    /// has two descriptors for each allocation: the driver's, and its lease.
    Fds {
        /// The number of descriptors.
        count: u32,
        /// When tickets were redeemed: the tag of each allocation, in the same order.
        tags: Vec<String>,
        /// Allocations requested again that this process does not have any more. No descriptor is sent for them.
        missing: Vec<AllocationId>,
        /// For memory lent to another tenant: the device of each allocation, in the same order, by its machine-wide name.
        devices: Vec<String>,
    },
    /// To [`Request::Save`].
    Saving(Box<SaveProgress>),
    /// To [`Request::Host`].
    Host(Box<HostProgress>),
    /// To [`Request::Lent`].
    Lent(Box<Lending>),
    /// To [`Request::Count`]: this process counts the memory that it holds.
    Counts,
    /// To [`Request::Spill`].
    Spilled(Box<SpillProgress>),
    /// To [`Request::Idle`].
    Idleness(Idleness),
    /// The request was not carried out. The process is as before the request, unless `failure` says otherwise.
    Failed(Failure),
}

/// The memory that a process shares with other tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lending {
    /// Own memory that processes of other tenants have open. Also memory of this pause by tag that the process itself has open,
    /// and has not agreed to run without.
    pub lent: Vec<Lent>,
    /// Memory that was borrowed from other tenants, and that a pause has released.
    pub wanted: Vec<Wanted>,
    /// Processes of its own tenant with which it shares memory.
    pub partners: Vec<Partner>,
}

/// Memory that one process of another tenant has open, or of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Lent {
    /// Its tenant.
    pub tenant: String,
    /// Its process id, where the kernel tells.
    pub pid: Option<u32>,
    /// Allocations that it opened by a `cudaIpc` handle.
    pub handles: u64,
    /// Allocations that it imported by a ticket.
    pub tickets: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// Paused memory of another tenant that a process has open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The tenant that owns it.
    pub tenant: String,
    /// Allocations.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The progress of a process with host memory for its next pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HostProgress {
    /// Host memory that it holds, in bytes.
    pub held_bytes: u64,
    /// Host memory that a pause would hold, in bytes.
    pub wanted_bytes: u64,
    /// Host memory brought in, in bytes, since it was last asked to begin, or began by itself. The time fields count
    /// from then too.
    pub brought_in_bytes: u64,
    /// Since then, in microseconds.
    pub elapsed_us: u64,
    /// Of `elapsed_us`, how much went into the first writing of pages.
    pub touching_us: u64,
    /// Of `elapsed_us`, how much went into pinning.
    pub pinning_us: u64,
    /// The stage that it has reached.
    pub stage: HostStage,
    /// To [`HostStep::Need`]: what is missing, and what limits it. No document has it.
    #[cfg_attr(feature = "schema", schemars(with = "()"))]
    pub need: Option<HostNeed>,
}

/// See [`HostProgress`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum HostStage {
    /// Nothing is brought in: nobody has asked, or all that was wanted is there.
    #[default]
    Rests,
    /// It is being brought in.
    Grows,
    /// A pause or resume is under way, after which it goes on.
    Waits,
    /// It came to an end before all was there.
    Stopped(Failure),
}

/// The progress of a process in writing saved contents to files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveProgress {
    /// The bytes that the process has, by kind.
    pub account: SaveAccount,
    /// Bytes of [`SaveAccount::saved_bytes`] that are written.
    pub written_bytes: u64,
    /// The stage that it has reached.
    pub stage: SaveStage,
}

/// See [`SaveProgress`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveStage {
    /// The process runs, and has all its memory: no contents are to be written.
    Nothing,
    /// More contents are to be written.
    Writing,
    /// All contents are written.
    Written {
        /// The name of the process's map in the directory.
        map: String,
    },
    /// No contents are being written, and incomplete files are removed.
    CalledOff,
}

/// The contents that a process has moved from host memory to a file, and those that it may still move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillProgress {
    /// Saved contents that it may move; none if it has not opted in, or is not paused.
    pub left_bytes: u64,
    /// Host memory that this step returned to the system.
    pub given_back_bytes: u64,
    /// The time that it has been in its present state, in milliseconds.
    pub rests_ms: u64,
    /// The limits on its host memory: memory that it returns helps other processes under the same limit.
    pub limits: Vec<HostLimit>,
}

/// The report of one process on one phase.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// Of [`Phase::Prepare`], and where memory goes by stages or early of their releases: what became of the contents that are kept.
    pub kept: Option<KeptBytes>,
    /// Of [`Phase::Release`]: device memory that stays, and was to make room for others.
    pub stays: Vec<PinnedBytes>,
    /// Of a pause or resume by stages: how far it is.
    pub stage: Option<StageReport>,
}

impl PhaseReport {
    /// Adds the report of further work in the same phase, as if all were done in one.
    pub fn add(&mut self, next: Self) {
        self.elapsed_us += next.elapsed_us;
        self.driver_calls += next.driver_calls;
        self.bytes = self.bytes.saturating_add(next.bytes);
        for (name, elapsed_us) in next.steps {
            match self.steps.iter_mut().find(|(known, _)| *known == name) {
                Some((_, all_us)) => *all_us += elapsed_us,
                None => self.steps.push((name, elapsed_us)),
            }
        }
        for delta in next.devices {
            match self.devices.iter_mut().find(|known| known.uuid == delta.uuid) {
                Some(known) => {
                    let bytes = known.bytes.saturating_add(delta.bytes);
                    *known = DeviceDelta { bytes, ..delta };
                }
                None => self.devices.push(delta),
            }
        }
        self.notes.extend(next.notes);
        PinnedBytes::merge(&mut self.stays, &next.stays);
        self.kept = match (self.kept, next.kept) {
            (Some(one), Some(more)) => Some(one.plus(more)),
            (one, more) => one.or(more),
        };
        if let Some(next) = next.stage {
            let copied_bytes = self.stage.as_ref().map_or(0, |stage| stage.copied_bytes);
            let copied_bytes = copied_bytes.saturating_add(next.copied_bytes);
            self.stage = Some(StageReport { copied_bytes, ..next });
        }
    }
}

/// The answer to a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseAnswer {
    /// The report on the step.
    pub report: PhaseReport,
    /// Of [`Phase::Drain`].
    pub drained: Option<Box<Drained>>,
}

impl From<PhaseReport> for PhaseAnswer {
    fn from(report: PhaseReport) -> Self {
        Self { report, drained: None }
    }
}

/// The account of a process that has drained. Only the coordinator uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    /// The host memory that saving will need.
    pub host: HostNeed,
    /// The shared memory that the process holds.
    pub references: References,
}

/// The progress of a process in a pause or resume by stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StageReport {
    /// Contents copied between devices and host.
    pub copied_bytes: u64,
    /// Devices on which own memory is still to be moved.
    pub left: Vec<StageLeft>,
}

/// The memory that a resume would allocate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needed {
    /// The memory on each device, and the free bytes there.
    pub devices: Vec<DeviceDelta>,
    /// The largest allocation among it.
    pub largest_bytes: u64,
}

/// The memory that is still to be moved on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StageLeft {
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// All of it.
    pub bytes: u64,
    /// The smallest allocation.
    pub smallest_bytes: u64,
}

/// Bytes of one device, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceDelta {
    /// The ordinal in that process.
    pub device: DeviceOrdinal,
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// Bytes by the tables.
    pub bytes: u64,
    /// Free bytes that the driver reports now.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
}

/// The identity and the state of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct MemberInfo {
    /// Its random identity.
    pub id: MemberId,
    /// Its process id, as it knows it.
    pub pid: u32,
    /// The family that it names, whose tenants may open its memory.
    pub family: Option<String>,
    /// The class of its tenant, by which tenants take turns.
    pub class: Class,
    /// The number of quanta that a fair tenant has at a time.
    pub weight: Weight,
    /// Do its resumes, and allocations that its devices have no room for, queue for others to make way?
    pub queues: bool,
    /// Do its contexts leave the GPUs too while it is paused?
    pub goes_deep: bool,
    /// Start of its command line.
    pub command: String,
    /// Version of its libsublet.
    pub version: String,
    /// Its present state.
    pub state: MemberState,
    /// Device memory that a pause of it leaves, or has left if it is paused.
    pub stays: Vec<PinnedBytes>,
    /// The tags of memory without which it stands still, since a pause of that memory alone.
    pub stands_without: Option<TagNames>,
    /// Is it held on the way to a cut?
    pub held: bool,
    /// Is a pause or resume of it not over? Orders of it may still be to be taken, whatever the state says until then.
    pub in_round: bool,
    /// Do calls into NCCL wait until a resume of it?
    pub nccl_waits: bool,
    /// The last step that it was told to take.
    pub asked: Option<Asked>,
    /// The tags of its regions, in order of their names.
    #[serde(deserialize_with = "tags_of_peer")]
    pub tags: Vec<TagBytes>,
}

/// No more and no longer ones than a process has.
fn tags_of_peer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TagBytes>, D::Error> {
    let tags: Vec<TagBytes> = Vec::deserialize(deserializer)?;
    let is_long = |tag: &TagBytes| tag.tag.len() > TAG_BYTES_MAX;
    if tags.len() > TAGS_MAX + LIBRARY_TAGS.len() || tags.iter().any(is_long) {
        return Err(D::Error::custom("more or longer tags than a process has"));
    }
    Ok(tags)
}

/// Own memory of one tag in one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TagBytes {
    /// The tag.
    pub tag: String,
    /// On the devices.
    pub resident_bytes: u64,
    /// Given up, by a pause of the tag or of everything.
    pub away_bytes: u64,
    /// Imported from other processes, and given up.
    pub imported_away_bytes: u64,
    /// Has the process agreed to run without it?
    pub runs_without: bool,
}

/// A step of one pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Asked {
    /// The pause or resume, by a random number.
    #[serde(with = "id_text")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub round: u64,
    /// The step.
    pub phase: Phase,
}

/// The order that one process was given for the end of a pause or resume, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RoundEnd {
    /// Nothing: no step that commits or undoes it.
    Open,
    /// To commit.
    Commit,
    /// To undo it.
    Abort,
}

/// The memory that a process holds, and its reports on its last pause and resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemberStats {
    /// The identity and the state of the process.
    pub member: MemberInfo,
    /// The memory that it holds.
    pub pool: PoolReport,
    /// The progress of the copies of a pause or resume under way.
    pub copied: CopiedBytes,
    /// Pauses completed.
    pub pauses: u64,
    /// Resumes completed.
    pub resumes: u64,
    /// Phases of the last pause, in order.
    pub last_pause: Vec<(Phase, PhaseReport)>,
    /// Phases of the last resume, in order.
    pub last_resume: Vec<(Phase, PhaseReport)>,
    /// The lengths of its pauses, all phases of each together.
    pub pause_times: PauseTimes,
    /// Host memory for the next pause.
    pub host: HostProgress,
    /// For how long it has done nothing.
    pub idleness: Idleness,
    /// Own memory that processes of other tenants have open.
    pub lent: Vec<Lent>,
    /// Its ranks in communicators.
    pub communicators: Vec<Rank>,
    /// Notes for people, such as memory that Sublet cannot manage and why.
    pub notes: Vec<String>,
}

/// For how long a process has done nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Idleness {
    /// For how long no thread of it has called the driver for work or memory, in microseconds, as far as somebody has looked.
    #[serde(serialize_with = "whole_seconds")]
    #[cfg_attr(feature = "schema", schemars(with = "u64"))]
    pub quiet_us: u64,
    /// Were its devices seen to have nothing left to do in that time?
    pub is_drained: bool,
    /// Calls that wait for its memory to be back.
    pub waiting_calls: u64,
}

/// Rounds to whole seconds for people's programs. A look every few seconds measures no finer, and a document then stays the
/// same for a while.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it out so")]
fn whole_seconds<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    let shown_us = if serializer.is_human_readable() { us / 1_000_000 * 1_000_000 } else { *us };
    serializer.serialize_u64(shown_us)
}

/// The lengths of pauses, counted by bounds. A length belongs to the first bound that it does not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PauseTimes {
    /// For each of the bounds 10 ms, 30 ms, 100 ms, 300 ms, 1 s, 3 s, 10 s, 30 s and 100 s, and for what is longer.
    pub counts: [u64; 10],
    /// All lengths together, in microseconds.
    pub sum_us: u64,
}

impl PauseTimes {
    /// The bounds, in microseconds.
    pub const BOUNDS_US: [u64; 9] = [
        10_000,
        30_000,
        100_000,
        300_000,
        1_000_000,
        3_000_000,
        10_000_000,
        30_000_000,
        100_000_000,
    ];

    /// Counts one more.
    pub fn add(&mut self, elapsed_us: u64) {
        let place = Self::BOUNDS_US.partition_point(|bound_us| *bound_us < elapsed_us);
        self.counts[place] += 1;
        self.sum_us = self.sum_us.saturating_add(elapsed_us);
    }

    /// Those of both.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        for (all, more) in self.counts.iter_mut().zip(other.counts) {
            *all += more;
        }
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_counts_at_the_first_bound_that_it_does_not_exceed() {
        let mut times = PauseTimes::default();
        for elapsed_us in [0, 10_000, 10_001, 2_000_000, 100_000_001, u64::MAX] {
            times.add(elapsed_us);
        }
        assert_eq!(times.counts, [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(times.plus(times).counts[0], 4);
        assert_eq!(times.sum_us, u64::MAX);
    }
}
