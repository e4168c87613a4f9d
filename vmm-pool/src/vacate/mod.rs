//! Giving a pool's device memory back, all or by tag, and taking it again at the same addresses.
//!
//! The steps run on one thread, with the application's calls excluded by the caller's gate and the
//! devices drained: "vacate" is safe only then. The order across processes is the caller's business;
//! each step here leaves tables and driver in agreement, whether it succeeds or fails.
//!
//! ```text
//!   pause:   freeze ---> save ---> release_selected
//!              undo of the first two: remount, commit_resume
//!   resume:  create_own ---> restore_own ---> import_batch, map_imports ---> commit_resume
//!              undo of any: drop_imports + release_selected, contents kept
//! ```

#![expect(unsafe_code, reason = "unmaps and releases through the driver")]

mod filed;
mod give;
mod inventory;
mod layout;
mod saved;
mod selection;
mod take;
mod views;
mod writeout;

use std::collections::BTreeMap;
use std::time::Instant;

pub use inventory::{Holding, HoldingSource, Standing};
pub use saved::SavedError;
pub use selection::{Selection, Tags, Whose};
use serde::{Deserialize, Serialize};
pub use writeout::{WriteOut, Written};

use crate::driver::{DeviceOrdinal, Driver, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::pool::Pool;
use crate::pool::tables::{Presence, Tables};
use crate::staging::CopyStreams;
use crate::{AllocationId, PeerId};

/// A named part of a phase, with what it took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// What was done.
    pub name: &'static str,
    /// How long.
    pub elapsed_us: u64,
}

/// What a phase did, for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepLog {
    /// In order.
    pub steps: Vec<Step>,
    /// Driver calls made.
    pub driver_calls: u64,
    /// Device bytes the phase was about.
    pub bytes: u64,
    /// Trouble that did not stop the phase, one sentence each.
    pub notes: Vec<String>,
}

impl StepLog {
    pub(crate) fn timed<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> PoolResult<T>,
    ) -> PoolResult<T> {
        let begin = Instant::now();
        let outcome = work(self);
        let elapsed_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        match self.steps.iter_mut().find(|step| step.name == name) {
            Some(step) => step.elapsed_us += elapsed_us,
            None => self.steps.push(Step { name, elapsed_us }),
        }
        outcome
    }

    /// What another part of the same phase did, as done by this one.
    pub fn add(&mut self, other: Self) {
        for Step { name, elapsed_us } in other.steps {
            match self.steps.iter_mut().find(|step| step.name == name) {
                Some(step) => step.elapsed_us += elapsed_us,
                None => self.steps.push(Step { name, elapsed_us }),
            }
        }
        self.driver_calls += other.driver_calls;
        self.bytes += other.bytes;
        self.notes.extend(other.notes);
    }

    fn call(&mut self) {
        self.driver_calls += 1;
    }
}

/// Allocations to fetch again from one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportRequest {
    /// The owner.
    pub owner: PeerId,
    /// Its allocations.
    pub ids: Vec<AllocationId>,
}

impl<D: Driver> Pool<D> {
    /// Waits for the copies of a step. A wait that failed is tried once more; when that fails too, the device
    /// is filed as unsettled, and nothing is unmapped before [`Pool::settle`] has waited for it.
    fn wait_for_copies(
        &self,
        streams: &BTreeMap<DeviceOrdinal, CopyStreams<'_, D>>,
    ) -> PoolResult<()> {
        let mut all = Ok(());
        for (&device, copies) in streams {
            let first = copies.finish_all();
            if first.is_err() && copies.finish_all().is_err() {
                self.strays().unsettled.insert(device);
            }
            all = all.and(first);
        }
        all
    }

    fn is_settled(&self) -> bool {
        self.strays().unsettled.is_empty()
    }

    /// Maps a recorded mapping again, with the rights it had. After a failure it goes on where it stopped.
    fn remount_mapping(&self, log: &mut StepLog, start: u64) -> PoolResult<()> {
        let (range, raw, access, device, presence) = {
            let tables = self.tables();
            let Some(mapping) = tables.mappings.get(&start) else {
                return Ok(());
            };
            let found = &tables.allocations[mapping.allocation];
            let Some(raw) = found.raw else {
                return Err(PoolError::MissingImport {
                    address: mapping.range.start,
                    size_bytes: mapping.range.size_bytes,
                });
            };
            (mapping.range, raw, mapping.access_list(), found.device(), mapping.presence)
        };
        let about = || format!("mapping at {} again", range.start);
        if presence == Presence::Absent {
            log.call();
            self.driver.map(range, raw).about(about, range.size_bytes, device)?;
            set_presence(&mut self.tables(), start, Presence::Bare);
        }
        if presence != Presence::Whole && !access.is_empty() {
            log.call();
            self.driver.set_access(range, &access).about(about, range.size_bytes, device)?;
        }
        set_presence(&mut self.tables(), start, Presence::Whole);
        Ok(())
    }

    /// Takes a mapping out of the driver's page tables and keeps its record.
    fn unmount(&self, log: &mut StepLog, range: VaRange) -> PoolResult<()> {
        log.call();
        // SAFETY: vacating runs with the application's calls held back and the devices drained (module
        // head), so no work uses the range until it is mapped again.
        unsafe { self.driver.unmap(range) }.about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            None,
        )?;
        set_presence(&mut self.tables(), range.start.0, Presence::Absent);
        Ok(())
    }
}

fn set_presence(tables: &mut Tables, start: u64, presence: Presence) {
    if let Some(mapping) = tables.mappings.get_mut(&start) {
        mapping.presence = presence;
    }
}

/// Present mappings of the allocations that `choose` picks, with their allocation's key.
fn present_mappings(
    tables: &Tables,
    choose: impl Fn(&crate::pool::tables::Allocation) -> bool,
) -> Vec<VaRange> {
    tables
        .mappings
        .values()
        .filter(|mapping| mapping.is_present() && choose(&tables.allocations[mapping.allocation]))
        .map(|mapping| mapping.range)
        .collect()
}
