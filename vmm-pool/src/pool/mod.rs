//! The pool: the one table of device memory in a process, and the calls that change it.
//!
//! Methods here serve the application's calls, made from its own threads. The table lock is held for
//! bookkeeping only, never across a driver call. A pause or resume ([`crate::vacate`]) excludes these
//! calls through its user's gate, not through the lock; the methods marked *while vacated* may run when
//! memory has been given back, and then answer from the table.
//!
//! ```text
//!   VirtualHandle --> Allocation --raw--> the driver's handle (None while vacated)
//!                        ^  |
//!                        |  +--mappings--> Mapping [start, start+size) --access--> per place
//!                        +---------------- one allocation, any number of mappings
//! ```

#![expect(unsafe_code, reason = "unmaps, releases and frees through the driver")]

mod blocks;
mod references;
mod sharing;
pub(crate) mod strays;
pub(crate) mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use references::{Held, References, StayReason};
pub use sharing::{Export, ImportSource, LostImports};
use strays::{StrayHandle, Strays};
pub use tables::Class;
use tables::{Allocation, Mapping, Origin, Presence, Tables};

use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverError,
    DriverOp, RawHandle, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::report::{ClassBytes, DeviceReport, PinnedBytes, PoolReport};
use crate::staging::{HostArena, Store};
use crate::vacate::Selection;
use crate::{AllocationId, VirtualHandle};

/// Device memory of one process, over one driver. Shared by all threads; no method blocks except on the
/// driver.
#[derive(Debug)]
pub struct Pool<D: Driver> {
    pub(crate) driver: Arc<D>,
    tables: Mutex<Tables>,
    strays: Mutex<Strays>,
    pub(crate) arena: Mutex<HostArena<D>>,
}

/// Memory of one tag, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagTotals {
    /// Own, on the devices.
    pub resident_bytes: u64,
    /// Own, given up by a pause.
    pub away_bytes: u64,
    /// Imported, and given up by a pause.
    pub imported_away_bytes: u64,
}

impl<D: Driver> Pool<D> {
    /// An empty pool. `toucher_threads` is how many threads bring new host memory in.
    pub fn new(driver: Arc<D>, toucher_threads: usize) -> Self {
        let arena = HostArena::new(Arc::clone(&driver), toucher_threads);
        let (tables, strays) = (Mutex::default(), Mutex::default());
        Self { driver, tables, strays, arena: Mutex::new(arena) }
    }

