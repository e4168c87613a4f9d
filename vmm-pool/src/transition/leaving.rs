//! The way out of memory: it is prepared, then saved and released window by window.
//!
//! ```text
//!   Quiesced --prepare--> Prepared --depart--> Departing --release--> Done (memory is away)
//!                                                | ^ release_stage
//! ```
//!
//! There is one way out, with two schedules ([`Schedule`]), of which the caller chooses one. A window saves and
//! releases the allocations that it picks. A pause is one window, and so is a swap of tenants that fit together. Any
//! other swap releases memory as fast as the second tenant allocates it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::queue::{Allowance, ByDevice, Left, Moved, Queue, Waiting};
use super::release::{Meanwhile, is_import};
use super::save::Behind;
use super::still::{Done, Failed, Quiesced, Still};
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::{Describe, PoolError, PoolResult};
use crate::gate::Mode;
use crate::ids::{AllocationId, VirtualHandle};
use crate::journal::StepLog;
use crate::ledger::{After, Layout, Placed, Row, Rows, Selection, StayReason, Survey};
use crate::pool::Pool;
use crate::store::{Copies, HostArena, HostBudget, Pins, Schedule};

/// The places where leaving memory is saved, by store: host memory and the file. Stages are saved there in any order,
/// and a stage is saved again if it has failed.
#[derive(Debug, Default)]
struct LaidOut([(HashMap<VirtualHandle, Placed>, u64); 2]);

impl LaidOut {
    fn new(layouts: [Layout; 2]) -> Self {
        Self(layouts.map(|Layout { placed, end_bytes }| {
            (placed.into_iter().map(|placed| (placed.row, placed)).collect(), end_bytes)
        }))
    }

    /// Lists the allocations that go to host memory, and whose copy there is not current.
    fn changing(&self) -> impl Iterator<Item = VirtualHandle> + '_ {
        let [(kept, _), _] = &self.0;
        kept.values().filter(|placed| !placed.is_same).map(|placed| placed.row)
    }

    /// Counts the bytes of `row` that saving copies. The rest of the saved contents is zero, or is in host memory
    /// already.
    fn copied_bytes(&self, row: VirtualHandle) -> u64 {
        let placed = self.0.iter().filter_map(|(placed, _)| placed.get(&row));
        placed.map(Placed::copied_bytes).sum()
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|(placed, _)| placed.is_empty())
    }

    fn of(&self, picked: &[Waiting]) -> [Layout; 2] {
        self.0.each_ref().map(|(placed, end_bytes)| {
            let rows = picked.iter();
            let placed = rows.filter_map(|waiting| placed.get(&waiting.row).cloned()).collect();
            Layout { placed, end_bytes: *end_bytes }
        })
    }
}

/// Memory of a selection is leaving: some of it may be saved and unmapped. Dropping this undoes that. If the driver
/// refuses, the gate stays shut.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Leaving<D: Driver> {
    quiesced: Quiesced<D>,
    selection: Selection,
    /// The rows of the selection when the pause began.
    rows: Arc<Rows>,
}

/// The process can go on without others, because all contents are saved, or all space for them is allocated. It can
/// also go back: dropping this undoes the pause.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Prepared<D: Driver> {
    leaving: Leaving<D>,
    /// The places of all contents that are not saved yet.
    laid_out: LaidOut,
}

/// Memory of a selection is being released, and only a resume can restore it. Dropping this leaves the gate shut, and
/// the rest of the memory on its device.
#[derive(Debug)]
#[must_use = "the pause is not over: what is left holds device memory"]
pub struct Departing<D: Driver> {
    leaving: Leaving<D>,
    queue: Queue,
    laid_out: LaidOut,
    /// The memory that was released in windows that failed. The next successful window reports it.
    untold: Moved,
}

