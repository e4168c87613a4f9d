//! A paused process of which somebody else takes the driver's own state away too: the context leaves the device
//! (`cuCheckpointProcess*`). A driver call that is made meanwhile waits until the process is brought back.
//!
//! So there is nothing to call the driver with: [`Frozen`] has the right to begin a pause or resume, and gives neither that nor the pool
//! out.
//!
//! ```
//! # use std::time::Duration;
//! # use vmm_pool::{Keeper, driver::Driver};
//! fn back<D: Driver>(keeper: Keeper<D>) -> Keeper<D> {
//!     match keeper.freeze(Duration::from_secs(1)) {
//!         Ok((frozen, _)) => frozen.thaw(),
//!         Err(failed) => *failed.state,
//!     }
//! }
//! ```
//! ```compile_fail,E0599
//! # use std::time::Duration;
//! # use vmm_pool::{FromOffloaded, Frozen, Shut, driver::Driver};
//! fn begin<D: Driver>(frozen: Frozen<D>) {
//!     let resume = frozen.shut::<FromOffloaded>(std::time::Instant::now(), || false);
//! }
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::keeper::Keeper;
use super::quiesced::Failed;
use crate::driver::Driver;
use crate::journal::StepLog;
use crate::pool::{Pool, Right};

/// Nothing of the pool calls the driver, from the moment that this is made until [`Frozen::thaw`]. Dropping it leaves that so.
#[derive(Debug)]
#[must_use = "only it brings the pool back"]
pub struct Frozen<D: Driver> {
    pool: Arc<Pool<D>>,
    right: Arc<Right>,
}

/// Why a process was not frozen. It is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFrozen {
    /// Its memory is not away.
    #[error("the gate is not shut behind memory that is away")]
    NotAway,
    /// Host memory was being pinned for the next pause, and that did not end in time.
    #[error("the driver is still pinning host memory for the next pause")]
    Pinning,
}

impl<D: Driver> Keeper<D> {
    /// Ends what threads of ours do at the driver, gives the pins of host memory up, which cost the driver more to take along, and keeps all of the pool
    /// from the driver. Says what that took. Waits at most for `timeout`, for a call under way that pins host
    /// memory. Application threads that wait at the gate stay there; those that give memory up may call the driver still, and wait
    /// there.
    ///
    /// # Errors
    /// [`NotFrozen`].
    pub fn freeze(
        self,
        timeout: Duration,
    ) -> Result<(Frozen<D>, StepLog), Failed<Self, NotFrozen>> {
        if !self.pool().gate().is_offloaded() {
            return Err(Failed::new(self, NotFrozen::NotAway));
        }
        if !self.pool().ahead.hold(timeout) {
            self.pool().ahead.go_on();
            return Err(Failed::new(self, NotFrozen::Pinning));
        }
        // What the pause has not unpinned. Host memory is given back under this lock alone, and looks there whether it may.
        let pinned = self.pool().arena().chunks(true);
        let log = self.pool().set_pinned(false, pinned, |_| true);
        let (pool, right) = self.into_parts();
        Ok((Frozen { pool, right }, log))
    }
}

impl<D: Driver> Frozen<D> {
    /// The driver takes calls again. The resume pins host memory again, ahead of its copies.
    pub fn thaw(self) -> Keeper<D> {
        let Self { pool, right } = self;
        pool.ahead.go_on();
        Keeper::new(pool, right)
    }
}

