//! The identity of a process, to the pool.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Another process that memory is shared with, as owner or as importer. The pool compares it, and its user knows how
/// that process is found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerId(pub u64);

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
