//! The plain memory of a context, while that is being ended.
//!
//! The driver gives the value of an ended context to the next one immediately, so "the memory of the context of this value" may be that of two. A caller that
//! ends a context takes its memory out first: nobody else finds it by the value from then on.

use super::{Ledger, Mapping, VirtualHandle};
use crate::budget::{Charge, Counted};
use crate::driver::{DeviceAddress, DeviceOrdinal, RawContext, VaRange};

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

/// What of plain memory was allocated in a context: blocks, and what was left to the driver.
#[derive(Debug, Default)]
#[must_use = "it belongs to no context any more"]
pub struct PlainMemory {
    blocks: Vec<Block>,
    natives: Vec<DeviceAddress>,
}

impl PlainMemory {
    /// Where the blocks lie.
    pub fn blocks(&self) -> impl Iterator<Item = VaRange> {
        self.blocks.iter().map(|block| block.range)
    }

    /// How many allocations were left to the driver.
    pub fn natives(&self) -> usize {
        self.natives.len()
    }
}

impl Ledger {
    /// Takes the plain memory of `context` from it: it stays where it is, and is nobody's.
    pub(crate) fn take_plain_memory(&mut self, context: RawContext) -> PlainMemory {
        let of_context =
            self.mappings.values_mut().filter(|mapping| mapping.context() == Some(context));
        let blocks = of_context.map(|mapping| {
            mapping.set_context(None);
            Block::of(mapping)
        });
        let blocks = blocks.collect();
        let natives = self.natives.iter_mut().filter(|(_, native)| native.context == Some(context));
        let natives = natives.map(|(address, native)| {
            native.context = None;
            DeviceAddress(*address)
        });
        let natives = natives.collect();
        PlainMemory { blocks, natives }
    }

    /// The context lives on: what was taken from it, and is still there, is its own again.
    pub(crate) fn give_plain_memory_back(&mut self, context: RawContext, taken: PlainMemory) {
        let PlainMemory { blocks, natives } = taken;
        for block in blocks {
            if self.is_nobodys(block) {
                self.set_context(block.range.start.0, context);
            }
        }
        for address in natives {
            if let Some(native) = self.natives.get_mut(&address.0) {
                native.context.get_or_insert(context);
            }
        }
    }

    /// What was left to the driver has ended. The blocks of `taken` are told that are still what they were: the application may have freed one meanwhile,
    /// and another thread have got its addresses.
    pub(crate) fn end_plain_memory(&mut self, taken: PlainMemory) -> Vec<Block> {
        let PlainMemory { blocks, natives } = taken;
        for address in natives {
            // The driver may have given the address to another thread by now, in a context of its own.
            if self.natives.get(&address.0).is_some_and(|native| native.context.is_none()) {
                self.natives.remove(&address.0);
            }
        }
        let left = blocks.into_iter();
        left.filter(|block| self.is_nobodys(*block)).collect()
    }

    fn is_nobodys(&self, block: Block) -> bool {
        let mapping = self.mapping(block.range.start.0);
        mapping.is_some_and(|found| Block::of(found) == block && found.context().is_none())
    }

    /// Whether the caller is the one that gives `block` up. False when it is gone, when another block lies there by now, and
    /// when another caller gives it up: a context that ends, or a free that its stream has passed.
    pub(crate) fn claim(&mut self, block: Block) -> bool {
        let mapping = self.mappings.get_mut(&block.range.start.0);
        let free = mapping.filter(|found| Block::of(found) == block && !found.is_claimed());
        free.map(|found| found.set_claimed(true)).is_some()
    }

    /// Is this block there, and nobody about to free it?
    pub(crate) fn has_block(&self, block: Block) -> bool {
        let mapping = self.mapping(block.range.start.0);
        mapping.is_some_and(|found| Block::of(found) == block && !found.is_claimed())
    }

    /// The driver would not take the block that the caller has claimed: it may be given up once more.
    pub(crate) fn claim_ends(&mut self, block: Block) {
        if let Some(mapping) = self.mappings.get_mut(&block.range.start.0) {
            mapping.set_claimed(false);
        }
    }
}

/// A plain allocation that the pool only counts.
#[derive(Debug)]
pub(crate) struct Native {
    pub(crate) size_bytes: u64,
    pub(crate) device: DeviceOrdinal,
    /// The context in which it was allocated, if that is known.
    pub(crate) context: Option<RawContext>,
    pub(crate) reason: &'static str,
    pub(crate) counted: Counted,
}

impl Ledger {
    /// Counts a plain allocation that was left to the driver.
    pub(crate) fn add_native(&mut self, address: DeviceAddress, native: Native) {
        self.natives.insert(address.0, native);
    }

    /// Forgets one.
    pub(crate) fn remove_native(&mut self, address: DeviceAddress) {
        self.natives.remove(&address.0);
    }

    /// Has all own memory that is on its device, and does not count yet, count against a budget.
    pub(crate) fn charge_all(
        &mut self,
        make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>,
    ) {
        for (_, row) in &mut self.rows {
            if let (true, Some(physical)) = (row.is_own(), row.backing_mut().handle_mut()) {
                physical.charge_with(&make);
            }
        }
        for native in self.natives.values_mut() {
            if let Counted::Yes(charge @ None) = &mut native.counted {
                *charge = make(native.size_bytes, Some(native.device));
            }
        }
    }
}
