//! Larger than memory: a window of addresses whose contents are on the device by turns, while the process runs.
//!
//! ```text
//!   spans:    [ a  ][     b      ][c][     d    ] ...     what callers have; they may share chunks
//!
//!   window:   [chunk 0][chunk 1][chunk 2][chunk 3] ...    addresses, for good; each chunk is an own row of the ledger
//!                 |                 |
//!   frames:    [frame]           [frame]                  device memory, with its charge against the budget
//!
//!   host arena:    [place of 1][place of 0]  ...          each chunk keeps its place
//! ```
//!
//! A *frame* is the `Physical` of one chunk. An exchange takes it from a chunk that nobody uses and gives
//! it to one that somebody wants: the same changes that a pause and a resume make of a row, for one chunk
//! (`StillChunk`). A chunk that is away is set aside, so that pauses and resumes of everything pass over
//! it. One on the device they handle as any other.
//!
//! `table` decides, by the order of uses that `order` has recorded. `thread` carries that out, on the thread
//! `sublet-pager`. It waits for work of devices outside the gate, and goes in, as an application's call does, to begin
//! a copy or to exchange: nothing of that waits. So a pause stops it between two such steps, and copies that are under
//! way then end before the devices are idle.
//!
//! The caller's part: the code that hands work to the driver shows what it names ([`Pager::begin_call`]), and waits until all
//! of that is on the device. Announcements ([`Pager::announce`]) are hints: they buy time. What nobody shows finds addresses without
//! memory, which ends the context. It never finds wrong bytes: a chunk is filled at addresses of the pager's own, and mapped
//! when it is full.
//!
//! Locks: `entering`, then the table's, then that of `Calls`, which is a leaf. The last two are never held across a driver call.

mod ending;
mod error;
mod giving;
mod lists;
mod marks;
mod order;
mod places;
mod plan;
mod prints;
mod report;
mod spans;
mod table;
mod thread;
mod uses;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverError, RawEvent, VaRange};
use vmm_pool::{
    Class, Contents, Describe, HostBudget, Lender, Pool, PoolResult, VirtualHandle, frame_prop,
};

pub use self::error::{PageError, PageResult};
use self::marks::Mark;
pub use self::plan::Planned;
pub use self::report::{PageReport, UnseenWrite};
use self::spans::Spans;
use self::table::WindowChunks;
use self::uses::{Calls, SLOTS};
pub use self::uses::{In, Touched};

/// The time between two looks of a wait whether the process is paused. Paused time does not count.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The time that the end of a pager waits for its thread.
const END_WAIT: Duration = Duration::from_secs(10);
/// The library that chunks are counted under.
const LIBRARY: &str = "paged";

/// The size of a window and of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// Addresses, in bytes: the most that all spans together may take. They cost no memory.
    pub window_bytes: u64,
    /// The size of a chunk, a multiple of the device's granularity.
    pub chunk_bytes: u64,
    /// The most device memory that chunks may take, in bytes. [`WHAT_IS_LEFT`]: as much as there is, less 1 GiB.
    pub frames_bytes: u64,
}

/// Frames for as much as the device and the budget give. 1 GiB of the device stays free, for what the pool does not see.
pub const WHAT_IS_LEFT: u64 = u64::MAX;
/// So much, in bytes.
const LEFT_FREE_BYTES: u64 = 1 << 30;

/// The window of one device. Any thread may call; none may be inside the pool's gate.
#[derive(Debug)]
pub struct Pager<D: Driver> {
    shared: Arc<PagedWindow<D>>,
}

/// By how much host memory may grow that holds so many bytes.
type Budget = Box<dyn Fn(u64) -> HostBudget + Send + Sync>;

struct PagedWindow<D: Driver> {
    pool: Arc<Pool<D>>,
    device: DeviceOrdinal,
    window: VaRange,
    chunk_bytes: u64,
    /// The device memory that stays free if frames are taken, in bytes.
    leaves_bytes: u64,
    host_budget: Budget,
    table: Mutex<WindowChunks>,
    /// One at a time gives out spans: the next may share a chunk whose row is not entered yet. True: nothing is given out any more.
    entering: Mutex<bool>,
    /// The thread has done something, or is to do something.
    changed: Condvar,
    /// The record of what calls use. Its lock is a leaf.
    calls: Mutex<Calls>,
    /// Events that nobody uses now.
    spare: Arc<Mutex<Vec<RawEvent>>>,
}

