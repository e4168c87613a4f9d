use std::time::Duration;

use super::*;
use crate::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use crate::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use crate::error::PoolError;
use crate::{Class, Copies, HostBudget, Pool, Schedule, Selection};

#[test]
fn what_the_disk_loses_before_its_flush_has_not_moved() {
    const GPU: DeviceOrdinal = DeviceOrdinal(0);
    let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
    driver.make_current(GPU).unwrap();
    let (pool, keeper) = Pool::new(Arc::new(driver), 1, Vec::new);
    let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
    let handle = entered.create(GRANULARITY_BYTES, &prop, Class::default()).unwrap();
    let start = pool.driver().reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
    let range = VaRange::new(start, GRANULARITY_BYTES);
    entered.map(range, 0, handle).unwrap();
    entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
    drop(entered);
    pool.driver().core().fill_device(GPU, range, &[7; 16]).unwrap();
    let soon = Instant::now() + Duration::from_mins(1);
    let drained = keeper.close().unwrap().drain(soon, &crossbeam_channel::never());
    let (quiesced, _) = drained.unwrap();
    let saved = quiesced.prepare(
        Selection::Whole,
        &[],
        Copies::All,
        |_| HostBudget(None),
        Schedule::SaveFirst,
    );
    drop(saved.unwrap().0.depart().release(Schedule::SaveMeanwhile).unwrap());
    let before = pool.report().host_arena_bytes;
    pool.host_memory().arena().disk.use_without_flush();
    let error = pool.host_memory().spill(u64::MAX, soon, &|| false).unwrap_err();
    assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    let report = pool.report();
    assert_eq!((report.host_arena_bytes, report.spilled_bytes), (before, 0));
    let mut bytes = [0; 16];
    pool.saved().read(start, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16]);
}
