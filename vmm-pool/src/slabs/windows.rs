//! What a window holds, and sums that are kept of it.

use std::collections::BTreeMap;

use super::{Item, Part, Slab, Table, Under, Window, item_under};
use crate::VirtualHandle;
use crate::driver::{DeviceAddress, Location, VaRange};

impl Window {
    pub(super) fn new(range: VaRange, under: Under, rights: BTreeMap<Location, i32>) -> Self {
        let (spots, items) = (BTreeMap::new(), BTreeMap::new());
        let (is_room, spot_bytes, item_bytes) = (false, 0, 0);
        Self { range, is_room, under, spots, items, spot_bytes, item_bytes, rights }
    }

    /// A caller is given `range`.
    pub(super) fn put_spot(&mut self, range: VaRange) {
        self.spots.insert(range.start.0, range.size_bytes);
        self.spot_bytes += range.size_bytes;
    }

    pub(super) fn take_spot(&mut self, start: DeviceAddress) {
        self.spot_bytes -= self.spots.remove(&start.0).unwrap_or(0);
    }

    /// A caller has mapped something in `range`: a cell, or an allocation that stands alone.
    pub(super) fn put_item(&mut self, range: VaRange, cell: Option<VirtualHandle>) {
        let (size_bytes, rights) = (range.size_bytes, BTreeMap::new());
        let before = self.items.insert(range.start.0, Item { size_bytes, cell, rights });
        self.item_bytes += size_bytes;
        self.item_bytes -= before.map_or(0, |before| before.size_bytes);
    }

    pub(super) fn take_item(&mut self, start: DeviceAddress) {
        self.item_bytes -= self.items.remove(&start.0).map_or(0, |item| item.size_bytes);
    }

    /// How much of the spots has nothing mapped.
    pub(super) fn vacant_bytes(&self) -> u64 {
        self.spot_bytes.saturating_sub(self.item_bytes)
    }

    pub(super) fn has_spot_in(&self, part: Part) -> bool {
        let Under::Slab(_, base) = self.under else { return false };
        let range = part.at(DeviceAddress(base));
        let before = self.spots.range(..range.end().0).next_back();
        before.is_some_and(|(start, size_bytes)| start + size_bytes > range.start.0)
    }

    pub(super) fn has_item_in(&self, range: VaRange) -> bool {
        let before = self.items.range(..range.end().0).next_back();
        before.is_some_and(|(start, item)| start + item.size_bytes > range.start.0)
    }

    /// Does one spot hold all of `range`?
    pub(super) fn is_of_spot(&self, range: VaRange) -> bool {
        let under = item_under(&self.spots, range.start.0, |size_bytes| *size_bytes);
        under.is_some_and(|(start, size_bytes)| range.end().0 <= start + size_bytes)
    }
}

impl Table {
    /// Do the sums that are kept agree with what they are of? For assertions.
    pub(super) fn are_sums_right(&self) -> bool {
        let is_slab_right = |slab: &Slab| {
            slab.live_bytes == slab.cells.values().map(|cell| cell.size_bytes).sum::<u64>()
        };
        let is_window_right = |window: &Window| {
            let mapped: u64 = window.items.values().map(|item| item.size_bytes).sum();
            let spots: u64 = window.spots.values().sum();
            (window.spot_bytes, window.item_bytes) == (spots, mapped)
        };
        self.slabs.values().all(is_slab_right) && self.windows.values().all(is_window_right)
    }
}
