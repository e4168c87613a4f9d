//! Why a command was refused, as data: nothing of it is read out of a message.

use tenants::code::Code;
use tenants::coordinator::{DeviceShortage, Trouble as Told};
use tenants::identity::NameError;

/// Why a command did not succeed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusal {
    /// For people, and never looked at.
    pub(crate) text: String,
    /// Does it say that every process is as before?
    pub(crate) left_unchanged: bool,
    /// Of a swap: is the first tenant paused all the same, with the second?
    pub(crate) both_are_paused: bool,
    /// What processes did not do their part for. None where it was refused before any was asked.
    pub(crate) codes: Vec<Code>,
    /// Device memory that must become free, in bytes, where that is what is missing.
    pub(crate) missing_device_bytes: Option<u64>,
    /// By device that is too full, what is missing there in bytes.
    pub(crate) shortages: Vec<u64>,
}

impl Refusal {
    pub(super) fn of(error: &Told) -> Self {
        let shortages = error.shortages().iter();
        Self {
            text: error.to_string(),
            left_unchanged: error.left_unchanged(),
            both_are_paused: false,
            codes: error.failures().iter().map(|failure| failure.failure.kind.into()).collect(),
            missing_device_bytes: error.missing_device_bytes(),
            shortages: shortages.map(DeviceShortage::missing_bytes).collect(),
        }
    }

    pub(super) fn of_swap(error: &Told) -> Self {
        let both_are_paused = matches!(error, Told::NotBack { .. });
        // Of the second alone: the first is judged by that.
        let left_unchanged = error.cause().left_unchanged();
        Self { left_unchanged, both_are_paused, ..Self::of(error) }
    }

    pub(super) fn of_name(error: &NameError) -> Self {
        Self { text: error.to_string(), left_unchanged: true, ..Self::default() }
    }

    /// Is it for want of device memory, and is some missing indeed?
    pub(crate) fn is_short_of_devices(&self) -> bool {
        // Where devices are named, one of them must be too full.
        let is_wrong =
            !self.shortages.is_empty() && self.shortages.iter().all(|missing| *missing == 0);
        self.missing_device_bytes.is_some() && !is_wrong
    }

    /// Is it for want of host memory, or of room on the disk?
    pub(crate) fn is_short_of_host(&self) -> bool {
        self.codes.contains(&Code::HostFull)
    }

    /// Is it for imports whose owner has died?
    pub(crate) fn is_for_lost_imports(&self) -> bool {
        self.codes.contains(&Code::NoAnswer)
    }

    /// Was it refused before any process was asked to do something, as where nobody has memory of a tag?
    pub(crate) fn is_before_all(&self) -> bool {
        self.left_unchanged && self.codes.is_empty() && self.missing_device_bytes.is_none()
    }
}
