//! What the pool holds, for people and for coordinators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use super::Pool;
use crate::budget::{Account, Charge, Figure};
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::{PoolError, PoolResult};
use crate::ledger::{
    Holding, LentTotals, References, Row, Selection, Stance, TagTotals, Unfreezable,
};
use crate::report::{CopiedBytes, DeviceReport, PinnedBytes, PoolReport};
use crate::{AllocationId, PeerId, deferred};

impl<D: Driver> Pool<D> {
    /// The devices that this process has memory of its own on, in ordinal order. Imports do not count:
    /// they lie on their owners' devices, and touching one of those would make a context there, which
    /// costs some 500 MiB.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        self.ledger().devices().into_iter().collect()
    }

    /// The devices that this process has memory of its own on, what stays with the driver too.
    pub(crate) fn devices_with_any(&self) -> BTreeSet<DeviceOrdinal> {
        let ledger = self.ledger();
        ledger.devices().into_iter().chain(ledger.native_devices()).collect()
    }

    /// The devices whose work may touch memory of the pool: those with some of it, and those that were given access
    /// and have a context. To wait for a device makes a context there, so the others are left alone.
    pub fn devices_at_work(&self) -> Vec<DeviceOrdinal> {
        let (mut devices, accessors) = {
            let ledger = self.ledger();
            (ledger.devices(), ledger.accessors())
        };
        let guests: BTreeSet<_> = accessors.difference(&devices).copied().collect();
        let has_context = |device: &DeviceOrdinal| {
            // One that cannot be asked is waited for, which shows what is the matter with it.
            self.driver.has_primary_context(*device).unwrap_or(true)
        };
        devices.extend(guests.into_iter().filter(has_context));
        devices.into_iter().collect()
    }

    /// What the driver could not bring back with the contexts of this process. *While offloaded.*
    pub fn unfreezable(&self) -> Unfreezable {
        let is_away = self.gate().is_offloaded();
        let mut bytes = self.ledger().unfreezable(is_away);
        bytes.host_bytes += self.deferred.host_bytes();
        bytes
    }

    /// How far the copies of a pause or resume under way are. Takes no lock. *While offloaded.*
    pub fn copied_bytes(&self) -> CopiedBytes {
        self.copied.read()
    }

    /// Who holds what now. *While offloaded.*
    pub fn report(&self) -> PoolReport {
        let (mut accounts, file_bytes, spilled_bytes) = {
            let ledger = self.ledger();
            (ledger.accounts(), ledger.file_bytes(), ledger.spilled_bytes())
        };
        for (device, size_bytes) in self.deferred.handles() {
            accounts.add_stay(device, deferred::REASON, size_bytes);
        }
        let mut devices: BTreeMap<DeviceOrdinal, DeviceReport> = BTreeMap::new();
        for ((device, class), mut bytes) in accounts.classes {
            class.library.clone_into(&mut bytes.library);
            bytes.tag = class.tag;
            bytes.contents = class.contents;
            devices.entry(device).or_insert_with(|| self.device_row(device)).classes.push(bytes);
        }
        for ((device, _), stay) in accounts.stays {
            devices.entry(device).or_insert_with(|| self.device_row(device)).pinned.push(stay);
        }
        let mut devices: Vec<_> = devices.into_values().collect();
        for device in &mut devices {
            device.classes.sort_by_key(|class| std::cmp::Reverse(class.own_bytes));
        }
        let host_arena_bytes = self.ahead.figures().bytes();
        let host_numa_bytes = accounts.host_numa_bytes;
        let slabs = self.slabs().totals();
        PoolReport { devices, host_arena_bytes, file_bytes, spilled_bytes, host_numa_bytes, slabs }
    }

    fn device_row(&self, device: DeviceOrdinal) -> DeviceReport {
        let uuid = self.uuid(device);
        DeviceReport { device, uuid, classes: Vec::new(), pinned: Vec::new() }
    }

    /// The machine-wide name of `device`, as [`DeviceUuid`](crate::driver::DeviceUuid) writes it, or a name by ordinal
    /// where the driver has none. Asked of the driver once a device.
    pub fn uuid(&self, device: DeviceOrdinal) -> String {
        let known = || self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = known().get(&device) {
            return name.clone();
        }
        let Ok(uuid) = self.driver.device_uuid(device) else {
            return format!("ordinal-{}", device.0);
        };
        let name = uuid.to_string();
        known().insert(device, name.clone());
        name
    }

    /// Own memory of `selection` that is on its device and would leave in a pause, in bytes.
    pub fn resident_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.ledger().resident_bytes(selection)
    }

    /// Device memory that a pause of `selection` does not give to others, by cause: what it must leave in place. Where it `is_over`,
    /// also what could not be saved, what the driver would not unmap, and what it would not take back.
    pub fn stays(&self, selection: &Selection, is_over: bool) -> Vec<PinnedBytes> {
        let refused = self.deferred.handles().into_iter().map(|(_, bytes)| PinnedBytes {
            reason: deferred::REASON.to_owned(),
            bytes,
            count: 1,
        });
        let refused: Vec<_> = refused.filter(|_| is_over).collect();
        let mut stays = Vec::new();
        PinnedBytes::merge(
            &mut stays,
            &self.ledger().stays(selection, is_over).into_values().collect::<Vec<_>>(),
        );
        PinnedBytes::merge(&mut stays, &refused);
        stays
    }

    /// Does this process see the device of this name, as [`Pool::uuid`] says it?
    pub fn sees_device(&self, uuid: &str) -> bool {
        let count = self.driver.device_count().unwrap_or(0);
        (0..count).any(|ordinal| self.uuid(DeviceOrdinal(ordinal)) == uuid)
    }

    /// The device that `id` is on, by the name that all processes share; empty when it is gone, or on a host.
    pub fn device_of(&self, id: AllocationId) -> String {
        let device = self.ledger().by_id(id).and_then(Row::device);
        device.map(|device| self.uuid(device)).unwrap_or_default()
    }

    /// Own memory of `selection` that is not on its device now, in bytes.
    pub fn offloaded_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.ledger().offloaded_bytes(selection)
    }

    /// The largest allocation of that, in bytes.
    pub fn largest_offloaded_bytes(&self, selection: &Selection) -> u64 {
        self.ledger().largest_offloaded_bytes(selection)
    }

    /// Memory by tag. What has none is left out.
    pub fn tag_bytes(&self) -> BTreeMap<String, TagTotals> {
        self.ledger().tag_bytes()
    }

    /// The tag of an allocation; empty when it has none, or is gone.
    pub fn tag_of(&self, id: AllocationId) -> String {
        self.ledger().by_id(id).map(|row| row.class().tag.clone()).unwrap_or_default()
    }

    /// Does the process run without some memory of `tag`, its own or imported?
    pub fn is_set_aside(&self, tag: &str) -> bool {
        let ledger = self.ledger();
        ledger.rows().any(|row| row.class().tag == tag && !row.is_lost() && row.is_set_aside())
    }

    /// Does another process hold memory of `selection` that this one owns, or a ticket for it?
    pub fn is_shared(&self, selection: &Selection) -> bool {
        self.ledger().shares(selection)
    }

    /// All that is recorded of one allocation, for the error of a test.
    #[cfg(feature = "sim")]
    pub fn told_of(&self, id: AllocationId) -> String {
        let ledger = self.ledger();
        format!("{:?}, frozen: {}", ledger.by_id(id), ledger.is_frozen())
    }

    /// All allocations, in the ledger's order, with what is saved of each. Waits for nothing.
    pub fn inventory(&self, standing: Stance) -> Vec<Holding> {
        self.ledger().inventory(standing)
    }

    /// Gives nothing to importers from now on but what is owed to them since a pause ([`Pool::hand_out`]).
    pub fn freeze(&self) {
        self.ledger().freeze();
    }

    /// Importers are given what they ask for again: the process runs.
    pub fn thaw(&self) {
        self.ledger().thaw();
    }

    /// What of `selection` processes of other tenants have open now. Waits for nothing.
    pub fn lent(&self, selection: &Selection) -> BTreeMap<PeerId, LentTotals> {
        self.ledger().lent_of(selection)
    }

    /// What is held of shared device memory, and whether some of `selection` is. It stays so where the pool is frozen
    /// and the application's calls are held back.
    pub fn references(&self, selection: &Selection) -> References {
        self.ledger().references(selection)
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
        self.ledger().charge_all(charge);
        self.deferred.charge_all(charge);
        true
    }

    /// Takes room for memory that the driver is about to make by itself, given to [`Pool::native_allocated`] when it has.
    /// Nothing where no budget counts.
    ///
    /// # Errors
    /// [`crate::PoolError::OverBudget`].
    pub fn charge(&self, device: DeviceOrdinal, size_bytes: u64) -> PoolResult<Option<Charge>> {
        self.budget.charge(Some(device), size_bytes)
    }

    /// Refuses where the budget, as it stands now, does not have what a resume of `selection` brings back. Takes nothing.
    ///
    /// # Errors
    /// [`crate::PoolError::OverBudget`].
    pub fn check_budget(&self, selection: &Selection) -> PoolResult<()> {
        if !selection.is_by_tag() {
            return Ok(());
        }
        for (device, asked_bytes) in self.offloaded_bytes(selection) {
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

    /// What may be held on `device`, and is, by all who share the budget. `None` where nothing counts.
    pub fn budget_figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        self.budget.figure(device)
    }
}
