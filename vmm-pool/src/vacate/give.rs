//! The giving half: contents to the host or the disk, imports dropped, own memory released.

#![expect(unsafe_code, reason = "unmaps and releases through the driver")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use super::filed::Filed;
use super::layout::{Layout, place_in};
use super::{Selection, StepLog, present_mappings};
use crate::driver::{DeviceOrdinal, Driver, RawHandle, VaRange};
use crate::error::{Describe, PoolResult};
use crate::pool::strays::StrayHandle;
use crate::pool::tables::{Allocation, Presence};
use crate::pool::{Pool, merged};
use crate::staging::{CopyStreams, HostArena, HostBudget, HostDemand, Pins, Saved, Store};

/// Bytes copied between two looks at a stream. At 55 GB/s that is 5 ms, in which the driver unmaps some
/// 200 blocks: copying and unmapping keep each other busy.
const GROUP_BYTES: u64 = 256 << 20;

/// Smallest unused part that is worth leaving out: below, a copy more costs as much as the bytes.
const UNUSED_BYTES_MIN: u64 = 1 << 20;

/// The parts of an allocation whose contents are saved and put back, by offset.
pub(super) fn copied_parts(allocation: &Allocation) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for unused in allocation.unused.iter().filter(|part| part.end - part.start >= UNUSED_BYTES_MIN)
    {
        parts.push(begin..unused.start);
        begin = unused.end;
    }
    parts.push(begin..allocation.size_bytes);
    parts.retain(|part| part.start < part.end);
    parts
}

#[derive(Debug)]
pub(super) struct Item {
    key: usize,
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
    key: usize,
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

/// Is it of another process of the tenant, and leaves in a pause of `selection`?
fn is_import_of(found: &Allocation, selection: &Selection) -> bool {
    !found.is_own() && found.is_vacatable() && selection.has(found)
}

impl<D: Driver> Pool<D> {
    /// Pause 3: saves what must be kept, and unmaps it and what was imported. Every handle is kept, of imports too,
    /// so that [`Pool::remount`] undoes all of it without asking anybody.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfHostMemory`] and [`crate::PoolError::OutOfDisk`] before anything is changed;
    /// [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::FileRefused`] and
    /// [`crate::PoolError::Driver`] with everything that is still mapped intact. Disk space that was taken for
    /// nothing is given back, and host memory down to what the last completed pause used: that much will be wanted
    /// again, and bringing it in is most of the time of a first pause.
    ///
    /// # Driver calls
    /// `cuMemcpyDtoHAsync` and `cuStreamSynchronize` in groups; between them `cuMemUnmap` of imports, then of what
    /// has been copied; the same for what goes to the file.
    pub fn save(&self, selection: &Selection, budget: HostBudget) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.settle()?;
        let mut arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let [kept, filed] = self.layouts(selection);
        HostArena::<D>::check_budget(arena.demand(kept.end_bytes, filed.end_bytes), budget)?;
        let mut streams: BTreeMap<DeviceOrdinal, CopyStreams<'_, D>> = BTreeMap::new();
        let reserved = log.timed("reserve disk", |_| arena.disk.reserve(&self.parts_of(&filed)));
        let planned = reserved.and_then(|()| {
            log.timed("plan", |log| {
                let groups = in_groups(self.plan_items(log, &kept, Store::Host)?);
                let to_file = self.plan_items(log, &filed, Store::File)?;
                let plan = Plan { groups, to_file };
                for item in plan.items() {
                    if let std::collections::btree_map::Entry::Vacant(e) =
                        streams.entry(item.device)
                    {
                        e.insert(CopyStreams::open(self, item.device)?);
                    }
                }
                Ok(plan)
            })
        });
        let outcome = planned.and_then(|plan| {
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
            if self.is_settled() {
                self.drop_views(&mut log);
                self.forget_saved();
                arena.give_back_unused();
            }
            drop(self.give_disk_back(&mut arena));
        }
        let plan = outcome?;
        let parts = plan.items().flat_map(|item| &item.parts);
        log.bytes = parts.map(|part| part.end - part.start).sum();
        Ok(log)
    }

    fn layouts(&self, selection: &Selection) -> [Layout; 2] {
        let tables = self.tables();
        [Store::Host, Store::File].map(|store| Layout::of(&tables, selection, store))
    }

