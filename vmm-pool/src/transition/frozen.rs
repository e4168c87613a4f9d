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
//!         Ok(frozen) => frozen.thaw(),
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
use crate::gate::Mode;
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
    /// Ends what threads of ours do at the driver, and keeps them from it. Waits at most for `timeout`, for a call under way that pins host
    /// memory. Application threads that wait at the gate stay there; those that give memory up may call the driver still, and wait
    /// there.
    ///
    /// # Errors
    /// [`NotFrozen`].
    pub fn freeze(self, timeout: Duration) -> Result<Frozen<D>, Failed<Self, NotFrozen>> {
        if self.pool().gate().mode() != Mode::Offloaded {
            return Err(Failed::new(self, NotFrozen::NotAway));
        }
        if !self.pool().ahead.hold(timeout) {
            self.pool().ahead.go_on();
            return Err(Failed::new(self, NotFrozen::Pinning));
        }
        // Whoever gives host memory back does so under this lock, and looks there whether it may.
        drop(self.pool().arena());
        let (pool, right) = self.into_parts();
        Ok(Frozen { pool, right })
    }
}

impl<D: Driver> Frozen<D> {
    /// The driver takes calls again.
    pub fn thaw(self) -> Keeper<D> {
        let Self { pool, right } = self;
        pool.ahead.go_on();
        Keeper::new(pool, right)
    }
}
