//! A context that its device has no room for waits until others have made some, as an allocation does ([`super::room`]).
//!
//! The process need not be of its tenant yet: it may be the first thing that it does on a device. What a context takes nobody knows, so one tenant at a time
//! makes way, and it is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::SwitchError;
use super::acting::SwitchOptions;
use super::queue::{AGAIN_AFTER, AGAIN_AFTER_MAX, CallsOff, Queue, never};
use crate::checkpoints::Checkpointer;
use crate::error_text::chain;
use crate::identity::TenantName;
use crate::run_dir::{RunDir, pause_thread};
use crate::turns::scene::Wish;

/// A process that wants a context.
#[derive(Debug)]
pub struct Newcomer<'a> {
    /// Where tenants live.
    pub run_dir: &'a RunDir,
    /// Its tenant.
    pub tenant: &'a TenantName,
    /// The device, by its machine-wide name.
    pub gpu: String,
    /// For how long it waits at most.
    pub wait: Duration,
    /// See [`SwitchOptions::checkpointer`].
    pub checkpointer: Option<Arc<dyn Checkpointer>>,
}

impl Newcomer<'_> {
    /// Waits for room and calls `make`, which says whether the context was made, until it was. Blocks.
    ///
    /// # Errors
    /// Why there is no room, for people.
    pub fn with_room(&self, mut make: impl FnMut() -> bool) -> Result<(), String> {
        let wish = Wish::Context(self.gpu.clone());
        let (run_dir, deadline) = (self.run_dir, Instant::now() + self.wait);
        let calls_off = CallsOff::when(&never);
        let mut queue = Queue::enter(run_dir, self.tenant, wish, self.wait, calls_off)
            .map_err(|error| chain(&error))?;
        let options =
            SwitchOptions { checkpointer: self.checkpointer.clone(), ..SwitchOptions::default() };
        let mut again_after = AGAIN_AFTER;
        loop {
            let why = match queue.wait_and_go(&options, &never, &mut |_| {}) {
                Ok(_) if make() => return Ok(()),
                Ok(_) => "others took what was made free".to_owned(),
                Err(error @ (SwitchError::Undone { .. } | SwitchError::Tenant(_))) => chain(&error),
                Err(error) => return Err(chain(&error)),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(why);
            }
            pause_thread(again_after.min(left));
            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
        }
    }
}
