//! What a pause has saved, allocation by allocation, for a map of it.

use std::ops::Range;

use super::{Class, Ledger, Mapping, Origin, Row};
use crate::driver::{DeviceOrdinal, VaRange};
use crate::{AllocationId, PeerId};

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
pub enum Standing {
    /// It runs, and may change what is on a device: only of what is away the saved contents are the contents.
    Runs,
    /// It stands still: what is saved is what its memory held.
    StandsStill,
}

impl Holding {
    fn of(ledger: &Ledger, row: &Row, standing: Standing) -> Self {
        let is_paged = row.backing().is_chunk() && standing == Standing::Runs;
        let is_resident = row.is_resident() || is_paged;
        let counts = !is_resident || standing == Standing::StandsStill;
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
    pub(crate) fn inventory(&self, standing: Standing) -> Vec<Holding> {
        self.rows().map(|row| Holding::of(self, row, standing)).collect()
    }
}
