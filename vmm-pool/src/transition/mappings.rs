//! Recorded mappings, taken out of the driver's page tables and put back; and views: places made for a copy, of memory that its
//! application has nowhere mapped as the copy needs it.
//!
//! Each view is in the ledger from its reservation on, until it is gone, so that a failure on the way leaves
//! nothing that the next step does not find.

#![expect(unsafe_code, reason = "unmaps and frees through the driver")]

use super::still::Still;
use crate::VirtualHandle;
use crate::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, Driver, RawHandle, VaRange};
use crate::error::{Describe, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Presence, Remount, Row, Rows};

impl<D: Driver> Still<'_, D> {
    /// Takes a mapping out of the driver's page tables and keeps its record.
    pub(super) fn unmap(&self, log: &mut StepLog, range: VaRange) -> PoolResult<()> {
        log.call();
        self.pool.ledger().begin_leaving(range.start.0);
        // SAFETY: `self` proves that no work uses the range until it is mapped again.
        let unmapped = unsafe { self.pool.driver.unmap(range) }.about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            None,
        );
        match &unmapped {
            Ok(()) => self.pool.ledger().set_presence(range.start.0, Presence::Absent),
            Err(_) => self.pool.ledger().call_off_leaving(range.start.0),
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
            self.pool.ledger().set_presence(start, Presence::Bare);
        }
        if presence != Presence::Whole && !access.is_empty() {
            log.call();
            self.pool.driver.set_access(range, &access).about(about, range.size_bytes, device)?;
        }
        self.pool.ledger().set_presence(start, Presence::Whole);
        Ok(())
    }

    /// Maps an allocation wherever it is recorded and not wholly mapped.
    pub(super) fn map_row_again(&self, log: &mut StepLog, handle: VirtualHandle) -> PoolResult<()> {
        let starts: Vec<u64> = {
            let ledger = self.pool.ledger();
            let mappings = ledger.row(handle).into_iter().flat_map(|row| ledger.mappings_of(row));
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
            ledger.rows_in(rows).filter(|row| choose(row)).map(Row::handle).collect()
        };
        handles.into_iter().try_for_each(|handle| self.map_row_again(log, handle))
    }
}

// Views.
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
        self.pool.ledger().add_view(range);
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
        self.pool.ledger().remove_view(range);
        Ok(())
    }

    /// Takes down every view that a step which failed has left. All copies are done.
    pub(super) fn drop_views(&self, log: &mut StepLog) {
        let views = self.pool.ledger().views();
        for range in views {
            if let Err(error) = self.drop_view(log, range) {
                log.notes.push(format!("stays mapped: {error}"));
            }
        }
    }
}

/// Is it of another process of the tenant, and leaves in a pause? What is on its way in may always go, as own memory may.
pub(super) fn is_import(row: &Row) -> bool {
    !row.is_own() && (row.can_leave() || row.backing().is_coming())
}
