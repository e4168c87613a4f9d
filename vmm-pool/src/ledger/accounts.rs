//! What the ledger has: in sums, allocation by allocation, and what of it crosses processes.
//!
//! A pool says what it shares when it is *frozen*: nobody is given its memory then, until the process runs again. So
//! what all processes of a tenant say, once each of them is frozen, is true at one moment.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Class, Ledger, LentTotals, Mapping, Origin, Row, Rows, Selection};
use crate::driver::{DeviceOrdinal, Location, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::report::{ClassBytes, NATIVE_BYTES_MIN, OVERDUE, PinnedBytes};
use crate::store::Store;
use crate::{AllocationId, PeerId};

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
    pub(crate) stays: BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes>,
    pub(crate) host_numa_bytes: u64,
}

impl Accounts {
    /// So much more stays on `device` for `reason`.
    pub(crate) fn add_stay(&mut self, device: DeviceOrdinal, reason: &'static str, bytes: u64) {
        let stay = PinnedBytes { reason: reason.to_owned(), bytes, count: 1 };
        self.stays.entry((device, reason)).and_modify(|all| all.add(&stay)).or_insert(stay);
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
                accounts.add_stay(device, reason, row.size_bytes());
            }
        }
        for native in self.natives.values() {
            accounts.add_stay(native.device, native.reason, native.size_bytes);
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

    /// Memory that a pause of `selection` does not give to others, by device and cause. What could leave is among it where the pause
    /// `is_over`. Imports count where nobody owns them any more, and where they should have gone.
    pub(crate) fn stays(
        &self,
        selection: &Selection,
        is_over: bool,
    ) -> BTreeMap<(DeviceOrdinal, &'static str), PinnedBytes> {
        // What an earlier pause by tag has left is none of a whole one's, and should have gone as well.
        let is_whole = matches!(selection, Selection::Whole | Selection::Rest);
        let is_meant = |row: &&Row| selection.has(row) || (is_whole && row.is_own());
        let mut accounts = Accounts::default();
        for row in self.rows().filter(|row| row.is_resident()).filter(is_meant) {
            let cause = match row.reason_to_stay() {
                None if is_over && row.can_leave() => Some(OVERDUE),
                cause => {
                    cause.filter(|cause| row.is_own() || *cause == StayReason::LetGo.in_words())
                }
            };
            if let (Some(cause), Some(device)) = (cause, row.device()) {
                accounts.add_stay(device, cause, row.size_bytes());
            }
        }
        let mut left_to_driver: BTreeMap<DeviceOrdinal, u64> = BTreeMap::new();
        for native in self.natives.values().filter(|_| is_whole) {
            *left_to_driver.entry(native.device).or_default() += native.size_bytes;
        }
        let matters = |device| left_to_driver.get(device) >= Some(&NATIVE_BYTES_MIN);
        for native in self.natives.values().filter(|native| matters(&native.device)) {
            accounts.add_stay(native.device, native.reason, native.size_bytes);
        }
        accounts.stays
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

// What crosses processes, and what of it a pause of all leaves in place.

/// An allocation that more than one process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shareable {
    /// Its identity.
    pub id: AllocationId,
    /// A device outside the driver's view may hold its pages, by doing of this process.
    pub is_pinned: bool,
}

/// What one process holds of shared device memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Its own, that others hold or may come for.
    pub given: Vec<Shareable>,
    /// Who may hold some of that: processes that were given a descriptor.
    pub holders: BTreeSet<PeerId>,
    /// What it has imported, by owner.
    pub taken: BTreeMap<PeerId, Vec<Shareable>>,
    /// What of the selection that was asked about processes of other tenants have open.
    pub lent: BTreeMap<PeerId, LentTotals>,
    /// Is some of the selection that was asked about among `given`?
    pub shares_selection: bool,
}

/// Why shared memory is left on its device by all who hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StayReason {
    /// Its owner lives and has it no more: nobody could create it again.
    LetGo,
    /// Its owner takes no part in the pause.
    OwnerApart,
    /// One of those who hold it has pinned it.
    Pinned,
}

impl StayReason {
    /// In words, for the report.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::LetGo => {
                "imported, and let go by its owner, so that nobody could bring it back: it is freed when the last \
                 process that imported it frees it"
            }
            Self::OwnerApart => "imported from a process that takes no part in the pause",
            Self::Pinned => "registered with a network card by a process that shares it",
        }
    }
}

