//! What a window holds, sums that are kept of it, and rights: the driver has those of a whole slab in a window, and each cell there is said
//! to have what callers have set on it.

use std::collections::BTreeMap;

use super::{AccessPlan, Item, Part, Slab, Table, Under, Window, item_under};
use crate::VirtualHandle;
use crate::driver::{AccessDesc, DeviceAddress, DriverCode, Location, VaRange};

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

impl Table {
    /// What rights on `range`, which meets a window, take. A device keeps what it has of the slab, whatever is set on a cell.
    pub(crate) fn plan_access(&mut self, range: VaRange, access: &[AccessDesc]) -> AccessPlan {
        let wrong = AccessPlan::Refused(DriverCode::INVALID_VALUE);
        let Some(window) = self.window_at(range.start) else {
            return wrong;
        };
        let (mut at, mut are_cells) = (range.start.0, true);
        while at < range.end().0 {
            let under = item_under(&window.items, at, |item| item.size_bytes);
            let Some((start, item)) = under else {
                return wrong;
            };
            are_cells &= item.cell.is_some();
            at = start + item.size_bytes;
        }
        let Under::Slab(key, base) = window.under else {
            return AccessPlan::Rows;
        };
        let is_right = |desc: &AccessDesc| {
            matches!(desc.flags, 0 | 1 | 3) && desc.location.as_device().is_some()
        };
        if !are_cells || access.is_empty() || !access.iter().all(is_right) {
            return wrong;
        }
        let held = |desc: &AccessDesc| window.rights.get(&desc.location).copied().unwrap_or(0);
        if access.iter().all(|desc| held(desc) & desc.flags == desc.flags) {
            self.record(range, access);
            return AccessPlan::Done;
        }
        let Some(slab) = self.slabs.get(&key) else {
            return wrong;
        };
        let mounted = VaRange::new(DeviceAddress(base), slab.new.size_bytes);
        AccessPlan::Grant { window: window.range.start.0, mounted }
    }

    /// What the driver is to set, so that `access` is there and nothing that was is lost.
    pub(crate) fn wider(&self, window: u64, access: &[AccessDesc]) -> Vec<AccessDesc> {
        let held = self.windows.get(&window).map(|window| &window.rights);
        let wider = access.iter().map(|desc| {
            let held = held.and_then(|held| held.get(&desc.location)).copied().unwrap_or(0);
            AccessDesc { flags: held | desc.flags, ..*desc }
        });
        wider.collect()
    }

    /// The driver has set [`Table::wider`] rights on the window, for `access` to `range`.
    pub(crate) fn granted(&mut self, window: u64, range: VaRange, access: &[AccessDesc]) {
        let wider = self.wider(window, access);
        if let Some(window) = self.windows.get_mut(&window) {
            window.rights.extend(wider.iter().map(|desc| (desc.location, desc.flags)));
        }
        self.record(range, access);
    }

    fn record(&mut self, range: VaRange, access: &[AccessDesc]) {
        let Some(window) = self.window_at(range.start).map(|window| window.range.start.0) else {
            return;
        };
        let Some(window) = self.windows.get_mut(&window) else { return };
        let met = window.items.range_mut(..range.end().0);
        for (_, item) in met.filter(|(start, item)| *start + item.size_bytes > range.start.0) {
            item.rights.extend(access.iter().map(|desc| (desc.location, desc.flags)));
        }
    }

    /// What callers have set on the cell that is mapped at `address`; `None` where none is.
    pub(crate) fn rights_at(&self, address: DeviceAddress) -> Option<Vec<AccessDesc>> {
        let item = self.cell_item_at(address)?;
        let rights = item.rights.iter().map(|(&location, &flags)| AccessDesc { location, flags });
        Some(rights.collect())
    }

    fn cell_item_at(&self, address: DeviceAddress) -> Option<&super::Item> {
        let window = self.window_at(address)?;
        let (_, item) = item_under(&window.items, address.0, |item| item.size_bytes)?;
        item.cell.is_some().then_some(item)
    }

    /// The right of `place` at `address`; `None` where no cell is mapped.
    pub(crate) fn right_at(&self, address: DeviceAddress, place: Location) -> Option<i32> {
        let item = self.cell_item_at(address)?;
        Some(item.rights.get(&place).copied().unwrap_or(0))
    }
}
