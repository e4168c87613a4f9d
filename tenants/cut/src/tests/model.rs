//! Ranks and a coordinator as a state machine: threads that launch, members that hold and report, and the
//! plan. What is let through and what comes next are asked of the code that decides it in production
//! ([`Limits::admit`], [`Plan::update`]).

use std::collections::BTreeSet;

use super::super::plan::{Pace, Plan, Verdict};
use super::super::{CutReport, Inside, Lane, LaunchCount, Limits, Need, Seen, Series, Waiting};
use super::programs::{Op, Program};

/// The place of a thread relative to its next operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    /// On its way to its next operation.
    Host,
    /// Before it.
    Next,
    /// In it.
    Inside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Thread {
    done: usize,
    at: At,
}

/// All processes and the coordinator at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    threads: Vec<Vec<Thread>>,
    /// The limits in force in each process; none while it is open.
    held: Vec<Option<Limits>>,
    /// The last report of each process, made under these limits.
    reports: Vec<Option<CutReport>>,
    plan: Plan,
    /// The furthest place in the program's order when the last process was held.
    furthest: u32,
    pub(super) settled: bool,
    /// Stalls with nothing else left to do.
    pub(super) stalls: u8,
    /// Stalls while something could still have come.
    pub(super) hasty_stalls: u8,
}

/// An event that can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A thread comes to its next operation, does it, or comes back from it.
    Step { process: usize, thread: usize },
    /// The coordinator tells a process its limits and hears where it stands.
    Exchange { process: usize },
    /// Its patience ends.
    Stall,
}

/// A program, and how often patience may end too early.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) program: Program,
    pub(super) hasty_stalls_max: u8,
    /// The most stalls that its ranks need, which wait for each other in ways that launches do not show.
    pub(super) stalls_max: u8,
}

impl Run {
    pub(super) fn start(&self) -> State {
        let processes = &self.program.processes;
        let threads = processes
            .iter()
            .map(|process| vec![Thread { done: 0, at: At::Host }; process.threads.len()]);
        State {
            threads: threads.collect(),
            held: vec![None; processes.len()],
            reports: vec![None; processes.len()],
            plan: Plan::default(),
            furthest: 0,
            settled: false,
            stalls: 0,
            hasty_stalls: 0,
        }
    }

