//! Why a command ends early, and with which exit code.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use tenants::coordinator::{CoordinatorError, SwapError};
use tenants::error_text::chain;
use tenants::run_dir::RunDirError;

/// Refused or failed, nothing changed.
pub(crate) const EXIT_UNCHANGED: u8 = 1;
/// Wrong usage.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Changed, but not wholly as asked.
pub(crate) const EXIT_PARTIAL: u8 = 3;
/// Called off by Ctrl-C or SIGTERM, nothing changed; as shells say it of Ctrl-C.
pub(crate) const EXIT_CALLED_OFF: u8 = 130;
/// The command to run exists but cannot be run, as shells say it.
pub(crate) const EXIT_NOT_EXECUTABLE: u8 = 126;
/// The command to run was not found, as shells say it.
pub(crate) const EXIT_NOT_FOUND: u8 = 127;

/// A one-line message and an exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    pub(crate) fn new(message: String, code: u8) -> Self {
        Self { message, code }
    }

    /// `error` and its causes, in one line.
    pub(crate) fn of(error: &(dyn Error + 'static), code: u8) -> Self {
        Self::new(chain(error), code)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<RunDirError> for Failure {
    fn from(error: RunDirError) -> Self {
        Self::of(&error, EXIT_UNCHANGED)
    }
}

impl From<CoordinatorError> for Failure {
    fn from(error: CoordinatorError) -> Self {
        Self::of(&error, exit_code_of(&error))
    }
}

impl From<SwapError> for Failure {
    fn from(error: SwapError) -> Self {
        match error {
            SwapError::NoTarget(error) | SwapError::Pause(error) => error.into(),
            // Their messages hold their causes already.
            SwapError::WentBack { ref source, ref losses, .. } if losses.is_empty() => {
                let code = exit_code_of(source);
                Self::new(error.to_string(), code)
            }
            SwapError::WentBack { .. } | SwapError::NotBack { .. } | SwapError::Resume { .. } => {
                Self::new(error.to_string(), EXIT_PARTIAL)
            }
        }
    }
}

pub(crate) fn exit_code_of(error: &CoordinatorError) -> u8 {
    if !error.left_unchanged() {
        EXIT_PARTIAL
    } else if matches!(error, CoordinatorError::CalledOff { .. }) {
        EXIT_CALLED_OFF
    } else {
        EXIT_UNCHANGED
    }
}
