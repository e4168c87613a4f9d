//! Why something failed: one word of a closed list, the same in messages, in JSON, and as the place in `docs/errors.md`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something failed. `docs/errors.md` says what each means; words may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    GpuFull,
    /// Host memory, or the disk that saved contents go to, is too full.
    HostFull,
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

impl Code {
    /// All of them.
    pub const ALL: [Self; 19] = [
        Self::Usage,
        Self::NoSuchTenant,
        Self::UnknownTag,
        Self::Busy,
        Self::CalledOff,
        Self::NoAnswer,
        Self::GpuFull,
        Self::HostFull,
        Self::InCapture,
        Self::NotInTime,
        Self::NoConsent,
        Self::WrongState,
        Self::Shared,
        Self::Joined,
        Self::VersionsDiffer,
        Self::Lost,
        Self::Driver,
        Self::RunDir,
        Self::Other,
    ];

    /// The exit code of a command that failed for this and left everything as it was.
    pub const fn exit(self) -> u8 {
        self.outside(false).0
    }

    /// The number that C has for it (`SUBLET_ERROR_`), which Python has a class for.
    pub const fn number(self, is_retryable: bool) -> i32 {
        self.outside(is_retryable).1
    }

    /// The exit code and the number of the C interface of each.
    const fn outside(self, is_retryable: bool) -> (u8, i32) {
        let refused = if is_retryable { 3 } else { 4 };
        match self {
            Self::Usage => (2, 1),
            Self::NoSuchTenant | Self::UnknownTag => (1, 1),
            Self::CalledOff => (130, refused),
            Self::GpuFull => (1, 5),
            Self::HostFull => (1, 6),
            Self::Lost => (1, 7),
            Self::Busy
            | Self::NoAnswer
            | Self::InCapture
            | Self::NotInTime
            | Self::NoConsent
            | Self::WrongState
            | Self::Shared
            | Self::Joined
            | Self::VersionsDiffer
            | Self::Driver
            | Self::RunDir
            | Self::Other => (1, refused),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Serde has the words.
        self.serialize(f)
    }
}