impl Ledger {
    /// What is held of shared device memory, and whether some of `selection` is.
    pub(crate) fn references(&mut self, selection: &Selection) -> References {
        let mut references = References { lent: self.lent_of(selection), ..References::default() };
        for row in self.rows() {
            references.shares_selection |= row.is_shared() && selection.has(row);
            // Host memory never leaves.
            if row.is_host() {
                continue;
            }
            let held = Shareable { id: row.id(), is_pinned: row.is_pinned() };
            if row.is_shared() {
                references.given.push(held);
                references.holders.extend(row.importers());
            } else if let (Some(owner), true) = (row.owner(), row.is_resident()) {
                references.taken.entry(owner).or_default().push(held);
            }
        }
        references
    }

    /// Is some of `selection` held by another process, or a ticket for it?
    pub(crate) fn shares(&self, selection: &Selection) -> bool {
        self.rows().any(|row| row.is_shared() && selection.has(row))
    }

    /// What the pause under way leaves where it is, instead of what the one before did. Allocations that this process
    /// does not hold are passed over.
    ///
    /// # Errors
    /// [`PoolError::Disowned`] when the decision takes memory for nobody's that is this process's own. Nothing is
    /// changed then.
    pub(crate) fn set_stays(&mut self, stays: &[(AllocationId, StayReason)]) -> PoolResult<()> {
        let by_id: HashMap<AllocationId, StayReason> = stays.iter().copied().collect();
        let is_wrong = |id: AllocationId, reason: StayReason| {
            reason != StayReason::Pinned && self.by_id(id).is_some_and(Row::is_own)
        };
        if let Some((&id, _)) = by_id.iter().find(|&(&id, &reason)| is_wrong(id, reason)) {
            return Err(PoolError::Disowned { id });
        }
        for (_, row) in &mut self.rows {
            row.set_stays(by_id.get(&row.id()).map(|reason| reason.in_words()));
        }
        Ok(())
    }
}

// What a pause has saved, allocation by allocation, for a map of it.

/// One allocation, and what is saved of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Its identity.
    pub id: AllocationId,
    /// Which library allocated it, its tag, and what a pause does with its contents.
    pub class: Class,
    /// Where it lives; none for host memory.
    pub device: Option<DeviceOrdinal>,
    /// Its size.
    pub size_bytes: u64,
    /// Where it is mapped, or was and will be again, in order.
    pub ranges: Vec<VaRange>,
    /// Where it comes from.
    pub source: HoldingSource,
    /// Is it on its device now? Memory that is paged counts as there while its process runs, which has it brought there at any moment.
    pub is_resident: bool,
    /// Parts whose contents are saved, by offset, in order and apart; none when nothing is.
    pub saved_parts: Vec<Range<u64>>,
}

/// Where an allocation comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldingSource {
    /// Created here.
    Own {
        /// Who has imported it, as far as is known.
        importers: Vec<PeerId>,
    },
    /// Created by another process of the tenant, who saves it.
    Imported {
        /// Who.
        owner: PeerId,
    },
    /// Created by a process that has ended; nobody has its contents.
    Lost,
    /// Created by a process that is not under Sublet.
    Foreign,
}

/// Whether the process that asks for an inventory runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stance {
    /// It runs, and may change what is on a device: only of what is away the saved contents are the contents.
    Runs,
    /// It stands still: what is saved is what its memory held.
    StandsStill,
}

impl Holding {
    fn of(ledger: &Ledger, row: &Row, standing: Stance) -> Self {
        let is_paged = row.backing().is_chunk() && standing == Stance::Runs;
        let is_resident = row.is_resident() || is_paged;
        let counts = !is_resident || standing == Stance::StandsStill;
        let saved = row.saved().filter(|_| row.is_own() && counts);
        Self {
            id: row.id(),
            class: row.class().clone(),
            device: row.device(),
            size_bytes: row.size_bytes(),
            ranges: ledger.mappings_of(row).map(Mapping::range).collect(),
            source: match row.origin() {
                _ if row.is_lost() => HoldingSource::Lost,
                Origin::Own => HoldingSource::Own { importers: row.importers() },
                Origin::Imported { owner } => HoldingSource::Imported { owner: *owner },
                Origin::Foreign => HoldingSource::Foreign,
            },
            is_resident,
            saved_parts: saved.map(|_| row.copied_parts()).unwrap_or_default(),
        }
    }

    /// Was it created here?
    pub fn is_own(&self) -> bool {
        matches!(self.source, HoldingSource::Own { .. })
    }

    /// How much of it is saved.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_parts.iter().map(|part| part.end - part.start).sum()
    }
}

impl Ledger {
    /// All allocations, in the ledger's order, with what is saved of each.
    pub(crate) fn inventory(&self, standing: Stance) -> Vec<Holding> {
        self.rows().map(|row| Holding::of(self, row, standing)).collect()
    }
}