    /// Where contents of [`crate::Contents::File`] go, `/tmp` at first: from the next pause on that finds no such contents
    /// saved already. Whether that can be is looked at then, and by [`crate::check_file_dir`]. Waits for a pause or
    /// resume under way.
    pub fn set_file_dir(&self, dir: PathBuf) {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).disk.set_dir(dir);
    }

    /// The driver below.
    pub fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// The table. Poisoning is ignored: every section under the lock leaves the table consistent.
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    #[doc(alias = "cuMemCreate")]
    pub fn create(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let (_, handle) = self.create_keyed(size_bytes, prop, class)?;
        Ok(handle)
    }

    fn create_keyed(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<(usize, VirtualHandle)> {
        let device = prop.location.as_device();
        let no_id = DriverError { op: DriverOp::Create, code: DriverCode::UNKNOWN };
        let id = AllocationId::random().ok_or(no_id).about(
            || "no randomness for an allocation's identity".to_owned(),
            size_bytes,
            device,
        )?;
        let raw = self.driver.create(size_bytes, prop).about(
            || "new allocation".to_owned(),
            size_bytes,
            device,
        )?;
        Ok(self.tables().insert(Allocation {
            id,
            size_bytes,
            prop: *prop,
            origin: Origin::Own,
            class,
            generation: 0,
            references: 1,
            mappings: std::collections::BTreeSet::new(),
            tickets: std::collections::BTreeSet::new(),
            importers: std::collections::BTreeSet::new(),
            fetched: None,
            exported: None,
            raw: Some(raw),
            pinned: None,
            stays: None,
            saved: None,
            unused: Vec::new(),
            set_aside: false,
            block_size_bytes: None,
        }))
    }

    /// Gives back one reference of `handle`. *While vacated.*
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] (also when its references are used up),
    /// [`PoolError::Driver`]: the reference is gone all the same, and the memory goes at the next pause or
    /// resume.
    ///
    /// # Driver calls
    /// `cuMemRelease`, when this was the last use of resident memory.
    #[doc(alias = "cuMemRelease")]
    pub fn release(&self, handle: VirtualHandle) -> PoolResult<()> {
        let garbage = {
            let mut tables = self.tables();
            let key = tables.find(handle)?;
            let allocation = &mut tables.allocations[key];
            if allocation.references == 0 {
                return Err(PoolError::StaleHandle { handle: handle.raw() });
            }
            allocation.references -= 1;
            tables.take_garbage(key)
        };
        self.dispose(garbage)
    }

    /// Gives memory back to the driver that the table has already forgotten. What the driver keeps is
    /// filed as a stray.
    fn dispose(&self, garbage: Option<Allocation>) -> PoolResult<()> {
        let Some(allocation) = garbage else {
            return Ok(());
        };
        let (size_bytes, device) = (allocation.size_bytes, allocation.device());
        let Some(raw) = allocation.raw else {
            return Ok(());
        };
        let released = self.give_back_handle(StrayHandle { raw, size_bytes, device });
        released.about(|| allocation.describe(), size_bytes, device)
    }

    /// As [`Pool::dispose`], where what the caller asked for is done already: a refusal is only logged.
    pub(crate) fn dispose_quietly(&self, garbage: Option<Allocation>) {
        if let Err(error) = self.dispose(garbage) {
            tracing::error!(%error, "memory that nobody holds stays until the next pause");
        }
    }

    /// One more reference to whatever is mapped at `address`. *While vacated.*
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool maps nothing there.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain_at(&self, address: DeviceAddress) -> PoolResult<VirtualHandle> {
        let mut tables = self.tables();
        let key = tables.mapping_at(address).ok_or(PoolError::NotOurs)?.allocation;
        tables.allocations[key].references += 1;
        tables.handle_of(key).ok_or(PoolError::NotOurs)
    }

    /// What `handle` was created with. *While vacated.*
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub fn properties(&self, handle: VirtualHandle) -> PoolResult<AllocationProp> {
        let tables = self.tables();
        let key = tables.find(handle)?;
        Ok(tables.allocations[key].prop)
    }

    /// Maps the whole of `handle` at `range`.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemMap`.
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, range: VaRange, offset_bytes: u64, handle: VirtualHandle) -> PoolResult<()> {
        let (raw, device) = self.begin_mapping(range, offset_bytes, handle)?;
        let mapped = self.driver.map(range, raw);
        let is_recorded = self.end_mapping(range, mapped.is_ok());
        mapped.about(|| format!("mapping at {}", range.start), range.size_bytes, device)?;
        if !is_recorded {
            // SAFETY: another thread has unmapped the range since, by its record: that is what holds.
            let unmapped = unsafe { self.driver.unmap(range) };
            unmapped.about(|| format!("mapping at {}", range.start), range.size_bytes, device)?;
        }
        Ok(())
    }

    /// Records a mapping that is about to be made. From then on it keeps its memory, whatever another thread releases.
    fn begin_mapping(
        &self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<(RawHandle, Option<DeviceOrdinal>)> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        let key = tables.find(handle)?;
        // The driver sees no mapping whose memory is away, or that is being made; it is one all the same.
        let is_taken = overlapping(&tables.mappings, range).next().is_some();
        let found = &mut tables.allocations[key];
        let is_lost = found.origin == Origin::Lost;
        if found.raw.is_none() && found.set_aside && !is_lost {
            return Err(PoolError::Offloaded { tag: found.class.tag.clone() });
        }
        let allowed = match found.raw {
            _ if is_taken => Err(DriverCode::INVALID_VALUE),
            // Driver 580 answers so for any offset; see the conformance case of this name.
            _ if offset_bytes != 0 => Err(DriverCode::NOT_SUPPORTED),
            // The gate keeps this call out while memory is vacated.
            None => Err(DriverCode::NOT_READY),
            Some(raw) => Ok(raw),
        };
        let refused = |code| DriverError { op: DriverOp::Map, code };
        let device = found.device();
        let raw = allowed.map_err(refused).about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            device,
        )?;
        found.mappings.insert(range.start.0);
        let access = BTreeMap::new();
        let mapping =
            Mapping { range, allocation: key, access, presence: Presence::Absent, opened: 0 };
        tables.mappings.insert(range.start.0, mapping);
        Ok((raw, device))
    }

    /// The driver has made the mapping, or has not. False when its record is gone meanwhile.
    fn end_mapping(&self, range: VaRange, is_made: bool) -> bool {
        let mut tables = self.tables();
        if is_made {
            let mapping = tables.mappings.get_mut(&range.start.0);
            let Some(mapping) = mapping.filter(|found| found.range == range) else {
                return false;
            };
            mapping.presence = Presence::Whole;
            return true;
        }
        let removed = tables.remove_mapping(range.start.0);
        let garbage = removed.and_then(|(key, _)| tables.take_garbage(key));
        drop(tables);
        self.dispose_quietly(garbage);
        true
    }

    /// Unmaps whatever the pool has mapped inside `range`: one mapping, many, or none. *While vacated.*
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool has none there; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemUnmap` when anything in the range is resident, then `cuMemRelease` for what nobody holds
    /// any more.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(&self, range: VaRange) -> PoolResult<()> {
        let (starts, present) = {
            let tables = self.tables();
            let starts = tables.mappings_inside(range);
            let mappings = starts.iter().map(|start| &tables.mappings[start]);
            let present = mappings.filter(|found| found.is_present()).map(|found| found.range);
            let present: Vec<VaRange> = present.collect();
            (starts, present)
        };
        if starts.is_empty() {
            return Err(PoolError::NotOurs);
        }
        // The driver takes the whole range at once unless a part of it is gone (lost imports).
        let whole = if present.len() == starts.len() { vec![range] } else { present };
        for part in whole {
            // SAFETY: the application asks for its own range to go; keeping its work off it is its duty,
            // as it is without the pool.
            unsafe { self.driver.unmap(part) }.about(
                || format!("mapping at {}", part.start),
                part.size_bytes,
                None,
            )?;
        }
        let garbage: Vec<_> = {
            let mut tables = self.tables();
            starts
                .into_iter()
                .filter_map(|start| {
                    let (key, _) = tables.remove_mapping(start)?;
                    tables.take_garbage(key)
                })
                .collect()
        };
        for allocation in garbage {
            self.dispose_quietly(Some(allocation));
        }
        Ok(())
    }

    /// May `range` be given back to the driver as a reservation? Not while a vacated mapping lives in it,
    /// which the driver itself can no longer see. *While vacated.*
    pub fn address_free_is_refused(&self, range: VaRange) -> bool {
        let tables = self.tables();
        tables.mappings_inside(range).iter().any(|start| !tables.mappings[start].is_present())
    }

    /// Sets who may reach the pool's mappings in `range`.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool has none there; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemSetAccess`.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> PoolResult<()> {
        let starts = {
            let tables = self.tables();
            let mut starts = tables.mappings_inside(range);
            if starts.is_empty() {
                // A range inside one mapping changes the whole of it when it is mapped again: the driver
                // keeps rights by its own pages, we by mapping.
                starts.extend(tables.mapping_at(range.start).map(|mapping| mapping.range.start.0));
            }
            starts
        };
        if starts.is_empty() {
            return Err(PoolError::NotOurs);
        }
        let (all_present, present) = {
            let tables = self.tables();
            let found = starts.iter().filter_map(|start| tables.mappings.get(start));
            let present: Vec<VaRange> =
                found.filter(|mapping| mapping.is_present()).map(|m| m.range).collect();
            (present.len() == starts.len(), present)
        };
        // What is set aside gets its rights when it comes back.
        for part in if all_present { vec![range] } else { present } {
            self.driver.set_access(part, access).about(
                || format!("access to {}", part.start),
                part.size_bytes,
                None,
            )?;
        }
        let mut tables = self.tables();
        for start in starts {
            if let Some(mapping) = tables.mappings.get_mut(&start) {
                mapping.access.extend(access.iter().map(|desc| (desc.location, desc.flags)));
            }
        }
        Ok(())
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say
    /// something else: vacated mappings, and blocks that are larger than was asked for. *While vacated.*
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        let tables = self.tables();
        let mapping = tables.mapping_at(address)?;
        let block = tables.allocations.get(mapping.allocation)?.block_size_bytes;
        match block {
            Some(size_bytes) => Some(VaRange::new(mapping.range.start, size_bytes)),
            None if mapping.is_present() => None,
            None => Some(mapping.range),
        }
    }

    /// Is `address` in memory made by [`Pool::block_allocate`]? *While vacated.*
    pub fn is_block(&self, address: DeviceAddress) -> bool {
        let tables = self.tables();
        tables.mapping_at(address).is_some_and(|mapping| {
            tables.allocations[mapping.allocation].block_size_bytes.is_some()
        })
    }

    /// Marks every allocation mapped in `range` as one that a pause must leave in place, because a
    /// device outside the driver's view may hold its pages. Returns how many bytes that concerns.
    pub fn pin(&self, range: VaRange, reason: &'static str) -> u64 {
        let mut tables = self.tables();
        let keys: Vec<usize> =
            overlapping(&tables.mappings, range).map(|mapping| mapping.allocation).collect();
        let mut bytes = 0;
        for key in keys {
            let allocation = &mut tables.allocations[key];
            if allocation.pinned.is_none() {
                allocation.pinned = Some(reason);
                bytes += allocation.size_bytes;
            }
        }
        bytes
    }

    /// The devices that this process has memory of its own on, in ordinal order. Imports do not count:
    /// they lie on their owners' devices, and touching one of those would make a context there, which
    /// costs some 500 MiB.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        let tables = self.tables();
        let own = tables.allocations.iter().filter(|(_, found)| found.is_own());
        let devices: BTreeSet<_> = own.filter_map(|(_, found)| found.device()).collect();
        devices.into_iter().collect()
    }

    /// The devices whose work may touch memory of the pool: those with some of it, and those that were given access
    /// and have a context. To wait for a device makes a context there, so the others are left alone.
    pub fn devices_at_work(&self) -> Vec<DeviceOrdinal> {
        let guests: BTreeSet<_> = {
            let tables = self.tables();
            let places = tables.mappings.values().flat_map(|mapping| mapping.access.keys());
            places.filter_map(|place| place.as_device()).collect()
        };
        let mut devices: BTreeSet<_> = self.devices().into_iter().collect();
        let guests = guests.difference(&devices).copied();
        let has_context = |device: &DeviceOrdinal| {
            // One that cannot be asked is waited for, which shows what is the matter with it.
            self.driver.has_primary_context(*device).unwrap_or(true)
        };
        let at_work: Vec<_> = guests.filter(has_context).collect();
        devices.extend(at_work);
        devices.into_iter().collect()
    }

    /// Who holds what now. *While vacated.*
    pub fn report(&self) -> PoolReport {
        let mut classes: BTreeMap<(DeviceOrdinal, Class), ClassBytes> = BTreeMap::new();
        let mut pinned: BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes> = BTreeMap::new();
        let mut host_numa_bytes = 0;
        {
            let tables = self.tables();
            for (_, found) in &tables.allocations {
                let Some(device) = found.device() else {
                    host_numa_bytes += found.size_bytes;
                    continue;
                };
                let row = classes.entry((device, found.class.clone())).or_default();
                add_to_class(row, found);
                if let (Some(reason), true) = (reason_it_stays(found), found.raw.is_some()) {
                    add_to_pinned(pinned.entry((device, reason)).or_default(), found.size_bytes);
                }
            }
            for native in tables.natives.values() {
                let row = pinned.entry((native.device, native.reason)).or_default();
                add_to_pinned(row, native.size_bytes);
            }
        }
        for stray in &self.strays().handles {
            if let Some(device) = stray.device {
                let row = pinned.entry((device, strays::REASON)).or_default();
                add_to_pinned(row, stray.size_bytes);
            }
        }
        let mut devices: BTreeMap<DeviceOrdinal, DeviceReport> = BTreeMap::new();
        for ((device, class), mut bytes) in classes {
            class.library.clone_into(&mut bytes.library);
            bytes.tag = class.tag;
            bytes.contents = class.contents;
            devices.entry(device).or_insert_with(|| self.device_row(device)).classes.push(bytes);
        }
        for ((device, reason), mut bytes) in pinned {
            reason.clone_into(&mut bytes.reason);
            devices.entry(device).or_insert_with(|| self.device_row(device)).pinned.push(bytes);
        }
        let mut devices: Vec<_> = devices.into_values().collect();
        for device in &mut devices {
            device.classes.sort_by_key(|class| std::cmp::Reverse(class.own_bytes));
        }
        let host_arena_bytes =
            self.arena.try_lock().map(|arena| arena.held_bytes()).unwrap_or_default();
        PoolReport { devices, host_arena_bytes, file_bytes: self.file_bytes(), host_numa_bytes }
    }

    fn device_row(&self, device: DeviceOrdinal) -> DeviceReport {
        let uuid = self.uuid(device);
        DeviceReport { device, uuid, classes: Vec::new(), pinned: Vec::new() }
    }

    /// The machine-wide name of `device` in hexadecimal, or a name by ordinal where the driver has none.
    pub fn uuid(&self, device: DeviceOrdinal) -> String {
        match self.driver.device_uuid(device) {
            Ok(uuid) => format!("{:032x}", u128::from_be_bytes(uuid)),
            Err(_) => format!("ordinal-{}", device.0),
        }
    }

    /// Own memory of `selection` that is on its device and would leave in a pause, in bytes.
    pub fn resident_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(|found| found.raw.is_some() && found.is_vacatable() && selection.has(found))
    }

    /// Own memory of `selection` that a pause must leave in place, in bytes.
    pub fn pinned_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(|found| found.reason_to_stay().is_some() && selection.has(found))
    }

    /// Own memory of `selection` that is not on its device now, in bytes.
    pub fn vacated_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(|found| found.raw.is_none() && selection.has(found))
    }

    fn own_bytes(&self, choose: impl Fn(&Allocation) -> bool) -> BTreeMap<DeviceOrdinal, u64> {
        let mut bytes = BTreeMap::new();
        for (_, found) in &self.tables().allocations {
            if let (true, Some(device)) = (found.is_own() && choose(found), found.device()) {
                *bytes.entry(device).or_insert(0) += found.size_bytes;
            }
        }
        bytes
    }

    /// Memory by tag. What has none is left out.
    pub fn tag_bytes(&self) -> BTreeMap<String, TagTotals> {
        let mut bytes: BTreeMap<String, TagTotals> = BTreeMap::new();
        for (_, found) in &self.tables().allocations {
            if found.class.tag.is_empty() {
                continue;
            }
            let row = bytes.entry(found.class.tag.clone()).or_default();
            match (&found.origin, found.raw) {
                (Origin::Own, Some(_)) => row.resident_bytes += found.size_bytes,
                (Origin::Own, None) => row.away_bytes += found.size_bytes,
                (Origin::Imported { .. }, None) => row.imported_away_bytes += found.size_bytes,
                (Origin::Imported { .. }, Some(_)) | (Origin::Lost | Origin::Foreign, _) => {}
            }
        }
        bytes
    }

    /// The tag of an allocation; empty when it has none, or is gone.
    pub fn tag_of(&self, id: AllocationId) -> String {
        let tables = self.tables();
        let found = tables.by_id.get(&id).and_then(|&key| tables.allocations.get(key));
        found.map(|found| found.class.tag.clone()).unwrap_or_default()
    }

    /// Does another process hold memory of `selection` that this one owns, or a ticket for it?
    pub fn is_shared(&self, selection: &Selection) -> bool {
        let tables = self.tables();
        tables.allocations.iter().any(|(_, found)| found.is_shared() && selection.has(found))
    }

    /// Parts of own memory whose contents nobody needs: unless the process touches them first, the next pause
    /// gives them up without saving. Marks of before are void. Ranges of other memory are passed over.
    pub fn mark_unused(&self, ranges: &[VaRange]) {
        let mut tables = self.tables();
        let tables = &mut *tables;
        for (_, found) in &mut tables.allocations {
            if found.raw.is_some() {
                found.unused.clear();
            }
        }
        for range in ranges {
            for mapping in overlapping(&tables.mappings, *range) {
                let start = mapping.range.start.0;
                let begin = range.start.0.max(start) - start;
                let end = range.end().0.min(mapping.range.end().0) - start;
                let found = &mut tables.allocations[mapping.allocation];
                // Memory that is mapped twice may be in use under its other address.
                if found.is_own() && found.raw.is_some() && found.mappings.len() == 1 {
                    found.unused.push(begin..end);
                }
            }
        }
        for (_, found) in &mut tables.allocations {
            found.unused = merged(std::mem::take(&mut found.unused));
        }
    }
}

