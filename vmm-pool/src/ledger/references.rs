//! What this process holds of memory that crosses processes, and what a pause of all leaves in place.
//!
//! A pool says what it holds when it is *frozen*: nobody is given its memory then, until the process runs again. So
//! what all processes of a tenant say, once each of them is frozen, is true at one moment.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{Ledger, LentTotals, Row, Selection};
use crate::error::{PoolError, PoolResult};
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
            let held = Held { id: row.id(), is_pinned: row.is_pinned() };
            if row.is_shared() {
                references.given.push(held);
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
