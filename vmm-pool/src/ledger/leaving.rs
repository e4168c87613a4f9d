//! Allocations that leave one by one, while others are still being saved.

use std::os::fd::OwnedFd;

use super::residency::Change;
use super::{Ledger, Mapping, Row};
use crate::VirtualHandle;
use crate::deferred::Physical;
use crate::driver::VaRange;

impl Ledger {
    /// Where `handle` is mapped now; nowhere, unless `choose` picks it.
    pub(crate) fn present_of(
        &self,
        handle: VirtualHandle,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<VaRange> {
        let Some(row) = self.row(handle).filter(|row| choose(row)) else { return Vec::new() };
        let present = self.mappings_of(row).filter(|mapping| mapping.is_present());
        present.map(Mapping::range).collect()
    }

    /// Gives up the driver's handle of `handle`, where `choose` picks it and it is nowhere mapped. Nobody fetches it any more; a descriptor
    /// that was kept for those who would comes out too.
    pub(crate) fn take_one_unmapped(
        &mut self,
        handle: VirtualHandle,
        choose: impl Fn(&Row) -> bool,
    ) -> Option<(Physical, Option<OwnedFd>)> {
        if !self.present_of(handle, |_| true).is_empty() {
            return None;
        }
        let row = self.row_mut(handle).filter(|row| row.is_resident() && choose(row))?;
        row.call_off_fetching();
        let export = row.take_export();
        row.backing_mut().change(Change::Released).map(|physical| (physical, export))
    }
}
