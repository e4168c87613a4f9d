//! The front: it answers for handles and addresses that callers hold, rows of the ledger or not.

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

/// New memory, as a caller wants it.
#[derive(Clone, Debug)]
pub struct NewMemory {
    /// Its size.
    pub size_bytes: u64,
    /// The properties that it is created with.
    pub prop: AllocationProp,
    /// Its class.
    pub class: Class,
    /// It is to be an allocation of its own: its caller may map it a second time.
    pub is_alone: bool,
}

/// An address of the front's own, as a caller sees it.
#[derive(Clone, Debug, Default)]
pub struct FrontView {
    /// The part that is mapped there: its addresses, its handle, and the rights that callers have set on it.
    pub part: Option<(VaRange, VirtualHandle, Vec<AccessDesc>)>,
    /// The range that a caller was given, if it is a part of what the driver has reserved.
    pub reserved: Option<VaRange>,
    /// The driver sees something there, and no caller has anything.
    pub is_nobodys: bool,
}

/// The calls about what callers hold. Each answers for rows by default, as [`Entered`], [`Inside`] and
/// [`Holdings`](crate::Holdings) do.
///
/// A front may give callers handles of its own ([`VirtualHandle::of_front`]), and addresses inside its own reservations.
/// No lock of the pool is held while it is called.
pub trait Front<D: Driver>: Debug + Send + Sync {
    /// Creates memory.
    ///
    /// # Errors
    /// As [`Entered::create`].
    ///
    /// # Driver calls
    /// Those of [`Entered::create`], at least where the front does not have the memory yet.
    #[doc(alias = "cuMemCreate")]
    fn create(&self, entered: &Entered<'_, D>, new: NewMemory) -> PoolResult<VirtualHandle> {
        entered.create(new.size_bytes, &new.prop, new.class)
    }

    /// Gives back one reference of what `handle` stands for.
    ///
    /// # Errors
    /// As [`Inside::release`].
    ///
    /// # Driver calls
    /// Those of [`Inside::release`], and what ends with its last part.
    #[doc(alias = "cuMemRelease")]
    fn release(&self, inside: &Inside<'_, D>, handle: VirtualHandle) -> PoolResult<()> {
        inside.release(handle)
    }

    /// One more reference to what is mapped there.
    ///
    /// # Errors
    /// As [`Inside::retain_at`]; [`PoolError::Driver`] for addresses of the front that nobody has.
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

    /// Maps the whole of what `handle` stands for.
    ///
    /// # Errors
    /// As [`Entered::map`]; [`PoolError::Driver`] too for what the front cannot map there.
    ///
    /// # Driver calls
    /// Those of [`Entered::map`] for a row; the front's own for what is none.
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

    /// Unmaps what is mapped inside `range`.
    ///
    /// # Errors
    /// As [`Inside::unmap`]; [`PoolError::Driver`] too for a part of what is mapped as a whole, and where nothing is
    /// mapped at addresses of the front.
    ///
    /// # Driver calls
    /// As [`Front::release`].
    #[doc(alias = "cuMemUnmap")]
    fn unmap(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        inside.unmap(range)
    }

    /// Sets who may reach what is mapped in `range`.
    ///
    /// # Errors
    /// As [`Entered::set_access`]; [`PoolError::Driver`] too where a part of the front's addresses has nothing mapped.
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

    /// May [`Front::take_addresses`] have some for this thread? Passes no gate.
    fn has_addresses(&self, _size_bytes: u64, _alignment: u64, _library: &str) -> bool {
        false
    }

    /// Addresses for a caller of `library`'s. None where the driver is to give them.
    ///
    /// # Driver calls
    /// `cuMemAddressReserve`, where the front has none left.
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

