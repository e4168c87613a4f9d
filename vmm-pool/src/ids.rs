//! Identities of memory, the same in every process, and the values that callers hold instead of the driver's handles.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The random identity of a physical allocation, the same in every process that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AllocationId(#[cfg_attr(feature = "schema", schemars(with = "String"))] pub [u8; 16]);

/// Writes the identity as text in human-readable formats.
impl Serialize for AllocationId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(&format_args!("{self:?}"))
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for AllocationId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return Deserialize::deserialize(deserializer).map(Self);
        }
        let text = String::deserialize(deserializer)?;
        let number = u128::from_str_radix(&text, 16).map_err(D::Error::custom)?;
        Ok(Self(number.to_be_bytes()))
    }
}

impl fmt::Debug for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl AllocationId {
    /// Makes a new identity. `None` when the system cannot supply random bytes.
    pub(crate) fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }
}

/// Sublet's own handle, which callers hold instead of the driver's.
///
/// Layout of an allocation's handle, from the highest bits: 16 bits mark, 24 bits generation, 24 bits index. No handle
/// of driver 580 has this mark: those are host addresses of user space, whose top 17 bits are zero. The generation
/// makes the use of a released handle an error, instead of an access to another caller's memory. A front's own handle
/// has another mark, and a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VirtualHandle(u64);

impl VirtualHandle {
    const MARK: u64 = 0x5b1e;
    const FRONT_MARK: u64 = 0x5b1f;
    pub(crate) const GENERATION_MASK: u32 = (1 << 24) - 1;
    const INDEX_MASK: u64 = (1 << 24) - 1;

    pub(crate) fn new(index: usize, generation: u32) -> Self {
        debug_assert!(index as u64 <= Self::INDEX_MASK, "more than 16 million allocations");
        Self(Self::MARK << 48 | u64::from(generation) << 24 | (index as u64 & Self::INDEX_MASK))
    }

    /// Makes the handle `number` of the front.
    pub fn of_front(number: u64) -> Self {
        debug_assert!(number >> 48 == 0, "more than 2^48 handles");
        Self(Self::FRONT_MARK << 48 | number & ((1 << 48) - 1))
    }

    /// Did the front give this handle out? It may stand for a row by now.
    pub fn is_of_front(self) -> bool {
        self.0 >> 48 == Self::FRONT_MARK
    }

    /// Returns `raw` as a handle, if it has one of Sublet's marks.
    pub fn from_raw(raw: u64) -> Option<Self> {
        [Self::MARK, Self::FRONT_MARK].contains(&(raw >> 48)).then_some(Self(raw))
    }

    /// Returns the value that callers see.
    pub fn raw(self) -> u64 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        // CAST: at most 24 bits.
        (self.0 & Self::INDEX_MASK) as usize
    }
}

/// Another process that shares memory with this one, as owner or as importer. The pool only compares these numbers; the
/// pool's user knows how to find the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerId(pub u64);

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
