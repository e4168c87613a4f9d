//! The gate shut, and the devices drained: the proofs that a pause begins with. Each gives a [`Still`], the proof that nothing of the
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

/// The gate is shut, and what has begun behind it is not over. Dropping it undoes that and puts the gate where it was.
#[derive(Debug)]
pub(super) struct ShutGate<D: Driver> {
    pool: Arc<Pool<D>>,
    /// Nothing else begins meanwhile.
    right: Arc<Right>,
    /// The mode of the gate before.
    before: Mode,
    on_drop: OnDrop,
}

/// The effect of dropping a proof.
#[derive(Debug)]
enum OnDrop {
    /// Puts the gate there.
    Set(Mode),
    /// Undoes the pause of these, then puts the gate where it was.
    UndoPause(Arc<Rows>),
    /// Undoes the resume of these, then puts the gate where it was.
    UndoResume(Arc<Rows>),
}

/// The gate is shut, and the devices have nothing left to do. Dropping it puts the gate where it was.
#[derive(Debug)]
#[must_use = "dropping it puts the gate where it was"]
pub struct Quiesced<D: Driver> {
    shut: ShutGate<D>,
    /// The survey of the contents since the devices were idle.
    survey: Survey,
}

/// A pause or resume is over, or undone. The gate goes where that has led at [`Done::end`], or when this is dropped, so
/// that its holder can tell others first.
#[derive(Debug)]
#[must_use = "the process goes on when it is dropped"]
pub struct Done<D: Driver> {
    shut: ShutGate<D>,
}

impl<D: Driver> Done<D> {
    /// The process goes on, and the next pause or resume may begin.
    pub fn end(self) -> Keeper<D> {
        let ShutGate { pool, right, .. } = &self.shut;
        let keeper = Keeper::new(Arc::clone(pool), Arc::clone(right));
        drop(self);
        keeper
    }
}

/// A step that was not done, with what it had to begin with, as the failure has left that.
#[derive(Debug)]
pub struct Failed<P, E = PoolError> {
    /// For another try, or to be undone.
    pub state: Box<P>,
    /// Why.
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
            // Whatever has failed may fail again here, and that would end the process. Its calls stay held back.
            _ if std::thread::panicking() => return,
            // The application may unmap what a look at its contents still reads.
            OnDrop::Set(mode) => {
                let settled = self.pool.deferred.settle();
                // A lost context reads nothing any more, and the application is to hear of it.
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
    /// Of a gate that was at `before`.
    pub(super) fn new(pool: Arc<Pool<D>>, right: Arc<Right>, before: Mode) -> Self {
        Self { pool, right, before, on_drop: OnDrop::Set(before) }
    }

    /// The memory that it is about.
    pub(super) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }

    /// Returns the mode that the gate had before.
    pub(super) fn before(&self) -> Mode {
        self.before
    }

    /// The pause comes to nothing.
    pub(super) fn reopen(self) -> Undone<D> {
        Undone { done: self.end_as_before(), log: StepLog::default(), spare: Vec::new() }
    }

    fn set(&self, mode: Mode) {
        // Nobody waits for devices during calls of the application's.
        self.pool.waits().forget();
        self.pool.copied.begin(0);
        if mode == Mode::Open {
            self.pool.holdings().thaw();
            self.pool.note_what_is_away();
        }
        self.pool.gate().set(mode);
    }

    /// Chooses what a pause of `selection` moves. From here on, dropping it undoes that.
    pub(super) fn begin_pause(&mut self, selection: &Selection) -> Arc<Rows> {
        let rows = Arc::new(self.pool.ledger().rows.choose(selection));
        self.on_drop = OnDrop::UndoPause(Arc::clone(&rows));
        rows
    }

    /// From here on, dropping it undoes a resume of `rows`.
    pub(super) fn begin_resume(&mut self, rows: Arc<Rows>) {
        self.on_drop = OnDrop::UndoResume(rows);
    }

    /// From here on there is no way back: dropping it leaves the gate shut.
    pub(super) fn stay_shut(&mut self) {
        self.on_drop = OnDrop::Set(Mode::Shut);
    }

