//! The messages of a coordinator: progress while it works, and an account at the end.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmm_pool::{KeptBytes, PinnedBytes};

use super::figures::GpuBudget;
use sublet_protocol::cut::Laggard;
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::phase::Stage;
use sublet_protocol::size::Size;
use sublet_protocol::stepping::Activity;
use sublet_protocol::wire::{
    Action, Ask, AskLent, AwaitConsent, Count, Drain, Failure, FailureKind, GiveUp, Hello, Hold,
    HostStep, LookIdle, MemberStats, Needs, Phase, PhaseReport, SaveStep, SpillStep, Stats, StepOn,
    TakePhase,
};

/// A step of the coordinator's work with each member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Step {
    /// Asking who it is.
    Hello,
    /// Asking what it holds.
    Stats,
    /// Waiting until its application asks for the action too.
    Consent(#[serde(skip)] Action),
    /// Asking what a resume would need, and what is free.
    Needs,
    /// Coming to a common cut.
    Cut,
    /// Letting calls in behind the shut gates until the devices are idle.
    Drain,
    /// Writing saved contents to files.
    Save,
    /// Host memory ahead of a pause.
    Host,
    /// Moving saved contents to a file, for another tenant's pause.
    Spill,
    /// Waiting for memory that other tenants have open.
    Lending,
    /// Counting what it holds against the tenant's budgets.
    Count,
    /// One phase.
    #[serde(untagged)]
    Phase(Phase),
}

impl Step {
    /// Can this step not be undone?
    pub fn is_commit(self) -> bool {
        matches!(self, Self::Phase(phase) if phase.stage() == Stage::Commit)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello => f.write_str("greeting"),
            Self::Stats => f.write_str("statistics"),
            Self::Consent(Action::Pause) => f.write_str("the application's own call to pause"),
            Self::Consent(Action::Resume) => f.write_str("the application's own call to resume"),
            Self::Needs => f.write_str("what a resume needs"),
            Self::Cut => f.write_str("cut"),
            Self::Drain => f.write_str(Phase::Drain.label()),
            Self::Save => f.write_str("save to files"),
            Self::Host => f.write_str("host memory for the next pause"),
            Self::Spill => f.write_str("room in host memory"),
            Self::Lending => f.write_str("memory open in other tenants"),
            Self::Count => f.write_str("counting against the budgets"),
            Self::Phase(phase) => f.write_str(phase.label()),
        }
    }
}

/// One process of the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Who {
    /// Its process id, where the kernel or the process itself told us.
    pub pid: Option<u32>,
    /// Its random identity.
    pub member: MemberId,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => write!(f, "member {}", self.member),
        }
    }
}

/// One process that did not do its part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemberFailure {
    /// The member.
    pub who: Who,
    /// In which step.
    pub step: Step,
    /// Why.
    pub failure: Failure,
}

impl MemberFailure {
    /// Makes the failure of `who` in `step`.
    pub fn new(who: Who, step: Step, kind: FailureKind, message: impl Into<String>) -> Self {
        Self { who, step, failure: Failure { kind, message: message.into() } }
    }
}

impl fmt::Display for MemberFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, step, failure } = self;
        write!(f, "{who} in step '{step}': {failure}")
    }
}

/// An event to show while the coordinator works.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A step was sent to members.
    StepStarted {
        /// The tenant of the members.
        tenant: &'a TenantName,
        /// The step.
        step: Step,
        /// The number of members that take part.
        members: usize,
    },
    /// A member has finished the step.
    MemberDone {
        /// The member.
        who: Who,
        /// The step.
        step: Step,
    },
    /// All members have finished the step.
    StepDone {
        /// The step.
        step: Step,
        /// The time since the step was sent.
        elapsed: Duration,
    },
    /// The ranks are not at a common cut yet.
    WaitingForCut {
        /// The member for which the coordinator waits.
        who: Who,
        /// The reason why it is not at the cut, and the activity of its threads.
        laggard: &'a Laggard,
        /// The number of other members for which the coordinator waits.
        others: usize,
    },
    /// Devices have work left after the gates were closed.
    WaitingForDevices {
        /// The member for which the coordinator waits.
        who: Who,
        /// Its activity behind the closed gate.
        activity: &'a Activity,
        /// The number of other members for which the coordinator waits.
        others: usize,
    },
    /// A caller wants to call off an action that cannot be called off any more; the action goes on.
    GoingOn,
    /// A member failed, and the finished steps are being undone.
    RollingBack {
        /// The failures.
        failures: &'a [MemberFailure],
    },
    /// A process is dead and its socket was removed.
    StaleRemoved {
        /// The member whose socket it was.
        member: MemberId,
    },
    /// An earlier pause or resume was left half done by its coordinator and is being finished or undone.
    Recovering {
        /// The process in which it was left half done.
        who: Who,
    },
}

