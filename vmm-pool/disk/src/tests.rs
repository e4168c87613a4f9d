//! Tests of pools whose disk fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver as _, VaRange,
};
use vmm_pool::{
    Class, Contents, Copies, Failed, HostBudget, Keeper, Pool, PoolError, Prepared, Schedule,
    Selection, Stance, StepLog,
};

use crate::WriteOut;
use crate::file::DiskFile;

const GPU: DeviceOrdinal = DeviceOrdinal(0);

type Parts = (Arc<Pool<SimDriver>>, Keeper<SimDriver>);

fn pool() -> Parts {
    let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
    driver.make_current(GPU).unwrap();
    Pool::new(Arc::new(driver), 1, Vec::new)
}

/// Makes memory with contents of its own.
fn filled(pool: &Pool<SimDriver>, class: Class) -> VaRange {
    let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
    let handle = entered.create(GRANULARITY_BYTES, &prop, class).unwrap();
    let start = pool.driver().reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
    let range = VaRange::new(start, GRANULARITY_BYTES);
    entered.map(range, 0, handle).unwrap();
    entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
    pool.driver().core().fill_device(GPU, range, &[7; 16]).unwrap();
    range
}

fn soon() -> Instant {
    Instant::now() + Duration::from_mins(1)
}

fn save(
    keeper: Keeper<SimDriver>,
) -> Result<(Prepared<SimDriver>, StepLog), Failed<vmm_pool::Leaving<SimDriver>>> {
    let drained = keeper.close().unwrap().drain(soon(), &crossbeam_channel::never());
    let (quiesced, _) = drained.unwrap();
    let (budget, schedule) = (|_| HostBudget(None), Schedule::SaveFirst);
    quiesced.prepare(Selection::Whole, &[], Copies::All, budget, schedule)
}

/// All of it is away, in host memory.
fn paused() -> (Arc<Pool<SimDriver>>, VaRange) {
    let (pool, keeper) = pool();
    let range = filled(&pool, Class::default());
    drop(save(keeper).unwrap().0.depart().release(Schedule::SaveMeanwhile).unwrap());
    (pool, range)
}

#[test]
fn what_the_disk_loses_before_its_flush_has_not_moved() {
    let (pool, range) = paused();
    let before = pool.report().host_arena_bytes;
    pool.host_memory().make_files_by(|_| Ok(Arc::new(DiskFile::without_flush())));
    let error = pool.host_memory().spill(u64::MAX, soon(), &|| false).unwrap_err();
    assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    let report = pool.report();
    assert_eq!((report.host_arena_bytes, report.spilled_bytes), (before, 0));
    let mut bytes = [0; 16];
    pool.saved().read(range.start, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16]);
}

#[test]
fn what_the_disk_refuses_half_way_stays_on_its_device() {
    let (pool, keeper) = pool();
    for contents in [Contents::Keep, Contents::File] {
        filled(&pool, Class { library: "test", tag: "weights".to_owned(), contents });
    }
    pool.host_memory().make_files_by(|_| Ok(Arc::new(DiskFile::full())));
    let free_bytes = || pool.driver().memory_of(GPU).unwrap().free_bytes;
    let before = free_bytes();
    let Failed { state: leaving, error } = save(keeper).unwrap_err();
    assert!(matches!(&error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    assert!(error.to_string().contains("(2097152 bytes at 0: No space left on device"), "{error}");
    assert_eq!((pool.report().file_bytes, pool.report().host_arena_bytes), (0, 0));
    let keeper = leaving.undo().unwrap().done.end();
    pool.host_memory().make_files_by(crate::file);
    let (prepared, _) = save(keeper).unwrap();
    assert_eq!(free_bytes(), before, "nothing was released before");
    drop(prepared.depart().release(Schedule::SaveMeanwhile).unwrap());
    assert_eq!(free_bytes(), before + 2 * GRANULARITY_BYTES);
    assert_eq!(pool.report().file_bytes, GRANULARITY_BYTES);
}

#[test]
fn a_full_disk_is_an_error_that_names_the_place() {
    let (pool, _range) = paused();
    let holdings = pool.holdings().inventory(Stance::StandsStill);
    let mut out = WriteOut::laid_out(&holdings, DiskFile::full()).0;
    let error = out.write_on(&pool, Instant::now()).unwrap_err();
    let PoolError::FileRefused { size_bytes, .. } = &error else { panic!("{error}") };
    assert_eq!(*size_bytes, GRANULARITY_BYTES);
    assert!(error.to_string().contains("No space left on device"), "{error}");
}
