//! The plain memory of a context, while that is being ended.
//!
//! The driver gives the value of an ended context to the next one at once, so "the memory of the context of this value" may be that of two. Whoever
//! ends a context takes its memory out first: nobody else finds it by the value from then on.

use super::{Ledger, Native, VirtualHandle};
use crate::driver::{RawContext, VaRange};

/// What of plain memory was asked for in a context: blocks, and what was left to the driver.
#[derive(Debug, Default)]
#[must_use = "it belongs to no context any more"]
pub struct PlainMemory {
    blocks: Vec<(VaRange, VirtualHandle)>,
    natives: Vec<(u64, Native)>,
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
    /// Takes the plain memory of `context` from it. Blocks stay where they are, and are nobody's; what was left to the driver counts no more once the
    /// answer is dropped.
    pub(crate) fn take_plain_memory(&mut self, context: RawContext) -> PlainMemory {
        let of_context =
            self.mappings.values_mut().filter(|mapping| mapping.context() == Some(context));
        let blocks = of_context.map(|mapping| {
            mapping.set_context(None);
            (mapping.range(), mapping.allocation())
        });
        let blocks = blocks.collect();
        let natives =
            self.natives.extract_if(.., |_, native| native.context == Some(context)).collect();
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
        for (address, native) in natives {
            self.natives.entry(address).or_insert(native);
        }
    }

    /// The blocks of `taken` that are still what they were: the application may have freed one meanwhile, and another thread have got its addresses.
    pub(crate) fn left_of(&self, taken: &PlainMemory) -> Vec<VaRange> {
        let blocks = taken.blocks.iter();
        let left = blocks.filter(|(range, allocation)| self.is_nobodys(*range, *allocation));
        left.map(|(range, _)| *range).collect()
    }

    fn is_nobodys(&self, range: VaRange, allocation: VirtualHandle) -> bool {
        self.mapping(range.start.0).is_some_and(|mapping| {
            mapping.allocation() == allocation && mapping.context().is_none()
        })
    }
}
