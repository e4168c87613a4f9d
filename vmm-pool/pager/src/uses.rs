//! Uses: calls to the driver that name memory of a window.
//!
//! The code that is about to hand work to a stream shows the addresses that the work names. Each address stands for the span
//! that it is in: a tensor, for example. The caller waits until all chunks of these spans are on the device. They stay until
//! the stream has done that work.
//!
//! An event behind each call would cost more than the look-up. So a stream has a list of the chunks that its calls use, all
//! held. One event behind many calls ends their use (`lists`). A list ends when it is long, when it has served many calls, and
//! when somebody waits for a frame. The thread that launched last ends the list, if the stream has its meaning in that thread's
//! current context. Otherwise the pager's thread does.
//!
//! A graph uses the memory recorded in it at every launch: those chunks stay until they are freed. A launch does not say what
//! its graph uses, so it counts as a use of all chunks that graphs use. A freed chunk goes when such launches are over. A
//! stream that is captured takes no event: the lists of all streams end before a capture begins.
//!
//! Lock order: the table's, then that of `Calls`, which is a leaf. Neither is held across a driver call.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::Describe;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, RawStream, VaRange};
use vmm_pool::gate::Passage;

use super::lists::Lists;
use super::marks::Mark;
use super::order::Order;
use super::spans::Spans;
use super::table::{WindowChunks, distinct};
use super::{PageError, PageResult, PagedWindow, Pager};

/// The number of addresses for copies: so many chunks may be on their way to the device simultaneously.
pub(super) const SLOTS: usize = 4;
/// The most chunks that are announced, of those that are used next and are away. With few frames it is half of the frames: the
/// other half is in use.
const AHEAD: usize = 24;
/// Announcements are due when this number of chunks has been used.
const DUE: usize = 3;
/// The destination of a call's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum In {
    /// A stream that any thread can name.
    Stream(RawStream),
    /// The default stream of the calling thread alone.
    OwnStream(RawStream),
    /// A stream of another context than the window's, or a call made in one: the call's work is waited for.
    Elsewhere(RawStream),
    /// A graph that is being captured.
    Graph,
}

/// Chunks that a call uses, held for it until [`Pager::end_call`].
#[derive(Debug)]
#[must_use = "a use that does not end keeps memory on its device"]
pub struct Touched {
    pub(super) stream: In,
    /// The chunks that no list has.
    pub(super) chunks: Vec<usize>,
    /// The number of the list that has the others.
    pub(super) list: u64,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pub(super) spans: Spans,
    pub(super) lists: Lists,
    /// Chunks that graphs use.
    captured: Vec<usize>,
    pub(super) order: Order,
    /// The chunks of the last call that changed the record.
    noted: Vec<usize>,
    /// The number of changes of the chunk in use since the last announcement.
    changes: usize,
    /// A spare vector for the chunks of a call, so that a call allocates none.
    room: Vec<usize>,
    count: u64,
    waited: Duration,
}

impl Calls {
    pub(super) fn new(spans: Spans) -> Self {
        Self { spans, ..Self::default() }
    }

    /// The chunks that graphs use, until they are freed.
    pub(super) fn captured(&self) -> Vec<usize> {
        self.captured.clone()
    }

    pub(super) fn counts(&self) -> (u64, Duration) {
        (self.count, self.waited)
    }

    /// Records the order of uses. Returns whether an announcement is due, and whether the order has changed.
    pub(super) fn note(&mut self, ids: &[usize]) -> (bool, bool) {
        // Chunks that the call before used too tell nothing new.
        if ids.iter().all(|id| self.noted.contains(id)) {
            return (false, false);
        }
        self.noted.clear();
        self.noted.extend(ids);
        let mut is_as_foretold = true;
        for &id in ids {
            if self.order.last() != Some(id) {
                is_as_foretold &= self.order.used(id);
                self.changes += 1;
            }
        }
        (self.changes >= DUE, !is_as_foretold)
    }

    /// Marks all lists to end. Returns the number that the next list would have.
    pub(super) fn want_ends(&mut self) -> u64 {
        self.lists.want(|_| true)
    }

