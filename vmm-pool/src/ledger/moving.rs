//! The changes that a pause and a resume make: to many rows, to one row at a time, and to memory that importers fetch
//! again.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use super::residency::Change;
use super::sharing::Sharing;
use super::{Ledger, Mapping, Remount, Row, RowTable, Rows, Selection, merged};
use crate::deferred::Physical;
use crate::driver::VaRange;
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, VirtualHandle};
use crate::report::Contents;
use crate::store::Saved;

impl Ledger {
    /// Returns the data to map the recorded mapping at `start` again. `None` if there is no such record.
    ///
    /// # Errors
    /// [`PoolError::MissingImport`] if its memory is not on its device.
    pub(crate) fn to_remount(&self, start: u64) -> PoolResult<Option<Remount>> {
        let Some(mapping) = self.mappings.get(start) else {
            return Ok(None);
        };
        let range = mapping.range();
        let row = self.rows.get(mapping.allocation());
        let Some((row, raw)) = row.and_then(|row| Some((row, row.raw()?))) else {
            let (address, size_bytes) = (range.start, range.size_bytes);
            return Err(PoolError::MissingImport { address, size_bytes });
        };
        let (access, presence) = (mapping.access_list(), mapping.presence());
        Ok(Some(Remount { range, raw, access, device: row.device(), presence }))
    }