    /// The gate goes there when the result is dropped.
    pub(super) fn end_in(mut self, mode: Mode) -> Done<D> {
        self.on_drop = OnDrop::Set(mode);
        Done { shut: self }
    }

    /// Ends a pause or resume that is undone. The gate goes where it was when the result is dropped.
    pub(super) fn end_as_before(self) -> Done<D> {
        let before = self.before;
        self.end_in(before)
    }

    /// Nothing is put back, and the gate stays shut.
    pub(super) fn abandon(mut self) {
        self.stay_shut();
    }
}

impl<D: Driver> Quiesced<D> {
    /// Nobody is inside, and the devices are idle. From here on nothing is given to importers.
    pub(super) fn of_idle(shut: ShutGate<D>) -> Self {
        shut.pool.holdings().freeze();
        Self { shut, survey: Survey::default() }
    }

    /// The memory that it is about.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.shut.pool()
    }

    /// Parts of own memory whose contents nobody needs: unless the process touches them first, the next save gives
    /// them up. Marks of before are void. Ranges of other memory are passed over. It must be asked behind the gate: a
    /// thread could take such memory into use before. So is what a pause of `selection` by tag gives up
    /// ([`Contents::DiscardByTag`](crate::Contents::DiscardByTag)).
    pub fn mark_unused(&self, ranges: &[VaRange], selection: &Selection) {
        let mut ledger = self.pool().ledger();
        ledger.mark_unused(ranges);
        ledger.rows.give_up_by_tag(selection);
    }

    /// Has the devices tell what the kept contents of `selection` are, piece by piece, so that what is zero, or as in
    /// the copy of the last pause, is not copied, and takes no host memory ([`crate::CopyPolicy::detect_changes`]). It must be
    /// asked when the devices of all processes that may hold the memory are idle. What a device will not tell is saved as
    /// a whole, which the notes say once.
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

    /// Host memory that a pause of `selection` takes now, with what is saved there already, by what has been seen of it.
    pub fn host_demand(&self, selection: &Selection) -> HostDemand {
        self.pool().host_memory().demand_of(selection, &self.survey)
    }

    pub(super) fn seen(&self) -> &Survey {
        &self.survey
    }

    /// The pause comes to nothing.
    ///
    /// # Errors
    /// [`PoolError::Driver`], for another try: devices may still be looking at contents that the application may unmap.
    ///
    /// # Driver calls
    /// `cuCtxSynchronize` of a device whose work was not seen to end.
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

/// While it lives, no call of the application's is under way, and no work of its on a device can touch the memory
/// that is moved. It covers all memory of the process. That of a part is a [`StillChunk`].
pub(super) struct Still<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
}

impl<'a, D: Driver> Still<'a, D> {
    /// The gate is shut, and the devices have nothing left to do.
    pub(super) fn drained(quiesced: &'a Quiesced<D>) -> Self {
        Self { pool: quiesced.pool() }
    }

    /// The gate has been shut since before the memory came back, so that nothing has been launched that knows it. For
    /// steps that touch no other memory.
    pub(super) fn not_touched_yet(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }

    /// Makes a proof for memory that a dropped proof has moved. It was drained, or not touched yet, when that began.
    pub(super) fn of_dropped(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }
}

/// The proof that nothing of the application's touches one chunk of memory with a home, while the process runs. No pause or resume moves it meanwhile: its maker is past the
/// gate. Its methods are about this chunk alone.
#[derive(Debug)]
pub struct StillChunk<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
    pub(super) row: VirtualHandle,
    /// The addresses of its home.
    pub(super) range: VaRange,
}

impl<'a, D: Driver> StillChunk<'a, D> {
    /// Asks the driver whether every use of the chunk is over: `uses` are the events behind each of them and behind
    /// copies of it, on every stream. The caller gives the chunk to nobody before this is dropped. `None` if one is not
    /// over, or if it is no chunk on its device.
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

    /// Of a chunk that is away, so that nothing can touch it. `None` if it is not.
    pub fn away(entered: &'a Entered<'_, D>, row: VirtualHandle) -> Option<Self> {
        let pool = entered.pool;
        let range = pool.ledger().home_of(row, Row::is_set_aside)?;
        Some(Self { pool, row, range })
    }
}
