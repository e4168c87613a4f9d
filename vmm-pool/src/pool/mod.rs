//! The pool: device memory of one process, and the calls that applications make of it.
//!
//! The ledger's lock is held for bookkeeping only, never across a driver call. A pause or resume
//! ([`crate::transition`]) excludes these calls through the gate, not through the lock: each is a method of
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

/// The allocations of one registration with a device outside the driver's view. Dropped, it holds them in place for ever.
#[must_use]
#[derive(Debug)]
pub struct Registered(Vec<VirtualHandle>);

impl Registered {
    /// True when it is of no memory of the pool's.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Device memory of one process, over one driver. Shared by all threads; no method blocks except on the
/// driver.
#[derive(Debug)]
pub struct Pool<D: Driver> {
    pub(crate) driver: Arc<D>,
    holdings: Arc<Holdings>,
    devices: Arc<Devices<D>>,
    host_memory: HostMemory<D>,
    natives: Natives,
    /// The owner of what callers hold that is no row; none where they hold rows alone.
    front: OnceLock<Arc<dyn Front<D>>>,
    pub(crate) deferred: Deferred<D>,
    waits: Waits<D>,
    gate: Gate,
    door: Door,
    /// The right to begin a pause or resume, while somebody has it. A leaf.
    right: Mutex<Weak<Right>>,
    /// Lists the contexts that the application has made for itself: their work must end before memory leaves.
    pub(crate) own_contexts: fn() -> Vec<RawContext>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) copies: CopyPolicy,
    /// The lenders that give memory up if there is no room.
    lenders: Lenders,
    /// The progress of the copies of a pause or resume under way.
    pub(crate) copied: Copied,
    /// Does the process run without some memory, since a pause by tag? It changes only behind a gate that is shut.
    runs_without_some: AtomicBool,
}

/// The right to begin a pause or resume, which nobody else has while this lives.
#[derive(Debug)]
pub(crate) struct Right;

impl<D: Driver> Pool<D> {
    /// See `Pool::new`.
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

    /// The right to begin a pause or resume, if nobody has it.
    pub(crate) fn take_right(&self) -> Option<Arc<Right>> {
        let mut held = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        if held.strong_count() > 0 {
            return None;
        }
        let right = Arc::new(Right);
        *held = Arc::downgrade(&right);
        Some(right)
    }

    /// The settings for contents that need not be copied, and for copies in host memory.
    pub fn copies(&self) -> &CopyPolicy {
        &self.copies
    }

    /// The count of device memory.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The driver below.
    pub fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// The memory that this process holds.
    pub fn holdings(&self) -> &Holdings {
        &self.holdings
    }

    /// The devices: their names, and where they are.
    pub fn devices(&self) -> &Devices<D> {
        &self.devices
    }

    /// Host memory for saved contents.
    pub fn host_memory(&self) -> &HostMemory<D> {
        &self.host_memory
    }

    /// Waits for devices, on threads of their own.
    pub fn waits(&self) -> &Waits<D> {
        &self.waits
    }

    /// Plain allocations that are left to the driver.
    pub fn natives(&self) -> &Natives {
        &self.natives
    }

    /// The lenders of device memory.
    pub fn lenders(&self) -> &Lenders {
        &self.lenders
    }

    /// Driver objects that nobody needs any more, and that the driver would not take back.
    pub fn deferred(&self) -> &Deferred<D> {
        &self.deferred
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.holdings.ledger()
    }

    /// The door of calls that ask the driver about work: shut while the process is frozen.
    pub fn door(&self) -> &Door {
        &self.door
    }

    /// Returns the gate where calls that touch device memory go in and out.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Goes in for calls that touch memory or make new; waits as long as memory is away.
    pub fn enter(&self) -> Entered<'_, D> {
        Entered(Inside { pool: self, pass: self.gate.pass(Passage::Use) })
    }

    /// Goes in for calls that give memory up or ask about it; waits only while a pause or resume is under way.
    pub fn enter_giving_up(&self) -> Inside<'_, D> {
        Inside { pool: self, pass: self.gate.pass(Passage::GiveUp) }
    }

    /// Gives memory back to the driver that the ledger has already forgotten. What the driver keeps is deferred.
    fn dispose(&self, mut row: Row) -> PoolResult<()> {
        let Some(physical) = row.take_physical() else {
            return Ok(());
        };
        let (size_bytes, device) = physical.extent();
        self.deferred.release(physical).about(|| row.describe(), size_bytes, device)
    }

    /// As [`Pool::dispose`], if what the caller requested is done already: a refusal is only logged.
    pub(crate) fn dispose_quietly(&self, garbage: impl IntoIterator<Item = Row>) {
        for row in garbage {
            if let Err(error) = self.dispose(row) {
                tracing::error!(%error, "memory that nobody holds stays until the next pause");
            }
        }
    }

    /// Returns the starts of the mappings inside `range`, and the ranges of those that the driver has.
    fn mapped_in(&self, range: VaRange) -> (Vec<u64>, Vec<VaRange>) {
        let ledger = self.ledger();
        let starts = ledger.mappings.inside(range).map(|found| found.range().start.0).collect();
        let present = ledger.mappings.inside(range).filter(|found| found.is_present());
        (starts, present.map(Mapping::range).collect())
    }
}

