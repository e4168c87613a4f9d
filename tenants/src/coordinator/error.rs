//! Why a coordinator did not do what it was asked.

use std::fmt;
use std::path::PathBuf;

use super::needs::DeviceShortage;
use super::report::MemberFailure;
use crate::code::Code;
use crate::host_memory::HostShortage;
use crate::identity::TenantName;
use crate::run_dir::RunDirError;
use crate::saving::SaveDirError;
use crate::scope::Scope;
use crate::transport::{TransportError, command_of, is_stopped};
use crate::wire::{Action, FailureKind};

/// Why a pause, a resume, a question, preparing or saving was not carried out.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// Nobody ever ran under that name, or all of it is gone.
    #[error("there is no tenant '{tenant}' ({})", known(existing))]
    NoSuchTenant { tenant: TenantName, existing: Vec<TenantName> },
    /// All processes of the tenant are dead; what they left behind was removed.
    #[error(
        "tenant '{tenant}' has no live process; what its {dead} dead processes left behind was removed"
    )]
    NoProcess { tenant: TenantName, dead: usize },
    /// The run directory is not usable, or somebody else coordinates.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A process lives but cannot be spoken to.
    #[error("a process of tenant '{tenant}' cannot be reached; nothing was changed")]
    Unreachable {
        tenant: TenantName,
        #[source]
        source: TransportError,
    },
    /// A process lives but did not say who it is.
    #[error("{} of '{tenant}' not started: {why}; nothing was changed", noun(*action))]
    NoGreeting {
        tenant: TenantName,
        action: Action,
        failure: Box<MemberFailure>,
        /// Why, and what to do about it.
        why: String,
    },
    /// Processes run different versions of Sublet.
    #[error(
        "the processes of tenant '{tenant}' run different versions of Sublet ({versions}): \
         run all of them with one; nothing was changed"
    )]
    VersionsDiffer {
        tenant: TenantName,
        /// Version and process ids, as text.
        versions: String,
    },
    /// A process of the tenant has lost something.
    #[error(
        "process {pid} of tenant '{tenant}' is faulted and can neither be paused nor resumed: end it, \
         then try again; {} before that",
        save_hint(tenant)
    )]
    Faulted { tenant: TenantName, pid: u32 },
    /// No process of the tenant has ever used these tags.
    #[error(
        "tenant '{tenant}' has no memory with the {}; {}",
        quoted_tags(unknown),
        known_tags(known)
    )]
    UnknownTags {
        tenant: TenantName,
        /// The requested tags that nobody knows.
        unknown: Vec<String>,
        known: Vec<String>,
    },
    /// A pause by tag of processes that stand still.
    #[error(
        "tenant '{tenant}' is paused as a whole, and so are its tags: resume it, all or by tag, first"
    )]
    PausedAlready { tenant: TenantName },
    /// Only memory of some tags is away, and the processes stand still until all of it is back.
    #[error(
        "{what} is paused alone, and the job stands still until all of that is back: `sublet resume {tenant}` first, or \
         `sublet pause {tenant}`, which takes the rest"
    )]
    StandsStill { tenant: TenantName, what: String },
    /// A deep pause of processes that the driver cannot freeze.
    #[error(
        "tenant '{tenant}' cannot be paused deep: {why}; nothing was changed. `sublet pause {tenant}` frees its memory, and \
         leaves its contexts on the GPUs"
    )]
    NotDeep { tenant: TenantName, why: String },
    /// An earlier coordinator died half-way, and what it left can neither be undone nor finished.
    #[error(
        "an earlier pause or resume of tenant '{tenant}' was left half done and could not be finished: {}; \
         end these processes, then try again; {} before that",
        listed(failures),
        save_hint(tenant)
    )]
    Unrecovered { tenant: TenantName, failures: Vec<MemberFailure> },
    /// Host memory is too small for a pause that copies all memory of the tenant. No process has begun.
    #[error("tenant '{tenant}': {shortage}")]
    HostShort { tenant: TenantName, shortage: HostShortage },
    /// Preparing was called off. What had come in stays, for the next pause.
    #[error(
        "preparing tenant '{tenant}' was called off; what was brought in stays for its next pause, and `sublet ps` shows it"
    )]
    NotPrepared { tenant: TenantName },
    /// The directory that contents were to be saved in is not usable. No process was asked to write.
    #[error(transparent)]
    SaveDir(#[from] SaveDirError),
    /// No process has given memory up that could be saved.
    #[error(
        "tenant '{tenant}' has nothing saved: its memory is where it belongs; `sublet pause {tenant}` saves it"
    )]
    NothingSaved { tenant: TenantName },
    /// The disk is too small for what is saved. Nothing was written.
    #[error(
        "what tenant '{tenant}' has saved takes {needed_bytes} bytes, and {free_bytes} are free in {}: free {} \
         more, or name a directory on another disk",
        dir.display(), needed_bytes.saturating_sub(*free_bytes)
    )]
    NoSpace {
        tenant: TenantName,
        dir: PathBuf,
        needed_bytes: u64,
        /// Bytes that the filesystem has free.
        free_bytes: u64,
    },
    /// Saving was called off. What was written is removed.
    #[error("saving tenant '{tenant}' to files was called off, and what was written is removed")]
    NotSaved { tenant: TenantName },
    /// No process could write. Nothing is left in the directory.
    #[error("no process of tenant '{tenant}' has written anything to {}: {}", dir.display(), joined(failures))]
    SaveFailed { tenant: TenantName, dir: PathBuf, failures: Vec<MemberFailure> },
    /// Processes joined again and again while the tenant was being paused. Everything was undone.
    #[error(
        "tenant '{tenant}' is as before: processes joined it each time while it was being paused; pause it again"
    )]
    Joined { tenant: TenantName },
    /// It was called off before the point of no return. Everything was undone, but for what
    /// `undo_failures` says.
    #[error("{} tenant '{tenant}' was called off{}", gerund(*action), undone(*action, *runs, undo_failures))]
    CalledOff {
        tenant: TenantName,
        action: Action,
        /// Did its processes run before, as those do whose memory leaves or comes back by tag?
        runs: bool,
        /// Who could not be taken back.
        undo_failures: Vec<MemberFailure>,
    },
    /// The process that coordinated what all processes requested has failed, and told the others.
    #[error("{} tenant '{tenant}' together with its other processes failed: {why}", gerund(*action))]
    FailedTogether { tenant: TenantName, action: Action, why: String },
    /// A member did not do its part before the point of no return. Everything was undone, but for what
    /// `undo_failures` says.
    #[error(
        "{} tenant '{tenant}' failed: {}{}{}",
        gerund(*action), causes(failures, shortages), undone(*action, *runs, undo_failures),
        way_on(*action, tenant, failures)
    )]
    Refused {
        tenant: TenantName,
        action: Action,
        /// Did its processes run before, as those do whose memory leaves or comes back by tag?
        runs: bool,
        /// Who did not do their part; never empty.
        failures: Vec<MemberFailure>,
        /// The limit that leaves too little host memory, if that is why.
        host_short: Option<Box<HostShortage>>,
        /// Who could not be taken back.
        undo_failures: Vec<MemberFailure>,
        /// Of a resume: devices that cannot hold the tenant now, and who holds them.
        shortages: Vec<DeviceShortage>,
    },
}