/// The mappings, by start address, of which a part lies in `range`; the last first.
fn overlapping(
    mappings: &BTreeMap<u64, Mapping>,
    range: VaRange,
) -> impl Iterator<Item = &Mapping> {
    let before_its_end = mappings.range(..range.end().0).rev().map(|(_, mapping)| mapping);
    // They do not overlap each other, so none before the first that ends too early reaches it.
    before_its_end.take_while(move |mapping| range.start < mapping.range.end())
}

/// Must a pause copy contents of this allocation to `store`?
pub(crate) fn is_saved_to(store: Store, allocation: &Allocation) -> bool {
    let is_wholly_unused = allocation.unused.first() == Some(&(0..allocation.size_bytes));
    allocation.is_own()
        && allocation.is_vacatable()
        && Store::of(allocation.class.contents) == Some(store)
        && !is_wholly_unused
}

/// The same bytes as ranges in order, none empty, none touching another.
pub(crate) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| range.start < range.end);
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn reason_it_stays(allocation: &Allocation) -> Option<&'static str> {
    match (allocation.reason_to_stay(), &allocation.origin) {
        (Some(reason), _) => Some(reason),
        (None, Origin::Foreign) => Some(
            "imported from a descriptor that is no ticket: its owner does not run under Sublet",
        ),
        (None, Origin::Own | Origin::Imported { .. } | Origin::Lost) => None,
    }
}

