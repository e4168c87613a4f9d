//! Chunks of a window ([`crate::paging`]): own memory that leaves and comes back while its process runs.
//!
//! Each is a row as any other. While it is away it is set aside, and its contents lie in host memory. Its place there stays
//! its own, also while it is on its device: it is the row's retained copy, whose bytes count only if the pager says so.

use super::backing::Backing;
use super::layout::Places;
use super::residency::Change;
use super::{Ledger, Mapping, NewRow, Row, RowTable};
use crate::VirtualHandle;
use crate::deferred::Physical;
use crate::driver::{AccessDesc, VaRange};
use crate::store::{Extent, Saved, Store};

impl Ledger {
    /// Enters a chunk that is to be mapped at `range`, with these rights. It is away, and nothing is saved of it: it is zero.
    pub(crate) fn insert_chunk(
        &mut self,
        new: NewRow,
        range: VaRange,
        access: &[AccessDesc],
    ) -> VirtualHandle {
        let handle = self.rows.enter(new, Backing::of_chunk());
        let mut mapping = Mapping::new(range, handle);
        mapping.add_access(access);
        self.mappings.insert(mapping);
        self.rows.change([handle], |row| row.mapped(range.start.0));
        handle
    }

    /// Returns the reason why a chunk may not leave: other holders of its pages do not wait for the pager. A pin does
    /// not hold a chunk that `is_given_up`: its frame goes to the driver, and its user has freed it.
    pub(crate) fn chunk_stays(
        &self,
        handle: VirtualHandle,
        is_given_up: bool,
    ) -> Option<&'static str> {
        let row = self.rows.get(handle)?;
        let pinned = row.reason_to_stay().filter(|_| !is_given_up);
        let shared = row.is_shared().then_some("another process may hold it");
        let twice = (row.mapped_at().len() > 1).then_some("it is mapped at another address too");
        pinned.or(shared).or(twice)
    }

    /// The row of a chunk goes, which is mapped nowhere.
    pub(crate) fn remove_chunk(&mut self, handle: VirtualHandle) -> Vec<Row> {
        let starts: Vec<_> = self.rows.get(handle).into_iter().flat_map(Row::mapped_at).collect();
        let mut garbage = self.forget_mappings(&starts);
        garbage.extend(self.drop_reference(handle).ok().flatten());
        garbage
    }

    /// Returns the range where its device sees a chunk; none where there is no such chunk.
    pub(crate) fn chunk_range(&self, handle: VirtualHandle) -> Option<VaRange> {
        let row = self.rows.chunk(handle)?;
        self.mappings.of(row).next().map(Mapping::range)
    }

    /// The place of a chunk's contents, which are about to be copied there: the one that it has, or a new one. What lies
    /// there has no fingerprints from now on.
    pub(crate) fn take_chunk_place(&mut self, handle: VirtualHandle) -> Option<Extent> {
        let row = self.rows.chunk(handle).filter(|row| row.is_resident())?;
        let size_bytes = row.size_bytes();
        let whole = row.backing().chunk_copy().and_then(|saved| match &*saved.extents {
            [only] if only.size_bytes == size_bytes => Some(*only),
            _ => None,
        });
        let extent = if let Some(whole) = whole {
            whole
        } else {
            // What it has in pieces goes: the contents move as a whole.
            self.rows.forget_copy(handle);
            let taken = self.places_in(Store::Host);
            let at = Places::find(taken, std::iter::once(((), size_bytes))).places;
            Extent { start: 0, size_bytes, at: at.first()?.1 }
        };
        let saved = Saved { store: Store::Host, extents: [extent].into(), prints: None };
        self.rows.get_mut(handle)?.backing_mut().keep_chunk_copy(saved);
        Some(extent)
    }

    /// Computes the end of contents in host memory with places for all chunks, and for `more` chunks of `chunk_bytes`.
    pub(crate) fn end_with_chunks(&self, more: usize, chunk_bytes: u64) -> u64 {
        let without = self
            .rows
            .iter()
            .filter(|row| row.backing().is_chunk() && row.backing().held_in(Store::Host).is_none());
        let wanted = without.map(Row::size_bytes).chain(std::iter::repeat_n(chunk_bytes, more));
        Places::find(self.places_in(Store::Host), wanted.map(|size_bytes| ((), size_bytes)))
            .end_bytes
    }

    /// A chunk that was to come and could not: it is away as before. Its memory comes out if it is mapped nowhere.
    pub(crate) fn chunk_did_not_come(&mut self, handle: VirtualHandle) -> Option<Physical> {
        let row = self.rows.get_mut(handle)?;
        let leaves = row.is_resident() && self.mappings.present(row).next().is_none();
        let physical = leaves.then(|| row.backing_mut().change(Change::Released)).flatten();
        let _none = row.backing_mut().change(Change::Runs { is_mapped: false });
        physical
    }
}

impl RowTable {
    /// The row of a chunk.
    pub(crate) fn chunk(&self, handle: VirtualHandle) -> Option<&Row> {
        self.get(handle).filter(|row| row.backing().is_chunk())
    }

    /// A chunk that is mapped nowhere any more has left: its process goes on without it. Its contents lie in its place,
    /// or nobody needs them.
    pub(crate) fn chunk_left(
        &mut self,
        handle: VirtualHandle,
        has_contents: bool,
    ) -> Option<Physical> {
        let row = self.get_mut(handle)?;
        if let Some(copy) = row.backing().chunk_copy().cloned().filter(|_| has_contents) {
            let _none = row.backing_mut().change(Change::Saved(copy));
        }
        let physical = row.backing_mut().change(Change::Released);
        let _none = row.backing_mut().change(Change::Runs { is_mapped: false });
        physical
    }

    /// A chunk is mapped again, and its contents are there, or on their way behind an event.
    pub(crate) fn chunk_came(&mut self, handle: VirtualHandle) {
        let Some(row) = self.get_mut(handle) else { return };
        if let Some(saved) = row.backing().saved().cloned() {
            row.backing_mut().keep_chunk_copy(saved);
        }
        let _none = row.backing_mut().change(Change::Arrived);
    }
}
