//! Memory given back to the driver: the point of no return of a pause, and the undo of a resume. Before that it is taken out of the
//! driver's page tables, and a resume puts it back there.

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

/// The most bytes given back between two groups of copies, in addition to one allocation more. The driver takes a
/// millisecond and a half for 2 GiB of large allocations, and some 30 us for a small one. Copies take five for a group,
/// of which two are under way.
const BETWEEN_BYTES: u64 = 2 << 30;
/// The same, in allocations: two groups of the smallest.
const BETWEEN_MOST: usize = 256;

/// Memory is given back while other contents of it are still on their way, behind the point of no return.
#[derive(Debug)]
pub(super) struct Meanwhile<'a> {
    rows: &'a Rows,
    /// Has it begun? What was imported has gone then, and what needs no copy is among what is ready.
    has_begun: bool,
    /// The allocations that can go.
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
        let mut arena = self.pool.host_memory().arena();
        let ([in_memory, in_file], kept_bytes) = {
            let ledger = self.pool.ledger();
            let ends = [Store::Host, Store::File].map(|store| ledger.rows.end_in(store));
            (ends, ledger.rows.kept_bytes())
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

/// Is it of another process of the tenant, and leaves in a pause? What is on its way in may always go, as own memory may.
pub(super) fn is_import(row: &Row) -> bool {
    !row.is_own() && (row.can_leave() || row.backing().is_coming())
}

/// May it leave, and are its contents elsewhere, or nobody's? What is on its way in may always go, also if it was pinned while it was
/// away: nobody has seen that memory yet.
fn loses_nothing(row: &Row) -> bool {
    row.backing().is_coming() || row.can_leave() && row.loses_nothing()
}

// Recorded mappings out of the driver's page tables, and back.
impl<D: Driver> Still<'_, D> {
    /// Takes a mapping out of the driver's page tables and keeps its record.
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

    /// Unmaps what `rows` has of imports, as many as can be; their handles are kept.
    pub(super) fn unmap_imports(&self, log: &mut StepLog, rows: &Rows) -> PoolResult<()> {
        let ranges = self.pool.ledger().present_mappings(rows, is_import);
        let mut first_error = Ok(());
        for range in ranges {
            first_error = first_error.and(self.unmap(log, range));
        }
        first_error
    }

    /// Maps a recorded mapping again, with the rights it had. After a failure it goes on where it stopped.
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

    /// Maps an allocation wherever it is recorded and not wholly mapped.
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

    /// As [`Still::map_row_again`], of all that `choose` picks of `rows`.
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

// Views: places made for a copy, of memory that its application has nowhere mapped as the copy needs it. Each is in the ledger from its
// reservation on, until it is gone, so that a failure on the way leaves nothing that the next step does not find.
impl<D: Driver> Still<'_, D> {
    /// A place where `device` may read and write memory that its application has nowhere mapped so.
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

    /// Takes a view down. One that the driver keeps stays in the ledger, for [`Still::drop_views`].
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
        // Addresses are freed only when nothing is mapped there, whatever the call before said.
        self.pool.ledger().views.remove(range);
        Ok(())
    }

    /// Takes down every view that a step which failed has left. All copies are done.
    pub(super) fn drop_views(&self, log: &mut StepLog) {
        let views = self.pool.ledger().views.all();
        for range in views {
            if let Err(error) = self.drop_view(log, range) {
                log.notes.push(format!("stays mapped: {error}"));
            }
        }
    }
}
