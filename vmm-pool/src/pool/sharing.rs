//! Memory that processes share: exports of own memory, and imports of others' memory.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{Entered, Inside, Pool};
use crate::deferred::Physical;
use crate::driver::{AllocationProp, Driver};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};
use crate::ledger::{Class, Export, Lease, NewRow, Origin, Sharing, TicketWatch};
use sublet_driver::descriptors::UninheritedFd;

/// The facts that an importer knows about memory of another process.
#[derive(Clone, Copy, Debug)]
pub struct ImportSource {
    /// The identity on the ticket.
    pub id: AllocationId,
    /// The size on the ticket.
    pub size_bytes: u64,
    /// The owner of the memory.
    pub owner: PeerId,
}

/// The driver's descriptor for memory of another process.
#[derive(Debug)]
pub struct Borrowed {
    /// The driver's descriptor.
    pub fd: OwnedFd,
    /// For memory of another tenant: a descriptor that stays open until the memory is released. The owner's process
    /// checks that.
    pub lease: Option<OwnedFd>,
}

impl From<OwnedFd> for Borrowed {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, lease: None }
    }
}

impl<D: Driver> Entered<'_, D> {
    /// Makes `handle` importable by other processes, and counts one ticket. The ticket keeps the memory alive until
    /// somebody has redeemed it. A watched ticket ([`Entered::watch_ticket`]) holds the memory until it is closed, as a
    /// descriptor of the driver's would.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`]; [`PoolError::Driver`] as for a plain export.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once for each allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle: VirtualHandle) -> PoolResult<Export> {
        let (export, raw) = self.pool.ledger().begin_export(handle)?;
        let Export { id, size_bytes, serial, .. } = export;
        let Some(raw) = raw else {
            return Ok(export);
        };
        let outcome = match self.pool.driver.export_fd(raw) {
            // The ticket, which nobody has yet, keeps the row. Another thread may have exported the row too.
            Ok(fd) => {
                let unwanted = self.pool.ledger().rows.keep_export(id, fd);
                drop(unwanted);
                Ok(())
            }
            Err(error) => {
                let garbage = self.pool.ledger().export_failed(id, serial);
                self.pool.dispose_quietly(garbage);
                Err(error)
            }
        };
        outcome.about(|| "export of an allocation".to_owned(), size_bytes, None)?;
        Ok(export)
    }

    /// Watches the ticket of `export` with `watch`: it lasts until it is closed. If too many tickets are watched
    /// already, it lasts until it is redeemed.
    pub fn watch_ticket(&self, export: &Export, watch: TicketWatch) {
        drop(self.pool.ledger().watch_ticket(export.id, export.serial, watch));
    }

    /// Removes the ticket of `export`, which nobody was given.
    pub fn take_ticket_back(&self, export: &Export) {
        let garbage = self.pool.ledger().export_failed(export.id, export.serial);
        self.pool.dispose_quietly(garbage);
    }

    /// Adds a reference to `id`, if this process holds it already, as owner or importer. For own memory this redeems
    /// the ticket `serial`. Memory that a pause has lost for good does not count as held.
    pub fn import_held(&self, id: AllocationId, serial: u64) -> Option<VirtualHandle> {
        let held = self.pool.ledger().rows.hold_again(id, serial);
        let (handle, spare) = held?;
        drop(spare);
        Some(handle)
    }

    /// Imports memory of another process. If that process is of another tenant, the lease is closed once the driver has
    /// released the memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import(
        &self,
        source: ImportSource,
        lent: Borrowed,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let ImportSource { id, size_bytes, owner } = source;
        let (physical, prop) = self.import_physical(lent.fd.as_fd(), size_bytes)?;
        let lease = lent.lease.map(|lease| Arc::new(UninheritedFd::from(lease)));
        let new = NewRow { id, size_bytes, prop, origin: Origin::Imported { owner }, class };
        Ok(self.pool.ledger().rows.insert(new, physical.under(lease)))
    }

    /// Imports from a descriptor whose owner is unknown. Such memory is counted and never paused.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`.
    pub fn import_foreign(&self, fd: BorrowedFd<'_>, class: Class) -> PoolResult<VirtualHandle> {
        let id = AllocationId::random().ok_or(PoolError::NotOurs)?;
        let (physical, prop) = self.import_physical(fd, 0)?;
        let new = NewRow { id, size_bytes: 0, prop, origin: Origin::Foreign, class };
        Ok(self.pool.ledger().rows.insert(new, physical))
    }

    /// Returns the driver's handle for `fd`, and the properties that its memory was created with.
    fn import_physical(
        &self,
        fd: BorrowedFd<'_>,
        size_bytes: u64,
    ) -> PoolResult<(Physical, AllocationProp)> {
        let import = || "import of a peer's allocation".to_owned();
        let raw = self.pool.driver.import_fd(fd).about(import, size_bytes, None)?;
        match self.pool.driver.properties(raw) {
            Ok(prop) => Ok((Physical::new(raw, size_bytes, prop.location.as_device()), prop)),
            Err(error) => {
                // Nobody else has seen the handle. If the driver refuses to release it, that is deferred.
                if let Err(kept) = self.pool.deferred.release(Physical::new(raw, size_bytes, None))
                {
                    tracing::error!(error = %kept, "an import stays until the next pause");
                }
                Err(error).about(import, size_bytes, None)
            }
        }
    }
}

