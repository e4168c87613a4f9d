//! Saving: contents to the host or the disk, behind which everything is unmapped.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::os::fd::OwnedFd;

use super::file::Filed;
use super::still::Still;
use crate::VirtualHandle;
use crate::copies::CopyStreams;
use crate::driver::{DeviceOrdinal, Driver, RawHandle, VaRange};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::ledger::{Layout, Mapping, Presence, Selection};
use crate::pool::Pool;
use crate::store::{HostArena, HostBudget, HostDemand, Pins, Saved, Store};

/// Bytes copied between two looks at a stream. At 55 GB/s that is 5 ms, in which the driver unmaps some
/// 200 blocks: copying and unmapping keep each other busy.
const GROUP_BYTES: u64 = 256 << 20;

#[derive(Debug)]
pub(super) struct Item {
    row: VirtualHandle,
    device: DeviceOrdinal,
    /// Where the device reads it: one of its own mappings, or a view made for the copy.
    source: VaRange,
    saved: Saved,
    /// Parts of `source` that are copied, by offset.
    parts: Vec<Range<u64>>,
    view: bool,
}

impl Item {
    /// Where its place in the arena ends.
    fn end_bytes(&self) -> u64 {
        self.saved.offset_bytes + self.source.size_bytes
    }

    fn filed(&self) -> Filed<'_> {
        Filed { device: self.device, range: self.source, saved: self.saved, parts: &self.parts }
    }
}

/// An allocation to save.
struct Wanted {
    row: VirtualHandle,
    device: DeviceOrdinal,
    size_bytes: u64,
    saved: Saved,
    parts: Vec<Range<u64>>,
    /// A range that its device can read.
    readable: Option<VaRange>,
    raw: Option<RawHandle>,
}

/// What a pause saves, by where it goes.
#[derive(Debug, Default)]
struct Plan {
    groups: Vec<Group>,
    to_file: Vec<Item>,
}

impl Plan {
    fn items(&self) -> impl Iterator<Item = &Item> {
        self.groups.iter().flat_map(|group| &group.items).chain(&self.to_file)
    }
}

/// Neighbours on one device that are copied together.
#[derive(Debug)]
struct Group {
    device: DeviceOrdinal,
    items: Vec<Item>,
}

/// Neighbours of one device in groups, devices in turn.
fn in_groups(items: Vec<Item>) -> Vec<Group> {
    let mut by_device: BTreeMap<DeviceOrdinal, (Vec<Group>, u64)> = BTreeMap::new();
    for item in items {
        let (device, size_bytes) = (item.device, item.source.size_bytes);
        let (groups, last_bytes) = by_device.entry(device).or_default();
        match groups.last_mut() {
            Some(group) if *last_bytes < GROUP_BYTES => {
                group.items.push(item);
                *last_bytes += size_bytes;
            }
            _ => {
                groups.push(Group { device, items: vec![item] });
                *last_bytes = size_bytes;
            }
        }
    }
    let mut queues: Vec<_> =
        by_device.into_values().map(|(groups, _)| groups.into_iter()).collect();
    let mut groups = Vec::new();
    while !queues.is_empty() {
        queues.retain_mut(|queue| queue.next().map(|group| groups.push(group)).is_some());
    }
    groups
}

