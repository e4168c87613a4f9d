//! The front: it handles calls about handles and addresses that callers hold, whether or not these are rows of the
//! ledger.

use std::fmt::Debug;
use std::sync::Arc;

use super::{Borrowed, Entered, ImportSource, Inside, Pool};
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverError, DriverOp, VaRange,
};
use crate::error::{PoolError, PoolResult};
use crate::ids::{AllocationId, VirtualHandle};
use crate::ledger::{Class, Export, Known, Part};
use crate::report::SlabTotals;

/// New memory, as a caller requests it.
#[derive(Clone, Debug)]
pub struct NewMemory {
    /// Its size.
    pub size_bytes: u64,
    /// The properties that it is created with.
    pub prop: AllocationProp,
    /// Its class.
    pub class: Class,
    /// True if it must be a separate allocation: its caller may map it a second time.
    pub is_alone: bool,
}

/// One of the front's own addresses, as a caller sees it.
#[derive(Clone, Debug, Default)]
pub struct FrontView {
    /// The part that is mapped there: its addresses, its handle, and the rights that callers have set on it.
    pub part: Option<(VaRange, VirtualHandle, Vec<AccessDesc>)>,
    /// The range that a caller was given, if it is a part of what the driver has reserved.
    pub reserved: Option<VaRange>,
    /// True if the driver has something there, but no caller does.
    pub is_nobodys: bool,
}

/// The calls about handles and addresses that callers hold. By default each works on rows, as the methods of
/// [`Entered`], [`Inside`] and [`Holdings`](crate::Holdings) do.
///
/// A front may give callers handles of its own ([`VirtualHandle::of_front`]), and addresses inside its own
/// reservations. The pool holds no lock when it calls a front.
pub trait Front<D: Driver>: Debug + Send + Sync {
    /// Creates memory.
    ///
    /// # Errors
    /// As [`Entered::create`].
    ///
    /// # Driver calls
    /// Those of [`Entered::create`], if the front does not have the memory yet.
    #[doc(alias = "cuMemCreate")]
    fn create(&self, entered: &Entered<'_, D>, new: NewMemory) -> PoolResult<VirtualHandle> {
        entered.create(new.size_bytes, &new.prop, new.class)
    }

    /// Drops one reference of `handle`.
    ///
    /// # Errors
    /// As [`Inside::release`].
    ///
    /// # Driver calls
    /// Those of [`Inside::release`], also for an allocation whose last part is released.
    #[doc(alias = "cuMemRelease")]
    fn release(&self, inside: &Inside<'_, D>, handle: VirtualHandle) -> PoolResult<()> {
        inside.release(handle)
    }

    /// Adds a reference to the memory that is mapped at `at`.
    ///
    /// # Errors
    /// As [`Inside::retain_at`]; [`PoolError::Driver`] for addresses of the front that no caller has.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    fn retain_at(&self, inside: &Inside<'_, D>, at: DeviceAddress) -> PoolResult<VirtualHandle> {
        inside.retain_at(at)
    }

    /// Returns the properties that `held` was created with.
    ///
    /// # Errors
    /// As [`Inside::properties`].
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    fn properties(
        &self,
        inside: &Inside<'_, D>,
        held: VirtualHandle,
    ) -> PoolResult<AllocationProp> {
        inside.properties(held)
    }

    /// Maps the whole memory of `handle`.
    ///
    /// # Errors
    /// As [`Entered::map`]; also [`PoolError::Driver`] for memory that the front cannot map there.
    ///
    /// # Driver calls
    /// Those of [`Entered::map`] for a row; the front's own for other handles.
    #[doc(alias = "cuMemMap")]
    fn map(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        offset_bytes: u64,
        handle: VirtualHandle,
    ) -> PoolResult<()> {
        entered.map(range, offset_bytes, handle)
    }

    /// Unmaps all mappings inside `range`.
    ///
    /// # Errors
    /// As [`Inside::unmap`]; also [`PoolError::Driver`] for a part of a mapping, and if nothing is mapped at addresses
    /// of the front.
    ///
    /// # Driver calls
    /// As [`Front::release`].
    #[doc(alias = "cuMemUnmap")]
    fn unmap(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        inside.unmap(range)
    }

    /// Sets the access rights of the mappings in `range`.
    ///
    /// # Errors
    /// As [`Entered::set_access`]; also [`PoolError::Driver`] if nothing is mapped at a part of the front's addresses.
    ///
    /// # Driver calls
    /// `cuMemSetAccess`, unless the device has the rights already.
    #[doc(alias = "cuMemSetAccess")]
    fn set_access(
        &self,
        entered: &Entered<'_, D>,
        range: VaRange,
        access: &[AccessDesc],
    ) -> PoolResult<()> {
        entered.set_access(range, access)
    }

    /// May [`Front::take_addresses`] have addresses for this thread? Passes no gate.
    fn has_addresses(&self, _size_bytes: u64, _alignment: u64, _library: &str) -> bool {
        false
    }

    /// Returns addresses for a caller of `library`. None if the driver must reserve them.
    ///
    /// # Driver calls
    /// `cuMemAddressReserve`, if the front has none left.
    #[doc(alias = "cuMemAddressReserve")]
    fn take_addresses(
        &self,
        _entered: &Entered<'_, D>,
        _size_bytes: u64,
        _alignment: u64,
        _library: &str,
    ) -> Option<DeviceAddress> {
        None
    }

    /// Frees addresses.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] for addresses that the driver must free; [`PoolError::Driver`] if something is mapped
    /// there, or if they are not exactly a range that was handed out.
    ///
    /// # Driver calls
    /// `cuMemAddressFree`, for the last of a reservation of the front.
    #[doc(alias = "cuMemAddressFree")]
    fn free_addresses(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        inside.check_address_free(range).and(Err(PoolError::NotOurs))
    }

    /// Makes the memory of `handle` importable by other processes, and counts one ticket, as [`Entered::export`] does.
    ///
    /// # Errors
    /// As [`Entered::export`].
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once for each allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    fn export(&self, entered: &Entered<'_, D>, handle: VirtualHandle) -> PoolResult<Export> {
        entered.export(handle)
    }

    /// Adds a reference to the memory of the ticket, if this process holds that allocation already, as
    /// [`Entered::import_held`] does.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] if the front has no parts; [`PoolError::Driver`] for a part that cannot exist, or cannot
    /// be mapped.
    ///
    /// # Driver calls
    /// The front's own, if that part is not mapped yet.
    fn import_held(
        &self,
        entered: &Entered<'_, D>,
        of: &Export,
    ) -> PoolResult<Option<VirtualHandle>> {
        of.part
            .map_or_else(|| Ok(entered.import_held(of.id, of.serial)), |_| Err(PoolError::NotOurs))
    }

    /// Imports an allocation that another process owns, or `part` of it.
    ///
    /// # Errors
    /// As [`Entered::import`] and [`Front::import_held`].
    ///
    /// # Driver calls
    /// Those of [`Entered::import`] and [`Front::import_held`].
    #[doc(alias = "cuMemImportFromShareableHandle")]
    fn import(
        &self,
        entered: &Entered<'_, D>,
        source: ImportSource,
        lent: Borrowed,
        class: Class,
        part: Option<Part>,
    ) -> PoolResult<VirtualHandle> {
        part.map_or_else(|| entered.import(source, lent, class), |_| Err(PoolError::NotOurs))
    }

    /// Returns what a caller sees at the address, if it is one of the front's. Passes no gate, and does not block.
    fn seen_at(&self, _address: DeviceAddress) -> Option<FrontView> {
        None
    }

    /// Returns the totals of allocations that have parts.
    fn totals(&self) -> SlabTotals {
        SlabTotals::default()
    }
}