impl<D: Driver> Inside<'_, D> {
    /// Releases memory that only tickets held, all of which are closed by now.
    ///
    /// # Driver calls
    /// `cuMemRelease`, for each such allocation.
    pub fn end_closed_tickets(&self) {
        let (spare, garbage) = self.pool.ledger().end_closed_tickets();
        drop(spare);
        self.pool.dispose_quietly(garbage);
    }
}

impl<D: Driver> Pool<D> {
    /// Returns the driver's descriptor for `id`, for `importer`, which holds the memory from now on. `serial` is the
    /// number of its ticket; 0 if there is none, or if it holds nothing.
    ///
    /// Once every ticket has been redeemed, the descriptor kept since [`Entered::export`] is closed. That also releases
    /// memory that nothing else holds.
    ///
    /// # Errors
    /// [`PoolError::Frozen`] in a pause; [`PoolError::StaleHandle`] if the allocation is gone, [`PoolError::Offloaded`]
    /// if its tag is paused; [`PoolError::Driver`]. In each case the ticket stays valid.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle` when no descriptor is at hand.
    pub fn redeem(&self, id: AllocationId, serial: u64, importer: PeerId) -> PoolResult<OwnedFd> {
        self.give(id, serial, |sharing| sharing.add_importer(importer))
    }

    /// As [`Pool::redeem`], for a process of another tenant, which holds the memory as long as its lease is open. A
    /// pause does not wait for it as for an importer: it requests the memory again.
    ///
    /// # Errors
    /// As [`Pool::redeem`].
    ///
    /// # Driver calls
    /// As [`Pool::redeem`].
    pub fn lend(&self, id: AllocationId, serial: u64, lease: Lease) -> PoolResult<OwnedFd> {
        self.give(id, serial, |sharing| sharing.leases.add(lease, serial != 0))
    }

    fn give(
        &self,
        id: AllocationId,
        serial: u64,
        note: impl FnOnce(&mut Sharing),
    ) -> PoolResult<OwnedFd> {
        let at_hand = self.ledger().find_for_importer(id)?.sharing().copy_of_export();
        let export = || {
            self.export_once(id).or_else(|error| {
                // Its process may have freed it just then, or a pause may have begun. That is the error to return then.
                self.ledger().find_for_importer(id)?;
                Err(error)
            })
        };
        let fd = at_hand.map_or_else(export, Ok)?;
        // Checked again, because a pause may have begun meanwhile that does not know of this importer. From now on the
        // descriptor itself keeps the memory for the importer.
        let (spare, garbage) = self.ledger().redeemed(id, serial, note)?;
        drop(spare);
        self.dispose_quietly(garbage);
        Ok(fd)
    }

    /// Makes a descriptor of the driver's for one importer. The pool keeps no copy.
    fn export_once(&self, id: AllocationId) -> PoolResult<OwnedFd> {
        let (raw, size_bytes) = {
            let ledger = self.ledger();
            let row = ledger.rows.by_id(id).filter(|row| row.is_own());
            let row = row.ok_or(PoolError::StaleHandle { handle: 0 })?;
            let away = || {
                let tag = row.class().tag.clone();
                if ledger.is_frozen() { PoolError::Frozen } else { PoolError::Offloaded { tag } }
            };
            (row.raw().ok_or_else(away)?, row.size_bytes())
        };
        let fd = self.driver.export_fd(raw);
        fd.about(|| format!("export of allocation {id:?}"), size_bytes, None)
    }

    /// Returns a descriptor for `importer`, which has redeemed its ticket earlier and gave the memory up for a pause.
    /// Open tickets do not change. Uses a descriptor made by [`crate::Arriving::restore_rest`] if there is one, and
    /// keeps it for other importers.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] if the allocation is gone, [`PoolError::Frozen`] or [`PoolError::Offloaded`] if it is
    /// not resident; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle` when no descriptor is at hand.
    pub fn hand_out(&self, id: AllocationId, importer: PeerId) -> PoolResult<OwnedFd> {
        let at_hand = self.ledger().rows.export_at_hand(id);
        let fd = at_hand.map_or_else(|| self.export_once(id), Ok)?;
        self.ledger().rows.fetched(id, importer);
        Ok(fd)
    }
}
