//! A paused process, of which another process removes the driver's own state too: the context leaves the device
//! (`cuCheckpointProcess*`). A driver call waits then until the process is restored.
//!
//! So a frozen process must not call the driver. [`Frozen`] has the right to begin a pause or resume, and gives out
//! neither that right nor the pool.
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

/// While this lives, the pool does not call the driver. [`Frozen::thaw`] ends that. Dropping it does not.
#[derive(Debug)]
#[must_use = "only it brings the pool back"]
pub struct Frozen<D: Driver> {
    pool: Arc<Pool<D>>,
    right: Arc<Right>,
}

/// The reason why a process was not frozen. The process is as it was.
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
    /// Ends the driver calls of Sublet's threads, unpins host memory, and keeps the pool from the driver. Pinned memory
    /// would cost the driver more to take along. Returns the record of the unpinning. Waits for at most `timeout` for a
    /// call that pins host memory, and as long for calls that ask about work. Application threads that wait at the gate
    /// stay there. Threads that give memory up may still call the driver, and wait there.
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
        // Other code gives host memory back only under this lock, and first checks whether it may.
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
    /// Lets the pool call the driver again. Returns the record of pinning host memory again.
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
