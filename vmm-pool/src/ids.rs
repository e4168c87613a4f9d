//! Identities: of memory, the same in every process, and of what callers hold instead of the driver's handles.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The random identity of a physical allocation, the same in every process that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AllocationId(#[cfg_attr(feature = "schema", schemars(with = "String"))] pub [u8; 16]);

/// For people's programs, as text.
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
    /// A new identity. `None` when the system has no randomness to give.
    pub(crate) fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }
}

/// A value of ours that callers hold instead of the driver's handle.
///
/// Layout of an allocation's, high to low: 16 bits of a mark that no handle of driver 580 has (those are host addresses of
/// user space, whose top 17 bits are zero), 24 bits generation, 24 bits index. The generation makes a
/// value that is used after release an error instead of somebody else's memory. A front's own has another mark, and a number
/// that never comes again.
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

    /// The handle `number` of the front.
    pub fn of_front(number: u64) -> Self {
        debug_assert!(number >> 48 == 0, "more than 2^48 handles");
        Self(Self::FRONT_MARK << 48 | number & ((1 << 48) - 1))
    }

    /// Was it given out by the front? It may stand for a row by now.
    pub fn is_of_front(self) -> bool {
        self.0 >> 48 == Self::FRONT_MARK
    }

    /// The handle, when `raw` bears a mark of ours.
    pub fn from_raw(raw: u64) -> Option<Self> {
        [Self::MARK, Self::FRONT_MARK].contains(&(raw >> 48)).then_some(Self(raw))
    }

    /// The value that callers see.
    pub fn raw(self) -> u64 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        // CAST: at most 24 bits.
        (self.0 & Self::INDEX_MASK) as usize
    }
}

/// Another process that memory is shared with, as owner or as importer. The pool compares it, and its user knows how
/// that process is found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerId(pub u64);

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
