//! Draining by stepping: the launches that processes behind shut gates may still make, so that the devices become idle.
//!
//! The cut stops ranks where every *counted* launch has its counterparts. Work that is not counted (an application's own
//! all-reduce, symmetric memory, a second NCCL, a kernel that waits for another thread of its own process) may still wait on a
//! device for work that was not launched when the gates were shut. So while devices are busy and nothing moves, the processes
//! that *are idle* let each of their threads that wait make one call more. `docs/consistent-cut.md` argues why that ends.
//!
//! This is the decision, a pure function of the processes' reports. `coordinator/stepping.rs` carries it out,
//! `member/executor/stepping.rs` executes it in each process, and `stepping/tests.rs` tries it on all interleavings of small
//! programs.

#[cfg(test)]
mod busy_tests;
#[cfg(test)]
mod posted_tests;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plan::{Pace, Plan, Verdict};
use super::{CutReport, Limits, Seen};
use sublet_sync::time::millis;

/// The most calls that a thread may make at first before its process reports again.
const CALLS_MAX: u32 = 64;
/// The number of rounds without success after which a process with a busy device gets a turn. Another thread of that process may
/// have to make the missing launch.
const BUSY_EVERY: u32 = 4;
/// The rounds before the first such turn. Most busy devices have only work left that needs no other launch.
const BUSY_AFTER: u32 = 16;
/// The most calls of a thread of a busy process in one turn: about the length of a device's queue.
const FURTHER_MAX: u32 = 1024;

/// The activity of a process behind its shut gate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Activity {
    /// The number of the order under which the report was made, as [`StepOrder::order`].
    pub order: u64,
    /// The state of its counted launches.
    pub cut: CutReport,
    /// Threads inside a call.
    pub inside: u64,
    /// Threads that wait at the gate.
    pub waiting: u64,
    /// Threads among these whose next launch may be the one that a device waits for.
    pub ready: u64,
    /// The calls that wait longest, for people.
    pub calls: Vec<HeldCall>,
    /// Places with work left, for people.
    pub busy: Vec<String>,
    /// Is no thread inside, and has no device work left?
    pub is_idle: bool,
    /// The number of calls that were let in since the gate was shut.
    pub steps: u64,
}

/// A call that waits at the gate.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeldCall {
    /// The name of the call.
    pub what: String,
    /// For how long, in milliseconds.
    pub waited_ms: u64,
}

impl HeldCall {
    /// Returns the call `what`, which has waited for this time.
    pub fn new(what: &str, waited: Duration) -> Self {
        Self { what: what.to_owned(), waited_ms: millis(waited) }
    }
}

impl fmt::Display for HeldCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {:.1} s", self.what, Duration::from_millis(self.waited_ms).as_secs_f64())
    }
}

/// Describes why a process is not idle, and the waits of its threads. `inside` threads are inside calls, and `waiting` threads
/// wait at the gate; `calls` are some of their calls.
pub fn at_work(inside: u64, busy: &[String], waiting: u64, calls: &[HeldCall]) -> String {
    let mut parts = Vec::new();
    if !busy.is_empty() {
        parts.push(format!("{} has work left", busy.join(", ")));
    }
    if inside > 0 {
        parts.push(format!("{inside} thread(s) inside driver calls"));
    }
    if waiting > 0 {
        let calls: Vec<_> = calls.iter().map(ToString::to_string).collect();
        parts.push(format!("{waiting} thread(s) at its gate ({})", calls.join(", ")));
    } else {
        parts.push("no thread at its gate".to_owned());
    }
    parts.join(", ")
}

/// The error of a process that was not idle in time; `what` is what it does.
pub fn not_idle(who: impl fmt::Display, what: impl fmt::Display) -> String {
    format!(
        "{who} was not idle in time: {what}; much may be queued, or a kernel may wait for what was not launched, or never \
         end: pause at a step boundary, or give a longer timeout"
    )
}

impl fmt::Display for Activity {
    /// As [`at_work`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&at_work(self.inside, &self.busy, self.waiting, &self.calls))
    }
}

/// The activity of a process that the coordinator knows. A change of it is reported to the coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SeenActivity {
    /// The state of its counted launches.
    pub cut: Seen,
    /// Threads inside a call.
    pub inside: u64,
    /// Threads that wait at the gate.
    pub waiting: u64,
    /// As [`Activity::is_idle`].
    pub is_idle: bool,
}

/// The launches and calls that a process may make until the next order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOrder {
    /// The number of this order. Later orders have higher numbers.
    pub order: u64,
    /// The count up to which each lane may be launched; none if launches are not counted in this pause.
    pub limits: Option<Limits>,
    /// The calls that threads at the gate may make.
    pub calls: Calls,
}

