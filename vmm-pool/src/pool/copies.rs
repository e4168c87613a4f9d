//! The policy for contents that need not be copied, and for copies in host memory after a resume.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::driver::{DeviceOrdinal, DriverError};

/// The size of the pieces of memory that get a fingerprint each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceBytes(u64);

impl PieceBytes {
    /// The smallest size: for smaller pieces, fingerprints cost as much as copies.
    pub const MIN: Self = Self(16 << 10);
    /// The largest size: no block of device memory is smaller.
    pub const MAX: Self = Self(2 << 20);

    /// Makes a size that is a power of two from [`PieceBytes::MIN`] to [`PieceBytes::MAX`]; none for any other number.
    pub fn new(bytes: u64) -> Option<Self> {
        let is_one = bytes.is_power_of_two() && (Self::MIN.0..=Self::MAX.0).contains(&bytes);
        is_one.then_some(Self(bytes))
    }

    pub(crate) fn get(self) -> u64 {
        self.0
    }
}

impl Default for PieceBytes {
    fn default() -> Self {
        Self(64 << 10)
    }
}

/// The bytes that are copied between two checks of a stream. At 55 GB/s the default takes 5 ms, in which the driver
/// unmaps some 200 blocks. So copying and unmapping overlap.
const GROUP_BYTES: u64 = 256 << 20;

/// The policy of one pool. Any thread may change it at any time. Its lock is a leaf.
#[derive(Debug, Default)]
pub struct CopyPolicy {
    are_retained: AtomicBool,
    is_given_back: AtomicBool,
    are_changes_detected: AtomicBool,
    /// A [`PieceBytes`]; 0 for the default.
    piece_bytes: AtomicU64,
    /// 0 for the default.
    group_bytes: AtomicU64,
    /// Devices that refuse to compute fingerprints, with the error of each.
    refusals: Mutex<BTreeMap<DeviceOrdinal, DriverError>>,
    has_told_of_room: AtomicBool,
}

impl CopyPolicy {
    pub(crate) fn are_retained(&self) -> bool {
        self.are_retained.load(Ordering::Relaxed)
    }

    /// Sets whether copies of contents in host memory stay for readers after a resume. The setting counts from the next
    /// resume on, which keeps or forgets the copies of the memory that it restores. A copy keeps its place until its
    /// memory is freed. The next pause puts the contents of the same memory there.
    pub fn retain(&self, are_retained: bool) {
        self.are_retained.store(are_retained, Ordering::Relaxed);
    }

    /// See [`CopyPolicy::give_back`].
    pub fn is_given_back(&self) -> bool {
        self.is_given_back.load(Ordering::Relaxed)
    }

    /// Sets whether each resume gives back host memory without contents, and copies that only the next pause could use.
    /// Otherwise host memory stays pinned for the next pause, which is then as fast as the link.
    pub fn give_back(&self, is_given_back: bool) {
        self.is_given_back.store(is_given_back, Ordering::Relaxed);
    }

    /// Do copies stay for the next pause?
    pub(crate) fn stay_for_pauses(&self) -> bool {
        self.are_changes_detected() && !self.is_given_back()
    }

    pub(crate) fn are_changes_detected(&self) -> bool {
        self.are_changes_detected.load(Ordering::Relaxed)
    }

    /// Sets whether a pause copies only changed contents. It then leaves out pieces that are all zero, which need no
    /// host memory either. It also leaves out pieces that equal the copy of the last pause, which stays in host memory
    /// after a resume. The default is to copy everything. The setting counts from the next pause on.
    pub fn detect_changes(&self, are_detected: bool) {
        self.are_changes_detected.store(are_detected, Ordering::Relaxed);
    }

    pub(crate) fn piece_bytes(&self) -> PieceBytes {
        PieceBytes::new(self.piece_bytes.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Sets the size of the pieces that are compared for that. The setting counts from the next pause on.
    pub fn set_piece_bytes(&self, piece_bytes: PieceBytes) {
        self.piece_bytes.store(piece_bytes.0, Ordering::Relaxed);
    }

    pub(crate) fn group_bytes(&self) -> u64 {
        let set = self.group_bytes.load(Ordering::Relaxed);
        if set == 0 { GROUP_BYTES } else { set }
    }

    /// Sets how many bytes of a device a pause copies between two checks for finished copies, which it then unmaps. The
    /// default is 256 MiB. Smaller values are for tests and measurements: each check is a driver call. Counts from the
    /// next pause on.
    pub fn set_group_bytes(&self, bytes: u64) {
        self.group_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Has `device` refused to compute fingerprints?
    pub(crate) fn is_refused(&self, device: DeviceOrdinal) -> bool {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&device)
    }

    /// Records that `device` refuses to compute fingerprints, so that no pause tries again.
    pub(crate) fn refuse(&self, device: DeviceOrdinal, error: DriverError) {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).insert(device, error);
    }

    /// Is this the first time that copies were dropped for lack of room?
    pub(crate) fn tells_of_room(&self) -> bool {
        !self.has_told_of_room.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_what_is_detected() {
        let policy = CopyPolicy::default();
        assert!(!policy.are_changes_detected());
        assert_eq!(policy.piece_bytes(), PieceBytes::default());
        for are_detected in [true, false] {
            policy.detect_changes(are_detected);
            assert_eq!(policy.are_changes_detected(), are_detected);
            assert_eq!(policy.stay_for_pauses(), are_detected);
        }
        policy.set_piece_bytes(PieceBytes::MAX);
        assert_eq!(policy.piece_bytes(), PieceBytes::MAX);
        policy.detect_changes(true);
        policy.give_back(true);
        assert!(!policy.stay_for_pauses());
    }

    #[test]
    fn pieces_have_sizes_that_are_powers_of_two_within_bounds() {
        for bytes in [0, 1, 8 << 10, 48 << 10, (64 << 10) + 1, 4 << 20, u64::MAX] {
            assert_eq!(PieceBytes::new(bytes), None, "{bytes}");
        }
        for kib in [16, 64, 256, 2048] {
            assert!(PieceBytes::new(kib << 10).is_some(), "{kib} KiB");
        }
    }
}