/// A call of the application's, past the gate that is open, or shut behind memory that is away: then the ledger answers. No
/// pause or resume begins before it is dropped. What may be called is a method of it. Of the calling thread alone.
#[derive(Debug)]
#[must_use = "dropping it leaves the gate"]
pub struct Inside<'a, D: Driver> {
    pub(crate) pool: &'a Pool<D>,
    pass: Pass<'a>,
}

/// The same past a gate that is open: all memory is there that is not set aside.
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
    /// The end of a registration: a pause takes its memory again, where nothing else keeps it.
    pub fn unregister(&self, registered: &Registered) {
        self.pool.ledger().rows.unregister(&registered.0);
    }

    /// Does the ledger alone answer, because memory was away when this thread went in? It stays so while the thread is
    /// inside.
    pub fn is_offloaded(&self) -> bool {
        self.pass.is_offloaded()
    }

    /// Gives back one reference of `handle`.
    ///
    /// # Errors
    /// [`PoolError::StaleHandle`] (also when its references are used up),
    /// [`PoolError::Driver`]: the reference is gone all the same, and the memory goes at the next pause or
    /// resume.
    ///
    /// # Driver calls
    /// `cuMemRelease`, when this was the last use of resident memory.
    #[doc(alias = "cuMemRelease")]
    pub fn release(&self, handle: VirtualHandle) -> PoolResult<()> {
        let garbage = self.pool.ledger().drop_reference(handle)?;
        garbage.map_or(Ok(()), |row| self.pool.dispose(row))
    }

    /// One more reference to whatever is mapped at `address`.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool maps nothing there.
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

    /// Unmaps whatever the pool has mapped inside `range`: one mapping, many, or none.
    ///
    /// # Errors
    /// [`PoolError::NotOurs`] when the pool has none there; [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemUnmap` when anything in the range is resident, then `cuMemRelease` for what nobody holds
    /// any more.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(&self, range: VaRange) -> PoolResult<()> {
        let (starts, present) = self.pool.mapped_in(range);
        if starts.is_empty() {
            return Err(PoolError::NotOurs);
        }
        // The driver takes the whole range in one call unless a part of it is away.
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
                // The driver may refuse the next one, and a pause must not read what is unmapped.
                let garbage = self.pool.ledger().forget_mappings(&[part.start.0]);
                self.pool.dispose_quietly(garbage);
            }
        }
        let garbage = self.pool.ledger().forget_mappings(&starts);
        self.pool.dispose_quietly(garbage);
        Ok(())
    }

    /// Refuses to give `range` back to the driver as a reservation while a mapping lives in it whose memory is away, which
    /// the driver itself cannot see.
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

    /// Is `address` in memory made by [`Entered::block_allocate`]?
    pub fn is_block(&self, address: DeviceAddress) -> bool {
        let ledger = self.pool.ledger();
        ledger.mapped_at(address).is_some_and(|(_, row)| row.block_size_bytes().is_some())
    }
}

impl<D: Driver> Entered<'_, D> {
    /// For a call that has to wait for another process: goes out, waits until the gate is open, and is back inside. So
    /// a pause need not wait for it. Does nothing where the thread is inside more than once.
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
        // Counting may have begun meanwhile, and has then passed over what the ledger did not have.
        physical.charge_with(|bytes, device| self.pool.budget.charge_anyway(device, bytes));
        Ok(ledger.rows.insert(new, physical))
    }

    /// Makes memory that is in no row yet.
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

    /// Sets who may reach the pool's mappings in `range`.
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
        // What is set aside gets its rights when it comes back.
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
        // A mapping of which a part has got them has them as a whole when it is mapped again: the driver keeps rights by its own
        // pages, we by mapping.
        let starts: Vec<_> = touched.iter().map(|(start, _)| *start).collect();
        self.pool.ledger().mappings.add_access(&starts, access);
        Ok(())
    }

    /// Marks every allocation mapped in `range` as one that a pause must leave in place, because a
    /// device outside the driver's view may hold its pages. Returns how many bytes that concerns.
    pub fn pin(&self, range: VaRange, reason: &'static str) -> u64 {
        self.pool.ledger().pin(range, reason)
    }

    /// As [`Entered::pin`], for as long as a registration with such a device lasts: until it is given to
    /// [`Inside::unregister`].
    pub fn register(&self, range: VaRange, reason: &'static str) -> Registered {
        Registered(self.pool.ledger().register(range, reason))
    }
}

/// An identity for a new allocation of so many bytes on `device`.
fn new_id(size_bytes: u64, device: Option<DeviceOrdinal>) -> PoolResult<AllocationId> {
    let no_id = DriverError { op: DriverOp::Create, code: DriverCode::UNKNOWN };
    let about = || "no randomness for an allocation's identity".to_owned();
    AllocationId::random().ok_or(no_id).about(about, size_bytes, device)
}