impl CoordinatorError {
    /// It was called off before anything was done.
    pub(super) fn called_off_before(tenant: TenantName, action: Action) -> Self {
        let runs = action == Action::Pause;
        Self::CalledOff { tenant, action, runs, undo_failures: Vec::new() }
    }

    /// It was refused for `failures`, with all as before. Did its processes run before?
    pub(super) fn refused(
        tenant: TenantName,
        (action, runs): (Action, bool),
        failures: Vec<MemberFailure>,
    ) -> Self {
        Self::Refused {
            tenant,
            action,
            runs,
            failures,
            host_short: None,
            undo_failures: Vec::new(),
            shortages: Vec::new(),
        }
    }

    /// Who did not do their part before the point of no return; empty when something else was the matter.
    pub fn failures(&self) -> &[MemberFailure] {
        if let Self::Refused { failures, .. } = self { failures } else { &[] }
    }

    /// Did one process want to act alone on memory that others hold too? All of them together can.
    pub fn is_shared(&self) -> bool {
        let shared = |failure: &MemberFailure| failure.failure.kind == FailureKind::Shared;
        self.failures().iter().any(shared) && self.left_unchanged()
    }

    /// The limit that leaves too little host memory for the tenant, if that is why it was refused.
    pub(super) fn host_short(&self) -> Option<&HostShortage> {
        if let Self::Refused { host_short, .. } = self { host_short.as_deref() } else { None }
    }