    /// Gives up addresses.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] for addresses that are the driver's to free; [`PoolError::Driver`] where something is
    /// mapped there, or they are not what was handed out.
    ///
    /// # Driver calls
    /// `cuMemAddressFree`, for the last of a reservation of the front.
    #[doc(alias = "cuMemAddressFree")]
    fn free_addresses(&self, inside: &Inside<'_, D>, range: VaRange) -> PoolResult<()> {
        inside.check_address_free(range).and(Err(PoolError::NotOurs))
    }

    /// Makes what `handle` stands for importable by others, and counts one ticket, as [`Entered::export`] does.
    ///
    /// # Errors
    /// As [`Entered::export`].
    ///
    /// # Driver calls
    /// `cuMemExportToShareableHandle`, once an allocation.
    #[doc(alias = "cuMemExportToShareableHandle")]
    fn export(&self, entered: &Entered<'_, D>, handle: VirtualHandle) -> PoolResult<Export> {
        entered.export(handle)
    }

    /// One more reference to what the ticket is of, when this process holds that allocation already, as
    /// [`Entered::import_held`] does.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] where there are no parts; [`PoolError::Driver`] for one that cannot be, or cannot be mapped.
    ///
    /// # Driver calls
    /// The front's own, where it has that part not mapped yet.
    fn import_held(
        &self,
        entered: &Entered<'_, D>,
        of: &Export,
    ) -> PoolResult<Option<VirtualHandle>> {
        of.part
            .map_or_else(|| Ok(entered.import_held(of.id, of.serial)), |_| Err(PoolError::NotOurs))
    }

    /// Imports `part` of what another process owns, or the whole.
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

    /// The address, where the front answers for it. Passes no gate, and waits for nothing.
    fn seen_at(&self, _address: DeviceAddress) -> Option<FrontView> {
        None
    }

    /// The totals of allocations that others are parts of.
    fn totals(&self) -> SlabTotals {
        SlabTotals::default()
    }
}

/// The front of callers that hold rows alone.
#[derive(Debug)]
struct Rows;

impl<D: Driver> Front<D> for Rows {}

impl<D: Driver> Pool<D> {
    /// Has `front` answer from now on, for good, before callers hold anything. False where one does already.
    pub fn set_front(&self, front: Arc<dyn Front<D>>) -> bool {
        self.front.set(front).is_ok()
    }

    /// The front: it answers for what callers hold.
    pub fn front(&self) -> &dyn Front<D> {
        self.front.get().map_or(&Rows, |front| &**front)
    }

    /// Tells who can answer a question about `address` now. Passes no gate, and waits for nothing.
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

    /// A number that the memory at `address` has alone, wherever it is.
    #[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
    pub fn memory_number(&self, address: DeviceAddress) -> Option<u64> {
        let part = self.front().seen_at(address).and_then(|seen| Some(seen.part?.1));
        let row = || self.ledger().mapped_at(address).map(|(_, row)| row.handle());
        part.or_else(row).map(VirtualHandle::raw)
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else: those
    /// of [`crate::Holdings::range_of`], and the front's. Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_seen(&self, address: DeviceAddress) -> Option<VaRange> {
        let part = self.front().seen_at(address).and_then(|seen| Some(seen.part?.0));
        part.or_else(|| self.holdings().range_of(address))
    }
}

// What a front is made with.
impl<D: Driver> Inside<'_, D> {
    /// The pool that it is about.
    pub fn pool(&self) -> &Pool<D> {
        self.pool
    }

    /// The identity of the allocation `handle`, and its size in bytes.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    pub fn identity(&self, handle: VirtualHandle) -> PoolResult<(AllocationId, u64)> {
        self.pool.ledger().rows.find(handle).map(|row| (row.id(), row.size_bytes()))
    }

    /// One more reference to the allocation `handle`. False where it is gone.
    pub fn retain(&self, handle: VirtualHandle) -> bool {
        self.pool.ledger().rows.add_reference(handle)
    }

    /// Refuses an allocation that is not on its device, as far as is known.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`]; [`PoolError::Offloaded`] where its tag is paused; [`PoolError::Driver`].
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
