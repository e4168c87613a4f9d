//! A pause and a resume by stages, for two tenants that change places: one gives device memory up window by window, while
//! the other takes it.
//!
//! ```text
//!   Quiesced --reserve--> Reserved --depart--> Departing --release--> (memory is away)
//!                                                | ^ release_stage
//!   Shut --arrive--> Arriving --restore_rest--> Returning
//!                      | ^ restore_stage
//! ```
//!
//! A stage is the same save and release, or creation and restoring, as of a whole selection, of the allocations that it
//! picks ([`Selection::Part`]).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::keeper::{Origin, Shut};
use super::mappings::is_import;
use super::pause::{Leaving, Undone};
use super::queue::{Queue, Waiting, Window};
use super::quiesced::{Done, Failed, Quiesced};
use super::release::Meanwhile;
use super::restore::Room;
use super::resume::Returning;
use super::save::{Behind, Space};
use super::still::Still;
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Layout, Placed, Row, Selection, StayReason, Survey};
use crate::pool::Pool;
use crate::store::{Copies, HostBudget, Pins, Store};
use crate::{AllocationId, VirtualHandle};

/// Bytes by device.
pub type ByDevice = BTreeMap<DeviceOrdinal, u64>;

/// Where all that leaves is saved, by store: host memory and the file. Stages are saved there in whatever order they come,
/// and again where one has failed.
#[derive(Debug)]
struct LaidOut([(HashMap<VirtualHandle, Placed>, u64); 2]);

impl LaidOut {
    fn new(layouts: [Layout; 2]) -> Self {
        Self(layouts.map(|Layout { placed, end_bytes }| {
            (placed.into_iter().map(|placed| (placed.row, placed)).collect(), end_bytes)
        }))
    }

    /// What goes to host memory and is not there yet as it is.
    fn changing(&self) -> impl Iterator<Item = VirtualHandle> + '_ {
        let [(kept, _), _] = &self.0;
        kept.values().filter(|placed| !placed.is_same).map(|placed| placed.row)
    }

    /// How much of it saving copies: the rest of what is saved is zero, or lies in host memory already.
    fn copied_bytes(&self, row: VirtualHandle) -> u64 {
        let placed = self.0.iter().filter_map(|(placed, _)| placed.get(&row));
        placed.map(Placed::copied_bytes).sum()
    }

    fn of(&self, rows: [&[Waiting]; 2]) -> [Layout; 2] {
        self.0.each_ref().map(|(placed, end_bytes)| {
            let rows = rows.iter().flat_map(|rows| rows.iter());
            let placed = rows.filter_map(|waiting| placed.get(&waiting.row).cloned()).collect();
            Layout { placed, end_bytes: *end_bytes }
        })
    }
}

/// How much [`Departing::release`] copies before it releases that, where all at once has failed.
const REST_BYTES: u64 = 2 << 30;

/// What is still to be moved on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// All of it.
    pub bytes: u64,
    /// The smallest allocation.
    pub smallest_bytes: u64,
}

/// What a stage has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// As of any step; its bytes are those of `bytes`.
    pub log: StepLog,
    /// Device memory that is gone, or has come.
    pub bytes: ByDevice,
    /// Contents copied between devices and the host.
    pub copied_bytes: u64,
}

impl Moved {
    fn add(&mut self, other: Self) {
        self.log.add(other.log);
        self.copied_bytes += other.copied_bytes;
        for (device, bytes) in other.bytes {
            *self.bytes.entry(device).or_insert(0) += bytes;
        }
    }
}

/// All host memory and disk space is held that saving a selection takes, and nothing is copied or unmapped yet: going on
/// can be done by this process alone, and so can going back. Dropping it is going back.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Reserved<D: Driver> {
    leaving: Leaving<D>,
    laid_out: LaidOut,
}

/// Memory of a selection is being released, and there is no way back but a resume. Dropping it leaves the gate shut, with
/// what is left on its device.
#[derive(Debug)]
#[must_use = "the pause is not over: what is left holds device memory"]
pub struct Departing<D: Driver> {
    leaving: Leaving<D>,
    queue: Queue,
    laid_out: LaidOut,
}

