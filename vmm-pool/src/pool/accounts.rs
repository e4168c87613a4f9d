//! Reports of the memory that the pool holds, for people and for coordinators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Pool;
use crate::budget::Account;
use crate::deferred;
use crate::driver::{DeviceOrdinal, Driver, Location};
use crate::error::{PoolError, PoolResult};
use crate::ledger::{Class, Mapping, Origin, Row, Selection, Unfreezable};
use crate::report::{
    ClassBytes, CopiedBytes, DeviceReport, NATIVE_BYTES_MIN, PinnedBytes, PoolReport,
};
use crate::store::{Saved, Store};

/// The memory that a pause leaves in place, by device and cause.
#[derive(Debug, Default)]
pub(crate) struct Reasons(BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes>);

impl Reasons {
    /// Adds `bytes` that stay on `device` for `reason`.
    pub(crate) fn add(&mut self, device: DeviceOrdinal, reason: &'static str, bytes: u64) {
        let stay = PinnedBytes { reason: reason.to_owned(), bytes, count: 1 };
        self.0.entry((device, reason)).and_modify(|all| all.add(&stay)).or_insert(stay);
    }

    /// Returns all entries, in order.
    pub(crate) fn all(self) -> impl Iterator<Item = (DeviceOrdinal, PinnedBytes)> {
        self.0.into_iter().map(|((device, _), stay)| (device, stay))
    }
}

impl<D: Driver> Pool<D> {
    /// Returns the devices with this process's own memory, also memory that was left to the driver.
    pub(crate) fn devices_with_any(&self) -> BTreeSet<DeviceOrdinal> {
        let ledger = self.ledger();
        ledger.rows.devices().into_iter().chain(self.natives.devices()).collect()
    }

    /// Returns the devices whose work may touch memory of the pool: those with some of it, and those that have access
    /// rights and a context. Other devices are not used: waiting for a device makes a context there.
    pub fn devices_at_work(&self) -> Vec<DeviceOrdinal> {
        let (mut devices, accessors) = {
            let ledger = self.ledger();
            let accessors = ledger.mappings.all().flat_map(Mapping::accessors);
            let accessors: BTreeSet<_> = accessors.filter_map(Location::as_device).collect();
            (ledger.rows.devices(), accessors)
        };
        let guests: BTreeSet<_> = accessors.difference(&devices).copied().collect();
        let has_context = |device: &DeviceOrdinal| {
            // If the query fails, the device is waited for. The wait then reports its problem.
            self.driver.has_primary_context(*device).unwrap_or(true)
        };
        devices.extend(guests.into_iter().filter(has_context));
        devices.into_iter().collect()
    }

    /// Returns the memory that the driver could not restore with the contexts of this process. *While offloaded.*
    pub fn unfreezable(&self) -> Unfreezable {
        let is_away = self.gate().is_offloaded();
        let host_bytes = self.deferred.host_bytes();
        let mut bytes = Unfreezable { host_bytes, ..Unfreezable::default() };
        for row in self.ledger().rows.iter() {
            let stays =
                *row.origin() == Origin::Foreign || (is_away && !row.is_own() && row.is_resident());
            if row.is_of_host_file() {
                // Host files are host memory alone.
            } else if row.is_host() {
                bytes.host_bytes += row.size_bytes();
            } else if stays {
                bytes.imported_bytes += row.size_bytes();
            } else if row.is_pinned() || row.is_left_lent() {
                bytes.registered_bytes += row.size_bytes();
            }
        }
        bytes
    }

    /// Returns the progress of the copies of a pause or resume under way. Takes no lock. *While offloaded.*
    pub fn copied_bytes(&self) -> CopiedBytes {
        self.copied.read()
    }

