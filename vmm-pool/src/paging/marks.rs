//! Events of the pager's, behind uses and copies.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::deferred::InUse;
use crate::driver::RawEvent;

/// Events of one context that nobody uses now.
pub(super) type Spare = Arc<Mutex<Vec<RawEvent>>>;

/// An event. When nobody knows it any more it is used again.
pub(super) struct Mark {
    pub(super) event: RawEvent,
    /// It belongs to another context than the window's, which may end before.
    pub(super) is_elsewhere: bool,
    spare: Spare,
    /// What the copies before it use of the host.
    pub(super) in_use: Vec<InUse>,
}

impl Mark {
    pub(super) fn new(event: RawEvent, spare: &Spare, is_elsewhere: bool) -> Self {
        Self { event, is_elsewhere, spare: Arc::clone(spare), in_use: Vec::new() }
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
