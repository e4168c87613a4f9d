//! The reason why a command failed, and the state in which it left the tenants.

mod words;

use std::path::PathBuf;

use super::{figures::DeviceShortage, report::MemberFailure};
use sublet_protocol::host_memory::HostShortage;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::RunDirError;
use sublet_protocol::saving::SaveDirError;
use sublet_protocol::transport::TransportError;
use sublet_protocol::wire::{Action, FailureKind};
use sublet_protocol::{code::Code, error_text::chain, scope::Scope};

pub(crate) use words::silence;
use words::{
    back, causes, gerund, joined, known, known_tags, left_behind, listed, lost, may_pass, noun,
    quoted_tags, save_hint, stay, undone, way_on,
};

/// The reason why a command was not carried out. Unless it says otherwise, all tenants are as before.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Trouble {
    /// The command is wrong.
    #[error("{0}")]
    Usage(String),
    /// The process that asks has not joined a tenant.
    #[error("{0}")]
    NotJoined(String),
    /// No live process of this user has that name, in this run directory. The brackets list the names that exist.
    /// Compare `SUBLET_RUN_DIR` and the user with those of the job. A new job joins at its first use of GPU memory:
    /// wait for it, and look with `sublet ps`.
    #[error("there is no tenant '{tenant}' ({})", known(existing))]
    NoSuchTenant { tenant: TenantName, existing: Vec<TenantName> },
    /// All processes of the tenant have ended. The command removed the files that they left. Start the job again with
    /// `sublet run`.
    #[error("tenant '{tenant}' has no live process{}", left_behind(*dead))]
    NoProcess { tenant: TenantName, dead: usize },
    /// The run directory is not usable, or somebody else coordinates.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A process lives and takes no connection. It may be stopped (`SIGSTOP`), or in a frozen container. Nothing was
    /// changed. Continue the process (`kill -CONT PID`), then run the command again.
    #[error("a process of tenant '{tenant}' cannot be reached; nothing was changed")]
    Unreachable {
        tenant: TenantName,
        #[source]
        source: TransportError,
    },
    /// A process lives and gave no answer within five seconds, or within `--timeout`. Nothing was changed. If the
    /// process is stopped, the message has the command that continues it. Otherwise give more time with `--timeout`.
    #[error("{} of '{tenant}' not started: {why}; nothing was changed", noun(*action))]
    NoGreeting {
        tenant: TenantName,
        action: Action,
        failure: Box<MemberFailure>,
        /// The reason, and the remedy.
        why: String,
    },
    /// The job was started with two versions of `libsublet.so`. Nothing was changed. `sublet stats TENANT` shows the
    /// version of each process. End the job, and start all of it with one version.
    #[error(
        "the processes of tenant '{tenant}' run different versions of Sublet ({versions}): \
         run all of them with one; nothing was changed"
    )]
    VersionsDiffer {
        tenant: TenantName,
        /// Version and process ids, as text.
        versions: String,
    },
    /// An earlier failure has lost memory of this process. Nothing was changed now, and the job can neither be paused
    /// nor resumed. `sublet save TENANT DIR` writes its saved contents to files. Then end the process.
    #[error(
        "process {pid} of tenant '{tenant}' is faulted and can neither be paused nor resumed: end it, \
         then try again; {} before that",
        save_hint(tenant)
    )]
    Faulted { tenant: TenantName, pid: u32 },
    /// No process of the tenant has used that tag. Nothing was changed. The message lists the known tags, and `sublet
    /// ps -v` shows their sizes.
    #[error(
        "tenant '{tenant}' has no memory with the {}; {}",
        quoted_tags(unknown),
        known_tags(known)
    )]
    UnknownTags {
        tenant: TenantName,
        /// The requested tags that no process knows.
        unknown: Vec<String>,
        known: Vec<String>,
    },
    /// The command names a tag, and a pause of the whole tenant has already freed the memory of that tag. Nothing was
    /// changed. Resume the tenant first: `sublet resume TENANT`.
    #[error(
        "tenant '{tenant}' is paused as a whole, and so are its tags: resume it, all or by tag, first"
    )]
    PausedAlready { tenant: TenantName },
    /// An earlier pause freed the memory of one tag. The job stands still, since it has not agreed to run without
    /// that memory. Nothing was changed. The first command in the message resumes the tag; the second frees the rest
    /// of the memory too.
    #[error(
        "{what} is paused alone, and the job stands still until all of that is back: `sublet resume {tenant}` first, or \
         `sublet pause {tenant}`, which takes the rest"
    )]
    StandsStill { tenant: TenantName, what: String },
    /// The driver cannot take the CUDA context of a process off the GPU. The message names the process and the
    /// obstacle. Nothing was changed. A pause without `--deep` is possible.
    #[error(
        "tenant '{tenant}' cannot be paused deep: {why}; nothing was changed. `sublet pause {tenant}` frees its memory, and \
         leaves its contexts on the GPUs"
    )]
    NotDeep { tenant: TenantName, why: String },
    /// A command died during a pause or resume, and its work can neither be undone nor finished. The message has the
    /// process and the reason. `sublet save TENANT DIR` writes the saved contents to files. Then end the processes.
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
    /// Ctrl-C or SIGTERM ended `sublet prepare`. The job runs on. The host memory that was already prepared stays,
    /// for the next pause. `sublet prepare TENANT` continues.
    #[error(
        "preparing tenant '{tenant}' was called off; what was brought in stays for its next pause, and `sublet ps` shows it"
    )]
    NotPrepared { tenant: TenantName },
    /// The directory that contents were to be saved in is not usable. No process was asked to write.
    #[error(transparent)]
    SaveDir(#[from] SaveDirError),
    /// `sublet save` writes the contents that a pause has saved, and this tenant is not paused. Nothing was changed.
    /// Pause the tenant first: `sublet pause TENANT`.
    #[error(
        "tenant '{tenant}' has nothing saved: its memory is where it belongs; `sublet pause {tenant}` saves it"
    )]
    NothingSaved { tenant: TenantName },
    /// The disk is too small for the saved contents. Nothing was written, and the tenant stays paused. Free the bytes
    /// in the message, or name a directory on another disk.
    #[error(
        "what tenant '{tenant}' has saved takes {needed_bytes} bytes, and {free_bytes} are free in {}: free {} \
         more, or name a directory on another disk",
        dir.display(), needed_bytes.saturating_sub(*free_bytes)
    )]
    NoSpace {
        tenant: TenantName,
        dir: PathBuf,
        needed_bytes: u64,
        /// Bytes that are free on the filesystem.
        free_bytes: u64,
    },
    /// Ctrl-C or SIGTERM ended `sublet save`. The command removed the files that it had written. The tenant stays
    /// paused, with its contents.
    #[error("saving tenant '{tenant}' to files was called off, and what was written is removed")]
    NotSaved { tenant: TenantName },
    /// Every process failed to write its saved contents. The reason of each follows. The directory is empty, and the
    /// tenant stays paused. Mend the reason, then run `sublet save` again.
    #[error("no process of tenant '{tenant}' has written anything to {}: {}", dir.display(), joined(failures))]
    SaveFailed { tenant: TenantName, dir: PathBuf, failures: Vec<MemberFailure> },
    /// Eight times a new process joined the tenant during the pause. Each try was undone, and the job runs. Wait
    /// until the job has started, then pause it again.
    #[error(
        "tenant '{tenant}' is as before: processes joined it each time while it was being paused; pause it again"
    )]
    Joined { tenant: TenantName },
    /// Ctrl-C, SIGTERM or the caller ended the command before the point of no return. Everything was undone, unless
    /// the end of the message says otherwise. `sublet ps` shows the state.
    #[error("{} tenant '{tenant}' was called off{}", gerund(*action), undone(*action, *runs, undo_failures))]
    CalledOff {
        tenant: TenantName,
        action: Action,
        /// Did its processes run before? Those of a pause or resume by tag do.
        runs: bool,
        /// The members that could not undo their steps.
        undo_failures: Vec<MemberFailure>,
    },
    /// All processes requested the pause or resume (`ncclPause`, `ncclResume`), and the process that coordinated it
    /// failed. Its reason and the state of the tenant follow.
    #[error("{} tenant '{tenant}' together with its other processes failed: {why}", gerund(*action))]
    FailedTogether { tenant: TenantName, action: Action, why: String },
    /// A process did not do its part of a pause or resume. The message has the process, the step, the reason and the
    /// state of the tenant. "as before" means that nothing has changed. Look up the reason on this page.
    #[error(
        "{} tenant '{tenant}' failed: {}{}{}",
        gerund(*action), causes(failures, shortages), undone(*action, *runs, undo_failures),
        way_on(*action, tenant, failures)
    )]
    Refused {
        tenant: TenantName,
        action: Action,
        /// Did its processes run before? Those of a pause or resume by tag do.
        runs: bool,
        /// The members that did not finish a step; never empty.
        failures: Vec<MemberFailure>,
        /// The limit that leaves too little host memory, if that is the reason.
        host_short: Option<Box<HostShortage>>,
        /// The members that could not undo their steps.
        undo_failures: Vec<MemberFailure>,
        /// For a resume: devices that cannot hold the tenant now, and the holders of their memory.
        shortages: Vec<DeviceShortage>,
    },
    /// In a swap, the second tenant could not be resumed; the reason stands first. The first tenant, or its tags, run
    /// again. Nothing is lost. Mend the reason, then swap again.
    #[error(
        "{source}. {} was paused for it, and is active again{}",
        left.subject_first(tenant),
        lost(losses)
    )]
    WentBack {
        /// The first tenant.
        tenant: TenantName,
        /// The part of that tenant that had been paused.
        left: Scope,
        losses: Vec<MemberFailure>,
        /// The reason why the second tenant was not resumed.
        source: Box<Self>,
    },
    /// In a swap, the second tenant could not be resumed, and then the first could not be resumed either. The message
    /// has both reasons. Nothing is lost. Both tenants are paused; after a swap by tag, only the tags are paused, and
    /// both tenants run without them. The command in the message tries again.
    #[error(
        "{source}. {} was paused for it, and could not be brought back: {resume}. {}{}: `{}` tries again",
        left.subject_first(tenant),
        left.is_away(tenant),
        lost(losses),
        left.resume_command(tenant)
    )]
    NotBack {
        tenant: TenantName,
        /// The part of that tenant that is paused now.
        left: Scope,
        losses: Vec<MemberFailure>,
        /// The reason why the first tenant was not resumed.
        resume: Box<Self>,
        source: Box<Self>,
    },
    /// The tenant that should run does not fit, even if `sublet switch` pauses all tenants that it may pause. The
    /// message has the missing bytes and the holders. Nothing was changed. End a program that holds the rest; `sublet
    /// ps` names it.
    #[error("{why}; nothing was changed")]
    Never {
        tenant: TenantName,
        why: String,
        /// The devices on which it lacks memory.
        gpus: Vec<String>,
    },
    /// A tenant that holds the memory has its turn. The message has the time that is left. Nothing was changed.
    /// `sublet switch TENANT --wait` waits, and `sublet pause NAME` pauses the other tenant now.
    #[error(
        "{why}; nothing was changed: wait for it (--wait), or pause what is in the way of '{tenant}' by name"
    )]
    Busy { tenant: TenantName, why: String },
    /// Ctrl-C or SIGTERM ended a switch that was waiting. No tenant was paused or resumed.
    #[error("switching to tenant '{tenant}' was called off; nothing was changed")]
    NotSwitched { tenant: TenantName },
    /// One that was to make way did not, or the tenant did not come; what had been paused is active again.
    #[error("{}; {}", chain(source), back(were_paused))]
    Undone {
        were_paused: Vec<TenantName>,
        /// The tenant that could not be paused, if that is the reason.
        refused_by: Option<TenantName>,
        source: Box<Self>,
    },
    /// As [`Trouble::Undone`], and some of those that had been paused did not come back.
    #[error("{}; {}", chain(source), stay(stay_paused))]
    NotUndone {
        /// The tenants that are paused now, and the reasons.
        stay_paused: Vec<(TenantName, Self)>,
        /// The tenant that could not be paused, if that is the reason.
        refused_by: Option<TenantName>,
        source: Box<Self>,
    },
}

