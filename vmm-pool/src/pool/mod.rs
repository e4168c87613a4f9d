//! The pool: device memory of one process, and the calls that applications make of it.
//!
//! The ledger's lock is held for bookkeeping only, never across a driver call. A pause or resume
//! ([`crate::transition`]) excludes these calls through the gate, not through the lock. Each call is a method of
//! [`Entered`], which only the gate gives out.

#![expect(unsafe_code, reason = "unmaps, releases and frees through the driver")]

mod accounts;
mod blocks;
mod copies;
mod devices;
mod front;
mod holdings;
mod homes;
mod host_files;
mod host_memory;
mod plain;
mod questions;
mod room;
mod sharing;

use std::ops::Deref;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

pub use copies::{CopyPolicy, PieceBytes};
pub use devices::Devices;
pub use front::{Front, FrontView, NewMemory};
pub use holdings::Holdings;
pub use homes::frame_prop;
pub use host_memory::HostMemory;
pub use plain::{Native, Natives, PlainMemory};
pub use questions::AwayByTag;
pub use room::{Lender, Lenders};
pub use sharing::{Borrowed, ImportSource};

use crate::asking::Door;
use crate::budget::Budget;
use crate::deferred::{Deferred, Physical};
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverError,
    DriverOp, RawContext, VaRange,
};
use crate::error::{Describe, PoolError, PoolResult};
use crate::gate::{Gate, Pass, Passage};
use crate::ids::{AllocationId, VirtualHandle};
use crate::ledger::{Class, Ledger, Mapping, NewRow, Origin, Row};
use crate::report::Copied;
use crate::waits::Waits;

/// The allocations of one registration with a device outside the driver's view. If this is dropped, they stay in place
/// for ever.
#[must_use]
#[derive(Debug)]
pub struct Registered(Vec<VirtualHandle>);

impl Registered {
    /// Has the registration no memory of the pool's?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The device memory of one process, on one driver. All threads share it. Its methods block only on the driver.
#[derive(Debug)]
pub struct Pool<D: Driver> {
    pub(crate) driver: Arc<D>,
    holdings: Arc<Holdings>,
    devices: Arc<Devices<D>>,
    host_memory: HostMemory<D>,
    natives: Natives,
    /// The owner of handles and addresses that are no rows; none if callers hold only rows.
    front: OnceLock<Arc<dyn Front<D>>>,
    pub(crate) deferred: Deferred<D>,
    waits: Waits<D>,
    gate: Gate,
    door: Door,
    /// The right to begin a pause or resume, while somebody has it. Its lock is a leaf.
    right: Mutex<Weak<Right>>,
    /// Lists the contexts that the application has created: their work must end before memory leaves.
    pub(crate) own_contexts: fn() -> Vec<RawContext>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) copies: CopyPolicy,
    /// The lenders, which give memory up if there is no room.
    lenders: Lenders,
    /// The progress of the copies of a pause or resume under way.
    pub(crate) copied: Copied,
    /// True while the process runs without some memory, since a pause by tag. It changes only while the gate is shut.
    runs_without_some: AtomicBool,
}

/// The right to begin a pause or resume. Nobody else has it while this lives.
#[derive(Debug)]
pub(crate) struct Right;

impl<D: Driver> Pool<D> {
    /// As `Pool::new`, but returns the bare right.
    pub(crate) fn with_right(
        driver: Arc<D>,
        toucher_threads: usize,
        own_contexts: fn() -> Vec<RawContext>,
    ) -> (Self, Arc<Right>) {
        let right = Arc::new(Right);
        let holdings = Arc::<Holdings>::default();
        let devices = Arc::new(Devices::new(Arc::clone(&driver)));
        let host_memory =
            HostMemory::new(Arc::clone(&holdings), Arc::clone(&devices), toucher_threads);
        let budget = Arc::new(Budget::default());
        let pool = Self {
            deferred: Deferred::new(Arc::clone(&driver)),
            waits: Waits::new(Arc::clone(&driver)),
            driver,
            holdings,
            devices,
            host_memory,
            natives: Natives::new(Arc::clone(&budget)),
            front: OnceLock::new(),
            gate: Gate::default(),
            runs_without_some: AtomicBool::new(false),
            door: Door::default(),
            right: Mutex::new(Arc::downgrade(&right)),
            own_contexts,
            budget,
            copies: CopyPolicy::default(),
            lenders: Lenders::default(),
            copied: Copied::default(),
        };
        (pool, right)
    }

