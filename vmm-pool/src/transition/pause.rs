//! A pause, from the drained process to the point of no return.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::quiesced::{Done, Failed, Quiesced};
use super::save::{Behind, Space};
use super::still::Still;
use crate::AllocationId;
use crate::driver::Driver;
use crate::error::PoolResult;
use crate::gate::Mode;
use crate::journal::StepLog;
use crate::ledger::{Selection, StayReason};
use crate::pool::Pool;
use crate::store::{Copies, HostBudget};

/// Memory of a selection is on its way out: some may be saved and unmapped. Dropping it undoes that, and leaves the
/// gate shut where the driver refuses.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Leaving<D: Driver> {
    pub(super) quiesced: Quiesced<D>,
    pub(super) selection: Selection,
}

/// All that must be kept is saved, and everything can still go back: going on is as good as going back. Dropping it is
/// going back.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Prepared<D: Driver> {
    leaving: Leaving<D>,
}

/// A pause that came to nothing.
#[derive(Debug)]
pub struct Undone<D: Driver> {
    /// The process runs as before once it is dropped.
    pub done: Done<D>,
    /// What was done for that.
    pub log: StepLog,
    /// Descriptors that nobody needs, to be closed when there is time.
    pub spare: Vec<OwnedFd>,
}

impl<D: Driver> Quiesced<D> {
    /// Pause 3: saves what must be kept of `selection`, and unmaps it and what was imported. Every handle is kept, of
    /// imports too, so that [`Prepared::undo`] asks nobody. `stays` is what all processes leave in place; `copies` says
    /// which copies of earlier pauses may stay; `budget` is told how much host memory is held, in bytes, and answers how
    /// much more may be taken. Where that is too little for the copies, fewer stay.
    ///
    /// # Errors
    /// [`crate::PoolError::Disowned`], [`crate::PoolError::OutOfHostMemory`] and [`crate::PoolError::OutOfDisk`] before anything is changed;
    /// [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::FileRefused`] and [`crate::PoolError::Driver`] with everything that is
    /// still mapped intact. Disk space that was taken for nothing is given back, and host memory down to what the last
    /// completed pause used: that much will be wanted again, and bringing it in is most of the time of a first pause.
    ///
    /// # Driver calls
    /// `cuMemcpyDtoHAsync` and `cuStreamSynchronize` in groups; between them `cuMemUnmap` of imports, then of what
    /// has been copied; the same for what goes to the file.
    pub fn save(
        mut self,
        selection: Selection,
        stays: &[(AllocationId, StayReason)],
        copies: Copies,
        budget: impl FnOnce(u64) -> HostBudget,
    ) -> Result<(Prepared<D>, StepLog), Failed<Leaving<D>>> {
        self.shut_mut().begin_pause(selection.clone());
        let leaving = Leaving { quiesced: self, selection };
        match leaving.save(stays, copies, budget) {
            Ok(log) => Ok((Prepared { leaving }, log)),
            Err(error) => Err(Failed::new(leaving, error)),
        }
    }
}

impl<D: Driver> Leaving<D> {
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.quiesced.pool()
    }

    fn save(
        &self,
        stays: &[(AllocationId, StayReason)],
        copies: Copies,
        budget: impl FnOnce(u64) -> HostBudget,
    ) -> PoolResult<StepLog> {
        self.pool().ledger().set_stays(stays)?;
        let held_bytes = self.pool().arena().held_bytes();
        let budget = budget(held_bytes);
        let space = Space::Take(self.quiesced.seen(), copies, budget);
        Still::drained(&self.quiesced).save(Behind::Keeps(&self.selection), space)
    }

    /// Maps everything again.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], for another try.
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`, `cuMemHostUnregister`.
    pub fn undo(self) -> Result<Undone<D>, Failed<Self>> {
        match Still::drained(&self.quiesced).put_back(&self.selection) {
            Ok((log, spare)) => {
                let done = self.quiesced.into_shut().end_as_before();
                Ok(Undone { done, log, spare })
            }
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    /// Puts nothing back, because the context is lost, and leaves the gate shut.
    pub fn abandon(self) {
        self.quiesced.into_shut().abandon();
    }

    /// All that leaves is released: when the result is dropped, the process runs on without some tags, or the gate
    /// admits only calls that give memory up or ask about it.
    pub(super) fn into_released(self) -> Done<D> {
        let then = match &self.selection {
            selection @ Selection::Tagged(..) => {
                let mut ledger = self.pool().ledger();
                ledger.owe_by_tag(|row| selection.has(row));
                ledger.run_on();
                Mode::Open
            }
            Selection::Whole
            | Selection::SetAside(..)
            | Selection::Staged(_)
            | Selection::Part(_) => Mode::Offloaded,
        };
        self.quiesced.into_shut().end_in(then)
    }
}

impl<D: Driver> Prepared<D> {
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.leaving.pool()
    }

    /// Which of it leaves.
    pub fn selection(&self) -> &Selection {
        &self.leaving.selection
    }

    /// Pause 4, after which there is no way back: releases imports, unmaps what is mapped of own memory and releases
    /// it. A block that the driver would not let go stays resident, and is named in the notes. When the first result is
    /// dropped, the process runs on without some tags, or the gate admits only calls that give memory up or ask about it.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] before anything was unmapped, when copies are under way that did not end.
    /// Every other trouble is a note, because what was released cannot be had back by failing.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub fn release(self) -> Result<(Done<D>, StepLog), Failed<Self>> {
        let Leaving { quiesced, selection } = &self.leaving;
        let log = match Still::drained(quiesced).release_selected(selection) {
            Ok(log) => log,
            Err(error) => return Err(Failed::new(self, error)),
        };
        Ok((self.leaving.into_released(), log))
    }

    /// As [`Leaving::undo`].
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], for another try.
    pub fn undo(self) -> Result<Undone<D>, Failed<Leaving<D>>> {
        self.leaving.undo()
    }

    /// As [`Leaving::abandon`].
    pub fn abandon(self) {
        self.leaving.abandon();
    }
}

impl<D: Driver> Still<'_, D> {
    /// Undo of [`Still::save`]: own memory and imports are still there, with their contents; they are mapped again,
    /// and the process goes on as before.
    pub(super) fn put_back(&self, selection: &Selection) -> PoolResult<(StepLog, Vec<OwnedFd>)> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        log.timed("map again", |log| {
            self.map_rows_again(log, |row| row.is_resident() && selection.has(row))
        })?;
        let spare = self.pool.run_again(selection);
        self.pool.give_back_host_memory();
        Ok((log, spare))
    }
}