impl Trouble {
    /// Makes the error of an action that was called off before anything was done.
    pub(crate) fn called_off_before(tenant: TenantName, action: Action) -> Self {
        let runs = action == Action::Pause;
        Self::CalledOff { tenant, action, runs, undo_failures: Vec::new() }
    }

    /// Makes the error of an action that was refused for `failures`, with all as before. `runs` says whether its processes ran
    /// before.
    pub fn refused(
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

    /// The first trouble, if others follow from it. For a switch or swap, the reason why a tenant was not paused or not
    /// resumed.
    pub fn cause(&self) -> &Self {
        let (Self::WentBack { source, .. }
        | Self::NotBack { source, .. }
        | Self::Undone { source, .. }
        | Self::NotUndone { source, .. }) = self
        else {
            return self;
        };
        source.cause()
    }

    /// Returns the members that failed before the point of no return; empty if there was another reason.
    pub fn failures(&self) -> &[MemberFailure] {
        if let Self::Refused { failures, .. } = self.cause() { failures } else { &[] }
    }

    /// Did one process want to act alone on memory that others hold too? All of them together can do so.
    pub fn is_shared(&self) -> bool {
        let shared = |failure: &MemberFailure| failure.failure.kind == FailureKind::Shared;
        self.failures().iter().any(shared) && self.left_unchanged()
    }

    /// The limit that leaves too little host memory for the tenant, if that is the reason of the refusal.
    pub(crate) fn host_short(&self) -> Option<&HostShortage> {
        if let Self::Refused { host_short, .. } = self { host_short.as_deref() } else { None }
    }

    /// Devices that cannot hold the tenant now; empty if there was another reason.
    pub fn shortages(&self) -> &[DeviceShortage] {
        if let Self::Refused { shortages, .. } = self.cause() { shortages } else { &[] }
    }

    /// The tags that the tenant has, if a command named others.
    pub fn known_tags(&self) -> &[String] {
        if let Self::UnknownTags { known, .. } = self { known } else { &[] }
    }

    /// Returns the missing device memory, in bytes, if that is the reason: the largest figure of one device.
    pub fn missing_device_bytes(&self) -> Option<u64> {
        let of_devices = self.shortages().iter().map(DeviceShortage::missing_bytes).max();
        let of = |failure: &MemberFailure| failure.failure.kind.missing_device_bytes();
        of_devices.or_else(|| self.failures().iter().filter_map(of).max())
    }

    /// The tenant that could not be paused, and the reason, if a switch failed for that.
    pub fn refusal(&self) -> Option<(&TenantName, &Self)> {
        let (Self::Undone { refused_by, source, .. } | Self::NotUndone { refused_by, source, .. }) =
            self
        else {
            return None;
        };
        Some((refused_by.as_ref()?, source))
    }

    /// Has the tenant ended?
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::NoSuchTenant { .. } | Self::NoProcess { .. })
    }

    /// Is this the result of a command for `tenant`?
    pub fn is_about(&self, tenant: &TenantName) -> bool {
        match self {
            Self::NoSuchTenant { tenant: own, .. }
            | Self::NoProcess { tenant: own, .. }
            | Self::RunDir(
                RunDirError::Locked { tenant: own, .. } | RunDirError::LockGone { tenant: own },
            )
            | Self::Unreachable { tenant: own, .. }
            | Self::NoGreeting { tenant: own, .. }
            | Self::VersionsDiffer { tenant: own, .. }
            | Self::Faulted { tenant: own, .. }
            | Self::UnknownTags { tenant: own, .. }
            | Self::PausedAlready { tenant: own }
            | Self::StandsStill { tenant: own, .. }
            | Self::NotDeep { tenant: own, .. }
            | Self::Unrecovered { tenant: own, .. }
            | Self::HostShort { tenant: own, .. }
            | Self::NotPrepared { tenant: own }
            | Self::NothingSaved { tenant: own }
            | Self::NoSpace { tenant: own, .. }
            | Self::NotSaved { tenant: own }
            | Self::SaveFailed { tenant: own, .. }
            | Self::Joined { tenant: own }
            | Self::CalledOff { tenant: own, .. }
            | Self::FailedTogether { tenant: own, .. }
            | Self::Refused { tenant: own, .. }
            | Self::Never { tenant: own, .. }
            | Self::Busy { tenant: own, .. }
            | Self::NotSwitched { tenant: own } => own == tenant,
            Self::WentBack { .. }
            | Self::NotBack { .. }
            | Self::Undone { .. }
            | Self::NotUndone { .. } => self.cause().is_about(tenant),
            Self::Usage(_) | Self::NotJoined(_) | Self::RunDir(_) | Self::SaveDir(_) => false,
        }
    }

    /// Can the same call succeed later, after others have released memory or finished their work?
    pub fn is_retryable(&self) -> bool {
        let is_passing = matches!(
            self.cause(),
            Self::RunDir(
                RunDirError::Locked { .. }
                    | RunDirError::LockGone { .. }
                    | RunDirError::Switching { .. }
            ) | Self::Joined { .. }
                | Self::CalledOff { .. }
                | Self::Refused { .. }
                | Self::Busy { .. }
                | Self::NotSwitched { .. }
        );
        let may_pass = |failure: &MemberFailure| may_pass(failure.failure.kind);
        is_passing && self.left_unchanged() && self.failures().iter().all(may_pass)
    }

    /// Is every process as it was before the call?
    pub fn left_unchanged(&self) -> bool {
        let has_lost = matches!(self, Self::WentBack { losses, .. } if !losses.is_empty());
        let is_half_done = matches!(self, Self::NotBack { .. } | Self::NotUndone { .. });
        let cause = self.cause();
        let is_out_of_hand =
            matches!(cause, Self::Unrecovered { .. } | Self::FailedTogether { .. });
        let (Self::Refused { undo_failures, .. } | Self::CalledOff { undo_failures, .. }) = cause
        else {
            return !is_out_of_hand && !has_lost && !is_half_done;
        };
        undo_failures.is_empty() && !has_lost && !is_half_done
    }
}

