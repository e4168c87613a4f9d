//! All mappings, by their start. They do not overlap.

use std::collections::BTreeMap;

use super::super::row::Row;
use super::{Block, Mapping, Presence};
use crate::driver::{AccessDesc, DeviceAddress, RawContext, VaRange};

/// All mappings of one process. Each mapping has its row, so only the ledger adds and removes mappings.
#[derive(Debug, Default)]
pub(crate) struct Mappings(BTreeMap<u64, Mapping>);

impl Mappings {
    pub(in crate::ledger) fn insert(&mut self, mapping: Mapping) {
        self.0.insert(mapping.range().start.0, mapping);
    }

    pub(in crate::ledger) fn remove(&mut self, start: u64) -> Option<Mapping> {
        self.0.remove(&start)
    }

    /// Returns all mappings, in order.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Mapping> {
        self.0.values()
    }

    /// Returns the mapping that begins at `start`.
    pub(crate) fn get(&self, start: u64) -> Option<&Mapping> {
        self.0.get(&start)
    }

    /// Returns the mappings of `row`, in order.
    pub(crate) fn of(&self, row: &Row) -> impl Iterator<Item = &Mapping> {
        row.mapped_at().filter_map(|start| self.get(start))
    }

    /// Returns the ranges where `row` is in the driver's page tables, in order.
    pub(crate) fn present(&self, row: &Row) -> impl Iterator<Item = VaRange> {
        self.of(row).filter(|mapping| mapping.is_present()).map(Mapping::range)
    }

    /// Finds a range where kernels on its device may read all of `row`, as far as is known.
    pub(crate) fn readable(&self, row: &Row) -> Option<VaRange> {
        let place = row.prop().location;
        self.of(row).find(|mapping| mapping.is_readable_by_kernels(place)).map(Mapping::range)
    }

    /// Changes the mapping that begins at `start`, if there is one.
    fn change<T>(&mut self, start: u64, change: impl FnOnce(&mut Mapping) -> T) -> Option<T> {
        self.0.get_mut(&start).map(change)
    }

    /// Returns the mapping that holds `address`.
    pub(crate) fn at(&self, address: DeviceAddress) -> Option<&Mapping> {
        let (_, mapping) = self.0.range(..=address.0).next_back()?;
        mapping.range().contains_address(address).then_some(mapping)
    }

    /// Returns the mappings that overlap `range`, the last first.
    pub(crate) fn overlapping(&self, range: VaRange) -> impl Iterator<Item = &Mapping> {
        let before_its_end = self.0.range(..range.end().0).rev().map(|(_, mapping)| mapping);
        // Mappings do not overlap each other, so none before the first that ends too early reaches `range`.
        before_its_end.take_while(move |mapping| range.start < mapping.range().end())
    }

    /// Returns the mappings that a call on `range` touches: none if the range is empty.
    pub(crate) fn touched_by(&self, range: VaRange) -> impl Iterator<Item = &Mapping> {
        self.overlapping(range).filter(move |_| range.size_bytes > 0)
    }

    /// Is some of the memory mapped in `range` off its device?
    pub(crate) fn is_any_away(&self, range: VaRange) -> bool {
        self.touched_by(range).any(|mapping| mapping.standing().is_none())
    }

    /// Returns the mappings that are wholly inside `range`.
    pub(crate) fn inside(&self, range: VaRange) -> impl Iterator<Item = &Mapping> {
        let begun = self.0.range(range.start.0..range.end().0).map(|(_, mapping)| mapping);
        begun.filter(move |mapping| range.contains(mapping.range()))
    }

    /// Records that the driver has made the mapping that [`super::Ledger::begin_mapping`] recorded. False if its record
    /// is gone meanwhile.
    pub(crate) fn made(&mut self, range: VaRange) -> bool {
        let mapping = self.0.get_mut(&range.start.0).filter(|found| found.range() == range);
        mapping.map(|mapping| mapping.set_presence(Presence::Whole)).is_some()
    }

    /// Sets the part of the mapping at `start` that is in the driver's page tables now.
    pub(crate) fn set_presence(&mut self, start: u64, presence: Presence) {
        self.change(start, |mapping| mapping.set_presence(presence));
    }

    /// Records that the mapping at `start` is about to be removed from the driver's page tables.
    pub(crate) fn begin_leaving(&mut self, start: u64) {
        self.change(start, |mapping| {
            mapping.is_leaving = true;
            mapping.departures += 1;
        });
    }

    /// Records that the mapping at `start` was not removed after all.
    pub(crate) fn call_off_leaving(&mut self, start: u64) {
        self.change(start, |mapping| mapping.is_leaving = false);
    }

    /// Records rights that the driver has set on the mappings that begin at `starts`.
    pub(crate) fn add_access(&mut self, starts: &[u64], access: &[AccessDesc]) {
        for start in starts {
            self.change(*start, |mapping| mapping.add_access(access));
        }
    }

    /// Records that rights are about to be set on `range`, which may cut through mappings. Returns the starts of those
    /// mappings in order. Each comes with the part of it in `range`, if the mapping is in the page tables.
    pub(crate) fn begin_access(&mut self, range: VaRange) -> Vec<(u64, Option<VaRange>)> {
        let all: Vec<_> = self.overlapping(range).map(Mapping::range).collect();
        let all = all.into_iter().rev().filter_map(|whole| {
            let mapping = self.0.get_mut(&whole.start.0)?;
            let start = whole.start.max(range.start);
            let part = VaRange::new(start, whole.end().min(range.end()).0 - start.0);
            mapping.is_uneven |= part != whole;
            Some((whole.start.0, mapping.is_present().then_some(part)))
        });
        all.collect()
    }

    /// Changes the number of opens of the mapping at `start` by `by`. Returns the new number. None if the mapping was
    /// not open.
    pub(crate) fn change_opened(&mut self, start: u64, by: i8) -> Option<u32> {
        let mapping = self.0.get_mut(&start).filter(|found| found.opened > 0)?;
        mapping.opened = mapping.opened.saturating_add_signed(by.into());
        Some(mapping.opened)
    }

    /// Records that the mapping is open once: it has just been opened, or closing it has failed.
    pub(crate) fn open_once(&mut self, start: u64) {
        self.change(start, |mapping| mapping.opened = 1);
    }

    /// Records that the block at `start` was allocated in `context`.
    pub(crate) fn set_context(&mut self, start: u64, context: RawContext) {
        self.change(start, |mapping| mapping.context = Some(context));
    }

    /// Detaches all blocks of `context` from it. The blocks stay in place, and belong to no context.
    pub(crate) fn take_blocks(&mut self, context: RawContext) -> Vec<Block> {
        let of_context = |mapping: &mut Mapping| {
            mapping.context.take_if(|own| *own == context).map(|_| Block::of(mapping))
        };
        self.0.values_mut().filter_map(of_context).collect()
    }

    /// Is this still the block that was detached from its context? It may have been freed meanwhile, and another thread
    /// may have a block at its addresses.
    pub(crate) fn is_nobodys(&self, block: Block) -> bool {
        self.block(block).is_some_and(|found| found.context.is_none())
    }

    /// Returns the mapping of `block`. None if the block is gone, or another block has its address.
    pub(crate) fn block(&self, block: Block) -> Option<&Mapping> {
        self.get(block.start().0).filter(|found| Block::of(found) == block)
    }

    /// Claims the right to give `block` up. False if the block is gone, if another block has its address by now, or if
    /// another caller gives it up: a context that ends, or a free that its stream has passed.
    pub(crate) fn claim(&mut self, block: Block) -> bool {
        let is_free = self.block(block).is_some_and(|found| !found.is_claimed);
        is_free && self.change(block.start().0, |mapping| mapping.is_claimed = true).is_some()
    }

    /// Ends a claim, because the driver refused to free the block: another caller may claim it.
    pub(crate) fn claim_ends(&mut self, block: Block) {
        self.change(block.start().0, |mapping| mapping.is_claimed = false);
    }
}
