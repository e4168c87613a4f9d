//! The consistent cut: the launches at which the ranks of a tenant stop, so that no launched work waits for work that is not
//! launched.
//!
//! If some ranks have launched a collective and the others are held, the collective keeps the device busy for ever. So every
//! launch of work that waits for other ranks is counted, by lane. The collectives of one communicator are a lane, and so are the
//! messages from one rank to another. A pause holds all ranks at their next such launch, compares the counts, and lets those
//! behind run on to the furthest. `docs/consistent-cut.md` says why this ends.
//!
//! This crate knows nothing of NCCL: an adapter reports launches ([`Cut::enter`]).
//!
//! ```text
//!   application threads --enter--> Cut (mode, counters) <--hold, watch-- worker thread
//!                                                                         |
//!                              coordinator: Plan <------- CutReport ------+
//! ```
//!
//! In the open mode, a launch marks the thread's own slot (`slots.rs`), loads the mode and adds to its counters. In the held
//! mode, every launch takes `table`'s lock, so its increments are admitted and counted together. A report reads the slots first
//! and the counts after. So a thread that has left its slot has been counted.
//!
//! Lock order: `table` before the slots' list and `labels`, which are leaves. The only function called under `table` is the one
//! given to [`Launch::unfinished`].

mod hold;
pub mod plan;
mod report;
mod seats;
pub mod stepping;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::time::Instant;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use hold::MemoryWait;
pub use report::{
    CutReport, Inside, Lag, Laggard, LaunchCount, Limits, Need, Seen, Waiting, foreign_ranks,
    laggards,
};
pub use seats::{TurnedBack, Withdrawal};

use hold::{Mode, Table, Unfinished};
use sublet_sync::slots::{Lease, Seat, Slot, Slots, Threads, Visit};
use sublet_sync::sync::{
    Arc, AtomicU8, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, PoisonError, thread_local,
};

/// A communicator's identity, the same in all its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CommunicatorId(#[cfg_attr(feature = "schema", schemars(with = "String"))] pub u128);

/// In human-readable formats the identity is text: numbers there may have fewer bits.
impl Serialize for CommunicatorId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(&format_args!("{:032x}", self.0))
        } else {
            serializer.serialize_u128(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for CommunicatorId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return u128::deserialize(deserializer).map(Self);
        }
        let text = String::deserialize(deserializer)?;
        u128::from_str_radix(&text, 16).map(Self).map_err(D::Error::custom)
    }
}

impl fmt::Display for CommunicatorId {
    /// Writes the first 32 bits. They tell a job's communicators apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 96)
    }
}

/// A separately counted series of launches of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Series {
    /// The creation of the communicator: 1 once a rank has entered it.
    Creation,
    /// The launches that all its ranks make in the same order.
    Collectives,
    /// The messages that one rank sends another, and the other receives.
    Pair {
        /// The sending rank.
        from: u32,
        /// The receiving rank.
        to: u32,
    },
    /// The end of the communicator, in which ranks wait for each other: 1 once a rank has entered it.
    End,
    /// Exchanges between experts. All its ranks make them in the same order, in addition to the collectives.
    Expert {
        /// The number of the group of experts on the communicator, in order of creation.
        group: u32,
    },
    /// Signals from one rank to another. The giving rank never waits. Only the signals that the other waits for must have been
    /// given.
    Signal {
        /// The rank that gives.
        from: u32,
        /// The rank that waits.
        to: u32,
        /// The index of the signal.
        index: i32,
        /// The context of the signal.
        context: i32,
    },
}

impl Series {
    /// Does `rank` take part?
    pub fn includes(self, rank: u32) -> bool {
        match self {
            Self::Creation | Self::Collectives | Self::End | Self::Expert { .. } => true,
            Self::Pair { from, to } | Self::Signal { from, to, .. } => rank == from || rank == to,
        }
    }

    /// Can another rank that has launched more be waiting for `rank`?
    pub fn demands(self, rank: u32) -> bool {
        match self {
            Self::Signal { from, .. } => rank == from,
            Self::Creation
            | Self::Collectives
            | Self::End
            | Self::Expert { .. }
            | Self::Pair { .. } => true,
        }
    }
}

