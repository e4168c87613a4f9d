//! Which streams are being captured into graphs.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tenants::member::Member;
use vmm_pool::driver::Driver;

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
}

impl Captures {
    /// A capture of `stream` has begun.
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn begun<D: Driver>(&self, member: &Member<D>, stream: u64, target: Target) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.insert(stream, target).is_none() {
            member.capture_begun();
        }
    }

    /// The capture of `stream` is over, whatever came of it. Returns what it recorded into.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn ended<D: Driver>(&self, member: &Member<D>, stream: u64) -> Option<Target> {
        let target = self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
        if target.is_some() {
            member.capture_ended();
        }
        target
    }
}
