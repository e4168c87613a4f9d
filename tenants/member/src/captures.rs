//! Stream captures, and waits of the application's threads for a context. The driver invalidates all captures in a context
//! because of such a wait.
//!
//! Without Sublet a free waits during a capture. With Sublet it waits for the context first. So neither begins while the other
//! is under way: a capture that is about to begin lets waits end, and a wait that finds a capture is not made.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use vmm_pool::sync::lock;

/// The captures of a process, whichever of its members counts them, and the waits for its contexts.
#[derive(Debug, Default)]
pub struct Captures {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    under_way: usize,
    about_to_begin: usize,
    waits: usize,
}

/// A guard for a capture that is about to begin, or has begun and is counted: see [`Captures::before`].
#[derive(Debug)]
#[must_use = "it is about to begin as long as this lives"]
pub struct BeforeCapture<'a>(&'a Captures);

/// A guard for a wait for a context: see [`Captures::wait`].
#[derive(Debug)]
#[must_use = "the wait lasts as long as this lives"]
pub struct ContextWait<'a>(&'a Captures);

impl Captures {
    /// Counts the captures under way or about to begin. One may begin before the process joins its tenant, and past the
    /// gate.
    pub fn under_way(&self) -> usize {
        let counts = lock(&self.counts);
        counts.under_way + counts.about_to_begin
    }

    /// Counts a capture that has begun: no pause begins until it ends.
    pub fn begun(&self) {
        lock(&self.counts).under_way += 1;
    }

    /// Counts the end of a capture, valid or not.
    pub fn ended(&self) {
        let mut counts = lock(&self.counts);
        // An end without a counted begin (a capture older than the hooks) must not wrap.
        counts.under_way = counts.under_way.saturating_sub(1);
    }

    /// Announces a capture until the result is dropped. Waits for a context that are under way end first, or `limit` passes.
    pub fn before(&self, limit: Duration) -> BeforeCapture<'_> {
        let mut counts = lock(&self.counts);
        counts.about_to_begin += 1;
        let waited = self.changed.wait_timeout_while(counts, limit, |counts| counts.waits > 0);
        drop(waited);
        BeforeCapture(self)
    }

    /// Announces that the calling thread will wait for a context, until the result is dropped; none during a stream capture,
    /// which the wait would invalidate.
    pub fn wait(&self) -> Option<ContextWait<'_>> {
        let mut counts = lock(&self.counts);
        if counts.under_way + counts.about_to_begin > 0 {
            return None;
        }
        counts.waits += 1;
        Some(ContextWait(self))
    }
}

impl Drop for BeforeCapture<'_> {
    fn drop(&mut self) {
        lock(&self.0.counts).about_to_begin -= 1;
    }
}

impl Drop for ContextWait<'_> {
    fn drop(&mut self) {
        lock(&self.0.counts).waits -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn a_wait_and_a_capture_are_never_under_way_together() {
        let captures = Captures::default();
        let wait = captures.wait().expect("no capture");
        let (told, began) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let before = captures.before(LONG);
                captures.begun();
                drop(before);
                told.send(()).expect("heard");
            });
            let has_come = || {
                let counts = lock(&captures.counts);
                counts.about_to_begin + counts.under_way > 0
            };
            while !has_come() {
                thread::yield_now();
            }
            assert!(began.recv_timeout(Duration::from_millis(50)).is_err(), "it lets the wait end");
            assert!(captures.wait().is_none(), "a capture is about to begin");
            drop(wait);
            began.recv_timeout(LONG).expect("begun");
        });
        assert_eq!((captures.under_way(), captures.wait().is_none()), (1, true));
        captures.ended();
        assert!(captures.wait().is_some());
    }

    #[test]
    fn a_capture_that_does_not_begin_or_that_is_older_is_not_counted() {
        let captures = Captures::default();
        drop(captures.before(LONG));
        captures.ended();
        assert_eq!(captures.under_way(), 0);
        assert!(captures.wait().is_some());
    }

    #[test]
    fn a_wait_that_lasts_holds_a_capture_up_for_a_bounded_time() {
        let captures = Captures::default();
        let wait = captures.wait().expect("no capture");
        let before = captures.before(Duration::from_millis(1));
        assert_eq!(lock(&captures.counts).waits, 1, "it lasts");
        assert!(captures.wait().is_none(), "a capture is about to begin");
        drop(before);
        assert!(captures.wait().is_some());
        drop(wait);
    }
}