    /// Returns the right to begin a pause or resume, if nobody has it.
    pub(crate) fn take_right(&self) -> Option<Arc<Right>> {
        let mut held = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        if held.strong_count() > 0 {
            return None;
        }
        let right = Arc::new(Right);
        *held = Arc::downgrade(&right);
        Some(right)
    }

    /// Returns the settings for contents that need not be copied, and for copies in host memory.
    pub fn copies(&self) -> &CopyPolicy {
        &self.copies
    }

    /// Returns the count of device memory.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the driver below.
    pub fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// Returns the memory that this process holds.
    pub fn holdings(&self) -> &Holdings {
        &self.holdings
    }

    /// Returns the devices: their names and places.
    pub fn devices(&self) -> &Devices<D> {
        &self.devices
    }

    /// Returns the host memory for saved contents.
    pub fn host_memory(&self) -> &HostMemory<D> {
        &self.host_memory
    }

    /// Returns the waits for devices, which run on separate threads.
    pub fn waits(&self) -> &Waits<D> {
        &self.waits
    }

    /// Returns the plain allocations that were left to the driver.
    pub fn natives(&self) -> &Natives {
        &self.natives
    }

    /// Returns the lenders of device memory.
    pub fn lenders(&self) -> &Lenders {
        &self.lenders
    }

    /// Returns the unneeded driver objects that the driver refused to release.
    pub fn deferred(&self) -> &Deferred<D> {
        &self.deferred
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.holdings.ledger()
    }

    /// Returns the door for calls that ask the driver about work. It is shut while the process is frozen.
    pub fn door(&self) -> &Door {
        &self.door
    }

    /// Returns the gate that calls on device memory pass in and out.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Enters the gate for a call that touches or allocates memory. Waits while memory is off its device.
    pub fn enter(&self) -> Entered<'_, D> {
        Entered(Inside { pool: self, pass: self.gate.pass(Passage::Use) })
    }

    /// Enters the gate for a call that gives memory up or asks about it. Waits only while a pause or resume is under
    /// way.
    pub fn enter_giving_up(&self) -> Inside<'_, D> {
        Inside { pool: self, pass: self.gate.pass(Passage::GiveUp) }
    }

    /// Releases memory to the driver that the ledger has already removed. What the driver refuses is deferred.
    fn dispose(&self, mut row: Row) -> PoolResult<()> {
        let Some(physical) = row.take_physical() else {
            return Ok(());
        };
        let (size_bytes, device) = physical.extent();
        self.deferred.release(physical).about(|| row.describe(), size_bytes, device)
    }

    /// As [`Pool::dispose`], but only logs a refusal, because the caller's request is done already.
    pub(crate) fn dispose_quietly(&self, garbage: impl IntoIterator<Item = Row>) {
        for row in garbage {
            if let Err(error) = self.dispose(row) {
                tracing::error!(%error, "memory that nobody holds stays until the next pause");
            }
        }
    }

    /// Returns the starts of the mappings inside `range`, and the ranges of those that are in the driver's page tables.
    fn mapped_in(&self, range: VaRange) -> (Vec<u64>, Vec<VaRange>) {
        let ledger = self.ledger();
        let starts = ledger.mappings.inside(range).map(|found| found.range().start.0).collect();
        let present = ledger.mappings.inside(range).filter(|found| found.is_present());
        (starts, present.map(Mapping::range).collect())
    }
}

/// A call of the application's that has passed the gate. The gate is open, or it is shut while memory is off its
/// device: then the ledger answers. No pause or resume begins before this is dropped. It belongs to the calling thread
/// alone, and its methods are the calls that are possible there.
#[derive(Debug)]
#[must_use = "dropping it leaves the gate"]
pub struct Inside<'a, D: Driver> {
    pub(crate) pool: &'a Pool<D>,
    pass: Pass<'a>,
}

/// A call of the application's that has passed the open gate: all memory is on its device, except memory that is set
/// aside.
#[derive(Debug)]
#[must_use = "dropping it leaves the gate"]
pub struct Entered<'a, D: Driver>(Inside<'a, D>);