/// The outcome of a pause or resume that did not fail.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Done, with the account.
    Completed(Box<Report>),
    /// Every process was paused before.
    AlreadyPaused {
        /// Device memory that stays, as in the report of that pause.
        stays: Vec<PinnedBytes>,
    },
    /// Every process was active before.
    AlreadyActive,
}

impl Outcome {
    /// Device memory that stays, and was to make room for others.
    pub fn stays(&self) -> &[PinnedBytes] {
        match self {
            Self::Completed(report) => &report.stays,
            Self::AlreadyPaused { stays } => stays,
            Self::AlreadyActive => &[],
        }
    }

    /// Returns the reason why a deep pause became a plain one, if it did.
    pub fn not_deep(&self) -> Option<String> {
        if let Self::Completed(report) = self {
            report.not_deep.first().map(ToString::to_string)
        } else {
            None
        }
    }

    /// Adds to the notes of an account.
    pub fn note(&mut self, notes: Vec<String>) {
        if let Self::Completed(report) = self {
            report.notes.extend(notes);
        }
    }

    /// The processes that were lost.
    pub fn into_losses(self) -> Vec<MemberFailure> {
        match self {
            Self::Completed(report) => report.losses,
            Self::AlreadyPaused { .. } | Self::AlreadyActive => Vec::new(),
        }
    }

    /// Were processes lost?
    pub fn has_losses(&self) -> bool {
        matches!(self, Self::Completed(report) if !report.losses.is_empty())
    }

    /// Is the result partial for a caller that wanted the room of a tenant and got it? Memory that stays does not count.
    pub fn is_partial_for_room(&self) -> bool {
        matches!(self, Self::Completed(report) if report.is_partial_for_room())
    }

    /// Is the result partial?
    pub fn is_partial(&self) -> bool {
        self.is_partial_for_room() || !self.stays().is_empty()
    }
}

/// The account of one pause or resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// The tenant's name.
    pub tenant: String,
    /// The action that was done.
    pub action: Action,
    /// From the first message to the last answer, in microseconds.
    pub wall_us: u64,
    /// The way of the ranks to a common cut, before the phases of a pause.
    pub cut: Option<CutSummary>,
    /// The calls that were let in behind the shut gates of a pause.
    pub drain: Option<DrainSummary>,
    /// Phases in order.
    pub phases: Vec<PhaseSummary>,
    /// Of half a swap that overlaps: how much of a device one stage moves.
    pub window_bytes: Option<u64>,
    /// Of half a swap that overlaps: each order by which memory moved, in the order of the answers.
    pub stages: Vec<StageSummary>,
    /// Device memory that a pause gave back, on all devices.
    pub freed_bytes: u64,
    /// Device memory that a resume took, on all devices.
    pub taken_bytes: u64,
    /// Bytes given back or taken, by device, in order of the devices' names.
    pub devices: Vec<DeviceTotal>,
    /// Of a pause: device memory that stays, and was to make room for others.
    pub stayed_bytes: u64,
    /// Of a pause by tag: do the processes stand still until the resume, since not all have agreed to run without that memory?
    pub stands_still: bool,
    /// Of these, how much for which cause.
    pub stays: Vec<PinnedBytes>,
    /// Of a deep pause: why processes kept their contexts. All stand paused, and a resume brings them back.
    pub not_deep: Vec<MemberFailure>,
    /// Things worth telling a person.
    pub notes: Vec<String>,
    /// Members that were lost after the point of no return. The others did their part.
    pub losses: Vec<MemberFailure>,
}