    /// Have all lists ended that have a number below this?
    pub(super) fn have_ended(&self, below: u64) -> bool {
        !self.lists.has(|_| true, below)
    }

    /// Takes the chunks that graphs used: graphs use nothing any more.
    pub(super) fn take_captured(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.captured)
    }

    /// Records that these chunks are freed. Returns those that graphs used, and the number of lists that hold them from now on.
    pub(super) fn free(&mut self, freed: &[usize]) -> (Vec<usize>, u32) {
        self.order.forget(freed);
        self.noted.clear();
        let captured: Vec<_> = self.captured.extract_if(.., |id| freed.contains(id)).collect();
        let lists = self.lists.take_over(&captured);
        (captured, lists)
    }
}

impl<D: Driver> PagedWindow<D> {
    pub(super) fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the table when chunks are used next.
    pub(super) fn foretell(&self) {
        let chunks = self.table().chunks().len();
        let next_uses = self.calls().order.next_uses(chunks);
        self.table().demand.foretell(next_uses);
    }
}

impl<D: Driver> Pager<D> {
    /// The device of the window.
    pub fn device(&self) -> DeviceOrdinal {
        self.shared.device
    }

    /// All addresses of the window.
    pub fn window(&self) -> VaRange {
        self.shared.window
    }

    /// Returns the span from [`Pager::alloc`] that holds `address`.
    pub fn span_at(&self, address: DeviceAddress) -> Option<VaRange> {
        let window = self.shared.window.start.0;
        let at = address.0.checked_sub(window)?;
        let (start, size_bytes) = self.shared.calls().spans.at(at..=at)?;
        Some(VaRange::new(DeviceAddress(window + start), size_bytes))
    }

    /// Begins a call, which is about to give work to `stream` that names these addresses. Waits until all chunks that it uses
    /// are on the device, for at most `limit`. Paused time does not count. `None` if none of the memory is paged. The caller is
    /// not inside the gate, and a context of the device is current. *Blocks.*
    ///
    /// # Errors
    /// [`PageError::TooFewFrames`] immediately; [`PageError::Late`]; what the driver or the budget refused. Nothing is held.
    ///
    /// # Driver calls
    /// `cuStreamWaitEvent`, `cuEventRecord`.
    pub fn begin_call(
        &self,
        touched: &[VaRange],
        stream: In,
        limit: Duration,
    ) -> PageResult<Option<Touched>> {
        let shared = &self.shared;
        let window = shared.window.start.0;
        let offsets = touched.iter().filter_map(|range| {
            let last = range.size_bytes.checked_sub(1)?.checked_add(range.start.0)?;
            Some(range.start.0.saturating_sub(window)..=last.checked_sub(window)?)
        });
        let mut calls = shared.calls();
        let mut ids = std::mem::take(&mut calls.room);
        calls.spans.meet(offsets, &mut ids);
        if ids.is_empty() {
            calls.room = ids;
            return Ok(None);
        }
        calls.count += 1;
        let (is_due, is_new) = calls.note(&ids);
        let listed = match stream {
            In::Stream(raw) => calls.lists.enter(&ids, raw),
            In::OwnStream(_) | In::Elsewhere(_) | In::Graph => None,
        };
        if listed.is_some() {
            calls.room = std::mem::take(&mut ids);
        }
        drop(calls);
        if is_due || is_new {
            self.announce_ahead(is_new, false);
        }
        let mut touched = Touched { stream, chunks: Vec::new(), list: listed.unwrap_or(0) };
        match stream {
            In::Stream(_) if listed.is_some() => {}
            In::Stream(raw) => {
                self.bring_for(&mut ids, raw, limit)?;
                let mut calls = shared.calls();
                let (list, twice) = calls.lists.add(&ids, raw);
                calls.room = ids;
                drop(calls);
                touched.list = list;
                if !twice.is_empty() {
                    self.let_go(&twice);
                }
            }
            In::OwnStream(raw) | In::Elsewhere(raw) => {
                self.bring_for(&mut ids, raw, limit)?;
                touched.chunks = ids;
            }
            In::Graph => self.keep(&ids, limit)?,
        }
        Ok(Some(touched))
    }

