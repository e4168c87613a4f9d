//! The time for which this process has done nothing: nothing launched, by the marks that threads leave at the gate, and
//! nothing left to do on its devices, by a look behind the gate as a pause takes it.
//!
//! Launches pay nothing for it: the gate counts who goes in and out for itself. So what is known is as old as the last
//! look: one comes with every answer, and one whenever the agent looks after its socket.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::Pool;
use vmm_pool::driver::Driver;
use vmm_pool::sync::lock;

use sublet_protocol::time::micros;
use sublet_protocol::wire::Idleness;

/// See the head of this module. Its lock is a leaf.
#[derive(Debug)]
pub(super) struct Idle<D: Driver> {
    pool: Arc<Pool<D>>,
    seen: Mutex<Seen>,
}

/// The last look.
#[derive(Debug, Default)]
struct Seen {
    /// The gate's mark, and since when it stands still.
    mark: u64,
    since: Option<Instant>,
    /// The devices had nothing left to do, after what was launched by then.
    is_drained: bool,
}

impl<D: Driver> Idle<D> {
    pub(super) fn new(pool: Arc<Pool<D>>) -> Self {
        Self { pool, seen: Mutex::default() }
    }

    /// Says for how long it has done nothing, as far as somebody has looked: this is a look. Blocks nowhere, and calls no
    /// driver.
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

    /// The devices had nothing left to do when the gate's mark was `mark`.
    pub(super) fn note_drained(&self, mark: u64) {
        let mut seen = lock(&self.seen);
        seen.is_drained = seen.mark == mark;
    }
}
