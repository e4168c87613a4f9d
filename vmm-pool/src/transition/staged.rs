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

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::handover::{Handed, Shapes, wanted_shape};
use super::keeper::{Origin, Shut};
use super::links::Through;
use super::mappings::is_import_of;
use super::pause::{Leaving, Undone};
use super::quiesced::{Done, Failed, Quiesced};
use super::release::Meanwhile;
use super::restore::Room;
use super::resume::Returning;
use super::save::{Behind, Space};
use super::still::Still;
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Layout, Ledger, Row, Selection, StayReason, Survey};
use crate::pool::Pool;
use crate::store::{Copies, HostArena, HostBudget, Store};
use crate::{AllocationId, VirtualHandle};

/// Bytes by device.
pub type ByDevice = BTreeMap<DeviceOrdinal, u64>;

/// What a stage saves before it releases that, and what it releases besides.
type Picked = (HashSet<VirtualHandle>, HashSet<VirtualHandle>);

/// How much of each allocation saving copies, where that is anything: the rest of what is saved is zero, or lies in host
/// memory already.
type Copied = HashMap<VirtualHandle, u64>;

/// What [`Still::hold_space`] has taken room for.
#[derive(Debug)]
struct Held {
    copied: Copied,
    laid_out: Box<[Layout; 2]>,
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
    /// Device memory that is gone, or has come; what changes hands counts.
    pub bytes: ByDevice,
    /// Contents copied between devices and the host.
    pub copied_bytes: u64,
    /// Of what has come: what was another's, in place of being created.
    pub taken: Shapes,
}

impl Moved {
    fn add(&mut self, other: Self) {
        self.log.add(other.log);
        self.copied_bytes += other.copied_bytes;
        for (device, bytes) in other.bytes {
            *self.bytes.entry(device).or_insert(0) += bytes;
        }
        for (shape, count) in other.taken {
            *self.taken.entry(shape).or_insert(0) += count;
        }
    }
}

/// How memory of a selection goes once all is held that saving it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Stages {
    /// All of it by [`Departing::release`], as it was laid out.
    One,
    /// By [`Departing::release_stage`], each as it comes.
    Many,
}

/// All host memory and disk space is held that saving a selection takes, and nothing is copied or unmapped yet: going on
/// can be done by this process alone, and so can going back. Dropping it is going back.
#[derive(Debug)]
#[must_use = "dropping it undoes the pause"]
pub struct Reserved<D: Driver> {
    leaving: Leaving<D>,
    held: Held,
}

/// Memory of a selection is being released, and there is no way back but a resume. Dropping it leaves the gate shut, with
/// what is left on its device.
#[derive(Debug)]
#[must_use = "the pause is not over: what is left holds device memory"]
pub struct Departing<D: Driver> {
    leaving: Leaving<D>,
    copied: Copied,
    /// What could not be saved; it stays on its device.
    stuck: HashSet<VirtualHandle>,
    /// Where the next stage has its host memory from: a save that fails gives back what was held.
    space: Space,
}

/// Memory of a selection comes back by stages. Dropping it gives that up again, contents kept.
#[derive(Debug)]
#[must_use = "dropping it undoes the resume"]
pub struct Arriving<D: Driver> {
    returning: Returning<D>,
    /// What is back, with its contents.
    back: HashSet<VirtualHandle>,
}

