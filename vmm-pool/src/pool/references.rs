//! What this process holds of memory that crosses processes, and what a pause of all leaves in place.
//!
//! A pool says what it holds when it is *frozen*: nobody is given its memory then, until the process runs again. So what all processes of a tenant say, once each of them is frozen, is true at one moment.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::Pool;
use super::tables::Origin;
use crate::driver::Driver;
use crate::error::{PoolError, PoolResult};
use crate::vacate::Selection;
use crate::{AllocationId, PeerId};

/// An allocation that more than one process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Its identity.
    pub id: AllocationId,
    /// A device outside the driver's view may hold its pages, by doing of this process.
    pub is_pinned: bool,
}

/// What one process holds of shared device memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Its own, that others hold or may come for.
    pub given: Vec<Held>,
    /// What it has imported, by owner.
    pub taken: BTreeMap<PeerId, Vec<Held>>,
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

impl<D: Driver> Pool<D> {
    /// Gives nothing to importers from now on but what is owed to them since a pause ([`Pool::hand_out`]).
    pub fn freeze(&self) {
        self.tables().is_frozen = true;
    }

    /// What is held of shared device memory, and whether some of `selection` is. It stays so where the pool is frozen
    /// and the application's calls are held back.
    pub fn references(&self, selection: &Selection) -> References {
        let tables = self.tables();
        let mut references = References::default();
        for (_, found) in &tables.allocations {
            references.shares_selection |= found.is_shared() && selection.has(found);
            let held = Held { id: found.id, is_pinned: found.pinned.is_some() };
            match &found.origin {
                // Host memory never leaves.
                _ if found.is_host() => {}
                Origin::Own if found.is_shared() => references.given.push(held),
                Origin::Imported { owner } if found.raw.is_some() => {
                    references.taken.entry(*owner).or_default().push(held);
                }
                Origin::Own | Origin::Imported { .. } | Origin::Lost | Origin::Foreign => {}
            }
        }
        references
    }

    /// Importers are given what they ask for again: the process runs.
    pub fn thaw(&self) {
        self.tables().is_frozen = false;
    }

    /// What the pause under way leaves in place, in place of what the one before did. Allocations that this process
    /// does not hold are passed over.
    ///
    /// # Errors
    /// [`PoolError::Disowned`] when the decision takes memory for nobody's that is this process's own. Nothing is
    /// changed then.
    pub fn set_stays(&self, stays: &[(AllocationId, StayReason)]) -> PoolResult<()> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        let by_id: HashMap<AllocationId, StayReason> = stays.iter().copied().collect();
        let is_wrong = |id: &AllocationId, reason: StayReason| {
            let found = tables.by_id.get(id).and_then(|&key| tables.allocations.get(key));
            reason != StayReason::Pinned && found.is_some_and(super::Allocation::is_own)
        };
        if let Some((&id, _)) = by_id.iter().find(|&(id, &reason)| is_wrong(id, reason)) {
            return Err(PoolError::Disowned { id });
        }
        for (_, found) in &mut tables.allocations {
            found.stays = by_id.get(&found.id).map(|reason| reason.in_words());
        }
        Ok(())
    }
}