/// Lines about memory that stays on the devices after a pause, one for each cause.
pub fn staying(stays: &[PinnedBytes]) -> impl Iterator<Item = String> {
    stays.iter().map(|stay| format!("{} of device memory stay: {}", Size(stay.bytes), stay.reason))
}

/// The way of a tenant's ranks to a common cut, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CutSummary {
    /// From the first hold to the last report, in microseconds.
    pub wall_us: u64,
    /// The number of times that limits were sent to a member.
    pub rounds: u64,
    /// Launches that were made from the first report to the last.
    pub launches: u64,
    /// The number of times that everybody was let one launch further because nothing moved.
    pub stalls: u64,
    /// The number of times that the gate could not be closed at the cut, and another cut was looked for.
    pub retries: u64,
}

/// The calls that were let in behind the shut gates of a pause, until all devices were idle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DrainSummary {
    /// From the gates' closing until all devices were idle, in microseconds.
    pub wall_us: u64,
    /// The number of times that nothing moved, and processes were let on.
    pub rounds: u64,
    /// Calls that were let in.
    pub calls: u64,
}

/// One order of a swap by which memory of one process moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StageSummary {
    /// Of which phase.
    pub phase: Phase,
    /// The process whose memory moved.
    pub who: Who,
    /// When the process began it, from the beginning of the swap, in microseconds: when its answer came, less the time that
    /// it says it took.
    pub began_us: u64,
    /// When its answer came.
    pub ended_us: u64,
    /// Device memory released or created.
    pub bytes: u64,
    /// Contents copied.
    pub copied_bytes: u64,
}

/// One phase over all members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PhaseSummary {
    /// The phase.
    pub phase: Phase,
    /// From the first message to the last answer, in microseconds.
    pub wall_us: u64,
    /// The reports of the members.
    pub members: Vec<MemberPhase>,
}

impl PhaseSummary {
    /// The slowest member's time, in microseconds.
    pub fn slowest_us(&self) -> u64 {
        let times = self.members.iter().map(|member| member.report.elapsed_us);
        times.max().unwrap_or(0)
    }

    /// Bytes of all members.
    pub fn bytes(&self) -> u64 {
        let bytes = self.members.iter().map(|member| member.report.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Adds a later part of the same phase.
    fn add(&mut self, later: Self) {
        self.wall_us = self.wall_us.saturating_add(later.wall_us);
        for member in later.members {
            match self.members.iter_mut().find(|earlier| earlier.who == member.who) {
                Some(earlier) => earlier.report.add(member.report),
                None => self.members.push(member),
            }
        }
    }
}

impl Report {
    /// Returns the sum of the members' figures for kept contents; none if no member reports any.
    pub fn kept(&self) -> Option<KeptBytes> {
        let members = self.phases.iter().flat_map(|phase| &phase.members);
        members.filter_map(|member| member.report.kept).reduce(KeptBytes::plus)
    }
}

/// One member in one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemberPhase {
    /// The member.
    pub who: Who,
    /// Its report.
    pub report: PhaseReport,
}

/// The account of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceTotal {
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// Bytes of all members given back (pause) or taken (resume).
    pub bytes: u64,
    /// Free bytes, as last reported.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
}

impl Report {
    pub(super) fn new(tenant: &TenantName, action: Action) -> Self {
        Self {
            tenant: tenant.to_string(),
            action,
            wall_us: 0,
            cut: None,
            drain: None,
            phases: Vec::new(),
            window_bytes: None,
            stages: Vec::new(),
            freed_bytes: 0,
            taken_bytes: 0,
            devices: Vec::new(),
            stayed_bytes: 0,
            stands_still: false,
            stays: Vec::new(),
            not_deep: Vec::new(),
            notes: Vec::new(),
            losses: Vec::new(),
        }
    }

    /// Returns remarks for people about the pause or resume, including losses.
    pub fn remarks(&self) -> Vec<String> {
        let losses = self.losses.iter().map(|loss| format!("lost: {loss}"));
        staying(&self.stays)
            .chain(self.notes.iter().cloned())
            .chain(self.shallow())
            .chain(losses)
            .collect()
    }

