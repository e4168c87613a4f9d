//! Releases memory to the driver: the point of no return of a pause, and the undo of a resume. Before that, memory is
//! removed from the driver's page tables. A resume maps it there again.

#![expect(unsafe_code, reason = "unmaps and frees through the driver")]

use std::collections::VecDeque;

use super::still::Still;
use crate::deferred::Physical;
use crate::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, Driver, RawHandle, VaRange};
use crate::error::{Describe, PoolResult};
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::{Presence, Remount, Row, Rows};
use crate::store::{Store, Used};

/// The most bytes that are released between two groups of copies, plus one allocation. The driver needs a millisecond
/// and a half for 2 GiB of large allocations, and some 30 us for a small one. The copies of a group need five
/// milliseconds, and two groups are under way.
const BETWEEN_BYTES: u64 = 2 << 30;
/// The most allocations that are released there: two groups of the smallest.
const BETWEEN_MOST: usize = 256;

/// Releases memory after the point of no return, while other contents are still being copied.
#[derive(Debug)]
pub(super) struct Meanwhile<'a> {
    rows: &'a Rows,
    /// True once the release has begun. Then imports are released, and memory that needs no copy is in `ready`.
    has_begun: bool,
    /// The allocations that can be released.
    ready: VecDeque<VirtualHandle>,
    /// True once the driver has refused a release: the rest is released at the end.
    is_refused: bool,
}

impl<'a> Meanwhile<'a> {
    pub(super) fn new(rows: &'a Rows) -> Self {
        Self { rows, has_begun: false, ready: VecDeque::new(), is_refused: false }
    }

    pub(super) fn rows(&self) -> &'a Rows {
        self.rows
    }

    /// Records that these rows are saved, and mapped nowhere.
    pub(super) fn are_saved(&mut self, rows: impl Iterator<Item = VirtualHandle>) {
        if self.has_begun {
            self.ready.extend(rows);
        }
    }
}

