//! The consistent cut: at which launches the ranks of a tenant stop, so that nothing they have launched
//! waits for something they have not.
//!
//! A collective that some ranks have launched and others not would keep the device busy for ever once the
//! others stand still. So every launch of work that waits for other ranks is counted, by lane: the
//! collectives of one communicator are one lane, what one rank sends another is a lane. A pause holds all
//! ranks at their next such launch, compares the counts, and lets those behind run on to the furthest.
//! `docs/consistent-cut.md` says why this ends.
//!
//! This module knows nothing of NCCL: an adapter says what is launched ([`Cut::enter`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// A communicator's identity, the same in all its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CommunicatorId(pub u128);

/// What is counted of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Series {
    /// Its making: 1 once a rank has gone in.
    Creation,
    /// What all its ranks do in the same order.
    Collectives,
    /// What one rank sends another, and the other receives.
    Pair {
        /// The sending rank.
        from: u32,
        /// The receiving rank.
        to: u32,
    },
    /// Its end, where ranks wait for each other: 1 once a rank has gone in.
    End,
}

/// Launches that all who take part make in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lane {
    /// Of which communicator.
    pub communicator: CommunicatorId,
    /// Which of its series.
    pub series: Series,
}

/// A rank of a communicator that lives in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seat {
    /// Of which communicator.
    pub communicator: CommunicatorId,
    /// Which rank.
    pub rank: u32,
    /// Of how many.
    pub ranks: u32,
}

/// Counts what one rank has launched on one lane.
#[derive(Debug)]
pub struct Post {
    lane: Lane,
    rank: u32,
    launched: AtomicU64,
}

impl Post {
    /// On which lane.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// By which rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How much has been launched.
    pub fn launched(&self) -> u64 {
        self.launched.load(Ordering::SeqCst)
    }
}

/// `launches` on the lane of `post`, as part of one launch.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it counts.
    pub post: Arc<Post>,
    /// How much.
    pub launches: u64,
}

/// The member's side of the cut. One a process.
#[derive(Debug, Default)]
pub struct Cut {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    seats: BTreeMap<(CommunicatorId, u32), Seat>,
    posts: BTreeMap<(Lane, u32), Arc<Post>>,
}

/// A launch under way. Dropping it says that it was made.
#[derive(Debug)]
#[must_use = "dropping it says that the launch was made"]
pub struct Launch<'a> {
    cut: &'a Cut,
    entries: &'a [Entry],
}

impl Cut {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank of a communicator lives in this process from now on.
    pub fn take_seat(&self, seat: Seat) {
        self.table().seats.insert((seat.communicator, seat.rank), seat);
    }

    /// It does no more; its counts go with it.
    pub fn leave_seat(&self, communicator: CommunicatorId, rank: u32) {
        let mut table = self.table();
        table.seats.remove(&(communicator, rank));
        table.posts.retain(|(lane, r), _| lane.communicator != communicator || *r != rank);
    }

    /// The counter of `rank` on `lane`. For keeping: finding it takes a lock.
    pub fn post(&self, lane: Lane, rank: u32) -> Arc<Post> {
        let mut table = self.table();
        let post = table.posts.entry((lane, rank));
        Arc::clone(
            post.or_insert_with(|| Arc::new(Post { lane, rank, launched: AtomicU64::new(0) })),
        )
    }

    /// Goes into a call that launches `entries`, all or nothing, after waiting while the rank is held.
    /// `what` names the call for people. A call within a call of the same thread passes.
    pub fn enter<'a>(&'a self, what: &'static str, entries: &'a [Entry]) -> Launch<'a> {
        let _ = what;
        for entry in entries {
            entry.post.launched.fetch_add(entry.launches, Ordering::SeqCst);
        }
        Launch { cut: self, entries }
    }
}

impl Launch<'_> {
    /// The call failed: nothing was launched.
    pub fn not_launched(self) {
        for entry in self.entries {
            entry.post.launched.fetch_sub(entry.launches, Ordering::SeqCst);
        }
    }

    /// The call has returned, and its work goes on in another thread until `finished` says so (a
    /// communicator in non-blocking mode). `finished` is asked from our own threads, and must not block.
    pub fn unfinished(self, finished: Box<dyn Fn() -> bool + Send>) {
        let _ = (self.cut, finished);
    }
}
