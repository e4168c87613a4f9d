//! Fingerprints of pieces of device memory: the values that the kernel next to this file computes, and the same computation on
//! the host.
//!
//! A fingerprint is two sums over the 16-byte words of a piece. Each word is combined with keys that depend on its position.
//! Both halves are multiplied to 128 bits and folded. So a changed, moved or swapped word changes both sums. Each of the two
//! sums has its own keys. At the end each sum is mixed with the size. No other bytes have the fingerprint of a piece of zeros,
//! because the kernel looks at every bit for that.
//!
//! `kernel.cu` computes the same on the device. A case of the conformance list compares the two.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::{DeviceAddress, VaRange};

/// Our kernel, as text that the driver compiles for its device.
pub(super) const KERNEL: &str = concat!(include_str!("kernel.ptx"), "\0");
/// The kernel's name in that text, terminated.
pub(super) const KERNEL_NAME: &std::ffi::CStr = c"sublet_fingerprint";
/// The number of threads in a block of the kernel.
pub(super) const KERNEL_THREADS: u32 = 256;
/// The size of a piece, and its start, are multiples of this many bytes.
pub const WORD_BYTES: u64 = 16;

const STEP_A: u64 = 0x9e37_79b9_7f4a_7c15;
const STEP_B: u64 = 0xc2b2_ae3d_27d4_eb4f;
const STEP_C: u64 = 0xd6e8_feb8_6659_fd93;
const STEP_D: u64 = 0xa076_1d64_78bd_642f;

/// The keys that make the fingerprints of this process unlike those of any other: random, and drawn once. Nobody without the
/// keys can choose contents that have equal fingerprints. The keys never leave the process and its devices.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Keys {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
}

impl Keys {
    /// Returns the keys of this process.
    pub fn of_process() -> Self {
        static KEYS: LazyLock<Keys> = LazyLock::new(|| {
            // `RandomState` is keyed by the system's random numbers.
            let random = RandomState::new();
            let [a, b, c, d] = [0_u8, 1, 2, 3].map(|index| random.hash_one(index));
            Keys { a, b, c, d }
        });
        *KEYS
    }

    /// The fingerprint of `bytes` under these keys, see [`Fingerprint::of`].
    pub fn print(self, bytes: &[u8]) -> Fingerprint {
        // A slice is compared faster than its words one by one.
        if is_zero(bytes) {
            return Fingerprint::ZERO;
        }
        let (mut first, mut second) = (0_u64, 0_u64);
        let Self { mut a, mut b, mut c, mut d } = self;
        let (words, _) = bytes.as_chunks::<16>();
        for word in words {
            let word = u128::from_le_bytes(*word);
            // CAST: the two halves.
            #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
            let (low, high) = (word as u64, (word >> 64) as u64);
            first = first.wrapping_add(fold(low ^ a, high ^ b));
            second = second.wrapping_add(fold(high ^ c, low ^ d));
            a = a.wrapping_add(STEP_A);
            b = b.wrapping_add(STEP_B);
            c = c.wrapping_add(STEP_C);
            d = d.wrapping_add(STEP_D);
        }
        let size_bytes = bytes.len() as u64;
        Fingerprint { first: finish(first, size_bytes).max(1), second: finish(second, size_bytes) }
    }
}

/// A digest of a piece of memory, in 128 bits, by the keys of this process. Pieces of one size whose fingerprints differ hold
/// different bytes. Two pieces that hold different bytes have the same fingerprint with a chance of 2^-128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    first: u64,
    second: u64,
}

impl Fingerprint {
    /// The fingerprint of zeros, for every size, and of nothing else.
    pub const ZERO: Self = Self { first: 0, second: 0 };
    /// The value for an unknown fingerprint. No piece has it.
    pub const UNKNOWN: Self = Self { first: 0, second: 1 };

    /// Takes the fingerprint of `bytes`, whose length is a multiple of [`WORD_BYTES`]. A remainder is ignored.
    pub fn of(bytes: &[u8]) -> Self {
        Keys::of_process().print(bytes)
    }

    /// Is the piece all zeros?
    pub fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// Is the fingerprint known?
    pub fn is_known(self) -> bool {
        self != Self::UNKNOWN
    }
}

/// Is every byte zero?
pub fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|part| *part == ZEROS[..part.len()])
}

fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    // CAST: the two halves.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
    let low = product as u64;
    low ^ (product >> 64) as u64
}

fn finish(sum: u64, size_bytes: u64) -> u64 {
    let mixed = sum.wrapping_add(size_bytes.wrapping_mul(STEP_A));
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// One question to [`super::Driver::fingerprint`], and its answer in the same place: first the start and size of a piece, then
/// its fingerprint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct PieceSlot([u64; 2]);

impl PieceSlot {
    /// Makes a question for the fingerprint of `piece`.
    pub fn asking(piece: VaRange) -> Self {
        Self([piece.start.0, piece.size_bytes])
    }

    /// The piece that is asked about.
    pub fn piece(self) -> VaRange {
        VaRange::new(DeviceAddress(self.0[0]), self.0[1])
    }

    /// The answer, as a driver writes it.
    pub fn answering(print: Fingerprint) -> Self {
        Self([print.first, print.second])
    }

    /// The answer, once the stream has passed the question.
    pub fn print(self) -> Fingerprint {
        Fingerprint { first: self.0[0], second: self.0[1] }
    }
}

#[cfg(test)]
mod tests;
