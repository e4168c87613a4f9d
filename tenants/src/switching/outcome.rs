//! What a switch came to.

use crate::code::Code;
use crate::coordinator::{CoordinatorError, Outcome};
use crate::error_text::chain;
use crate::identity::TenantName;
use crate::run_dir::RunDirError;

/// What was done, or would be.
#[derive(Clone, Debug)]
pub struct Switched {
    /// Did the tenant have its GPUs already?
    pub had_them: bool,
    /// Who was paused, or would be.
    pub victims: Vec<TenantName>,
    /// Why, one line each.
    pub reasons: Vec<String>,
    /// How each pause and the resume went, in order.
    pub changes: Vec<(TenantName, Outcome)>,
    /// All of this is done, and could not be written down for later decisions, and why not.
    pub unrecorded: Option<String>,
}

/// Why a tenant did not get its GPUs. Unless it says otherwise, all are as before.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchError {
    /// It could not be spoken to.
    #[error(transparent)]
    Tenant(#[from] CoordinatorError),
    /// The files of turns are of no use, or somebody else is switching.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// It does not fit, even if all make way.
    #[error("{why}; nothing was changed")]
    Never {
        why: String,
        /// The devices on which it lacks memory.
        gpus: Vec<String>,
    },
    /// Somebody in the way is in a turn.
    #[error(
        "{why}; nothing was changed: wait for it (--wait), or pause what is in the way of '{tenant}' by name"
    )]
    Busy { tenant: TenantName, why: String },
    /// It was called off while it waited.
    #[error("switching to tenant '{tenant}' was called off; nothing was changed")]
    CalledOff { tenant: TenantName },
    /// One that was to make way did not, or the tenant did not come; what had been paused is active again.
    #[error("{}; {}", chain(source), back(were_paused))]
    Undone {
        were_paused: Vec<TenantName>,
        /// Who could not be paused, where that is why.
        refused_by: Option<TenantName>,
        source: Box<CoordinatorError>,
    },
    /// As [`SwitchError::Undone`], and some of those that had been paused did not come back.
    #[error("{}; {}", chain(source), stay(stay_paused))]
    NotUndone {
        /// Who is paused now, and why.
        stay_paused: Vec<(TenantName, CoordinatorError)>,
        /// Who could not be paused, where that is why the switch failed.
        refused_by: Option<TenantName>,
        source: Box<CoordinatorError>,
    },
}

fn back(were_paused: &[TenantName]) -> String {
    if were_paused.is_empty() {
        return "nothing was changed".to_owned();
    }
    let names: Vec<_> = were_paused.iter().map(|name| format!("'{name}'")).collect();
    format!("paused for it were {}, which are active again", names.join(", "))
}

fn stay(stay_paused: &[(TenantName, CoordinatorError)]) -> String {
    let one = |(name, error): &(TenantName, CoordinatorError)| {
        format!(
            "'{name}' was paused for it, with all its contents, and did not come back ({}): `sublet resume {name}` tries again",
            chain(error)
        )
    };
    stay_paused.iter().map(one).collect::<Vec<_>>().join("; ")
}

impl SwitchError {
    /// The error of the coordinator behind it.
    pub fn cause(&self) -> Option<&CoordinatorError> {
        match self {
            Self::Tenant(error) => Some(error),
            Self::Undone { source, .. } | Self::NotUndone { source, .. } => Some(source),
            Self::RunDir(_) | Self::Never { .. } | Self::Busy { .. } | Self::CalledOff { .. } => {
                None
            }
        }
    }

    /// Who could not be paused, and why, where that is what it failed for.
    pub(super) fn refusal(&self) -> Option<(&TenantName, &CoordinatorError)> {
        let (Self::Undone { refused_by, source, .. } | Self::NotUndone { refused_by, source, .. }) =
            self
        else {
            return None;
        };
        Some((refused_by.as_ref()?, source))
    }

    /// Was device memory missing?
    pub(super) fn is_short_of_devices(&self) -> bool {
        self.cause().is_some_and(|cause| cause.missing_device_bytes().is_some())
    }

    /// Can the same call succeed later?
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Tenant(error) => error.is_retryable(),
            Self::RunDir(error) => matches!(error, RunDirError::Switching { .. }),
            Self::Undone { source, .. } => source.is_retryable(),
            Self::Busy { .. } | Self::CalledOff { .. } => true,
            Self::Never { .. } | Self::NotUndone { .. } => false,
        }
    }

    /// Are all tenants as they were before?
    pub fn left_unchanged(&self) -> bool {
        match self {
            Self::Tenant(error) => error.left_unchanged(),
            Self::Undone { source, .. } => source.left_unchanged(),
            Self::NotUndone { .. } => false,
            Self::RunDir(_) | Self::Never { .. } | Self::Busy { .. } | Self::CalledOff { .. } => {
                true
            }
        }
    }
}

impl From<&SwitchError> for Code {
    fn from(error: &SwitchError) -> Self {
        match error {
            SwitchError::Tenant(error) => error.into(),
            SwitchError::RunDir(error) => error.into(),
            SwitchError::Never { .. } => Self::GpuFull,
            SwitchError::Busy { .. } => Self::Busy,
            SwitchError::CalledOff { .. } => Self::CalledOff,
            SwitchError::Undone { source, .. } | SwitchError::NotUndone { source, .. } => {
                (&**source).into()
            }
        }
    }
}
