//! Creates memory again, restores contents, and renews imports.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::copier::{Copier, Transfer};
use super::still::Still;
use crate::budget::Charge;
use crate::copies::Way;
use crate::deferred::Physical;
use crate::driver::{AccessDesc, AllocationProp, DeviceOrdinal, Driver, DriverCode};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};
use crate::journal::StepLog;
use crate::ledger::{Mapping, Row, Rows, Selection};
use crate::pool::{Borrowed, Pool};
use crate::store::Store;
use sublet_driver::descriptors::UninheritedFd;

/// The allocations that must be fetched again from one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportRequest {
    /// The owner.
    pub owner: PeerId,
    /// Its allocations.
    pub ids: Vec<AllocationId>,
}

/// Says whether restored memory must fit into the tenant's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It must fit: a resume by tag restores it, in a process that may have allocated other memory meanwhile.
    Asked,
    /// It need not fit: all of it was within the budget when it left. Nothing else can have used its share, unless the
    /// application wanted so.
    Owed,
}

impl Room {
    /// Returns the rule for a resume of `selection`.
    pub(super) fn of(selection: &Selection) -> Self {
        if selection.is_by_tag() { Self::Asked } else { Self::Owed }
    }
}

/// An allocation whose contents are restored, and the range where its device can write them.
struct Target {
    transfer: Transfer,
    /// True if the range was mapped for the copy.
    is_view: bool,
    store: Store,
    /// The parts that are filled with zeros before the copies.
    zeros: Vec<Range<u64>>,
}

impl Target {
    fn copied_bytes(&self) -> u64 {
        self.transfer.extents.iter().map(|extent| extent.size_bytes).sum()
    }
}

