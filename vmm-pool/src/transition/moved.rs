//! What a window has moved, and what is left.

use std::collections::BTreeMap;

use crate::driver::DeviceOrdinal;
use crate::journal::StepLog;

/// Bytes by device.
pub type ByDevice = BTreeMap<DeviceOrdinal, u64>;

/// What is still to be moved on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// All of it.
    pub bytes: u64,
    /// The smallest allocation.
    pub smallest_bytes: u64,
}

/// What a window has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// As of any step; its bytes are those of `bytes`.
    pub log: StepLog,
    /// Device memory that is gone, or has come.
    pub bytes: ByDevice,
    /// Contents copied between devices and the host.
    pub copied_bytes: u64,
}

impl Moved {
    pub(super) fn add(&mut self, other: Self) {
        self.log.add(other.log);
        self.copied_bytes += other.copied_bytes;
        for (device, bytes) in other.bytes {
            *self.bytes.entry(device).or_insert(0) += bytes;
        }
    }
}