/// A pause that was undone.
#[derive(Debug)]
pub struct Undone<D: Driver> {
    /// The process runs as before once it is dropped.
    pub done: Done<D>,
    /// The record of the undo.
    pub log: StepLog,
    /// Descriptors that nobody needs, to be closed when there is time.
    pub spare: Vec<OwnedFd>,
}

impl<D: Driver> Quiesced<D> {
    /// Pause 3: prepares `selection` to leave. With [`Schedule::SaveFirst`] it saves all contents that must be kept,
    /// and unmaps them and the imports. With [`Schedule::SaveMeanwhile`] it allocates the host memory and disk space
    /// for that, and moves nothing. Every handle is kept, also of imports, so that [`Prepared::undo`] needs no other
    /// process. `stays` has the allocations that all processes leave in place. `copies` says which copies of earlier
    /// pauses may stay. `budget` gets the size of the host memory that is held, and returns how much more may be
    /// allocated, in bytes. If that is too little for the copies, fewer stay.
    ///
    /// # Errors
    /// [`crate::PoolError::Disowned`], [`crate::PoolError::OutOfHostMemory`] and [`crate::PoolError::OutOfDisk`] before
    /// anything is changed; [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::FileRefused`] and
    /// [`crate::PoolError::Driver`], with all that is still mapped intact. Unused disk space is given back, and so is
    /// host memory beyond what the last completed pause used. That much is needed again, and populating it is most of
    /// the time of a first pause.
    ///
    /// # Driver calls
    /// `cuMemHostRegister`. To save: `cuMemcpyDtoHAsync` and `cuStreamSynchronize` in groups; between them `cuMemUnmap`
    /// of imports, then of memory that has been copied; the same for contents that go to the file.
    pub fn prepare(
        mut self,
        selection: Selection,
        stays: &[(AllocationId, StayReason)],
        copies: Copies,
        budget: impl FnOnce(u64) -> HostBudget,
        schedule: Schedule,
    ) -> Result<(Prepared<D>, StepLog), Failed<Leaving<D>>> {
        let rows = self.shut_mut().begin_pause(&selection);
        let leaving = Leaving { quiesced: self, selection, rows };
        match leaving.prepare(stays, copies, budget, schedule) {
            Ok((laid_out, log)) => Ok((Prepared { leaving, laid_out }, log)),
            Err(error) => Err(Failed::new(leaving, error)),
        }
    }
}