    /// Returns the ranges that are mapped now, in order, of the rows among `rows` that `choose` picks.
    pub(crate) fn present_mappings(
        &self,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<VaRange> {
        let chosen = self.rows.among(rows).filter(|row| choose(row));
        let mut ranges: Vec<_> = chosen.flat_map(|row| self.mappings.present(row)).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges
    }

    /// Records that the contents are saved: the copy is valid from now on too. Returns the ranges where the memory is
    /// still mapped.
    pub(crate) fn saved(&mut self, handle: VirtualHandle, saved: Saved) -> Vec<VaRange> {
        let Some(row) = self.rows.get_mut(handle) else { return Vec::new() };
        let _none = row.backing_mut().change(Change::Saved(saved));
        self.mappings.present(row).collect()
    }

    /// Removes and returns the driver's handles of the rows among `rows` that `choose` picks and that are mapped
    /// nowhere.
    pub(crate) fn take_unmapped(
        &mut self,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<Physical> {
        let mut taken = Vec::new();
        self.rows.change(rows.handles(), |row| {
            let is_unmapped = self.mappings.present(row).next().is_none();
            if is_unmapped && row.is_resident() && choose(row) {
                taken.extend(row.backing_mut().change(Change::Released));
            }
        });
        taken
    }

    /// Records that the process runs on. It runs without memory that is not wholly mapped, until a resume by tag
    /// restores that. Importers can fetch memory again.
    pub(crate) fn run_on(&mut self) {
        self.is_frozen = false;
        for row in self.rows.iter_mut() {
            let is_mapped = self.mappings.of(row).all(Mapping::is_present);
            if !row.is_lost() {
                let _none = row.backing_mut().change(Change::Runs { is_mapped });
            }
        }
    }

    /// Ends a resume of `rows`. No memory stays in place for the sake of others any more. A process that has fetched
    /// memory again is its importer. From now on it keeps memory alive that the owner's application freed meanwhile.
    /// Returns the rows of such memory.
    pub(crate) fn end_fetching(&mut self, rows: &Rows) -> Vec<Row> {
        let handles: Vec<_> = self.rows.iter().map(Row::handle).collect();
        for row in self.rows.iter_mut() {
            row.set_stays(None);
            let is_tag_back = rows.owes(row);
            row.sharing_mut().end_fetching(is_tag_back);
        }
        handles.into_iter().filter_map(|handle| self.take_garbage(handle)).collect()
    }

    /// Marks parts of own memory whose contents nobody needs. The next pause gives them up without saving, unless the
    /// process touches them first. Earlier marks are void. Ranges of other memory are skipped.
    pub(crate) fn mark_unused(&mut self, ranges: &[VaRange]) {
        let mut parts: HashMap<VirtualHandle, Vec<Range<u64>>> = HashMap::new();
        for range in ranges {
            for mapping in self.mappings.overlapping(*range) {
                let start = mapping.range().start.0;
                let begin = range.start.0.max(start) - start;
                let end = range.end().0.min(mapping.range().end().0) - start;
                parts.entry(mapping.allocation()).or_default().push(begin..end);
            }
        }
        for row in self.rows.iter_mut() {
            // Memory that is mapped twice may be in use under its other address.
            let counts = row.is_own() && row.mapped_at().len() == 1;
            let unused = parts.remove(&row.handle()).filter(|_| counts).unwrap_or_default();
            if row.backing().is_at_rest() {
                let _none = row.backing_mut().change(Change::Unused(merged(unused)));
            }
        }
    }

    /// Returns the ranges where `handle` is mapped now. Empty unless `choose` picks it.
    pub(crate) fn present_of(
        &self,
        handle: VirtualHandle,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<VaRange> {
        let Some(row) = self.rows.get(handle).filter(|row| choose(row)) else { return Vec::new() };
        self.mappings.present(row).collect()
    }

    /// Removes and returns the driver's handle of `handle`, if `choose` picks it and it is mapped nowhere. Nobody can
    /// fetch it any more. Returns the descriptor that was kept for importers too.
    pub(crate) fn take_one_unmapped(
        &mut self,
        handle: VirtualHandle,
        choose: impl Fn(&Row) -> bool,
    ) -> Option<(Physical, Option<OwnedFd>)> {
        if !self.present_of(handle, |_| true).is_empty() {
            return None;
        }
        let row = self.rows.get_mut(handle).filter(|row| row.is_resident() && choose(row))?;
        let export = row.sharing_mut().call_off_fetching();
        row.backing_mut().change(Change::Released).map(|physical| (physical, export))
    }
}

impl RowTable {
    /// Records that the memory is created or imported again. Returns `physical` if no row needs it.
    pub(crate) fn returned(
        &mut self,
        handle: VirtualHandle,
        physical: Physical,
    ) -> Option<Physical> {
        match self.get_mut(handle) {
            Some(row) => row.backing_mut().change(Change::Returned(physical)),
            None => Some(physical),
        }
    }

    /// Records that the saved contents of `handle` are about to be written to its memory.
    pub(crate) fn begin_refill(&mut self, handle: VirtualHandle) {
        self.change([handle], |row| row.backing_mut().begin_refill());
    }

    /// Records that the contents of `rows` are on their devices again, for rows that are being restored.
    pub(crate) fn arrived(&mut self, rows: &Rows) {
        self.change(rows.handles(), |row| {
            if row.backing().is_coming() {
                let _none = row.backing_mut().change(Change::Arrived);
            }
        });
    }

    /// Voids the copies of all memory whose current contents are on a device.
    pub(crate) fn void_copies(&mut self) {
        for row in self.iter_mut() {
            if row.backing().has_contents() {
                let _none = row.backing_mut().change(Change::ContentsVoid);
            }
        }
    }

    /// Undoes a pause of `rows`, the rest of a process that stands still: they are mapped again, and all else stays as
    /// it was.
    pub(crate) fn stand_on(&mut self, rows: &Rows) {
        self.change(rows.handles(), |row| {
            row.set_stays(None);
            let _none = row.backing_mut().change(Change::Runs { is_mapped: true });
        });
    }

    /// Ends the validity of imports among `rows` that the driver refused to unmap in a pause. Their memory belongs to
    /// nobody any more: its owner creates new memory.
    pub(crate) fn disown_imports(&mut self, rows: &Rows) {
        self.change(rows.handles(), |row| {
            if row.is_own() || !row.can_leave() || !row.is_resident() {
                return;
            }
            if let Some(handle) = row.backing_mut().change(Change::Released) {
                let _none = row.backing_mut().change(Change::Returned(handle));
            }
        });
    }

    /// Records that the process is about to run on without `rows`, and that their importers have none of them either.
    pub(crate) fn owe_by_tag(&mut self, rows: &Rows) {
        self.change(rows.handles(), Row::owe_by_tag);
    }

    /// As [`RowTable::owe_by_tag`], for all rows except `rows`.
    pub(crate) fn owe_all_but(&mut self, rows: &Rows) {
        let others = self.iter_mut().filter(|row| !rows.has(row));
        others.for_each(Row::owe_by_tag);
    }

    /// Records that importers are about to fetch their part of `rows`. Returns the allocations that must be exported
    /// for that.
    pub(crate) fn begin_fetching(&mut self, rows: &Rows) -> Vec<(AllocationId, u64)> {
        let mut wanted = Vec::new();
        self.change(rows.fetched(), |row| {
            if !row.is_shared() {
                return;
            }
            // A process that still needs the memory fetches it again. It is an importer when the resume is committed.
            if row.can_leave() || row.sharing().is_owed_by_tag() {
                row.sharing_mut().begin_fetching();
            }
            if row.is_resident() && !row.sharing().is_exported() {
                wanted.push((row.id(), row.size_bytes()));
            }
        });
        wanted
    }

    /// Ends the fetching of the rows among `rows` that `choose` picks, because they leave their device. Returns the
    /// descriptors that were kept for importers.
    pub(crate) fn call_off_fetching(
        &mut self,
        rows: &Rows,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<OwnedFd> {
        let mut exports = Vec::new();
        self.change(rows.fetched(), |row| {
            if choose(row) {
                exports.extend(row.sharing_mut().call_off_fetching());
            }
        });
        exports
    }

    /// Removes and returns the descriptors that no ticket needs.
    pub(crate) fn take_spare_exports(&mut self) -> Vec<OwnedFd> {
        let all = self.iter_mut().map(Row::sharing_mut);
        let spare = all.filter(|sharing| !sharing.tickets.await_somebody());
        spare.filter_map(Sharing::take_export).collect()
    }

    /// Marks memory as unused whose contents a pause of `selection` by tag does not save.
    pub(crate) fn give_up_by_tag(&mut self, selection: &Selection) {
        if !matches!(selection, Selection::Tagged(..) | Selection::Standing(..)) {
            return;
        }
        for row in self.iter_mut() {
            let is_given_up = row.class().contents == Contents::DiscardByTag && selection.has(row);
            if is_given_up && row.is_own() && row.backing().is_at_rest() {
                let all = std::iter::once(0..row.size_bytes()).collect();
                let _none = row.backing_mut().change(Change::Unused(all));
            }
        }
    }
}
