use std::time::Instant;

use super::*;
use crate::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Location, LocationKind, VaRange,
};
use crate::{
    Away, BroughtIn, Class, Copies, FromOffloaded, HostBudget, Schedule, Selection, Unfreezable,
};

const GPU: DeviceOrdinal = DeviceOrdinal(0);
const SOON: Duration = Duration::from_mins(1);

fn pool() -> (Arc<Pool<SimDriver>>, Keeper<SimDriver>) {
    let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
    driver.make_current(GPU).unwrap();
    Pool::new(Arc::new(driver), 1, Vec::new)
}

/// Makes a pool with one allocation full of sevens, which is off its device.
fn paused() -> (Arc<Pool<SimDriver>>, Keeper<SimDriver>, VaRange) {
    let (pool, keeper) = pool();
    let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
    let handle = entered.create(GRANULARITY_BYTES, &prop, Class::default()).unwrap();
    let start = pool.driver().reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
    let range = VaRange::new(start, GRANULARITY_BYTES);
    entered.map(range, 0, handle).unwrap();
    entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
    drop(entered);
    pool.driver().core().fill_device(GPU, range, &[7; 16]).unwrap();
    let never = crossbeam_channel::never();
    let drained = keeper.close().unwrap().drain(Instant::now() + SOON, &never);
    let (whole, budget) = (Selection::Whole, |_| HostBudget(None));
    let quiesced = drained.unwrap().0;
    let prepared = quiesced.prepare(whole, &[], Copies::All, budget, Schedule::SaveFirst);
    let keeper = prepared.unwrap().0.depart().release(Schedule::SaveMeanwhile).unwrap().0.end();
    (pool, keeper, range)
}

#[test]
fn a_frozen_pool_holds_no_pins_and_calls_no_driver_until_it_is_thawed() {
    let (pool, keeper, range) = paused();
    let pins = || pool.driver().core().census().host_ranges;
    let before = pins();
    assert!(before > 0, "saved contents lie in pinned memory");
    let (frozen, log) = keeper.freeze(SOON).unwrap();
    assert_eq!(pins(), 0);
    assert!(log.steps.iter().any(|step| step.name == "unpin host memory"));
    let calls = pool.driver().faults().calls_total();
    assert_eq!(pool.host_memory().bring_in(pool.gate(), u64::MAX).unwrap(), BroughtIn::NotNow);
    assert_eq!(pool.host_memory().give_idle_chunk_back(pool.gate()).unwrap(), 0);
    assert_eq!(pool.driver().faults().calls_total(), calls);
    let (keeper, _) = frozen.thaw();
    assert_eq!(pins(), before);
    let shut = keeper.shut::<FromOffloaded>(Instant::now() + SOON, || false).unwrap();
    let (arriving, _) = shut.create_own(Away::Whole).unwrap();
    let restored = arriving.restore_rest(0).unwrap().0.map_imports().unwrap().0;
    drop(restored.commit().0.end());
    assert!(pool.driver().core().device_holds(GPU, range, &[7; 16]).unwrap());
}

#[test]
fn a_pool_that_runs_is_not_frozen_and_goes_on() {
    let (pool, keeper) = pool();
    let failed = keeper.freeze(SOON).unwrap_err();
    assert_eq!(failed.error, NotFrozen::NotAway);
    assert!(pool.host_memory().bring_in(pool.gate(), u64::MAX).unwrap() == BroughtIn::Enough);
}

#[test]
fn host_memory_of_the_drivers_allocator_keeps_a_process_from_being_frozen() {
    let (pool, _keeper) = pool();
    assert_eq!(pool.unfreezable(), Unfreezable::default());
    let prop = AllocationProp {
        location: Location { kind: LocationKind::HOST_NUMA, id: 0 },
        ..AllocationProp::pinned_on(GPU)
    };
    let made = pool.enter().create(GRANULARITY_BYTES, &prop, Class::default());
    assert!(made.is_ok());
    let host_bytes = GRANULARITY_BYTES;
    assert_eq!(pool.unfreezable(), Unfreezable { host_bytes, ..Unfreezable::default() });
}