    /// Devices that cannot hold the tenant now; empty when something else was the matter.
    pub fn shortages(&self) -> &[DeviceShortage] {
        if let Self::Refused { shortages, .. } = self { shortages } else { &[] }
    }

    /// How much device memory was missing, when that is why: the largest figure of one device.
    pub fn missing_device_bytes(&self) -> Option<u64> {
        let Self::Refused { failures, shortages, .. } = self else {
            return None;
        };
        if let Some(most) = shortages.iter().map(DeviceShortage::missing_bytes).max() {
            return Some(most);
        }
        failures.iter().filter_map(|failure| failure.failure.kind.missing_device_bytes()).max()
    }

    /// Can the same call succeed later, when others have given memory back or finished what they do?
    pub fn is_retryable(&self) -> bool {
        let may_pass = |failure: &MemberFailure| may_pass(failure.failure.kind);
        let is_passing = matches!(
            self,
            Self::RunDir(RunDirError::Locked { .. } | RunDirError::LockGone { .. })
                | Self::Joined { .. }
                | Self::CalledOff { .. }
                | Self::Refused { .. }
        );
        is_passing && self.left_unchanged() && self.failures().iter().all(may_pass)
    }

    /// Is every process as it was before the call?
    pub fn left_unchanged(&self) -> bool {
        if let Self::Refused { undo_failures, .. } | Self::CalledOff { undo_failures, .. } = self {
            return undo_failures.is_empty();
        }
        !matches!(self, Self::Unrecovered { .. } | Self::FailedTogether { .. })
    }
}

/// Why a swap was not completed.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The second tenant cannot come: it is not there, say, or does not fit. Both are as before.
    #[error(transparent)]
    NoTarget(CoordinatorError),
    /// The first tenant did not pause; the second was not asked.
    #[error(transparent)]
    Pause(CoordinatorError),
    /// The second tenant did not come while the first left, and the first was resumed again.
    #[error(
        "{source}. {} was paused for it, and is active again{}",
        left.subject_first(tenant),
        lost(losses)
    )]
    WentBack {
        tenant: TenantName,
        /// What of it had been paused.
        left: Scope,
        losses: Vec<MemberFailure>,
        /// Why the second did not come.
        source: Box<CoordinatorError>,
    },
    /// The second tenant did not come while the first left, and the first could not be resumed: what of it had left is paused still, as what was to come is.
    #[error(
        "{source}. {} was paused for it, and could not be brought back: {resume}. {}{}: `{}` tries again",
        left.subject_first(tenant),
        left.is_away(tenant),
        lost(losses),
        left.resume_command(tenant)
    )]
    NotBack {
        tenant: TenantName,
        /// What of it is paused now.
        left: Scope,
        losses: Vec<MemberFailure>,
        /// Why the first did not resume.
        resume: Box<CoordinatorError>,
        /// Why the second did not come.
        source: Box<CoordinatorError>,
    },
}

