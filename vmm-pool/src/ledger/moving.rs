//! The changes that a pause and a resume make: to many rows, to one after the other, and to what importers fetch again.

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
    /// Collects all that the recorded mapping at `start` needs to be mapped again; `None` when there is no such record.
    ///
    /// # Errors
    /// [`PoolError::MissingImport`] when its memory is not there.
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

    /// Ranges that are mapped now, in order, of those of `rows` that `choose` picks.
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

    /// Contents are saved: the copy counts from now on too. Returns where they are still mapped.
    pub(crate) fn saved(&mut self, handle: VirtualHandle, saved: Saved) -> Vec<VaRange> {
        let Some(row) = self.rows.get_mut(handle) else { return Vec::new() };
        let _none = row.backing_mut().change(Change::Saved(saved));
        self.mappings.present(row).collect()
    }

    /// Gives up the handles of those of `rows` that `choose` picks and that are nowhere mapped.
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

    /// The process runs, and what is not wholly there it goes on without, until that is brought back by tag.
    /// Importers are given what they ask for again.
    pub(crate) fn run_on(&mut self) {
        self.is_frozen = false;
        for row in self.rows.iter_mut() {
            let is_mapped = self.mappings.of(row).all(Mapping::is_present);
            if !row.is_lost() {
                let _none = row.backing_mut().change(Change::Runs { is_mapped });
            }
        }
    }

    /// The end of a resume of `rows`: nothing stays for the others' sake any more, and a process that has fetched memory
    /// again is its importer, and keeps alive from now on what its owner's application freed while it was away. That comes out.
    pub(crate) fn end_fetching(&mut self, rows: &Rows) -> Vec<Row> {
        let handles: Vec<_> = self.rows.iter().map(Row::handle).collect();
        for row in self.rows.iter_mut() {
            row.set_stays(None);
            let is_tag_back = rows.owes(row);
            row.sharing_mut().end_fetching(is_tag_back);
        }
        handles.into_iter().filter_map(|handle| self.take_garbage(handle)).collect()
    }

    /// Parts of own memory whose contents nobody needs: unless the process touches them first, the next pause
    /// gives them up without saving. Marks of before are void. Ranges of other memory are passed over.
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

    /// Returns the ranges where `handle` is mapped now; none, unless `choose` picks it.
    pub(crate) fn present_of(
        &self,
        handle: VirtualHandle,
        choose: impl Fn(&Row) -> bool,
    ) -> Vec<VaRange> {
        let Some(row) = self.rows.get(handle).filter(|row| choose(row)) else { return Vec::new() };
        self.mappings.present(row).collect()
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
        let row = self.rows.get_mut(handle).filter(|row| row.is_resident() && choose(row))?;
        let export = row.sharing_mut().call_off_fetching();
        row.backing_mut().change(Change::Released).map(|physical| (physical, export))
    }
}

impl RowTable {
    /// It is created or imported again. A handle that is not wanted comes back.
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

    /// Saved contents of `handle` are about to be written to its memory.
    pub(crate) fn begin_refill(&mut self, handle: VirtualHandle) {
        self.change([handle], |row| row.backing_mut().begin_refill());
    }

    /// The contents of `rows` are on their devices again, as far as they came back.
    pub(crate) fn arrived(&mut self, rows: &Rows) {
        self.change(rows.handles(), |row| {
            if row.backing().is_coming() {
                let _none = row.backing_mut().change(Change::Arrived);
            }
        });
    }

    /// Voids copies where a device has the contents.
    pub(crate) fn void_copies(&mut self) {
        for row in self.iter_mut() {
            if row.backing().has_contents() {
                let _none = row.backing_mut().change(Change::ContentsVoid);
            }
        }
    }

    /// A pause of `rows`, the rest of a process that stands still, is undone: they are mapped again, and all else is as it was.
    pub(crate) fn stand_on(&mut self, rows: &Rows) {
        self.change(rows.handles(), |row| {
            row.set_stays(None);
            let _none = row.backing_mut().change(Change::Runs { is_mapped: true });
        });
    }

    /// A pause of `rows` is over, and the driver would not unmap some of their imports. What these show is nobody's memory any
    /// more: their owner makes other.
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

    /// The process is about to run on without `rows`, and so are their importers, wherever they are.
    pub(crate) fn owe_by_tag(&mut self, rows: &Rows) {
        self.change(rows.handles(), Row::owe_by_tag);
    }

    /// The same, without all but `rows`.
    pub(crate) fn owe_all_but(&mut self, rows: &Rows) {
        let others = self.iter_mut().filter(|row| !rows.has(row));
        others.for_each(Row::owe_by_tag);
    }

    /// Importers are about to fetch what they hold of `rows`. Returns what has to be exported for that.
    pub(crate) fn begin_fetching(&mut self, rows: &Rows) -> Vec<(AllocationId, u64)> {
        let mut wanted = Vec::new();
        self.change(rows.fetched(), |row| {
            if !row.is_shared() {
                return;
            }
            // A process that still wants it asks again, and is an importer when the resume is committed.
            if row.can_leave() || row.sharing().is_owed_by_tag() {
                row.sharing_mut().begin_fetching();
            }
            if row.is_resident() && !row.sharing().is_exported() {
                wanted.push((row.id(), row.size_bytes()));
            }
        });
        wanted
    }

    /// Ends the fetching of those of `rows` that `choose` picks, for they are leaving. Returns the descriptors that
    /// were kept for those who would fetch them.
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

    /// Descriptors that no ticket needs.
    pub(crate) fn take_spare_exports(&mut self) -> Vec<OwnedFd> {
        let all = self.iter_mut().map(Row::sharing_mut);
        let spare = all.filter(|sharing| !sharing.tickets.await_somebody());
        spare.filter_map(Sharing::take_export).collect()
    }

    /// Marks what a pause of `selection` by tag does not save as unused.
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
