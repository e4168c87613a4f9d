//! The events behind copies between a chunk and its place in host memory.

use std::sync::Arc;

use vmm_pool::driver::Driver;
use vmm_pool::{CopyStreams, PoolResult};

use super::super::marks::Mark;
use super::Worker;

impl<D: Driver> Worker<'_, D> {
    /// See [`super::PagedWindow::mark_or_wait`].
    pub(super) fn mark_behind(&mut self) -> PoolResult<Option<Arc<Mark>>> {
        let shared = self.shared;
        shared.mark_or_wait(self.copies.streams()?)
    }
}

impl<D: Driver> super::PagedWindow<D> {
    /// Returns the mark behind the last work of `streams` in this direction. `None` when that work has been waited for, because
    /// there was no event.
    ///
    /// # Errors
    /// The copy may be under way: nothing is unmapped before it has been waited for.
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
