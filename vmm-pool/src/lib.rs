//! Device memory as handles, reservations and mappings, over a real or a simulated CUDA driver.
//!
//! The pool stands between callers of the driver's virtual memory interface and the driver. Callers hold
//! [`VirtualHandle`]s, which stay the same while the memory behind them is given back and created again.
//! It learns no process id, opens no socket, and knows no framework: other processes are numbers to it
//! ([`PeerId`]), which its user gives.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod driver;
mod error;
pub mod gate;
mod peer;
mod pool;
mod report;
#[cfg(test)]
mod scaling;
pub mod slots;
mod staging;
pub mod support;
mod vacate;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use error::{PoolError, PoolResult};
pub use peer::PeerId;
pub use pool::{
    Class, Export, Held, ImportSource, LostImports, Pool, References, StayReason, TagTotals,
};
pub use report::{ClassBytes, Contents, DeviceReport, PinnedBytes, PoolReport};
pub use staging::{HostBudget, HostDemand, check_file_dir};
pub use vacate::{
    Holding, HoldingSource, ImportRequest, SavedError, Selection, Standing, Step, StepLog, Tags,
    Whose, WriteOut, Written,
};

/// The random identity of a physical allocation, the same in every process that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AllocationId(pub [u8; 16]);

impl fmt::Debug for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl AllocationId {
    /// A new identity. `None` when the system has no randomness to give.
    fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }
}

/// A value of ours that callers hold in place of the driver's handle.
///
/// Layout, high to low: 16 bits of a mark that no handle of driver 580 has (those are host addresses of
/// user space, whose top 17 bits are zero), 24 bits generation, 24 bits index. The generation makes a
/// value that is used after release an error instead of somebody else's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VirtualHandle(u64);

impl VirtualHandle {
    const MARK: u64 = 0x5b1e;
    pub(crate) const GENERATION_MASK: u32 = (1 << 24) - 1;
    const INDEX_MASK: u64 = (1 << 24) - 1;

    fn new(index: usize, generation: u32) -> Self {
        debug_assert!(index as u64 <= Self::INDEX_MASK, "more than 16 million allocations");
        Self(Self::MARK << 48 | u64::from(generation) << 24 | (index as u64 & Self::INDEX_MASK))
    }

    /// The handle, when `raw` bears our mark.
    pub fn from_raw(raw: u64) -> Option<Self> {
        (raw >> 48 == Self::MARK).then_some(Self(raw))
    }

    /// The value that callers see.
    pub fn raw(self) -> u64 {
        self.0
    }

    fn index(self) -> usize {
        // CAST: at most 24 bits.
        (self.0 & Self::INDEX_MASK) as usize
    }

    fn generation(self) -> u32 {
        let generation = (self.0 >> 24) & u64::from(Self::GENERATION_MASK);
        u32::try_from(generation).unwrap_or(0)
    }
}
