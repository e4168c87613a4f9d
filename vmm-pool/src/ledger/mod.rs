//! The ledger: what device memory exists, which library allocated it, where it is mapped, and where its contents are.
//!
//! ```text
//!   VirtualHandle --> Row --residency--> Physical, the driver's handle (while on its device)
//!                      ^  |
//!                      |  +--mappings--> Mapping [start, start+size) --access--> per place
//!                      +---------------- one allocation, any number of mappings
//! ```
//!
//! The ledger calls no other module. A caller that changes it has made the driver agree, or is about to. A row is found
//! by its handle. The handle's generation makes a look-up of a removed row find nothing.
//!
//! # Invariants
//! 1. Every mapping names a live row, and that row lists the mapping's start; both ways.
//! 2. Mappings do not overlap.
//! 3. A row lives while it has a reference, a mapping, or an open ticket. A row that is not resident also lives as long
//!    as an importer may fetch it again.
//! 4. A driver's handle is in one row. If it is in none, its holder must release it.

mod accounts;
mod backing;
mod homes;
mod layout;
mod mapping;
mod moving;
mod pieces;
mod residency;
mod row;
mod selection;
mod shares;
mod sharing;
mod table;
mod tickets;
mod views;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Weak;

pub use accounts::{
    Holding, HoldingSource, LostImports, References, Shareable, Stance, StayReason, TagTotals,
    Unfreezable,
};
pub(crate) use layout::{Layout, Placed};
pub use mapping::{Block, Facts, Known, Sight};
pub(crate) use mapping::{Mapping, Mappings, Presence};
pub(crate) use pieces::Survey;
pub use row::Class;
pub(crate) use row::{NewRow, Origin, Row};
pub(crate) use selection::Rows;
pub use selection::{After, LIBRARY_TAGS, Selection, Tags, Whose};
pub use shares::{Lease, TicketWatch};
pub(crate) use sharing::Sharing;
use table::RowTable;
use tickets::Watches;
pub use tickets::{Export, LentTotals, Part};
use views::Views;

use crate::driver::{
    AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, DriverError, DriverOp, RawHandle, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::{AllocationId, VirtualHandle};
use crate::store::Saved;

/// The rows and mappings of one process: see the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) rows: RowTable,
    pub(crate) mappings: Mappings,
    pub(crate) views: Views,
    watches: Watches,
    /// The places of contents that somebody reads in place, without a lock.
    read: Weak<Vec<Saved>>,
    /// True while importers are given nothing: a pause has asked who holds what, or memory is off its device.
    is_frozen: bool,
}

/// The data that the driver needs to map a recorded mapping again.
#[derive(Debug)]
pub(crate) struct Remount {
    pub(crate) range: VaRange,
    pub(crate) raw: RawHandle,
    pub(crate) access: Vec<AccessDesc>,
    pub(crate) device: Option<DeviceOrdinal>,
    pub(crate) presence: Presence,
}

// Rows and mappings.
impl Ledger {
    /// Returns the mapping that holds `address`, with its row.
    pub(crate) fn mapped_at(&self, address: DeviceAddress) -> Option<(&Mapping, &Row)> {
        let mapping = self.mappings.at(address)?;
        Some((mapping, self.rows.get(mapping.allocation())?))
    }

    /// Removes the row if nothing holds it any more.
    fn take_garbage(&mut self, handle: VirtualHandle) -> Option<Row> {
        let is_frozen = self.is_frozen;
        self.rows.take(handle, |row| row.is_garbage(is_frozen))
    }
}

// Changes that applications' calls make. Nothing holds the rows that these methods return.
impl Ledger {
    /// Drops one reference.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], also when all references are used up.
    pub(crate) fn drop_reference(&mut self, handle: VirtualHandle) -> PoolResult<Option<Row>> {
        let had_one = self.rows.get_mut(handle).is_some_and(Row::drop_reference);
        if !had_one {
            return Err(PoolError::StaleHandle { handle: handle.raw() });
        }
        Ok(self.take_garbage(handle))
    }

