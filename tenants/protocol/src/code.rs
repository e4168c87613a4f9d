//! Why something failed: one word of a closed list, the same in messages, in JSON, and as the place in `docs/errors.md`.
//!
//! That page is made of the comments here (`SUBLET_WRITE_ERRORS=1 cargo xtask tidy`), and `sublet explain` prints them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something failed. `docs/errors.md` says what each means; words may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Code {
    /// The command line, a setting, or the directory to save to is wrong.
    /// Nothing was changed.
    /// Next: `sublet --help`.
    Usage,
    /// No live process has that tenant, in this run directory and for this user.
    /// A process joins its tenant at its first use of GPU memory: a new job may not have joined yet.
    /// Next: `sublet ps`.
    NoSuchTenant,
    /// No memory of the tenant has that tag.
    /// Nothing was changed. The message has the tags that are there.
    /// Next: `sublet ps -v`.
    UnknownTag,
    /// Another process pauses, resumes or switches, or a tenant has a turn.
    /// Nothing was changed. The message names who it is.
    /// Next: `sublet turns`.
    Busy,
    /// Ctrl-C or SIGTERM called the command off.
    /// The message has the state of the tenant.
    /// Next: `sublet ps`.
    CalledOff,
    /// A process is stopped, silent or gone.
    /// The message has the state of the tenant.
    /// Next: `sublet ps`.
    NoAnswer,
    /// A GPU has too little free memory for a resume.
    /// The tenant stays paused, with its contents. The message has the missing bytes and who holds the rest.
    /// Next: `sublet switch TENANT` pauses other tenants that hold it. `sublet resume TENANT --wait` waits for a program outside.
    /// A tenant that is larger than the GPU never fits: end some of its processes, which `sublet ps -v` lists.
    GpuFull,
    /// Host memory, or the disk for saved contents, is too full.
    /// The tenant is as before. The message names the limit.
    /// Next: `sublet doctor`.
    HostFull,
    /// A CUDA graph is being captured.
    /// The tenant runs on. A longer deadline lets the capture end.
    /// Next: `sublet pause TENANT --timeout 2m`.
    InCapture,
    /// The ranks did not reach a common cut, or their devices did not finish, before the deadline.
    /// The tenant runs on. Look at the rank in host code, which the message names.
    /// Next: `sublet pause TENANT --timeout 2m`.
    NotInTime,
    /// Not all processes of the application called `ncclPause` or `ncclResume` in time.
    /// Nothing was changed.
    /// Next: `sublet ps`.
    NoConsent,
    /// The tenant is in another state than the command needs: paused as a whole, or with nothing saved.
    /// Nothing was changed.
    /// Next: `sublet ps`.
    WrongState,
    /// Other processes have the memory open, or it belongs to a paused tenant.
    /// Nothing was changed.
    /// Next: `sublet ps -v`.
    Shared,
    /// New processes joined during each try of the pause.
    /// The tenant runs on. Wait until the job has started.
    /// Next: `sublet pause TENANT`.
    Joined,
    /// The processes run different versions of Sublet.
    /// Nothing was changed. Start all of the job with one version.
    /// Next: `sublet stats TENANT`.
    VersionsDiffer,
    /// A process has lost contents, and can neither be paused nor resumed.
    /// What it has saved can be written to files. End it then.
    /// Next: `sublet save TENANT DIR`.
    Lost,
    /// The driver refused a call, or the disk of saved contents failed.
    /// The message has the state of the tenant.
    /// Next: `sublet doctor`.
    Driver,
    /// The run directory is not usable.
    /// Nothing was changed. The message has the problem and its remedy.
    /// Next: `sublet doctor`.
    RunDir,
    /// The message has the cause and the state.
    /// Next: `sublet doctor`.
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