impl SwapError {
    /// Why the second tenant did not come, where the first is active as before: the same swap may succeed later.
    pub fn in_the_way(&self) -> Option<&CoordinatorError> {
        match self {
            Self::NoTarget(error) => Some(error),
            Self::WentBack { source, .. } => Some(source),
            Self::Pause(_) | Self::NotBack { .. } => None,
        }
    }
}

fn lost(losses: &[MemberFailure]) -> String {
    if losses.is_empty() { String::new() } else { format!(", but for: {}", listed(losses)) }
}

/// Is it over by itself, when others have given memory back or finished what they do?
fn may_pass(kind: FailureKind) -> bool {
    match kind {
        FailureKind::InCapture
        | FailureKind::CutNotReached
        | FailureKind::DrainTimeout
        | FailureKind::OutOfHostMemory
        | FailureKind::OutOfDeviceMemory { .. }
        | FailureKind::DoesNotFit { .. }
        | FailureKind::NoConsent
        | FailureKind::NotNow
        | FailureKind::Lent
        | FailureKind::LenderAway
        | FailureKind::Nameless
        | FailureKind::CalledOff => true,
        FailureKind::WrongState
        | FailureKind::Shared
        | FailureKind::PeerGone
        | FailureKind::Unknown
        | FailureKind::Driver
        | FailureKind::Faulted => false,
    }
}

/// What is left to do about a resume that may never succeed.
fn way_on(action: Action, tenant: &TenantName, failures: &[MemberFailure]) -> String {
    if action == Action::Pause || failures.iter().all(|failure| may_pass(failure.failure.kind)) {
        return String::new();
    }
    format!(". Should trying again not help, {}", save_hint(tenant))
}

fn save_hint(tenant: &TenantName) -> String {
    format!("`sublet save {tenant} DIR` writes what is saved to files")
}

fn gerund(action: Action) -> &'static str {
    match action {
        Action::Pause => "pausing",
        Action::Resume => "resuming",
    }
}

fn noun(action: Action) -> &'static str {
    match action {
        Action::Pause => "pause",
        Action::Resume => "resume",
    }
}

/// What to do about a process that says nothing at all.
pub(super) fn silence(failure: &MemberFailure) -> String {
    let Some(pid) = failure.who.pid else { return failure.to_string() };
    let command = Some(command_of(pid)).filter(|command| !command.is_empty());
    let command = command.map_or_else(String::new, |command| format!(" ({command})"));
    if is_stopped(pid) {
        return format!(
            "process {pid}{command} does not answer; it is stopped (SIGSTOP): continue it (kill -CONT {pid}) or end it"
        );
    }
    if let Some(limit) = full_of_files(pid) {
        return format!(
            "process {pid}{command} does not answer: it has as many files open as it may ({limit}): have it close some, or raise \
             that (prlimit --pid {pid} --nofile={})",
            2 * limit
        );
    }
    format!(
        "process {pid}{command} does not answer: {}; `--timeout` gives it more time, or end it",
        failure.failure
    )
}

/// The limit of open files of a process that has reached it. None also where that cannot be known.
fn full_of_files(pid: u32) -> Option<usize> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let soft: usize = soft.split_whitespace().next()?.parse().ok()?;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    (open >= soft).then_some(soft)
}

fn known(existing: &[TenantName]) -> String {
    if existing.is_empty() {
        return "no tenant is running: start one with `sublet run --tenant NAME -- COMMAND`"
            .to_owned();
    }
    let names: Vec<_> = existing.iter().map(TenantName::as_str).collect();
    format!("there are: {}", names.join(", "))
}

fn quoted_tags(tags: &[String]) -> String {
    let names: Vec<_> = tags.iter().map(|tag| format!("'{tag}'")).collect();
    format!("{} {}", if tags.len() == 1 { "tag" } else { "tags" }, names.join(", "))
}

