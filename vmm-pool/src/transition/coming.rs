//! Memory on its way back: created, mapped and filled window by window, then imports, then the process runs.
//!
//! ```text
//!   Shut --create_own--> Arriving --restore_rest--> Returning: import_batch --map_imports--> Restored --commit--> Done
//!   Shut --arrive------>   | ^ restore_stage
//! ```
//!
//! [`Shut::create_own`] creates all of it first, so that a resume of several processes fails before anything is copied;
//! [`Shut::arrive`] leaves that to the windows, for a swap, where the other tenant's memory has still to go.

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

/// Own memory of a selection is on its way back. Dropping it gives that up again, contents kept.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Arriving<D: Driver> {
    returning: Returning<D>,
    /// Imports that the pause could not give up. Their owner makes other memory, so they go before it is fetched.
    stale: Rows,
    /// The allocations that are not back yet.
    queue: Queue,
}

/// Own memory of a selection is back, and imports follow. Dropping it gives that up again, contents kept, and leaves the
/// gate shut where the driver refuses.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Returning<D: Driver> {
    shut: ShutGate<D>,
    selection: Selection,
    /// The rows of the selection when the resume began.
    rows: Arc<Rows>,
}

/// All of it is back, and the process can run. Dropping it is going back.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Restored<D: Driver> {
    returning: Returning<D>,
}

impl<D: Driver, W: Origin> Shut<D, W> {
    /// Resume 1: creates all own memory that `brings` names and that is not resident, or none. What comes back is given to those
    /// whom it is owed, and to nobody else before it is all there. Before that it gives up imports that the driver would not unmap
    /// in the pause.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDeviceMemory`] with what is missing; [`crate::PoolError::Driver`]. Either way what was
    /// created is released again, and the process is as before once the state that comes with the error is dropped.
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

    /// The same, but creates nothing yet.
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
                    // It takes no memory any more.
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

    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.returning.pool()
    }

    /// Returns the selection of the memory that comes back.
    pub fn selection(&self) -> &Selection {
        self.returning.selection()
    }

    /// Returns the memory that is still away, by device.
    pub fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        self.queue.left()
    }

    /// Resume 2, in part: creates what is missing, maps own memory at its old addresses, and puts contents back, of each device
    /// no more than `allowed`; what has contents comes first. Saved contents stay where they are until [`Restored::commit`].
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDeviceMemory`] with nothing created: another stage may be tried. [`crate::PoolError::Driver`],
    /// [`crate::PoolError::FileUnreadable`] and [`crate::PoolError::FileCorrupted`], with copies finished; the resume can be
    /// undone then, and nothing else.
    ///
    /// # Driver calls
    /// As [`Shut::create_own`]; `cuMemMap` and `cuMemSetAccess` in groups, `cuMemcpyHtoDAsync` behind each, and behind the last of
    /// them for what comes from the file; `cuStreamSynchronize`.
    pub fn restore_stage(&mut self, allowed: &ByDevice) -> PoolResult<Moved> {
        self.bring_back(|device| allowed.get(&device).copied().unwrap_or(0), None)
    }

    /// Resume 2, to its end: the same for all that is left. Meanwhile it exports what peers had imported of all that comes back, as
    /// far as `exports_max` descriptors go: the rest is exported when a process comes for it.
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
                // Whatever comes next must not take it for back.
                for waiting in picked.into_iter().rev() {
                    self.queue.put_back(waiting);
                }
                Err(error)
            }
        }
    }

    /// Creates what is missing of `part`, and puts its contents back. Says how much was copied, in bytes.
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

/// Imports of `rows` that are here before any has been fetched.
fn stale_imports<D: Driver>(pool: &Pool<D>, rows: &Rows) -> Rows {
    let ledger = pool.ledger();
    let here = ledger.rows.among(rows).filter(|row| is_import(row) && row.is_resident());
    Rows::of(here.map(Row::handle))
}

/// The rank of allocations with contents to put back.
const FIRST: usize = 0;
/// The rank of allocations without such contents.
const THEN: usize = 1;

/// Has it contents that are copied to it from somewhere?
fn is_copied(row: &Row) -> bool {
    row.saved().is_some_and(|saved| !saved.extents.is_empty())
}

impl<D: Driver> Returning<D> {
    fn still(&self) -> Still<'_, D> {
        Still::not_touched_yet(&self.shut)
    }

    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.shut.pool()
    }

    /// Returns the selection of the memory that comes back.
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
    /// [`crate::PoolError::MissingImport`] when one has not been imported; [`crate::PoolError::Driver`]. What was mapped stays until
    /// the resume is undone.
    ///
    /// # Driver calls
    /// `cuMemMap` and `cuMemSetAccess` for all.
    pub fn map_imports(self) -> Result<(Restored<D>, StepLog), Failed<Self>> {
        match self.still().map_imports(&self.rows) {
            Ok(log) => Ok((Restored { returning: self }, log)),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    /// Gives up again all that has come back; saved contents are kept. The process is as before once the first result
    /// is dropped.
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

    /// Gives nothing up, because the context is lost, and leaves the gate shut.
    pub fn abandon(self) {
        self.shut.abandon();
    }
}

impl<D: Driver> Restored<D> {
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.returning.pool()
    }

    /// Returns the selection of the memory that has come back.
    pub fn selection(&self) -> &Selection {
        &self.returning.selection
    }

    /// Resume 4: the contents on the device are the contents, and saved copies are void; what is not back is set
    /// aside. The process runs once the first result is dropped. The descriptors are those that nobody will fetch any
    /// more, and the file, once it is empty: closing takes the driver some 45 us for each of the first and the
    /// filesystem longer for the other, so the caller lets the application run on first.
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
                // It was paused as a whole, and its importers run on without the other tags too.
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
    /// As [`Still::drop_imports`]; almost always there are none.
    fn drop_stale(&self, stale: &Rows) -> PoolResult<StepLog> {
        if stale.is_empty() { Ok(StepLog::default()) } else { self.drop_imports(stale) }
    }

    /// Undo of all that a resume of `rows` has done.
    pub(super) fn take_back(&self, rows: &Rows) -> PoolResult<StepLog> {
        let mut log = self.drop_imports(rows)?;
        log.add(self.release_selected(rows)?);
        Ok(log)
    }
}

impl<D: Driver> Pool<D> {
    /// Offers the driver once more what it would not take back while the process came to run. For a caller that nobody waits for.
    ///
    /// # Driver calls
    /// `cuMemRelease`.
    pub fn release_deferred(&self) {
        self.deferred.release_again();
    }

    /// The contents on the device are the contents, what is not back with `rows` is set aside, and others are given
    /// memory again. Returns descriptors that nobody needs.
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
