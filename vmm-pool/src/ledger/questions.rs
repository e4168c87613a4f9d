//! What the ledger knows of an address, for calls that ask about one.
//!
//! The driver knows more, and is asked wherever it can answer. It cannot while memory is away, and what it says in the
//! middle of a pause or resume may be half of the truth. So a caller looks here first and again afterwards.

use super::Ledger;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, RawContext, VaRange,
};

/// A look at a mapping that the driver has as it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    start: u64,
    departures: u64,
}

/// What is on record of an address whose memory is away, or comes or goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The whole mapping that holds it.
    pub mapping: VaRange,
    /// A number that the memory has alone.
    pub number: u64,
    /// For a block: the size that its caller requested, in bytes.
    pub block_bytes: Option<u64>,
    /// What the caller was given to map it in, where the driver has reserved more for us.
    pub reserved: Option<VaRange>,
    /// What the memory was created with.
    pub prop: AllocationProp,
    /// The rights set on it.
    pub access: Vec<AccessDesc>,
    /// For a block: the context in which it was allocated, if that is known.
    pub context: Option<RawContext>,
}

impl Facts {
    /// The device that the memory is on; none for host memory.
    pub fn device(&self) -> Option<DeviceOrdinal> {
        self.prop.location.as_device()
    }
}

/// Who can answer a question about an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// The driver: the pool has nothing there.
    Elsewhere,
    /// The driver, as long as a second look afterwards is the same.
    Here(Sight),
    /// The ledger.
    Away(Facts),
    /// Nobody: the addresses are ours, and nothing is there for the caller.
    Nobody,
}

impl Ledger {
    /// Who can answer a question about `address` now.
    pub(crate) fn sight_of(&self, address: DeviceAddress) -> Known {
        let Some((mapping, row)) = self.mapped_at(address) else {
            return Known::Elsewhere;
        };
        // Of host files the driver knows no allocation, only that the host has registered something.
        match mapping.standing().filter(|_| !row.is_of_host_file()) {
            Some(departures) => Known::Here(Sight { start: mapping.range().start.0, departures }),
            None => Known::Away(Facts {
                mapping: mapping.range(),
                number: row.handle().raw(),
                block_bytes: row.block_size_bytes(),
                reserved: row.is_of_host_file().then(|| mapping.range()),
                prop: *row.prop(),
                access: mapping.access_list(),
                context: mapping.context(),
            }),
        }
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else: mappings
    /// whose memory is away or a host file, and blocks that are larger than was requested.
    pub(crate) fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        let (mapping, row) = self.mapped_at(address)?;
        if let Some(size_bytes) = row.block_size_bytes() {
            return Some(VaRange::new(mapping.range().start, size_bytes));
        }
        let is_of_driver = mapping.standing().is_some() && !row.is_of_host_file();
        (!is_of_driver).then(|| mapping.range())
    }

    /// Notes that the block that begins at `start` was allocated in `context`.
    pub(crate) fn set_context(&mut self, start: u64, context: RawContext) {
        if let Some(mapping) = self.mappings.get_mut(&start) {
            mapping.set_context(Some(context));
        }
    }

    /// Is some of the memory mapped in `range` away?
    pub(crate) fn is_any_away(&self, range: VaRange) -> bool {
        super::overlapping(&self.mappings, range).any(|mapping| mapping.standing().is_none())
    }
}