impl<D: Driver> Still<'_, D> {
    /// See [`super::Quiesced::save`].
    pub(super) fn save(&self, selection: &Selection, budget: HostBudget) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        let mut arena = self.pool.arena();
        let [kept, filed] = self.pool.layouts(selection);
        HostArena::<D>::check_budget(arena.demand(kept.end_bytes, filed.end_bytes), budget)?;
        let mut streams: BTreeMap<DeviceOrdinal, CopyStreams<'_, D>> = BTreeMap::new();
        let reserved = log.timed("reserve disk", |_| {
            let parts = self.pool.ledger().parts_of(&filed);
            arena.disk.reserve(&parts)
        });
        let planned = reserved.and_then(|()| {
            log.timed("plan", |log| {
                let groups = in_groups(self.plan_items(log, &kept, Store::Host)?);
                let to_file = self.plan_items(log, &filed, Store::File)?;
                let plan = Plan { groups, to_file };
                for item in plan.items() {
                    if let Entry::Vacant(vacant) = streams.entry(item.device) {
                        vacant.insert(CopyStreams::open(&self.pool.deferred, item.device)?);
                    }
                }
                Ok(plan)
            })
        });
        let outcome = planned.and_then(|plan| {
            self.pool.ledger().forget_copies(&kept);
            arena.begin_growth(kept.end_bytes);
            let kept = self.run_groups(&mut log, selection, &mut arena, &mut streams, &plan.groups);
            arena.end_growth();
            kept.and_then(|()| {
                self.run_to_file(&mut log, &mut arena, &mut streams, &plan.to_file)
            })?;
            Ok(plan)
        });
        if outcome.is_err() {
            // Copies may still be reading; nothing may be unmapped or reused before they are done.
            if let Err(error) = self.wait_for_copies(&streams) {
                tracing::error!(%error, "copies did not finish after a failed save");
            }
            if self.pool.deferred.is_settled() {
                self.drop_views(&mut log);
                self.pool.ledger().void_copies();
                arena.give_back_unused();
            }
            drop(self.pool.give_disk_back(&mut arena));
        }
        let plan = outcome?;
        let parts = plan.items().flat_map(|item| &item.parts);
        log.bytes = parts.map(|part| part.end - part.start).sum();
        Ok(log)
    }

    /// Writes to the file what goes there, then unmaps it.
    fn run_to_file(
        &self,
        log: &mut StepLog,
        arena: &mut HostArena<D>,
        streams: &mut BTreeMap<DeviceOrdinal, CopyStreams<'_, D>>,
        items: &[Item],
    ) -> PoolResult<()> {
        if items.is_empty() {
            return Ok(());
        }
        let filed: Vec<_> = items.iter().map(Item::filed).collect();
        self.save_to_file(log, arena, streams, &filed)?;
        log.timed("unmap saved", |log| self.retire(log, items))
    }

    fn run_groups(
        &self,
        log: &mut StepLog,
        selection: &Selection,
        arena: &mut HostArena<D>,
        streams: &mut BTreeMap<DeviceOrdinal, CopyStreams<'_, D>>,
        groups: &[Group],
    ) -> PoolResult<()> {
        // Two groups may be in flight on a device; when the third is queued the first is done.
        let mut in_flight: BTreeMap<DeviceOrdinal, Vec<&Group>> = BTreeMap::new();
        let mut imports_unmapped = false;
        // Also where this pause is of one of several devices only: the memory is there for the next one too.
        let pins = Pins::of(&self.pool.devices());
        if !groups.is_empty() {
            arena.pin_again(log, pins)?;
        }
        for group in groups {
            let Some(copies) = streams.get_mut(&group.device) else {
                continue;
            };
            log.timed("wait for copies", |_| copies.take_idle())?;
            let flying = in_flight.entry(group.device).or_default();
            let done = if flying.len() == 2 { Some(flying.remove(0)) } else { None };
            flying.push(group);
            let end_bytes = group.items.iter().map(Item::end_bytes).max().unwrap_or(0);
            arena.grow_to(log, end_bytes, pins)?;
            log.timed("queue copies", |log| {
                for item in &group.items {
                    for part in &item.parts {
                        log.call();
                        let (source, saved) = (item.source.part(part), item.saved.part(part));
                        // SAFETY: the source stays mapped until its group is retired below, after its
                        // stream is done; the arena's place is this item's alone.
                        unsafe { arena.save(source, saved, copies) }?;
                    }
                }
                Ok(())
            })?;
            if !imports_unmapped {
                log.timed("unmap imports", |log| self.unmap_imports(log, selection))?;
                imports_unmapped = true;
            }
            if let Some(done) = done {
                log.timed("unmap saved", |log| self.retire(log, &done.items))?;
            }
        }
        if !imports_unmapped {
            log.timed("unmap imports", |log| self.unmap_imports(log, selection))?;
        }
        for (device, flying) in in_flight {
            if let Some(copies) = streams.get(&device) {
                log.timed("wait for copies", |_| copies.finish_all())?;
            }
            for group in flying {
                log.timed("unmap saved", |log| self.retire(log, &group.items))?;
            }
        }
        Ok(())
    }

    /// Records that contents are saved, and unmaps every mapping of them.
    fn retire(&self, log: &mut StepLog, items: &[Item]) -> PoolResult<()> {
        for item in items {
            if item.view {
                self.drop_view(log, item.source)?;
            }
            let ranges = self.pool.ledger().saved(item.row, item.saved);
            for range in ranges {
                self.unmap(log, range)?;
            }
        }
        Ok(())
    }

    /// All that `layout` has a place for in `store`, each where its device can read it.
    fn plan_items(
        &self,
        log: &mut StepLog,
        layout: &Layout,
        store: Store,
    ) -> PoolResult<Vec<Item>> {
        let wanted: Vec<Wanted> = {
            let ledger = self.pool.ledger();
            let places = layout.places.iter().filter_map(|&(row, offset_bytes)| {
                let found = ledger.row(row)?;
                let readable = ledger.mappings_of(found).find(|mapping| {
                    let rights = mapping.rights_of(found.prop().location).unwrap_or(0);
                    mapping.presence() == Presence::Whole && rights != 0
                });
                Some(Wanted {
                    row,
                    device: found.device()?,
                    size_bytes: found.size_bytes(),
                    saved: Saved { store, offset_bytes },
                    parts: found.copied_parts(),
                    readable: readable.map(Mapping::range),
                    raw: found.raw(),
                })
            });
            places.collect()
        };
        let mut items = Vec::new();
        for Wanted { row, device, size_bytes, saved, parts, readable, raw } in wanted {
            let (source, view) = match (readable, raw) {
                (Some(range), _) => (range, false),
                (None, Some(raw)) => (self.make_view(log, raw, size_bytes, device)?, true),
                (None, None) => continue,
            };
            items.push(Item { row, device, source, saved, parts, view });
        }
        Ok(items)
    }
}

