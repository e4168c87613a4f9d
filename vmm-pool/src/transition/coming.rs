//! The way back of memory: it is created, mapped and filled window by window. Then imports follow, then the process
//! runs.
//!
//! ```text
//!   Shut --create_own--> Arriving --restore_rest--> Returning: import_batch --map_imports--> Restored --commit--> Done
//!   Shut --arrive------>   | ^ restore_stage
//! ```
//!
//! [`Shut::create_own`] creates all memory first, so that a resume of several processes fails before anything is
//! copied. [`Shut::arrive`] creates memory window by window, for a swap, in which the other tenant's memory must leave
//! first.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::keeper::{Origin, Shut};
use super::queue::{Allowance, ByDevice, Left, Moved, Queue, Waiting};
use super::release::is_import;
use super::restore::{ImportRequest, Room};
use super::still::{Done, Failed, ShutGate, Still};
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::PoolResult;
use crate::gate::Mode;
use crate::ids::AllocationId;
use crate::journal::StepLog;
use crate::ledger::{Row, Rows, Selection};
use crate::pool::{Borrowed, Pool};
use crate::store::HostArena;

/// Own memory of a selection is being restored. Dropping this releases it again, with its contents kept.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Arriving<D: Driver> {
    returning: Returning<D>,
    /// Imports that the pause could not give up. Their owner creates new memory, so these are unmapped before that is
    /// fetched.
    stale: Rows,
    /// The allocations that are not restored yet.
    queue: Queue,
}

/// Own memory of a selection is restored, and imports follow. Dropping this releases the memory again, with its
/// contents kept. If the driver refuses, the gate stays shut.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Returning<D: Driver> {
    shut: ShutGate<D>,
    selection: Selection,
    /// The rows of the selection when the resume began.
    rows: Arc<Rows>,
}

/// All memory is restored, and the process can run. Dropping this undoes the resume.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Restored<D: Driver> {
    returning: Returning<D>,
}

impl<D: Driver, W: Origin> Shut<D, W> {
    /// Resume 1: creates all own memory that `brings` names and that is not resident, or none. Until all is restored,
    /// such memory is only given to processes to which it is owed. First gives up imports that the driver refused to
    /// unmap in the pause.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDeviceMemory`] with the missing bytes; [`crate::PoolError::Driver`]. In both cases the
    /// created memory is released again. The process is as before once the state that comes with the error is dropped.
    ///
    /// # Driver calls
    /// `cuMemGetInfo`, `cuMemCreate`; `cuMemUnmap` and `cuMemRelease` of such imports.
    pub fn create_own(self, brings: W::Brings) -> Result<(Arriving<D>, StepLog), Failed<Done<D>>> {
        let (shut, selection) = (self.into_gate(), brings.into());
        shut.pool().holdings().freeze();
        let rows = shut.pool().ledger().rows.choose(&selection);
        let still = Still::not_touched_yet(&shut);
        let stale = stale_imports(shut.pool(), &rows);
        let created = still.drop_stale(&stale).and_then(|mut log| {
            log.add(still.create_own(&rows, Room::of(&selection))?);
            Ok(log)
        });
        match created {
            Ok(log) => Ok((Arriving::new(shut, selection, rows), log)),
            Err(error) => Err(Failed::new(shut.end_as_before(), error)),
        }
    }

    /// As [`Shut::create_own`], but creates nothing yet.
    pub fn arrive(self, brings: W::Brings) -> Arriving<D> {
        let (shut, selection) = (self.into_gate(), brings.into());
        shut.pool().holdings().freeze();
        let rows = shut.pool().ledger().rows.choose(&selection);
        Arriving::new(shut, selection, rows)
    }
}

impl<D: Driver> Arriving<D> {
    fn new(mut shut: ShutGate<D>, selection: Selection, rows: Rows) -> Self {
        let rows = Arc::new(rows);
        let stale = stale_imports(shut.pool(), &rows);
        shut.begin_resume(Arc::clone(&rows));
        let mut queue = Queue::default();
        let mut copied_bytes = 0;
        {
            let ledger = shut.pool().ledger();
            for row in ledger.rows.among(&rows).filter(|row| row.is_own()) {
                let stored = row.saved().map(|saved| saved.stored_bytes(&row.copied_parts()));
                copied_bytes += stored.unwrap_or(0);
                queue.add(if row.is_resident() {
                    // It needs no memory any more.
                    Waiting::unlimited(row)
                } else {
                    let rank = if is_copied(row) { FIRST } else { THEN };
                    Waiting::of(row, rank, row.size_bytes()).counting(row)
                });
            }
        }
        shut.pool().copied.begin(copied_bytes);
        Self { returning: Returning { shut, selection, rows }, stale, queue }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.returning.pool()
    }

    /// Returns the selection of the memory that is restored.
    pub fn selection(&self) -> &Selection {
        self.returning.selection()
    }

