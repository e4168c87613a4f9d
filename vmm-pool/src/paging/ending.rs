//! Where the uses of calls end: events behind the lists of streams.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::marks::Mark;
use super::table::{Looks, Wrote};
use super::uses::{In, Touched};
use super::{Pager, Shared};
use crate::driver::{Driver, DriverCode, RawStream};
use crate::error::{Describe, PoolError, PoolResult};
use crate::gate::Passage;

/// How long a capture, and the end of a stream, wait for lists to end that other threads are about to end.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// Between two looks whether they have.
const SETTLE_EVERY: Duration = Duration::from_micros(200);
/// What a call that waits at the gate is named.
const END_OF_USES: &str = "the end of uses of paged memory";

impl<D: Driver> Shared<D> {
    /// Has the pager's thread end the uses of all streams, as far as their calls are launched.
    pub(super) fn want_ends(&self) {
        {
            // The pager looks under this lock whether it may sleep.
            let _table = self.table();
            self.calls().want_ends();
        }
        self.changed.notify_all();
    }

    /// Ends those that are to end. On the pager's thread.
    pub(super) fn end_wanted(&self) {
        self.end_taken(|_| true);
    }

    fn end_taken(&self, chosen: impl Fn(RawStream) -> bool) {
        let taken = self.calls().lists.take(chosen);
        for (number, stream) in taken {
            self.end_list(number, stream);
        }
    }

    /// An event behind all that `stream` was given.
    fn mark_behind(&self, stream: RawStream) -> PoolResult<Arc<Mark>> {
        let mark_behind = || {
            let mark = self.mark()?;
            let recorded = self.pool.driver.event_record(mark.event, stream);
            let about = || "the end of a use of paged memory".to_owned();
            recorded.about(about, 0, Some(self.device))?;
            Ok(Arc::new(mark))
        };
        // Nobody could be told to try again.
        mark_behind().or_else(|_: PoolError| mark_behind())
    }

    fn is_captured(&self, stream: RawStream) -> bool {
        match self.pool.driver.stream_is_capturing(stream) {
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

    /// Ends a list that was taken for that.
    fn end_list(&self, number: u64, stream: RawStream) {
        let _pass = self.pool.gate().pass_for(END_OF_USES, Passage::Use);
        // An event would become a part of the graph, or end the capture.
        if self.is_captured(stream) {
            return self.postpone(number);
        }
        let marked = self.mark_behind(stream);
        // Another thread may have begun a capture, or joined one, meanwhile: the event stands for nothing.
        if marked.is_ok() && self.is_captured(stream) {
            return self.postpone(number);
        }
        let is_told = {
            let mut table = self.table();
            let mut calls = self.calls();
            let Some(gone) = calls.lists.ended(number) else { return };
            if let Ok(mark) = &marked {
                table.used(&gone.chunks, mark, Wrote::Maybe);
                if gone.has_graphs {
                    table.graph_used(mark);
                }
            } else {
                table.lost(&gone.chunks);
                if gone.has_graphs {
                    table.graph_lost(&calls.captured());
                }
            }
            table.looks_again == Looks::WhenTold || table.without_room > 0
        };
        self.tell_end(is_told, marked.as_ref().err());
    }

    /// Ends a use by the default stream of this thread alone.
    fn end_own(&self, stream: RawStream, chunks: &[usize]) {
        let _pass = self.pool.gate().pass_for(END_OF_USES, Passage::Use);
        let marked = self.mark_behind(stream);
        let is_told = {
            let mut table = self.table();
            match &marked {
                Ok(mark) => table.used(chunks, mark, Wrote::Maybe),
                Err(_) => table.lost(chunks),
            }
            table.looks_again == Looks::WhenTold || table.without_room > 0
        };
        self.tell_end(is_told, marked.as_ref().err());
    }

    fn tell_end(&self, is_told: bool, error: Option<&PoolError>) {
        if let Some(error) = error {
            tracing::error!(%error, "paged memory stays on its device");
        }
        // It costs more to wake a thread than to have it look by itself.
        if is_told || error.is_some() {
            self.changed.notify_all();
        }
    }
}

impl<D: Driver> Pager<D> {
    /// The call has given its work to the driver, or will not.
    ///
    /// # Driver calls
    /// `cuStreamIsCapturing`, `cuEventRecord`, seldom.
    pub fn end_call(&self, touched: &Touched) {
        let shared = &self.shared;
        match touched.stream {
            In::Stream(_) => {
                let ended = shared.calls().lists.launched(touched.list);
                if let Some(stream) = ended {
                    shared.end_list(touched.list, stream);
                }
            }
            // No other thread can name it.
            In::OwnStream(raw) => shared.end_own(raw, &touched.chunks),
            In::Graph => {}
        }
    }

    /// `stream` is about to end, or to become another thread's. *Blocks* while another thread puts an event behind its uses, for a
    /// second at most, in addition to the time of pauses.
    ///
    /// # Driver calls
    /// As [`Pager::end_call`].
    pub fn stream_ends(&self, stream: RawStream) {
        let is_meant = |other| other == stream;
        self.shared.calls().lists.want(is_meant);
        self.shared.end_taken(is_meant);
        self.settle(is_meant);
    }

    /// A capture is about to begin, which other streams may join: uses so far get their events before. The caller is not inside the
    /// gate. *Blocks* for a second at most, in addition to the time of pauses.
    pub fn capture_begins(&self) {
        self.shared.want_ends();
        self.settle(|_| true);
    }

    /// Waits until the lists of these streams have ended that there are now.
    fn settle(&self, is_meant: impl Fn(RawStream) -> bool) {
        let shared = &self.shared;
        let below = shared.calls().lists.want(&is_meant);
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
