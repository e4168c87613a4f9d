//! The pool's tables: what exists, who asked for it, and where it is mapped.
//!
//! # Invariants
//! 1. Every mapping names a live allocation, and that allocation lists the mapping's start; both ways.
//! 2. Mappings do not overlap.
//! 3. An allocation lives while it has a reference, a mapping, or a ticket nobody redeemed yet; while it is not
//!    resident also as long as an importer may want it again (`is_garbage` is the rule).
//! 4. `raw` is `Some` exactly while the allocation is resident.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::os::fd::OwnedFd;

use slab::Slab;

use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, LocationKind, RawHandle, VaRange,
};
use crate::error::{PoolError, PoolResult};
use crate::report::Contents;
use crate::staging::Saved;
use crate::{AllocationId, PeerId, VirtualHandle};

/// Who asked for memory, under which tag, and what a pause does with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// The library that asked, such as `nccl`.
    pub library: &'static str,
    /// The region's tag; empty outside any region.
    pub tag: String,
    /// What a pause does with the contents.
    pub contents: Contents,
}

/// Where an allocation comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Created here.
    Own,
    /// Created by another process of the tenant.
    Imported { owner: PeerId },
    /// As [`Origin::Imported`], after its owner has ended and the last reference to its memory was given
    /// up: it is never mapped again, and waits for its user to unmap and release it.
    Lost,
    /// From a descriptor that is no ticket: its owner is unknown, so it can never be given back.
    Foreign,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) id: AllocationId,
    pub(crate) size_bytes: u64,
    pub(crate) prop: AllocationProp,
    pub(crate) origin: Origin,
    pub(crate) class: Class,
    pub(crate) generation: u32,
    /// References that callers hold: creates, imports and retains, less releases.
    pub(crate) references: u32,
    /// Starts of its mappings.
    pub(crate) mappings: BTreeSet<u64>,
    /// Serial numbers of tickets issued and not yet redeemed by anybody.
    pub(crate) tickets: BTreeSet<u64>,
    /// Processes that may hold it: whoever was given a descriptor since it was last created.
    pub(crate) importers: BTreeSet<PeerId>,
    /// From its restoring to the end of that resume: whoever has fetched it again, the importers to come.
    pub(crate) fetched: Option<BTreeSet<PeerId>>,
    /// The driver's descriptor for the importers, between issue and redemption.
    pub(crate) exported: Option<OwnedFd>,
    pub(crate) raw: Option<RawHandle>,
    /// Why a pause must leave it where it is.
    pub(crate) pinned: Option<&'static str>,
    /// Why the pause under way, or the last one, leaves it where it is in all processes that hold it: nobody could
    /// save it, or somebody else has pinned it.
    pub(crate) stays: Option<&'static str>,
    /// Where its contents are while it is not resident.
    pub(crate) saved: Option<Saved>,
    /// Parts, by offset, whose contents the next pause need not save ([`super::Pool::mark_unused`]). In order,
    /// none empty, none touching another.
    pub(crate) unused: Vec<Range<u64>>,
    /// Given up by a pause by tag; whoever owns it runs on without it.
    pub(crate) set_aside: bool,
    /// For memory made by [`super::Pool::block_allocate`]: the size that the caller asked for.
    pub(crate) block_size_bytes: Option<u64>,
}

impl Allocation {
    pub(crate) fn device(&self) -> Option<DeviceOrdinal> {
        self.prop.location.as_device()
    }

    pub(crate) fn is_host(&self) -> bool {
        self.prop.location.kind != LocationKind::DEVICE
    }

    /// Does a pause take this allocation's memory away?
    pub(crate) fn is_vacatable(&self) -> bool {
        self.reason_to_stay().is_none() && !self.is_host() && self.origin != Origin::Foreign
    }

    pub(crate) fn is_own(&self) -> bool {
        self.origin == Origin::Own
    }

    /// Why a pause leaves it in place, by this process's doing or by what all have decided.
    pub(crate) fn reason_to_stay(&self) -> Option<&'static str> {
        self.pinned.or(self.stays)
    }

    /// The ticket `serial` is redeemed. With the last the descriptor goes that was kept for them.
    pub(crate) fn use_ticket(&mut self, serial: u64) {
        self.tickets.remove(&serial);
        if self.tickets.is_empty() {
            self.exported = None;
        }
    }

    /// May another process hold it, or come for it?
    pub(crate) fn is_shared(&self) -> bool {
        self.is_own() && !(self.importers.is_empty() && self.tickets.is_empty())
    }

    fn is_garbage(&self) -> bool {
        // Resident memory the driver keeps for its importers. What is away nobody but its owner can bring back.
        let is_owed = self.is_own() && self.raw.is_none() && !self.importers.is_empty();
        self.references == 0 && self.mappings.is_empty() && self.tickets.is_empty() && !is_owed
    }

    pub(crate) fn describe(&self) -> String {
        let what = if self.is_own() { "allocation" } else { "imported allocation" };
        let tag = if self.class.tag.is_empty() { "" } else { " of tag " };
        match self.mappings.first() {
            Some(start) => {
                format!("{} {what} at {start:#x}{tag}{}", self.class.library, self.class.tag)
            }
            None => format!("{} {what}{tag}{}", self.class.library, self.class.tag),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) range: VaRange,
    pub(crate) allocation: usize,
    /// Rights by place, as last set. Empty: never set, so nobody may touch it.
    pub(crate) access: BTreeMap<crate::driver::Location, i32>,
    pub(crate) presence: Presence,
    /// How often a block of another process was opened here and not closed yet; 0 for any other mapping.
    pub(crate) opened: u32,
}

