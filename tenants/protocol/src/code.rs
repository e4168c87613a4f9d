//! The reason for a failure: one word of a closed list, the same in messages, in JSON, and as the place in `docs/errors.md`.
//!
//! That page is made of the comments here (`SUBLET_WRITE_ERRORS=1 cargo xtask tidy`), and `sublet explain` prints them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something failed. `docs/errors.md` says what each means; words may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Code {
    /// The command line, a setting, or the directory to save to is wrong. The message names the word that is wrong.
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
    /// Another process pauses, resumes or switches, or a tenant has a turn. The message names it.
    /// Nothing was changed. Wait for it (`--wait`, where the command has it), or end it.
    /// Next: `sublet turns`.
    Busy,
    /// Ctrl-C or SIGTERM called the command off.
    /// Before the point of no return everything was undone. The message has the state of the tenant.
    /// Next: `sublet ps`.
    CalledOff,
    /// A process is stopped, silent or gone. A stopped one answers when it continues (`kill -CONT PID`).
    /// The message has the state of the tenant. `--timeout` gives a busy process more time.
    /// Next: `sublet ps`.
    NoAnswer,
    /// A GPU has too little free memory for a resume.
    /// The tenant stays paused, with its contents. The message has the missing bytes and who holds the rest.
    /// Next: `sublet switch TENANT` pauses other tenants that hold it. `sublet resume TENANT --wait` waits for a program outside.
    /// A tenant that is larger than the GPU never fits: end some of its processes, which `sublet ps -v` lists.
    GpuFull,
    /// Host memory, or the disk for saved contents, is too full.
    /// The tenant is as before. The message names the limit.
    /// It is `SUBLET_HOST_BYTES_MAX`, a control group, the memory that the kernel has available, or the disk.
    /// Free some, or mark contents that may be lost as `discard`.
    /// Next: `sublet doctor`.
    HostFull,
    /// A process was capturing a CUDA graph until the deadline, and a pause would end the capture.
    /// The tenant runs on. A longer deadline lets the capture end.
    /// Next: `sublet pause TENANT --timeout 2m`.
    InCapture,
    /// The ranks did not reach a common cut, or their devices did not finish, before the deadline.
    /// A rank is stuck or needs longer, much work is queued, or a kernel never ends.
    /// The tenant runs on. The message has the place of each rank: look first at the rank that is in host code.
    /// Next: `sublet pause TENANT --timeout 2m`.
    NotInTime,
    /// Not all processes of the application called `ncclPause` or `ncclResume` within `SUBLET_WAIT`.
    /// Nothing was changed. Helper processes that use CUDA must call too.
    /// Next: `sublet ps`.
    NoConsent,
    /// The tenant is in another state than the command needs: paused as a whole, or with nothing saved.
    /// Nothing was changed.
    /// Next: `sublet ps`.
    WrongState,
    /// Another tenant has the memory open, or the memory belongs to a paused tenant. The message names that tenant.
    /// Nothing was changed. Close the memory there, or resume its owner first.
    /// Next: `sublet ps -v`.
    Shared,
    /// Eight times a new process joined during the pause, and each try was undone.
    /// The tenant runs on. Wait until the job has started.
    /// Next: `sublet pause TENANT`.
    Joined,
    /// The processes run different versions of Sublet.
    /// Nothing was changed. Start all of the job with one version.
    /// Next: `sublet stats TENANT`.
    VersionsDiffer,
    /// A process has lost contents, and can neither be paused nor resumed.
    /// Its saved contents can be written to files. Then end it.
    /// Next: `sublet save TENANT DIR`.
    Lost,
    /// The driver refused a call, or the disk of saved contents failed. The message has the call and the driver's code.
    /// The message has the state of the tenant. A resume that failed can be tried again.
    /// Next: `sublet doctor`.
    Driver,
    /// The directory for sockets and locks (`SUBLET_RUN_DIR`) cannot be used.
    /// Nothing was changed. The message has the problem and its remedy.
    /// Next: `sublet doctor`.
    RunDir,
    /// No other code fits. The message has the cause and the state.
    /// Next: `sublet doctor`.
    Other,
}

impl Code {
    /// All codes.
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

    /// The exit code of a command that failed with this code and changed nothing.
    pub const fn exit(self) -> u8 {
        self.outside(false).0
    }

    /// The number of the code in C (`SUBLET_ERROR_`). Python has a class for each number.
    pub const fn number(self, is_retryable: bool) -> i32 {
        self.outside(is_retryable).1
    }

    /// Returns the exit code, and the number in the C interface, of each code.
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
        // Serde defines the words.
        self.serialize(f)
    }
}