impl Activity {
    /// Returns the part of this report that its reader keeps in mind.
    pub fn seen(&self) -> SeenActivity {
        let Self { cut, inside, waiting, is_idle, .. } = self;
        SeenActivity { cut: cut.seen, inside: *inside, waiting: *waiting, is_idle: *is_idle }
    }

    /// Does a thread wait that can be let through?
    fn waits(&self) -> bool {
        self.waiting > 0 || self.cut.waiting.iter().any(|waiting| !waiting.needs.is_empty())
    }

    /// May the next launch be one that a device waits for?
    fn is_ready(&self) -> bool {
        self.ready > 0 || (self.is_idle && self.waits())
    }
}

/// The calls that threads at the gate may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Calls {
    /// Wait.
    #[default]
    None,
    /// This number of consecutive calls, by threads that are ready. They end with a call that makes an idle device busy, or a
    /// busy one idle.
    Ready(u32),
    /// This number of calls for each thread, whatever the devices do.
    Each(u32),
    /// This number of calls for each thread. They end with a call after which the devices are idle: it may have been the last
    /// missing one.
    Turn(u32),
}

/// The result of a look at all activities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// All devices are idle, and no launched work lacks a counterpart.
    Drained,
    /// The drain is not complete. The calls that each process may make, in the order of the activities.
    Open(Vec<Calls>),
}

/// The state of the decisions of one drain.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stepper {
    plan: Plan,
    /// The number of calls at a time. It halves whenever a process becomes busy by its step. That process may have gone too far,
    /// so the others must follow, and must not overtake it.
    budget: u32,
    rounds: u32,
    /// True for each process that was stepped in the last round because it was idle.
    stepped: Vec<bool>,
    /// The number of times that each process was let through while it was busy.
    turns: Vec<u32>,
    /// True for each process whose devices are idle.
    idle: Vec<bool>,
    /// The calls per thread that each process made in its last turn while busy; 0 if the turn has had an effect since.
    further: Vec<u32>,
    /// The total calls up to which each process goes on in that turn.
    allowed: Vec<u64>,
}

impl Stepper {
    /// Begins at the cut that `plan` has reached.
    pub fn new(plan: Plan) -> Self {
        Self {
            plan,
            budget: CALLS_MAX,
            rounds: 0,
            stepped: Vec::new(),
            turns: Vec::new(),
            idle: Vec::new(),
            further: Vec::new(),
            allowed: Vec::new(),
        }
    }

    /// Up to which count each lane may be launched now.
    pub fn limits(&self) -> &Limits {
        self.plan.limits()
    }