impl<D: Driver> Quiesced<D> {
    /// Pause 3 of one by stages, or in one that releases while it saves: takes all host memory and disk space that saving
    /// `selection` takes, pinned. By stages that is more where saved contents lie apart, since parts are laid out as they
    /// come. `stays`, `copies` and `budget` are as in [`Quiesced::save`].
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
        stages: Stages,
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
            still.hold_space(selection, quiesced.seen(), copies, stages, budget)
        });
        match held {
            Ok((log, held)) => Ok((Reserved { leaving, held }, log)),
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
        let Self { leaving, held: Held { copied, laid_out } } = self;
        let space = Space::Held(Some(laid_out));
        Departing { leaving, copied, stuck: HashSet::new(), space }
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
        let ledger = self.pool().ledger();
        left_of(ledger.rows().filter(|row| self.is_to_go(row)))
    }

    /// Is it own memory that is still to leave?
    fn is_to_go(&self, row: &Row) -> bool {
        row.is_own()
            && row.is_resident()
            && row.can_leave()
            && self.leaving.selection.has(row)
            && !self.stuck.contains(&row.handle())
    }

    /// Saves and releases own memory, of each device as much as copies what `window` says, or one allocation of which more
    /// is copied; nothing is copied of a device that it does not name. What needs no copy and what was imported goes with
    /// the first stage. Of what goes, as many allocations of each shape as are `wanted` are handed over.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] and [`crate::PoolError::FileRefused`]: what this stage was about is on its device, with its
    /// contents, and another stage or [`Departing::release`] may be tried.
    ///
    /// # Driver calls
    /// Those of [`Quiesced::save`] and [`super::Prepared::release`], and `cuMemExportToShareableHandle`.
    pub fn release_stage(
        &mut self,
        window: &ByDevice,
        wanted: &Shapes,
    ) -> PoolResult<(Moved, Vec<Handed>)> {
        let picked = self.pick(|device| window.get(&device).copied());
        self.release_picked(picked, wanted)
    }

    fn release_picked(
        &mut self,
        (saved, others): Picked,
        wanted: &Shapes,
    ) -> PoolResult<(Moved, Vec<Handed>)> {
        let all: HashSet<VirtualHandle> = saved.union(&others).copied().collect();
        let before = self.resident_of(&all);
        let still = Still::drained(&self.leaving.quiesced);
        let part = Selection::Part(all);
        let survey = self.leaving.quiesced.seen();
        // Which copies stay was settled when host memory was taken.
        let behind = Behind::Keeps(&part);
        self.space.forget_layout();
        let space = self.space.take();
        let saved = still.save(behind, survey, Copies::All, space, Through::Engine);
        if saved.is_err() {
            // As much as was agreed on.
            self.space = Space::Take(HostBudget(None));
        }
        let mut log = saved?;
        let copied_bytes = std::mem::take(&mut log.bytes);
        let (released, handed) = still.hand_over(&part, wanted)?;
        log.add(released);
        let Selection::Part(all) = part else { return Ok((Moved::default(), handed)) };
        let gone = self.gone_of(&all, before);
        let moved = Moved { log, bytes: gone, copied_bytes, ..Moved::default() };
        Ok((moved, handed))
    }

    /// As [`Departing::release_picked`], for nobody.
    fn release_for_good(&mut self, picked: Picked) -> PoolResult<Moved> {
        self.release_picked(picked, &Shapes::new()).map(|(moved, _none)| moved)
    }

    /// All that is left, each part of it released as soon as it is saved. What has gone when that fails is in `all` too.
    fn release_at_once(&mut self, all: &mut Moved) -> PoolResult<()> {
        let (saved, others) = self.pick(|_| Some(u64::MAX));
        let whole: HashSet<VirtualHandle> = saved.union(&others).copied().collect();
        let before = self.resident_of(&whole);
        let part = Selection::Part(whole);
        let still = Still::drained(&self.leaving.quiesced);
        let behind = Behind::GivesBack(Meanwhile::new(&part));
        let survey = self.leaving.quiesced.seen();
        let space = self.space.take();
        let outcome = still.save(behind, survey, Copies::All, space, Through::Engine);
        if outcome.is_err() {
            self.space = Space::Take(HostBudget(None));
        }
        let outcome = outcome.and_then(|mut log| {
            let copied_bytes = std::mem::take(&mut log.bytes);
            log.add(still.release_selected(&part)?);
            Ok((log, copied_bytes))
        });
        let Selection::Part(whole) = part else { return Ok(()) };
        let gone = self.gone_of(&whole, before);
        let gone_log = StepLog { bytes: gone.values().sum(), ..StepLog::default() };
        all.add(Moved { log: gone_log, bytes: gone, ..Moved::default() });
        let (log, copied_bytes) = outcome?;
        let log = StepLog { bytes: 0, ..log };
        all.add(Moved { log, copied_bytes, ..Moved::default() });
        // What the driver would not let go is noted, and not offered again.
        self.stuck.extend(whole);
        Ok(())
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
            match self.release_for_good((saved.clone(), others.clone())) {
                Ok(moved) => {
                    all.add(moved);
                    // What the driver would not let go is noted, and not offered again and again.
                    self.stuck.extend(saved);
                    self.stuck.extend(others);
                }
                Err(error) if error.poisons_context() || !self.pool().deferred.is_settled() => {
                    return Err(Failed::new(self, error));
                }
                // Once more without those that need nothing saved.
                Err(error) if self.has_unsaved(&others) => {
                    tracing::warn!(%error, "what nobody saves is released alone");
                    let unsaved = self.unsaved_of(&others);
                    let before = self.resident_of(&unsaved);
                    let part = Selection::Part(unsaved.clone());
                    match Still::drained(&self.leaving.quiesced).release_selected(&part) {
                        Ok(log) => all.add(Moved { log, bytes: before, ..Moved::default() }),
                        Err(error) => return Err(Failed::new(self, error)),
                    }
                    self.stuck.extend(unsaved);
                }
                // Then without those of which something must be copied.
                Err(error) if !saved.is_empty() && !others.is_empty() => {
                    tracing::warn!(%error, "what needs no copy is released alone");
                    match self.release_for_good((HashSet::new(), others.clone())) {
                        Ok(moved) => all.add(moved),
                        Err(error) => all.log.notes.push(stays(&error)),
                    }
                    self.stuck.extend(others);
                }
                Err(error) => {
                    all.log.notes.push(stays(&error));
                    self.stuck.extend(saved);
                    self.stuck.extend(others);
                }
            }
        }
        Ok((self.leaving.into_released(), all))
    }

    /// Puts nothing back, because the context is lost, and leaves the gate shut.
    pub fn abandon(self) {
        self.leaving.abandon();
    }

    /// What the next stage is about: what it saves, and what leaves without.
    fn pick(&self, window: impl Fn(DeviceOrdinal) -> Option<u64>) -> Picked {
        let ledger = self.pool().ledger();
        let (mut saved, mut others) = (HashSet::new(), HashSet::new());
        let mut taken = ByDevice::new();
        for row in ledger.rows() {
            let is_import = is_import_of(row, &self.leaving.selection)
                && row.is_resident()
                && !self.stuck.contains(&row.handle());
            let copied_bytes = self.copied.get(&row.handle()).copied();
            match (row.device(), copied_bytes) {
                _ if is_import => {
                    others.insert(row.handle());
                }
                _ if !self.is_to_go(row) => {}
                (Some(device), Some(copied_bytes)) => {
                    let Some(window_bytes) = window(device) else { continue };
                    let taken = taken.entry(device).or_insert(0);
                    if *taken == 0 || *taken + copied_bytes <= window_bytes {
                        *taken += copied_bytes;
                        saved.insert(row.handle());
                    }
                }
                (Some(_) | None, _) => {
                    others.insert(row.handle());
                }
            }
        }
        (saved, others)
    }

    /// Those of `part` that hold nothing to be saved: imports, and memory whose contents nobody keeps.
    fn unsaved_of(&self, part: &HashSet<VirtualHandle>) -> HashSet<VirtualHandle> {
        let ledger = self.pool().ledger();
        let rows = ledger.rows().filter(|row| part.contains(&row.handle()));
        rows.filter(|row| !row.is_kept()).map(Row::handle).collect()
    }

    fn has_unsaved(&self, part: &HashSet<VirtualHandle>) -> bool {
        !self.unsaved_of(part).is_empty()
    }

    /// What of `part` is on its devices no more, of what was there `before`.
    fn gone_of(&self, part: &HashSet<VirtualHandle>, before: ByDevice) -> ByDevice {
        let after = self.resident_of(part);
        let gone = |(device, bytes)| (device, bytes - after.get(&device).copied().unwrap_or(0));
        before.into_iter().map(gone).collect()
    }

    fn resident_of(&self, part: &HashSet<VirtualHandle>) -> ByDevice {
        let ledger = self.pool().ledger();
        own_bytes_of(&ledger, part, Row::is_resident)
    }
}

