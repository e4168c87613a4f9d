//! The memory that this process holds, for coordinators and other processes: the ledger behind its lock, and answers to
//! questions about it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::accounts::Reasons;
use crate::driver::DeviceOrdinal;
use crate::ids::{AllocationId, PeerId};
use crate::ledger::{
    Class, Holding, Ledger, LentTotals, LostImports, References, Row, Selection, Shareable, Stance,
    StayReason, TagTotals,
};
use crate::report::OVERDUE;

/// The ledger of one process. Each question takes the lock itself, and waits for nothing else.
#[derive(Debug, Default)]
pub struct Holdings(Mutex<Ledger>);

impl Holdings {
    /// Poisoning is ignored: every section under the lock leaves the ledger consistent.
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the devices with this process's own memory, in ordinal order. Imports do not count: they are on their
    /// owners' devices, and touching such a device would make a context there, which costs some 500 MiB.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        self.ledger().rows.devices().into_iter().collect()
    }

    /// Returns the device that `id` is on; none if it is gone, or on a host.
    pub fn device_of(&self, id: AllocationId) -> Option<DeviceOrdinal> {
        self.ledger().rows.by_id(id).and_then(Row::device)
    }

    /// Returns the own memory of `selection` that is on its device and that a pause may release, in bytes.
    pub fn resident_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        let ledger = self.ledger();
        ledger
            .rows
            .own_bytes(&ledger.rows.choose(selection), |row| row.is_resident() && row.can_leave())
    }

    /// Returns the own memory of `selection` that is not on its device now, in bytes.
    pub fn offloaded_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        let ledger = self.ledger();
        ledger.rows.own_bytes(&ledger.rows.choose(selection), |row| !row.is_resident())
    }

    /// Returns the size of the largest own allocation of `selection` that is not on its device now.
    pub fn largest_offloaded_bytes(&self, selection: &Selection) -> u64 {
        let ledger = self.ledger();
        let away = ledger.rows.iter().filter(|row| row.is_own() && !row.is_resident());
        away.filter(|row| selection.has(row)).map(Row::size_bytes).max().unwrap_or(0)
    }

    /// Returns the memory that a pause of `selection` leaves in place, by device and cause. If the pause `is_over`,
    /// memory that could leave is included. Imports count if nobody owns them any more, or if they should have left.
    pub(super) fn stays(&self, selection: &Selection, is_over: bool) -> Reasons {
        // Memory that an earlier pause by tag has left is not in a whole selection, but should have left too.
        let is_whole = !selection.is_by_tag();
        let is_meant = |row: &&Row| selection.has(row) || (is_whole && row.is_own());
        let mut reasons = Reasons::default();
        for row in self.ledger().rows.iter().filter(|row| row.is_resident()).filter(is_meant) {
            let cause = match row.reason_to_stay() {
                None if is_over && row.can_leave() => Some(OVERDUE),
                cause => {
                    cause.filter(|cause| row.is_own() || *cause == StayReason::LetGo.in_words())
                }
            };
            if let (Some(cause), Some(device)) = (cause, row.device()) {
                reasons.add(device, cause, row.size_bytes());
            }
        }
        reasons
    }

    /// Returns the memory of each tag. Memory without a tag is left out.
    pub fn tag_bytes(&self) -> BTreeMap<String, TagTotals> {
        let mut bytes: BTreeMap<String, TagTotals> = BTreeMap::new();
        for row in self.ledger().rows.iter().filter(|row| !row.class().tag.is_empty()) {
            let totals = bytes.entry(row.class().tag.clone()).or_default();
            match (row.is_own(), row.is_resident()) {
                (true, true) => {
                    totals.resident_bytes += row.size_bytes();
                    let is_owed = row.sharing().is_owed_by_tag();
                    totals.away_bytes += if is_owed { row.size_bytes() } else { 0 };
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

    /// Returns the tag of an allocation; empty if it has none, or is gone.
    pub fn tag_of(&self, id: AllocationId) -> String {
        self.ledger().rows.by_id(id).map(|row| row.class().tag.clone()).unwrap_or_default()
    }

    /// Does the process run without some memory of `tag`, its own or imported?
    pub fn is_set_aside(&self, tag: &str) -> bool {
        let ledger = self.ledger();
        ledger.rows.iter().any(|row| row.class().tag == tag && !row.is_lost() && row.is_set_aside())
    }

    /// Does another process hold memory of `selection` that this one owns, or a ticket for it?
    pub fn is_shared(&self, selection: &Selection) -> bool {
        self.ledger().rows.iter().any(|row| row.is_shared() && selection.has(row))
    }

    /// Returns all that is recorded of one allocation, for error messages of tests.
    #[cfg(feature = "sim")]
    pub fn told_of(&self, id: AllocationId) -> String {
        let ledger = self.ledger();
        format!("{:?}, frozen: {}", ledger.rows.by_id(id), ledger.is_frozen())
    }

    /// Returns all allocations, in the ledger's order, with their saved parts. Does not block.
    pub fn inventory(&self, stance: Stance) -> Vec<Holding> {
        let ledger = self.ledger();
        ledger.rows.iter().map(|row| Holding::of(&ledger, row, stance)).collect()
    }

    /// Gives importers nothing from now on, except memory that is owed to them since a pause
    /// ([`crate::Pool::hand_out`]).
    pub fn freeze(&self) {
        self.ledger().freeze();
    }

    /// Ends the freeze, because the process runs: importers can get memory again.
    pub fn thaw(&self) {
        self.ledger().thaw();
    }

    /// Returns the memory of `selection` that processes of other tenants have open now. Does not block.
    pub fn lent(&self, selection: &Selection) -> BTreeMap<PeerId, LentTotals> {
        self.ledger().rows.lent_of(selection)
    }

    /// Marks the memory of `selection` that processes of other tenants have open now: a pause leaves it in place. If
    /// the pool is frozen, this stays so until the process runs again.
    pub fn leave_lent(&self, selection: &Selection) {
        self.ledger().rows.leave_lent(selection);
    }

    /// Returns the shared device memory that is held, and whether some of `selection` is shared. The answer stays true
    /// while the pool is frozen and the application's calls are blocked.
    pub fn references(&self, selection: &Selection) -> References {
        let mut ledger = self.ledger();
        let lent = ledger.rows.lent_of(selection);
        let mut references = References { lent, ..References::default() };
        for row in ledger.rows.iter() {
            references.shares_selection |= row.is_shared() && selection.has(row);
            // Host memory never leaves.
            if row.is_host() {
                continue;
            }
            let held = Shareable { id: row.id(), is_pinned: row.is_pinned() || row.is_left_lent() };
            if row.is_shared() {
                references.given.push(held);
                references.holders.extend(row.sharing().importers());
            } else if let (Some(owner), true) = (row.owner(), row.is_resident()) {
                references.taken.entry(owner).or_default().push(held);
            }
        }
        references
    }

    /// Are there watched tickets?
    pub fn has_watched_tickets(&self) -> bool {
        self.ledger().has_watched_tickets()
    }

    /// Returns the owners of all imports, each once.
    pub fn import_owners(&self) -> Vec<PeerId> {
        let owners: BTreeSet<PeerId> = self.ledger().rows.iter().filter_map(Row::owner).collect();
        owners.into_iter().collect()
    }

    /// Returns the class and the size in bytes of each allocation that was imported from `owner` and is on its device.
    pub fn imports_here(&self, owner: PeerId) -> Vec<(Class, u64)> {
        let ledger = self.ledger();
        let here = ledger.rows.iter().filter(|row| row.owner() == Some(owner) && row.is_resident());
        here.map(|row| (row.class().clone(), row.size_bytes())).collect()
    }

    /// Returns the imports from `owner` that are not resident.
    pub fn imports_away(&self, owner: PeerId) -> LostImports {
        let ledger = self.ledger();
        let is_away = |row: &&Row| row.owner() == Some(owner) && !row.is_resident();
        let mut lost = LostImports::default();
        for row in ledger.rows.iter().filter(is_away) {
            lost.count += 1;
            lost.bytes += row.size_bytes();
        }
        lost
    }

    /// Gives up imports from `owner` that are not resident: they are not fetched any more, and their mappings stay
    /// absent until their user unmaps them. Returns how many there are.
    pub fn give_up_imports(&self, owner: PeerId) -> LostImports {
        self.ledger().rows.give_up(|_, theirs| theirs == owner)
    }

    /// As [`Holdings::give_up_imports`], for the allocations `missing`.
    pub fn give_up_missing(&self, missing: &BTreeSet<AllocationId>) -> LostImports {
        self.ledger().rows.give_up(|id, _| missing.contains(&id))
    }
}
