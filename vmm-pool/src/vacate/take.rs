//! The taking half: memory created again, contents put back, imports renewed.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use super::filed::Filed;
use super::give::copied_parts;
use super::{ImportRequest, Selection, StepLog};
use crate::driver::{DeviceOrdinal, Driver, DriverCode, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::pool::Pool;
use crate::pool::strays::StrayHandle;
use crate::pool::tables::{Allocation, Origin, Presence};
use crate::staging::{CopyStreams, HostArena, Saved, Store};
use crate::{AllocationId, PeerId};

/// An allocation whose contents come back, and where its device can write them.
struct Target {
    range: VaRange,
    /// The range was made for the copy.
    is_view: bool,
    saved: Saved,
    parts: Vec<Range<u64>>,
}

impl<D: Driver> Pool<D> {
    /// Resume 1: creates all own memory of `selection` that is not resident, or none.
    ///
    /// # Errors
    /// [`PoolError::OutOfDeviceMemory`] with what is missing; [`PoolError::Driver`]. Either way what was
    /// created is released again.
    ///
    /// # Driver calls
    /// `cuMemGetInfo`, `cuMemCreate`.
    pub fn create_own(&self, selection: &Selection) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.settle()?;
        log.timed("create own", |log| {
            self.check_device_budget(log, selection)?;
            let wanted: Vec<_> = {
                let tables = self.tables();
                let vacated = tables.allocations.iter().filter(|(_, found)| {
                    found.is_own() && found.raw.is_none() && selection.has(found)
                });
                vacated.map(|(key, found)| (key, found.size_bytes, found.prop)).collect()
            };
            let mut created = Vec::new();
            for (key, size_bytes, prop) in wanted {
                let device = prop.location.as_device();
                log.call();
                match self.driver.create(size_bytes, &prop) {
                    Ok(raw) => created.push((key, raw, size_bytes, device)),
                    Err(error) => {
                        let undo = created.into_iter();
                        let undo = undo.map(|(_, raw, size_bytes, device)| StrayHandle {
                            raw,
                            size_bytes,
                            device,
                        });
                        self.release_handles(log, undo.collect());
                        if let (DriverCode::OUT_OF_MEMORY, Some(device)) = (error.code, device) {
                            return Err(self.out_of_device_memory(device, selection));
                        }
                        return Err(error).about(
                            || "allocation, again".to_owned(),
                            size_bytes,
                            device,
                        );
                    }
                }
                log.bytes += size_bytes;
            }
            let mut tables = self.tables();
            for (key, raw, _, _) in created {
                if let Some(found) = tables.allocations.get_mut(key) {
                    found.raw = Some(raw);
                }
            }
            Ok(())
        })?;
        Ok(log)
    }

    fn check_device_budget(&self, log: &mut StepLog, selection: &Selection) -> PoolResult<()> {
        for (device, needed_bytes) in self.vacated_bytes(selection) {
            let about = || "free memory".to_owned();
            log.driver_calls += 2;
            self.driver.make_current(device).about(about, 0, Some(device))?;
            let info = self.driver.memory_info().about(about, 0, Some(device))?;
            if info.free_bytes < needed_bytes {
                let free_bytes = info.free_bytes;
                return Err(PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes });
            }
        }
        Ok(())
    }

    fn out_of_device_memory(&self, device: DeviceOrdinal, selection: &Selection) -> PoolError {
        let needed_bytes = self.vacated_bytes(selection).get(&device).copied().unwrap_or(0);
        let info = self.driver.make_current(device).and_then(|()| self.driver.memory_info());
        let free_bytes = info.map_or(0, |info| info.free_bytes);
        PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes }
    }

    /// Resume 2: maps own memory at its old addresses, puts contents back, and exports what peers had
    /// imported, as far as `exports_max` descriptors go: the rest is exported when it is asked for. Saved contents stay where they are until [`Pool::commit_resume`].
    ///
    /// # Errors
    /// [`PoolError::Driver`] and [`PoolError::FileUnreadable`], with copies finished.
    ///
    /// # Driver calls
    /// `cuMemMap` and `cuMemSetAccess` in groups, `cuMemcpyHtoDAsync` behind each, and behind the last of them for
    /// what comes from the file; then `cuMemExportToShareableHandle`, `cuStreamSynchronize`.
    pub fn restore_own(&self, selection: &Selection, exports_max: usize) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        let mut arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut streams: BTreeMap<DeviceOrdinal, CopyStreams<'_, D>> = BTreeMap::new();
        let keys: Vec<(usize, Option<DeviceOrdinal>)> = {
            let tables = self.tables();
            let own = tables
                .allocations
                .iter()
                .filter(|(_, found)| found.is_own() && found.raw.is_some() && selection.has(found));
            own.map(|(key, found)| (key, found.device())).collect()
        };
        let mut from_file = Vec::new();
        let outcome = log.timed("map and queue copies", |log| {
            for &(key, device) in &keys {
                self.remount_allocation(log, key)?;
                let Some(device) = device else { continue };
                if let std::collections::btree_map::Entry::Vacant(e) = streams.entry(device) {
                    e.insert(CopyStreams::open(self, device)?);
                }
                let Some(target) = self.target_of(log, key, device)? else { continue };
                match (target.saved.store, streams.get_mut(&device)) {
                    (Store::File, _) => from_file.push((device, target)),
                    (Store::Host, Some(copies)) => {
                        self.restore_one(log, &arena, copies, &target)?;
                    }
                    (Store::Host, None) => {}
                }
            }
            Ok(())
        });
        let outcome = outcome
            .and_then(|()| self.restore_files(&mut log, &mut arena, &mut streams, &from_file));
        let outcome = outcome.and_then(|()| {
            log.timed("export", |log| self.export_again(log, selection, exports_max))
        });
        // Every device is waited for, whatever the others say: nothing may be unmapped under a copy.
        let finished = log.timed("wait for copies", |_| self.wait_for_copies(&streams));
        let outcome = outcome.and(finished);
        if outcome.is_err() && self.is_settled() {
            self.drop_views(&mut log);
        }
        outcome.map(|()| log)
    }

    /// Where saved contents of an allocation go back to; `None` when it has none.
    fn target_of(
        &self,
        log: &mut StepLog,
        key: usize,
        device: DeviceOrdinal,
    ) -> PoolResult<Option<Target>> {
        let (saved, parts, target) = {
            let tables = self.tables();
            let Some(found) = tables.allocations.get(key) else {
                return Ok(None);
            };
            let Some(saved) = found.saved else {
                return Ok(None);
            };
            let writable = found.mappings.iter().find_map(|start| {
                let mapping = tables.mappings.get(start)?;
                let rights = mapping.access.get(&found.prop.location).copied().unwrap_or(0);
                (rights == crate::driver::AccessDesc::READ_WRITE).then_some(mapping.range)
            });
            (saved, copied_parts(found), (writable, found.raw, found.size_bytes))
        };
        let (range, is_view) = match target {
            (Some(range), _, _) => (range, false),
            (None, Some(raw), size_bytes) => (self.make_view(log, raw, size_bytes, device)?, true),
            (None, None, _) => return Ok(None),
        };
        log.bytes += parts.iter().map(|part| part.end - part.start).sum::<u64>();
        Ok(Some(Target { range, is_view, saved, parts }))
    }

    fn restore_one(
        &self,
        log: &mut StepLog,
        arena: &HostArena<D>,
        copies: &mut CopyStreams<'_, D>,
        target: &Target,
    ) -> PoolResult<()> {
        copies.take()?;
        for part in &target.parts {
            log.call();
            let (range, saved) = (target.range.part(part), target.saved.part(part));
            // SAFETY: the range is mapped and writable, no application work runs before the gate opens, and
            // the arena's place is this allocation's alone.
            unsafe { arena.restore(range, saved, copies) }?;
        }
        if target.is_view {
            copies.finish_all()?;
            self.drop_view(log, target.range)?;
        }
        Ok(())
    }

    fn restore_files(
        &self,
        log: &mut StepLog,
        arena: &mut HostArena<D>,
        streams: &mut BTreeMap<DeviceOrdinal, CopyStreams<'_, D>>,
        targets: &[(DeviceOrdinal, Target)],
    ) -> PoolResult<()> {
        let filed = targets.iter().map(|(device, target)| {
            let Target { range, saved, ref parts, .. } = *target;
            Filed { device: *device, range, saved, parts }
        });
        self.restore_from_file(log, arena, streams, &filed.collect::<Vec<_>>())?;
        let views = targets.iter().filter(|(_, target)| target.is_view);
        views.into_iter().try_for_each(|(_, target)| self.drop_view(log, target.range))
    }

    fn remount_allocation(&self, log: &mut StepLog, key: usize) -> PoolResult<()> {
        let starts: Vec<u64> = {
            let tables = self.tables();
            let Some(found) = tables.allocations.get(key) else {
                return Ok(());
            };
            let absent = found.mappings.iter().filter(|start| {
                tables.mappings.get(start).is_some_and(|m| m.presence != Presence::Whole)
            });
            absent.copied().collect()
        };
        starts.into_iter().try_for_each(|start| self.remount_mapping(log, start))
    }

    /// Undo of the unmapping in [`Pool::save`]: own memory and imports are still there, with their contents; they are
    /// mapped again.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`.
    pub fn remount(&self, selection: &Selection) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.settle()?;
        log.timed("map again", |log| {
            let keys: Vec<usize> = {
                let tables = self.tables();
                let held = tables
                    .allocations
                    .iter()
                    .filter(|(_, found)| found.raw.is_some() && selection.has(found));
                held.map(|(key, _)| key).collect()
            };
            keys.into_iter().try_for_each(|key| self.remount_allocation(log, key))
        })?;
        Ok(log)
    }

    /// Descriptors for what others imported before of `selection`, in one batch.
    fn export_again(
        &self,
        log: &mut StepLog,
        selection: &Selection,
        exports_max: usize,
    ) -> PoolResult<()> {
        let wanted: Vec<_> = {
            let mut tables = self.tables();
            let mut wanted = Vec::new();
            for (key, found) in &mut tables.allocations {
                if !(found.is_shared() && selection.has(found)) {
                    continue;
                }
                // Whoever still wants it asks again, and is an importer when the resume is committed.
                if found.is_vacatable() {
                    found.fetched.get_or_insert_default();
                }
                if let (None, Some(raw)) = (&found.exported, found.raw) {
                    wanted.push((key, raw, found.size_bytes));
                }
            }
            wanted
        };
        for (key, raw, size_bytes) in wanted.into_iter().take(exports_max) {
            log.call();
            let fd = self.driver.export_fd(raw).about(
                || "export, again".to_owned(),
                size_bytes,
                None,
            )?;
            if let Some(found) = self.tables().allocations.get_mut(key) {
                found.exported = Some(fd);
            }
        }
        Ok(())
    }

    /// What must be fetched from whom before [`Pool::import_again`], in the table's order.
    pub fn import_requests(&self, selection: &Selection) -> Vec<ImportRequest> {
        let tables = self.tables();
        let mut by_owner: BTreeMap<PeerId, Vec<AllocationId>> = BTreeMap::new();
        for (_, found) in &tables.allocations {
            if let (Origin::Imported { owner }, None) = (&found.origin, found.raw)
                && selection.has(found)
            {
                by_owner.entry(*owner).or_default().push(found.id);
            }
        }
        by_owner.into_iter().map(|(owner, ids)| ImportRequest { owner, ids }).collect()
    }

    /// Resume 3: imports from `descriptors`, which are closed then. May be called any number of times before
    /// [`Pool::map_imports`].
    ///
    /// # Errors
    /// [`PoolError::Driver`]. What was imported stays, for [`Pool::drop_imports`] to undo.
    ///
    /// # Driver calls
    /// `cuMemImportFromShareableHandle` for all.
    pub fn import_batch(&self, descriptors: HashMap<AllocationId, OwnedFd>) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        let wanted: Vec<_> = {
            let tables = self.tables();
            let absent = tables.allocations.iter().filter(|(_, found)| {
                matches!(found.origin, Origin::Imported { .. })
                    && found.raw.is_none()
                    && descriptors.contains_key(&found.id)
            });
            absent.map(|(key, found)| (key, found.id, found.size_bytes)).collect()
        };
        log.timed("import", |log| {
            for &(key, id, size_bytes) in &wanted {
                let Some(fd) = descriptors.get(&id) else {
                    continue;
                };
                log.call();
                let raw = self.driver.import_fd(fd.as_fd()).about(
                    || "import, again".to_owned(),
                    size_bytes,
                    None,
                )?;
                log.bytes += size_bytes;
                if let Some(found) = self.tables().allocations.get_mut(key) {
                    found.raw = Some(raw);
                }
            }
            Ok(())
        })?;
        log.timed("close descriptors", |_| {
            drop(descriptors);
            Ok(())
        })?;
        Ok(log)
    }

    /// Resume 3, second half: maps all imports of `selection` at their old addresses.
    ///
    /// # Errors
    /// [`PoolError::MissingImport`] when one has not been imported; [`PoolError::Driver`]. What was mapped stays, for
    /// [`Pool::drop_imports`] to undo.
    ///
    /// # Driver calls
    /// `cuMemMap` and `cuMemSetAccess` for all.
    pub fn map_imports(&self, selection: &Selection) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        log.timed("map imports", |log| {
            let imported: Vec<usize> = {
                let tables = self.tables();
                let imported = tables.allocations.iter().filter(|(_, found)| {
                    matches!(found.origin, Origin::Imported { .. }) && selection.has(found)
                });
                imported.map(|(key, _)| key).collect()
            };
            imported.into_iter().try_for_each(|key| self.remount_allocation(log, key))
        })?;
        Ok(log)
    }

    /// Resume 4: the contents on the device are the contents, and saved copies are void; what is not back is set
    /// aside. Returns the descriptors that nobody will fetch any more, and the file, once it is empty: closing takes
    /// the driver some 45 us for each of the first and the filesystem longer for the other, so the caller lets the
    /// application run on first.
    #[must_use = "closing the descriptors gives back what they hold"]
    pub fn commit_resume(&self) -> Vec<OwnedFd> {
        self.forget_saved();
        self.set_aside();
        self.let_go_of_importers_own();
        let mut spare = Vec::new();
        {
            let mut arena = self.arena.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            spare.extend(self.give_disk_back(&mut arena));
        }
        let mut tables = self.tables();
        for (_, found) in &mut tables.allocations {
            if found.tickets.is_empty() {
                spare.extend(found.exported.take());
            }
        }
        spare
    }

    /// Whoever has fetched memory again is its importer, and keeps alive from now on what its owner's application
    /// freed while it was away.
    fn let_go_of_importers_own(&self) {
        let garbage: Vec<Allocation> = {
            let mut tables = self.tables();
            for (_, found) in &mut tables.allocations {
                found.stays = None;
                if let Some(fetched) = found.fetched.take() {
                    found.importers = fetched;
                }
            }
            let keys: Vec<usize> = tables.allocations.iter().map(|(key, _)| key).collect();
            keys.into_iter().filter_map(|key| tables.take_garbage(key)).collect()
        };
        for allocation in garbage {
            self.dispose_quietly(Some(allocation));
        }
    }
}
