//! Beginning copies between a chunk and its place in host memory, and the events behind them.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::super::marks::Mark;
use super::Worker;
use crate::VirtualHandle;
use crate::deferred::InUse;
use crate::driver::{Driver, DriverResult, RawStream, VaRange};
use crate::error::{Describe, PoolError, PoolResult};
use crate::journal::StepLog;
use crate::store::{Extent, Part, Pins};

impl<D: Driver> Worker<'_, D> {
    /// Begins the copy of the contents of `row`, which is mapped where it belongs, or `aside`, and adds what it uses. Was anything copied?
    pub(super) fn start_in(
        &self,
        row: VirtualHandle,
        aside: Option<VaRange>,
        in_use: &mut Vec<InUse>,
    ) -> PoolResult<bool> {
        let (range, saved) = {
            let ledger = self.shared.pool.ledger();
            let saved = ledger.row(row).and_then(|row| row.saved()).cloned();
            (aside.or_else(|| ledger.chunk_range(row)).ok_or(PoolError::NotOurs)?, saved)
        };
        let all = 0..range.size_bytes;
        let parts: Vec<Part> = match &saved {
            Some(saved) => saved.parts_of(all).collect(),
            None => vec![Part::Zeros(all)],
        };
        for part in parts {
            match part {
                Part::Zeros(zeros) => {
                    // SAFETY: the chunk is mapped, and nobody has it before this is over.
                    let begun = unsafe {
                        self.driver().fill_with_zeros(range.part(&zeros), self.streams.coming)
                    };
                    self.said(begun, range)?;
                }
                Part::Stored(extent) => self.copy(range, extent, in_use, |host, part| {
                    // SAFETY: as above; its place stays its own.
                    unsafe { self.driver().copy_to_device(part, host, self.streams.coming) }
                })?,
            }
        }
        Ok(saved.is_some_and(|saved| !saved.extents.is_empty()))
    }

    pub(super) fn start_out(&self, row: VirtualHandle, in_use: &mut Vec<InUse>) -> PoolResult<()> {
        let pool = &self.shared.pool;
        let (range, extent) = {
            let mut ledger = pool.ledger();
            let range = ledger.chunk_range(row).ok_or(PoolError::NotOurs)?;
            (range, ledger.take_chunk_place(row).ok_or(PoolError::NotOurs)?)
        };
        let end_bytes = extent.place().end;
        let held = self.shared.check_host(end_bytes).and_then(|()| {
            let devices = pool.devices();
            let nodes = pool.nodes_of(&devices);
            let mut arena = pool.arena();
            arena.set_nodes(nodes);
            arena.grow_to(&mut StepLog::default(), end_bytes, Pins::of(&devices))
        });
        if let Err(error) = held {
            pool.ledger().forget_copy(row);
            return Err(error);
        }
        self.copy(range, extent, in_use, |host, part| {
            // SAFETY: nobody writes the chunk before the copy is over: it is idle until then, and a thread that acquires it waits
            // for the event behind it. Its place is its own.
            unsafe { self.driver().copy_to_host(host, part, self.streams.out) }
        })
    }

    /// Has `each` begin the copy of every piece of `extent`. Adds what the copies use of the host.
    fn copy(
        &self,
        range: VaRange,
        extent: Extent,
        in_use: &mut Vec<InUse>,
        each: impl Fn(NonNull<u8>, VaRange) -> DriverResult<()>,
    ) -> PoolResult<()> {
        let pieces = self.shared.pool.arena().pieces_of(&extent.place());
        let part = range.part(&extent.part());
        for piece in pieces {
            in_use.push(piece.in_use());
            self.said(each(piece.start(), part.part(&piece.part)), range)?;
        }
        Ok(())
    }

    pub(super) fn said(&self, result: DriverResult<()>, range: VaRange) -> PoolResult<()> {
        let about = || format!("paging of {}", range.start);
        result.about(about, range.size_bytes, Some(self.shared.device))
    }

    /// What is over when all is that `stream` was given. `None` when it has been waited for, for want of an event.
    pub(super) fn mark_behind(
        &self,
        stream: RawStream,
        in_use: &mut Vec<InUse>,
    ) -> PoolResult<Option<Arc<Mark>>> {
        let mark = self.shared.mark().and_then(|mut mark| {
            let recorded = self.driver().event_record(mark.event, stream);
            recorded.about(|| "copy for paging".to_owned(), 0, Some(self.shared.device))?;
            mark.in_use = std::mem::take(in_use);
            Ok(Arc::new(mark))
        });
        let Err(error) = &mark else { return mark.map(Some) };
        tracing::debug!(%error, "a copy for paging is waited for");
        let waited = self.driver().stream_synchronize(stream);
        waited.about(|| "copy for paging".to_owned(), 0, Some(self.shared.device))?;
        Ok(None)
    }
}