impl<D: Driver> Leaving<D> {
    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.quiesced.pool()
    }

    fn prepare(
        &self,
        stays: &[(AllocationId, StayReason)],
        copies: Copies,
        budget: impl FnOnce(u64) -> HostBudget,
        schedule: Schedule,
    ) -> PoolResult<(LaidOut, StepLog)> {
        self.pool().ledger().rows.set_stays(stays)?;
        let held_bytes = self.pool().host_memory().arena().held_bytes();
        let budget = budget(held_bytes);
        let still = Still::drained(&self.quiesced);
        let seen = self.quiesced.seen();
        let (mut log, layouts) = still.lay_out(&self.rows, seen, copies, budget)?;
        let copied = layouts.iter().flat_map(|layout| &layout.placed).map(Placed::copied_bytes);
        self.pool().copied.begin(copied.sum());
        let prepared = match schedule {
            Schedule::SaveMeanwhile => {
                still.hold_space(&mut log, &layouts).map(|()| LaidOut::new(layouts))
            }
            Schedule::SaveFirst => {
                let saved = still.save(&mut log, Behind::Keeps(&self.rows), layouts);
                saved.map(|()| LaidOut::default())
            }
        };
        if prepared.is_err() {
            still.give_space_back();
        }
        prepared.map(|laid_out| (laid_out, log))
    }

    /// Maps everything again.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], for another try.
    ///
    /// # Driver calls
    /// `cuMemMap`, `cuMemSetAccess`, `cuMemHostUnregister`.
    pub fn undo(self) -> Result<Undone<D>, Failed<Self>> {
        let before = self.quiesced.shut().before();
        match Still::drained(&self.quiesced).put_back(&self.rows, before) {
            Ok((log, spare)) => {
                let done = self.quiesced.into_shut().end_as_before();
                Ok(Undone { done, log, spare })
            }
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    /// Ends it without an undo, because the context is lost. The gate stays shut.
    pub fn abandon(self) {
        self.quiesced.into_shut().abandon();
    }

    /// Ends the pause, after all memory is released. When the result is dropped, the process runs on without some tags,
    /// or the gate admits only calls that give memory up or ask about it.
    pub(super) fn into_released(self) -> Done<D> {
        self.pool().ledger().rows.disown_imports(&self.rows);
        let then = match self.selection.after_pause() {
            After::Running => {
                let mut ledger = self.pool().ledger();
                ledger.rows.owe_by_tag(&self.rows);
                ledger.run_on();
                Mode::Open
            }
            After::Paused => Mode::Offloaded,
        };
        self.quiesced.into_shut().end_in(then)
    }
}

impl<D: Driver> Prepared<D> {
    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.leaving.pool()
    }

    /// Returns the selection of the memory that leaves.
    pub fn selection(&self) -> &Selection {
        &self.leaving.selection
    }

    /// Pause 4, the point of no return: memory is released from here on.
    pub fn depart(mut self) -> Departing<D> {
        self.leaving.quiesced.shut_mut().stay_shut();
        let Self { leaving, laid_out } = self;
        let mut queue = Queue::default();
        {
            let mut ledger = leaving.pool().ledger();
            // From here on a copy is valid only if nothing of it changes: a stage may overwrite the copy of a later
            // stage.
            for row in laid_out.changing() {
                ledger.rows.forget_copy(row);
            }
            for row in ledger.rows.among(&leaving.rows).filter(|row| is_to_go(row)) {
                let waiting = match laid_out.copied_bytes(row.handle()) {
                    0 => Waiting::unlimited(row),
                    copied_bytes => Waiting::of(row, 0, copied_bytes),
                };
                queue.add(if is_import(row) { waiting } else { waiting.counting(row) });
            }
        }
        Departing { leaving, queue, laid_out, untold: Moved::default() }
    }

    /// As [`Leaving::undo`].
    ///
    /// # Errors
    /// As [`Leaving::undo`].
    pub fn undo(self) -> Result<Undone<D>, Failed<Leaving<D>>> {
        self.leaving.undo()
    }

    /// As [`Leaving::abandon`].
    pub fn abandon(self) {
        self.leaving.abandon();
    }
}