fn known_tags(known: &[String]) -> String {
    if known.is_empty() {
        return "none of its memory has a tag: ask for it inside a region".to_owned();
    }
    format!("there is the {}", quoted_tags(known))
}

fn joined(failures: &[MemberFailure]) -> String {
    failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn listed(failures: &[MemberFailure]) -> String {
    if failures.iter().all(|failure| failure.failure.kind != FailureKind::CutNotReached) {
        return joined(failures);
    }
    // Where each rank is reads better one below the other.
    let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
    format!(
        "the ranks did not reach a common cut in time:\n  {}\n  If they only need longer, give a longer \
         timeout; if one is stuck, see what its process waits for",
        texts.join("\n  ")
    )
}

/// GPUs that are too full are said once, and not for each process.
fn causes(failures: &[MemberFailure], shortages: &[DeviceShortage]) -> String {
    let is_short = |failure: &&MemberFailure| {
        let is_short = matches!(failure.failure.kind, FailureKind::OutOfDeviceMemory { .. });
        is_short && !shortages.is_empty()
    };
    let others: Vec<_> = failures.iter().filter(|failure| !is_short(failure)).cloned().collect();
    let others = (!others.is_empty()).then(|| listed(&others));
    let shortages = shortages.iter().map(ToString::to_string);
    shortages.chain(others).collect::<Vec<_>>().join("; ")
}

fn undone(action: Action, runs: bool, undo_failures: &[MemberFailure]) -> impl fmt::Display {
    let state = match (action, runs) {
        (Action::Pause, true) => "active",
        (Action::Resume, true) => "active, and the memory of these tags is paused, contents kept,",
        (Action::Pause | Action::Resume, false) => "paused, contents kept",
    };
    if undo_failures.is_empty() {
        format!(". The tenant is {state} as before")
    } else {
        format!(
            ". The others are {state} as before, but taking back failed for {}. The next command for this tenant \
             tries that again",
            listed(undo_failures)
        )
    }
}

impl From<&CoordinatorError> for Code {
    fn from(error: &CoordinatorError) -> Self {
        match error {
            CoordinatorError::NoSuchTenant { .. } | CoordinatorError::NoProcess { .. } => {
                Self::NoSuchTenant
            }
            CoordinatorError::RunDir(error) => error.into(),
            CoordinatorError::Unreachable { .. } | CoordinatorError::NoGreeting { .. } => {
                Self::NoAnswer
            }
            CoordinatorError::VersionsDiffer { .. } => Self::VersionsDiffer,
            CoordinatorError::Faulted { .. } | CoordinatorError::Unrecovered { .. } => Self::Lost,
            CoordinatorError::UnknownTags { .. } => Self::UnknownTag,
            CoordinatorError::PausedAlready { .. }
            | CoordinatorError::StandsStill { .. }
            | CoordinatorError::NothingSaved { .. }
            | CoordinatorError::NotDeep { .. } => Self::WrongState,
            CoordinatorError::Joined { .. } => Self::Joined,
            CoordinatorError::CalledOff { .. }
            | CoordinatorError::NotPrepared { .. }
            | CoordinatorError::NotSaved { .. } => Self::CalledOff,
            CoordinatorError::HostShort { .. } | CoordinatorError::NoSpace { .. } => Self::HostFull,
            CoordinatorError::SaveDir(_) => Self::Usage,
            CoordinatorError::FailedTogether { .. } => Self::Other,
            CoordinatorError::Refused { failures, .. }
            | CoordinatorError::SaveFailed { failures, .. } => {
                // Those that were told to stop, because another failed, are not why.
                let kinds = || failures.iter().map(|failure| failure.failure.kind);
                let why = kinds().find(|kind| *kind != FailureKind::CalledOff);
                why.or_else(|| kinds().next()).map_or(Self::Other, Self::from)
            }
        }
    }
}