/// Memory of a selection comes back by stages. Dropping it gives that up again, contents kept.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Arriving<D: Driver> {
    returning: Returning<D>,
    /// What is not back yet.
    queue: Queue,
}

impl<D: Driver> Quiesced<D> {
    /// Pause 3 of one by stages, or in one that releases while it saves: takes all host memory and disk space that saving
    /// `selection` takes, pinned. `stays`, `copies` and `budget` are as in [`Quiesced::save`].
    ///
    /// # Errors
    /// As [`Quiesced::save`], with nothing moved.
    ///
    /// # Driver calls
    /// `cuMemHostRegister`.
    pub fn reserve(
        mut self,
        selection: Selection,
        stays: &[(AllocationId, StayReason)],
        copies: Copies,
        budget: impl FnOnce(u64) -> HostBudget,
    ) -> Result<(Reserved<D>, StepLog), Failed<Leaving<D>>> {
        self.shut_mut().begin_pause(selection.clone());
        let leaving = Leaving { quiesced: self, selection };
        let pool = Arc::clone(leaving.pool());
        // In a statement of its own: the ledger's lock is not held any more when memory is taken.
        let stays = pool.ledger().set_stays(stays);
        let held = stays.and_then(|()| {
            let Leaving { quiesced, selection } = &leaving;
            let held_bytes = pool.arena().held_bytes();
            let budget = budget(held_bytes);
            let still = Still::drained(quiesced);
            still.hold_space(selection, quiesced.seen(), copies, budget)
        });
        match held {
            Ok((log, laid_out)) => Ok((Reserved { leaving, laid_out }, log)),
            Err(error) => Err(Failed::new(leaving, error)),
        }
    }
}