impl<D: Driver> Still<'_, D> {
    /// Releases some memory without losing contents: imports, memory that nobody keeps, and memory that is saved by
    /// now. If the driver refuses, [`Still::release_selected`] tries again, and reports a failure.
    pub(super) fn give_back_meanwhile(&self, log: &mut StepLog, meanwhile: &mut Meanwhile<'_>) {
        let rows = meanwhile.rows;
        if !meanwhile.has_begun {
            meanwhile.has_begun = true;
            self.release_unmapped(log, rows, is_import);
            let ledger = self.pool.ledger();
            let goes = |row: &&Row| row.is_own() && row.is_resident() && loses_nothing(row);
            meanwhile.ready = ledger.rows.among(rows).filter(goes).map(Row::handle).collect();
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

    /// Unmaps and releases those of `rows` that were imported from other processes of the tenant.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] for the first that failed. The others are released all the same.
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

    /// Releases the imports of `rows`, and unmaps and releases their own memory. A block that the driver refuses to
    /// release stays resident, and the notes name it. A block stays too if its contents are nowhere else. The undo of a
    /// resume finds such blocks if a pause had to leave them in place.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] before anything was unmapped, if copies are under way that did not end.
    ///
    /// # Driver calls
    /// `cuMemUnmap`, `cuMemRelease`, `cuMemPoolTrimTo`.
    pub(super) fn release_selected(&self, rows: &Rows) -> PoolResult<StepLog> {
        let log = self.release_some(rows)?;
        self.note_used();
        Ok(log)
    }

    /// Records how much host memory and disk space a pause has used, at its end.
    pub(super) fn note_used(&self) {
        let mut arena = self.pool.host_memory().arena();
        let ([in_memory, in_file], kept_bytes) = {
            let ledger = self.pool.ledger();
            let ends = [Store::Host, Store::File].map(|store| ledger.rows.end_in(store));
            (ends, ledger.rows.kept_bytes())
        };
        arena.used(Used { end_bytes: in_memory, kept_bytes }, in_file > 0);
    }

    /// As [`Still::release_selected`], in a pause from which more memory must leave.
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
            // There are none, unless an earlier step failed half-way.
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
            let exports = self.pool.ledger().rows.call_off_fetching(rows, loses_nothing);
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

    /// Releases those of `rows` that `choose` picks and that are mapped nowhere. Returns the bytes released.
    fn release_unmapped(
        &self,
        log: &mut StepLog,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> u64 {
        let handles = self.pool.ledger().take_unmapped(rows, choose);
        self.release_all(log, handles)
    }

    /// Releases all of `handles`, even if some fail. Returns the bytes released.
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

/// Was it imported from another process of the tenant, and may it leave? Memory that moves in may always leave, as own
/// memory may.
pub(super) fn is_import(row: &Row) -> bool {
    !row.is_own() && (row.can_leave() || row.backing().is_coming())
}

/// May it leave, and are its contents saved, or kept by nobody? Memory that moves in may always leave, also if it was
/// pinned while it was off its device: nobody has seen that memory yet.
fn loses_nothing(row: &Row) -> bool {
    row.backing().is_coming() || row.can_leave() && row.loses_nothing()
}

// Moves recorded mappings out of the driver's page tables, and back.
impl<D: Driver> Still<'_, D> {
    /// Removes a mapping from the driver's page tables and keeps its record.
    pub(super) fn unmap(&self, log: &mut StepLog, range: VaRange) -> PoolResult<()> {
        log.call();
        self.pool.ledger().mappings.begin_leaving(range.start.0);
        // SAFETY: `self` proves that no work uses the range until it is mapped again.
        let unmapped = unsafe { self.pool.driver.unmap(range) }.about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            None,
        );
        match &unmapped {
            Ok(()) => self.pool.ledger().mappings.set_presence(range.start.0, Presence::Absent),
            Err(_) => self.pool.ledger().mappings.call_off_leaving(range.start.0),
        }
        unmapped
    }

    /// Unmaps the imports among `rows`, as many as possible. Their handles are kept.
    pub(super) fn unmap_imports(&self, log: &mut StepLog, rows: &Rows) -> PoolResult<()> {
        let ranges = self.pool.ledger().present_mappings(rows, is_import);
        let mut first_error = Ok(());
        for range in ranges {
            first_error = first_error.and(self.unmap(log, range));
        }
        first_error
    }

    /// Maps a recorded mapping again, with its old rights. After a failure it goes on with the step that failed.
    fn map_again(&self, log: &mut StepLog, start: u64) -> PoolResult<()> {
        let wanted = self.pool.ledger().to_remount(start)?;
        let Some(Remount { range, raw, access, device, presence }) = wanted else {
            return Ok(());
        };
        let about = || format!("mapping at {} again", range.start);
        if presence == Presence::Absent {
            log.call();
            self.pool.driver.map(range, raw).about(about, range.size_bytes, device)?;
            self.pool.ledger().mappings.set_presence(start, Presence::Bare);
        }
        if presence != Presence::Whole && !access.is_empty() {
            log.call();
            self.pool.driver.set_access(range, &access).about(about, range.size_bytes, device)?;
        }
        self.pool.ledger().mappings.set_presence(start, Presence::Whole);
        Ok(())
    }

    /// Maps an allocation again at each recorded place where it is not wholly mapped.
    pub(super) fn map_row_again(&self, log: &mut StepLog, handle: VirtualHandle) -> PoolResult<()> {
        let starts: Vec<u64> = {
            let ledger = self.pool.ledger();
            let mappings =
                ledger.rows.get(handle).into_iter().flat_map(|row| ledger.mappings.of(row));
            let incomplete = mappings.filter(|mapping| mapping.presence() != Presence::Whole);
            incomplete.map(|mapping| mapping.range().start.0).collect()
        };
        starts.into_iter().try_for_each(|start| self.map_again(log, start))
    }

    /// As [`Still::map_row_again`], for those of `rows` that `choose` picks.
    pub(super) fn map_rows_again(
        &self,
        log: &mut StepLog,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> PoolResult<()> {
        let handles: Vec<VirtualHandle> = {
            let ledger = self.pool.ledger();
            ledger.rows.among(rows).filter(|row| choose(row)).map(Row::handle).collect()
        };
        handles.into_iter().try_for_each(|handle| self.map_row_again(log, handle))
    }
}

// Views are mappings made for a copy, of memory that the application has not mapped in the way that the copy needs. The
// ledger has each view from its reservation until it is freed. So the next step finds all views that a failure has
// left.
impl<D: Driver> Still<'_, D> {
    /// Makes a range where `device` may read and write memory that the application has not mapped so.
    pub(super) fn make_view(
        &self,
        log: &mut StepLog,
        raw: RawHandle,
        size_bytes: u64,
        device: DeviceOrdinal,
    ) -> PoolResult<VaRange> {
        let about = || "view for a copy".to_owned();
        log.driver_calls += 3;
        let start = self.pool.driver.address_reserve(size_bytes, 0, DeviceAddress(0)).about(
            about,
            size_bytes,
            Some(device),
        )?;
        let range = VaRange::new(start, size_bytes);
        self.pool.ledger().views.add(range);
        self.pool
            .driver
            .map(range, raw)
            .and_then(|()| self.pool.driver.set_access(range, &[AccessDesc::read_write(device)]))
            .about(about, size_bytes, Some(device))?;
        Ok(range)
    }

    /// Unmaps and frees a view. If the driver refuses, the view stays in the ledger, for [`Still::drop_views`].
    pub(super) fn drop_view(&self, log: &mut StepLog, range: VaRange) -> PoolResult<()> {
        log.driver_calls += 2;
        // SAFETY: only our own copy used the view, and it is done.
        let unmapped = unsafe { self.pool.driver.unmap(range) };
        // SAFETY: as above.
        let freed = unsafe { self.pool.driver.address_free(range) };
        if let Err(error) = freed {
            let first = unmapped.err().unwrap_or(error);
            return Err(first).about(|| "view for a copy".to_owned(), range.size_bytes, None);
        }
        // Addresses are freed only if nothing is mapped there, whatever the call before returned.
        self.pool.ledger().views.remove(range);
        Ok(())
    }

    /// Unmaps and frees all views that failed steps have left. No copy may be under way.
    pub(super) fn drop_views(&self, log: &mut StepLog) {
        let views = self.pool.ledger().views.all();
        for range in views {
            if let Err(error) = self.drop_view(log, range) {
                log.notes.push(format!("stays mapped: {error}"));
            }
        }
    }
}
