//! Paged memory: own memory that leaves its device and comes back while its process runs. For that it has a *home*:
//! addresses where it is mapped, and a place for its contents.
//!
//! Paged memory has rows like other memory. While it is off its device it is set aside, and its contents are in host
//! memory. It keeps its place there while it is on its device. The bytes in that place count only if the caller that
//! moves it says so.

use super::backing::Backing;
use super::layout::Places;
use super::residency::Change;
use super::{Ledger, Mapping, NewRow, Row, RowTable};
use crate::deferred::Physical;
use crate::driver::{AccessDesc, VaRange};
use crate::ids::VirtualHandle;
use crate::store::{Extent, Saved, Store};

impl Ledger {
    /// Adds memory whose home is mapped at `range`, with these rights. It is off its device and nothing of it is saved,
    /// so it is zero.
    pub(crate) fn insert_with_home(
        &mut self,
        new: NewRow,
        range: VaRange,
        access: &[AccessDesc],
    ) -> VirtualHandle {
        let handle = self.rows.enter(new, Backing::with_home());
        let mut mapping = Mapping::new(range, handle);
        mapping.add_access(access);
        self.mappings.insert(mapping);
        self.rows.change([handle], |row| row.mapped(range.start.0));
        handle
    }

    /// Returns the addresses of the home of `handle`. None if it has no home, or if it is not memory that `is_meant`.
    pub(crate) fn home_of(
        &self,
        handle: VirtualHandle,
        is_meant: impl Fn(&Row) -> bool,
    ) -> Option<VaRange> {
        let row = self.rows.get(handle).filter(|row| row.backing().has_home() && is_meant(row))?;
        self.mappings.of(row).next().map(Mapping::range)
    }

    /// Returns the addresses of contents that are about to be copied to host memory, and their place there. The place
    /// is their own one, or a new one. The contents there have no fingerprints from now on.
    pub(crate) fn take_home_place(&mut self, handle: VirtualHandle) -> Option<(VaRange, Extent)> {
        let range = self.home_of(handle, Row::is_resident)?;
        let row = self.rows.get(handle)?;
        let size_bytes = row.size_bytes();
        let whole = row.backing().own_place().and_then(|saved| match &*saved.extents {
            [only] if only.size_bytes == size_bytes => Some(*only),
            _ => None,
        });
        let extent = if let Some(whole) = whole {
            whole
        } else {
            // A place in several pieces is given up: the contents move as a whole.
            self.rows.forget_copy(handle);
            let taken = self.places_in(Store::Host);
            let at = Places::find(taken, std::iter::once(((), size_bytes))).places;
            Extent { start: 0, size_bytes, at: at.first()?.1 }
        };
        let saved = Saved { store: Store::Host, extents: [extent].into(), prints: None };
        self.rows.get_mut(handle)?.backing_mut().move_in(saved);
        Some((range, extent))
    }

    /// Returns the end of host memory that holds a place for all memory with a home, and for `more` allocations of
    /// `size_bytes`.
    pub(crate) fn end_with_homes(&self, more: usize, size_bytes: u64) -> u64 {
        let is_without =
            |row: &&Row| row.backing().has_home() && row.backing().held_in(Store::Host).is_none();
        let without = self.rows.iter().filter(is_without).map(Row::size_bytes);
        let wanted = without.chain(std::iter::repeat_n(size_bytes, more));
        Places::find(self.places_in(Store::Host), wanted.map(|size_bytes| ((), size_bytes)))
            .end_bytes
    }

    /// Records that memory could not be mapped at its home again: it is off its device as before. Returns its handle if
    /// it is mapped nowhere.
    pub(crate) fn did_not_come_home(&mut self, handle: VirtualHandle) -> Option<Physical> {
        let row = self.rows.get_mut(handle)?;
        let leaves = row.is_resident() && self.mappings.present(row).next().is_none();
        let physical = leaves.then(|| row.backing_mut().change(Change::Released)).flatten();
        let _none = row.backing_mut().change(Change::Runs { is_mapped: false });
        physical
    }
}

impl RowTable {
    /// Records that memory, which is mapped nowhere any more, has left its home. Its process goes on without it. Its
    /// contents are in its place if `has_contents`, or else nobody needs them.
    pub(crate) fn left_home(
        &mut self,
        handle: VirtualHandle,
        has_contents: bool,
    ) -> Option<Physical> {
        let row = self.get_mut(handle)?;
        if let Some(copy) = row.backing().own_place().cloned().filter(|_| has_contents) {
            let _none = row.backing_mut().change(Change::Saved(copy));
        }
        let physical = row.backing_mut().change(Change::Released);
        let _none = row.backing_mut().change(Change::Runs { is_mapped: false });
        physical
    }

    /// Records that memory is mapped at its home again. Its contents are there, or are being copied there before an
    /// event.
    pub(crate) fn came_home(&mut self, handle: VirtualHandle) {
        let Some(row) = self.get_mut(handle) else { return };
        row.backing_mut().retain_copy(false, false);
        let _none = row.backing_mut().change(Change::Arrived);
    }
}
