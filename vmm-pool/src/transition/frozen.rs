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
//!         Ok((frozen, _)) => frozen.thaw().0,
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
use super::still::Failed;
use crate::asking::Door;
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
    /// Threads of the application's are inside calls that the driver would end the process for ([`crate::asking`]).
    #[error(
        "{0} threads are still inside calls that ask about work or wait for it (cuStreamSynchronize and its like) after {waited_s} s",
        waited_s = .1.as_secs()
    )]
    Asking(usize, Duration),
}

impl<D: Driver> Keeper<D> {
    /// Ends what threads of ours do at the driver, gives the pins of host memory up, which cost the driver more to take along, and keeps all of the pool
    /// from the driver. Says what that took. Waits at most for `timeout`, for a call under way that pins host
    /// memory, and as long for calls that ask about work. Application threads that wait at the gate stay there; those that give memory up
    /// may call the driver still, and wait there.
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
        if !self.pool().host_memory().incoming.hold(timeout) {
            self.pool().host_memory().incoming.go_on();
            return Err(Failed::new(self, NotFrozen::Pinning));
        }
        if let Err(inside) = self.pool().door().shut(timeout) {
            self.pool().host_memory().incoming.go_on();
            return Err(Failed::new(self, NotFrozen::Asking(inside, timeout)));
        }
        // If this panics, threads that ask about work must not wait for ever.
        let mut opens = Opens(Some(self.pool().door()));
        // Host memory is given back under this lock alone, and looks there whether it may.
        let log = self.pool().host_memory().set_pinned(false);
        opens.0 = None;
        drop(opens);
        let (pool, right) = self.into_parts();
        Ok((Frozen { pool, right }, log))
    }
}

/// Opens a door when it is dropped.
struct Opens<'a>(Option<&'a Door>);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|door| door.open());
    }
}

impl<D: Driver> Frozen<D> {
    /// The driver takes calls again. Says what it took to pin host memory again.
    pub fn thaw(self) -> (Keeper<D>, StepLog) {
        let Self { pool, right } = self;
        // First: it stays open if what follows panics.
        pool.door().open();
        let log = pool.host_memory().set_pinned(true);
        pool.host_memory().incoming.go_on();
        (Keeper::new(pool, right), log)
    }
}

#[cfg(all(test, feature = "sim"))]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]
mod tests {
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

    /// A pool with one allocation full of sevens, away.
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
}
