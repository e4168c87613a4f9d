//! Memory that crosses processes: exports of ours, imports of others'.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::strays::StrayHandle;
use super::tables::{Allocation, Origin};
use super::{Class, Pool};
use crate::driver::Driver;
use crate::error::{Describe, PoolError, PoolResult};
use crate::{AllocationId, PeerId, VirtualHandle};

/// What a ticket for an allocation must say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its identity.
    pub id: AllocationId,
    /// Its size.
    pub size_bytes: u64,
    /// Which of its tickets this is: redeeming it once lets the memory go that it holds. 0 for memory that is
    /// another process's, of which a ticket holds nothing.
    pub serial: u64,
}

/// Imports that nobody can bring back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostImports {
    /// How many.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What an importer knows of memory that another process owns.
#[derive(Clone, Copy, Debug)]
pub struct ImportSource {
    /// The identity on the ticket.
    pub id: AllocationId,
    /// The size on the ticket.
    pub size_bytes: u64,
    /// Its owner.
    pub owner: PeerId,
}

impl<D: Driver> Pool<D> {
    /// Makes `handle` importable by others, and counts one ticket. Memory stays alive until somebody
    /// has redeemed the ticket, as it would for a descriptor of the driver's.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`]; [`PoolError::Driver`] as for a plain export.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once an allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle: VirtualHandle) -> PoolResult<Export> {
        let (raw, export) = {
            let mut tables = self.tables();
            let key = tables.find(handle)?;
            let serial = if tables.allocations[key].is_own() { tables.next_ticket() } else { 0 };
            let found = &mut tables.allocations[key];
            let export = Export { id: found.id, size_bytes: found.size_bytes, serial };
            if !found.is_own() {
                return Ok(export);
            }
            let to_export = match (&found.exported, found.raw) {
                (Some(_), _) => None,
                (None, Some(raw)) => Some(raw),
                (None, None) => {
                    return Err(PoolError::Offloaded { tag: found.class.tag.clone() });
                }
            };
            // From now on the ticket keeps the memory, whatever another thread releases.
            found.tickets.insert(serial);
            let Some(raw) = to_export else {
                return Ok(export);
            };
            (raw, export)
        };
        let exported = self.driver.export_fd(raw);
        let (garbage, outcome) = {
            let mut tables = self.tables();
            // The ticket, which nobody has yet, keeps the record.
            let key = tables.by_id.get(&export.id).copied();
            let found = key.and_then(|key| tables.allocations.get_mut(key));
            match (exported, found) {
                (Ok(fd), Some(found)) => {
                    found.exported = Some(fd);
                    (None, Ok(()))
                }
                (Err(error), Some(found)) => {
                    found.tickets.remove(&export.serial);
                    (key.and_then(|key| tables.take_garbage(key)), Err(error))
                }
                (exported, None) => (None, exported.map(drop)),
            }
        };
        self.dispose_quietly(garbage);
        outcome.about(|| "export of an allocation".to_owned(), export.size_bytes, None)?;
        Ok(export)
    }

    /// The owner of an import, where `handle` is one; `None` for own memory.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    pub fn import_owner(&self, handle: VirtualHandle) -> PoolResult<Option<PeerId>> {
        let tables = self.tables();
        let key = tables.find(handle)?;
        Ok(match &tables.allocations[key].origin {
            Origin::Imported { owner } => Some(*owner),
            Origin::Own | Origin::Lost | Origin::Foreign => None,
        })
    }

    /// A descriptor of the driver's for `id`, on behalf of `importer`, which holds it from now on. `serial` is that
    /// of its ticket; 0 where there is none, or it holds nothing.
    ///
    /// Once every ticket has been redeemed by somebody, the descriptor kept since [`Pool::export`] is
    /// let go, and with it memory that nothing else holds.
    ///
    /// # Errors
    /// [`PoolError::Frozen`] in a pause; [`PoolError::StaleHandle`] when the allocation is gone,
    /// [`PoolError::Offloaded`] when its tag is paused; [`PoolError::Driver`]. In each case the ticket is good still.
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle` when no descriptor is at hand.
    pub fn redeem(&self, id: AllocationId, serial: u64, importer: PeerId) -> PoolResult<OwnedFd> {
        let at_hand = {
            let tables = self.tables();
            let key = tables.find_for_importer(id)?;
            let exported = tables.allocations[key].exported.as_ref();
            exported.and_then(|fd| fd.as_fd().try_clone_to_owned().ok())
        };
        let fd = match at_hand {
            Some(fd) => fd,
            None => self.export_once(id).or_else(|error| {
                // Its process may have freed it just then, or a pause begun: that is why, then.
                self.tables().find_for_importer(id)?;
                Err(error)
            })?,
        };
        let garbage = {
            let mut tables = self.tables();
            // Once more: a pause may have begun meanwhile, which does not know of this importer.
            let key = tables.find_for_importer(id)?;
            let found = &mut tables.allocations[key];
            found.importers.insert(importer);
            found.use_ticket(serial);
            // The descriptor itself now keeps the memory for the importer.
            tables.take_garbage(key)
        };
        self.dispose_quietly(garbage);
        Ok(fd)
    }

    /// A descriptor of the driver's for one importer, kept by nobody.
    fn export_once(&self, id: AllocationId) -> PoolResult<OwnedFd> {
        let (raw, size_bytes) = {
            let tables = self.tables();
            let found = tables.by_id.get(&id).and_then(|&key| tables.allocations.get(key));
            let found = found.filter(|found| found.is_own());
            let found = found.ok_or(PoolError::StaleHandle { handle: 0 })?;
            let away = || {
                let tag = found.class.tag.clone();
                if tables.is_frozen { PoolError::Frozen } else { PoolError::Offloaded { tag } }
            };
            (found.raw.ok_or_else(away)?, found.size_bytes)
        };
        let fd = self.driver.export_fd(raw);
        fd.about(|| format!("export of allocation {id:?}"), size_bytes, None)
    }

    /// A descriptor for `importer`, which has redeemed its ticket before and gave the memory up for a pause.
    /// Open tickets are not touched; a descriptor made by [`Pool::restore_own`] is used where there is one, and kept
    /// for other importers.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] when the allocation is gone, [`PoolError::Frozen`] or [`PoolError::Offloaded`] when
    /// it is not resident; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle` when no descriptor is at hand.
    pub fn hand_out(&self, id: AllocationId, importer: PeerId) -> PoolResult<OwnedFd> {
        let at_hand = {
            let mut tables = self.tables();
            let key = tables.by_id.get(&id).copied();
            let found = key.and_then(|key| tables.allocations.get_mut(key));
            found.and_then(|found| {
                let copied = found.exported.as_ref()?.as_fd().try_clone_to_owned();
                // Without room for one descriptor more, this very one goes.
                copied.ok().or_else(|| found.exported.take())
            })
        };
        let fd = match at_hand {
            Some(fd) => fd,
            None => self.export_once(id)?,
        };
        let mut tables = self.tables();
        if let Some(&key) = tables.by_id.get(&id) {
            let found = &mut tables.allocations[key];
            found.importers.insert(importer);
            if let Some(fetched) = &mut found.fetched {
                fetched.insert(importer);
            }
        }
        Ok(fd)
    }

    /// One more reference to `id`, when this process holds it already, as owner or importer. Of its own the ticket
    /// `serial` is redeemed by that. What a pause has lost for good is held no more.
    pub fn import_held(&self, id: AllocationId, serial: u64) -> Option<VirtualHandle> {
        let mut tables = self.tables();
        let key = *tables.by_id.get(&id)?;
        let found = &mut tables.allocations[key];
        if found.origin == Origin::Lost {
            return None;
        }
        found.references += 1;
        if found.is_own() {
            found.use_ticket(serial);
        }
        tables.handle_of(key)
    }

    /// For a forked child: closes its copies of descriptors, which hold device memory and disk space that the
    /// parent believes to have given back. Passes over what a thread was changing at the fork.
    pub fn close_descriptors_in_child(&self) {
        if let Ok(mut arena) = self.arena.try_lock() {
            arena.disk.close_in_child();
        }
        if let Ok(mut tables) = self.tables.try_lock() {
            for (_, found) in &mut tables.allocations {
                found.exported = None;
            }
        }
    }

    /// The owners of all imports, each once.
    pub fn import_owners(&self) -> Vec<PeerId> {
        let tables = self.tables();
        let owners: BTreeSet<PeerId> = tables
            .allocations
            .iter()
            .filter_map(|(_, found)| match &found.origin {
                Origin::Imported { owner } => Some(*owner),
                Origin::Own | Origin::Lost | Origin::Foreign => None,
            })
            .collect();
        owners.into_iter().collect()
    }

    /// How much was imported from `owner` and is not resident.
    pub fn imports_away(&self, owner: PeerId) -> LostImports {
        self.each_import_away(|_, theirs| theirs == owner, |_| {})
    }

    /// Gives up on what was imported from `owner` and is not resident: it is not asked for any more, and
    /// its mappings stay absent until their user unmaps them. Says how much that is.
    pub fn give_up_imports(&self, owner: PeerId) -> LostImports {
        self.each_import_away(|_, theirs| theirs == owner, |found| found.origin = Origin::Lost)
    }

    /// As [`Pool::give_up_imports`], of these allocations.
    pub fn give_up_missing(&self, missing: &BTreeSet<AllocationId>) -> LostImports {
        self.each_import_away(|id, _| missing.contains(&id), |found| found.origin = Origin::Lost)
    }

    fn each_import_away(
        &self,
        choose: impl Fn(AllocationId, PeerId) -> bool,
        change: impl Fn(&mut Allocation),
    ) -> LostImports {
        let mut tables = self.tables();
        let mut lost = LostImports::default();
        for (_, found) in &mut tables.allocations {
            if let (Origin::Imported { owner }, None) = (&found.origin, found.raw)
                && choose(found.id, *owner)
            {
                lost.count += 1;
                lost.bytes += found.size_bytes;
                change(found);
            }
        }
        lost
    }

    /// Imports what another process owns, from the driver's descriptor `fd`.
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
        fd: BorrowedFd<'_>,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let origin = Origin::Imported { owner: source.owner };
        self.insert_import(source.id, source.size_bytes, origin, fd, class)
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
        self.insert_import(id, 0, Origin::Foreign, fd, class)
    }

    fn insert_import(
        &self,
        id: AllocationId,
        size_bytes: u64,
        origin: Origin,
        fd: BorrowedFd<'_>,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let import = || "import of a peer's allocation".to_owned();
        let raw = self.driver.import_fd(fd).about(import, size_bytes, None)?;
        let prop = match self.driver.properties(raw) {
            Ok(prop) => prop,
            Err(error) => {
                // Nobody else has seen the handle; what the driver keeps is filed.
                let stray = StrayHandle { raw, size_bytes, device: None };
                if let Err(kept) = self.give_back_handle(stray) {
                    tracing::error!(error = %kept, "an import stays until the next pause");
                }
                return Err(error).about(import, size_bytes, None);
            }
        };
        let mut tables = self.tables();
        let (_, handle) = tables.insert(Allocation {
            id,
            size_bytes,
            prop,
            origin,
            class,
            generation: 0,
            references: 1,
            mappings: BTreeSet::new(),
            tickets: BTreeSet::new(),
            importers: BTreeSet::new(),
            fetched: None,
            exported: None,
            raw: Some(raw),
            pinned: None,
            stays: None,
            saved: None,
            unused: Vec::new(),
            set_aside: false,
            block_size_bytes: None,
        });
        Ok(handle)
    }
}
