//! Recorded mappings, taken out of the driver's page tables and put back.

#![expect(unsafe_code, reason = "unmaps through the driver")]

use super::still::Still;
use crate::VirtualHandle;
use crate::driver::{Driver, VaRange};
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

/// Is it of another process of the tenant, and leaves in a pause? What is on its way in may always go, as own memory may.
pub(super) fn is_import(row: &Row) -> bool {
    !row.is_own() && (row.can_leave() || row.backing().is_coming())
}
