//! Cells that cross processes: a ticket names the slab, and which part of it the cell is.

use super::{Cells, placing::TRIES_MAX};
use super::{refused, this_thread};
use crate::driver::{Driver, DriverCode, DriverOp};
use crate::error::PoolResult;
use crate::ledger::Class;
use crate::pool::{Borrowed, Export, ImportSource, Kind, Use};
use crate::slabs::{Ended, NewSlab, Part, StandsFor};
use crate::{AllocationId, PeerId, VirtualHandle};

impl<D: Driver> Cells<'_, D, Use> {
    /// Makes what `handle` stands for importable by others, and counts one ticket, as [`crate::Entered::export`] does. Says which part
    /// of the exported allocation it is, unless it is the whole.
    ///
    /// # Errors
    /// As [`crate::Entered::export`].
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once a slab or allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_cell(&self, handle: VirtualHandle) -> PoolResult<(Export, Option<Part>)> {
        for _ in 0..TRIES_MAX {
            let held = {
                let mut slabs = self.0.pool.slabs().table();
                let held = slabs.held(handle);
                if let StandsFor::Cell(cell) = held
                    && !cell.is_unplaced
                {
                    slabs.share(handle);
                }
                held
            };
            match held {
                StandsFor::Row(row) => return Ok((self.0.export(row)?, None)),
                // A caller that maps it later, wherever that is, is not kept from doing so.
                StandsFor::Cell(cell) if cell.is_unplaced => self.stand_alone(cell)?,
                StandsFor::Cell(cell) => return Ok((self.0.export(cell.row)?, Some(cell.part))),
            }
        }
        let object = "allocation that other threads use meanwhile".to_owned();
        Err(refused(DriverOp::Export, DriverCode::NOT_READY, object, 0))
    }

    /// One more reference to `part` of `id`, or the whole, when this process holds that allocation already, as
    /// [`crate::Entered::import_held`] does.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`] for a part that cannot be, or where the slab cannot be mapped.
    ///
    /// # Driver calls
    /// `cuMemAddressReserve` and `cuMemMap` where the slab is mapped nowhere.
    pub fn import_held_cell(
        &self,
        id: AllocationId,
        serial: u64,
        part: Option<Part>,
    ) -> PoolResult<Option<VirtualHandle>> {
        self.0.pool.slabs().table().aim(this_thread(), None);
        let Some(row) = self.0.import_held(id, serial) else {
            return Ok(None);
        };
        part.map_or(Ok(row), |part| self.hold_part(id, row, part)).map(Some)
    }

    /// Imports `part` of what another process owns, or the whole.
    ///
    /// # Errors
    /// As [`crate::Entered::import`] and [`Cells::import_held_cell`].
    ///
    /// # Driver calls
    /// Those of [`crate::Entered::import`]; `cuMemAddressReserve` and `cuMemMap` for a slab.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_cell(
        &self,
        source: ImportSource,
        lent: Borrowed,
        class: Class,
        part: Option<Part>,
    ) -> PoolResult<VirtualHandle> {
        self.0.pool.slabs().table().aim(this_thread(), None);
        let row = self.0.import(source, lent, class)?;
        part.map_or(Ok(row), |part| self.hold_part(source.id, row, part))
    }

    /// A reference to `part` of the slab `id`, instead of one to its whole row.
    fn hold_part(
        &self,
        id: AllocationId,
        row: VirtualHandle,
        part: Part,
    ) -> PoolResult<VirtualHandle> {
        let known = {
            let mut slabs = self.0.pool.slabs().table();
            slabs.slab_of(id).map(|(key, _)| slabs.hold_part(key, part))
        };
        if let Some(held) = known {
            // The slab has a reference of its own.
            self.0.release(row)?;
            return self.aimed_at(held, part);
        }
        let (size_bytes, prop) = {
            let ledger = self.0.pool.ledger();
            let row = ledger.rows.find(row)?;
            (row.size_bytes(), *row.prop())
        };
        let window = self.map_window(row, size_bytes, 0, &[])?;
        let (held, ended, is_ours) = {
            let mut slabs = self.0.pool.slabs().table();
            // Another thread may have imported it meanwhile.
            let known = slabs.slab_of(id).map(|(key, _)| key);
            let is_ours = known.is_none();
            let key = known.unwrap_or_else(|| {
                let new = NewSlab { row, id, size_bytes, prop, recipe: None };
                slabs.insert(new, window, &[])
            });
            let held = slabs.hold_part(key, part);
            (held, if is_ours { slabs.end_empty(key) } else { Ended::default() }, is_ours)
        };
        if !is_ours {
            self.0.abandon(Some(window), row);
        }
        self.take_down(ended);
        self.aimed_at(held, part)
    }

    fn aimed_at(&self, held: Option<VirtualHandle>, part: Part) -> PoolResult<VirtualHandle> {
        self.0.pool.slabs().table().aim(this_thread(), held);
        held.ok_or_else(|| {
            let object = format!("part of a slab at {}", part.offset_bytes);
            refused(DriverOp::Import, DriverCode::INVALID_VALUE, object, part.size_bytes)
        })
    }
}

impl<D: Driver, K: Kind> Cells<'_, D, K> {
    /// The owner of an import, where `handle` is one; `None` for own memory.
    ///
    /// # Errors
    /// [`crate::PoolError::StaleHandle`].
    pub fn cell_owner(&self, handle: VirtualHandle) -> PoolResult<Option<PeerId>> {
        let row = match self.0.pool.slabs().table().held(handle) {
            StandsFor::Cell(cell) => cell.row,
            StandsFor::Row(row) => row,
        };
        self.0.import_owner(row)
    }
}