impl<'a, D: Driver> Deref for Entered<'a, D> {
    type Target = Inside<'a, D>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<D: Driver> Inside<'_, D> {
    /// Ends a registration: a pause may release its memory again, unless something else keeps it in place.
    pub fn unregister(&self, registered: &Registered) {
        self.pool.ledger().rows.unregister(&registered.0);
    }

    /// Does the ledger alone answer, because memory was off its device when this thread went in? The answer stays true
    /// while the thread is inside.
    pub fn is_offloaded(&self) -> bool {
        self.pass.is_offloaded()
    }

    /// Drops one reference of `handle`.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] (also if its references are used up); [`PoolError::Driver`]: the reference is dropped
    /// all the same, and the next pause or resume retries the release.
    ///
    /// # Driver calls
    /// `cuMemRelease`, if this was the last use of resident memory.
    #[doc(alias = "cuMemRelease")]
    pub fn release(&self, handle: VirtualHandle) -> PoolResult<()> {
        let garbage = self.pool.ledger().drop_reference(handle)?;
        garbage.map_or(Ok(()), |row| self.pool.dispose(row))
    }

    /// Adds a reference to the memory that is mapped at `address`.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] if the pool maps nothing there.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn retain_at(&self, address: DeviceAddress) -> PoolResult<VirtualHandle> {
        let mut ledger = self.pool.ledger();
        let handle = ledger.mappings.at(address).ok_or(PoolError::NotOurs)?.allocation();
        if ledger.rows.add_reference(handle) { Ok(handle) } else { Err(PoolError::NotOurs) }
    }

    /// Returns the properties that `handle` was created with.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`].
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub fn properties(&self, handle: VirtualHandle) -> PoolResult<AllocationProp> {
        Ok(*self.pool.ledger().rows.find(handle)?.prop())
    }

    /// Unmaps all that the pool has mapped inside `range`: one mapping, or several.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool has none there; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemUnmap` if anything in the range is resident, then `cuMemRelease` for memory that nobody holds any more.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(&self, range: VaRange) -> PoolResult<()> {
        let (starts, present) = self.pool.mapped_in(range);
        if starts.is_empty() {
            return Err(PoolError::NotOurs);
        }
        // One driver call unmaps the whole range, unless a part of it is off its device.
        let is_whole = present.len() == starts.len();
        let parts = if is_whole { vec![range] } else { present };
        for part in parts {
            // SAFETY: the application asks for its own range to go; keeping its work off it is its duty,
            // as it is without the pool.
            unsafe { self.pool.driver.unmap(part) }.about(
                || format!("mapping at {}", part.start),
                part.size_bytes,
                None,
            )?;
            if !is_whole {
                // The driver may refuse the next part, and a pause must not read memory that is unmapped.
                let garbage = self.pool.ledger().forget_mappings(&[part.start.0]);
                self.pool.dispose_quietly(garbage);
            }
        }
        let garbage = self.pool.ledger().forget_mappings(&starts);
        self.pool.dispose_quietly(garbage);
        Ok(())
    }

    /// Refuses to free the reservation `range` while it has a mapping whose memory is off its device. The driver itself
    /// cannot see such a mapping.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    pub fn check_address_free(&self, range: VaRange) -> PoolResult<()> {
        let (starts, present) = self.pool.mapped_in(range);
        if present.len() == starts.len() {
            return Ok(());
        }
        let refused = DriverError { op: DriverOp::AddressFree, code: DriverCode::INVALID_VALUE };
        Err(refused).about(|| format!("addresses at {}", range.start), range.size_bytes, None)
    }

    /// Is `address` in memory from [`Entered::block_allocate`]?
    pub fn is_block(&self, address: DeviceAddress) -> bool {
        let ledger = self.pool.ledger();
        ledger.mapped_at(address).is_some_and(|(_, row)| row.block_size_bytes().is_some())
    }
}