impl<D: Driver> Still<'_, D> {
    /// See [`super::Shut::create_own`].
    pub(super) fn create_own(&self, rows: &Rows, room: Room) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        log.timed("create own", |log| {
            self.check_device_budget(log, rows)?;
            let wanted: Vec<_> = {
                let ledger = self.pool.ledger();
                let away = ledger.rows.among(rows).filter(|row| row.is_own() && !row.is_resident());
                away.map(|row| (row.handle(), row.size_bytes(), *row.prop())).collect()
            };
            let mut room = self.take_room(room, &wanted)?;
            let mut created = Vec::new();
            for (row, size_bytes, prop) in wanted {
                let device = prop.location.as_device();
                log.call();
                match self.pool.driver.create(size_bytes, &prop) {
                    Ok(raw) => {
                        let room = device.and_then(|device| room.get_mut(&device));
                        let charge = room.and_then(|room| room.split(size_bytes));
                        let made = Physical::new(raw, size_bytes, device).charged(charge);
                        created.push((row, made));
                    }
                    Err(error) => {
                        self.release_all(log, created.into_iter().map(|(_, made)| made).collect());
                        if let (DriverCode::OUT_OF_MEMORY, Some(device)) = (error.code, device) {
                            return Err(self.out_of_device_memory(device, rows));
                        }
                        let again = || "allocation, again".to_owned();
                        return Err(error).about(again, size_bytes, device);
                    }
                }
                log.bytes += size_bytes;
            }
            let unwanted: Vec<Physical> = {
                let mut ledger = self.pool.ledger();
                let entered = created.into_iter().map(|(row, mut made)| {
                    made.charge_with(|bytes, device| self.pool.budget.charge_anyway(device, bytes));
                    ledger.rows.returned(row, made)
                });
                entered.flatten().collect()
            };
            self.release_all(log, unwanted);
            Ok(())
        })?;
        Ok(log)
    }

    /// Charges all of `wanted` to the tenant's budget.
    fn take_room(
        &self,
        room: Room,
        wanted: &[(VirtualHandle, u64, AllocationProp)],
    ) -> PoolResult<BTreeMap<DeviceOrdinal, Charge>> {
        let mut needed: BTreeMap<DeviceOrdinal, u64> = BTreeMap::new();
        for (_, size_bytes, prop) in wanted {
            if let Some(device) = prop.location.as_device() {
                *needed.entry(device).or_default() += size_bytes;
            }
        }
        let mut taken = BTreeMap::new();
        for (device, bytes) in needed {
            let charge = match room {
                Room::Asked => self.pool.budget.charge(Some(device), bytes)?,
                Room::Owed => self.pool.budget.charge_anyway(Some(device), bytes),
            };
            taken.extend(charge.map(|charge| (device, charge)));
        }
        Ok(taken)
    }

    fn check_device_budget(&self, log: &mut StepLog, rows: &Rows) -> PoolResult<()> {
        for (device, needed_bytes) in self.missing_bytes(rows) {
            let about = || "free memory".to_owned();
            log.driver_calls += 2;
            self.pool.driver.make_current(device).about(about, 0, Some(device))?;
            let info = self.pool.driver.memory_info().about(about, 0, Some(device))?;
            if info.free_bytes < needed_bytes {
                let free_bytes = info.free_bytes;
                return Err(PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes });
            }
        }
        Ok(())
    }

    /// Returns the own memory of `rows` that is not on its device, in bytes.
    fn missing_bytes(&self, rows: &Rows) -> BTreeMap<DeviceOrdinal, u64> {
        self.pool.ledger().rows.own_bytes(rows, |row| !row.is_resident())
    }

    fn out_of_device_memory(&self, device: DeviceOrdinal, rows: &Rows) -> PoolError {
        let needed_bytes = self.missing_bytes(rows).get(&device).copied().unwrap_or(0);
        let info =
            self.pool.driver.make_current(device).and_then(|()| self.pool.driver.memory_info());
        let free_bytes = info.map_or(0, |info| info.free_bytes);
        PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes }
    }

    /// Maps `part` at its old addresses and restores its contents. With a number of descriptors, it meanwhile exports
    /// restored memory that peers had imported, up to that number.
    pub(super) fn restore_own(
        &self,
        part: &Rows,
        exports: Option<(&Rows, usize)>,
    ) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        let mut copier = Copier::new(self.pool);
        let own: Vec<_> = {
            let ledger = self.pool.ledger();
            let own = ledger.rows.among(part).filter(|row| row.is_own() && row.is_resident());
            own.map(|row| (row.handle(), row.device())).collect()
        };
        let mut from_file = Vec::new();
        let mut queued_bytes = 0;
        let queued = log.timed("map and queue copies", |log| {
            for (row, device) in own {
                self.map_row_again(log, row)?;
                let Some(device) = device else { continue };
                let Some(target) = self.target_of(log, row, device)? else { continue };
                match target.store {
                    Store::Host => {
                        self.restore_from_memory(log, &mut copier, &target)?;
                        queued_bytes += target.copied_bytes();
                    }
                    Store::File => from_file.push(target),
                }
            }
            Ok(())
        });
        let outcome = queued
            .and_then(|()| self.restore_from_file(&mut log, &mut copier, &from_file))
            .and_then(|()| {
                let Some((exported, exports_max)) = exports else { return Ok(()) };
                log.timed("export", |log| self.export_again(log, exported, exports_max))
            });
        // Waits for every device, even if another failed: nothing may be unmapped during a copy.
        let finished = log.timed("wait for copies", |_| copier.streams.finish_or_leave());
        let outcome = outcome.and(finished);
        self.pool.copied.add(queued_bytes);
        if outcome.is_err() && self.pool.deferred.is_settled() {
            self.drop_views(&mut log);
        }
        outcome.map(|()| log)
    }

    /// Finds or makes the range where an allocation's saved contents are written. Returns `None` if it has none.
    fn target_of(
        &self,
        log: &mut StepLog,
        row: VirtualHandle,
        device: DeviceOrdinal,
    ) -> PoolResult<Option<Target>> {
        let ((store, extents, zeros), writable, raw, size_bytes) = {
            let mut ledger = self.pool.ledger();
            ledger.rows.begin_refill(row);
            let Some(found) = ledger.rows.get(row) else { return Ok(None) };
            let Some(saved) = found.saved() else { return Ok(None) };
            let writable = ledger.mappings.of(found).find(|mapping| {
                mapping.rights_of(found.prop().location) == Some(AccessDesc::READ_WRITE)
            });
            let writable = writable.map(Mapping::range);
            let (extents, zeros) = saved.split(&found.copied_parts());
            let contents = (saved.store, extents, zeros);
            (contents, writable, found.raw(), found.size_bytes())
        };
        let (range, is_view) = match (writable, raw) {
            (Some(range), _) => (range, false),
            (None, Some(raw)) => (self.make_view(log, raw, size_bytes, device)?, true),
            (None, None) => return Ok(None),
        };
        // Copies follow on the same stream, so one fill is enough. Contents of the file use another stream.
        let zeros = match (zeros.as_slice(), store) {
            ([first, .., last], Store::Host) => {
                let all = Range { start: first.start, end: last.end };
                vec![all]
            }
            _ => zeros,
        };
        let transfer = Transfer { device, range, extents };
        let target = Target { transfer, is_view, store, zeros };
        log.bytes += target.copied_bytes();
        Ok(Some(target))
    }

    /// Fills parts with zeros and starts copies from the arena.
    fn restore_from_memory(
        &self,
        log: &mut StepLog,
        copier: &mut Copier<'_, D>,
        target: &Target,
    ) -> PoolResult<()> {
        let transfer = &target.transfer;
        copier.streams.of(transfer.device)?.take()?;
        // SAFETY: the target is mapped and writable, and stays so until its stream is done; no application work runs
        // before the gate opens.
        unsafe { copier.start_zeros(log, transfer, &target.zeros) }?;
        // SAFETY: as above; its places are its own.
        unsafe { copier.start(log, Way::In, transfer) }?;
        if target.is_view {
            copier.streams.of(transfer.device)?.finish_all()?;
            self.drop_view(log, transfer.range)?;
        }
        Ok(())
    }

    /// Fills parts of all `targets` with zeros, and then reads the file.
    fn restore_from_file(
        &self,
        log: &mut StepLog,
        copier: &mut Copier<'_, D>,
        targets: &[Target],
    ) -> PoolResult<()> {
        if targets.is_empty() {
            return Ok(());
        }
        let filed: Vec<_> = targets.iter().map(|target| &target.transfer).collect();
        for target in targets {
            copier.streams.of(target.transfer.device)?.take()?;
            // SAFETY: as above, until zeros are waited for.
            unsafe { copier.start_zeros(log, &target.transfer, &target.zeros) }?;
        }
        for transfer in &filed {
            copier.streams.of(transfer.device)?.finish_all()?;
        }
        // SAFETY: as above, until all of the file is read.
        unsafe { copier.read_file(log, &filed) }?;
        let mut views = targets.iter().filter(|target| target.is_view);
        views.try_for_each(|target| self.drop_view(log, target.transfer.range))
    }

    /// Makes descriptors for those of `rows` that others imported before, in one batch.
    pub(super) fn export_again(
        &self,
        log: &mut StepLog,
        rows: &Rows,
        exports_max: usize,
    ) -> PoolResult<()> {
        let wanted = self.pool.ledger().rows.begin_fetching(rows);
        for (id, size_bytes) in wanted.into_iter().take(exports_max) {
            let Some(raw) = self.pool.ledger().rows.by_id(id).and_then(Row::raw) else { continue };
            log.call();
            let fd = self.pool.driver.export_fd(raw).about(
                || "export, again".to_owned(),
                size_bytes,
                None,
            )?;
            let unwanted = self.pool.ledger().rows.keep_export(id, fd);
            drop(unwanted);
        }
        Ok(())
    }

    /// See [`super::Returning::import_batch`].
    pub(super) fn import_batch(
        &self,
        mut descriptors: HashMap<AllocationId, Borrowed>,
    ) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        let wanted: Vec<_> = {
            let ledger = self.pool.ledger();
            let absent = ledger.rows.iter().filter(|row| {
                row.owner().is_some() && !row.is_resident() && descriptors.contains_key(&row.id())
            });
            absent.map(|row| (row.handle(), row.id(), row.size_bytes(), row.device())).collect()
        };
        // Several rows may be of one allocation. Each has its lease.
        let mut leases = HashMap::new();
        log.timed("import", |log| {
            for &(row, id, size_bytes, device) in &wanted {
                let Some(Borrowed { fd, lease }) = descriptors.get_mut(&id) else {
                    continue;
                };
                if let Some(lease) = lease.take() {
                    leases.insert(id, Arc::new(UninheritedFd::from(lease)));
                }
                log.call();
                let raw = self.pool.driver.import_fd(fd.as_fd()).about(
                    || "import, again".to_owned(),
                    size_bytes,
                    None,
                )?;
                log.bytes += size_bytes;
                let made = Physical::new(raw, size_bytes, device).under(leases.get(&id).cloned());
                let unwanted = self.pool.ledger().rows.returned(row, made);
                self.release_all(log, unwanted.into_iter().collect());
            }
            Ok(())
        })?;
        log.timed("close descriptors", |_| {
            drop(descriptors);
            Ok(())
        })?;
        Ok(log)
    }

    /// See [`super::Returning::map_imports`].
    pub(super) fn map_imports(&self, rows: &Rows) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        log.timed("map imports", |log| {
            self.map_rows_again(log, rows, |row| row.owner().is_some())
        })?;
        Ok(log)
    }
}

impl<D: Driver> Pool<D> {
    /// Lists the allocations that must be fetched to complete `rows`, by owner, in the ledger's order.
    pub(super) fn import_requests(&self, rows: &Rows) -> Vec<ImportRequest> {
        let ledger = self.ledger();
        let mut by_owner: BTreeMap<PeerId, Vec<AllocationId>> = BTreeMap::new();
        for row in ledger.rows.among(rows).filter(|row| !row.is_resident()) {
            if let Some(owner) = row.owner() {
                by_owner.entry(owner).or_default().push(row.id());
            }
        }
        let requests = by_owner.into_iter();
        requests.map(|(owner, ids)| ImportRequest { owner, ids }).collect()
    }
}
