//! Holds a process at its next launch, and reports its state.
//!
//! A number (its connection) names the holder. A hold ends with its holder, immediately, even if the worker thread is busy.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use super::report::{CutReport, Inside, LISTED_MAX, LaunchCount, Limits, Need, Seen, Waiting};
use super::{CommunicatorId, Counter, Cut, Increment, Lane, Rank, Series, TurnedBack, count};
use sublet_sync::slots::Slot;
use sublet_sync::sync::{Arc, Ordering, PoisonError};
use sublet_sync::time::millis;

/// The longest time between two looks of a watcher. Calls leave without taking a lock, captures begin and end, and other threads'
/// work ends, all without notifying the watcher.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The most communicators that a report lists as given up. A job that makes up for lost ranks gives one up now and
/// then. Its other ranks give it up soon after.
pub(super) const GIVEN_UP_MAX: usize = 64;

/// The launches that are let through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Mode {
    /// All launches, counted without the lock.
    #[default]
    Open = 0,
    /// The launches that the limits admit.
    Held = 1,
    /// The ends of communicators only: the tenant is paused.
    Paused = 2,
}

/// The state that launches use only while the mode is not open.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) ranks: BTreeMap<(CommunicatorId, u32), Rank>,
    pub(super) counters: BTreeMap<(Lane, u32), Arc<Counter>>,
    /// Calls with unfinished work, by the ranks that launched it.
    pub(super) unfinished: BTreeMap<Vec<(CommunicatorId, u32)>, Unfinished>,
    /// Changes with every event while the mode is not open.
    pub(super) progress: u64,
    mode: Mode,
    /// Is memory that launches need away while the process runs? If so, only ends of communicators are let through, under any
    /// holder.
    is_away: bool,
    /// Are launches that can be turned back turned back while `is_away`?
    fails_while_away: bool,
    limits: Limits,
    holder: Option<u64>,
    /// Changes when the watcher is to stop.
    asked: u64,
    pub(super) waiting: BTreeMap<u64, Waiter>,
    /// The times since which allocations wait for memory that others hold, in order of arrival.
    memory_waits: Vec<Instant>,
    /// The number of launches that have had to wait. It is also the number of the last such launch.
    waits: u64,
    /// The time at which each thread inside was first seen, by its slot's number.
    first_seen: HashMap<u64, (u64, Instant)>,
    /// Communicators that ranks of this process have given up, the latest last.
    pub(super) given_up: VecDeque<CommunicatorId>,
    /// Communicators of this process's ranks, with the identities by which other ranks know them.
    pub(super) aliases: BTreeMap<CommunicatorId, CommunicatorId>,
}

/// See [`Cut::wait_for_memory_since`].
#[derive(Debug)]
#[must_use = "the wait ends with it"]
pub struct MemoryWait<'a> {
    cut: &'a Cut,
    since: Instant,
}

impl Drop for MemoryWait<'_> {
    fn drop(&mut self) {
        let mut table = self.cut.table();
        if let Some(place) = table.memory_waits.iter().position(|since| *since == self.since) {
            table.memory_waits.swap_remove(place);
        }
    }
}

#[derive(Debug)]
pub(super) struct Waiter {
    what: &'static str,
    increments: Vec<Increment>,
    /// Counters of further ranks that it needs. None: it is let go even if ranks have left.
    also: Option<Vec<Arc<Counter>>>,
    since: Instant,
}

impl Waiter {
    /// Must it be turned back, because a rank of `communicator` that it needs has left?
    pub(super) fn must_withdraw_from(&self, communicator: CommunicatorId) -> bool {
        let is_left =
            |counter: &Arc<Counter>| counter.lane.communicator == communicator && counter.is_gone();
        self.also.as_deref().is_some_and(|also| needed(&self.increments, also).any(is_left))
    }
}

/// Returns the counters whose ranks a launch needs.
fn needed<'a>(
    increments: &'a [Increment],
    also: &'a [Arc<Counter>],
) -> impl Iterator<Item = &'a Arc<Counter>> {
    increments.iter().map(|increment| &increment.counter).chain(also)
}

/// Work that goes on after its call has returned.
pub(super) struct Unfinished {
    pub(super) what: &'static str,
    pub(super) since: Instant,
    pub(super) finished: Box<dyn Fn() -> bool + Send>,
}

impl fmt::Debug for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unfinished").field("what", &self.what).finish_non_exhaustive()
    }
}

