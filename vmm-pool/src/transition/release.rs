//! The point of no return of a pause, and the undo of a resume: memory given back to the driver.

use std::collections::VecDeque;

use super::mappings::is_import;
use super::still::Still;
use crate::VirtualHandle;
use crate::deferred::Physical;
use crate::driver::Driver;
use crate::error::{Describe, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Row, Rows};
use crate::store::{Store, Used};

/// What is given back between two groups of copies at most, in addition to one allocation more: the driver takes a millisecond and a half for 2 GiB
/// of large allocations, and some 30 us for a small one. Copies take five for a group, of which two are under way.
const BETWEEN_BYTES: u64 = 2 << 30;
/// The same, in allocations: two groups of the smallest.
const BETWEEN_MOST: usize = 256;

/// Memory is given back while other contents of it are still on their way, behind the point of no return.
#[derive(Debug)]
pub(super) struct Meanwhile<'a> {
    rows: &'a Rows,
    /// Has it begun? What was imported has gone then, and what needs no copy is among what is ready.
    has_begun: bool,
    /// What can go.
    ready: VecDeque<VirtualHandle>,
    /// The driver has refused something: the rest is for the end.
    is_refused: bool,
}

impl<'a> Meanwhile<'a> {
    pub(super) fn new(rows: &'a Rows) -> Self {
        Self { rows, has_begun: false, ready: VecDeque::new(), is_refused: false }
    }

    pub(super) fn rows(&self) -> &'a Rows {
        self.rows
    }

    /// These are saved, and mapped nowhere.
    pub(super) fn are_saved(&mut self, rows: impl Iterator<Item = VirtualHandle>) {
        if self.has_begun {
            self.ready.extend(rows);
        }
    }
}

impl<D: Driver> Still<'_, D> {
    /// Gives some of that back of which nothing is lost: imports, what nobody keeps, and what is saved by now. What the driver refuses
    /// is left to [`Still::release_selected`], which says so.
    pub(super) fn give_back_meanwhile(&self, log: &mut StepLog, meanwhile: &mut Meanwhile<'_>) {
        let rows = meanwhile.rows;
        if !meanwhile.has_begun {
            meanwhile.has_begun = true;
            self.release_unmapped(log, rows, is_import);
            let ledger = self.pool.ledger();
            let goes = |row: &&Row| row.is_own() && row.is_resident() && loses_nothing(row);
            meanwhile.ready = ledger.rows_in(rows).filter(goes).map(Row::handle).collect();
        }
        let mut bytes = 0;
        for _ in 0..BETWEEN_MOST {
            if meanwhile.is_refused || bytes >= BETWEEN_BYTES {
                break;
            }
            let Some(row) = meanwhile.ready.pop_front() else { break };
            let ranges = self.pool.ledger().present_of(row, loses_nothing);
            for range in ranges {
                meanwhile.is_refused |= self.unmap(log, range).is_err();
            }
            let taken = self.pool.ledger().take_one_unmapped(row, loses_nothing);
            if let Some((physical, export)) = taken {
                drop(export);
                bytes += self.release_all(log, vec![physical]);
            }
        }
    }

    /// Unmaps and releases what `rows` has of all that was imported from other processes of the tenant.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] for the first that failed; the others are dropped all the same.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`.
    pub(super) fn drop_imports(&self, rows: &Rows) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        log.timed("drop imports", |log| {
            let unmapped = self.unmap_imports(log, rows);
            self.release_unmapped(log, rows, is_import);
            unmapped
        })?;
        Ok(log)
    }

    /// Releases imports, unmaps what is mapped of own memory and releases it, as far as `rows` has them. A block
    /// that the driver would not let go stays resident, and is named in the notes. One whose contents are nowhere else
    /// stays: who undoes a resume finds such where a pause had to leave it.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] before anything was unmapped, when copies are under way that did not end.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub(super) fn release_selected(&self, rows: &Rows) -> PoolResult<StepLog> {
        let log = self.release_some(rows)?;
        self.note_used();
        Ok(log)
    }

    /// Says how much host memory and disk space a pause has used, at its end.
    pub(super) fn note_used(&self) {
        let mut arena = self.pool.arena();
        let ([in_memory, in_file], kept_bytes) = {
            let ledger = self.pool.ledger();
            let ends = [Store::Host, Store::File].map(|store| ledger.end_in(store));
            (ends, ledger.kept_bytes())
        };
        arena.used(Used { end_bytes: in_memory, kept_bytes }, in_file > 0);
    }

    /// As [`Still::release_selected`], in a pause of which more is to leave.
    ///
    /// # Errors
    /// As [`Still::release_selected`].
    ///
    /// # Driver calls
    /// As [`Still::release_selected`].
    pub(super) fn release_some(&self, rows: &Rows) -> PoolResult<StepLog> {
        let mut log = StepLog::default();
        self.pool.deferred.settle()?;
        log.timed("unmap own", |log| {
            // None, unless a step before this one failed half-way.
            self.drop_views(log);
            let ranges = self.pool.ledger().present_mappings(rows, loses_nothing);
            for range in ranges {
                if let Err(error) = self.unmap(log, range) {
                    log.notes.push(format!("stays mapped: {error}"));
                }
            }
            Ok(())
        })?;
        log.timed("close exports", |_| {
            let exports = self.pool.ledger().call_off_fetching(rows, loses_nothing);
            drop(exports);
            Ok(())
        })?;
        log.timed("release imports", |log| {
            self.release_unmapped(log, rows, is_import);
            Ok(())
        })?;
        log.timed("release own", |log| {
            log.bytes = self.release_unmapped(log, rows, |row| row.is_own() && loses_nothing(row));
            Ok(())
        })?;
        for device in self.pool.devices_with_any() {
            log.call();
            if let Err(error) = self.pool.driver.trim_pools(device) {
                tracing::debug!(%error, "stream-ordered pools were not trimmed");
            }
        }
        Ok(log)
    }

    /// Releases what `choose` picks of `rows` and what is nowhere mapped; returns the bytes released.
    fn release_unmapped(
        &self,
        log: &mut StepLog,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> u64 {
        let handles = self.pool.ledger().take_unmapped(rows, choose);
        self.release_all(log, handles)
    }

    /// Releases all of `handles`, whatever happens; returns the bytes released.
    pub(super) fn release_all(&self, log: &mut StepLog, handles: Vec<Physical>) -> u64 {
        let mut bytes = 0;
        for handle in handles {
            let (size_bytes, device) = handle.extent();
            log.call();
            let released = self.pool.deferred.release(handle);
            match released.about(|| "release".to_owned(), size_bytes, device) {
                Ok(()) => bytes += size_bytes,
                Err(error) => log.notes.push(format!("not given back: {error}")),
            }
        }
        bytes
    }
}

/// May it leave, and are its contents elsewhere, or nobody's? What is on its way in may always go, also if it was pinned while it was
/// away: nobody has seen that memory yet.
fn loses_nothing(row: &Row) -> bool {
    row.backing().is_coming() || row.can_leave() && row.loses_nothing()
}
