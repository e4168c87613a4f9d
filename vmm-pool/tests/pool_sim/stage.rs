//! A node with one pool a process, and a way to write and look at device bytes.

use std::collections::HashMap;
use std::sync::Arc;

use vmm_pool::budget::Counted;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, RawContext, VaRange,
};
use vmm_pool::{
    AllocationId, Class, Contents, HostBudget, ImportSource, Native, PeerId, Pool, PoolError,
    PoolResult, Selection, StepLog, Tags, VirtualHandle, Whose,
};

/// A pause and a resume of everything.
pub(crate) const WHOLE: Selection = Selection::Whole;

/// Memory of each of the two devices.
pub(crate) const CAPACITY_BYTES: u64 = 256 << 20;
/// The simulated driver's granularity.
pub(crate) const UNIT: u64 = GRANULARITY_BYTES;
/// The device that most tests use.
pub(crate) const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
/// The other one.
pub(crate) const OTHER: DeviceOrdinal = DeviceOrdinal(1);
/// Host memory without limit.
pub(crate) const UNLIMITED: HostBudget = HostBudget(None);

/// Whom imports of [`share`] name as their owner.
pub(crate) const OWNER: PeerId = PeerId(99);

pub(crate) use crate::process::SimPool;

/// A fresh node of two devices.
pub(crate) fn node() -> SimNode {
    SimNode::private(&[CAPACITY_BYTES; 2]).expect("a node under /dev/shm")
}

/// A pool with a driver of its own, as one process has, and files in memory as the node's devices are.
pub(crate) fn pool(node: &SimNode) -> SimPool {
    let driver = SimDriver::new(node.clone(), SimOptions::default());
    driver.make_current(DEVICE).expect("device 0");
    let pool = SimPool::new(Arc::new(driver), 2);
    pool.host_memory().set_file_dir("/dev/shm".into());
    pool
}

/// Memory whose contents are kept.
pub(crate) fn kept() -> Class {
    class(Contents::Keep)
}

/// Memory of a class of its own with this policy.
pub(crate) fn class(contents: Contents) -> Class {
    let tag = match contents {
        Contents::Keep => "",
        Contents::Discard => "scratch",
        Contents::DiscardByTag => "cache",
        Contents::File => "weights",
    };
    Class { library: "test", tag: tag.to_owned(), contents }
}

/// Free bytes of a device, as any process sees them.
pub(crate) fn free_bytes(pool: &SimPool, device: DeviceOrdinal) -> u64 {
    pool.driver().memory_of(device).expect("memory").free_bytes
}

/// Fresh addresses.
pub(crate) fn reserve(pool: &SimPool, size_bytes: u64) -> VaRange {
    let reserved = pool.driver().reserve(size_bytes, 0, DeviceAddress(0));
    VaRange::new(reserved.expect("addresses"), size_bytes)
}

/// Gives addresses back.
pub(crate) fn free_addresses(pool: &SimPool, range: VaRange) {
    pool.driver().free_addresses(range).expect("the whole of a reservation with nothing mapped");
}

/// Maps `handle` at fresh addresses with the access given.
pub(crate) fn map(
    pool: &SimPool,
    handle: VirtualHandle,
    size_bytes: u64,
    access: &[AccessDesc],
) -> VaRange {
    let range = reserve(pool, size_bytes);
    pool.map(range, 0, handle).expect("mapping");
    if !access.is_empty() {
        pool.set_access(range, access).expect("access");
    }
    range
}

/// Creates memory on `device`.
pub(crate) fn create(
    pool: &SimPool,
    device: DeviceOrdinal,
    units: u64,
    class: Class,
) -> VirtualHandle {
    let prop = AllocationProp::pinned_on(device);
    pool.create(units * UNIT, &prop, class).expect("memory")
}

/// Sixteen bytes that tell `seed` from any other.
pub(crate) fn pattern(seed: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes[8..].copy_from_slice(&(!seed).to_le_bytes());
    bytes
}

/// Fills `range` as `device` would.
pub(crate) fn write(pool: &SimPool, device: DeviceOrdinal, range: VaRange, bytes: [u8; 16]) {
    pool.driver().core().fill_device(device, range, &bytes).expect("a writable range");
}

/// Does all of `range` hold copies of `bytes`, as `device` sees it?
pub(crate) fn holds(
    pool: &SimPool,
    device: DeviceOrdinal,
    range: VaRange,
    bytes: [u8; 16],
) -> bool {
    pool.driver().core().device_holds(device, range, &bytes.repeat(256)).expect("a readable range")
}

