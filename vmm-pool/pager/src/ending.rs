//! The ends of the uses of calls: events behind the lists of streams.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::driver::{Driver, DriverCode, RawStream};
use vmm_pool::gate::Passage;
use vmm_pool::{Describe, PoolResult};

use super::marks::Mark;
use super::table::WindowChunks;
use super::uses::{In, Touched};
use super::{PagedWindow, Pager};

/// The longest time that a capture, or the end of a stream, waits for lists that other threads are about to end.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// The interval between two checks of those lists.
const SETTLE_EVERY: Duration = Duration::from_micros(200);
/// The name of a call that waits at the gate.
const END_OF_USES: &str = "the end of uses of paged memory";

/// The end of a use: an event, or `None` if the use is over already.
type End = Option<Arc<Mark>>;

impl<D: Driver> PagedWindow<D> {
    /// Tells the pager's thread to end the uses of all streams, as far as their calls are launched. Returns the number that the
    /// next list would have.
    pub(super) fn want_ends(&self) -> u64 {
        let below = {
            // The pager checks under this lock whether it may sleep.
            let _table = self.table();
            self.calls().want_ends()
        };
        self.changed.notify_all();
        below
    }

    /// Ends the lists that are marked to end. Runs on the pager's thread.
    pub(super) fn end_wanted(&self) {
        self.end_taken(|_| true);
    }

    fn end_taken(&self, chosen: impl Fn(RawStream) -> bool) {
        let taken = self.calls().lists.take(chosen);
        for (number, stream) in taken {
            self.end_list(number, stream);
        }
    }

    /// Records an event behind all work that `stream` was given.
    fn mark_behind(&self, stream: RawStream) -> PoolResult<Arc<Mark>> {
        let mark = self.mark()?;
        let recorded = self.pool.driver().event_record(mark.event, stream);
        let about = || "the end of a use of paged memory".to_owned();
        recorded.about(about, 0, Some(self.device))?;
        Ok(Arc::new(mark))
    }

    /// Does the same, with a second try, for a caller that cannot tell anybody to try again.
    fn mark_or_try_again(&self, stream: RawStream) -> PoolResult<Arc<Mark>> {
        self.mark_behind(stream).or_else(|_| self.mark_behind(stream))
    }

    fn is_captured(&self, stream: RawStream) -> bool {
        match self.pool.driver().stream_is_capturing(stream) {
            Ok(is_captured) => is_captured,
            Err(error) => error.code == DriverCode::STREAM_CAPTURE_IMPLICIT,
        }
    }

    fn postpone(&self, number: u64) {
        {
            let _table = self.table();
            self.calls().lists.postpone(number);
        }
        self.changed.notify_all();
    }

    /// Ends a list that this thread has taken to end.
    fn end_list(&self, number: u64, stream: RawStream) {
        let pass = self.pool.gate().pass_for(END_OF_USES, Passage::Use);
        // An event would become a part of the graph, or end the capture.
        if self.is_captured(stream) {
            return self.postpone(number);
        }
        let marked = self.mark_or_try_again(stream);
        // Another thread may have begun or joined a capture meanwhile. The event is worthless then.
        if marked.is_ok() && self.is_captured(stream) {
            return self.postpone(number);
        }
        drop(pass);
        let end = self.end_of(marked, stream);
        let mut table = self.table();
        let mut calls = self.calls();
        let Some(gone) = calls.lists.ended(number) else { return };
        if let Ok(mark) = &end {
            table.used(&gone.chunks, mark.as_ref());
            if let Some(mark) = mark.as_ref().filter(|_| gone.has_graphs) {
                table.graph_used(mark);
            }
        } else {
            table.lost(&gone.chunks);
            if gone.has_graphs {
                table.graph_lost(&calls.captured());
            }
        }
        drop(calls);
        self.tell_end(table, &end);
    }

    /// Ends a use on the default stream that only this thread has.
    fn end_own(&self, stream: RawStream, chunks: &[usize]) {
        let pass = self.pool.gate().pass_for(END_OF_USES, Passage::Use);
        let marked = self.mark_or_try_again(stream);
        drop(pass);
        self.end_use(&self.end_of(marked, stream), chunks);
    }

