//! What becomes of contents that need not be copied, and of copies in host memory after a resume.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::driver::{DeviceOrdinal, DriverError};

/// Size of the pieces that memory is looked at in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceBytes(u64);

impl PieceBytes {
    /// The least: below, telling costs as much as copying.
    pub const MIN: Self = Self(16 << 10);
    /// The most: a block of device memory has no less.
    pub const MAX: Self = Self(2 << 20);

    /// A power of two from [`PieceBytes::MIN`] to [`PieceBytes::MAX`]; none for any other number.
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

/// What a pause looks for before it copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The size of what is told apart.
    pub piece_bytes: PieceBytes,
    /// Pieces that are all zero are neither copied nor given host memory.
    pub finds_zeros: bool,
    /// Copies stay in host memory after a resume, and pieces that are as in the copy are not copied again.
    pub finds_unchanged: bool,
    /// What would not be copied is compared byte by byte; what differs is an error in the log, and is copied. Slow.
    pub is_verified: bool,
}

impl Pieces {
    /// Everything is copied.
    pub const NONE: Self = Self {
        piece_bytes: PieceBytes(64 << 10),
        finds_zeros: false,
        finds_unchanged: false,
        is_verified: false,
    };
    /// Zero and unchanged pieces are left out.
    pub const BOTH: Self = Self { finds_zeros: true, finds_unchanged: true, ..Self::NONE };

    /// Is there anything to look for?
    pub(crate) fn are_looked_for(self) -> bool {
        self.finds_zeros || self.finds_unchanged
    }
}

/// Bytes copied between two looks at a stream. At 55 GB/s the usual ones take 5 ms, in which the driver unmaps some 200 blocks:
/// copying and unmapping keep each other busy.
#[derive(Debug)]
struct GroupBytes(AtomicU64);

impl Default for GroupBytes {
    fn default() -> Self {
        Self(AtomicU64::new(256 << 20))
    }
}

/// See the head of this module. Anybody may change it at any time; its lock is a leaf.
#[derive(Debug, Default)]
pub(crate) struct CopyPolicy {
    are_retained: AtomicBool,
    is_given_back: AtomicBool,
    pieces: AtomicU64,
    group_bytes: GroupBytes,
    /// Devices that would not tell, and the word on each.
    refusals: Mutex<BTreeMap<DeviceOrdinal, DriverError>>,
    has_told_of_room: AtomicBool,
}

const ZEROS: u64 = 1;
const UNCHANGED: u64 = 2;
const VERIFIED: u64 = 4;

impl CopyPolicy {
    pub(crate) fn are_retained(&self) -> bool {
        self.are_retained.load(Ordering::Relaxed)
    }

    pub(super) fn set_retained(&self, are_retained: bool) {
        self.are_retained.store(are_retained, Ordering::Relaxed);
    }

    pub(crate) fn is_given_back(&self) -> bool {
        self.is_given_back.load(Ordering::Relaxed)
    }

    pub(super) fn set_given_back(&self, is_given_back: bool) {
        self.is_given_back.store(is_given_back, Ordering::Relaxed);
    }

    /// Do copies stay for the sake of the next pause?
    pub(crate) fn stay_for_pauses(&self) -> bool {
        self.pieces().finds_unchanged && !self.is_given_back()
    }

    pub(crate) fn pieces(&self) -> Pieces {
        let packed = self.pieces.load(Ordering::Relaxed);
        let flags = packed & (PieceBytes::MIN.0 - 1);
        // The size is a power of two above the flags.
        let Some(piece_bytes) = PieceBytes::new(packed - flags) else { return Pieces::NONE };
        Pieces {
            piece_bytes,
            finds_zeros: flags & ZEROS != 0,
            finds_unchanged: flags & UNCHANGED != 0,
            is_verified: flags & VERIFIED != 0,
        }
    }

    pub(super) fn set_pieces(&self, pieces: Pieces) {
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let flags = flag(pieces.finds_zeros, ZEROS)
            | flag(pieces.finds_unchanged, UNCHANGED)
            | flag(pieces.is_verified, VERIFIED);
        self.pieces.store(pieces.piece_bytes.0 | flags, Ordering::Relaxed);
    }

    pub(crate) fn group_bytes(&self) -> u64 {
        self.group_bytes.0.load(Ordering::Relaxed)
    }

    pub(super) fn set_group_bytes(&self, bytes: u64) {
        self.group_bytes.0.store(bytes, Ordering::Relaxed);
    }

    /// Has `device` said that it never will?
    pub(crate) fn is_refused(&self, device: DeviceOrdinal) -> bool {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&device)
    }

    /// `device` will not tell: it is asked no more.
    pub(crate) fn refuse(&self, device: DeviceOrdinal, error: DriverError) {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).insert(device, error);
    }

    /// Is it the first time that copies had to go for want of room?
    pub(crate) fn tells_of_room(&self) -> bool {
        !self.has_told_of_room.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_what_is_looked_for() {
        let policy = CopyPolicy::default();
        assert_eq!(policy.pieces(), Pieces::NONE);
        for bytes in [PieceBytes::MIN, PieceBytes::default(), PieceBytes::MAX] {
            for bits in 0..8 {
                let pieces = Pieces {
                    piece_bytes: bytes,
                    finds_zeros: bits & 1 != 0,
                    finds_unchanged: bits & 2 != 0,
                    is_verified: bits & 4 != 0,
                };
                policy.set_pieces(pieces);
                assert_eq!(policy.pieces(), pieces);
                assert_eq!(policy.stay_for_pauses(), pieces.finds_unchanged);
            }
        }
        policy.set_given_back(true);
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
