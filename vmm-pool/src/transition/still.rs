//! The states of a pause with a shut gate and drained devices. Each gives a [`Still`], the proof that no work of the
//! application's touches the memory that a step moves.

use std::sync::Arc;

use super::keeper::Keeper;
use super::leaving::Undone;
use crate::driver::{Driver, RawEvent, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::gate::Mode;
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::{Row, Rows, Selection, Survey};
use crate::pool::{Entered, Pool, Right};
use crate::store::HostDemand;

/// The gate is shut, and a step behind it has not ended. Dropping this undoes the step, and puts the gate back to its
/// mode before.
#[derive(Debug)]
pub(super) struct ShutGate<D: Driver> {
    pool: Arc<Pool<D>>,
    /// The right: no other pause or resume begins meanwhile.
    right: Arc<Right>,
    /// The mode of the gate before.
    before: Mode,
    on_drop: OnDrop,
}

/// The effect of dropping a proof.
#[derive(Debug)]
enum OnDrop {
    /// Sets the gate to this mode.
    Set(Mode),
    /// Undoes the pause of these rows, then puts the gate back to its mode before.
    UndoPause(Arc<Rows>),
    /// Undoes the resume of these rows, then puts the gate back to its mode before.
    UndoResume(Arc<Rows>),
}

/// The gate is shut, and the devices have no work left. Dropping this puts the gate back to its mode before.
#[derive(Debug)]
#[must_use = "dropping it puts the gate where it was"]
pub struct Quiesced<D: Driver> {
    shut: ShutGate<D>,
    /// The fingerprints of contents, read since the devices were idle.
    survey: Survey,
}

/// A pause or resume that has ended, or is undone. The gate gets its new mode at [`Done::end`], or when this is
/// dropped. So the holder can inform others first.
#[derive(Debug)]
#[must_use = "the process goes on when it is dropped"]
pub struct Done<D: Driver> {
    shut: ShutGate<D>,
}

impl<D: Driver> Done<D> {
    /// Sets the gate: the process goes on, and the next pause or resume may begin.
    pub fn end(self) -> Keeper<D> {
        let ShutGate { pool, right, .. } = &self.shut;
        let keeper = Keeper::new(Arc::clone(pool), Arc::clone(right));
        drop(self);
        keeper
    }
}

/// A step that has failed, with the value that it consumed, in the state after the failure.
#[derive(Debug)]
pub struct Failed<P, E = PoolError> {
    /// The value, for another try or an undo.
    pub state: Box<P>,
    /// The reason.
    pub error: E,
}

impl<P, E> Failed<P, E> {
    pub(super) fn new(state: P, error: E) -> Self {
        Self { state: Box::new(state), error }
    }
}

impl<D: Driver> Drop for ShutGate<D> {
    fn drop(&mut self) {
        let (undone, then) = match &self.on_drop {
            OnDrop::Set(mode) if *mode != Mode::Open || self.pool.deferred.is_settled() => {
                return self.set(*mode);
            }
            // The step that has failed may fail again here, and a second panic would end the process. Its calls stay
            // blocked.
            _ if std::thread::panicking() => return,
            // The application may unmap memory that a survey still reads.
            OnDrop::Set(mode) => {
                let settled = self.pool.deferred.settle();
                // A lost context reads nothing any more, and the application must get the driver's error.
                let is_lost = settled.as_ref().is_err_and(PoolError::poisons_context);
                (if is_lost { Ok(()) } else { settled }, *mode)
            }
            OnDrop::UndoPause(rows) => {
                let put_back = Still::of_dropped(self).put_back(rows, self.before);
                (put_back.map(|(_, spare)| drop(spare)), self.before)
            }
            OnDrop::UndoResume(rows) => {
                (Still::of_dropped(self).take_back(rows).map(|_| ()), self.before)
            }
        };
        match undone {
            Ok(()) => self.set(then),
            Err(error) => {
                tracing::error!(%error, "a pause or resume that was given up is not undone: calls stay held back");
            }
        }
    }
}

impl<D: Driver> ShutGate<D> {
    /// Makes the value for a gate that had the mode `before`.
    pub(super) fn new(pool: Arc<Pool<D>>, right: Arc<Right>, before: Mode) -> Self {
        Self { pool, right, before, on_drop: OnDrop::Set(before) }
    }

    /// Returns the pool.
    pub(super) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }

    /// Returns the mode that the gate had before.
    pub(super) fn before(&self) -> Mode {
        self.before
    }

    /// Gives the pause up.
    pub(super) fn reopen(self) -> Undone<D> {
        Undone { done: self.end_as_before(), log: StepLog::default(), spare: Vec::new() }
    }

    fn set(&self, mode: Mode) {
        // No thread of Sublet's may wait for devices during calls of the application's.
        self.pool.waits().forget();
        self.pool.copied.begin(0);
        if mode == Mode::Open {
            self.pool.holdings().thaw();
            self.pool.note_what_is_away();
        }
        self.pool.gate().set(mode);
    }

    /// Chooses the rows that a pause of `selection` moves. From here on, dropping this value undoes that pause.
    pub(super) fn begin_pause(&mut self, selection: &Selection) -> Arc<Rows> {
        let rows = Arc::new(self.pool.ledger().rows.choose(selection));
        self.on_drop = OnDrop::UndoPause(Arc::clone(&rows));
        rows
    }

    /// From here on, dropping this value undoes a resume of `rows`.
    pub(super) fn begin_resume(&mut self, rows: Arc<Rows>) {
        self.on_drop = OnDrop::UndoResume(rows);
    }

    /// From here on no undo is possible: dropping this value leaves the gate shut.
    pub(super) fn stay_shut(&mut self) {
        self.on_drop = OnDrop::Set(Mode::Shut);
    }

    /// Ends the pause or resume. The gate gets `mode` when the result is dropped.
    pub(super) fn end_in(mut self, mode: Mode) -> Done<D> {
        self.on_drop = OnDrop::Set(mode);
        Done { shut: self }
    }

    /// Ends a pause or resume that is undone. The gate gets its mode before when the result is dropped.
    pub(super) fn end_as_before(self) -> Done<D> {
        let before = self.before;
        self.end_in(before)
    }

    /// Ends it without an undo: the gate stays shut.
    pub(super) fn abandon(mut self) {
        self.stay_shut();
    }
}

