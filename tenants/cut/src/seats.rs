//! Ranks that leave, and threads that are held at launches of such ranks.
//!
//! An application may end a communicator from one thread while another is about to launch on it. Without a hold, that is a race
//! of microseconds, and the application must prevent it. A hold would turn the race into a certainty: the held thread would later
//! launch on a communicator that is gone. So a rank that leaves marks its counters, and a thread that is held at one of them is
//! turned back ([`Withdrawal`]). Before a caller frees objects that such threads use, it waits for them
//! ([`Cut::wait_for_withdrawals`]).

use std::time::{Duration, Instant};

use super::hold::{GIVEN_UP_MAX, Table, Unfinished};
use super::{CommunicatorId, Counter, Cut};
use sublet_sync::sync::{Arc, Ordering, PoisonError};

impl Counter {
    /// Has its rank left?
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst) != 0
    }
}

/// The reason why a launch must not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnedBack {
    /// It was held, and a rank that it needs has left meanwhile.
    RankLeft,
    /// Memory that it needs is away, and launches are to fail in that case ([`Cut::fail_while_away`]).
    Away,
}

/// A launch that must not be made. Dropping it means that the thread no longer uses the ranks of the launch.
#[derive(Debug)]
#[must_use = "dropping it says that the thread has withdrawn"]
pub struct Withdrawal<'a> {
    pub(super) cut: &'a Cut,
    /// Its number among the waiting launches; none if it never waited.
    pub(super) ticket: Option<u64>,
    pub(super) why: TurnedBack,
}

impl Withdrawal<'_> {
    /// Returns the reason why it must not be made.
    pub fn why(&self) -> TurnedBack {
        self.why
    }
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let mut table = self.cut.table();
        if let Some(number) = self.ticket {
            table.waiting.remove(&number);
        }
        table.progress += 1;
        self.cut.moved.notify_all();
    }
}

impl Cut {
    /// Removes a rank that makes no more launches, with its counters. Threads that are held at one of its launches are turned
    /// back.
    pub fn remove_rank(&self, communicator: CommunicatorId, rank: u32) {
        let mut table = self.table();
        let unfinished = table.remove_rank(communicator, rank);
        self.moved.notify_all();
        self.admitted.notify_all();
        drop(table);
        // The value is dropped outside the lock: its destructor may do anything.
        drop(unfinished);
    }

    /// As [`Cut::remove_rank`], for a rank that leaves while others may wait for its launches. Their launches can never complete,
    /// so a hold waits for no rank of that communicator any more.
    pub fn give_up_rank(&self, communicator: CommunicatorId, rank: u32) {
        let mut table = self.table();
        let unfinished = table.remove_rank(communicator, rank);
        if !table.given_up.contains(&communicator) {
            if table.given_up.len() == GIVEN_UP_MAX {
                table.given_up.pop_front();
            }
            table.given_up.push_back(communicator);
        }
        self.moved.notify_all();
        self.admitted.notify_all();
        drop(table);
        drop(unfinished);
    }

    /// Notes that other ranks of `communicator` know it as `other`. A rank here is about to join it; the note ends with that
    /// rank.
    pub fn is_also(&self, communicator: CommunicatorId, other: CommunicatorId) {
        let mut table = self.table();
        table.aliases.insert(communicator, other);
        table.progress += 1;
    }

    /// Waits, for `timeout` at most, until no thread uses a rank that has left `communicator`. Returns whether that is so.
    pub fn wait_for_withdrawals(&self, communicator: CommunicatorId, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut table = self.table();
        while table.waiting.values().any(|waiter| waiter.must_withdraw_from(communicator)) {
            let now = Instant::now();
            if now >= until {
                return false;
            }
            let waited = self.moved.wait_timeout(table, until - now);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Table {
    fn remove_rank(&mut self, communicator: CommunicatorId, rank: u32) -> Vec<Unfinished> {
        let is_of_it = |counter: &Arc<Counter>| {
            counter.lane.communicator == communicator && counter.rank == rank
        };
        self.ranks.remove(&(communicator, rank));
        for counter in self.counters.values().filter(|counter| is_of_it(counter)) {
            counter.is_gone.store(1, Ordering::SeqCst);
        }
        self.counters.retain(|_, counter| !is_of_it(counter));
        let is_place = |places: &Vec<_>, _: &mut Unfinished| places.contains(&(communicator, rank));
        let unfinished = self.unfinished.extract_if(.., is_place).map(|(_, work)| work).collect();
        if !self.ranks.keys().any(|(other, _)| *other == communicator) {
            self.aliases.remove(&communicator);
        }
        self.progress += 1;
        unfinished
    }
}
