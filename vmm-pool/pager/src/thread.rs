//! The thread `sublet-pager`: it checks which events are over, begins copies, and exchanges frames.

#![expect(unsafe_code, reason = "ends events through the driver")]

mod choosing;
mod copying;
mod looking;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmm_pool::driver::{Driver, RawEvent};
use vmm_pool::{
    Describe, Entered, HomeCopies, Known, Physical, PoolError, PoolResult, StillChunk,
    VirtualHandle,
};

use self::choosing::choose;
use super::marks::Mark;
use super::prints::Questions;
use super::table::{ChunkEvent, WindowChunks};
use super::{PageResult, PagedWindow};

/// The interval of checks while something that is wanted waits for the device.
pub(super) const LOOK_SOON: Duration = Duration::from_micros(50);
/// The interval while nobody waits.
const LOOK_LATER: Duration = Duration::from_millis(1);
/// The interval when nothing is under way. A notification ends it sooner.
const LOOK_SELDOM: Duration = Duration::from_secs(1);
/// The time that a caller waits for the frame of the chunk that is used last. After that time any frame is taken.
const PATIENCE: Duration = Duration::from_millis(20);
/// The most copies out under way, each with its question. Work queued behind them waits for all of them. Questions alone do not
/// count.
const COPIES_OUT_MAX: usize = 4;

/// The next thing to do.
enum Job {
    /// Takes the frame of `victim`, or a new one, for `newcomer`, which is filled at the addresses for copies number `slot`.
    Bring {
        newcomer: usize,
        victim: Option<usize>,
        slot: usize,
    },
    /// Copies this chunk out.
    Clean(usize),
    /// Gives the frame of this chunk back to the driver.
    Shrink(usize),
    /// Maps this chunk, which is full at the addresses for copies of this number.
    Land(usize, usize),
    /// Looks again after this time.
    Wait(Duration),
    End,
}

/// Runs until the pager ends. Tells `told` whether it has begun.
pub(super) fn run<D: Driver>(shared: &Arc<PagedWindow<D>>, told: &Sender<PoolResult<()>>) {
    let copies = HomeCopies::new(&shared.pool, shared.device);
    let sights = BTreeMap::new();
    let asking = HomeCopies::new(&shared.pool, shared.device);
    let questions = OnceCell::new();
    let (stay, awaited, narrowed, asked_for) = (None, None, None, None);
    let mut pager =
        Worker { shared, copies, stay, asking, questions, awaited, narrowed, asked_for, sights };
    let begun = pager.begin();
    let has_begun = begun.is_ok();
    let _told = told.send(begun);
    if has_begun {
        while pager.step() {}
        pager.end_streams();
        // The window may end in a deep pause, and its events are destroyed here.
        let _asking = shared.pool.door().pass();
        finish(shared);
    }
}

/// Frees all spans. Chunks that are away go immediately. Chunks on the device go when uses and launches of graphs are over.
fn remove_all<D: Driver>(shared: &PagedWindow<D>) {
    if shared.table().lost_uses > 0 {
        // Some uses have no event behind them.
        let _asking = shared.pool.door().pass();
        if let Err(error) = shared.pool.driver().synchronize() {
            if error.poisons_context() {
                shared.breaks(error);
            }
            return;
        }
    }
    let mut table = shared.table();
    table.lost_uses = 0;
    let captured = {
        let mut calls = shared.calls();
        // Nobody knows when a use without an event is over.
        if !calls.have_ended(u64::MAX) {
            return;
        }
        calls.take_captured()
    };
    table.graphs_let_go(&captured, 0);
    table.free_all();
}

/// Removes freed chunks that are away, with their rows.
pub(super) fn remove<D: Driver>(shared: &PagedWindow<D>, gone: Vec<(usize, VirtualHandle)>) {
    for (chunk, row) in gone {
        shared.pool.remove_with_home(row);
        shared.table().gone(chunk);
    }
}

/// Gives the events and the addresses back.
fn finish<D: Driver>(shared: &PagedWindow<D>) {
    let pool = &shared.pool;
    let spare = std::mem::take(&mut *shared.spare.lock().unwrap_or_else(PoisonError::into_inner));
    for event in spare {
        // SAFETY: nobody has it.
        if let Err(error) = unsafe { pool.driver().event_destroy(event) } {
            tracing::debug!(%error, "an event for paging is not ended");
        }
    }
    let is_empty = shared.table().resident() == 0;
    if is_empty && let Err(error) = pool.deferred().free_addresses(shared.reserved()) {
        tracing::error!(%error, "addresses for paging stay until the next pause");
    }
    shared.say_it_has_ended();
}