/// Launches that all participants make in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Lane {
    /// Of which communicator.
    pub communicator: CommunicatorId,
    /// The series of launches.
    pub series: Series,
}

/// A rank of a communicator that lives in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rank {
    /// Of which communicator.
    pub communicator: CommunicatorId,
    /// The number of the rank.
    pub rank: u32,
    /// Of how many.
    pub ranks: u32,
}

/// Counts the launches of one rank on one lane.
#[derive(Debug)]
pub struct Counter {
    lane: Lane,
    rank: u32,
    launched: AtomicU64,
    /// Not 0 once the rank has left. Where the order matters, it is set and read under the table's lock.
    is_gone: AtomicU8,
}

impl Counter {
    /// Returns the lane of the launches.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// Returns the rank that launches.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of launches that have been counted.
    pub fn launched(&self) -> u64 {
        self.launched.load(Ordering::SeqCst)
    }
}

/// The launches that one call adds to one counter.
#[derive(Clone, Debug)]
pub struct Increment {
    /// The counter that the launches are added to.
    pub counter: Arc<Counter>,
    /// The number of launches.
    pub launches: u64,
}

/// The member's side of the cut. A process has one, because each thread keeps one slot.
#[derive(Debug, Default)]
pub struct Cut {
    mode: AtomicU8,
    slots: Slots,
    table: Mutex<Table>,
    /// Notified when something has changed that watchers may want to know.
    moved: Condvar,
    /// Notified when the mode or the limits have changed.
    admitted: Condvar,
    /// Names of calls by their address. A slot's label can hold only an address.
    labels: Mutex<BTreeMap<usize, &'static str>>,
}

thread_local! {
    static SEAT: Cell<Seat> = const { Cell::new(Seat::None) };
    static LEASE: Lease = const { Lease::new() };
    /// Addresses of the names that this thread has registered.
    static KNOWN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The slots of threads. A slot's label is the address of the name of the call.
const HERE: Threads = Threads { seat: &SEAT, lease: &LEASE };

/// A launch under way. Dropping it means that the launch was made.
#[derive(Debug)]
#[must_use = "dropping it says that the launch was made"]
pub struct Launch<'a> {
    cut: &'a Cut,
    what: &'static str,
    increments: &'a [Increment],
    /// None if the launch is within another launch of the thread.
    visit: Option<Visit>,
    /// The mark belongs to the thread, so a launch ends on the thread where it began.
    here: PhantomData<*const ()>,
}

impl Cut {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a rank of a communicator that lives in this process.
    pub fn add_rank(&self, local: Rank) {
        let mut table = self.table();
        table.ranks.insert((local.communicator, local.rank), local);
        table.progress += 1;
    }

    /// Is the calling thread in a launch under way?
    pub fn is_inside() -> bool {
        HERE.is_inside()
    }

    /// Is a thread held at a launch?
    pub fn has_waiting(&self) -> bool {
        !self.table().waiting.is_empty()
    }