impl<D: Driver> Quiesced<D> {
    /// Makes the value once nobody is inside and the devices are idle. From here on importers are given nothing.
    pub(super) fn of_idle(shut: ShutGate<D>) -> Self {
        shut.pool.holdings().freeze();
        Self { shut, survey: Survey::default() }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.shut.pool()
    }

    /// Marks parts of own memory whose contents nobody needs. The next save gives them up, unless the process touches
    /// them first. Earlier marks are void. Ranges of other memory are skipped. Call it behind the gate: before, a
    /// thread could begin to use such memory. Memory that a pause of `selection` by tag gives up is marked too
    /// ([`Contents::DiscardByTag`](crate::Contents::DiscardByTag)).
    pub fn mark_unused(&self, ranges: &[VaRange], selection: &Selection) {
        let mut ledger = self.pool().ledger();
        ledger.mark_unused(ranges);
        ledger.rows.give_up_by_tag(selection);
    }

    /// Reads fingerprints of the kept contents of `selection` on the devices, piece by piece. A piece that is zero, or
    /// that equals the copy of the last pause, is not copied, and needs no host memory
    /// ([`crate::CopyPolicy::detect_changes`]). Call it when the devices of all processes that may hold the memory are
    /// idle. If a device refuses, its contents are saved as a whole, and a note says so once.
    ///
    /// # Driver calls
    /// `cuMemHostRegister`, `cuStreamCreate`, `cuLaunchKernel` once a device, `cuStreamSynchronize`; the first time also
    /// `cuModuleLoadData`.
    pub fn survey(&mut self, selection: &Selection) -> StepLog {
        let rows = self.pool().ledger().rows.choose(selection);
        let (survey, log) = Still::drained(self).survey(&rows);
        self.survey = survey;
        log
    }