impl<D: Driver> Reserved<D> {
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.leaving.pool()
    }

    /// Which of it leaves.
    pub fn selection(&self) -> &Selection {
        &self.leaving.selection
    }

    /// The point of no return: memory is released from here on.
    pub fn depart(mut self) -> Departing<D> {
        self.leaving.quiesced.shut_mut().stay_shut();
        let Self { leaving, laid_out } = self;
        let mut queue = Queue::default();
        {
            let mut ledger = leaving.pool().ledger();
            // From here on a copy counts only if nothing of it changes: a stage may write where that of a later one lies.
            for row in laid_out.changing() {
                ledger.forget_copy(row);
            }
            for row in
                ledger.rows_in(&leaving.selection).filter(|row| is_to_go(row, &leaving.selection))
            {
                let waiting = match laid_out.copied_bytes(row.handle()) {
                    0 => Waiting::unlimited(row),
                    copied_bytes => Waiting::of(row, 0, copied_bytes),
                };
                queue.add(if is_import(row) { waiting } else { waiting.counting(row) });
            }
        }
        Departing { leaving, queue, laid_out }
    }

    /// As [`Leaving::undo`]: nothing was unmapped, and host memory is given back.
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
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.leaving.pool()
    }

    /// Which of it leaves.
    pub fn selection(&self) -> &Selection {
        &self.leaving.selection
    }

    /// What is left, by device.
    pub fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        self.queue.left()
    }

    /// Saves and releases own memory, of each device as much as copies what `window` says, or one allocation of which more
    /// is copied; nothing is copied of a device that it does not name. What needs no copy and what was imported goes with
    /// the first stage.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] and [`crate::PoolError::FileRefused`]: what this stage was about is on its device, with its
    /// contents, and another stage or [`Departing::release`] may be tried.
    ///
    /// # Driver calls
    /// Those of [`Quiesced::save`] and [`super::Prepared::release`].
    pub fn release_stage(&mut self, window: &ByDevice) -> PoolResult<Moved> {
        let (saved, others) = self.pick(|device| window.get(&device).copied());
        let outcome = self.release_picked(&saved, &others);
        self.put_back(&saved);
        self.put_back(&others);
        outcome
    }

    fn release_picked(&self, saved: &[Waiting], others: &[Waiting]) -> PoolResult<Moved> {
        let part = part_of([saved, others]);
        let before = self.resident_of(&part);
        let still = Still::drained(&self.leaving.quiesced);
        // Which copies stay was settled when host memory was taken.
        let behind = Behind::Keeps(&part);
        let space = Space::Held(Box::new(self.laid_out.of([saved, others])));
        let mut log = still.save(behind, space)?;
        let copied_bytes = std::mem::take(&mut log.bytes);
        log.add(still.release_some(&part)?);
        let gone = self.gone_of(&part, before);
        Ok(Moved { log, bytes: gone, copied_bytes })
    }

    /// All that is left, each part of it released as soon as it is saved. What has gone when that fails is in `all` too.
    fn release_at_once(&mut self, all: &mut Moved) -> PoolResult<()> {
        let (saved, others) = self.pick(|_| Some(u64::MAX));
        let part = part_of([&saved, &others]);
        let before = self.resident_of(&part);
        let still = Still::drained(&self.leaving.quiesced);
        let behind = Behind::GivesBack(Meanwhile::new(&part));
        let space = Space::Held(Box::new(self.laid_out.of([&saved, &others])));
        let outcome = still.save(behind, space);
        let outcome = outcome.and_then(|mut log| {
            let copied_bytes = std::mem::take(&mut log.bytes);
            log.add(still.release_selected(&part)?);
            Ok((log, copied_bytes))
        });
        let gone = self.gone_of(&part, before);
        let gone_log = StepLog { bytes: gone.values().sum(), ..StepLog::default() };
        all.add(Moved { log: gone_log, bytes: gone, ..Moved::default() });
        match outcome {
            // What the driver would not let go is noted, and not offered again.
            Ok((log, copied_bytes)) => {
                let log = StepLog { bytes: 0, ..log };
                all.add(Moved { log, copied_bytes, ..Moved::default() });
                Ok(())
            }
            Err(error) => {
                self.put_back(&saved);
                self.put_back(&others);
                Err(error)
            }
        }
    }

    /// The end of a pause by stages, or of one that releases while it saves: saves and releases all that is left, and each part
    /// as soon as it is saved. Where that fails, it goes on by smaller parts. What the driver would not copy or let go stays on
    /// its device with its contents, and is named in the notes. The first result is as that of [`super::Prepared::release`].
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] when copies are under way that did not end, or the context is lost.
    ///
    /// # Driver calls
    /// As [`Departing::release_stage`].
    pub fn release(mut self) -> Result<(Done<D>, Moved), Failed<Self>> {
        let mut all = Moved::default();
        match self.release_at_once(&mut all) {
            Err(error) if error.poisons_context() || !self.pool().deferred.is_settled() => {
                return Err(Failed::new(self, error));
            }
            Err(error) => tracing::warn!(%error, "what is left is released by parts"),
            Ok(()) => {}
        }
        loop {
            let (saved, others) = self.pick(|_| Some(REST_BYTES));
            if saved.is_empty() && others.is_empty() {
                break;
            }
            match self.release_picked(&saved, &others) {
                // What the driver would not let go is noted, and not offered again and again.
                Ok(moved) => all.add(moved),
                Err(error) => {
                    if let Err(error) = self.release_less(&saved, others, error, &mut all) {
                        return Err(Failed::new(self, error));
                    }
                }
            }
        }
        Still::drained(&self.leaving.quiesced).note_used();
        Ok((self.leaving.into_released(), all))
    }

    /// These were not saved and released, for `error`: some of them alone. What is not offered again stays, and is noted.
    fn release_less(
        &mut self,
        saved: &[Waiting],
        others: Vec<Waiting>,
        error: PoolError,
        all: &mut Moved,
    ) -> PoolResult<()> {
        if error.poisons_context() || !self.pool().deferred.is_settled() {
            self.put_back(saved);
            self.put_back(&others);
            return Err(error);
        }
        let is_unsaved = |waiting: &Waiting| {
            self.pool().ledger().row(waiting.row).is_some_and(|row| !row.is_kept())
        };
        let (unsaved, kept): (Vec<_>, Vec<_>) = others.into_iter().partition(is_unsaved);
        // Once more without those that need nothing saved.
        if !unsaved.is_empty() {
            tracing::warn!(%error, "what nobody saves is released alone");
            self.put_back(saved);
            self.put_back(&kept);
            let part = part_of([&unsaved, &[]]);
            let before = self.resident_of(&part);
            match Still::drained(&self.leaving.quiesced).release_selected(&part) {
                Ok(log) => all.add(Moved { log, bytes: before, ..Moved::default() }),
                Err(error) => {
                    self.put_back(&unsaved);
                    return Err(error);
                }
            }
        // Then without those of which something must be copied.
        } else if !saved.is_empty() && !kept.is_empty() {
            tracing::warn!(%error, "what needs no copy is released alone");
            self.put_back(saved);
            match self.release_picked(&[], &kept) {
                Ok(moved) => all.add(moved),
                Err(error) => all.log.notes.push(stays(&error)),
            }
        } else {
            all.log.notes.push(stays(&error));
        }
        Ok(())
    }

    /// Puts nothing back, because the context is lost, and leaves the gate shut.
    pub fn abandon(self) {
        self.leaving.abandon();
    }

    /// What the next stage is about: what it copies, and what leaves without. It waits no more.
    fn pick(
        &mut self,
        window: impl Fn(DeviceOrdinal) -> Option<u64>,
    ) -> (Vec<Waiting>, Vec<Waiting>) {
        let Self { leaving, queue, .. } = self;
        let ledger = leaving.pool().ledger();
        let window = |device| window(device).map(Window::AtLeastOne);
        queue.take(window, |row| {
            ledger.row(row).is_some_and(|row| is_to_go(row, &leaving.selection))
        })
    }

    /// What is on its device still waits for a further stage.
    fn put_back(&mut self, picked: &[Waiting]) {
        let Self { leaving, queue, .. } = self;
        let ledger = leaving.pool().ledger();
        for waiting in picked.iter().rev() {
            if ledger.row(waiting.row).is_some_and(|row| is_to_go(row, &leaving.selection)) {
                queue.put_back(*waiting);
            }
        }
    }

    /// What of `part` is on its devices no more, of what was there `before`.
    fn gone_of(&self, part: &Selection, before: ByDevice) -> ByDevice {
        let after = self.resident_of(part);
        let gone = |(device, bytes)| (device, bytes - after.get(&device).copied().unwrap_or(0));
        before.into_iter().map(gone).collect()
    }

    fn resident_of(&self, part: &Selection) -> ByDevice {
        self.pool().ledger().own_bytes(part, Row::is_resident)
    }
}

