//! The reports of the ledger: in sums, by allocation, and of memory that several processes share.
//!
//! A pool reports what it shares when it is *frozen*: then nobody is given its memory until the process runs again.
//! Once all processes of a tenant are frozen, their reports are true at the same moment.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Class, Ledger, LentTotals, Mapping, Origin, Row, RowTable, Rows};
use crate::driver::{DeviceOrdinal, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId};
use crate::store::Store;

/// Memory of one tag, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagTotals {
    /// Own memory on the devices.
    pub resident_bytes: u64,
    /// Own memory that a pause has given up. Memory that importers have given up and the driver refused to release
    /// counts as both.
    pub away_bytes: u64,
    /// Imported memory that a pause has given up.
    pub imported_away_bytes: u64,
}

/// Imports that nobody can restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostImports {
    /// The number of lost imports.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Memory that a process keeps in a pause, in bytes. The driver does not restore it together with the process's
/// contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfreezable {
    /// Host memory from the driver's allocator.
    pub host_bytes: u64,
    /// Imported memory that the pause has not given up.
    pub imported_bytes: u64,
    /// Memory registered with a network card.
    pub registered_bytes: u64,
}

impl RowTable {
    /// Returns the size of own memory whose contents a pause may save to host memory. It may be on its device or not,
    /// and needed or not.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let is_kept = |row: &&Row| {
            row.is_own() && row.can_leave() && Store::of(row.class().contents) == Some(Store::Host)
        };
        self.iter().filter(is_kept).map(Row::size_bytes).sum()
    }

    /// Returns the size in bytes of the own memory among `rows` that `choose` picks, by device.
    pub(crate) fn own_bytes(
        &self,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> BTreeMap<DeviceOrdinal, u64> {
        let mut bytes = BTreeMap::new();
        for row in self.among(rows) {
            if let (true, Some(device)) = (row.is_own() && choose(row), row.device()) {
                *bytes.entry(device).or_insert(0) += row.size_bytes();
            }
        }
        bytes
    }

    /// Sets the allocations that the pause under way leaves in place. They replace those of the pause before.
    /// Allocations that this process does not hold are skipped.
    ///
    /// # Errors
    /// [`PoolError::Disowned`] if the decision treats memory of this process as memory without an owner. Nothing is
    /// changed then.
    pub(crate) fn set_stays(&mut self, stays: &[(AllocationId, StayReason)]) -> PoolResult<()> {
        let by_id: HashMap<AllocationId, StayReason> = stays.iter().copied().collect();
        let is_wrong = |id: AllocationId, reason: StayReason| {
            reason != StayReason::Pinned && self.by_id(id).is_some_and(Row::is_own)
        };
        if let Some((&id, _)) = by_id.iter().find(|&(&id, &reason)| is_wrong(id, reason)) {
            return Err(PoolError::Disowned { id });
        }
        for row in self.iter_mut() {
            if !row.is_left_lent() {
                row.set_stays(by_id.get(&row.id()).map(|reason| reason.in_words()));
            }
        }
        Ok(())
    }
}

// Memory that several processes share, and the part of it that a pause of everything leaves in place.

/// An allocation that more than one process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shareable {
    /// Its identity.
    pub id: AllocationId,
    /// True if a device outside the driver's view may hold its pages, because this process has registered them.
    pub is_pinned: bool,
}

/// The shared device memory that one process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Own memory that other processes hold, or may fetch.
    pub given: Vec<Shareable>,
    /// The processes that may hold some of `given`, because they were given a descriptor.
    pub holders: BTreeSet<PeerId>,
    /// The memory that the process has imported, by owner.
    pub taken: BTreeMap<PeerId, Vec<Shareable>>,
    /// The memory of the queried selection that processes of other tenants have open, by borrower.
    pub lent: BTreeMap<PeerId, LentTotals>,
    /// Is some of the queried selection among `given`?
    pub shares_selection: bool,
}

/// The reason why all holders of shared memory leave it on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StayReason {
    /// Its owner lives and has released it: nobody could create it again.
    LetGo,
    /// Its owner does not take part in the pause.
    OwnerApart,
    /// One of its holders has pinned it.
    Pinned,
}

impl StayReason {
    /// Returns the reason in words, for the report.
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

// The saved contents of a pause, by allocation, for a map of the process's memory.

/// One allocation, and its saved parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Its identity.
    pub id: AllocationId,
    /// The library that allocated it, its tag, and the policy of a pause for its contents.
    pub class: Class,
    /// The device of the memory; none for host memory.
    pub device: Option<DeviceOrdinal>,
    /// Its size.
    pub size_bytes: u64,
    /// The ranges where it is mapped, or where a resume maps it again, in order.
    pub ranges: Vec<VaRange>,
    /// The creator of the allocation.
    pub source: HoldingSource,
    /// Is it on its device now? Paged memory counts as resident while its process runs, because the process may use it
    /// at any moment.
    pub is_resident: bool,
    /// The parts whose contents are saved, by offset, in order and apart; none when nothing is saved.
    pub saved_parts: Vec<Range<u64>>,
}

/// The creator of an allocation: this process, another of the tenant, one that has ended, or one outside Sublet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldingSource {
    /// Created here.
    Own {
        /// The processes that have imported it, as far as is known.
        importers: Vec<PeerId>,
    },
    /// Created by another process of the tenant, which saves it.
    Imported {
        /// The process that created it.
        owner: PeerId,
    },
    /// Created by a process that has ended; nobody has its contents.
    Lost,
    /// Created by a process that is not under Sublet.
    Foreign,
}

/// The state of the process during an inventory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stance {
    /// The process runs, and may change memory on a device: saved contents are current only for memory that is off its
    /// device.
    Runs,
    /// The process stands still: saved contents are current.
    StandsStill,
}

impl Holding {
    pub(crate) fn of(ledger: &Ledger, row: &Row, standing: Stance) -> Self {
        let comes_when_used = row.backing().has_home() && standing == Stance::Runs;
        let is_resident = row.is_resident() || comes_when_used;
        let counts = !is_resident || standing == Stance::StandsStill;
        let saved = row.saved().filter(|_| row.is_own() && counts);
        Self {
            id: row.id(),
            class: row.class().clone(),
            device: row.device(),
            size_bytes: row.size_bytes(),
            ranges: ledger.mappings.of(row).map(Mapping::range).collect(),
            source: match row.origin() {
                _ if row.is_lost() => HoldingSource::Lost,
                Origin::Own => HoldingSource::Own { importers: row.sharing().importers() },
                Origin::Imported { owner } => HoldingSource::Imported { owner: *owner },
                Origin::Foreign => HoldingSource::Foreign,
            },
            is_resident,
            saved_parts: saved.map(|_| row.copied_parts()).unwrap_or_default(),
        }
    }

    /// Did this process create it?
    pub fn is_own(&self) -> bool {
        matches!(self.source, HoldingSource::Own { .. })
    }

    /// Counts the bytes that are saved.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_parts.iter().map(|part| part.end - part.start).sum()
    }
}
