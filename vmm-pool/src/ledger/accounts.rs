//! The accounts of the ledger: in sums, allocation by allocation, and of the memory that crosses processes.
//!
//! A pool says what it shares when it is *frozen*: nobody is given its memory then, until the process runs again. So
//! what all processes of a tenant say, once each of them is frozen, is true at one moment.

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
    /// Own, on the devices.
    pub resident_bytes: u64,
    /// Own, given up by a pause. What the driver would not let go then, and importers have given up, is both.
    pub away_bytes: u64,
    /// Imported, and given up by a pause.
    pub imported_away_bytes: u64,
}

/// Imports that nobody can bring back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostImports {
    /// The number of lost imports.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Memory that stays with a process in a pause, in bytes. The driver does not bring it back with the process's
/// contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfreezable {
    /// Made by the driver's allocator in host memory.
    pub host_bytes: u64,
    /// Imported, and not given up by the pause.
    pub imported_bytes: u64,
    /// Registered with a network card.
    pub registered_bytes: u64,
}

impl RowTable {
    /// Own memory whose contents a pause may save to host memory, here or away, and needed or not.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let is_kept = |row: &&Row| {
            row.is_own() && row.can_leave() && Store::of(row.class().contents) == Some(Store::Host)
        };
        self.iter().filter(is_kept).map(Row::size_bytes).sum()
    }

    /// Own memory that `choose` picks of `rows`.
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

    /// Sets what the pause under way leaves where it is, instead of what the one before left. Allocations that this
    /// process does not hold are passed over.
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
        for row in self.iter_mut() {
            if !row.is_left_lent() {
                row.set_stays(by_id.get(&row.id()).map(|reason| reason.in_words()));
            }
        }
        Ok(())
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

/// The shared device memory that one process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Its own, that others hold or may come for.
    pub given: Vec<Shareable>,
    /// Processes that may hold some of `given`: those that were given a descriptor.
    pub holders: BTreeSet<PeerId>,
    /// Memory that the process has imported, by owner.
    pub taken: BTreeMap<PeerId, Vec<Shareable>>,
    /// Memory of the selection that was asked about, which processes of other tenants have open, by borrower.
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

// What a pause has saved, allocation by allocation, for a map of it.

/// One allocation, and what is saved of it.
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
    /// The ranges where it is mapped, or was and will be again, in order.
    pub ranges: Vec<VaRange>,
    /// The creator of the allocation.
    pub source: HoldingSource,
    /// Is it on its device now? Memory that is paged counts as there while its process runs, which has it brought there at any moment.
    pub is_resident: bool,
    /// Parts whose contents are saved, by offset, in order and apart; none when nothing is.
    pub saved_parts: Vec<Range<u64>>,
}

/// The creator of an allocation: this process, another of the tenant, one that has ended, or one outside Sublet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldingSource {
    /// Created here.
    Own {
        /// Processes that have imported it, as far as is known.
        importers: Vec<PeerId>,
    },
    /// Created by another process of the tenant, who saves it.
    Imported {
        /// The process that created it.
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

    /// Was it created here?
    pub fn is_own(&self) -> bool {
        matches!(self.source, HoldingSource::Own { .. })
    }

    /// Counts the bytes of it that are saved.
    pub fn saved_bytes(&self) -> u64 {
        self.saved_parts.iter().map(|part| part.end - part.start).sum()
    }
}