    /// Returns the host memory that a pause of `selection` needs now, including contents that are saved already. Uses
    /// the survey.
    pub fn host_demand(&self, selection: &Selection) -> HostDemand {
        self.pool().host_memory().demand_of(selection, &self.survey)
    }

    pub(super) fn seen(&self) -> &Survey {
        &self.survey
    }

    /// Gives the pause up.
    ///
    /// # Errors
    /// [`PoolError::Driver`], for another try: devices may still be reading contents that the application may unmap.
    ///
    /// # Driver calls
    /// `cuCtxSynchronize` of a device whose work may not have ended.
    pub fn reopen(self) -> Result<Undone<D>, Failed<Self>> {
        match self.pool().deferred.settle() {
            Ok(()) => Ok(self.shut.reopen()),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    pub(super) fn shut(&self) -> &ShutGate<D> {
        &self.shut
    }

    pub(super) fn shut_mut(&mut self) -> &mut ShutGate<D> {
        &mut self.shut
    }

    pub(super) fn into_shut(self) -> ShutGate<D> {
        self.shut
    }
}

/// The proof that nothing of the application's can touch the memory that is moved: no call is under way, and no work on
/// a device can. It covers all memory of the process. A [`StillChunk`] is the proof for a part.
pub(super) struct Still<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
}

impl<'a, D: Driver> Still<'a, D> {
    /// Makes a proof from a shut gate and idle devices.
    pub(super) fn drained(quiesced: &'a Quiesced<D>) -> Self {
        Self { pool: quiesced.pool() }
    }

    /// Makes a proof for restored memory: the gate has been shut since before it was restored, so no launched work
    /// knows it. The proof is for steps that touch no other memory.
    pub(super) fn not_touched_yet(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }

    /// Makes a proof for memory that a dropped proof has moved. It was drained, or not touched yet, when that began.
    pub(super) fn of_dropped(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }
}

/// The proof that no work of the application's touches one chunk of paged memory, while the process runs. No pause or
/// resume moves the chunk meanwhile, because the maker of the proof is past the gate. The methods work on this chunk
/// alone.
#[derive(Debug)]
pub struct StillChunk<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
    pub(super) row: VirtualHandle,
    /// The addresses of its home.
    pub(super) range: VaRange,
}

impl<'a, D: Driver> StillChunk<'a, D> {
    /// Asks the driver whether every use of the chunk is over. `uses` are the events behind each use and each copy of
    /// it, on every stream. The caller lets nobody use the chunk before this is dropped. `None` if a use is not over,
    /// or if this is no chunk on its device.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuEventQuery` for each.
    pub fn of(
        entered: &'a Entered<'_, D>,
        row: VirtualHandle,
        uses: &[RawEvent],
    ) -> PoolResult<Option<Self>> {
        let pool = entered.pool;
        for &event in uses {
            let is_over = pool.driver.event_is_done(event);
            if !is_over.about(|| "a use of paged memory".to_owned(), 0, None)? {
                return Ok(None);
            }
        }
        let range = pool.ledger().home_of(row, |row| row.backing().is_at_rest());
        Ok(range.map(|range| Self { pool, row, range }))
    }

    /// Makes a proof for a chunk that is off its device, so that nothing can touch it. `None` if it is on its device.
    pub fn away(entered: &'a Entered<'_, D>, row: VirtualHandle) -> Option<Self> {
        let pool = entered.pool;
        let range = pool.ledger().home_of(row, Row::is_set_aside)?;
        Some(Self { pool, row, range })
    }
}