impl From<&Trouble> for Code {
    fn from(error: &Trouble) -> Self {
        match error {
            Trouble::NoSuchTenant { .. } | Trouble::NoProcess { .. } => Self::NoSuchTenant,
            Trouble::RunDir(error) => error.into(),
            Trouble::Unreachable { .. } | Trouble::NoGreeting { .. } => Self::NoAnswer,
            Trouble::VersionsDiffer { .. } => Self::VersionsDiffer,
            Trouble::Faulted { .. } | Trouble::Unrecovered { .. } => Self::Lost,
            Trouble::UnknownTags { .. } => Self::UnknownTag,
            Trouble::PausedAlready { .. }
            | Trouble::StandsStill { .. }
            | Trouble::NothingSaved { .. }
            | Trouble::NotDeep { .. } => Self::WrongState,
            Trouble::Joined { .. } => Self::Joined,
            Trouble::Never { .. } => Self::GpuFull,
            Trouble::Busy { .. } => Self::Busy,
            Trouble::CalledOff { .. }
            | Trouble::NotSwitched { .. }
            | Trouble::NotPrepared { .. }
            | Trouble::NotSaved { .. } => Self::CalledOff,
            Trouble::WentBack { source, .. }
            | Trouble::NotBack { source, .. }
            | Trouble::Undone { source, .. }
            | Trouble::NotUndone { source, .. } => (&**source).into(),
            Trouble::HostShort { .. } | Trouble::NoSpace { .. } => Self::HostFull,
            Trouble::Usage(_) | Trouble::NotJoined(_) | Trouble::SaveDir(_) => Self::Usage,
            Trouble::FailedTogether { .. } => Self::Other,
            Trouble::Refused { failures, .. } | Trouble::SaveFailed { failures, .. } => {
                // Members that were told to stop, because another failed, are not the reason.
                let kinds = || failures.iter().map(|failure| failure.failure.kind);
                let why = kinds().find(|kind| *kind != FailureKind::CalledOff);
                why.or_else(|| kinds().next()).map_or(Self::Other, Self::from)
            }
        }
    }
}