    /// Returns the number of rounds so far in which nothing has moved.
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Has a device become idle since the last decision? The calls that others still make may be more than are needed. `fresh`
    /// has the newest report of each process since then, in the order of the activities.
    pub fn is_idle_now<'a>(&self, fresh: impl IntoIterator<Item = Option<&'a Activity>>) -> bool {
        let is_new = |(fresh, was_idle): (Option<&Activity>, &bool)| {
            !was_idle && fresh.is_some_and(|activity| activity.is_idle)
        };
        fresh.into_iter().zip(&self.idle).any(is_new)
    }

    /// Returns the most calls that one thread of a busy process makes in its turn; 0 if all turns have had an effect.
    pub fn further(&self) -> u32 {
        self.further.iter().copied().max().unwrap_or(0)
    }

    /// Decides what each process may do, by its latest report, which was made under the last order.
    ///
    /// * A process that is behind on a counted lane, or inside a counted call, runs on to the cut: others have made those
    ///   launches already.
    /// * When nothing changes, processes with idle devices go on, a few calls at a time. A process that others wait for is among
    ///   them. Proof: take an order in which the program could run, and in it the first launch L that a device waits for and that
    ///   is not made. The thread of L made its launches on the stream of L before L; they and their counterparts exist. So that
    ///   work is finished. If a process has one thread, its device is idle. In a busy process, the threads go on that have not
    ///   made it busy.
    /// * If its threads wait at the cut and not at the gate, the limits are raised to their needs.
    /// * After a while, one busy process goes on by a call when no thread is ready, and now and then otherwise. These processes
    ///   rotate. The missing launch may come from another thread of the process whose device waits, or from the same thread on
    ///   another stream. If all busy processes went on together, there would be no moment at which all are idle.
    /// * As long as no thread is ready and no device becomes idle or busy, each such turn has twice as many calls as the
    ///   process's last one. So a wait that N calls of a process end costs no more than log2(N) + 1 of its turns.
    pub fn update(&mut self, activities: &[&Activity], pace: Pace) -> Decision {
        let cuts: Vec<_> = activities.iter().map(|activity| &activity.cut).collect();
        let verdict = self.plan.update(&cuts, Pace::Moving);
        if verdict == Verdict::Settled && activities.iter().all(|activity| activity.is_idle) {
            return Decision::Drained;
        }
        let idle: Vec<_> = activities.iter().map(|activity| activity.is_idle).collect();
        if idle != self.idle {
            self.forget_turns();
            self.idle = idle;
        }
        let limits = self.plan.limits();
        let is_behind: Vec<_> = cuts.iter().map(|cut| !cut.is_at_rest(limits)).collect();
        let mut calls = vec![Calls::None; activities.len()];
        for ((calls, activity), is_behind) in calls.iter_mut().zip(activities).zip(&is_behind) {
            if *is_behind && activity.waiting > 0 {
                *calls = Calls::Each(CALLS_MAX);
            }
        }
        if pace == Pace::Moving {
            self.go_on(activities, &is_behind, &mut calls);
            return Decision::Open(calls);
        }
        let was_stepped = |index: usize| self.stepped.get(index).copied().unwrap_or(false);
        // It was idle, and its permitted launches have made it busy.
        let overshot =
            |(index, activity): (usize, &&Activity)| was_stepped(index) && !activity.is_idle;
        if activities.iter().enumerate().any(overshot) {
            self.budget = (self.budget / 2).max(1);
        }
        let is_candidate = |index: usize| {
            let activity = activities[index];
            activity.is_ready() && !is_behind[index]
        };
        let candidates: Vec<_> = (0..activities.len()).map(is_candidate).collect();
        let may_be_busy = self.rounds >= BUSY_AFTER;
        let is_turn_of_busy = self.rounds % BUSY_EVERY == BUSY_EVERY - 1;
        if candidates.contains(&true) {
            self.forget_turns();
        }
        let next = (may_be_busy && (is_turn_of_busy || !candidates.contains(&true)))
            .then(|| self.next_in_turn(activities, &is_behind))
            .flatten();
        let (chosen, allowed) = if let Some(next) = next {
            let calls = self.begin_turn(next, activities);
            ((0..activities.len()).map(|index| index == next).collect(), Calls::Turn(calls))
        } else {
            (candidates.clone(), Calls::Ready(self.budget))
        };
        for (index, activity) in activities.iter().enumerate().filter(|(index, _)| chosen[*index]) {
            if activity.waiting > 0 {
                calls[index] = allowed;
            }
            // The cut comes after the gate. So a process that waits at the cut has come further than one that waits at the gate,
            // unless another of its threads waits there.
            if activity.waiting == 0 || self.rounds % 2 == 1 {
                self.plan.let_on(&activity.cut);
            }
        }
        self.stepped =
            (0..activities.len()).map(|index| chosen[index] && activities[index].is_idle).collect();
        self.rounds = self.rounds.saturating_add(1);
        Decision::Open(calls)
    }

    /// Returns the busy, waiting process that was let through least often.
    fn next_in_turn(&self, activities: &[&Activity], is_behind: &[bool]) -> Option<usize> {
        let is_busy =
            |i: &usize| activities[*i].waits() && !activities[*i].is_idle && !is_behind[*i];
        let turns = |index: &usize| self.turns.get(*index).copied().unwrap_or(0);
        (0..activities.len()).filter(is_busy).min_by_key(turns)
    }

    /// Begins the turn of a process. Returns how many calls each of its threads makes.
    fn begin_turn(&mut self, index: usize, activities: &[&Activity]) -> u32 {
        self.turns.resize(activities.len(), 0);
        self.further.resize(activities.len(), 0);
        self.allowed.resize(activities.len(), 0);
        self.turns[index] = self.turns[index].saturating_add(1);
        let further = (2 * self.further[index]).clamp(1, FURTHER_MAX);
        let Activity { steps, waiting, .. } = activities[index];
        self.further[index] = further;
        self.allowed[index] = steps + u64::from(further) * (*waiting).max(1);
        further
    }

    /// Lets threads that reached the gate or the cut late in their turn make the remaining calls of that turn.
    fn go_on(&mut self, activities: &[&Activity], is_behind: &[bool], calls: &mut [Calls]) {
        for (index, allowed) in self.allowed.iter().enumerate() {
            let activity = activities[index];
            let left = allowed.saturating_sub(activity.steps);
            if left == 0 || is_behind[index] {
                continue;
            }
            if activity.waiting > 0 {
                let each = left.div_ceil(activity.waiting);
                calls[index] = Calls::Turn(u32::try_from(each).unwrap_or(FURTHER_MAX));
            } else {
                self.plan.let_on(&activity.cut);
            }
        }
    }

    /// Forgets the turns of busy processes: they have had an effect, or other processes go on.
    fn forget_turns(&mut self) {
        self.further.clear();
        self.allowed.clear();
    }
}
