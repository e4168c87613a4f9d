//! Memory larger than the device: a window of addresses whose contents move between host and device while the process runs.
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
//! A *frame* is the `Physical` of one chunk. An exchange takes the frame from a chunk that nobody uses and gives it to a chunk
//! that somebody wants. It changes the row of one chunk as a pause and a resume do (`StillChunk`). A chunk that is away is set
//! aside, so pauses and resumes of everything skip it. They handle a chunk on the device as any other row.
//!
//! `table` decides, by the order of uses that `order` has recorded. `thread` carries the decisions out, on the thread
//! `sublet-pager`. That thread waits for work of devices outside the gate. It goes in, as an application's call does, to begin
//! a copy or to exchange frames, and waits for nothing there. So a pause stops it between two such steps, and copies that are
//! under way end before the devices are idle.
//!
//! The caller's part: the code that hands work to the driver shows the addresses that the work names ([`Pager::begin_call`]).
//! It waits until all of that memory is on the device. Announcements ([`Pager::announce`]) are hints: they save time. Work that
//! nobody shows finds addresses without memory, which ends the context. It never finds wrong bytes: a chunk is filled at
//! addresses of the pager's own, and mapped when it is full.
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

/// The interval at which a wait checks whether the process is paused. Paused time does not count.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The longest time that the end of a pager waits for its thread.
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
    /// The most device memory that chunks may take, in bytes. [`WHAT_IS_LEFT`]: all that there is, less 1 GiB.
    pub frames_bytes: u64,
}

/// Frames for as much as the device and the budget give. 1 GiB of the device stays free, for memory that the pool does not see.
pub const WHAT_IS_LEFT: u64 = u64::MAX;
/// The device memory that [`WHAT_IS_LEFT`] leaves free, in bytes.
const LEFT_FREE_BYTES: u64 = 1 << 30;

/// The window of one device. Any thread may call; none may be inside the pool's gate.
#[derive(Debug)]
pub struct Pager<D: Driver> {
    shared: Arc<PagedWindow<D>>,
}

/// Says by how much host memory may grow, given the bytes that it holds.
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
    /// Held by the one thread that gives out a span: the next span may share a chunk whose row is not entered yet. True: no
    /// more spans are given out.
    entering: Mutex<bool>,
    /// Notified when the thread has done something, or is to do something.
    changed: Condvar,
    /// The record of the chunks that calls use. Its lock is a leaf.
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

    /// The addresses for copies with the number `slot`. They stand behind the window.
    fn range_aside(&self, slot: usize) -> VaRange {
        let start = self.window.end().0 + slot as u64 * self.chunk_bytes;
        VaRange::new(DeviceAddress(start), self.chunk_bytes)
    }

    /// The window, with the addresses for copies behind it.
    fn reserved(&self) -> VaRange {
        let aside_bytes = SLOTS as u64 * self.chunk_bytes;
        VaRange::new(self.window.start, self.window.size_bytes + aside_bytes)
    }

    /// Returns an event that nobody uses. The window's context is current.
    fn mark(&self) -> PoolResult<Mark> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let made = || self.pool.driver().event_create();
        let about = || "event for paging".to_owned();
        let event = spare.map_or_else(made, Ok).about(about, 0, Some(self.device))?;
        Ok(Mark::new(event, &self.spare))
    }

    /// Removes the span that begins here. Returns its freed chunks that are away, with their rows. `None`: no span begins here.
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

    /// Records that the device has failed.
    fn breaks(&self, error: DriverError) {
        let about = || "work that uses paged memory".to_owned();
        let error = Err::<(), _>(error).about(about, 0, Some(self.device));
        self.table().broken = error.err().map(PageError::from).map(Arc::new);
        self.changed.notify_all();
    }

    /// Tells threads that wait for the pager that it has ended.
    fn say_it_has_ended(&self) {
        self.table().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits until `look` returns a result, for at most `limit`. Paused time does not count.
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
    /// Opens an empty window on `device`. `host_budget` gets the host memory that the process holds for contents, in bytes, and
    /// answers by how much that may grow. It is called before host memory is taken, on threads that call here, and on the
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

    /// Returns addresses for `size_bytes`, at a multiple of 512. They may share their first and last chunk with other spans.
    /// Bytes of chunks that only this span has are zero. Others have what a freed span has left there. Takes no device memory,
    /// and no host memory yet.
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
            // Chunks shared with a span that was freed meanwhile are among these too.
            thread::remove(shared, shared.free(start).unwrap_or_default());
            let mut table = shared.table();
            for &chunk in &bare {
                table.gone(chunk);
            }
            return Err(error);
        }
        Ok(DeviceAddress(shared.window.start.0 + start))
    }

    /// Closes the window to new spans if all spans were freed. Returns whether it is closed.
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

    /// Frees a span, which nobody holds. Chunks that belong to no other span give up their device memory when their last use is
    /// over.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn free(&self, span: DeviceAddress) -> PageResult<()> {
        let shared = &self.shared;
        let start = span.0.checked_sub(shared.window.start.0);
        let away = start.and_then(|start| shared.free(start));
        // These chunks have no memory, so no driver call is made.
        thread::remove(shared, away.ok_or(PageError::NotPaged { address: span })?);
        shared.changed.notify_all();
        Ok(())
    }

    /// Returns the chunks of `spans`. A chunk of two spans is there twice.
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

    /// Keeps all of `spans` mapped until [`Pager::release`], for callers that need that without a launch. Waits for at most
    /// `limit`. Paused time does not count. *Blocks.*
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

    /// Lets `spans` leave again. Work that no call has shown has ended, and may have written there.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn release(&self, spans: &[DeviceAddress]) -> PageResult<()> {
        let ids = self.chunks_of(spans)?;
        self.shared.table().used(&ids, None);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Hints that `spans` are used next, in this order, after those announced before. They come while the device does other
    /// work, and leave only for a caller who waits.
    ///
    /// # Errors
    /// [`PageError::NotPaged`].
    pub fn announce(&self, spans: &[DeviceAddress]) -> PageResult<()> {
        let ids = self.chunks_of(spans)?;
        self.shared.table().announce(&ids);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Waits until the host has all writes of uses that have ended, for at most `limit`. Paused time does not count. Memory
    /// that a graph uses is in use for good. *Blocks.*
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

    /// Limits the device memory of chunks from now on. Waits at most `limit` until they take no more. *Blocks.*
    ///
    /// # Errors
    /// [`PageError::TooFewFrames`] when not one chunk fits; [`PageError::Late`] when uses do not end in time: the window
    /// shrinks when they do.
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

    /// Turns checks on. From now on the device compares each chunk that leaves without a copy with the copy on the host. A
    /// write that nobody has shown is logged, is named in [`PageReport::unseen`], and is kept. Each chunk that leaves waits for
    /// the comparison.
    pub fn check_writes(&self) {
        self.shared.table().checks.is_on = true;
    }
}

impl<D: Driver> Drop for Pager<D> {
    /// Gives all of the window back when the last use is over. A paused process does so when it runs again.
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
