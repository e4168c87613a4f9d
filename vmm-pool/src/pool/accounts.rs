//! Accounts of the memory that the pool holds, for people and for coordinators.

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

/// Memory that stays in a pause, by device and cause.
#[derive(Debug, Default)]
pub(crate) struct Reasons(BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes>);

impl Reasons {
    /// So much more stays on `device` for `reason`.
    pub(crate) fn add(&mut self, device: DeviceOrdinal, reason: &'static str, bytes: u64) {
        let stay = PinnedBytes { reason: reason.to_owned(), bytes, count: 1 };
        self.0.entry((device, reason)).and_modify(|all| all.add(&stay)).or_insert(stay);
    }

    /// All of it, in order.
    pub(crate) fn all(self) -> impl Iterator<Item = (DeviceOrdinal, PinnedBytes)> {
        self.0.into_iter().map(|((device, _), stay)| (device, stay))
    }
}

impl<D: Driver> Pool<D> {
    /// The devices that this process has memory of its own on, what stays with the driver too.
    pub(crate) fn devices_with_any(&self) -> BTreeSet<DeviceOrdinal> {
        let ledger = self.ledger();
        ledger.rows.devices().into_iter().chain(self.natives.devices()).collect()
    }

    /// The devices whose work may touch memory of the pool: those with some of it, and those that were given access
    /// and have a context. To wait for a device makes a context there, so the others are left alone.
    pub fn devices_at_work(&self) -> Vec<DeviceOrdinal> {
        let (mut devices, accessors) = {
            let ledger = self.ledger();
            let accessors = ledger.mappings.all().flat_map(Mapping::accessors);
            let accessors: BTreeSet<_> = accessors.filter_map(Location::as_device).collect();
            (ledger.rows.devices(), accessors)
        };
        let guests: BTreeSet<_> = accessors.difference(&devices).copied().collect();
        let has_context = |device: &DeviceOrdinal| {
            // One that cannot be asked is waited for, which shows what is the matter with it.
            self.driver.has_primary_context(*device).unwrap_or(true)
        };
        devices.extend(guests.into_iter().filter(has_context));
        devices.into_iter().collect()
    }

    /// Returns the memory that the driver could not bring back with the contexts of this process. *While offloaded.*
    pub fn unfreezable(&self) -> Unfreezable {
        let is_away = self.gate().is_offloaded();
        let host_bytes = self.deferred.host_bytes();
        let mut bytes = Unfreezable { host_bytes, ..Unfreezable::default() };
        for row in self.ledger().rows.iter() {
            let stays =
                *row.origin() == Origin::Foreign || (is_away && !row.is_own() && row.is_resident());
            if row.is_of_host_file() {
                // It is the host's alone.
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

    /// Reports who holds what now. *While offloaded.*
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

    /// Device memory that a pause of `selection` does not give to others, by cause: what it must leave in place. Where it `is_over`,
    /// also what could not be saved, what the driver would not unmap, and what it would not take back.
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
    /// Counts all own device memory against `account` from now on, for good: what there is already, whether it fits or
    /// not, and what is made later, where it fits. Imports count where they are owned, and what is away not at all. False
    /// where something counts already.
    pub fn count_against(&self, account: Arc<dyn Account>) -> bool {
        if !self.budget.set(account) {
            return false;
        }
        let charge = |size_bytes, device| self.budget.charge_anyway(device, size_bytes);
        // Whatever comes into either table from here on counts by itself.
        self.ledger().rows.charge_all(charge);
        self.natives.charge_all(charge);
        self.deferred.charge_all(charge);
        true
    }

    /// Refuses where the budget, as it stands now, does not have what a resume of `selection` brings back. Takes nothing.
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
