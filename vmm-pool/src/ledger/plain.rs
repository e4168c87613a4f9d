//! The plain memory of a context, while that is being ended.
//!
//! The driver gives the value of an ended context to the next one immediately, so "the memory of the context of this value" may be that of two. A caller that
//! ends a context takes its memory out first: nobody else finds it by the value from then on.

use super::{Ledger, VirtualHandle};
use crate::driver::{DeviceAddress, RawContext, VaRange};

/// What of plain memory was allocated in a context: blocks, and what was left to the driver.
#[derive(Debug, Default)]
#[must_use = "it belongs to no context any more"]
pub struct PlainMemory {
    blocks: Vec<(VaRange, VirtualHandle)>,
    natives: Vec<DeviceAddress>,
}

impl PlainMemory {
    /// Where the blocks lie.
    pub fn blocks(&self) -> impl Iterator<Item = VaRange> {
        self.blocks.iter().map(|(range, _)| *range)
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
            (mapping.range(), mapping.allocation())
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
        for (range, allocation) in blocks {
            if self.is_nobodys(range, allocation) {
                self.set_context(range.start.0, context);
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
    pub(crate) fn end_plain_memory(&mut self, taken: PlainMemory) -> Vec<VaRange> {
        let PlainMemory { blocks, natives } = taken;
        for address in natives {
            // The driver may have given the address to another thread by now, in a context of its own.
            if self.natives.get(&address.0).is_some_and(|native| native.context.is_none()) {
                self.natives.remove(&address.0);
            }
        }
        let left = blocks.into_iter();
        let left = left.filter(|(range, allocation)| self.is_nobodys(*range, *allocation));
        left.map(|(range, _)| range).collect()
    }

    fn is_nobodys(&self, range: VaRange, allocation: VirtualHandle) -> bool {
        self.mapping(range.start.0).is_some_and(|mapping| {
            mapping.allocation() == allocation && mapping.context().is_none()
        })
    }
}