    /// Do graphs use anything of this window?
    pub fn has_captured(&self) -> bool {
        !self.shared.calls().captured.is_empty()
    }

    /// Begins the launch of a graph on `stream`, which is of the device of this window. `None` if graphs use nothing of the
    /// window. Otherwise [`Pager::end_call`] says that the graph is launched.
    pub fn begin_graph(&self, stream: In) -> Option<Touched> {
        let shared = &self.shared;
        let (chunks, list) = match stream {
            In::Stream(raw) => {
                let mut calls = shared.calls();
                if calls.captured.is_empty() {
                    return None;
                }
                (Vec::new(), calls.lists.add_graph(raw))
            }
            In::OwnStream(_) | In::Elsewhere(_) => {
                // Nobody frees these chunks between the two steps.
                let mut table = shared.table();
                let ids = shared.calls().captured();
                if ids.is_empty() {
                    return None;
                }
                table.hold(&ids);
                (ids, 0)
            }
            In::Graph => return None,
        };
        Some(Touched { stream, chunks, list })
    }

    /// Announces the chunks that are used next, if the order is as before. The choice of what leaves needs the next use of each
    /// chunk. That is worked out when a chunk is to come.
    fn announce_ahead(&self, is_new: bool, is_wanted: bool) {
        let shared = &self.shared;
        let away: Vec<_> = {
            let mut table = shared.table();
            if is_new {
                table.forget_promises();
            }
            let ahead = {
                let mut calls = shared.calls();
                calls.changes = 0;
                calls.order.ahead(AHEAD.min(table.demand.frames_now() / 2))
            };
            ahead.into_iter().filter(|id| !table.are_here(&[*id])).collect()
        };
        if away.is_empty() && !is_wanted {
            return;
        }
        shared.foretell();
        if !away.is_empty() {
            shared.table().announce(&away);
            shared.changed.notify_all();
        }
    }

    /// Brings these chunks for a call on `stream`. Removes those that were freed meanwhile from `ids`.
    fn bring_for(
        &self,
        ids: &mut Vec<usize>,
        stream: RawStream,
        limit: Duration,
    ) -> PageResult<()> {
        let shared = &self.shared;
        let here = {
            let mut table = shared.table();
            table.hold_if_here(ids).then(|| table.awaited_by(ids))
        };
        let awaited = match here {
            // No chunk is on its way.
            Some(awaited) if awaited.is_empty() => return Ok(()),
            Some(awaited) => awaited,
            None => self.wait_for_call(ids, limit)?,
        };
        let ordered = {
            let _pass = shared.pool.gate().pass_for("a use of paged memory", Passage::Use);
            self.order(&awaited, stream)
        };
        if ordered.is_err() {
            self.let_go(ids);
        }
        ordered
    }

    /// Makes `stream` wait for these events.
    fn order(&self, awaited: &[Arc<Mark>], stream: RawStream) -> PageResult<()> {
        for mark in awaited {
            let ordered = self.shared.pool.driver().stream_wait_event(stream, mark.event);
            let about = || "a stream that uses paged memory".to_owned();
            ordered.about(about, 0, Some(self.shared.device))?;
        }
        Ok(())
    }

    fn let_go(&self, ids: &[usize]) {
        self.shared.table().let_go(ids);
        self.shared.changed.notify_all();
    }

