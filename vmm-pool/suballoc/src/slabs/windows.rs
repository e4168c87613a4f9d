//! Windows: the addresses of slabs, and of rooms for them, the parts that callers were given, and the mappings there.

use std::collections::BTreeMap;

use vmm_pool::driver::{AccessDesc, DeviceAddress, VaRange};
use vmm_pool::{FrontView, VirtualHandle};

use super::{MapPlan, Occupant, Under, Window, item_under};

/// See the head of this module. Windows by start address; none overlaps another.
#[derive(Debug, Default)]
pub(crate) struct Windows(BTreeMap<u64, Window>);

impl Windows {
    pub(super) fn insert(&mut self, window: Window) {
        self.0.insert(window.range.start.0, window);
    }

    pub(super) fn remove(&mut self, start: u64) -> Option<VaRange> {
        self.0.remove(&start).map(|window| window.range)
    }

    pub(super) fn get(&self, start: u64) -> Option<&Window> {
        self.0.get(&start)
    }

    pub(super) fn get_mut(&mut self, start: u64) -> Option<&mut Window> {
        self.0.get_mut(&start)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Window> {
        self.0.values()
    }

    pub(super) fn window_at(&self, address: DeviceAddress) -> Option<&Window> {
        let (_, window) = self.0.range(..=address.0).next_back()?;
        window.range.contains_address(address).then_some(window)
    }

    fn window_at_mut(&mut self, address: DeviceAddress) -> Option<&mut Window> {
        let (_, window) = self.0.range_mut(..=address.0).next_back()?;
        window.range.contains_address(address).then_some(window)
    }

    /// Records that a caller has mapped a cell, or an allocation that stands alone, in `range` of a window.
    pub(crate) fn put_item(&mut self, range: VaRange, cell: Option<VirtualHandle>) {
        if let Some(window) = self.window_at_mut(range.start) {
            window.put_item(range, cell);
        }
    }

    /// Removes the mapping at `at` of `cell`, or of an allocation of its own. Returns whether it was there.
    pub(super) fn take_item(&mut self, at: DeviceAddress, cell: Option<VirtualHandle>) -> bool {
        let window = self.window_at_mut(at);
        let is_there =
            |window: &&mut Window| window.items.get(&at.0).is_some_and(|item| item.cell == cell);
        window.filter(is_there).map(|window| window.take_item(at)).is_some()
    }

    /// Does `range` meet a window?
    pub(crate) fn meets_window(&self, range: VaRange) -> bool {
        let before_its_end = self.0.range(..range.end().0).next_back();
        before_its_end.is_some_and(|(_, window)| range.start < window.range.end())
    }

    /// Returns the occupant that answers for `address`.
    pub(crate) fn place(&self, address: DeviceAddress) -> Occupant {
        let Some(window) = self.window_at(address) else {
            return Occupant::Elsewhere;
        };
        let under = item_under(&window.items, address.0, |item| item.size_bytes);
        let Some((start, item)) = under else {
            return Occupant::Nothing;
        };
        let range = VaRange::new(DeviceAddress(start), item.size_bytes);
        item.cell.map_or(Occupant::Alone, |handle| Occupant::Cell { range, handle })
    }

    /// Returns the range that a caller was given and that holds `address`.
    pub(crate) fn spot_at(&self, address: DeviceAddress) -> Option<VaRange> {
        let window = self.window_at(address)?;
        let (start, size_bytes) = item_under(&window.spots, address.0, |size_bytes| *size_bytes)?;
        Some(VaRange::new(DeviceAddress(start), *size_bytes))
    }

    /// Takes the slab of this size out of the window, which is [`Under::Changing`] until the driver has unmapped it.
    pub(super) fn dismount(&mut self, start: u64, size_bytes: u64) -> Option<(u64, VaRange)> {
        let window = self.get_mut(start)?;
        let Under::Slab(_, base) = window.under else { return None };
        window.under = Under::Changing;
        window.rights.clear();
        Some((start, VaRange::new(DeviceAddress(base), size_bytes)))
    }

    /// Records that the driver has nothing mapped in the window any more. Returns its addresses if nobody has any of them.
    pub(crate) fn dismounted(&mut self, start: u64) -> Option<VaRange> {
        let window = self.get_mut(start)?;
        window.under = Under::Nothing;
        if !window.spots.is_empty() {
            return None;
        }
        self.remove(start)
    }

    /// Has a caller something mapped in `range`, which meets a window?
    pub(crate) fn is_taken(&self, range: VaRange) -> bool {
        let near = self.0.range(..range.end().0).next_back();
        near.is_some_and(|(_, window)| window.has_item_in(range))
    }

    /// Returns the window that has `range` in a spot, if nothing is mapped there.
    pub(super) fn vacant_window(&self, range: VaRange) -> Result<&Window, MapPlan> {
        let window = self.window_at(range.start).filter(|window| window.is_of_spot(range));
        let vacant = window.filter(|window| !window.has_item_in(range));
        vacant.ok_or(MapPlan::Wrong)
    }

    pub(super) fn set_under(&mut self, window: u64, under: Under) {
        if let Some(window) = self.get_mut(window) {
            window.under = under;
        }
    }

    /// Returns the rights that the driver is to set: `access`, without loss of a right that its places have already.
    pub(crate) fn wider(&self, window: u64, access: &[AccessDesc]) -> Vec<AccessDesc> {
        let held = self.get(window).map(|window| &window.rights);
        let wider = access.iter().map(|desc| {
            let held = held.and_then(|held| held.get(&desc.location)).copied().unwrap_or(0);
            AccessDesc { flags: held | desc.flags, ..*desc }
        });
        wider.collect()
    }

    /// Records that the driver has set [`Windows::wider`] rights on the window, for `access` to `range`.
    pub(crate) fn granted(&mut self, window: u64, range: VaRange, access: &[AccessDesc]) {
        let wider = self.wider(window, access);
        if let Some(window) = self.get_mut(window) {
            window.rights.extend(wider.iter().map(|desc| (desc.location, desc.flags)));
        }
        self.record(range, access);
    }

    pub(super) fn record(&mut self, range: VaRange, access: &[AccessDesc]) {
        let Some(window) = self.window_at_mut(range.start) else { return };
        let met = window.items.range_mut(..range.end().0);
        for (_, item) in met.filter(|(start, item)| *start + item.size_bytes > range.start.0) {
            item.rights.extend(access.iter().map(|desc| (desc.location, desc.flags)));
        }
    }

    /// Returns what a caller sees at `address`, if a window is there.
    pub(crate) fn seen_at(&self, address: DeviceAddress) -> Option<FrontView> {
        let window = self.window_at(address)?;
        let reserved = self.spot_at(address);
        let item = item_under(&window.items, address.0, |item| item.size_bytes);
        // If a caller has a whole window with nothing in it, the driver sees the same.
        let is_bare = reserved.is_some() && window.under == Under::Nothing;
        let part = item.and_then(|(start, item)| {
            let rights = item.rights.iter();
            let access = rights.map(|(&location, &flags)| AccessDesc { location, flags });
            Some((
                VaRange::new(DeviceAddress(start), item.size_bytes),
                item.cell?,
                access.collect(),
            ))
        });
        Some(FrontView { part, reserved, is_nobodys: item.is_none() && !is_bare })
    }
}
