//! A place where an allocation is mapped, and the ledger's answers to questions about an address.
//!
//! The driver knows more, and callers ask it wherever it can answer. It cannot while memory is off its device. During a
//! pause or resume its answer may be half true. So a caller looks here first, and again after the driver's answer.

mod all;

use std::collections::BTreeMap;

use super::Ledger;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Location, RawContext, VaRange,
};
use crate::ids::VirtualHandle;

pub(crate) use self::all::Mappings;

/// A place where an allocation is mapped, and the rights set on it.
#[derive(Debug)]
pub(crate) struct Mapping {
    range: VaRange,
    allocation: VirtualHandle,
    /// The rights of each place, as last set. Empty: never set, so no place may access the memory.
    access: BTreeMap<Location, i32>,
    presence: Presence,
    /// True while it is about to be removed from the driver's page tables: the driver's answers about it are no longer
    /// valid.
    is_leaving: bool,
    /// The number of times that the mapping has begun to leave the page tables.
    departures: u64,
    /// The number of opens of another process's block here that are not closed yet. 0 for any other mapping.
    opened: u32,
    /// For a block: the context in which it was allocated. The block ends with this context.
    context: Option<RawContext>,
    /// True once rights were set on a part of it: the recorded rights may not be valid for the whole mapping.
    pub(super) is_uneven: bool,
    /// For a block: true while one caller gives it up, so that no other may.
    is_claimed: bool,
}

/// The part of a mapping that is in the driver's page tables now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Nothing.
    Absent,
    /// It is mapped, but its rights are not set yet.
    Bare,
    /// It is mapped, with all recorded rights.
    Whole,
}

impl Mapping {
    pub(super) fn new(range: VaRange, allocation: VirtualHandle) -> Self {
        let (access, presence) = (BTreeMap::new(), Presence::Absent);
        Self {
            range,
            allocation,
            access,
            presence,
            is_leaving: false,
            departures: 0,
            opened: 0,
            context: None,
            is_uneven: false,
            is_claimed: false,
        }
    }

    pub(crate) fn range(&self) -> VaRange {
        self.range
    }

    pub(crate) fn allocation(&self) -> VirtualHandle {
        self.allocation
    }

    pub(crate) fn presence(&self) -> Presence {
        self.presence
    }

    /// Is the mapping in the driver's page tables?
    pub(crate) fn is_present(&self) -> bool {
        self.presence != Presence::Absent
    }

    /// May a kernel on `place` read all of it, as far as is known?
    pub(crate) fn is_readable_by_kernels(&self, place: Location) -> bool {
        let rights = self.rights_of(place).unwrap_or(0);
        self.presence == Presence::Whole && !self.is_leaving && !self.is_uneven && rights != 0
    }

    pub(crate) fn access_list(&self) -> Vec<AccessDesc> {
        self.access.iter().map(|(&location, &flags)| AccessDesc { location, flags }).collect()
    }

    /// Returns the rights of `place`; none if they were never set.
    pub(crate) fn rights_of(&self, place: Location) -> Option<i32> {
        self.access.get(&place).copied()
    }

    /// Lists the places that have rights.
    pub(crate) fn accessors(&self) -> impl Iterator<Item = Location> {
        self.access.keys().copied()
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// Returns the number with which [`super::Ledger::sight_of`] distinguishes two looks. `None` while the driver's
    /// page tables lack something that is recorded.
    pub(crate) fn standing(&self) -> Option<u64> {
        (self.presence == Presence::Whole && !self.is_leaving).then_some(self.departures)
    }

    pub(super) fn set_presence(&mut self, presence: Presence) {
        self.presence = presence;
        self.is_leaving = false;
    }

    pub(super) fn add_access(&mut self, access: &[AccessDesc]) {
        self.access.extend(access.iter().map(|desc| (desc.location, desc.flags)));
    }

    pub(crate) fn context(&self) -> Option<RawContext> {
        self.context
    }
}

// Questions about an address.

/// A look at a mapping that is in the driver's page tables as recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    start: u64,
    departures: u64,
}

/// The record of an address whose memory is off its device, or is being moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The whole mapping that holds it.
    pub mapping: VaRange,
    /// A number that no other memory has.
    pub number: u64,
    /// For a block: the size that its caller requested, in bytes.
    pub block_bytes: Option<u64>,
    /// The range that the caller was given to map it in, if the driver has reserved a larger range for Sublet.
    pub reserved: Option<VaRange>,
    /// The properties that the memory was created with.
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

/// The source that can answer a question about an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// The driver can answer: the pool has nothing at the address.
    Elsewhere,
    /// The driver can answer. The answer is valid if a second look afterwards returns the same.
    Here(Sight),
    /// The ledger answers.
    Away(Facts),
    /// Nobody can answer: the addresses are Sublet's, and nothing is mapped there for the caller.
    Nobody,
}

impl Ledger {
    /// Returns the source that can answer a question about `address` now.
    pub(crate) fn sight_of(&self, address: DeviceAddress) -> Known {
        let Some((mapping, row)) = self.mapped_at(address) else {
            return Known::Elsewhere;
        };
        // The driver knows no allocation of a host file, only that the host has registered something.
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
}

/// A block of plain memory. A later block at the same address is not equal to it.
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

    /// Returns a value that no other block of this process has, not even a later one at the same address.
    pub fn identity(&self) -> VirtualHandle {
        self.allocation
    }
}