impl<D: Driver> Pool<D> {
    fn layouts(&self, selection: &Selection) -> [Layout; 2] {
        let ledger = self.ledger();
        [Store::Host, Store::File].map(|store| Layout::of(&ledger, selection, store))
    }

    /// Gives disk space back that no saved contents need. The file itself, when it is empty, is for the caller to
    /// close.
    pub(super) fn give_disk_back(&self, arena: &mut HostArena<D>) -> Option<OwnedFd> {
        let places = self.ledger().places_in(Store::File);
        arena.disk.keep_only(&places)
    }

    /// Host memory that a pause of `selection` would take now, with what is saved there already. Waits for a
    /// pause or resume under way.
    pub fn host_demand(&self, selection: &Selection) -> HostDemand {
        let [kept, filed] = self.layouts(selection);
        self.arena().demand(kept.end_bytes, filed.end_bytes)
    }

    /// After a resume: gives host memory back that holds no contents and no copies for readers.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub(super) fn give_back_idle_host_memory(&self) {
        let mut arena = self.arena();
        let end_bytes = self.ledger().places_in(Store::Host).last().map_or(0, |place| place.end);
        let current = self.devices().first().map(|&device| self.driver.make_current(device));
        let shrunk = current.map(|current| {
            current.map_err(|code| code.to_string())?;
            arena.shrink_to(end_bytes).map_err(|error| error.to_string())
        });
        if let Some(Err(error)) = shrunk {
            tracing::error!(%error, "host memory stays for the next pause");
        }
    }

    /// After a pause that came to nothing: gives host memory back that it took, down to what the last
    /// completed pause used.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub(super) fn give_back_host_memory(&self) {
        let mut arena = self.arena();
        let current = self.devices().first().map(|&device| self.driver.make_current(device));
        match current {
            Some(Ok(())) => arena.give_back_unused(),
            Some(Err(error)) => tracing::error!(%error, "host memory stays for the next pause"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
