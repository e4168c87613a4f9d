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
    /// A deep pause needs a process whose memory is away, and here it is not. Nothing was frozen. Run `sublet pause
    /// TENANT --deep` again.
    #[error("the gate is not shut behind memory that is away")]
    NotAway,
    /// The driver was pinning host memory for the next pause until the deadline. The tenant stays paused. When
    /// `sublet ps` shows no more pinning, run `sublet pause TENANT --deep` again.
    #[error("the driver is still pinning host memory for the next pause")]
    Pinning,
    /// A thread waits for work of another process, or for an event that no process records. In a deep pause the
    /// driver would end the process for such a call. The tenant stays paused, with all contents. Run `sublet pause
    /// TENANT --deep` again, or leave it so.
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
mod tests;
