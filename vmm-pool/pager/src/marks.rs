//! Events of the pager behind uses and copies.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use vmm_pool::InUse;
use vmm_pool::driver::RawEvent;

/// An event. It is used again when nobody refers to it any more.
pub(super) struct Mark {
    pub(super) event: RawEvent,
    spare: Arc<Mutex<Vec<RawEvent>>>,
    /// The host memory that the copies before it use.
    pub(super) in_use: Vec<InUse>,
}

impl Mark {
    pub(super) fn new(event: RawEvent, spare: &Arc<Mutex<Vec<RawEvent>>>) -> Self {
        Self { event, spare: Arc::clone(spare), in_use: Vec::new() }
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mark").field(&self.event).finish()
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(self.event);
    }
}
