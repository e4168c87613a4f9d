//! The plain memory of a context that is being destroyed, and plain memory that was left to the driver.
//!
//! The driver immediately gives the value of a destroyed context to the next context. So two contexts may have had the
//! same value. A caller that destroys a context detaches its memory first. Then nobody else finds the memory by that
//! value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use super::accounts::Reasons;
use super::{Inside, Pool};
use crate::budget::{Budget, Charge, Counted};
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, RawContext, VaRange};
use crate::error::PoolError;
use crate::ledger::Block;
use sublet_sync::sync::lock;

/// A plain allocation that was left to the driver.
#[derive(Debug)]
pub struct Native {
    /// Its size.
    pub size_bytes: u64,
    /// The device that it is on.
    pub device: DeviceOrdinal,
    /// The context in which it was allocated, if that is known.
    pub context: Option<RawContext>,
    /// The reason why it was left to the driver.
    pub reason: &'static str,
    /// The charge against a budget for it.
    pub counted: Counted,
}

/// Plain allocations that the pool only counts, by address. Its lock is a leaf, except for the lock of a budget's
/// account.
#[derive(Debug)]
pub struct Natives {
    budget: Arc<Budget>,
    all: Mutex<BTreeMap<u64, Native>>,
}

impl Natives {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, all: Mutex::default() }
    }

    /// Counts an allocation that the driver has made at `address`.
    pub fn allocated(&self, address: DeviceAddress, mut native: Native) {
        let (size_bytes, device) = (native.size_bytes, native.device);
        let mut all = lock(&self.all);
        // The charge from before the call may be for another device or a smaller size. The memory exists, so its real
        // size is charged.
        if let Counted::Yes(charge) = &mut native.counted
            && !charge.as_ref().is_some_and(|it| it.is(size_bytes))
        {
            *charge = self.budget.charge_anyway(Some(device), size_bytes);
        }
        all.insert(address.0, native);
    }

    /// Forgets the allocation at `address`.
    pub fn freed(&self, address: DeviceAddress) {
        lock(&self.all).remove(&address.0);
    }

    /// Returns the devices that the allocations are on.
    pub(super) fn devices(&self) -> BTreeSet<DeviceOrdinal> {
        lock(&self.all).values().map(|native| native.device).collect()
    }

    /// Adds allocations to `reasons`, of devices with at least `least_bytes` of them.
    pub(super) fn add_to(&self, reasons: &mut Reasons, least_bytes: u64) {
        let all = lock(&self.all);
        let mut bytes: BTreeMap<DeviceOrdinal, u64> = BTreeMap::new();
        for native in all.values() {
            *bytes.entry(native.device).or_default() += native.size_bytes;
        }
        let matters = |native: &&Native| bytes[&native.device] >= least_bytes;
        for native in all.values().filter(matters) {
            reasons.add(native.device, native.reason, native.size_bytes);
        }
    }

    /// Makes all allocations count against a budget that do not count yet.
    pub(super) fn charge_all(&self, make: impl Fn(u64, Option<DeviceOrdinal>) -> Option<Charge>) {
        for native in lock(&self.all).values_mut() {
            if let Counted::Yes(charge @ None) = &mut native.counted {
                *charge = make(native.size_bytes, Some(native.device));
            }
        }
    }
}

/// The plain memory of a context: blocks, and the memory that was left to the driver.
#[derive(Debug, Default)]
#[must_use = "it belongs to no context any more"]
pub struct PlainMemory {
    blocks: Vec<Block>,
    natives: Vec<DeviceAddress>,
}

impl PlainMemory {
    /// Returns the ranges of the blocks.
    pub fn blocks(&self) -> impl Iterator<Item = VaRange> {
        self.blocks.iter().map(|block| block.range)
    }

    /// Returns the number of allocations that were left to the driver.
    pub fn natives(&self) -> usize {
        self.natives.len()
    }
}

impl<D: Driver> Pool<D> {
    /// Detaches the plain memory of `context`, which is about to be destroyed. [`crate::Inside::plain_memory_ends`] or
    /// [`Pool::plain_memory_stays`] must follow. From now on nobody finds the memory by the context's value, which
    /// another context may get immediately. Also ends Sublet's streams in the context. No step of a pause or resume may
    /// be under way.
    ///
    /// # Driver calls
    /// `cuStreamDestroy`, for streams of all contexts.
    #[doc(alias = "cuCtxDestroy")]
    pub fn take_plain_memory(&self, context: RawContext) -> PlainMemory {
        self.deferred.end_streams();
        let blocks = self.ledger().mappings.take_blocks(context);
        let mut natives = Vec::new();
        for (address, native) in &mut *lock(&self.natives.all) {
            if native.context.take_if(|own| *own == context).is_some() {
                natives.push(DeviceAddress(*address));
            }
        }
        PlainMemory { blocks, natives }
    }

    /// Attaches memory to `context` again, which was not destroyed after all. Skips memory that is gone.
    pub fn plain_memory_stays(&self, context: RawContext, taken: PlainMemory) {
        let mut ledger = self.ledger();
        for block in taken.blocks {
            if ledger.mappings.is_nobodys(block) {
                ledger.mappings.set_context(block.start().0, context);
            }
        }
        drop(ledger);
        let mut natives = lock(&self.natives.all);
        for address in taken.natives {
            if let Some(native) = natives.get_mut(&address.0) {
                native.context.get_or_insert(context);
            }
        }
    }
}

impl<D: Driver> Inside<'_, D> {
    /// Frees memory that was detached from a context, also opened blocks, however often they are open: the context and
    /// its work have ended. A block that the driver refuses to unmap stays, and is counted. Memory that was left to the
    /// driver has ended with the context.
    #[doc(alias = "cuCtxDestroy")]
    pub fn plain_memory_ends(&self, taken: PlainMemory) {
        let PlainMemory { mut blocks, natives } = taken;
        for address in natives {
            // The driver may have given the address to another thread by now, in another context.
            let mut all = lock(&self.pool.natives.all);
            if all.get(&address.0).is_some_and(|native| native.context.is_none()) {
                all.remove(&address.0);
            }
        }
        blocks.retain(|block| self.pool.ledger().mappings.is_nobodys(*block));
        for block in blocks {
            match self.block_give_up(block) {
                Ok(()) | Err(PoolError::NotOurs) => {}
                Err(error) => {
                    tracing::error!(%error, address = %block.start(), "a block outlives its context");
                }
            }
        }
    }
}