    /// The places in the file that will be written, in order and apart.
    fn parts_of(&self, layout: &Layout) -> Vec<Range<u64>> {
        let tables = self.tables();
        let placed = layout.places.iter().filter_map(|&(key, offset_bytes)| {
            let parts = copied_parts(tables.allocations.get(key)?).into_iter();
            Some(parts.map(move |part| offset_bytes + part.start..offset_bytes + part.end))
        });
        merged(placed.flatten().collect())
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
        let pins = Pins::of(&self.devices());
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
            let ranges: Vec<VaRange> = {
                let mut tables = self.tables();
                let Some(found) = tables.allocations.get_mut(item.key) else {
                    continue;
                };
                found.saved = Some(item.saved);
                let starts: Vec<u64> = found.mappings.iter().copied().collect();
                starts
                    .iter()
                    .filter_map(|start| tables.mappings.get(start))
                    .filter(|mapping| mapping.is_present())
                    .map(|mapping| mapping.range)
                    .collect()
            };
            for range in ranges {
                self.unmount(log, range)?;
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
            let tables = self.tables();
            let kept = layout.places.iter();
            kept.filter_map(|&(key, offset_bytes)| {
                let found = tables.allocations.get(key)?;
                let device = found.device()?;
                let readable = found.mappings.iter().filter_map(|start| {
                    let mapping = tables.mappings.get(start)?;
                    let rights = mapping.access.get(&found.prop.location).copied().unwrap_or(0);
                    let readable = mapping.presence == Presence::Whole && rights != 0;
                    readable.then_some(mapping.range)
                });
                Some(Wanted {
                    key,
                    device,
                    size_bytes: found.size_bytes,
                    saved: Saved { store, offset_bytes },
                    parts: copied_parts(found),
                    readable: readable.into_iter().next(),
                    raw: found.raw,
                })
            })
            .collect()
        };
        let mut items = Vec::new();
        for Wanted { key, device, size_bytes, saved, parts, readable, raw } in wanted {
            let (source, view) = match (readable, raw) {
                (Some(range), _) => (range, false),
                (None, Some(raw)) => (self.make_view(log, raw, size_bytes, device)?, true),
                (None, None) => continue,
            };
            items.push(Item { key, device, source, saved, parts, view });
        }
        Ok(items)
    }

    /// Unmaps and releases what `selection` has of all that was imported from other processes of the tenant.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] for the first that failed; the others are dropped all the same.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`.
    pub fn drop_imports(&self, selection: &Selection) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.settle()?;
        log.timed("drop imports", |log| {
            let unmapped = self.unmap_imports(log, selection);
            let handles = self.take_raw_handles(|found| is_import_of(found, selection));
            self.release_handles(log, handles);
            unmapped
        })?;
        Ok(log)
    }

    /// Unmaps what `selection` has of imports, as many as can be; their handles are kept.
    fn unmap_imports(&self, log: &mut StepLog, selection: &Selection) -> PoolResult<()> {
        let ranges = present_mappings(&self.tables(), |found| is_import_of(found, selection));
        let mut first_error = Ok(());
        for range in ranges {
            first_error = first_error.and(self.unmount(log, range));
        }
        first_error
    }

