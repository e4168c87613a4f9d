//! The report of an attach, for `sublet_attach_report_json`.

use serde::Serialize;

/// The report of an attach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// The tenant; null when none can be named.
    pub(crate) tenant: Option<String>,
    /// Libraries that reach the driver or NCCL, or may.
    pub(crate) libraries: Vec<Library>,
    /// Devices that had a context before the attach.
    pub(crate) devices: Vec<Device>,
    /// True when every library is hooked, so that every kernel launch passes our gate.
    pub(crate) launches_are_held: bool,
}

/// One library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Library {
    /// Its file.
    pub(crate) path: String,
    /// Imports of it that lead to us.
    pub(crate) slots: usize,
    /// Addresses of the driver's functions that it kept and that were exchanged for ours.
    pub(crate) exchanged: usize,
    /// Whether its calls are seen.
    pub(crate) state: State,
    /// How that is known, or why it is not so.
    pub(crate) why: String,
}

/// Whether a library's calls are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Yes.
    Hooked,
    /// No: it took the driver's functions before the attach, and keeps them where they were not found.
    Late,
    /// It could not be read or written.
    Unknown,
}

/// A device that had a context before the attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// The ordinal in this process.
    pub(crate) device: i32,
    /// Bytes of it in use then, by all processes: what this process had allocated earlier is among them, and
    /// stays where it is.
    pub(crate) used_bytes: u64,
}