impl<D: Driver> fmt::Debug for PagedWindow<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<D: Driver> PagedWindow<D> {
    fn table(&self) -> MutexGuard<'_, WindowChunks> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn range_of(&self, chunk: usize) -> VaRange {
        let start = self.window.start.0 + chunk as u64 * self.chunk_bytes;
        VaRange::new(DeviceAddress(start), self.chunk_bytes)
    }

    /// Addresses for copies, of one number: they lie behind the window.
    fn range_aside(&self, slot: usize) -> VaRange {
        let start = self.window.end().0 + slot as u64 * self.chunk_bytes;
        VaRange::new(DeviceAddress(start), self.chunk_bytes)
    }

    /// The window with the addresses for copies.
    fn reserved(&self) -> VaRange {
        let aside_bytes = SLOTS as u64 * self.chunk_bytes;
        VaRange::new(self.window.start, self.window.size_bytes + aside_bytes)
    }

    /// An event that nobody uses. The window's context is current.
    fn mark(&self) -> PoolResult<Mark> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let made = || self.pool.driver().event_create();
        let about = || "event for paging".to_owned();
        let event = spare.map_or_else(made, Ok).about(about, 0, Some(self.device))?;
        Ok(Mark::new(event, &self.spare))
    }

    /// The span that begins here is gone: freed chunks that are away, with their rows. `None`: there is no such span.
    fn free(&self, start: u64) -> Option<Vec<(usize, VirtualHandle)>> {
        let mut table = self.table();
        let mut calls = self.calls();
        calls.want_ends();
        let freed = table.free(calls.spans.remove(start)?);
        let (captured, lists) = calls.free(&freed);
        drop(calls);
        table.graphs_let_go(&captured, lists);
        Some(table.take_freed())
    }

    /// The device has failed.
    fn breaks(&self, error: DriverError) {
        let about = || "work that uses paged memory".to_owned();
        let error = Err::<(), _>(error).about(about, 0, Some(self.device));
        self.table().broken = error.err().map(PageError::from).map(Arc::new);
        self.changed.notify_all();
    }

    /// Threads that wait for the pager hear that it has ended.
    fn say_it_has_ended(&self) {
        self.table().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits until `look` says something, for `limit` of the time that the process is not paused.
    fn wait_for<T>(
        &self,
        limit: Duration,
        what: impl Fn(&WindowChunks) -> String,
        mut look: impl FnMut(&mut WindowChunks) -> Option<PageResult<T>>,
    ) -> PageResult<T> {
        let mut deadline = Instant::now() + limit;
        let mut table = self.table();
        loop {
            if let Some(answer) = look(&mut table) {
                return answer;
            }
            if let Some(error) = &table.broken {
                return Err(PageError::Shared(Arc::clone(error)));
            }
            if table.has_ended || table.is_ending {
                return Err(PageError::Ended { device: self.device });
            }
            let now = Instant::now();
            if !self.pool.gate().is_open() {
                deadline = now + limit;
            }
            let Some(left) = deadline.checked_duration_since(now).filter(|left| !left.is_zero())
            else {
                return Err(PageError::Late { what: what(&table), limit });
            };
            let waited = self.changed.wait_timeout(table, left.min(LOOK_EVERY));
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<D: Driver> Pager<D> {
    /// A window on `device`, with nothing in it. `host_budget` is told how much host memory the process holds for contents, in
    /// bytes, and answers by how much it may grow. It is asked before host memory is taken, on threads that call here, and the
    /// pager's. *Blocks* on the driver.
    ///
    /// # Errors
    /// [`PageError::UnfitChunk`]; [`PageError::Pool`] when the driver gives no addresses or streams; [`PageError::TooFewFrames`] when
    /// not one chunk fits; [`PageError::NoThread`].
    ///
    /// # Driver calls
    /// `cuMemGetAllocationGranularity`, `cuMemAddressReserve`, `cuStreamCreate`.
    pub fn new(
        pool: Arc<Pool<D>>,
        device: DeviceOrdinal,
        size: WindowSize,
        host_budget: impl Fn(u64) -> HostBudget + Send + Sync + 'static,
    ) -> PageResult<Self> {
        let WindowSize { window_bytes, chunk_bytes, frames_bytes } = size;
        let frames = frames_bytes.checked_div(chunk_bytes).unwrap_or(0);
        let bounded = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let granularity = pool.driver().allocation_granularity(&frame_prop(device));
        let about = || "chunks for paging".to_owned();
        let granularity_bytes = granularity.about(about, chunk_bytes, Some(device))?.size_bytes;
        if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(granularity_bytes) {
            return Err(PageError::UnfitChunk { chunk_bytes, granularity_bytes, device });
        }
        if frames == 0 {
            return Err(PageError::TooFewFrames { needed_bytes: chunk_bytes, frames_bytes });
        }
        let whole_bytes = window_bytes - window_bytes % chunk_bytes;
        let frames = frames.min(whole_bytes / chunk_bytes).max(1);
        let about = || "addresses for paging".to_owned();
        let reserved_bytes = whole_bytes.saturating_add(SLOTS as u64 * chunk_bytes);
        let reserved = places::reserve(&**pool.driver(), reserved_bytes);
        let reserved = reserved.about(about, reserved_bytes, Some(device))?;
        let window = VaRange::new(reserved.start, whole_bytes);
        let shared = Arc::new(PagedWindow {
            pool,
            device,
            window,
            chunk_bytes,
            leaves_bytes: if frames_bytes == WHAT_IS_LEFT { LEFT_FREE_BYTES } else { 0 },
            host_budget: Box::new(host_budget),
            table: Mutex::new(WindowChunks::new(bounded(frames))),
            entering: Mutex::default(),
            changed: Condvar::new(),
            calls: Mutex::new(Calls::new(Spans::new(whole_bytes, chunk_bytes))),
            spare: Arc::default(),
        });
        let begun = Self::begin(&shared);
        if begun.is_err()
            && let Err(error) = shared.pool.deferred().free_addresses(shared.reserved())
        {
            tracing::error!(%error, "addresses for paging stay until the next pause");
        }
        begun?;
        let lender: Weak<dyn Lender> = Arc::<PagedWindow<D>>::downgrade(&shared);
        shared.pool.lenders().add(lender);
        Ok(Self { shared })
    }

    fn begin(shared: &Arc<PagedWindow<D>>) -> PageResult<()> {
        let (tell, told) = crossbeam_channel::bounded(1);
        let (for_thread, after_panic) = (Arc::clone(shared), Arc::clone(shared));
        let spawned = vmm_pool::threads::spawn(
            "sublet-pager",
            move || thread::run(&for_thread, &tell),
            move |_| after_panic.say_it_has_ended(),
        );
        spawned.map_err(PageError::NoThread)?;
        let ended = PageError::Ended { device: shared.device };
        Ok(told.recv().map_err(|_| ended)??)
    }

    /// Addresses for `size_bytes`, at a multiple of 512. They may share their first and last chunk with other spans. Bytes
    /// of chunks that are theirs alone are zero, others are what a freed span has left there. Takes no device memory, and no host
    /// memory yet.
    ///
    /// # Errors
    /// [`PageError::NoBytes`]; [`PageError::WindowFull`]; [`PageError::OutOfHostMemory`] when copies of all that is paged would not fit the host.
    pub fn alloc(&self, size_bytes: u64) -> PageResult<DeviceAddress> {
        let shared = &self.shared;
        let is_closed = shared.entering.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_closed {
            return Err(PageError::Ended { device: shared.device });
        }
        if size_bytes == 0 {
            return Err(PageError::NoBytes);
        }
        let full = PageError::WindowFull {
            asked_bytes: size_bytes,
            window_bytes: shared.window.size_bytes,
        };
        let (start, bare) = {
            let mut table = shared.table();
            table.alloc(&mut shared.calls().spans, size_bytes).ok_or(full)?
        };
        let fits = if bare.is_empty() {
            Ok(())
        } else {
            let end_bytes = shared.pool.end_with_homes(bare.len(), shared.chunk_bytes);
            let host = shared.pool.host_memory();
            host.check_growth(end_bytes, &*shared.host_budget).map_err(PageError::from)
        };
        let mut rows = Vec::new();
        let inserted = fits.and_then(|()| {
            bare.iter().try_for_each(|&chunk| {
                rows.push(self.insert(chunk)?);
                Ok(())
            })
        });
        {
            let mut table = shared.table();
            bare.iter().zip(rows).for_each(|(&chunk, row)| table.entered(chunk, row));
        }
        if let Err(error) = inserted {
            // What it shares with a span that was freed meanwhile comes out too.
            thread::remove(shared, shared.free(start).unwrap_or_default());
            let mut table = shared.table();
            for &chunk in &bare {
                table.gone(chunk);
            }
            return Err(error);
        }
        Ok(DeviceAddress(shared.window.start.0 + start))
    }

    /// Nothing is given out from now on, if all that was has been freed. Is that so?
    pub fn close_if_empty(&self) -> bool {
        let shared = &self.shared;
        let mut is_closed = shared.entering.lock().unwrap_or_else(PoisonError::into_inner);
        *is_closed |= shared.calls().spans.is_empty();
        *is_closed
    }

    fn insert(&self, chunk: usize) -> PageResult<VirtualHandle> {
        let (device, range) = (self.shared.device, self.shared.range_of(chunk));
        let class = Class { library: LIBRARY, tag: String::new(), contents: Contents::Keep };
        Ok(self.shared.pool.insert_with_home(device, range, class)?)
    }

    /// Gives a span up, which nobody holds. The device memory of chunks that are no other's goes when their last use is over.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn free(&self, span: DeviceAddress) -> PageResult<()> {
        let shared = &self.shared;
        let start = span.0.checked_sub(shared.window.start.0);
        let away = start.and_then(|start| shared.free(start));
        // They have no memory: nothing is called.
        thread::remove(shared, away.ok_or(PageError::NotPaged { address: span })?);
        shared.changed.notify_all();
        Ok(())
    }

    /// The chunks of `spans`, those of two spans twice.
    fn chunks_of(&self, spans: &[DeviceAddress]) -> PageResult<Vec<usize>> {
        let calls = self.shared.calls();
        let mut all = Vec::new();
        for &address in spans {
            let start = address.0.checked_sub(self.shared.window.start.0);
            let ids = start.and_then(|start| calls.spans.chunks_of(start));
            all.extend(ids.ok_or(PageError::NotPaged { address })?);
        }
        Ok(all)
    }

    /// Has all of `spans` be mapped until [`Pager::release`], for callers that need that without a launch: it waits for at most
    /// `limit` of the time that the process is not paused. *Blocks.*
    ///
    /// # Errors
    /// [`PageError::TooFewFrames`], [`PageError::NotPaged`] immediately. [`PageError::Late`] and what the driver or the
    /// budget refused: nothing is held.
    ///
    /// # Driver calls
    /// `cuEventSynchronize`.
    pub fn acquire(&self, spans: &[DeviceAddress], limit: Duration) -> PageResult<()> {
        let mut ids = self.chunks_of(spans)?;
        self.bring_still(&mut ids, limit)
    }

    /// `spans` may leave again. Work that no call has shown has ended, and may have written there.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn release(&self, spans: &[DeviceAddress]) -> PageResult<()> {
        let ids = self.chunks_of(spans)?;
        self.shared.table().used(&ids, None);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// A hint that `spans` are used next, in this order, behind what was announced before: they come while the device does other
    /// work, and leave only for somebody who waits.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn announce(&self, spans: &[DeviceAddress]) -> PageResult<()> {
        let ids = self.chunks_of(spans)?;
        self.shared.table().announce(&ids);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Waits until the host has all that was written by uses that have ended, for at most `limit` of the time that the process is
    /// not paused. What a graph uses is in use for good. *Blocks.*
    ///
    /// # Errors
    /// [`PageError::Late`].
    pub fn flush(&self, limit: Duration) -> PageResult<()> {
        let shared = &self.shared;
        let below = shared.want_ends();
        let captured = shared.calls().captured();
        let what = |_: &WindowChunks| "what was written to be copied to the host".to_owned();
        shared.table().demand.flushing += 1;
        shared.changed.notify_all();
        let flushed = shared.wait_for(limit, what, |table| {
            let is_so = shared.calls().have_ended(below) && table.is_all_clean(&captured);
            is_so.then_some(Ok(()))
        });
        shared.table().demand.flushing -= 1;
        flushed
    }

    /// From now on chunks take at most so much device memory, and in `limit` no more than that. *Blocks.*
    ///
    /// # Errors
    /// [`PageError::TooFewFrames`] when not one chunk fits; [`PageError::Late`] when uses do not end in time: it shrinks
    /// when they do.
    pub fn set_frames(&self, frames_bytes: u64, limit: Duration) -> PageResult<()> {
        let chunk_bytes = self.shared.chunk_bytes;
        let most = self.shared.window.size_bytes.min(frames_bytes);
        let frames = usize::try_from(most / chunk_bytes).unwrap_or(usize::MAX);
        if frames == 0 {
            return Err(PageError::TooFewFrames { needed_bytes: chunk_bytes, frames_bytes });
        }
        self.shared.table().demand.set_frames(frames);
        self.shared.changed.notify_all();
        let what = |_: &WindowChunks| "device memory to be given back".to_owned();
        // Another thread may allow more meanwhile.
        let fits = |table: &mut WindowChunks| table.resident() <= table.demand.frames().max(frames);
        self.shared.wait_for(limit, what, |table| fits(table).then_some(Ok(())))
    }

    /// From now on what leaves without a copy is compared with the copy that the host has, by its device: a write that nobody has
    /// shown is named in the log and in [`PageReport::unseen`], and kept. Each chunk that leaves waits for that.
    pub fn check_writes(&self) {
        self.shared.table().checks.is_on = true;
    }
}

impl<D: Driver> Drop for Pager<D> {
    /// Gives all of the window back when the last use is over. A paused process does that when it runs again.
    fn drop(&mut self) {
        let mut table = self.shared.table();
        table.is_ending = true;
        self.shared.changed.notify_all();
        let deadline = Instant::now() + END_WAIT;
        while !table.has_ended && self.shared.pool.gate().is_open() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            let waited = self.shared.changed.wait_timeout(table, left.min(LOOK_EVERY));
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