    /// Waits until these chunks are on the device, and keeps them there. First removes chunks that belong to nobody from `ids`:
    /// a call may have an address by chance. Returns the events that a stream must wait for before it uses them. After an error
    /// nothing is held.
    fn hold(
        &self,
        ids: &mut Vec<usize>,
        limit: Duration,
        what: impl Fn(&WindowChunks) -> String,
    ) -> PageResult<Vec<Arc<Mark>>> {
        let shared = &self.shared;
        let (mut held, mut is_without_room) = (None, false);
        let here = shared.wait_for(limit, what, |table| {
            if held.is_none() {
                ids.retain(|&id| table.chunks()[id].row().is_some());
                let (each, frames) = (distinct(ids), table.demand.frames());
                let fits = table.fits(&each);
                if fits == is_without_room {
                    is_without_room = !fits;
                    table.demand.without_room += usize::from(!fits);
                    table.demand.without_room -= usize::from(fits);
                    shared.changed.notify_all();
                }
                if !fits {
                    // Chunks that graphs use stay until they are freed: no wait makes room there.
                    let captured = shared.calls().captured();
                    let stays =
                        |id: &&usize| !each.contains(id) && !table.chunks()[**id].is_freed();
                    let needed = each.len() + captured.iter().filter(stays).count();
                    if needed <= frames {
                        return None;
                    }
                    let [needed_bytes, frames_bytes] =
                        [needed, frames].map(|count| count as u64 * shared.chunk_bytes);
                    return Some(Err(PageError::TooFewFrames { needed_bytes, frames_bytes }));
                }
                held = Some(table.hold(ids));
                shared.changed.notify_all();
            }
            let failed = ids.iter().find_map(|&id| table.chunks()[id].failure_since(held?));
            if let Some(error) = failed {
                return Some(Err(PageError::Shared(error)));
            }
            if !table.are_here(ids) {
                return None;
            }
            Some(Ok(table.awaited_by(ids)))
        });
        if is_without_room {
            shared.table().demand.without_room -= 1;
        }
        if here.is_err() && held.is_some() {
            self.let_go(ids);
        }
        here
    }

    fn wait_for_call(&self, ids: &mut Vec<usize>, limit: Duration) -> PageResult<Vec<Arc<Mark>>> {
        let shared = &self.shared;
        self.announce_ahead(false, true);
        // A thread that waits keeps nothing that others wait for.
        shared.want_ends();
        let began = Instant::now();
        let wanted = ids.clone();
        let what = |table: &WindowChunks| {
            let ids = &wanted;
            let first = ids.first().map_or(0, |id| shared.range_of(*id).start.0);
            let away = ids.iter().filter(|id| !table.are_here(&[**id])).count();
            format!(
                "{away} of {} chunks from {first:#x} on to be on {} for a call that uses them ({} of {} frames are \
                 taken, {} chunks are in use)",
                ids.len(),
                shared.device,
                table.resident(),
                table.demand.frames_now(),
                table.chunks().iter().filter(|chunk| chunk.is_held()).count()
            )
        };
        let held = self.hold(ids, limit, what);
        shared.calls().waited += began.elapsed();
        held
    }

    /// Waits until these chunks are on the device and no copy of them is under way, and keeps them there. Removes chunks that
    /// were freed meanwhile from `ids`.
    pub(super) fn bring_still(&self, ids: &mut Vec<usize>, limit: Duration) -> PageResult<()> {
        let shared = &self.shared;
        for mark in self.wait_for_call(ids, limit)? {
            let waited = shared.pool.driver().event_synchronize(mark.event);
            let about = || "a copy of paged memory".to_owned();
            if let Err(error) = waited.about(about, 0, Some(shared.device)) {
                self.let_go(ids);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Keeps these chunks on the device until they are freed. The host waits for their copies, because a stream under capture
    /// would record a wait.
    fn keep(&self, ids: &[usize], limit: Duration) -> PageResult<()> {
        let shared = &self.shared;
        let mut new: Vec<_> = {
            let calls = shared.calls();
            ids.iter().copied().filter(|id| !calls.captured.contains(id)).collect()
        };
        if new.is_empty() {
            return Ok(());
        }
        self.bring_still(&mut new, limit)?;
        // Chunks that were freed meanwhile, or that another thread keeps, go when this call lets go.
        let twice: Vec<_> = {
            let table = shared.table();
            let mut calls = shared.calls();
            let captured = &calls.captured;
            let is_over = |id: &usize| table.chunks()[*id].is_freed() || captured.contains(id);
            let (twice, kept): (Vec<_>, Vec<_>) = new.into_iter().partition(is_over);
            calls.captured.extend(kept);
            twice
        };
        self.let_go(&twice);
        Ok(())
    }
}
