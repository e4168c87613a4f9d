//! Blocks: plain memory made from the pool's.

use super::{Mapping, VirtualHandle};
use crate::driver::{DeviceAddress, VaRange};

/// A block of plain memory. Another block that lies at the same address later is not this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub(crate) range: VaRange,
    allocation: VirtualHandle,
}

impl Block {
    pub(crate) fn of(mapping: &Mapping) -> Self {
        Self { range: mapping.range(), allocation: mapping.allocation() }
    }

    /// Its first address.
    pub fn start(&self) -> DeviceAddress {
        self.range.start
    }

    /// Tells it from all other blocks of this process, also from those that lie at its address later.
    pub fn identity(&self) -> VirtualHandle {
        self.allocation
    }
}