    /// Records a mapping that is about to be made. From then on the mapping keeps its memory, even if another thread
    /// releases the handle.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Offloaded`]; [`PoolError::Driver`] for what the driver would refuse
    /// if it saw all mappings.
    pub(crate) fn begin_mapping(
        &mut self,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<(RawHandle, Option<DeviceOrdinal>)> {
        let row = self.rows.find(handle)?;
        // The driver does not see a mapping whose memory is off its device, or that is being made. Such a mapping
        // counts all the same.
        let is_taken = self.mappings.overlapping(range).next().is_some();
        if !row.is_resident() && row.is_set_aside() && !row.is_lost() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        let allowed = match row.raw() {
            _ if is_taken => Err(DriverCode::INVALID_VALUE),
            // Driver 580 returns this code for any offset; see the conformance case of this name.
            _ if offset_bytes != 0 => Err(DriverCode::NOT_SUPPORTED),
            // The gate blocks this call while memory is off its device.
            None => Err(DriverCode::NOT_READY),
            Some(raw) => Ok(raw),
        };
        let refused = |code| DriverError { op: DriverOp::Map, code };
        let device = row.device();
        let raw = allowed.map_err(refused).about(
            || format!("mapping at {}", range.start),
            range.size_bytes,
            device,
        )?;
        self.mappings.insert(Mapping::new(range, handle));
        self.rows.change([handle], |row| row.mapped(range.start.0));
        Ok((raw, device))
    }

    /// Removes the mappings that begin at `starts`.
    pub(crate) fn forget_mappings(&mut self, starts: &[u64]) -> Vec<Row> {
        let mut garbage = Vec::new();
        for start in starts {
            let Some(mapping) = self.mappings.remove(*start) else { continue };
            let handle = mapping.allocation();
            self.rows.change([handle], |row| row.unmapped(*start));
            garbage.extend(self.take_garbage(handle));
        }
        garbage
    }

    /// Pins all that is mapped in `range`: a pause leaves it in place. Returns how many bytes were not pinned before.
    pub(crate) fn pin(&mut self, range: VaRange, reason: &'static str) -> u64 {
        let mut bytes = 0;
        self.rows.change(self.mapped_in(range), |row| {
            bytes += if row.pin(reason) { row.size_bytes() } else { 0 };
        });
        bytes
    }

    fn mapped_in(&self, range: VaRange) -> Vec<VirtualHandle> {
        self.mappings.overlapping(range).map(Mapping::allocation).collect()
    }

    /// Registers all that is mapped in `range`, and returns those allocations. A pause leaves them in place until
    /// [`RowTable::unregister`] gets the same list.
    pub(crate) fn register(&mut self, range: VaRange, reason: &'static str) -> Vec<VirtualHandle> {
        let handles = self.mapped_in(range);
        self.rows.change(handles.iter().copied(), |row| row.register(reason));
        handles
    }

    /// Turns the allocation into a block: only its mapping keeps it, and `asked_bytes` is its size for callers.
    pub(crate) fn become_block(&mut self, handle: VirtualHandle, asked_bytes: u64) -> Option<Row> {
        let row = self.rows.get_mut(handle)?;
        row.become_block(asked_bytes);
        let _had_one = row.drop_reference();
        self.take_garbage(handle)
    }

    /// Turns the mapping at `start` into a block that is opened once. The caller keeps its reference.
    pub(crate) fn become_opened(&mut self, handle: VirtualHandle, start: u64, asked_bytes: u64) {
        self.rows.change([handle], |row| row.become_block(asked_bytes));
        self.mappings.open_once(start);
    }
}

// Sharing.
impl Ledger {
    /// Are importers given nothing?
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// Gives importers nothing from now on: see [`Ledger::is_frozen`].
    pub(crate) fn freeze(&mut self) {
        self.is_frozen = true;
    }

    /// Records that the process runs again. If nothing has moved since [`Ledger::freeze`], the process may use memory
    /// again that it had marked unused. If something has moved, [`Ledger::run_on`] has recorded that.
    pub(crate) fn thaw(&mut self) {
        for row in self.rows.iter_mut().filter(|row| row.is_left_lent()) {
            row.set_stays(None);
        }
        if std::mem::take(&mut self.is_frozen) {
            self.mark_unused(&[]);
        }
    }

    /// Returns an own allocation, if importers may be given it now.
    ///
    /// # Errors
    /// [`PoolError::Frozen`], [`PoolError::StaleHandle`], [`PoolError::Offloaded`].
    pub(crate) fn find_for_importer(&self, id: AllocationId) -> PoolResult<&Row> {
        if self.is_frozen {
            return Err(PoolError::Frozen);
        }
        let row = self.rows.by_id(id).filter(|row| row.is_own());
        let row = row.ok_or(PoolError::StaleHandle { handle: 0 })?;
        if row.is_resident() && !row.sharing().is_owed_by_tag() {
            return Ok(row);
        }
        Err(PoolError::Offloaded { tag: row.class().tag.clone() })
    }

    /// Records a new holder of `id`, which has redeemed the ticket `serial`, or has no ticket if that is 0. `note`
    /// records the holder. Returns a descriptor that is kept for nobody any more, and a row that nobody here holds.
    ///
    /// # Errors
    /// As [`Ledger::find_for_importer`].
    pub(crate) fn redeemed(
        &mut self,
        id: AllocationId,
        serial: u64,
        note: impl FnOnce(&mut Sharing),
    ) -> PoolResult<(Option<OwnedFd>, Option<Row>)> {
        let handle = self.find_for_importer(id)?.handle();
        let fd = self.rows.get_mut(handle).and_then(|row| {
            note(row.sharing_mut());
            row.sharing_mut().use_ticket(serial)
        });
        Ok((fd, self.take_garbage(handle)))
    }
}

/// Returns the same bytes as ranges in order, none of them empty, none touching another.
pub(crate) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| range.start < range.end);
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests;
