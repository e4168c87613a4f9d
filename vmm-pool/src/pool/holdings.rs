//! The memory that this process holds, for coordinators and other processes: the ledger behind its lock, and its
//! answers.

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

/// See the head of this module. Each question takes the lock for itself, and waits for nothing else.
#[derive(Debug, Default)]
pub struct Holdings(Mutex<Ledger>);

impl Holdings {
    /// Poisoning is ignored: every section under the lock leaves the ledger consistent.
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The devices that this process has memory of its own on, in ordinal order. Imports do not count:
    /// they lie on their owners' devices, and touching one of those would make a context there, which
    /// costs some 500 MiB.
    pub fn devices(&self) -> Vec<DeviceOrdinal> {
        self.ledger().rows.devices().into_iter().collect()
    }

    /// The device that `id` is on; none when it is gone, or on a host.
    pub fn device_of(&self, id: AllocationId) -> Option<DeviceOrdinal> {
        self.ledger().rows.by_id(id).and_then(Row::device)
    }

    /// Own memory of `selection` that is on its device and would leave in a pause, in bytes.
    pub fn resident_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        let ledger = self.ledger();
        ledger
            .rows
            .own_bytes(&ledger.rows.choose(selection), |row| row.is_resident() && row.can_leave())
    }

    /// Own memory of `selection` that is not on its device now, in bytes.
    pub fn offloaded_bytes(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, u64> {
        let ledger = self.ledger();
        ledger.rows.own_bytes(&ledger.rows.choose(selection), |row| !row.is_resident())
    }

    /// The largest allocation of that, in bytes.
    pub fn largest_offloaded_bytes(&self, selection: &Selection) -> u64 {
        let ledger = self.ledger();
        let away = ledger.rows.iter().filter(|row| row.is_own() && !row.is_resident());
        away.filter(|row| selection.has(row)).map(Row::size_bytes).max().unwrap_or(0)
    }

    /// Memory that a pause of `selection` does not give to others, by device and cause. What could leave is among it where the pause
    /// `is_over`. Imports count where nobody owns them any more, and where they should have gone.
    pub(super) fn stays(&self, selection: &Selection, is_over: bool) -> Reasons {
        // What an earlier pause by tag has left is none of a whole one's, and should have gone as well.
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

    /// Memory by tag. What has none is left out.
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

    /// The tag of an allocation; empty when it has none, or is gone.
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

    /// All that is recorded of one allocation, for the error of a test.
    #[cfg(feature = "sim")]
    pub fn told_of(&self, id: AllocationId) -> String {
        let ledger = self.ledger();
        format!("{:?}, frozen: {}", ledger.rows.by_id(id), ledger.is_frozen())
    }

    /// All allocations, in the ledger's order, with what is saved of each. Waits for nothing.
    pub fn inventory(&self, stance: Stance) -> Vec<Holding> {
        let ledger = self.ledger();
        ledger.rows.iter().map(|row| Holding::of(&ledger, row, stance)).collect()
    }

    /// Gives nothing to importers from now on but what is owed to them since a pause ([`crate::Pool::hand_out`]).
    pub fn freeze(&self) {
        self.ledger().freeze();
    }

    /// Importers are given what they ask for again: the process runs.
    pub fn thaw(&self) {
        self.ledger().thaw();
    }

    /// The memory of `selection` that processes of other tenants have open now. Waits for nothing.
    pub fn lent(&self, selection: &Selection) -> BTreeMap<PeerId, LentTotals> {
        self.ledger().rows.lent_of(selection)
    }

    /// Has a pause leave the memory of `selection` that processes of other tenants have open now. It stays so until the process runs again, where the
    /// pool is frozen.
    pub fn leave_lent(&self, selection: &Selection) {
        self.ledger().rows.leave_lent(selection);
    }

    /// The shared device memory that is held, and whether some of `selection` is. It stays so where the pool is frozen
    /// and the application's calls are held back.
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

    /// Are there tickets that are known to be open, or to have been closed?
    pub fn has_watched_tickets(&self) -> bool {
        self.ledger().has_watched_tickets()
    }

    /// The owners of all imports, each once.
    pub fn import_owners(&self) -> Vec<PeerId> {
        let owners: BTreeSet<PeerId> = self.ledger().rows.iter().filter_map(Row::owner).collect();
        owners.into_iter().collect()
    }

    /// Kind and size in bytes of each allocation that was imported from `owner` and is on its device.
    pub fn imports_here(&self, owner: PeerId) -> Vec<(Class, u64)> {
        let ledger = self.ledger();
        let here = ledger.rows.iter().filter(|row| row.owner() == Some(owner) && row.is_resident());
        here.map(|row| (row.class().clone(), row.size_bytes())).collect()
    }

    /// The bytes that were imported from `owner` and are not resident.
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

    /// Gives up on what was imported from `owner` and is not resident: it is not fetched any more, and
    /// its mappings stay absent until their user unmaps them. Says how much that is.
    pub fn give_up_imports(&self, owner: PeerId) -> LostImports {
        self.ledger().rows.give_up(|_, theirs| theirs == owner)
    }

    /// As [`Holdings::give_up_imports`], of these allocations.
    pub fn give_up_missing(&self, missing: &BTreeSet<AllocationId>) -> LostImports {
        self.ledger().rows.give_up(|id, _| missing.contains(&id))
    }
}