impl<D: Driver, W: Origin> Shut<D, W> {
    /// Resume 1 of one by stages. What comes back is given to those whom it is owed, and to nobody else before it is all
    /// there.
    pub fn arrive(self, brings: W::Brings) -> Arriving<D> {
        let (mut shut, selection) = (self.into_gate(), brings.into());
        shut.pool().freeze();
        shut.begin_resume(selection.clone());
        Arriving { returning: Returning { shut, selection, may_ask: false }, back: HashSet::new() }
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
        let ledger = self.pool().ledger();
        let selection = self.returning.selection();
        let away = |row: &&Row| row.is_own() && !row.is_resident() && selection.has(row);
        left_of(ledger.rows().filter(away))
    }

    /// Creates, maps and fills own memory, of each device no more than `allowed`; what has contents to put back comes
    /// first. What was `handed` over takes the place of creating, beyond what is allowed; what of it nothing is missing
    /// for is given back to the driver. As many allocations of each shape as are `kept` stay away, for what will be handed
    /// over later.
    ///
    /// # Errors
    /// As [`Shut::create_own`] and [`Returning::restore_own`]; the resume can be undone then, and nothing else.
    ///
    /// # Driver calls
    /// As [`Shut::create_own`] and [`Returning::restore_own`], without exports, and `cuMemImportFromShareableHandle`.
    pub fn restore_stage(
        &mut self,
        allowed: &ByDevice,
        handed: Vec<Handed>,
        kept: &Shapes,
    ) -> PoolResult<Moved> {
        self.bring_back(|device| allowed.get(&device).copied().unwrap_or(0), handed, kept)
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
        let moved =
            self.bring_back(|_| u64::MAX, Vec::new(), &Shapes::new()).and_then(|mut moved| {
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

    fn bring_back(
        &mut self,
        allowed: impl Fn(DeviceOrdinal) -> u64,
        handed: Vec<Handed>,
        kept: &Shapes,
    ) -> PoolResult<Moved> {
        let still = self.returning.still();
        let selection = self.returning.selection();
        let mut log = StepLog::default();
        let taken = if handed.is_empty() {
            Shapes::new()
        } else {
            log.timed("take over", |log| {
                still.take_over(log, selection, handed, Room::of(selection))
            })?
        };
        let mut bytes = ByDevice::new();
        for (shape, count) in &taken {
            *bytes.entry(shape.device).or_insert(0) += shape.size_bytes * *count as u64;
        }
        let (part, is_rest) = self.pick(allowed, kept);
        {
            let ledger = self.pool().ledger();
            for (device, created) in own_bytes_of(&ledger, &part, |row| !row.is_resident()) {
                *bytes.entry(device).or_insert(0) += created;
            }
        }
        let part = Selection::Part(part);
        log.add(still.create_own(&part, Room::of(selection))?);
        // What comes last has the link to itself, or soon: the others have next to nothing left to copy out.
        let through = if is_rest { Through::OneLink } else { Through::Engine };
        let mut restored = still.restore_own(&part, 0, (through, self.returning.quiet()))?;
        let copied_bytes = std::mem::take(&mut restored.bytes);
        log.add(restored);
        if let Selection::Part(part) = part {
            self.back.extend(part);
        }
        Ok(Moved { log, bytes, copied_bytes, taken })
    }

    /// What the next stage is about, without what is `kept` for later. Is nothing left that has contents to put back?
    fn pick(
        &self,
        allowed: impl Fn(DeviceOrdinal) -> u64,
        kept: &Shapes,
    ) -> (HashSet<VirtualHandle>, bool) {
        let ledger = self.pool().ledger();
        let selection = self.returning.selection();
        let is_missing =
            |row: &&Row| row.is_own() && selection.has(row) && !self.back.contains(&row.handle());
        let (first, then): (Vec<&Row>, Vec<&Row>) =
            ledger.rows().filter(is_missing).partition(|row| is_copied(row));
        let kept_shape = |row: &Row| wanted_shape(row).filter(|shape| kept.contains_key(shape));
        let mut spare = Shapes::new();
        for shape in first.iter().chain(&then).filter_map(|row| kept_shape(row)) {
            *spare.entry(shape).or_insert(0) += 1;
        }
        for (shape, spare) in &mut spare {
            *spare = spare.saturating_sub(kept.get(shape).copied().unwrap_or(0));
        }
        let mut taken = ByDevice::new();
        let mut part = HashSet::new();
        for row in first.iter().copied().chain(then) {
            // What has stayed on its device takes no memory.
            if let (false, Some(device)) = (row.is_resident(), row.device()) {
                let mut spare = kept_shape(row).map(|shape| spare.entry(shape).or_insert(0));
                let taken = taken.entry(device).or_insert(0);
                let is_kept = spare.as_ref().is_some_and(|spare| **spare == 0);
                if is_kept || *taken + row.size_bytes() > allowed(device) {
                    continue;
                }
                if let Some(spare) = &mut spare {
                    **spare -= 1;
                }
                *taken += row.size_bytes();
            }
            part.insert(row.handle());
        }
        let is_rest = first.iter().all(|row| part.contains(&row.handle()));
        (part, is_rest)
    }
}

fn stays(error: &PoolError) -> String {
    format!("stays on its device: {error}")
}

/// Has it contents that are copied to it from somewhere?
fn is_copied(row: &Row) -> bool {
    row.saved().is_some_and(|saved| !saved.extents.is_empty())
}

fn left_of<'a>(rows: impl Iterator<Item = &'a Row>) -> BTreeMap<DeviceOrdinal, Left> {
    let mut left: BTreeMap<DeviceOrdinal, Left> = BTreeMap::new();
    for row in rows {
        let Some(device) = row.device() else { continue };
        let size_bytes = row.size_bytes();
        let found = left.entry(device).or_insert(Left { bytes: 0, smallest_bytes: size_bytes });
        found.bytes += size_bytes;
        found.smallest_bytes = found.smallest_bytes.min(size_bytes);
    }
    left
}

fn own_bytes_of(
    ledger: &Ledger,
    part: &HashSet<VirtualHandle>,
    choose: impl Fn(&Row) -> bool,
) -> ByDevice {
    let mut bytes = ByDevice::new();
    let rows = ledger.rows().filter(|row| row.is_own() && part.contains(&row.handle()));
    for row in rows.filter(|row| choose(row)) {
        if let Some(device) = row.device() {
            *bytes.entry(device).or_insert(0) += row.size_bytes();
        }
    }
    bytes
}

impl<D: Driver> Still<'_, D> {
    /// Takes all host memory and disk space that saving `selection` takes; by stages in whatever order and parts, as far as
    /// `budget` goes.
    fn hold_space(
        &self,
        selection: &Selection,
        survey: &Survey,
        copies: Copies,
        stages: Stages,
        budget: HostBudget,
    ) -> PoolResult<(StepLog, Held)> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        self.pool.deferred.check_places()?;
        let mut arena = self.pool.arena();
        let [kept, filed] = log.timed("lay out", |log| {
            self.layouts_within(log, &arena, selection, survey, copies, budget)
        })?;
        let end_in = |store| self.pool.ledger().end_in(store);
        let end_bytes = match stages {
            Stages::One => kept.end_bytes,
            Stages::Many => {
                let in_any_order = end_in(Store::Host) + kept.new_bytes;
                let growth = arena.growth(in_any_order, filed.new_bytes > 0);
                let fits = HostArena::<D>::check_budget(in_any_order, growth, budget).is_ok();
                if fits { kept.end_bytes.max(in_any_order) } else { kept.end_bytes }
            }
        };
        let held = log.timed("reserve disk", |_| match (stages, filed.new_bytes) {
            (_, 0) => Ok(()),
            (Stages::One, _) => arena.disk.reserve(&filed.copied_places()),
            (Stages::Many, new_bytes) => {
                let behind = end_in(Store::File);
                arena.disk.reserve(std::slice::from_ref(&(behind..behind + new_bytes)))
            }
        });
        let held = held.and_then(|()| {
            let devices = self.pool.devices();
            let Some(&device) = devices.first() else { return Ok(()) };
            let pins = self.pool.pins_of(&devices);
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
            arena.give_back_unused(end_in(Store::Host));
            drop(self.pool.give_disk_back(&mut arena));
            return Err(error);
        }
        let placed = kept.placed.iter().chain(&filed.placed);
        let copied = placed.map(|placed| (placed.row, placed.copied_bytes()));
        let copied = copied.filter(|(_, bytes)| *bytes > 0).collect();
        Ok((log, Held { copied, laid_out: Box::new([kept, filed]) }))
    }
}