    /// Returns the memory that is still off its device, by device.
    pub fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        self.queue.left()
    }

    /// Resume 2, in part: creates missing memory, maps own memory at its old addresses, and restores contents, of each
    /// device no more than `allowed`. Memory with contents comes first. Saved contents keep their places until
    /// [`Restored::commit`].
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDeviceMemory`] with nothing created: another stage may be tried.
    /// [`crate::PoolError::Driver`], [`crate::PoolError::FileUnreadable`] and [`crate::PoolError::FileCorrupted`], with
    /// copies finished: then only an undo is possible.
    ///
    /// # Driver calls
    /// As [`Shut::create_own`]; `cuMemMap` and `cuMemSetAccess` in groups, `cuMemcpyHtoDAsync` after each group, and
    /// after the last group for contents of the file; `cuStreamSynchronize`.
    pub fn restore_stage(&mut self, allowed: &ByDevice) -> PoolResult<Moved> {
        self.bring_back(|device| allowed.get(&device).copied().unwrap_or(0), None)
    }

    /// Resume 2, to its end: the same for all memory that is left. Meanwhile it exports memory that peers had imported,
    /// for at most `exports_max` descriptors. Other memory is exported when a process fetches it.
    ///
    /// # Errors
    /// As [`Arriving::restore_stage`], in a state that can be undone.
    ///
    /// # Driver calls
    /// As [`Arriving::restore_stage`], and `cuMemExportToShareableHandle`.
    pub fn restore_rest(
        mut self,
        exports_max: usize,
    ) -> Result<(Returning<D>, Moved), Failed<Returning<D>>> {
        match self.bring_back(|_| u64::MAX, Some(exports_max)) {
            Ok(moved) => Ok((self.returning, moved)),
            Err(error) => Err(Failed::new(self.returning, error)),
        }
    }

    /// As [`Returning::undo`].
    ///
    /// # Errors
    /// As [`Returning::undo`].
    pub fn undo(self) -> Result<(Done<D>, StepLog), Failed<Returning<D>>> {
        self.returning.undo()
    }

    /// As [`Returning::abandon`].
    pub fn abandon(self) {
        self.returning.abandon();
    }

    fn bring_back(
        &mut self,
        allowed: impl Fn(DeviceOrdinal) -> u64,
        exports_max: Option<usize>,
    ) -> PoolResult<Moved> {
        let picked = self.pick(allowed);
        let part = Rows::of(picked.iter().map(|waiting| waiting.row));
        let bytes = self.pool().ledger().rows.own_bytes(&part, |row| !row.is_resident());
        match self.fill(&part, exports_max) {
            Ok((log, copied_bytes)) => Ok(Moved { log, bytes, copied_bytes }),
            Err(error) => {
                // No later step may treat this memory as restored.
                for waiting in picked.into_iter().rev() {
                    self.queue.put_back(waiting);
                }
                Err(error)
            }
        }
    }

    /// Creates the missing memory of `part`, and restores its contents. Returns the number of bytes copied.
    fn fill(&self, part: &Rows, exports_max: Option<usize>) -> PoolResult<(StepLog, u64)> {
        let Returning { selection, rows, .. } = &self.returning;
        let still = self.returning.still();
        let mut log = still.drop_stale(&self.stale)?;
        log.add(still.create_own(part, Room::of(selection))?);
        let mut restored = still.restore_own(part, exports_max.map(|most| (&**rows, most)))?;
        let copied_bytes = std::mem::take(&mut restored.bytes);
        log.add(restored);
        Ok((log, copied_bytes))
    }

    /// Takes the allocations of the next window from the queue.
    fn pick(&mut self, allowed: impl Fn(DeviceOrdinal) -> u64) -> Vec<Waiting> {
        let Self { returning, queue, .. } = self;
        let ledger = returning.pool().ledger();
        let window = |device| Some(Allowance::AtMost(allowed(device)));
        let (mut picked, others) = queue.take(window, |row| ledger.rows.get(row).is_some());
        picked.extend(others);
        picked
    }
}

/// Returns imports of `rows` that are resident before any has been fetched.
fn stale_imports<D: Driver>(pool: &Pool<D>, rows: &Rows) -> Rows {
    let ledger = pool.ledger();
    let here = ledger.rows.among(rows).filter(|row| is_import(row) && row.is_resident());
    Rows::of(here.map(Row::handle))
}

/// The rank of allocations with contents to restore.
const FIRST: usize = 0;
/// The rank of allocations without such contents.
const THEN: usize = 1;

/// Has the allocation saved contents that a resume copies to it?
fn is_copied(row: &Row) -> bool {
    row.saved().is_some_and(|saved| !saved.extents.is_empty())
}

impl<D: Driver> Returning<D> {
    fn still(&self) -> Still<'_, D> {
        Still::not_touched_yet(&self.shut)
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.shut.pool()
    }

    /// Returns the selection of the memory that is restored.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Lists the allocations that must be fetched, by owner, in the ledger's order.
    pub fn import_requests(&self) -> Vec<ImportRequest> {
        self.pool().import_requests(&self.rows)
    }

    /// Resume 3: imports from `descriptors`, which are closed then. May be called any number of times.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]. What was imported stays until it is mapped or the resume is undone.
    ///
    /// # Driver calls
    /// `cuMemImportFromShareableHandle` for all.
    pub fn import_batch(
        &mut self,
        descriptors: HashMap<AllocationId, Borrowed>,
    ) -> PoolResult<StepLog> {
        self.still().import_batch(descriptors)
    }

    /// Resume 3, second half: maps all imports at their old addresses.
    ///
    /// # Errors
    /// [`crate::PoolError::MissingImport`] if one has not been imported; [`crate::PoolError::Driver`]. Imports that
    /// were mapped stay until the resume is undone.
    ///
    /// # Driver calls
    /// `cuMemMap` and `cuMemSetAccess` for all.
    pub fn map_imports(self) -> Result<(Restored<D>, StepLog), Failed<Self>> {
        match self.still().map_imports(&self.rows) {
            Ok(log) => Ok((Restored { returning: self }, log)),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    /// Releases all restored memory again, and keeps saved contents. The process is as before once the first result is
    /// dropped.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], for another try.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub fn undo(self) -> Result<(Done<D>, StepLog), Failed<Self>> {
        match self.still().take_back(&self.rows) {
            Ok(log) => Ok((self.shut.end_as_before(), log)),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    /// Ends it without an undo, because the context is lost. The gate stays shut.
    pub fn abandon(self) {
        self.shut.abandon();
    }
}

impl<D: Driver> Restored<D> {
    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.returning.pool()
    }

    /// Returns the selection of the restored memory.
    pub fn selection(&self) -> &Selection {
        &self.returning.selection
    }

    /// Resume 4: the contents on the device become the current ones, and saved copies are void. Memory that is not
    /// restored is set aside. The process runs once the first result is dropped. The descriptors are those that nobody
    /// will fetch any more, and the file, once it is empty. Closing costs the driver some 45 us for each descriptor,
    /// and the filesystem more for the file. So the caller lets the application run before it closes them.
    #[must_use = "closing the descriptors gives back what they hold"]
    pub fn commit(self) -> (Done<D>, Vec<OwnedFd>) {
        let (pool, rows) = (self.pool(), &*self.returning.rows);
        {
            let (for_readers, for_pauses) =
                (pool.copies.are_retained(), pool.copies.stay_for_pauses());
            let mut ledger = pool.ledger();
            ledger.rows.retain_copies(rows, for_readers, for_pauses);
            ledger.rows.arrived(rows);
            if let Selection::Staged(_) = self.selection() {
                // The process was paused as a whole, and its importers also run on without the other tags.
                ledger.rows.owe_all_but(rows);
            }
        }
        let spare = pool.run_again(rows);
        if pool.copies.is_given_back() {
            pool.host_memory().give_back_by(HostArena::shrink_to);
        }
        (self.returning.shut.end_in(Mode::Open), spare)
    }

    /// As [`Returning::undo`].
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], for another try.
    pub fn undo(self) -> Result<(Done<D>, StepLog), Failed<Returning<D>>> {
        self.returning.undo()
    }

    /// As [`Returning::abandon`].
    pub fn abandon(self) {
        self.returning.abandon();
    }
}

impl<D: Driver> Still<'_, D> {
    /// As [`Still::drop_imports`]. Almost always there are none.
    fn drop_stale(&self, stale: &Rows) -> PoolResult<StepLog> {
        if stale.is_empty() { Ok(StepLog::default()) } else { self.drop_imports(stale) }
    }

    /// Undoes all that a resume of `rows` has done.
    pub(super) fn take_back(&self, rows: &Rows) -> PoolResult<StepLog> {
        let mut log = self.drop_imports(rows)?;
        log.add(self.release_selected(rows)?);
        Ok(log)
    }
}

impl<D: Driver> Pool<D> {
    /// Retries releases that the driver refused while the process resumed. Call it when nobody waits for the caller.
    ///
    /// # Driver calls
    /// `cuMemRelease`.
    pub fn release_deferred(&self) {
        self.deferred.release_again();
    }

    /// Makes the contents on the device the current ones, and sets aside what is not restored with `rows`. Importers
    /// can get memory again. Returns descriptors that nobody needs.
    pub(super) fn run_again(&self, rows: &Rows) -> Vec<OwnedFd> {
        let garbage = {
            let mut ledger = self.ledger();
            ledger.rows.void_copies();
            ledger.run_on();
            ledger.end_fetching(rows)
        };
        self.dispose_quietly(garbage);
        let mut arena = self.host_memory().arena();
        let mut spare: Vec<OwnedFd> =
            self.host_memory().give_disk_back(&mut arena).into_iter().collect();
        spare.extend(self.ledger().rows.take_spare_exports());
        spare
    }
}
