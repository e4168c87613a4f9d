//! Device memory as handles, reservations and mappings.

pub mod driver;
mod report;

use serde::{Deserialize, Serialize};

pub use report::{ClassBytes, Contents, DeviceReport, PinnedBytes, PoolReport};

/// The random identity of a physical allocation, the same in every process that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AllocationId(pub [u8; 16]);