impl<D: Driver> Entered<'_, D> {
    /// Leaves the gate, waits until it is open, and goes in again. It is for a call that waits for another process: a
    /// pause need not wait for that call. Does nothing if the thread is inside more than once.
    pub fn step_aside(&self) {
        self.pass.step_aside();
    }

    /// Creates memory.
    ///
    /// # Errors
    /// [`PoolError::Driver`], [`PoolError::OverBudget`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    #[doc(alias = "cuMemCreate")]
    pub fn create(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        class: Class,
    ) -> PoolResult<VirtualHandle> {
        let device = prop.location.as_device();
        let id = new_id(size_bytes, device)?;
        let mut physical = self.make(size_bytes, prop, || "new allocation".to_owned())?;
        let new = NewRow { id, size_bytes, prop: *prop, origin: Origin::Own, class };
        let mut ledger = self.pool.ledger();
        // Counting may have begun meanwhile. It has then skipped this memory, which was not in the ledger yet.
        physical.charge_with(|bytes, device| self.pool.budget.charge_anyway(device, bytes));
        Ok(ledger.rows.insert(new, physical))
    }

    /// Creates memory that has no row yet.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemCreate`.
    pub(crate) fn make(
        &self,
        size_bytes: u64,
        prop: &AllocationProp,
        what: impl FnOnce() -> String,
    ) -> PoolResult<Physical> {
        let (device, budget) = (prop.location.as_device(), &self.pool.budget);
        let charge = budget.charge(device, size_bytes)?;
        let raw = self.pool.driver.create(size_bytes, prop).about(what, size_bytes, device)?;
        Ok(Physical::new(raw, size_bytes, device).charged(charge))
    }

    /// Maps the whole of `handle` at `range`.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemMap`.
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, range: VaRange, offset_bytes: u64, handle: VirtualHandle) -> PoolResult<()> {
        let (raw, device) = self.pool.ledger().begin_mapping(range, offset_bytes, handle)?;
        let about = || format!("mapping at {}", range.start);
        if let Err(error) = self.pool.driver.map(range, raw) {
            let garbage = self.pool.ledger().forget_mappings(&[range.start.0]);
            self.pool.dispose_quietly(garbage);
            return Err(error).about(about, range.size_bytes, device);
        }
        let is_recorded = self.pool.ledger().mappings.made(range);
        if !is_recorded {
            // SAFETY: another thread has unmapped the range since, by its record: that is what holds.
            let unmapped = unsafe { self.pool.driver.unmap(range) };
            unmapped.about(about, range.size_bytes, device)?;
        }
        Ok(())
    }

    /// Sets the access rights of the pool's mappings in `range`.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool has none there; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemSetAccess`.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> PoolResult<()> {
        let touched = self.pool.ledger().mappings.begin_access(range);
        if touched.is_empty() {
            return Err(PoolError::NotOurs);
        }
        // Memory that is set aside gets its rights when a resume maps it.
        let mut present: Vec<_> = touched.iter().filter_map(|(_, part)| *part).collect();
        if present.len() == touched.len() {
            present = vec![range];
        }
        for part in present {
            self.pool.driver.set_access(part, access).about(
                || format!("access to {}", part.start),
                part.size_bytes,
                None,
            )?;
        }
        // If a part of a mapping got the rights, a resume sets them on the whole mapping. The driver records rights for
        // each of its pages, the ledger for each mapping.
        let starts: Vec<_> = touched.iter().map(|(start, _)| *start).collect();
        self.pool.ledger().mappings.add_access(&starts, access);
        Ok(())
    }

    /// Pins every allocation that is mapped in `range`: a pause must leave it in place, because a device outside the
    /// driver's view may hold its pages. Returns the number of bytes that were not pinned before.
    pub fn pin(&self, range: VaRange, reason: &'static str) -> u64 {
        self.pool.ledger().pin(range, reason)
    }

    /// As [`Entered::pin`], for as long as a registration with such a device lasts. [`Inside::unregister`] ends it.
    pub fn register(&self, range: VaRange, reason: &'static str) -> Registered {
        Registered(self.pool.ledger().register(range, reason))
    }
}

/// Makes an identity for a new allocation of `size_bytes` on `device`.
fn new_id(size_bytes: u64, device: Option<DeviceOrdinal>) -> PoolResult<AllocationId> {
    let no_id = DriverError { op: DriverOp::Create, code: DriverCode::UNKNOWN };
    let about = || "no randomness for an allocation's identity".to_owned();
    AllocationId::random().ok_or(no_id).about(about, size_bytes, device)
}