#[cfg(all(test, feature = "sim"))]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::driver::sim::{FaultSpan, GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
    use crate::driver::{
        AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, DriverOp, Location,
        LocationKind, VaRange,
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

    /// One allocation more, full of this.
    fn filled(pool: &Pool<SimDriver>, value: u8) -> VaRange {
        let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
        let handle = entered.create(GRANULARITY_BYTES, &prop, Class::default()).unwrap();
        let start = pool.driver().reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
        let range = VaRange::new(start, GRANULARITY_BYTES);
        entered.map(range, 0, handle).unwrap();
        entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
        drop(entered);
        pool.driver().core().fill_device(GPU, range, &[value; 16]).unwrap();
        range
    }

    fn pause(keeper: Keeper<SimDriver>, is_deep: bool, schedule: Schedule) -> Keeper<SimDriver> {
        let never = crossbeam_channel::never();
        let mut draining = keeper.close().unwrap();
        if is_deep {
            draining.will_be_frozen();
        }
        let quiesced = draining.drain(Instant::now() + SOON, &never).unwrap().0;
        let (whole, budget) = (Selection::Whole, |_| HostBudget(None));
        let prepared = quiesced.prepare(whole, &[], Copies::All, budget, schedule);
        prepared.unwrap().0.depart().release().unwrap().0.end()
    }

    fn resume(keeper: Keeper<SimDriver>) -> Keeper<SimDriver> {
        let shut = keeper.shut::<FromOffloaded>(Instant::now() + SOON, || false).unwrap();
        let (arriving, _) = shut.create_own(Away::Whole).unwrap();
        let restored = arriving.restore_rest(0).unwrap().0.map_imports().unwrap().0;
        restored.commit().0.end()
    }

    /// A pool with one allocation full of sevens, away.
    fn paused() -> (Arc<Pool<SimDriver>>, Keeper<SimDriver>, VaRange) {
        let (pool, keeper) = pool();
        let range = filled(&pool, 7);
        (pool, pause(keeper, false, Schedule::SaveFirst), range)
    }

    /// A pool that runs, with four allocations, whose contents lie in three chunks and are copied one after the other.
    fn in_three_chunks() -> (Arc<Pool<SimDriver>>, Keeper<SimDriver>, Vec<VaRange>) {
        let (pool, mut keeper) = pool();
        pool.set_group_bytes(1);
        let mut ranges = Vec::new();
        for count in [1, 1, 2] {
            let first = u8::try_from(ranges.len()).unwrap();
            ranges.extend((first..first + count).map(|value| filled(&pool, value)));
            keeper = resume(pause(keeper, false, Schedule::SaveFirst));
        }
        assert_eq!(pool.driver().core().census().host_ranges, 3);
        (pool, keeper, ranges)
    }

    fn assert_holds(pool: &Pool<SimDriver>, ranges: &[VaRange]) {
        for (value, range) in (0..).zip(ranges) {
            let core = pool.driver().core();
            assert!(core.device_holds(GPU, *range, &[value; 16]).unwrap(), "{value}");
        }
    }

    /// Has `steps` run while the call of this number is held, until `op` was called so often or for a while. Was it?
    fn is_called_while_held<T>(
        driver: &SimDriver,
        (held, number): (DriverOp, usize),
        (op, calls): (DriverOp, u64),
        steps: impl FnOnce() -> T,
    ) -> (bool, T) {
        let faults = driver.faults();
        let before = faults.calls(op);
        let mut hold = faults.hold(held);
        std::thread::scope(|scope| {
            let watching = scope.spawn(move || {
                for _ in 1..number {
                    assert!(hold.is_met(SOON));
                    let next = faults.hold(held);
                    drop(std::mem::replace(&mut hold, next));
                }
                assert!(hold.is_met(SOON));
                let deadline = Instant::now() + Duration::from_secs(20);
                while faults.calls(op) < before + calls && Instant::now() < deadline {
                    std::thread::yield_now();
                }
                faults.calls(op) >= before + calls
            });
            let done = steps();
            (watching.join().unwrap(), done)
        })
    }

    #[test]
    fn a_chunk_is_unpinned_behind_its_last_copy_while_others_are_copied() {
        for schedule in [Schedule::SaveFirst, Schedule::SaveMeanwhile] {
            let (pool, keeper, ranges) = in_three_chunks();
            let driver = Arc::clone(pool.driver());
            // The fourth copy comes behind the wait for the first.
            let (is_called, keeper) = is_called_while_held(
                &driver,
                (DriverOp::CopyToHost, 4),
                (DriverOp::HostUnregister, 1),
                || pause(keeper, true, schedule),
            );
            assert!(is_called, "{schedule:?}");
            assert_eq!(driver.core().census().host_ranges, 0, "{schedule:?}");
            let unpins = driver.faults().calls(DriverOp::HostUnregister);
            let (frozen, _) = keeper.freeze(SOON).unwrap();
            assert_eq!(driver.faults().calls(DriverOp::HostUnregister), unpins, "none is left");
            drop(resume(frozen.thaw()));
            assert_holds(&pool, &ranges);
        }
    }

    #[test]
    fn chunks_are_pinned_ahead_of_the_copies_that_use_them_and_not_all_before() {
        let (pool, mut keeper, ranges) = in_three_chunks();
        let driver = Arc::clone(pool.driver());
        let (pin, copy) = (DriverOp::HostRegister, DriverOp::CopyToDevice);
        // The second pin waits for no copy, and the first copy not for the second pin.
        for (held, called) in [((copy, 1), (pin, 3)), ((pin, 2), (copy, 1))] {
            let (frozen, _) = pause(keeper, true, Schedule::SaveFirst).freeze(SOON).unwrap();
            let resumed = is_called_while_held(&driver, held, called, || resume(frozen.thaw()));
            assert!(resumed.0, "{called:?} while {held:?} is held");
            keeper = resumed.1;
            assert_eq!(driver.core().census().host_ranges, 3);
            assert_holds(&pool, &ranges);
        }
    }

    #[test]
    fn what_is_not_unpinned_stays_and_what_is_not_pinned_is_copied_all_the_same() {
        let (pool, keeper, ranges) = in_three_chunks();
        let (faults, pins) = (pool.driver().faults(), || pool.driver().core().census().host_ranges);
        faults.fail(DriverOp::HostUnregister, FaultSpan::From(1), DriverCode::UNKNOWN);
        let (frozen, _) = pause(keeper, true, Schedule::SaveFirst).freeze(SOON).unwrap();
        assert_eq!(pins(), 3);
        faults.clear();
        let keeper = resume(frozen.thaw());
        assert_holds(&pool, &ranges);
        let (frozen, _) = pause(keeper, true, Schedule::SaveFirst).freeze(SOON).unwrap();
        faults.fail(DriverOp::HostRegister, FaultSpan::Nth(2), DriverCode::UNKNOWN);
        let keeper = resume(frozen.thaw());
        assert_eq!(pins(), 2);
        assert_holds(&pool, &ranges);
        // The next pause pins it.
        drop(resume(pause(keeper, false, Schedule::SaveFirst)));
        assert_eq!(pins(), 3);
        assert_holds(&pool, &ranges);
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
        assert_eq!(pool.bring_in(u64::MAX).unwrap(), BroughtIn::NotNow);
        assert_eq!(pool.give_idle_chunk_back().unwrap(), 0);
        assert_eq!(pool.driver().faults().calls_total(), calls);
        let keeper = frozen.thaw();
        drop(resume(keeper));
        assert_eq!(pins(), before);
        assert!(pool.driver().core().device_holds(GPU, range, &[7; 16]).unwrap());
    }

    #[test]
    fn a_pool_that_runs_is_not_frozen_and_goes_on() {
        let (pool, keeper) = pool();
        let failed = keeper.freeze(SOON).unwrap_err();
        assert_eq!(failed.error, NotFrozen::NotAway);
        assert!(pool.bring_in(u64::MAX).unwrap() == BroughtIn::Enough);
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
}
