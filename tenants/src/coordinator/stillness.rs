//! How long nothing has moved in any process that is waited for.

use std::time::{Duration, Instant};

use crate::cut::plan::Pace;

/// What was seen last, and since when it has been so.
pub(super) struct Stillness<T> {
    seen: T,
    since: Instant,
}

impl<T: PartialEq> Stillness<T> {
    /// `seen` from now on.
    pub(super) fn new(seen: T) -> Self {
        Self { seen, since: Instant::now() }
    }

    /// Has `seen` been the same for `patience`?
    pub(super) fn pace(&mut self, seen: T, patience: Duration) -> Pace {
        if seen != self.seen {
            self.seen = seen;
            self.begin_again();
        }
        if self.lasts() < patience { Pace::Moving } else { Pace::Stalled }
    }

    /// For how long it has been so.
    pub(super) fn lasts(&self) -> Duration {
        self.since.elapsed()
    }

    /// Something was done about it.
    pub(super) fn begin_again(&mut self) {
        self.since = Instant::now();
    }
}