/// Returns the limits that let `increments` pass. Several increments on one counter add up.
fn needs(increments: &[Increment]) -> Vec<Need> {
    let mut needs: Vec<Need> = Vec::with_capacity(increments.len());
    for Increment { counter, launches } in increments {
        let same =
            needs.iter_mut().find(|need| need.lane == counter.lane && need.rank == counter.rank);
        if let Some(need) = same {
            need.needed = need.needed.saturating_add(*launches);
        } else {
            let needed = counter.launched().saturating_add(*launches);
            needs.push(Need { lane: counter.lane, rank: counter.rank, needed });
        }
    }
    needs
}

/// Do all `increments` end communicators?
fn are_ends(increments: &[Increment]) -> bool {
    increments.iter().all(|increment| increment.counter.lane.series == Series::End)
}

impl Table {
    fn admits(&self, increments: &[Increment]) -> bool {
        match self.mode {
            Mode::Paused => are_ends(increments),
            Mode::Open | Mode::Held if self.is_away => are_ends(increments),
            Mode::Open => true,
            Mode::Held => self.limits.admit(&needs(increments)),
        }
    }
}

impl Cut {
    /// Waits until the hold admits `increments`, and counts them. A launch that is turned back stays in the list of waiting
    /// launches until it has withdrawn. The error has its number in that list, if any, and the reason.
    pub(super) fn wait_to_go_in(
        &self,
        slot: &Slot,
        what: &'static str,
        increments: &[Increment],
        also: Option<&[Arc<Counter>]>,
    ) -> Result<(), (Option<u64>, TurnedBack)> {
        let mut table = self.table();
        let mut ticket = None;
        loop {
            if also.is_some_and(|also| needed(increments, also).any(|counter| counter.is_gone())) {
                return Err((ticket, TurnedBack::RankLeft));
            }
            if also.is_some() && table.is_away && table.fails_while_away && !are_ends(increments) {
                return Err((ticket, TurnedBack::Away));
            }
            if table.admits(increments) {
                break;
            }
            if ticket.is_none() {
                table.waits += 1;
                table.progress += 1;
                let number = table.waits;
                let since = Instant::now();
                table.waiting.insert(
                    number,
                    Waiter {
                        what,
                        increments: increments.to_vec(),
                        also: also.map(<[_]>::to_vec),
                        since,
                    },
                );
                ticket = Some(number);
                self.moved.notify_all();
            }
            table = self.admitted.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        slot.step_in();
        count(increments);
        if let Some(number) = ticket {
            table.waiting.remove(&number);
        }
        table.progress += 1;
        self.moved.notify_all();
        Ok(())
    }

    /// Makes `holder` the holder, or begins a new request of it. The watcher of the request before stops.
    pub fn claim(&self, holder: u64) -> u64 {
        let mut table = self.table();
        table.holder = Some(holder);
        table.asked += 1;
        self.moved.notify_all();
        table.asked
    }

    /// Has a newer request been made than the one for which [`Cut::claim`] returned `asked`?
    pub fn is_asked_since(&self, asked: u64) -> bool {
        self.table().asked != asked
    }

    /// Ends the hold of `holder`, which is gone. No request of it begins any more.
    pub fn abandon(&self, holder: u64) {
        let mut table = self.table();
        if table.holder == Some(holder) {
            table.holder = None;
            if table.mode == Mode::Held {
                tracing::warn!("the holder of this process is gone: it runs on");
                self.set(&mut table, Mode::Open);
            }
        }
    }

    /// Holds all launches that `limits` do not admit. Returns false if `holder` is gone.
    pub fn hold(&self, holder: u64, limits: Limits) -> bool {
        let mut table = self.table();
        if table.holder != Some(holder) {
            return false;
        }
        if table.limits != limits {
            table.progress += 1;
        }
        table.limits = limits;
        self.set(&mut table, Mode::Held);
        true
    }

    /// Holds all launches of the paused tenant until [`Cut::release`].
    pub fn pause(&self) {
        let mut table = self.table();
        self.set(&mut table, Mode::Paused);
    }

    /// Lets all launches through, unless memory that they need is away.
    pub fn release(&self) {
        let mut table = self.table();
        self.set(&mut table, Mode::Open);
    }

    /// Sets whether memory that launches need is away while the process runs.
    pub fn set_away(&self, is_away: bool) {
        let mut table = self.table();
        table.is_away = is_away;
        let mode = table.mode;
        self.set(&mut table, mode);
    }

    /// Turns back launches ([`Cut::enter_if_there`]) while memory that they need is away, so that they do not wait for it. This
    /// holds for the rest of the process's life.
    pub fn fail_while_away(&self) {
        self.table().fails_while_away = true;
        self.admitted.notify_all();
    }

    /// Do launches wait because memory that they need is away, or is to stay away?
    pub fn is_away(&self) -> bool {
        self.table().is_away
    }

    /// Is a hold in force?
    pub fn is_held(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == Mode::Held as u8
    }

    fn set(&self, table: &mut Table, mode: Mode) {
        table.mode = mode;
        if mode == Mode::Open {
            table.limits = Limits::default();
            table.first_seen.clear();
        }
        let seen = if table.is_away && mode == Mode::Open { Mode::Paused } else { mode };
        self.mode.store(seen as u8, Ordering::SeqCst);
        self.admitted.notify_all();
        self.moved.notify_all();
    }

    /// Waits until the state of the process differs from `seen`, and returns it. It also returns at `until`, or when a newer
    /// request is made than the one for which [`Cut::claim`] returned `asked`. `captures` returns the number of stream captures
    /// under way.
    ///
    /// Blocks. Returns none if the hold has ended.
    pub fn watch(
        &self,
        seen: Seen,
        asked: u64,
        until: Instant,
        captures: &dyn Fn() -> usize,
    ) -> Option<CutReport> {
        let mut table = self.table();
        loop {
            if table.mode != Mode::Held {
                return None;
            }
            let report = self.look(&mut table, captures());
            let now = Instant::now();
            if report.seen != seen || now >= until || table.asked != asked {
                return Some(report);
            }
            let wait = LOOK_EVERY.min(until - now);
            table = self.moved.wait_timeout(table, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes that an allocation waits for memory that others hold, until the returned value is dropped. Other ranks may be in a
    /// collective with its thread. The wait began at `since`; the allocation may have been tried meanwhile.
    pub fn wait_for_memory_since(&self, since: Instant) -> MemoryWait<'_> {
        self.table().memory_waits.push(since);
        MemoryWait { cut: self, since }
    }

    /// Returns the present state of the process.
    pub fn report(&self, captures: usize) -> CutReport {
        self.look(&mut self.table(), captures)
    }

    fn look(&self, table: &mut Table, captures: usize) -> CutReport {
        // The slots are read before the counts: see the documentation of this crate.
        let inside = self.inside(table);
        let counters = table.counters.values();
        let counters = counters.map(|counter| LaunchCount {
            lane: counter.lane,
            rank: counter.rank,
            launched: counter.launched(),
        });
        let waiting = table.waiting.values().take(LISTED_MAX).map(|waiter| Waiting {
            what: waiter.what.to_owned(),
            needs: if table.is_away { Vec::new() } else { needs(&waiter.increments) },
            waited_ms: millis(waiter.since.elapsed()),
        });
        let mut report = CutReport {
            seen: Seen { waits: table.waits, at_rest: false },
            progress: table.progress,
            ranks: table.ranks.values().copied().collect(),
            counters: counters.collect(),
            waiting: waiting.collect(),
            inside,
            captures: captures as u64,
            waits_for_memory_ms: table
                .memory_waits
                .iter()
                .min()
                .map(|since| millis(since.elapsed())),
            given_up: table.given_up.iter().copied().collect(),
            aliases: table.aliases.iter().map(|(own, others)| (*own, *others)).collect(),
        };
        report.seen.at_rest = report.is_at_rest(&table.limits);
        report
    }

    fn inside(&self, table: &mut Table) -> Vec<Inside> {
        let now = Instant::now();
        let occupants = self.slots.inside();
        let seen = std::mem::take(&mut table.first_seen);
        for occupant in &occupants {
            let before = seen.get(&occupant.number).filter(|(turn, _)| *turn == occupant.turn);
            let since = before.map_or(now, |(_, since)| *since);
            table.first_seen.insert(occupant.number, (occupant.turn, since));
        }
        let labels = self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inside = Vec::new();
        for occupant in occupants.iter().take(LISTED_MAX) {
            let what = labels.get(&occupant.label).copied().unwrap_or("a launch");
            let since = table.first_seen.get(&occupant.number).map_or(now, |(_, since)| *since);
            inside.push(Inside { what: what.to_owned(), inside_ms: millis(now - since) });
        }
        drop(labels);
        let before = table.unfinished.len();
        table.unfinished.retain(|_, work| !(work.finished)());
        table.progress += (before - table.unfinished.len()) as u64;
        let unfinished = table.unfinished.values().take(LISTED_MAX);
        inside.extend(unfinished.map(|work| Inside {
            what: work.what.to_owned(),
            inside_ms: millis(now.saturating_duration_since(work.since)),
        }));
        inside
    }
}