/// Makes `importer` hold `handle` of `owner`, as through a ticket, and returns its handle there.
pub(crate) fn share(
    owner: &SimPool,
    handle: VirtualHandle,
    importer: &SimPool,
    importer_id: u64,
) -> VirtualHandle {
    let export = owner.export(handle).expect("export");
    let fd = owner.redeem(export.id, export.serial, PeerId(importer_id)).expect("a descriptor");
    let source = ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
    importer.import(source, fd.into(), kept()).expect("import")
}

/// Fetches what `importer` gave up from `owner`, and maps it again.
pub(crate) fn import_again(
    owner: &SimPool,
    importer: &SimPool,
    importer_id: u64,
) -> PoolResult<StepLog> {
    let mut descriptors = HashMap::new();
    for request in importer.import_requests() {
        assert_eq!(request.owner, OWNER);
        for id in request.ids {
            descriptors.insert(id, owner.hand_out(id, PeerId(importer_id))?);
        }
    }
    let mut log = importer.import_batch(descriptors)?;
    log.add(importer.map_imports()?);
    Ok(log)
}

/// Where a gate is, as calls find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateAt {
    /// All go in.
    Open,
    /// Those go in that give memory up.
    Offloaded,
    /// None does.
    Shut,
}

/// Where the gate of `pool` is. A call that is held back waits on, until the gate opens or the tests end.
pub(crate) fn gate_of(pool: &SimPool) -> GateAt {
    let goes_in = |call: fn(&Pool<SimDriver>)| {
        let (held_before, caller) = (pool.gate().waits(), Arc::clone(pool));
        let caller = std::thread::spawn(move || call(&caller));
        while pool.gate().waits() == held_before && !caller.is_finished() {
            std::thread::yield_now();
        }
        // It may have been one that an earlier look has left that was held back again.
        (0..1000).any(|_| {
            std::thread::yield_now();
            caller.is_finished()
        })
    };
    if goes_in(|pool| drop(pool.enter())) {
        GateAt::Open
    } else if goes_in(|pool| drop(pool.enter_giving_up())) {
        GateAt::Offloaded
    } else {
        GateAt::Shut
    }
}

/// Does it give nothing to importers?
pub(crate) fn is_frozen(pool: &SimPool) -> bool {
    let nobodys = pool.redeem(AllocationId([0; 16]), 0, PeerId(1));
    matches!(nobodys, Err(PoolError::Frozen))
}

/// Ends the streams that the pool keeps from step to step, as the end of a context does, so that the next step makes its own.
/// Says how many there are then.
pub(crate) fn end_streams(pool: &SimPool) -> usize {
    let _none = pool.take_plain_memory(RawContext(0));
    pool.driver().census().streams
}

/// A whole pause of one pool without peers.
pub(crate) fn pause(pool: &SimPool) {
    pool.save(&WHOLE, UNLIMITED).expect("saving");
    let log = pool.release_selected().expect("release");
    assert!(log.notes.is_empty(), "{:?}", log.notes);
}

/// A whole resume of one pool without peers.
pub(crate) fn resume(pool: &SimPool) {
    pool.create_own(&WHOLE).expect("memory");
    pool.restore_own(usize::MAX).expect("contents");
    drop(pool.commit_resume());
}

/// A plain allocation that is left to the driver.
pub(crate) fn native(
    size_bytes: u64,
    device: DeviceOrdinal,
    context: Option<RawContext>,
    counted: Counted,
) -> Native {
    Native { size_bytes, device, context, reason: "small", counted }
}

pub(crate) fn names(tags: &[&str]) -> Tags {
    Tags::Named(tags.iter().map(|tag| (*tag).to_owned()).collect::<std::collections::BTreeSet<_>>())
}

pub(crate) fn pause_tags(pool: &SimPool, tags: &[&str]) {
    pause_selected(pool, &Selection::Tagged(names(tags), Whose::Everybody));
}

pub(crate) fn pause_selected(pool: &SimPool, selection: &Selection) {
    pool.save(selection, UNLIMITED).expect("saved");
    let log = pool.release_selected().expect("released");
    assert_eq!(log.notes, [""; 0]);
}

pub(crate) fn resume_selected(pool: &SimPool, selection: &Selection) {
    pool.create_own(selection).expect("memory");
    pool.restore_own(usize::MAX).expect("contents");
    drop(pool.commit_resume());
}

pub(crate) fn resume_tags(pool: &SimPool, tags: &[&str]) {
    resume_selected(pool, &selected(tags));
}

/// Memory of these tags that is set aside.
pub(crate) fn selected(tags: &[&str]) -> Selection {
    Selection::SetAside(names(tags), Whose::Everybody)
}
