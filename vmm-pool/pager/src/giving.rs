//! The number of frames of a window: as many as its caller allows, and as memory permits. If other memory of the process finds
//! no room, the window gives frames up. Some time later the window tries to get them again.

use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{Entered, Lender, Physical, PoolError};

use super::table::WindowChunks;
use super::thread::{LOOK_SOON, Worker};
use super::{PageError, PageResult, PagedWindow};

/// A window with less than this takes memory from a window that has more, in bytes.
const FLOOR_BYTES: u64 = 2 << 30;
/// The time of one wait for a frame of another window. Meanwhile this window does not look at its own chunks.
const OTHERS_LIMIT: Duration = Duration::from_millis(100);
/// The time for which a window asks other windows again, while a caller waits who otherwise gets an error.
const LAST_LIMIT: Duration = Duration::from_secs(10);
/// The time that other uses may take to end before a caller who waits gets an error.
const ENDS_LIMIT: Duration = Duration::from_secs(1);
/// The time after which frames that were given up, or refused, are tried again.
const TRIED_AGAIN: Duration = Duration::from_secs(10);

impl<D: Driver> PagedWindow<D> {
    /// Counts the chunks that could give their frames.
    fn spare(&self, table: &WindowChunks) -> usize {
        let calls = self.calls();
        table.spare(|id| calls.lists.holding(id))
    }
}

impl<D: Driver> Lender for PagedWindow<D> {
    fn spare_bytes(&self, device: DeviceOrdinal) -> u64 {
        let table = self.table();
        if device != self.device || table.is_ending || table.broken.is_some() {
            return 0;
        }
        self.spare(&table) as u64 * self.chunk_bytes
    }

    fn owed_bytes(&self, device: DeviceOrdinal) -> u64 {
        if device == self.device { self.table().demand.owed() as u64 * self.chunk_bytes } else { 0 }
    }

    fn ask(&self, bytes: u64) {
        let mut table = self.table();
        let chunks = usize::try_from(bytes.div_ceil(self.chunk_bytes)).unwrap_or(usize::MAX);
        let spare = self.spare(&table);
        table.demand.owe(chunks.min(spare));
        drop(table);
        // The uses of queued work are to end.
        self.calls().want_ends();
        self.changed.notify_all();
    }

    fn wait(&self, limit: Duration) -> bool {
        let what = |_: &WindowChunks| "frames to be given up".to_owned();
        let given =
            self.wait_for(limit, what, |table| (table.demand.owed() == 0).then_some(Ok(())));
        if given.is_err() {
            self.table().demand.owe_nothing();
        }
        given.is_ok()
    }
}

impl<D: Driver> Worker<'_, D> {
    /// Returns device memory for one more chunk. If another chunk could leave for `newcomer`, `leaves_bytes` stay free.
    pub(super) fn new_frame(
        &self,
        entered: &Entered<'_, D>,
        newcomer: usize,
    ) -> PageResult<Physical> {
        let (device, needed_bytes) = (self.shared.device, self.shared.chunk_bytes);
        let leaves_bytes = self.shared.leaves_bytes;
        if leaves_bytes > 0 && !self.shared.table().victims(newcomer).is_empty() {
            // A failed query refuses nothing here: the driver itself refuses what does not fit.
            let info = self.shared.pool.driver().memory_info();
            let free_bytes = info.map_or(u64::MAX, |info| info.free_bytes);
            if free_bytes < leaves_bytes + needed_bytes {
                let short = PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes };
                return Err(short.into());
            }
        }
        Ok(entered.make_frame(device, needed_bytes)?)
    }

    /// Handles the lack of device memory for another frame. A window that has more gives a frame, or the present frames must
    /// suffice.
    pub(super) fn without_room(&mut self, newcomer: usize, error: PageError) {
        let shared = self.shared;
        let (has_others, is_awaited, own_bytes) = {
            let table = shared.table();
            let own_bytes = table.resident() as u64 * shared.chunk_bytes;
            let is_awaited = table.chunks()[newcomer].is_held();
            (!table.victims(newcomer).is_empty(), is_awaited, own_bytes)
        };
        let waited = self.awaited.map_or(Duration::MAX, |(_, since)| since.elapsed());
        let (is_early, is_asking) = (waited < ENDS_LIMIT, waited < LAST_LIMIT);
        let is_last = is_awaited && !has_others;
        if self.stay.is_some() {
            // Inside the gate this thread waits for nobody: a pause would wait for both. Filled chunks are mapped first.
            if is_early {
                let _waited = shared.changed.wait_timeout(shared.table(), LOOK_SOON);
                return;
            }
        } else if self.asked_for.replace(newcomer) != Some(newcomer) || (is_last && is_asking) {
            // It asks once for each chunk: other windows may have more and be unable to give it.
            let own = Arc::as_ptr(shared);
            let others = shared.pool.lenders().on(shared.device);
            let mut others = others.iter().filter(|(_, it)| !ptr::addr_eq(Arc::as_ptr(it), own));
            let is_poor = own_bytes < FLOOR_BYTES;
            let is_richer = |spare: u64| (is_poor && spare > own_bytes) || (is_last && spare > 0);
            if let Some((_, richest)) = others.next().filter(|(spare, _)| is_richer(*spare)) {
                if is_last {
                    // A chunk of this window may leave as well, when the lists that hold it have ended.
                    shared.calls().want_ends();
                    shared.end_wanted();
                }
                richest.ask(shared.chunk_bytes);
                richest.wait(OTHERS_LIMIT);
                return;
            }
        }
        if is_last && is_early && !shared.calls().have_ended(u64::MAX) {
            // Lists of calls hold the chunks that are here. A chunk may leave when these lists have ended.
            shared.calls().want_ends();
            shared.end_wanted();
            let _waited = shared.changed.wait_timeout(shared.table(), LOOK_SOON);
            return;
        }
        let mut table = shared.table();
        if has_others {
            let resident = table.resident();
            table.demand.narrow(resident);
        } else {
            table.failed(newcomer, Arc::new(error));
        }
    }

    /// Records that a frame has gone back to the driver, perhaps for a caller who asked.
    pub(super) fn gave(&mut self) {
        let mut table = self.shared.table();
        if table.demand.gave() {
            let resident = table.resident();
            table.demand.narrow(resident);
            self.narrowed = None;
        }
    }

    /// Lets the window try for more frames again, some time after there was no room.
    pub(super) fn widen(&mut self) {
        let mut table = self.shared.table();
        if !table.demand.is_narrow() {
            self.narrowed = None;
        } else if self.narrowed.get_or_insert_with(Instant::now).elapsed() >= TRIED_AGAIN {
            table.demand.widen();
            self.narrowed = None;
        }
    }
}