impl<D: Driver, W: Origin> Shut<D, W> {
    /// Resume 1 of one by stages. What comes back is given to those whom it is owed, and to nobody else before it is all
    /// there.
    pub fn arrive(self, brings: W::Brings) -> Arriving<D> {
        let (mut shut, selection) = (self.into_gate(), brings.into());
        shut.pool().freeze();
        shut.begin_resume(selection.clone());
        let mut queue = Queue::default();
        {
            let ledger = shut.pool().ledger();
            for row in ledger.rows_in(&selection).filter(|row| row.is_own()) {
                queue.add(if row.is_resident() {
                    // What has stayed on its device takes no memory.
                    Waiting::unlimited(row)
                } else {
                    let rank = if is_copied(row) { FIRST } else { THEN };
                    Waiting::of(row, rank, row.size_bytes()).counting(row)
                });
            }
        }
        Arriving { returning: Returning { shut, selection }, queue }
    }
}

impl<D: Driver> Arriving<D> {
    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.returning.pool()
    }

    /// Which of it comes back.
    pub fn selection(&self) -> &Selection {
        self.returning.selection()
    }

    /// What is still away, by device.
    pub fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        self.queue.left()
    }

    /// Creates, maps and fills own memory, of each device no more than `allowed`; what has contents to put back comes
    /// first.
    ///
    /// # Errors
    /// As [`Shut::create_own`] and [`Returning::restore_own`]; the resume can be undone then, and nothing else.
    ///
    /// # Driver calls
    /// As [`Shut::create_own`] and [`Returning::restore_own`], without exports.
    pub fn restore_stage(&mut self, allowed: &ByDevice) -> PoolResult<Moved> {
        self.bring_back(|device| allowed.get(&device).copied().unwrap_or(0))
    }

    /// The end of it: brings back whatever is still away, and exports what peers had imported, as far as `exports_max`
    /// descriptors go.
    ///
    /// # Errors
    /// As [`Arriving::restore_stage`], in a state that can be undone.
    ///
    /// # Driver calls
    /// As [`Arriving::restore_stage`], then `cuMemExportToShareableHandle`.
    pub fn restore_rest(
        mut self,
        exports_max: usize,
    ) -> Result<(Returning<D>, Moved), Failed<Returning<D>>> {
        let moved = self.bring_back(|_| u64::MAX).and_then(|mut moved| {
            let Returning { selection, .. } = &self.returning;
            let still = self.returning.still();
            moved.log.timed("export", |log| still.export_again(log, selection, exports_max))?;
            Ok(moved)
        });
        match moved {
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

    fn bring_back(&mut self, allowed: impl Fn(DeviceOrdinal) -> u64) -> PoolResult<Moved> {
        let mut log = StepLog::default();
        let picked = self.pick(allowed);
        let part = part_of([&picked, &[]]);
        let bytes = self.pool().ledger().own_bytes(&part, |row| !row.is_resident());
        match self.fill(&mut log, &part) {
            Ok(copied_bytes) => Ok(Moved { log, bytes, copied_bytes }),
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
    fn fill(&self, log: &mut StepLog, part: &Selection) -> PoolResult<u64> {
        let (still, selection) = (self.returning.still(), self.returning.selection());
        log.add(still.create_own(part, Room::of(selection))?);
        let mut restored = still.restore_own(part, 0)?;
        let copied_bytes = std::mem::take(&mut restored.bytes);
        log.add(restored);
        Ok(copied_bytes)
    }

    /// What the next stage is about.
    fn pick(&mut self, allowed: impl Fn(DeviceOrdinal) -> u64) -> Vec<Waiting> {
        let Self { returning, queue } = self;
        let ledger = returning.pool().ledger();
        let window = |device| Some(Window::AtMost(allowed(device)));
        let (mut picked, others) = queue.take(window, |row| ledger.row(row).is_some());
        picked.extend(others);
        picked
    }
}

/// What has contents to put back.
const FIRST: usize = 0;
/// What has none.
const THEN: usize = 1;

/// Is it on its device, and leaves in a pause of `selection`?
fn is_to_go(row: &Row, selection: &Selection) -> bool {
    row.is_resident() && row.can_leave() && selection.has(row)
}

fn part_of(picked: [&[Waiting]; 2]) -> Selection {
    Selection::Part(picked.into_iter().flatten().map(|waiting| waiting.row).collect())
}

fn stays(error: &PoolError) -> String {
    format!("stays on its device: {error}")
}

/// Has it contents that are copied to it from somewhere?
fn is_copied(row: &Row) -> bool {
    row.saved().is_some_and(|saved| !saved.extents.is_empty())
}

impl<D: Driver> Still<'_, D> {
    /// Takes all host memory and disk space that saving `selection` takes, within `budget`, and lays out where.
    fn hold_space(
        &self,
        selection: &Selection,
        survey: &Survey,
        copies: Copies,
        budget: HostBudget,
    ) -> PoolResult<(StepLog, LaidOut)> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        let mut arena = self.pool.arena();
        let [kept, filed] = log.timed("lay out", |log| {
            self.layouts_within(log, &arena, selection, survey, copies, budget)
        })?;
        let end_bytes = kept.end_bytes;
        let held = log.timed("reserve disk", |_| arena.disk.reserve(&filed.copied_places()));
        let held = held.and_then(|()| {
            let devices = self.pool.devices();
            let Some(&device) = devices.first() else { return Ok(()) };
            let pins = Pins::of(&devices);
            let about = || "pinning of host memory".to_owned();
            self.pool.driver.make_current(device).about(about, 0, Some(device))?;
            if !kept.placed.is_empty() {
                arena.pin_again(&mut log, pins)?;
            }
            arena.set_nodes(self.pool.nodes_of(&devices));
            arena.begin_growth(end_bytes);
            let grown = arena.grow_to(&mut log, end_bytes, pins);
            arena.end_growth();
            grown?;
            if filed.placed.is_empty() { Ok(()) } else { arena.hold_ring(&mut log) }
        });
        if let Err(error) = held {
            let live_bytes = self.pool.ledger().end_in(Store::Host);
            arena.give_back_unused(live_bytes);
            drop(self.pool.give_disk_back(&mut arena));
            return Err(error);
        }
        Ok((log, LaidOut::new([kept, filed])))
    }
}

#[cfg(test)]
mod tests;
