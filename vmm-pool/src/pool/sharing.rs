//! Memory that crosses processes: exports of ours, imports of others'.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{Entered, Inside, Pool};
use crate::deferred::Physical;
use crate::driver::{AllocationProp, Driver};
use crate::error::{Describe, PoolError, PoolResult};
use crate::ids::{AllocationId, PeerId, VirtualHandle};
use crate::ledger::{Class, Export, Lease, NewRow, Origin, Sharing, TicketWatch};
use sublet_driver::descriptors::UninheritedFd;

/// The facts that an importer knows of memory that another process owns.
#[derive(Clone, Copy, Debug)]
pub struct ImportSource {
    /// The identity on the ticket.
    pub id: AllocationId,
    /// The size on the ticket.
    pub size_bytes: u64,
    /// Its owner.
    pub owner: PeerId,
}

/// A descriptor of the driver's for memory of another process.
#[derive(Debug)]
pub struct Borrowed {
    /// The driver's.
    pub fd: OwnedFd,
    /// For a process of another tenant: the descriptor that it is to find closed when the memory is given back.
    pub lease: Option<OwnedFd>,
}

impl From<OwnedFd> for Borrowed {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, lease: None }
    }
}

impl<D: Driver> Entered<'_, D> {
    /// Makes `handle` importable by others, and counts one ticket. Memory stays alive until somebody
    /// has redeemed the ticket; one that is watched holds it until it is closed, as a descriptor of the driver's would
    /// ([`Entered::watch_ticket`]).
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`]; [`PoolError::Driver`] as for a plain export.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once an allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle: VirtualHandle) -> PoolResult<Export> {
        let (export, raw) = self.pool.ledger().begin_export(handle)?;
        let Export { id, size_bytes, serial, .. } = export;
        let Some(raw) = raw else {
            return Ok(export);
        };
        let outcome = match self.pool.driver.export_fd(raw) {
            // The ticket, which nobody has yet, keeps the row; another thread may have exported it too.
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

    /// The ticket of `export` lasts until it is closed, which `watch` tells. Where there are too many watched already it
    /// lasts until it is redeemed.
    pub fn watch_ticket(&self, export: &Export, watch: TicketWatch) {
        drop(self.pool.ledger().watch_ticket(export.id, export.serial, watch));
    }

    /// Nobody was given the ticket of `export`.
    pub fn take_ticket_back(&self, export: &Export) {
        let garbage = self.pool.ledger().export_failed(export.id, export.serial);
        self.pool.dispose_quietly(garbage);
    }

    /// One more reference to `id`, when this process holds it already, as owner or importer. Of its own the ticket
    /// `serial` is redeemed by that. What a pause has lost for good is held no more.
    pub fn import_held(&self, id: AllocationId, serial: u64) -> Option<VirtualHandle> {
        let held = self.pool.ledger().rows.hold_again(id, serial);
        let (handle, spare) = held?;
        drop(spare);
        Some(handle)
    }

    /// Imports what another process owns. If that is of another tenant, its lease is closed once the driver has taken the
    /// memory back.
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

    /// The driver's handle for `fd`, and what its memory was created with.
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
                // Nobody else has seen the handle; what the driver keeps is deferred.
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
    /// Gives memory back that nothing held but tickets, all closed by now.
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
    /// A descriptor of the driver's for `id`, on behalf of `importer`, which holds it from now on. `serial` is that
    /// of its ticket; 0 where there is none, or it holds nothing.
    ///
    /// Once every ticket has been redeemed by somebody, the descriptor kept since [`Entered::export`] is
    /// let go, and with it memory that nothing else holds.
    ///
    /// # Errors
    /// [`PoolError::Frozen`] in a pause; [`PoolError::StaleHandle`] when the allocation is gone,
    /// [`PoolError::Offloaded`] when its tag is paused; [`PoolError::Driver`]. In each case the ticket is good still.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle` when no descriptor is at hand.
    pub fn redeem(&self, id: AllocationId, serial: u64, importer: PeerId) -> PoolResult<OwnedFd> {
        self.give(id, serial, |sharing| sharing.add_importer(importer))
    }

    /// As [`Pool::redeem`], on behalf of a process of another tenant, which holds it as long as its lease is open. It is
    /// none of the importers that a pause waits to see again: it asks again.
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
                // Its process may have freed it just then, or a pause begun: that is why, then.
                self.ledger().find_for_importer(id)?;
                Err(error)
            })
        };
        let fd = at_hand.map_or_else(export, Ok)?;
        // Once more: a pause may have begun meanwhile, which does not know of this importer. The descriptor itself
        // keeps the memory for the importer from now on.
        let (spare, garbage) = self.ledger().redeemed(id, serial, note)?;
        drop(spare);
        self.dispose_quietly(garbage);
        Ok(fd)
    }

    /// A descriptor of the driver's for one importer, kept by nobody.
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

    /// A descriptor for `importer`, which has redeemed its ticket before and gave the memory up for a pause.
    /// Open tickets are not touched; a descriptor made by [`crate::Arriving::restore_rest`] is used where there is one, and kept
    /// for other importers.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] when the allocation is gone, [`PoolError::Frozen`] or [`PoolError::Offloaded`] when
    /// it is not resident; [`PoolError::Driver`].
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