/// The reason why an action ends before its point of no return.
#[derive(Debug)]
pub enum Stop {
    /// Members did not finish a step.
    Failed(Vec<MemberFailure>),
    /// The members need more host memory than this limit leaves.
    HostShort(Box<HostShortage>, MemberFailure),
    /// A caller wants the action to end.
    CalledOff,
    /// Processes have joined since the members were listed.
    Joined,
    /// See [`RunDirError::LockGone`].
    LockGone,
}

impl From<Vec<MemberFailure>> for Stop {
    fn from(failures: Vec<MemberFailure>) -> Self {
        Self::Failed(failures)
    }
}

impl Stop {
    /// The failures of this stop.
    pub(super) fn failures(&self) -> Vec<MemberFailure> {
        match self {
            Self::Failed(failures) => failures.clone(),
            Self::HostShort(_, failure) => vec![failure.clone()],
            Self::CalledOff | Self::Joined | Self::LockGone => Vec::new(),
        }
    }

    pub(super) fn host_shortage(self) -> Option<Box<HostShortage>> {
        if let Self::HostShort(short, _) = self { Some(short) } else { None }
    }

    /// Adds to a wait that was in vain the ranks that may be missing: a rank that had ended before is no member any more.
    pub(super) fn naming(mut self, absent: &[String]) -> Self {
        let in_vain = |failure: &&mut MemberFailure| {
            matches!(failure.failure.kind, FailureKind::CutNotReached | FailureKind::DrainTimeout)
        };
        if let Self::Failed(failures) = &mut self
            && let Some(first) = failures.iter_mut().find(in_vain)
        {
            for sentence in absent {
                first.failure.message.push_str("; ");
                first.failure.message.push_str(sentence);
            }
        }
        self
    }
}