    /// Steps and exchanges that there are, whether or not they would change anything.
    fn moves(&self) -> impl Iterator<Item = Action> + '_ {
        let processes = self.program.processes.iter().enumerate();
        processes.flat_map(|(process, does)| {
            let threads = 0..does.threads.len();
            let steps = threads.map(move |thread| Action::Step { process, thread });
            steps.chain(std::iter::once(Action::Exchange { process }))
        })
    }

    /// All that may happen; some of it may change nothing.
    pub(super) fn all_actions(&self, state: &State) -> Vec<Action> {
        if state.settled {
            return Vec::new();
        }
        self.moves().chain(std::iter::once(Action::Stall)).collect()
    }

    /// The state after `action`; none when it changes nothing.
    pub(super) fn after(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Step { process, thread } => self.step(&mut next, process, thread),
            Action::Exchange { process } => self.exchange(&mut next, process),
            Action::Stall => {
                if state.reports.iter().any(Option::is_none) {
                    return None;
                }
                let is_hasty = self.moves().any(|action| self.after(state, action).is_some());
                if is_hasty && state.hasty_stalls == self.hasty_stalls_max {
                    return None;
                }
                Self::update(&mut next, Pace::Stalled);
                if next == *state {
                    return None;
                }
                if is_hasty {
                    next.hasty_stalls = next.hasty_stalls.saturating_add(1);
                } else {
                    next.stalls = next.stalls.saturating_add(1);
                }
            }
        }
        (next != *state).then_some(next)
    }

    fn op(&self, state: &State, process: usize, thread: usize) -> Option<&Op> {
        let done = state.threads[process][thread].done;
        self.program.processes[process].threads[thread].get(done)
    }

    pub(super) fn step(&self, state: &mut State, process: usize, thread: usize) {
        let Some(op) = self.op(state, process, thread) else {
            return;
        };
        let at = state.threads[process][thread].at;
        let (done, at) = match (at, op) {
            (At::Host, _) => (0, At::Next),
            (At::Next, Op::Launch { .. }) if self.admits(state, process, op) => (1, At::Host),
            (At::Next, Op::Create { .. }) if self.admits(state, process, op) => (0, At::Inside),
            (At::Next, Op::Meet { meeting, threads })
                if self.come_to(state, *meeting) == *threads =>
            {
                (1, At::Host)
            }
            (At::Inside, Op::Create { local, .. }) => {
                let lane = Lane { communicator: local.communicator, series: Series::Creation };
                let come = (0..local.ranks).filter(|rank| self.count(state, lane, *rank) > 0);
                if come.count() == local.ranks as usize { (1, At::Host) } else { (0, At::Inside) }
            }
            (at @ (At::Next | At::Inside), _) => (0, at),
        };
        let thread = &mut state.threads[process][thread];
        thread.done += done;
        thread.at = at;
    }

    fn come_to(&self, state: &State, meeting: u32) -> usize {
        let come = |ops: &[Op], thread: &Thread| {
            let arrived = thread.done + usize::from(thread.at != At::Host);
            let ops = &ops[..arrived.min(ops.len())];
            ops.iter().any(|op| matches!(op, Op::Meet { meeting: m, .. } if *m == meeting))
        };
        let processes = self.program.processes.iter().zip(&state.threads);
        let threads = processes.flat_map(|(does, stand)| does.threads.iter().zip(stand));
        threads.filter(|(ops, thread)| come(ops, thread)).count()
    }

    fn admits(&self, state: &State, process: usize, op: &Op) -> bool {
        let limits = state.held[process].as_ref();
        limits.is_none_or(|limits| limits.admit(&self.needs(state, op)))
    }

    fn needs(&self, state: &State, op: &Op) -> Vec<Need> {
        let increments = op.increments().iter();
        let need = |&(lane, rank, launches): &(Lane, u32, u64)| {
            let needed = self.count(state, lane, rank) + launches;
            Need { lane, rank, needed }
        };
        increments.map(need).collect()
    }

    /// Counts the launches of `rank` on `lane`.
    fn count(&self, state: &State, lane: Lane, rank: u32) -> u64 {
        let launched = (0..state.threads.len()).flat_map(|process| self.launched(state, process));
        let here = launched.flat_map(Op::increments).filter(|(l, r, _)| (*l, *r) == (lane, rank));
        here.map(|(_, _, launches)| launches).sum()
    }

    /// Returns the operations that a process has launched.
    fn launched<'a>(&'a self, state: &'a State, process: usize) -> impl Iterator<Item = &'a Op> {
        let threads = self.program.processes[process].threads.iter();
        threads
            .zip(&state.threads[process])
            .flat_map(|(ops, thread)| &ops[..thread.done + usize::from(thread.at == At::Inside)])
    }

    fn report(&self, state: &State, process: usize) -> CutReport {
        let mut report = CutReport {
            seen: Seen::default(),
            ranks: self.program.processes[process].ranks.clone(),
            ..CutReport::default()
        };
        for op in self.launched(state, process) {
            if let Op::Create { local, .. } = op {
                report.ranks.push(*local);
            }
            for &(lane, rank, launched) in op.increments() {
                let same =
                    |counter: &&mut LaunchCount| (counter.lane, counter.rank) == (lane, rank);
                match report.counters.iter_mut().find(same) {
                    Some(counter) => counter.launched += launched,
                    None => report.counters.push(LaunchCount { lane, rank, launched }),
                }
            }
        }
        for (thread, stands) in state.threads[process].iter().enumerate() {
            let Some(op) = self.op(state, process, thread) else { continue };
            let needs = self.needs(state, op);
            match stands.at {
                At::Next if !needs.is_empty() => {
                    report.waiting.push(Waiting { what: String::new(), needs, waited_ms: 0 });
                }
                At::Inside => report.inside.push(Inside { what: String::new(), inside_ms: 0 }),
                At::Host | At::Next => {}
            }
        }
        report
    }

    /// As the coordinator does: all are held before anything is decided.
    pub(super) fn exchange(&self, state: &mut State, process: usize) {
        let limits = match &state.reports[process] {
            Some(report) => state.plan.limits().for_member(report),
            None => Limits::default(),
        };
        let were_all_held = state.held.iter().all(Option::is_some);
        state.held[process] = Some(limits);
        state.reports[process] = Some(self.report(state, process));
        if !were_all_held && state.held.iter().all(Option::is_some) {
            state.furthest = self.furthest(state);
        }
        Self::update(state, Pace::Moving);
    }

    fn update(state: &mut State, pace: Pace) {
        let reports: Vec<_> = state.reports.iter().flatten().collect();
        if reports.len() < state.reports.len() {
            return;
        }
        let verdict = state.plan.update(&reports, pace);
        let limits = state.plan.limits();
        let mut told = reports.iter().zip(&state.held);
        let all_told = told.all(|(report, held)| held.as_ref() == Some(&limits.for_member(report)));
        state.settled = verdict == Verdict::Settled && all_told;
    }

    fn furthest(&self, state: &State) -> u32 {
        let launched = (0..state.threads.len()).flat_map(|process| self.launched(state, process));
        launched.map(Op::place).max().unwrap_or(0)
    }

    /// Nobody has launched beyond the furthest that anybody had when all were held. Of a process with
    /// several threads, which one is missing cannot be told, so that others may be let on.
    pub(super) fn is_within_order(&self, state: &State) -> bool {
        !self.program.is_sequential()
            || state.held.iter().any(Option::is_none)
            || self.furthest(state) <= state.furthest
    }

    /// All that was launched has all its counterparts.
    pub(super) fn is_closed(&self, state: &State) -> bool {
        let launched =
            || (0..state.threads.len()).flat_map(|process| self.launched(state, process));
        let lanes = launched().flat_map(Op::increments).map(|(lane, ..)| *lane);
        let ops = self.program.processes.iter().flat_map(|does| does.threads.iter().flatten());
        let all: Vec<_> = ops.flat_map(Op::increments).copied().collect();
        let lanes: BTreeSet<_> = lanes.collect();
        lanes.into_iter().all(|lane| {
            let ranks = all.iter().filter(|(l, ..)| *l == lane).map(|(_, rank, _)| *rank);
            if let Series::Signal { from, to, .. } = lane.series {
                return self.count(state, lane, to) <= self.count(state, lane, from);
            }
            let mut counts = ranks.map(|rank| self.count(state, lane, rank));
            let first = counts.next();
            counts.all(|count| Some(count) == first)
        })
    }

    /// Nothing can be launched under the limits in force.
    pub(super) fn is_frozen(&self, state: &State) -> bool {
        (0..state.threads.len()).all(|process| {
            let threads = 0..state.threads[process].len();
            let mut ops = threads.filter_map(|thread| self.op(state, process, thread));
            ops.all(|op| matches!(op, Op::Meet { .. }) || !self.admits(state, process, op))
        })
    }
}