    /// The reasons why a deep pause became a plain one, in words.
    pub fn shallow(&self) -> impl Iterator<Item = String> {
        self.not_deep.iter().map(|failure| {
            format!(
                "not deep: {failure}; the tenant is paused with all contents: `sublet pause {} --deep` tries again",
                self.tenant
            )
        })
    }

    /// Is the result partial?
    pub fn is_partial(&self) -> bool {
        self.is_partial_for_room() || !self.stays.is_empty()
    }

    /// As [`Outcome::is_partial_for_room`].
    fn is_partial_for_room(&self) -> bool {
        !self.losses.is_empty() || !self.not_deep.is_empty()
    }

    /// Replaces the list of device memory that stays.
    pub fn set_stays(&mut self, stays: Vec<PinnedBytes>) {
        self.stayed_bytes = PinnedBytes::total_bytes(&stays);
        self.stays = stays;
    }

    /// Adds a phase. Bytes of devices count in the phases that release or allocate memory. The free bytes are those of the
    /// latest phase.
    pub fn add(&mut self, summary: PhaseSummary) {
        let moves_memory = summary.phase.moves_memory();
        for MemberPhase { who, report } in &summary.members {
            PinnedBytes::merge(&mut self.stays, &report.stays);
            for note in &report.notes {
                self.notes.push(format!("{who}: {note}"));
            }
            for delta in &report.devices {
                if moves_memory {
                    let all = match self.action {
                        Action::Pause => &mut self.freed_bytes,
                        Action::Resume => &mut self.taken_bytes,
                    };
                    *all = all.saturating_add(delta.bytes);
                }
                let total = self.device(&delta.uuid);
                if moves_memory {
                    total.bytes = total.bytes.saturating_add(delta.bytes);
                }
                total.free_bytes = delta.free_bytes;
                total.total_bytes = delta.total_bytes;
            }
        }
        self.stayed_bytes = PinnedBytes::total_bytes(&self.stays);
        match self.phases.last_mut() {
            Some(last) if last.phase == summary.phase => last.add(summary),
            Some(_) | None => self.phases.push(summary),
        }
    }

    fn device(&mut self, uuid: &str) -> &mut DeviceTotal {
        let index = match self.devices.binary_search_by(|total| total.uuid.as_str().cmp(uuid)) {
            Ok(index) => index,
            Err(index) => {
                let total =
                    DeviceTotal { uuid: uuid.to_owned(), bytes: 0, free_bytes: 0, total_bytes: 0 };
                self.devices.insert(index, total);
                index
            }
        };
        &mut self.devices[index]
    }
}

/// The holdings of all members of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TenantStats {
    /// The tenant's name.
    pub tenant: String,
    /// Members that answered, by process id.
    pub members: Vec<MemberStats>,
    /// The tenant's budget on each GPU, and what it holds there. Added by those who ask for it; nothing where it has no budgets.
    pub budgets: Vec<GpuBudget>,
    /// Members that did not.
    pub failures: Vec<MemberFailure>,
}

/// A question of the coordinator, which is one of its steps.
pub trait Question: Ask + Clone {
    /// Returns the step of the question, for people.
    fn step(&self) -> Step;
}

macro_rules! questions {
    ($($question:ident($self:ident) is $step:expr;)*) => {$(
        impl Question for $question {
            fn step(&$self) -> Step {
                $step
            }
        }
    )*};
}

questions! {
    Hello(self) is Step::Hello;
    Stats(self) is Step::Stats;
    LookIdle(self) is Step::Stats;
    Count(self) is Step::Count;
    AwaitConsent(self) is Step::Consent(self.action);
    GiveUp(self) is Step::Consent(self.action);
    Needs(self) is Step::Needs;
    Hold(self) is Step::Cut;
    StepOn(self) is Step::Drain;
    SaveStep(self) is Step::Save;
    HostStep(self) is Step::Host;
    SpillStep(self) is Step::Spill;
    AskLent(self) is Step::Lending;
    Drain(self) is Step::Phase(Phase::Drain);
    TakePhase(self) is Step::Phase(self.order.phase());
}
