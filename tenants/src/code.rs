//! Why something failed, for programs: one word of a closed list.

use serde::Serialize;

use crate::coordinator::{CoordinatorError, PrepareError, SaveError};
use crate::run_dir::RunDirError;
use crate::switching::SwitchError;
use crate::wire::FailureKind;

/// Why something failed. `docs/json.md` says what each means; words may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The command line, or a setting.
    Usage,
    /// There is no live process of that name.
    NoSuchTenant,
    /// No memory has that tag.
    UnknownTag,
    /// Somebody else pauses, resumes or switches, or is in a turn.
    Busy,
    /// It was called off.
    CalledOff,
    /// A process is stopped, silent or gone.
    NoAnswer,
    /// A GPU is too full.
    OutOfDeviceMemory,
    /// Host memory, or the disk that saved contents go to, is too full.
    OutOfHostMemory,
    /// A CUDA graph is being captured.
    InCapture,
    /// The ranks or their devices did not come to rest in time.
    NotInTime,
    /// The application did not ask for the same.
    NoConsent,
    /// Not in the state that the tenant is in.
    WrongState,
    /// Other processes or tenants have the memory open, or it is of one that is paused.
    Shared,
    /// Processes came in each time.
    Joined,
    /// Processes run different versions.
    VersionsDiffer,
    /// A process has lost something: it should be ended.
    Lost,
    /// The driver refused, or the disk.
    Driver,
    /// The run directory is not usable.
    RunDir,
    /// Anything else; the message says what.
    Other,
}

impl From<FailureKind> for Code {
    fn from(kind: FailureKind) -> Self {
        match kind {
            FailureKind::InCapture => Self::InCapture,
            FailureKind::CutNotReached | FailureKind::DrainTimeout => Self::NotInTime,
            FailureKind::OutOfHostMemory => Self::OutOfHostMemory,
            FailureKind::OutOfDeviceMemory { .. } => Self::OutOfDeviceMemory,
            FailureKind::PeerGone => Self::NoAnswer,
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
            CoordinatorError::PausedAlready { .. } | CoordinatorError::NotDeep { .. } => {
                Self::WrongState
            }
            CoordinatorError::Joined { .. } => Self::Joined,
            CoordinatorError::CalledOff { .. } => Self::CalledOff,
            CoordinatorError::FailedTogether { .. } => Self::Other,
            CoordinatorError::Refused { failures, .. } => {
                // Those that were told to stop, because another failed, are not why.
                let kinds = || failures.iter().map(|failure| failure.failure.kind);
                let why = kinds().find(|kind| *kind != FailureKind::CalledOff);
                why.or_else(|| kinds().next()).map_or(Self::Other, Self::from)
            }
        }
    }
}

impl From<&RunDirError> for Code {
    fn from(error: &RunDirError) -> Self {
        match error {
            RunDirError::Locked { .. }
            | RunDirError::LockGone { .. }
            | RunDirError::Switching { .. } => Self::Busy,
            RunDirError::OtherTurns { .. } => Self::VersionsDiffer,
            RunDirError::NotOurs { .. }
            | RunDirError::PathTooLong { .. }
            | RunDirError::TooManyMembers { .. }
            | RunDirError::Listen(_)
            | RunDirError::Io { .. } => Self::RunDir,
        }
    }
}

impl From<&SwitchError> for Code {
    fn from(error: &SwitchError) -> Self {
        match error {
            SwitchError::Tenant(error) => error.into(),
            SwitchError::RunDir(error) => error.into(),
            SwitchError::Never { .. } => Self::OutOfDeviceMemory,
            SwitchError::Busy { .. } => Self::Busy,
            SwitchError::CalledOff { .. } => Self::CalledOff,
            SwitchError::Undone { source, .. } | SwitchError::NotUndone { source, .. } => {
                (&**source).into()
            }
        }
    }
}

impl From<&PrepareError> for Code {
    fn from(error: &PrepareError) -> Self {
        match error {
            PrepareError::Tenant(error) => error.into(),
            PrepareError::Short { .. } => Self::OutOfHostMemory,
            PrepareError::CalledOff { .. } => Self::CalledOff,
        }
    }
}

impl From<&SaveError> for Code {
    fn from(error: &SaveError) -> Self {
        match error {
            SaveError::Tenant(error) => error.into(),
            SaveError::Dir(_) => Self::Usage,
            SaveError::NothingSaved { .. } => Self::WrongState,
            SaveError::NoSpace { .. } => Self::OutOfHostMemory,
            SaveError::CalledOff { .. } => Self::CalledOff,
            SaveError::Failed { failures, .. } => {
                failures.first().map_or(Self::Other, |failure| failure.failure.kind.into())
            }
        }
    }
}