impl<D: Driver> Departing<D> {
    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.leaving.pool()
    }

    /// Returns the selection of the memory that leaves.
    pub fn selection(&self) -> &Selection {
        &self.leaving.selection
    }

    /// Returns the memory that is left, by device.
    pub fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        self.queue.left()
    }

    /// Saves and releases own memory. Of each device it copies at most the bytes in `window`, or one larger allocation.
    /// It copies nothing of a device that `window` does not name. Imports, and memory that needs no copy, leave in the
    /// first stage.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] and [`crate::PoolError::FileRefused`]: memory that has not left is on its device,
    /// with its contents, and another stage or [`Departing::release`] may be tried.
    ///
    /// # Driver calls
    /// Those of [`Quiesced::prepare`], and `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub fn release_stage(&mut self, window: &ByDevice) -> PoolResult<Moved> {
        let picked = self.pick(|device| window.get(&device).copied());
        let outcome = self.give_back(&picked, Schedule::SaveMeanwhile);
        self.put_back(&picked);
        outcome.map(|()| std::mem::take(&mut self.untold))
    }

    /// Ends a pause: saves and releases all memory that is left. Each part is released as soon as it is saved or, with
    /// [`Schedule::SaveFirst`], once all parts are saved. If that fails, it goes on with one allocation at a time.
    /// Memory that the driver refuses to copy or to release stays on its device with its contents, and the notes name
    /// it. When the first result is dropped, the process runs on without some tags, or the gate admits only calls that
    /// give memory up or ask about it.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] if copies are under way that did not end, or if the context is lost.
    ///
    /// # Driver calls
    /// As [`Departing::release_stage`].
    pub fn release(mut self, rest: Schedule) -> Result<(Done<D>, Moved), Failed<Self>> {
        let picked = self.pick(|_| Some(u64::MAX));
        if let Err(error) = self.give_back(&picked, rest) {
            self.put_back(&picked);
            if !self.may_go_on(&error) {
                return Err(Failed::new(self, error));
            }
            tracing::warn!(%error, "what is left is given back one allocation at a time");
            if let Err(error) = self.give_back_one_by_one() {
                return Err(Failed::new(self, error));
            }
        }
        Still::drained(&self.leaving.quiesced).note_used();
        let Self { leaving, untold, .. } = self;
        Ok((leaving.into_released(), untold))
    }

    /// Ends it without an undo, because the context is lost. The gate stays shut.
    pub fn abandon(self) {
        self.leaving.abandon();
    }

    /// Releases all memory that is left, one allocation at a time. An allocation that cannot leave is noted, and not
    /// tried again. Returns an error if the driver is not sound; the other allocations then still wait.
    fn give_back_one_by_one(&mut self) -> PoolResult<()> {
        let mut left = self.pick(|_| Some(u64::MAX)).into_iter();
        let mut stuck: Option<(u64, PoolError)> = None;
        while let Some(one) = left.next() {
            let Err(error) = self.give_back(&[one], Schedule::SaveMeanwhile) else { continue };
            if !self.may_go_on(&error) {
                let left: Vec<_> = std::iter::once(one).chain(left).collect();
                self.put_back(&left);
                return Err(error);
            }
            let (count, first) = stuck.take().unwrap_or((0, error));
            stuck = Some((count + 1, first));
        }
        let note = stuck.map(|(count, first)| match count {
            1 => format!("stays on its device: {first}"),
            _ => format!("{count} allocations stay on their devices; the first: {first}"),
        });
        self.untold.log.notes.extend(note);
        Ok(())
    }

    /// Is the driver sound, and no copy under way, after this error?
    fn may_go_on(&self, error: &PoolError) -> bool {
        !error.poisons_context() && self.pool().deferred.is_settled()
    }

    /// Saves these allocations. Releases each part as soon as it is saved, or all parts afterwards.
    fn give_back(&mut self, picked: &[Waiting], schedule: Schedule) -> PoolResult<()> {
        let part = Rows::of(picked.iter().map(|waiting| waiting.row));
        let before = self.resident_of(&part);
        let still = Still::drained(&self.leaving.quiesced);
        let behind = match schedule {
            Schedule::SaveFirst => Behind::Keeps(&part),
            Schedule::SaveMeanwhile => Behind::GivesBack(Meanwhile::new(&part)),
        };
        let mut log = StepLog::default();
        let saved = still.save(&mut log, behind, self.laid_out.of(picked));
        let copied_bytes = std::mem::take(&mut log.bytes);
        // If all was saved before, nothing was kept here.
        log.kept = log.kept.filter(|_| !self.laid_out.is_empty());
        let outcome = saved.and_then(|()| still.release_some(&part)).map(|done| log.add(done));
        let after = self.resident_of(&part);
        let gone = |(device, bytes)| (device, bytes - after.get(&device).copied().unwrap_or(0));
        let bytes: ByDevice = before.into_iter().map(gone).collect();
        let log = StepLog { bytes: bytes.values().sum(), ..log };
        self.untold.add(Moved { log, bytes, copied_bytes });
        outcome
    }

    /// Takes the allocations of the next window from the queue.
    fn pick(&mut self, window: impl Fn(DeviceOrdinal) -> Option<u64>) -> Vec<Waiting> {
        let Self { leaving, queue, .. } = self;
        let ledger = leaving.pool().ledger();
        let window = |device| window(device).map(Allowance::AtLeastOne);
        let (mut picked, others) =
            queue.take(window, |row| ledger.rows.get(row).is_some_and(is_to_go));
        picked.extend(others);
        picked
    }

    /// Puts allocations that are still on their device back into the queue, for a later window.
    fn put_back(&mut self, picked: &[Waiting]) {
        let Self { leaving, queue, .. } = self;
        let ledger = leaving.pool().ledger();
        for waiting in picked.iter().rev() {
            if ledger.rows.get(waiting.row).is_some_and(is_to_go) {
                queue.put_back(*waiting);
            }
        }
    }

    fn resident_of(&self, part: &Rows) -> ByDevice {
        self.pool().ledger().rows.own_bytes(part, Row::is_resident)
    }
}