    /// Reports all memory that is held now. *While offloaded.*
    pub fn report(&self) -> PoolReport {
        let mut report = PoolReport::default();
        let mut reasons = Reasons::default();
        let mut classes: BTreeMap<(DeviceOrdinal, Class), ClassBytes> = BTreeMap::new();
        for row in self.ledger().rows.iter() {
            let stored = |saved: &Saved| saved.stored_bytes(&row.copied_parts());
            report.file_bytes += row.backing().held_in(Store::File).map_or(0, stored);
            report.spilled_bytes += row.spilled().map_or(0, stored);
            let Some(device) = row.device() else {
                report.host_numa_bytes += row.size_bytes();
                continue;
            };
            add_to_class(classes.entry((device, row.class().clone())).or_default(), row);
            if let (Some(reason), true) = (reason_it_stays(row), row.is_resident()) {
                reasons.add(device, reason, row.size_bytes());
            }
        }
        self.natives.add_to(&mut reasons, 0);
        for (device, size_bytes) in self.deferred.handles() {
            reasons.add(device, deferred::REASON, size_bytes);
        }
        let row = |device| {
            let uuid = self.devices.uuid(device);
            DeviceReport { device, uuid, classes: Vec::new(), pinned: Vec::new() }
        };
        let mut devices: BTreeMap<DeviceOrdinal, DeviceReport> = BTreeMap::new();
        for ((device, class), mut bytes) in classes {
            class.library.clone_into(&mut bytes.library);
            bytes.tag = class.tag;
            bytes.contents = class.contents;
            devices.entry(device).or_insert_with(|| row(device)).classes.push(bytes);
        }
        for (device, stay) in reasons.all() {
            devices.entry(device).or_insert_with(|| row(device)).pinned.push(stay);
        }
        report.devices = devices.into_values().collect();
        for device in &mut report.devices {
            device.classes.sort_by_key(|class| std::cmp::Reverse(class.own_bytes));
        }
        report.host_arena_bytes = self.host_memory.incoming.figures().bytes();
        report.slabs = self.front().totals();
        report
    }

    /// Returns the device memory that a pause of `selection` must leave in place, by cause. If the pause `is_over`,
    /// also memory that could not be saved, or that the driver refused to unmap or to release.
    pub fn stays(&self, selection: &Selection, is_over: bool) -> Vec<PinnedBytes> {
        let mut reasons = self.holdings.stays(selection, is_over);
        if !selection.is_by_tag() {
            self.natives.add_to(&mut reasons, NATIVE_BYTES_MIN);
        }
        for (device, size_bytes) in self.deferred.handles().into_iter().filter(|_| is_over) {
            reasons.add(device, deferred::REASON, size_bytes);
        }
        let mut stays = Vec::new();
        reasons.all().for_each(|(_, stay)| PinnedBytes::merge(&mut stays, &[stay]));
        stays
    }
}

fn reason_it_stays(row: &Row) -> Option<&'static str> {
    match (row.reason_to_stay(), row.origin()) {
        (Some(reason), _) => Some(reason),
        (None, Origin::Foreign) => Some(
            "imported from a descriptor that is no ticket: its owner does not run under Sublet",
        ),
        (None, Origin::Own | Origin::Imported { .. }) => None,
    }
}

fn add_to_class(account: &mut ClassBytes, row: &Row) {
    if row.is_own() {
        account.own_bytes += row.size_bytes();
        account.own_count += 1;
        if row.is_resident() {
            account.resident_bytes += row.size_bytes();
        }
        if row.reason_to_stay().is_some() {
            account.pinned_bytes += row.size_bytes();
        }
    } else {
        account.imported_bytes += row.size_bytes();
        account.imported_count += 1;
    }
}

impl<D: Driver> Pool<D> {
    /// Counts all own device memory against `account`, for good. Existing memory counts even if it does not fit, later
    /// memory is refused if it does not fit. Imports count in the process that owns them. Memory off its device does
    /// not count. False if the pool has an account already.
    pub fn count_against(&self, account: Arc<dyn Account>) -> bool {
        if !self.budget.set(account) {
            return false;
        }
        let charge = |size_bytes, device| self.budget.charge_anyway(device, size_bytes);
        // Memory that is added to either table from here on counts without this.
        self.ledger().rows.charge_all(charge);
        self.natives.charge_all(charge);
        self.deferred.charge_all(charge);
        true
    }

    /// Refuses a resume of `selection` that does not fit the budget now. Takes nothing.
    ///
    /// # Errors
    /// [`crate::PoolError::OverBudget`].
    pub fn check_budget(&self, selection: &Selection) -> PoolResult<()> {
        if !selection.is_by_tag() {
            return Ok(());
        }
        for (device, asked_bytes) in self.holdings.offloaded_bytes(selection) {
            let Some(figure) = self.budget.figure(device) else { continue };
            let Some(budget_bytes) = figure.budget_bytes else { continue };
            let held_bytes = figure.held_bytes;
            if asked_bytes > budget_bytes.saturating_sub(held_bytes) {
                return Err(PoolError::OverBudget {
                    device,
                    asked_bytes,
                    held_bytes,
                    budget_bytes,
                });
            }
        }
        Ok(())
    }
}