    /// Returns the ranks that live in this process, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        self.table().ranks.values().copied().collect()
    }

    /// Returns the counter of `rank` on `lane`. Callers keep it, because the search takes a lock.
    pub fn counter(&self, lane: Lane, rank: u32) -> Arc<Counter> {
        let mut table = self.table();
        let counter = table.counters.entry((lane, rank));
        Arc::clone(counter.or_insert_with(|| {
            let (launched, is_gone) = (AtomicU64::new(0), AtomicU8::new(0));
            Arc::new(Counter { lane, rank, launched, is_gone })
        }))
    }

    /// Enters a call that launches all of `increments` or none. Waits while the rank is held. `what` names the call for people. A
    /// call within a call of the same thread is part of the outer one: it passes, and counts nothing.
    pub fn enter<'a>(&'a self, what: &'static str, increments: &'a [Increment]) -> Launch<'a> {
        self.begin(what, increments, None)
            .unwrap_or_else(|_| unreachable!("it cannot be turned back"))
    }

    /// As [`Cut::enter`], for a launch that needs the ranks of its increments, and of `also`, to exist when it is let go.
    ///
    /// # Errors
    /// The launch was held and one of these ranks has left, or memory that it needs is away and [`Cut::fail_while_away`] was
    /// called. The launch must not be made, and nothing is counted.
    #[inline]
    pub fn enter_if_there<'a>(
        &'a self,
        what: &'static str,
        increments: &'a [Increment],
        also: &[Arc<Counter>],
    ) -> Result<Launch<'a>, Withdrawal<'a>> {
        self.begin(what, increments, Some(also))
    }

    #[inline]
    fn begin<'a>(
        &'a self,
        what: &'static str,
        increments: &'a [Increment],
        also: Option<&[Arc<Counter>]>,
    ) -> Result<Launch<'a>, Withdrawal<'a>> {
        let visit = HERE.come(&self.slots);
        if let Some(visit) = &visit
            && let Err(turned_back) = self.go_in(visit.slot, what, increments, also)
        {
            HERE.go(visit);
            return Err(turned_back);
        }
        Ok(Launch { cut: self, what, increments, visit, here: PhantomData })
    }

    #[inline]
    fn go_in<'a>(
        &'a self,
        slot: &'static Slot,
        what: &'static str,
        increments: &[Increment],
        also: Option<&[Arc<Counter>]>,
    ) -> Result<(), Withdrawal<'a>> {
        if slot.label() != what.as_ptr().addr() {
            self.name(slot, what);
        }
        slot.step_in();
        if self.mode.load(Ordering::SeqCst) == Mode::Open as u8 {
            count(increments);
            return Ok(());
        }
        HERE.seat.set(Seat::Coming);
        slot.step_out();
        let waited = self.wait_to_go_in(slot, what, increments, also);
        HERE.seat.set(Seat::Taken(slot));
        waited.map_err(|(ticket, why)| Withdrawal { cut: self, ticket, why })
    }

    #[cold]
    fn name(&self, slot: &Slot, what: &'static str) {
        let label = what.as_ptr().addr();
        // At its end, a thread has no list of registered names any more.
        let is_known = KNOWN.try_with(|known| {
            let mut known = known.borrow_mut();
            let is_known = known.contains(&label);
            if !is_known {
                known.push(label);
            }
            is_known
        });
        if !is_known.unwrap_or(false) {
            self.labels.lock().unwrap_or_else(PoisonError::into_inner).insert(label, what);
        }
        slot.set_label(label);
    }

    #[inline]
    fn go_out(&self, slot: &Slot) {
        slot.step_out();
        // Watchers look again without a notification, so a mode that is set at this moment costs only one look.
        if self.mode.load(Ordering::Relaxed) != Mode::Open as u8 {
            self.table().progress += 1;
            self.moved.notify_all();
        }
    }
}

fn count(increments: &[Increment]) {
    for increment in increments {
        increment.counter.launched.fetch_add(increment.launches, Ordering::SeqCst);
    }
}

impl Launch<'_> {
    /// Ends a launch whose call failed: nothing was launched.
    pub fn not_launched(self) {
        if self.visit.is_none() {
            return;
        }
        for increment in self.increments {
            increment.counter.launched.fetch_sub(increment.launches, Ordering::SeqCst);
        }
        // Another launch may wait for exactly this part of the limit.
        let _table = self.cut.table();
        self.cut.admitted.notify_all();
    }

    /// Ends a launch whose work goes on in another thread (a communicator in non-blocking mode) until `finished` returns true.
    /// `finished` is called on our own threads, and must not block.
    ///
    /// A later unfinished launch of the same ranks replaces the earlier one. It is removed when one of the ranks leaves.
    pub fn unfinished(self, finished: Box<dyn Fn() -> bool + Send>) {
        let counters = self.increments.iter().map(|increment| &increment.counter);
        let places: BTreeSet<_> =
            counters.map(|counter| (counter.lane.communicator, counter.rank)).collect();
        let work = Unfinished { what: self.what, since: Instant::now(), finished };
        let places = places.into_iter().collect();
        let earlier = self.cut.table().unfinished.insert(places, work);
        drop(earlier);
    }
}

impl Drop for Launch<'_> {
    fn drop(&mut self) {
        if let Some(visit) = &self.visit {
            self.cut.go_out(visit.slot);
            HERE.go(visit);
        }
    }
}
