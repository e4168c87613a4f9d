//! A pool with slabs in front, used as NCCL uses a driver.

use std::ops::Deref;
use std::sync::Arc;

use sublet_suballoc::Slabs;
use vmm_pool::driver::sim::SimNode;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Location, VaRange,
};
use vmm_pool::{Class, Export, ImportSource, NewMemory, PeerId, PoolResult, VirtualHandle};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OWNER, SimPool, UNIT, free_addresses, free_bytes, reserve,
};

/// Has nobody written in `range`, which is the beginning of an allocation?
pub(crate) fn is_clear(pool: &SimPool, device: DeviceOrdinal, range: VaRange) -> bool {
    pool.driver().core().is_clear(device, range).expect("a readable range")
}

/// The size of the first slab.
pub(crate) const SLAB_BYTES: u64 = 16 << 20;

pub(crate) fn nccl() -> Class {
    Class { library: "nccl", tag: "nccl".to_owned(), ..Class::default() }
}

/// A pool with slabs in front.
#[derive(Debug)]
pub(crate) struct Slabbed {
    pool: SimPool,
    slabs: Arc<Slabs>,
}

impl Deref for Slabbed {
    type Target = SimPool;

    fn deref(&self) -> &SimPool {
        &self.pool
    }
}

impl Slabbed {
    pub(crate) fn slabs(&self) -> &Slabs {
        &self.slabs
    }
}

/// Memory that may be a cell.
pub(crate) fn new_memory(size_bytes: u64, prop: AllocationProp, class: Class) -> NewMemory {
    NewMemory { size_bytes, prop, class, is_alone: false }
}

/// Returns the reservation at `address`, as a caller sees it.
pub(crate) fn reserved_range(pool: &SimPool, address: DeviceAddress) -> Option<VaRange> {
    pool.front().seen_at(address)?.reserved
}

/// Returns the right of `place` that callers have set on the cell at `address`; `None` if there is no cell.
pub(crate) fn right_at(pool: &SimPool, address: DeviceAddress, place: Location) -> Option<i32> {
    let (.., access) = pool.front().seen_at(address)?.part?;
    Some(access.iter().find(|desc| desc.location == place).map_or(0, |desc| desc.flags))
}

/// Makes a pool that makes no slabs, and understands those of others.
pub(crate) fn pool(node: &SimNode) -> Slabbed {
    let (pool, slabs) = (crate::stage::pool(node), Arc::<Slabs>::default());
    assert!(pool.set_front(Arc::clone(&slabs) as _));
    Slabbed { pool, slabs }
}

pub(crate) fn slabbed(node: &SimNode) -> Slabbed {
    let pool = pool(node);
    pool.slabs().use_slabs(true);
    pool
}

pub(crate) fn create(pool: &SimPool, units: u64) -> PoolResult<VirtualHandle> {
    pool.front()
        .create(&pool.enter(), new_memory(units * UNIT, AllocationProp::pinned_on(DEVICE), nccl()))
}

/// Reserves addresses as the library does: the cell's, or the driver's.
fn addresses(pool: &SimPool, size_bytes: u64) -> VaRange {
    match pool.front().take_addresses(&pool.enter(), size_bytes, UNIT, "nccl") {
        Some(start) => VaRange::new(start, size_bytes),
        None => reserve(pool, size_bytes),
    }
}

pub(crate) fn place(
    pool: &SimPool,
    handle: VirtualHandle,
    units: u64,
    device: DeviceOrdinal,
) -> VaRange {
    let range = addresses(pool, units * UNIT);
    let entered = pool.enter();
    entered.pool().front().map(&entered, range, 0, handle).expect("mapped");
    entered
        .pool()
        .front()
        .set_access(&entered, range, &[AccessDesc::read_write(device)])
        .expect("access");
    range
}

/// Allocates as NCCL does: create, reserve, map, give access.
pub(crate) fn allocate(pool: &SimPool, units: u64) -> (VirtualHandle, VaRange) {
    let handle = create(pool, units).expect("memory");
    (handle, place(pool, handle, units, DEVICE))
}

pub(crate) fn free_range(pool: &SimPool, range: VaRange) {
    if pool.front().free_addresses(&pool.enter_giving_up(), range).is_err() {
        free_addresses(pool, range);
    }
}

/// Frees as NCCL does: retain, release, query the range, unmap, release, free the addresses.
pub(crate) fn free(pool: &SimPool, range: VaRange) {
    let entered = pool.enter_giving_up();
    let handle = entered.pool().front().retain_at(&entered, range.start).expect("it is mapped");
    entered.pool().front().release(&entered, handle).expect("retained");
    let seen = pool.range_seen(range.start);
    assert!(seen.is_none_or(|seen| seen == range), "{seen:?}");
    entered.pool().front().unmap(&entered, range).expect("unmapped");
    entered.pool().front().release(&entered, handle).expect("released");
    free_range(pool, range);
}

pub(crate) fn import(
    owner: &SimPool,
    handle: VirtualHandle,
    importer: &SimPool,
) -> PoolResult<VirtualHandle> {
    let export = owner.front().export(&owner.enter(), handle).expect("export");
    let entered = importer.enter();
    let fd = owner.redeem(export.id, export.serial, PeerId(1)).expect("a descriptor");
    if let Some(held) =
        entered.pool().front().import_held(&entered, &Export { serial: 0, ..export })?
    {
        return Ok(held);
    }
    let source = ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
    entered.pool().front().import(&entered, source, fd.into(), nccl(), export.part)
}

/// Counts the driver's handles, reservations and mappings.
pub(crate) fn objects(pool: &SimPool) -> [usize; 3] {
    let census = pool.driver().core().census();
    [census.handles, census.reservations, census.mappings]
}

pub(crate) fn assert_nothing_left(pool: &SimPool) {
    assert_eq!(objects(pool), [0; 3]);
    assert_eq!(free_bytes(pool, DEVICE), CAPACITY_BYTES);
    assert_eq!(pool.report().slabs, vmm_pool::SlabTotals::default());
}
