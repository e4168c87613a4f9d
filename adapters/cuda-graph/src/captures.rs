//! The streams that are being captured into graphs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenants::member;
use vmm_pool::driver::RawContext;

/// The graph that a capture records into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A new graph, which is made when the capture ends.
    NewGraph,
    /// An existing graph, which may hold other work.
    Existing,
}

#[derive(Clone, Copy, Debug)]
struct Capture {
    target: Target,
    /// The context that was current when the capture began.
    context: Option<RawContext>,
}

/// The streams that are being captured, by the driver's value. If a capture has spread to other streams by events, only the
/// stream that it began on is here.
#[derive(Debug, Default)]
pub struct Captures {
    streams: Mutex<HashMap<u64, Capture>>,
    counts: Arc<member::Captures>,
}

impl Captures {
    /// Returns the counts of captures. The process's part in its tenant uses them, and may join while captures are under way.
    pub fn counts(&self) -> &Arc<member::Captures> {
        &self.counts
    }

    /// Records that a capture of `stream` has begun, with `context` current.
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn begun(&self, stream: u64, context: Option<RawContext>, target: Target) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.insert(stream, Capture { target, context }).is_none() {
            self.counts.begun();
        }
    }

    /// Records that `context` has ended, and its captures with it.
    pub fn context_ended(&self, context: RawContext) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in streams.extract_if(|_, capture| capture.context == Some(context)) {
            self.counts.ended();
        }
    }

    /// Runs `destroy`, which ends `stream` and returns whether it did. A capture of the stream counts until then, and still
    /// after a failure. The value may be another stream's as soon as the stream has ended.
    #[doc(alias = "cuStreamDestroy")]
    pub fn destroy(&self, stream: u64, destroy: impl FnOnce() -> bool) {
        let streams = || self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let capture = streams().remove(&stream);
        let is_gone = destroy();
        let Some(capture) = capture else { return };
        if is_gone || streams().insert(stream, capture).is_some() {
            self.counts.ended();
        }
    }

    /// Records that the capture of `stream` is over, successful or not. Returns what it recorded into.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn ended(&self, stream: u64) -> Option<Target> {
        let capture = self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
        if capture.is_some() {
            self.counts.ended();
        }
        capture.map(|capture| capture.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_counts_until_its_stream_is_gone_and_on_where_the_driver_keeps_it() {
        let captures = Captures::default();
        captures.begun(7, None, Target::Existing);
        captures.destroy(7, || {
            assert_eq!(captures.counts().under_way(), 1, "a pause that looks now finds it");
            false
        });
        assert_eq!(captures.counts().under_way(), 1);
        captures.destroy(7, || {
            // The value is another stream's.
            captures.begun(7, None, Target::NewGraph);
            true
        });
        assert_eq!(captures.counts().under_way(), 1);
        assert_eq!(captures.ended(7), Some(Target::NewGraph));
        captures.destroy(7, || true);
        assert_eq!(captures.counts().under_way(), 0);
    }

    #[test]
    fn captures_end_with_their_context() {
        let captures = Captures::default();
        for (stream, context) in [(7, Some(1)), (8, Some(2)), (9, None)] {
            captures.begun(stream, context.map(RawContext), Target::NewGraph);
        }
        captures.context_ended(RawContext(1));
        assert_eq!(captures.counts().under_way(), 2);
        assert_eq!((captures.ended(7), captures.ended(8)), (None, Some(Target::NewGraph)));
    }
}