pub(super) struct Worker<'a, D: Driver> {
    pub(super) shared: &'a Arc<PagedWindow<D>>,
    copies: HomeCopies<'a, D>,
    /// The gate, held while filled chunks are not mapped yet: a pause begins when they are. Copies to the device wait for
    /// nothing but each other.
    pub(super) stay: Option<Entered<'a, D>>,
    /// The streams for questions. A question waits for room next to the kernels that run, and copies do not wait for it.
    asking: HomeCopies<'a, D>,
    /// Made for the first question. `None` inside if the device cannot answer.
    questions: OnceCell<Option<Questions<D>>>,
    /// The chunk that somebody waits for, and the start of that wait.
    pub(super) awaited: Option<(usize, Instant)>,
    /// The time since which there are fewer frames than allowed.
    pub(super) narrowed: Option<Instant>,
    /// The chunk for whose frame another window was asked last.
    pub(super) asked_for: Option<usize>,
    /// The state of each chunk when its fingerprints were taken, or when it was mapped since.
    sights: BTreeMap<usize, Known>,
}

impl<D: Driver> Worker<'_, D> {
    fn begin(&mut self) -> PoolResult<()> {
        let apart = self.shared.pool.driver().stand_beside_captures();
        apart.about(|| "streams for paging".to_owned(), 0, Some(self.shared.device))?;
        self.copies.streams().map(drop)
    }

    /// Waits for all copies, unless the device has failed. Then it drops the streams.
    fn end_streams(&mut self) {
        let is_broken = self.shared.table().broken.is_some();
        let ended = if is_broken { Ok(()) } else { self.finish_or_leave() };
        if let Err(error) = &ended {
            tracing::error!(%error, "copies for paging are waited for by the next pause");
        }
        if is_broken || ended.is_err() {
            self.keep_questions();
        }
        self.questions = OnceCell::new();
        self.copies = HomeCopies::new(&self.shared.pool, self.shared.device);
        self.asking = HomeCopies::new(&self.shared.pool, self.shared.device);
    }

    /// Waits for all work that was begun. Work that does not end is left to the next pause.
    fn finish_or_leave(&mut self) -> PoolResult<()> {
        let _asking = self.shared.pool.door().pass();
        self.copies.finish_or_leave().and(self.asking.finish_or_leave())
    }

    /// Does the same. A question that may be under way keeps its memory, so that no other question gets it.
    fn finish_or_keep(&mut self) -> PoolResult<()> {
        let ended = self.finish_or_leave();
        if ended.is_err() {
            self.keep_questions();
        }
        ended
    }

    /// Takes the next step. False when the pager ends.
    fn step(&mut self) -> bool {
        self.look();
        self.widen();
        let (is_ending, stays) = {
            let table = self.shared.table();
            (table.is_ending, table.is_any_filled() && table.broken.is_none())
        };
        if is_ending {
            self.shared.calls().want_ends();
        }
        self.shared.end_wanted();
        if is_ending {
            remove_all(self.shared);
        }
        if !stays {
            self.stay = None;
        }
        let freed = self.shared.table().take_freed();
        remove(self.shared, freed);
        let later_half = self.later_half();
        let mut table = self.shared.table();
        let mut job = choose(&mut table, later_half);
        let is_short = table.next_wanted().is_some() || table.demand.is_short(table.resident());
        let waits = matches!(job, Job::Wait(_)) && is_short;
        if waits {
            drop(table);
            self.shared.calls().want_ends();
            self.shared.end_wanted();
            table = self.shared.table();
            job = choose(&mut table, later_half);
        }
        if stays && !self.shared.pool.gate().is_open() && !matches!(job, Job::Land(..)) {
            job = Job::Wait(LOOK_SOON);
        }
        if let Job::Wait(time) = job {
            self.sleep(table, time);
            return true;
        }
        drop(table);
        match job {
            Job::Bring { newcomer, victim, slot } => self.bring(newcomer, victim, slot),
            Job::Clean(chunk) => self.clean(chunk),
            Job::Shrink(chunk) => self.shrink(chunk),
            Job::Land(chunk, slot) => self.land(chunk, slot),
            Job::End | Job::Wait(_) => return false,
        }
        self.shared.changed.notify_all();
        true
    }

    /// Waits for a notification, for at most `time`.
    fn sleep(&self, mut table: MutexGuard<'_, WindowChunks>, mut time: Duration) {
        // A list that is to end came meanwhile, or its stream is captured.
        if self.shared.calls().lists.is_any_ready() {
            time = time.min(LOOK_LATER);
        }
        table.demand.is_asleep = time == LOOK_SELDOM;
        let waited = self.shared.changed.wait_timeout(table, time);
        let (mut table, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut table.demand.is_asleep) && timeout.timed_out() {
            table.try_again();
            let staying = table.staying_idle();
            drop(table);
            // The reasons why they stay may be over, and others wait for their room.
            for (chunk, row) in staying {
                let stays = self.shared.pool.stays_home(row, false);
                self.shared.table().set_stays(chunk, stays);
            }
        }
    }

    /// Returns a number of uses from now on: a chunk that is used sooner keeps its frame. The number is 0 if somebody has
    /// waited long for the same chunk.
    fn later_half(&mut self) -> usize {
        let table = self.shared.table();
        let awaited = table.next_wanted().filter(|&id| table.chunks()[id].is_held());
        self.awaited = match (awaited, self.awaited) {
            (Some(id), Some((before, since))) if id == before => Some((id, since)),
            (Some(id), _) => Some((id, Instant::now())),
            (None, _) => None,
        };
        let is_patient = self.awaited.is_none_or(|(_, since)| since.elapsed() < PATIENCE);
        if !is_patient {
            return 0;
        }
        let calls = self.shared.calls();
        table.later_half(|id| calls.lists.holding(id))
    }

    /// Asks the driver which events are over.
    fn look(&mut self) {
        let marks = self.shared.table().marks();
        let mut over = Vec::new();
        let _asking = self.shared.pool.door().pass();
        for mark in marks {
            match self.shared.pool.driver().event_is_done(mark.event) {
                Ok(true) => over.push(mark),
                Ok(false) => {}
                Err(error) if error.poisons_context() => return self.shared.breaks(error),
                Err(error) => tracing::debug!(%error, "an event for paging is asked again"),
            }
        }
        if !over.is_empty() {
            self.shared.table().are_over(&over);
            self.hear();
            self.shared.changed.notify_all();
        }
    }

    /// Gives `newcomer` a frame, and begins the copy of its contents.
    fn bring(&mut self, newcomer: usize, victim: Option<usize>, slot: usize) {
        let entered = self.shared.pool.enter();
        let taken = match victim {
            Some(victim) => self.take_frame(&entered, victim, false),
            None => self.new_frame(&entered, newcomer).map(Some),
        };
        let frame = match taken {
            Ok(Some(frame)) => frame,
            // The next step looks at the chunk again.
            Ok(None) => return,
            Err(error) if victim.is_none() => {
                drop(entered);
                return self.without_room(newcomer, error);
            }
            Err(error) => return self.shared.table().failed(newcomer, Arc::new(error)),
        };
        let row = {
            let mut table = self.shared.table();
            let row = table.chunks()[newcomer].row();
            if row.is_some() {
                table.change(newcomer, ChunkEvent::Framed);
            }
            row
        };
        let came = match row {
            Some(row) => self.fill(&entered, row, frame, slot),
            // The newcomer was freed meanwhile.
            None => entered.release_frame(frame).and(Err(PoolError::NotOurs)),
        };
        let mut table = self.shared.table();
        let (copy, was_copied) = match came {
            Ok(came) => came,
            Err(error) => return table.failed(newcomer, Arc::new(error.into())),
        };
        table.figures.exchanges += u64::from(victim.is_some());
        table.figures.copied_in += u64::from(was_copied);
        table.change(newcomer, ChunkEvent::Filled { slot, copy });
        drop(table);
        self.stay.get_or_insert(entered);
    }

    /// Takes the frame of a chunk that is idle and clean. `None` when the chunk is not so after all. A frame that goes
    /// `to_driver` may be a freed one that something still pins, as with other memory. A frame that goes to another chunk must
    /// have no other holder.
    fn take_frame(
        &self,
        entered: &Entered<'_, D>,
        victim: usize,
        to_driver: bool,
    ) -> PageResult<Option<Physical>> {
        let pool = &self.shared.pool;
        if !pool.deferred().is_settled() {
            // A copy or a question whose end was not seen may be one of this chunk.
            let _asking = pool.door().pass();
            pool.deferred().settle()?;
        }
        let Some((row, has_contents)) = self.shared.table().claim_ready(victim) else {
            return Ok(None);
        };
        let is_given_up = to_driver && self.shared.table().chunks()[victim].is_freed();
        let (stays, has_place) = (pool.stays_home(row, is_given_up), pool.has_own_place(row));
        let goes = !stays && (has_place || !has_contents);
        let still = if goes { self.still(entered, victim, row) } else { Ok(None) };
        let left = still.and_then(|still| match still {
            Some(still) => self.remap(|| still.leave(has_contents)),
            None => Ok(None),
        });
        let mut table = self.shared.table();
        table.set_stays(victim, stays);
        if let Ok(Some(_)) = &left {
            table.change(victim, ChunkEvent::Left);
        } else {
            if !goes && !has_place {
                // An undone pause has taken the place.
                table.forget_copy(victim, true);
            }
            if stays {
                table.used_now(victim);
            }
            table.unclaim(victim);
        }
        Ok(left?)
    }

    /// Runs `work`, in which the driver maps or unmaps, and adds up its time.
    fn remap<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.shared.table().figures.remapping += began.elapsed();
        done
    }

    fn still<'e>(
        &self,
        entered: &'e Entered<'_, D>,
        chunk: usize,
        row: VirtualHandle,
    ) -> PoolResult<Option<StillChunk<'e, D>>> {
        let uses: Vec<RawEvent> =
            self.shared.table().chunks()[chunk].marks().map(|mark| mark.event).collect();
        StillChunk::of(entered, row, &uses)
    }

    /// Gives a row `frame`, maps it at the addresses for copies of this number, and begins the copy of its contents. Returns
    /// the mark behind that copy, unless it is over already, and whether anything was copied.
    fn fill(
        &mut self,
        entered: &Entered<'_, D>,
        row: VirtualHandle,
        frame: Physical,
        slot: usize,
    ) -> PoolResult<(Option<Arc<Mark>>, bool)> {
        let Some(still) = StillChunk::away(entered, row) else {
            entered.release_frame(frame)?;
            return Err(PoolError::NotOurs);
        };
        let aside = self.shared.range_aside(slot);
        let come = self.remap(|| still.come(frame, aside));
        self.shared.table().figures.remaps += u64::from(come.is_ok());
        let is_aside = come.is_ok();
        // SAFETY: the chunk is mapped, and nobody has it before this is over; its place stays its own.
        let begun = come.and_then(|()| unsafe { self.copies.start_in(row, aside) });
        match begun {
            Ok(was_copied) => {
                // If nobody knows whether the copy has ended, the chunk keeps its frame and place. Nobody gets the chunk or its
                // slot.
                let mark = self.mark_behind();
                if mark.is_err() {
                    self.shared.table().lost_slots.push(slot);
                }
                Ok((mark?, was_copied))
            }
            Err(error) => {
                let ended = self.copies.finish_or_leave();
                let left = if is_aside { still.leave_aside(aside) } else { Ok(()) };
                if ended.is_ok() && left.is_ok() {
                    still.did_not_come();
                } else if is_aside {
                    self.shared.table().lost_slots.push(slot);
                }
                Err(error)
            }
        }
    }

    /// Copies `chunk` to its place in host memory. A chunk without a place gets one. If that fails, the thread that waits for a
    /// frame gets the error.
    fn clean(&mut self, chunk: usize) {
        let entered = self.shared.pool.enter();
        let claimed = self.shared.table().claim(chunk);
        let Some((row, _)) = claimed else { return };
        let begun = self.begin_clean(chunk, row);
        drop(entered);
        let Err(error) = begun else { return };
        // The copy that was begun reads the chunk, so its frame goes when the copy has been waited for. If the wait fails, the
        // thread that waits for the frame gets the error.
        if let Err(error) = self.finish_or_keep() {
            tracing::debug!(%error, "a copy for paging may be under way");
        }
        tracing::warn!(%error, "paged memory was not copied to the host");
        let mut table = self.shared.table();
        table.refused(chunk);
        table.unclaim(chunk);
        if let Some(wanted) = table.next_wanted() {
            table.failed(wanted, Arc::new(error.into()));
        }
    }

    fn begin_clean(&mut self, chunk: usize, row: VirtualHandle) -> PoolResult<()> {
        let is_as_seen = self.is_place_as_seen(chunk);
        let has_place = self.shared.pool.has_own_place(row);
        let compares = {
            let mut table = self.shared.table();
            if !is_as_seen || !has_place {
                table.forget_copy(chunk, false);
            }
            table.is_to_compare(chunk)
        };
        let mut asked = self.ask(chunk)?;
        if let Some(asked) = asked.take_if(|_| compares) {
            self.shared.table().asking(chunk, asked);
            return Ok(());
        }
        self.see(chunk);
        self.shared.table().forget_copy(chunk, false);
        self.behind_question(asked.as_ref())?;
        // SAFETY: nobody writes the chunk before the copy is over: the chunk is idle until then, and a stream that uses it
        // waits for the event behind the copy. Its place is its own.
        unsafe { self.copies.start_out(row, &*self.shared.host_budget) }?;
        let mark = self.mark_behind()?;
        self.shared.table().copying_out(chunk, mark, asked);
        Ok(())
    }

    /// Gives the frame of an idle chunk back to the driver.
    fn shrink(&mut self, chunk: usize) {
        let entered = self.shared.pool.enter();
        match self.take_frame(&entered, chunk, true) {
            Ok(Some(frame)) => {
                if let Err(error) = entered.release_frame(frame) {
                    tracing::error!(%error, "memory for paging stays until the next pause");
                }
                self.gave();
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "memory for paging is not given back yet");
                self.shared.table().refused(chunk);
            }
        }
    }
}
