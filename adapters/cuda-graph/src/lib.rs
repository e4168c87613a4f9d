//! Which streams are being captured into graphs, so that no pause starts in between.
//!
//! A capture turns a device synchronise, which every pause needs, into an error that also ends the
//! capture. Beginning one is therefore gated like a launch, and a pause is refused while any is open.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tenants::member::Member;
use vmm_pool::driver::Driver;

/// The streams being captured, by the driver's value.
#[derive(Debug, Default)]
pub struct Captures {
    streams: Mutex<HashSet<u64>>,
}

impl Captures {
    /// A capture of `stream` has begun.
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn begun<D: Driver>(&self, member: &Member<D>, stream: u64) {
        if self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(stream) {
            member.capture_begun();
        }
    }

    /// The capture of `stream` is over, whatever came of it.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn ended<D: Driver>(&self, member: &Member<D>, stream: u64) {
        if self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream) {
            member.capture_ended();
        }
    }
}