    /// Ends a use in another context: waits for its stream. No event of the window can stand behind a stream there, and that
    /// context may end before the window.
    fn end_elsewhere(&self, stream: RawStream, chunks: &[usize]) {
        self.end_use(&self.wait_for_stream(stream).map(|()| None), chunks);
    }

    fn end_use(&self, end: &PoolResult<End>, chunks: &[usize]) {
        let mut table = self.table();
        match end {
            Ok(mark) => table.used(chunks, mark.as_ref()),
            Err(_) => table.lost(chunks),
        }
        self.tell_end(table, end);
    }

    /// Returns the end of a use. Waits for a stream of another context, because no event of the window can stand behind it.
    fn end_of(&self, marked: PoolResult<Arc<Mark>>, stream: RawStream) -> PoolResult<End> {
        match marked {
            Err(error) if error.code() == Some(DriverCode::INVALID_HANDLE) => {
                self.wait_for_stream(stream).map(|()| None)
            }
            marked => marked.map(Some),
        }
    }

    /// Waits for `stream`. *Blocks*, as the program may itself: no pause waits for this.
    fn wait_for_stream(&self, stream: RawStream) -> PoolResult<()> {
        let _asking = self.pool.door().pass();
        let waited = self.pool.driver().stream_synchronize(stream);
        waited.about(|| "a use of paged memory".to_owned(), 0, Some(self.device))
    }

    fn tell_end(&self, table: MutexGuard<'_, WindowChunks>, end: &PoolResult<End>) {
        // To wake the thread costs more than its regular check.
        let is_told = table.demand.is_asleep || table.demand.without_room > 0;
        drop(table);
        if let Err(error) = end {
            tracing::error!(%error, "paged memory stays on its device");
        }
        if is_told || !matches!(end, Ok(Some(_))) {
            self.changed.notify_all();
        }
    }
}

impl<D: Driver> Pager<D> {
    /// Ends a call that has given its work to the driver, or will not.
    ///
    /// # Driver calls
    /// `cuStreamIsCapturing` and `cuEventRecord`, both seldom. *Blocks* for the work of a call in another context:
    /// `cuStreamSynchronize`.
    pub fn end_call(&self, touched: &Touched) {
        let shared = &self.shared;
        match touched.stream {
            In::Stream(_) => {
                let ended = shared.calls().lists.launched(touched.list);
                if let Some(stream) = ended {
                    shared.end_list(touched.list, stream);
                }
            }
            // No other thread can name this stream.
            In::OwnStream(raw) => shared.end_own(raw, &touched.chunks),
            In::Elsewhere(raw) => shared.end_elsewhere(raw, &touched.chunks),
            In::Graph => {}
        }
    }

    /// Ends the uses on `stream`, which is about to end, or to become another thread's. The caller may record the events behind
    /// these uses if the window's context is current to it. Otherwise the pager records them. *Blocks* while another thread
    /// does so, for a second at most, plus the time of pauses.
    ///
    /// # Driver calls
    /// As [`Pager::end_call`].
    pub fn stream_ends(&self, stream: RawStream, is_current: bool) {
        let is_meant = |other| other == stream;
        let below = self.shared.calls().lists.want(is_meant);
        if is_current {
            self.shared.end_taken(is_meant);
        }
        self.settle(is_meant, below);
    }

    /// Prepares for a capture, which other streams may join: uses so far get their events before it begins. The caller is not
    /// inside the gate. *Blocks* for a second at most, plus the time of pauses.
    pub fn capture_begins(&self) {
        let below = self.shared.want_ends();
        self.settle(|_| true, below);
    }

    /// Waits until those lists of these streams have ended that have a number below `below`.
    fn settle(&self, is_meant: impl Fn(RawStream) -> bool, below: u64) {
        let shared = &self.shared;
        let mut deadline = Instant::now() + SETTLE_MAX;
        let mut table = shared.table();
        while shared.calls().lists.has(&is_meant, below) && !table.has_ended {
            let now = Instant::now();
            if !shared.pool.gate().is_open() {
                deadline = now + SETTLE_MAX;
            }
            if now >= deadline {
                return;
            }
            shared.changed.notify_all();
            let waited = shared.changed.wait_timeout(table, SETTLE_EVERY);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
