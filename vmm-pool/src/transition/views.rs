//! Views: places made for a copy, of memory that its application has nowhere mapped as the copy needs it.
//!
//! Each is in the ledger from its reservation on, until it is gone, so that a failure on the way leaves
//! nothing that the next step does not find.

#![expect(unsafe_code, reason = "unmaps and frees views through the driver")]

use super::still::Still;
use crate::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, Driver, RawHandle, VaRange};
use crate::error::{Describe, PoolResult};
use crate::journal::StepLog;

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