/// The front of a pool whose callers hold only rows.
#[derive(Debug)]
struct Rows;

impl<D: Driver> Front<D> for Rows {}

impl<D: Driver> Pool<D> {
    /// Sets the front, for good, before callers hold anything. False if there is one already.
    pub fn set_front(&self, front: Arc<dyn Front<D>>) -> bool {
        self.front.set(front).is_ok()
    }

    /// Returns the front, which handles calls about handles and addresses of callers.
    pub fn front(&self) -> &dyn Front<D> {
        self.front.get().map_or(&Rows, |front| &**front)
    }

    /// Returns the source that can answer a question about `address` now. Passes no gate, and does not block.
    pub fn who_answers(&self, address: DeviceAddress) -> Known {
        let seen = self.front().seen_at(address);
        if seen.as_ref().is_some_and(|seen| seen.is_nobodys) {
            return Known::Nobody;
        }
        let mut known = self.holdings().who_knows(address);
        if let (Known::Away(facts), Some(seen)) = (&mut known, seen) {
            facts.reserved = seen.reserved;
            if let Some((range, handle, access)) = seen.part {
                (facts.mapping, facts.number, facts.access) = (range, handle.raw(), access);
            }
        }
        known
    }

    /// Returns the number of the memory at `address`. No other memory has it, and it stays the same while the memory
    /// moves.
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    pub fn memory_number(&self, address: DeviceAddress) -> Option<u64> {
        let part = self.front().seen_at(address).and_then(|seen| Some(seen.part?.1));
        let row = || self.ledger().mapped_at(address).map(|(_, row)| row.handle());
        part.or_else(row).map(VirtualHandle::raw)
    }

    /// Returns the range that the driver would report for `address`, if the driver cannot answer or would answer
    /// differently: ranges of [`crate::Holdings::range_of`], and the front's. Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_seen(&self, address: DeviceAddress) -> Option<VaRange> {
        let part = self.front().seen_at(address).and_then(|seen| Some(seen.part?.0));
        part.or_else(|| self.holdings().range_of(address))
    }
}

// Calls that a front is implemented with.
impl<D: Driver> Inside<'_, D> {
    /// Returns the pool.
    pub fn pool(&self) -> &Pool<D> {
        self.pool
    }

    /// Returns the identity of the allocation `handle`, and its size in bytes.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    pub fn identity(&self, handle: VirtualHandle) -> PoolResult<(AllocationId, u64)> {
        self.pool.ledger().rows.find(handle).map(|row| (row.id(), row.size_bytes()))
    }

    /// Adds a reference to the allocation `handle`. False if it is gone.
    pub fn retain(&self, handle: VirtualHandle) -> bool {
        self.pool.ledger().rows.add_reference(handle)
    }

    /// Refuses an allocation that is not on its device, as far as is known.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`]; [`PoolError::Offloaded`] if its tag is paused; [`PoolError::Driver`].
    pub fn check_here(&self, handle: VirtualHandle) -> PoolResult<()> {
        let ledger = self.pool.ledger();
        let row = ledger.rows.find(handle)?;
        if row.is_resident() {
            return Ok(());
        }
        if row.is_set_aside() && !row.is_lost() {
            return Err(PoolError::Offloaded { tag: row.class().tag.clone() });
        }
        let source = DriverError { op: DriverOp::Map, code: DriverCode::NOT_READY };
        let (object, size_bytes) = ("memory that is not there".to_owned(), row.size_bytes());
        Err(PoolError::Driver { object, size_bytes, device: None, source })
    }
}
