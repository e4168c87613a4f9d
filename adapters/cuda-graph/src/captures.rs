//! Which streams are being captured into graphs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenants::member;

/// What a capture records into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A graph that comes to be at its end.
    NewGraph,
    /// A graph that is there, and may hold other work.
    Existing,
}

/// The streams being captured, by the driver's value. Of a capture that has spread to other streams by
/// events, only the one that it began on.
#[derive(Debug, Default)]
pub struct Captures {
    streams: Mutex<HashMap<u64, Target>>,
    counts: Arc<member::Captures>,
}

impl Captures {
    /// How many there are, for the process's part in its tenant, which may join while some are under way.
    pub fn counts(&self) -> &Arc<member::Captures> {
        &self.counts
    }

    /// A capture of `stream` has begun.
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn begun(&self, stream: u64, target: Target) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.insert(stream, target).is_none() {
            self.counts.begun();
        }
    }

    /// The capture of `stream` is over, whatever came of it. Returns what it recorded into.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn ended(&self, stream: u64) -> Option<Target> {
        let target = self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
        if target.is_some() {
            self.counts.ended();
        }
        target
    }
}
