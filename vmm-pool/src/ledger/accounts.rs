//! Sums over the ledger, in bytes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Class, Ledger, Origin, Row, Rows, Selection};
use crate::driver::{DeviceOrdinal, Location};
use crate::report::{ClassBytes, PinnedBytes};
use crate::store::Store;

/// Memory of one tag, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagTotals {
    /// Own, on the devices.
    pub resident_bytes: u64,
    /// Own, given up by a pause. What the driver would not let go then, and importers have given up, is both.
    pub away_bytes: u64,
    /// Imported, and given up by a pause.
    pub imported_away_bytes: u64,
}

/// What stays with a process in a pause, and what the driver does not bring back with its contexts, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfreezable {
    /// Made by the driver's allocator in host memory.
    pub host_bytes: u64,
    /// Imported, and not given up by the pause.
    pub imported_bytes: u64,
    /// Registered with a network card.
    pub registered_bytes: u64,
}

/// Who holds what.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    pub(crate) classes: BTreeMap<(DeviceOrdinal, Class), ClassBytes>,
    pub(crate) pinned: BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes>,
    pub(crate) host_numa_bytes: u64,
}

impl Accounts {
    /// So much more stays on `device` for `reason`.
    pub(crate) fn add_pinned(&mut self, device: DeviceOrdinal, reason: &'static str, bytes: u64) {
        let row = self.pinned.entry((device, reason)).or_default();
        row.bytes += bytes;
        row.count += 1;
    }
}

impl Ledger {
    /// Who holds what now.
    pub(crate) fn accounts(&self) -> Accounts {
        let mut accounts = Accounts::default();
        for row in self.rows() {
            let Some(device) = row.device() else {
                accounts.host_numa_bytes += row.size_bytes();
                continue;
            };
            add_to_class(accounts.classes.entry((device, row.class().clone())).or_default(), row);
            if let (Some(reason), true) = (reason_it_stays(row), row.is_resident()) {
                accounts.add_pinned(device, reason, row.size_bytes());
            }
        }
        for native in self.natives.values() {
            accounts.add_pinned(native.device, native.reason, native.size_bytes);
        }
        accounts
    }

    /// What the driver could not bring back with the contexts of this process, once its memory `is_away` or as it is now.
    pub(crate) fn unfreezable(&self, is_away: bool) -> Unfreezable {
        let mut bytes = Unfreezable::default();
        for row in self.rows() {
            let stays =
                *row.origin() == Origin::Foreign || (is_away && !row.is_own() && row.is_resident());
            if row.is_of_host_file() {
                // It is the host's alone.
            } else if row.is_host() {
                bytes.host_bytes += row.size_bytes();
            } else if stays {
                bytes.imported_bytes += row.size_bytes();
            } else if row.is_pinned() {
                bytes.registered_bytes += row.size_bytes();
            }
        }
        bytes
    }

    /// Own memory of `selection` that is on its device and would leave in a pause.
    pub(crate) fn resident_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(&self.choose(selection), |row| row.is_resident() && row.can_leave())
    }

    /// Memory that is on a device though a pause of `selection` lets it go: own, and others' that is imported.
    pub(crate) fn overdue_bytes(&self, selection: &Selection) -> u64 {
        // What an earlier pause by tag has left is none of a whole one's, and should have gone as well.
        let is_whole = matches!(selection, Selection::Whole);
        let is_meant = |row: &Row| selection.has(row) || (is_whole && row.is_own());
        let goes = |row: &&Row| row.is_resident() && row.can_leave() && is_meant(row);
        self.rows().filter(goes).map(Row::size_bytes).sum()
    }

    /// Own memory of `selection` that a pause must leave in place.
    pub(crate) fn pinned_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(&self.choose(selection), |row| row.reason_to_stay().is_some())
    }

    /// Own memory of `selection` that is not on its device now.
    pub(crate) fn offloaded_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        self.own_bytes(&self.choose(selection), |row| !row.is_resident())
    }

    /// The largest own allocation of `selection` that is not on its device now, in bytes.
    pub(crate) fn largest_offloaded_bytes(&self, selection: &Selection) -> u64 {
        let rows = self.choose(selection);
        let away = self.rows_in(&rows).filter(|row| row.is_own() && !row.is_resident());
        away.map(Row::size_bytes).max().unwrap_or(0)
    }

    /// Own memory whose contents a pause may save to host memory, here or away, and needed or not.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let is_kept = |row: &&Row| {
            row.is_own() && row.can_leave() && Store::of(row.class().contents) == Some(Store::Host)
        };
        self.rows().filter(is_kept).map(Row::size_bytes).sum()
    }

    /// Own memory that `choose` picks of `rows`.
    pub(crate) fn own_bytes(
        &self,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> BTreeMap<DeviceOrdinal, u64> {
        let mut bytes = BTreeMap::new();
        for row in self.rows_in(rows) {
            if let (true, Some(device)) = (row.is_own() && choose(row), row.device()) {
                *bytes.entry(device).or_insert(0) += row.size_bytes();
            }
        }
        bytes
    }

    /// Memory by tag. What has none is left out.
    pub(crate) fn tag_bytes(&self) -> BTreeMap<String, TagTotals> {
        let mut bytes: BTreeMap<String, TagTotals> = BTreeMap::new();
        for row in self.rows() {
            if row.class().tag.is_empty() {
                continue;
            }
            let totals = bytes.entry(row.class().tag.clone()).or_default();
            match (row.is_own(), row.is_resident()) {
                (true, true) => {
                    totals.resident_bytes += row.size_bytes();
                    totals.away_bytes += if row.is_owed_by_tag() { row.size_bytes() } else { 0 };
                }
                (true, false) => totals.away_bytes += row.size_bytes(),
                (false, false) if row.owner().is_some() => {
                    totals.imported_away_bytes += row.size_bytes();
                }
                (false, _) => {}
            }
        }
        bytes
    }

    /// Contents that are in the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        let filed = self.rows().filter_map(|row| Some((row, row.backing().held_in(Store::File)?)));
        filed.map(|(row, saved)| saved.stored_bytes(&row.copied_parts())).sum()
    }

    /// Of these, what had been saved to host memory before.
    pub(crate) fn spilled_bytes(&self) -> u64 {
        let spilled = self.rows().filter_map(|row| Some((row, row.spilled()?)));
        spilled.map(|(row, saved)| saved.stored_bytes(&row.copied_parts())).sum()
    }

    /// The devices with memory of this process's own. Imports do not count: they lie on their owners' devices, and
    /// touching one of those would make a context there, which costs some 500 MiB.
    pub(crate) fn devices(&self) -> BTreeSet<DeviceOrdinal> {
        self.own_on.keys().copied().collect()
    }

    /// The devices with memory that was left to the driver.
    pub(crate) fn native_devices(&self) -> BTreeSet<DeviceOrdinal> {
        self.natives.values().map(|native| native.device).collect()
    }

    /// The devices that were given rights to some of the memory.
    pub(crate) fn accessors(&self) -> BTreeSet<DeviceOrdinal> {
        let places = self.mappings().flat_map(super::Mapping::accessors);
        places.filter_map(Location::as_device).collect()
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