    /// Pause 4, after which there is no way back: releases imports, unmaps what is mapped of own memory and releases
    /// it, as far as `selection` has them. A block that the driver would not let go stays in the table as resident,
    /// and is named in the notes.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] before anything was unmapped, when copies are under way that did not end.
    /// Every other trouble is a note, because what was released cannot be had back by failing.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub fn release_selected(&self, selection: &Selection) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.settle()?;
        let chosen = |found: &Allocation| found.is_vacatable() && selection.has(found);
        log.timed("unmap own", |log| {
            // None, unless a step before this one failed half-way.
            self.drop_views(log);
            let ranges = present_mappings(&self.tables(), chosen);
            for range in ranges {
                if let Err(error) = self.unmount(log, range) {
                    log.notes.push(format!("stays mapped: {error}"));
                }
            }
            Ok(())
        })?;
        log.timed("close exports", |_| {
            let mut tables = self.tables();
            for (_, found) in &mut tables.allocations {
                if chosen(found) {
                    found.exported = None;
                    found.fetched = None;
                }
            }
            Ok(())
        })?;
        log.timed("release imports", |log| {
            let handles = self.take_raw_handles(|found| is_import_of(found, selection));
            self.release_handles(log, handles);
            Ok(())
        })?;
        log.timed("release own", |log| {
            let handles = self.take_raw_handles(|found| found.is_own() && chosen(found));
            log.bytes = self.release_handles(log, handles);
            let mut arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let end_bytes = self.places_in(Store::Host).last().map_or(0, |place| place.end);
            arena.used(end_bytes, !self.places_in(Store::File).is_empty());
            Ok(())
        })?;
        for device in self.devices() {
            log.call();
            if let Err(error) = self.driver.trim_pools(device) {
                tracing::debug!(%error, "stream-ordered pools were not trimmed");
            }
        }
        Ok(log)
    }

    /// Takes the driver handles of unmapped allocations out of the table.
    fn take_raw_handles(&self, choose: impl Fn(&Allocation) -> bool) -> Vec<StrayHandle> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        let mut handles = Vec::new();
        for (_, found) in &mut tables.allocations {
            let unmapped = found.mappings.iter().all(|start| {
                tables.mappings.get(start).is_none_or(|mapping| !mapping.is_present())
            });
            if unmapped
                && choose(found)
                && let Some(raw) = found.raw.take()
            {
                let (size_bytes, device) = (found.size_bytes, found.device());
                handles.push(StrayHandle { raw, size_bytes, device });
            }
        }
        handles
    }

    /// Releases all of `handles`, whatever happens; returns the bytes released.
    pub(super) fn release_handles(&self, log: &mut StepLog, handles: Vec<StrayHandle>) -> u64 {
        let mut bytes = 0;
        for handle in handles {
            let (size_bytes, device) = (handle.size_bytes, handle.device);
            log.call();
            let released = self.give_back_handle(handle);
            match released.about(|| "release".to_owned(), size_bytes, device) {
                Ok(()) => bytes += size_bytes,
                Err(error) => log.notes.push(format!("not given back: {error}")),
            }
        }
        bytes
    }

    /// Where resident memory is concerned, the contents on the device are the contents, and host copies are
    /// void.
    pub(super) fn forget_saved(&self) {
        for (_, found) in &mut self.tables().allocations {
            if found.raw.is_some() {
                found.saved = None;
                found.unused.clear();
            }
        }
    }

    /// Where saved contents lie in `store`, in order and apart.
    fn places_in(&self, store: Store) -> Vec<Range<u64>> {
        let tables = self.tables();
        merged(tables.allocations.iter().filter_map(|(_, found)| place_in(store, found)).collect())
    }

    /// Gives disk space back that no saved contents need. The file itself, when it is empty, is for the caller to
    /// close.
    pub(super) fn give_disk_back(&self, arena: &mut HostArena<D>) -> Option<OwnedFd> {
        arena.disk.keep_only(&self.places_in(Store::File))
    }

    /// Contents that are in the file, in bytes.
    pub(crate) fn file_bytes(&self) -> u64 {
        let tables = self.tables();
        let saved = tables.allocations.iter().map(|(_, found)| found);
        let filed = saved.filter(|found| place_in(Store::File, found).is_some());
        filed.flat_map(copied_parts).map(|part| part.end - part.start).sum()
    }

    /// The process goes on, and what is not resident now it goes on without, until it is brought back by tag.
    pub fn set_aside(&self) {
        let mut tables = self.tables();
        let tables = &mut *tables;
        tables.is_frozen = false;
        for (_, found) in &mut tables.allocations {
            let mut mappings = found.mappings.iter().filter_map(|start| tables.mappings.get(start));
            found.set_aside = found.raw.is_none() || mappings.any(|mapping| !mapping.is_present());
            if found.raw.is_some() {
                found.unused.clear();
            }
        }
    }

    /// Host memory that a pause of `selection` would take now, with what is saved there already. Waits for a
    /// pause or resume under way.
    pub fn host_demand(&self, selection: &Selection) -> HostDemand {
        let [kept, filed] = self.layouts(selection);
        let arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        arena.demand(kept.end_bytes, filed.end_bytes)
    }

    /// After a pause that came to nothing: gives host memory back that it took, down to what the last
    /// completed pause used.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub fn give_back_host_memory(&self) {
        let mut arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
