//! Beginning copies between a chunk and its place in host memory, and the events behind them.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::ops::Range;
use std::sync::Arc;

use super::super::marks::Mark;
use super::Worker;
use crate::VirtualHandle;
use crate::copies::{CopyStreams, Way};
use crate::driver::{Driver, VaRange};
use crate::error::{PoolError, PoolResult};
use crate::journal::StepLog;
use crate::store::Pins;
use crate::transition::Transfer;

impl<'a, D: Driver> Worker<'a, D> {
    /// One for each way.
    pub(super) fn streams(&mut self) -> PoolResult<&mut CopyStreams<'a, D>> {
        self.copier.streams.of(self.shared.device)
    }

    /// Begins the copy of the contents of `row`, which is mapped where it belongs, or `aside`. Was anything copied?
    pub(super) fn start_in(
        &mut self,
        row: VirtualHandle,
        aside: Option<VaRange>,
    ) -> PoolResult<bool> {
        let (range, saved) = {
            let ledger = self.shared.pool.ledger();
            let saved = ledger.rows.get(row).and_then(|row| row.saved()).cloned();
            (aside.or_else(|| ledger.home_of(row, |_| true)).ok_or(PoolError::NotOurs)?, saved)
        };
        let all = vec![Range { start: 0, end: range.size_bytes }];
        let (extents, zeros) = match saved {
            Some(saved) => saved.split(&all),
            None => (Vec::new(), all),
        };
        let transfer = Transfer { device: self.shared.device, range, extents };
        self.streams()?.take_for(Way::In)?;
        let log = &mut StepLog::default();
        // SAFETY: the chunk is mapped, and nobody has it before this is over.
        unsafe { self.copier.start_zeros(log, &transfer, &zeros) }?;
        // SAFETY: as above; its place stays its own.
        unsafe { self.copier.start(log, Way::In, &transfer) }?;
        Ok(!transfer.extents.is_empty())
    }

    /// Begins the copy of the contents of `row` to its place, which it gets if it has none.
    pub(super) fn start_out(&mut self, row: VirtualHandle) -> PoolResult<()> {
        let pool = &self.shared.pool;
        let home = pool.ledger().take_home_place(row);
        let (range, extent) = home.ok_or(PoolError::NotOurs)?;
        let (log, end_bytes) = (&mut StepLog::default(), extent.place().end);
        let held = self.shared.check_host(end_bytes).and_then(|()| {
            let devices = pool.holdings().devices();
            let nodes = pool.devices().nodes_of(&devices);
            let mut arena = pool.host_memory().arena();
            arena.set_nodes(nodes);
            arena.grow_to(log, end_bytes, Pins::of(&devices))
        });
        if let Err(error) = held {
            pool.ledger().rows.forget_copy(row);
            return Err(error);
        }
        let transfer = Transfer { device: self.shared.device, range, extents: vec![extent] };
        self.streams()?.take_for(Way::Out)?;
        // SAFETY: nobody writes the chunk before the copy is over: it is idle until then, and a thread that acquires it waits
        // for the event behind it. Its place is its own.
        unsafe { self.copier.start(log, Way::Out, &transfer) }
    }

    /// See [`super::PagedWindow::mark_or_wait`].
    pub(super) fn mark_behind(&mut self) -> PoolResult<Option<Arc<Mark>>> {
        let shared = self.shared;
        shared.mark_or_wait(self.streams()?)
    }
}

impl<D: Driver> super::PagedWindow<D> {
    /// Returns the mark that is over when all is that `streams` were given last, this way. `None` when that has been
    /// waited for, for want of an event.
    ///
    /// # Errors
    /// It may be under way: nothing is unmapped before it has been waited for.
    pub(super) fn mark_or_wait(
        &self,
        streams: &mut CopyStreams<'_, D>,
    ) -> PoolResult<Option<Arc<Mark>>> {
        let mark = self.mark().and_then(|mut mark| {
            mark.in_use = streams.record(mark.event)?;
            Ok(Arc::new(mark))
        });
        let Err(error) = &mark else { return mark.map(Some) };
        tracing::debug!(%error, "a copy for paging is waited for");
        streams.finish_or_leave().map(|()| None)
    }
}