/// How much of a mapping is in the driver's page tables now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Nothing.
    Absent,
    /// It is mapped, and its rights are still to be set.
    Bare,
    /// All that its record says.
    Whole,
}

impl Mapping {
    /// Is anything of it in the driver's page tables?
    pub(crate) fn is_present(&self) -> bool {
        self.presence != Presence::Absent
    }

    pub(crate) fn access_list(&self) -> Vec<AccessDesc> {
        self.access.iter().map(|(&location, &flags)| AccessDesc { location, flags }).collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) allocations: Slab<Allocation>,
    pub(crate) by_id: HashMap<AllocationId, usize>,
    /// By start address.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Plain allocations left to the driver, by address.
    pub(crate) natives: BTreeMap<u64, Native>,
    /// Places mapped for a copy of a pause or resume, and not taken down yet. By start address.
    pub(crate) views: BTreeMap<u64, VaRange>,
    next_generation: u32,
    last_ticket: u64,
    /// Nothing is given to importers: a pause has asked who holds what, or memory is away.
    pub(crate) is_frozen: bool,
}

/// A plain allocation that the pool only counts.
#[derive(Debug)]
pub(crate) struct Native {
    pub(crate) size_bytes: u64,
    pub(crate) device: DeviceOrdinal,
    pub(crate) reason: &'static str,
}

impl Tables {
    pub(crate) fn insert(&mut self, mut allocation: Allocation) -> (usize, VirtualHandle) {
        self.next_generation = (self.next_generation + 1) & VirtualHandle::GENERATION_MASK;
        allocation.generation = self.next_generation;
        let generation = allocation.generation;
        let id = allocation.id;
        let key = self.allocations.insert(allocation);
        self.by_id.insert(id, key);
        (key, VirtualHandle::new(key, generation))
    }

    /// A number for a new ticket; 0 is none.
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    pub(crate) fn handle_of(&self, key: usize) -> Option<VirtualHandle> {
        self.allocations.get(key).map(|found| VirtualHandle::new(key, found.generation))
    }

    /// The allocation of `handle`.
    pub(crate) fn find(&self, handle: VirtualHandle) -> PoolResult<usize> {
        match self.allocations.get(handle.index()) {
            Some(found) if found.generation == handle.generation() => Ok(handle.index()),
            _ => Err(PoolError::StaleHandle { handle: handle.raw() }),
        }
    }

    /// An own allocation that importers may be given now.
    pub(crate) fn find_for_importer(&self, id: AllocationId) -> PoolResult<usize> {
        if self.is_frozen {
            return Err(PoolError::Frozen);
        }
        let stale = PoolError::StaleHandle { handle: 0 };
        let key = *self.by_id.get(&id).ok_or(stale)?;
        let found = &self.allocations[key];
        match (found.is_own(), found.raw) {
            (true, Some(_)) => Ok(key),
            (true, None) => Err(PoolError::Offloaded { tag: found.class.tag.clone() }),
            (false, _) => Err(PoolError::StaleHandle { handle: 0 }),
        }
    }

    /// The mapping that holds `address`.
    pub(crate) fn mapping_at(&self, address: DeviceAddress) -> Option<&Mapping> {
        let (_, mapping) = self.mappings.range(..=address.0).next_back()?;
        mapping.range.contains_address(address).then_some(mapping)
    }

    /// Starts of the mappings that lie wholly inside `range`.
    pub(crate) fn mappings_inside(&self, range: VaRange) -> Vec<u64> {
        self.mappings
            .range(range.start.0..range.end().0)
            .filter(|(_, mapping)| range.contains(mapping.range))
            .map(|(&start, _)| start)
            .collect()
    }

    /// Takes the allocation out when nothing holds it any more.
    pub(crate) fn take_garbage(&mut self, key: usize) -> Option<Allocation> {
        if !self.allocations.get(key)?.is_garbage() {
            return None;
        }
        let allocation = self.allocations.remove(key);
        self.by_id.remove(&allocation.id);
        Some(allocation)
    }

    /// Forgets a mapping; returns its allocation's key.
    pub(crate) fn remove_mapping(&mut self, start: u64) -> Option<(usize, Mapping)> {
        let mapping = self.mappings.remove(&start)?;
        if let Some(allocation) = self.allocations.get_mut(mapping.allocation) {
            allocation.mappings.remove(&start);
        }
        Some((mapping.allocation, mapping))
    }
}