/// Is the memory on its device, and may a pause release it?
fn is_to_go(row: &Row) -> bool {
    row.is_resident() && row.can_leave()
}

impl<D: Driver> Still<'_, D> {
    /// Assigns places to the contents of `rows`, within `budget`, and reserves the disk space for them.
    fn lay_out(
        &self,
        rows: &Rows,
        survey: &Survey,
        copies: Copies,
        budget: HostBudget,
    ) -> PoolResult<(StepLog, [Layout; 2])> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        let mut arena = self.pool.host_memory().arena();
        let (layouts, note) =
            log.timed("lay out", |_| self.layouts_within(&arena, rows, survey, copies, budget))?;
        log.notes.extend(note);
        let [_, filed] = &layouts;
        let reserved = log.timed("reserve disk", |_| arena.disk.reserve(&filed.copied_places()));
        if let Err(error) = reserved {
            drop(self.pool.host_memory().give_disk_back(&mut arena));
            return Err(error);
        }
        Ok((log, layouts))
    }

    /// Allocates and pins all host memory that saving to `layouts` needs.
    fn hold_space(&self, log: &mut StepLog, [kept, filed]: &[Layout; 2]) -> PoolResult<()> {
        let devices = self.pool.holdings().devices();
        let Some(&device) = devices.first() else { return Ok(()) };
        let pins = Pins::of(&devices);
        let about = || "pinning of host memory".to_owned();
        self.pool.driver.make_current(device).about(about, 0, Some(device))?;
        let host = self.pool.host_memory();
        host.begin_growth(kept.end_bytes, filed.end_bytes > 0);
        let mut arena = host.arena();
        let pinned = if kept.placed.is_empty() { Ok(()) } else { arena.pin_again(log, pins) };
        let grown = pinned.and_then(|()| arena.grow_to(log, kept.end_bytes, pins));
        arena.end_growth();
        grown?;
        if filed.placed.is_empty() { Ok(()) } else { arena.hold_ring(log) }
    }

    /// Gives back space that was allocated and in which nothing is saved.
    fn give_space_back(&self) {
        if self.pool.deferred.is_settled() {
            self.pool.host_memory().give_back_by(HostArena::give_back_unused);
        }
        drop(self.pool.host_memory().give_disk_back(&mut self.pool.host_memory().arena()));
    }

    /// Undoes [`Still::save`]. Own memory and imports still exist, with their contents. They are mapped again, and the
    /// process goes on as before, with the gate in its mode before.
    pub(super) fn put_back(
        &self,
        rows: &Rows,
        before: Mode,
    ) -> PoolResult<(StepLog, Vec<OwnedFd>)> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        // Copies may have used them when the save failed.
        self.drop_views(&mut log);
        log.timed("map again", |log| {
            self.map_rows_again(log, rows, |row| row.backing().has_contents())
        })?;
        let spare = if before == Mode::Open {
            self.pool.run_again(rows)
        } else {
            self.pool.ledger().rows.stand_on(rows);
            Vec::new()
        };
        self.pool.host_memory().give_back_by(HostArena::give_back_unused);
        Ok((log, spare))
    }
}