fn add_to_pinned(row: &mut PinnedBytes, size_bytes: u64) {
    row.bytes += size_bytes;
    row.count += 1;
}

fn add_to_class(row: &mut ClassBytes, found: &Allocation) {
    if found.is_own() {
        row.own_bytes += found.size_bytes;
        row.own_count += 1;
        if found.raw.is_some() {
            row.resident_bytes += found.size_bytes;
        }
        if found.reason_to_stay().is_some() {
            row.pinned_bytes += found.size_bytes;
        }
    } else {
        row.imported_bytes += found.size_bytes;
        row.imported_count += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::scaling::assert_not_quadratic;

    fn mappings(ranges: impl Iterator<Item = Range<u64>>) -> BTreeMap<u64, Mapping> {
        let mapping = |range: Range<u64>| Mapping {
            range: VaRange::new(DeviceAddress(range.start), range.end - range.start),
            allocation: 0,
            access: BTreeMap::new(),
            presence: Presence::Whole,
            opened: 0,
        };
        ranges.map(|range| (range.start, mapping(range))).collect()
    }

    proptest! {
        #[test]
        fn overlapping_mappings_are_found_as_by_a_look_at_each(
            sizes in prop::collection::vec((0u64..4, 1u64..6), 0..12),
            (start, size_bytes) in (0u64..60, 1u64..20),
        ) {
            let mut end = 0;
            let apart = sizes.iter().map(|(gap, size)| {
                let range = end + gap..end + gap + size;
                end = range.end;
                range
            });
            let mappings = mappings(apart);
            let range = VaRange::new(DeviceAddress(start), size_bytes);
            let found: Vec<_> = overlapping(&mappings, range).map(|found| found.range).collect();
            let each = mappings.values().map(|mapping| mapping.range).rev().filter(|mapping| {
                mapping.start < range.end() && range.start < mapping.end()
            });
            prop_assert_eq!(found, each.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_mapping_among_many_is_found_as_fast_as_among_few() {
        assert_not_quadratic(|count| {
            let mappings = mappings((0..count as u64).map(|at| 4 * at..4 * at + 3));
            move || {
                for at in 0..count as u64 {
                    let one = VaRange::new(DeviceAddress(4 * at), 4);
                    assert_eq!(overlapping(&mappings, one).count(), 1);
                }
            }
        });
    }
}
