//! The choice by a seed of the stream whose work runs next. It is for tests of results that must be right in any order.
//!
//! The first work of a stream waits for a number of driver calls, which the seed chooses. Then it runs alone. If several could
//! run, the seed chooses one. So copies overtake kernels that were launched before them, and the reverse. A thread that waits
//! for work has all work run, in an order by the seed. A stream's own wait for another stream is not held up.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use sublet_driver::RawStream;

/// The most calls for which work is held up.
const CALLS_MAX: u64 = 12;

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Schedule {
    table: Mutex<RunQueue>,
    changed: Condvar,
}

#[derive(Debug)]
struct RunQueue {
    random: u64,
    /// The streams whose first work could run, each with the number of calls for which it still waits.
    ready: Vec<(RawStream, u64)>,
    runs: Option<RawStream>,
    /// The number of threads that wait for work.
    waiting: usize,
    has_ended: bool,
}

impl RunQueue {
    /// Returns a number below `end` (`SplitMix64`).
    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn choose(&mut self) {
        if self.runs.is_some() {
            return;
        }
        let all = self.ready.iter().enumerate();
        let may = all.filter(|(_, (_, calls))| *calls == 0 || self.waiting > 0);
        let may: Vec<_> = may.map(|(index, _)| index).collect();
        if !may.is_empty() {
            let chosen = usize::try_from(self.below(may.len() as u64)).unwrap_or(0);
            self.runs = Some(self.ready.swap_remove(may[chosen]).0);
        }
    }
}

impl Schedule {
    pub(super) fn new(seed: u64) -> Self {
        let table =
            RunQueue { random: seed, ready: Vec::new(), runs: None, waiting: 0, has_ended: false };
        Self { table: Mutex::new(table), changed: Condvar::new() }
    }

    fn table(&self) -> MutexGuard<'_, RunQueue> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the streams whose first work waits for its turn.
    pub(super) fn held_up(&self) -> usize {
        self.table().ready.len()
    }

    /// Waits until the first work of this stream is chosen to run.
    pub(super) fn begin(&self, stream: RawStream) {
        let mut table = self.table();
        let calls = table.below(CALLS_MAX);
        table.ready.push((stream, calls));
        table.choose();
        self.changed.notify_all();
        while table.runs != Some(stream) && !table.has_ended {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that this work is done.
    pub(super) fn end(&self) {
        let mut table = self.table();
        table.runs = None;
        table.choose();
        self.changed.notify_all();
    }

    /// Records that the driver was called.
    pub(super) fn called(&self) {
        let mut table = self.table();
        table.ready.iter_mut().for_each(|(_, calls)| *calls = calls.saturating_sub(1));
        table.choose();
        self.changed.notify_all();
    }

    /// Runs `wait`, which waits for work.
    pub(super) fn while_waiting(&self, wait: impl FnOnce()) {
        {
            let mut table = self.table();
            table.waiting += 1;
            table.choose();
            self.changed.notify_all();
        }
        wait();
        self.table().waiting -= 1;
    }

    /// Ends the schedule with the driver: nothing is held up any more.
    pub(super) fn finish(&self) {
        self.table().has_ended = true;
        self.changed.notify_all();
    }
}
