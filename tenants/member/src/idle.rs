//! The time for which this process has done nothing. No thread launched anything, by the marks that threads leave at the gate,
//! and the devices have nothing left to do, by a look behind the gate like that of a pause.
//!
//! Launches pay nothing for it: the gate counts threads that enter and leave for its own purposes. So the result is as old as
//! the last look. Every answer makes a look, and so does every check of the agent on its socket.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::Pool;
use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;

use sublet_protocol::time::micros;
use sublet_protocol::wire::Idleness;

/// The idle time of a process: see the head of this module. Its lock is a leaf.
#[derive(Debug)]
pub(super) struct Idle<D: Driver> {
    pool: Arc<Pool<D>>,
    seen: Mutex<Seen>,
}

/// The last look.
#[derive(Debug, Default)]
struct Seen {
    /// The gate's mark, and the time since which it has not changed.
    mark: u64,
    since: Option<Instant>,
    /// Were the devices drained after the launches up to this mark?
    is_drained: bool,
}

impl<D: Driver> Idle<D> {
    pub(super) fn new(pool: Arc<Pool<D>>) -> Self {
        Self { pool, seen: Mutex::default() }
    }

    /// Returns the time for which the process has done nothing, as far as looks show: this call is a look. Never blocks, and
    /// makes no driver call.
    pub(super) fn look(&self) -> Idleness {
        let gate = self.pool.gate();
        let waiting_calls = gate.waiting().len() as u64;
        let is_inside = gate.inside() > 0;
        let mark = gate.mark();
        let mut seen = lock(&self.seen);
        if is_inside || seen.mark != mark || seen.since.is_none() {
            *seen = Seen { mark, since: Some(Instant::now()), is_drained: false };
        }
        let quiet_us = micros(seen.since.map_or(Duration::ZERO, |since| since.elapsed()));
        Idleness { quiet_us, is_drained: seen.is_drained, waiting_calls }
    }

    /// Records that the devices had nothing left to do when the gate's mark was `mark`.
    pub(super) fn note_drained(&self, mark: u64) {
        let mut seen = lock(&self.seen);
        seen.is_drained = seen.mark == mark;
    }
}
