//! Processes behind shut gates and a coordinator as a state machine: devices that work in order, kernels that wait for
//! launches that nobody counts, threads that come to the gate or the cut, and the decision of production
//! ([`Stepper::update`]).

use std::collections::BTreeSet;

use stateright::{Model, Property};

use super::{Op, Program};
use crate::plan::{Pace, Plan};
use crate::stepping::{Activity, Calls, Decision, Stepper};
use crate::{
    CommunicatorId, CutReport, Inside, Lane, LaunchCount, Limits, Need, Rank, Seen, Series, Waiting,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// On its way.
    Host,
    /// At the cut, or in a meeting.
    Cut,
    /// At the gate, counted or not to be counted.
    Gate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Thread {
    done: usize,
    at: At,
    /// May what it has launched be what keeps its device busy?
    is_blocked: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    threads: Vec<Thread>,
    limits: Limits,
    calls: Calls,
    /// Was its device idle when it began with these?
    was_idle: bool,
    /// The last report of the process; none before it has reported, or since it was sent something else.
    report: Option<Activity>,
    /// The order that the process is to be told.
    order: Option<(Limits, Calls)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    processes: Vec<Process>,
    stepper: Stepper,
    drained: bool,
    hasty: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A thread comes to its next operation, or goes past the cut.
    Move(usize, usize),
    /// A process is told its order.
    Deliver(usize),
    /// It lets all that wait make a call, or one that is ready.
    Step(usize),
    /// It is told to make no more of these calls, for a device has become idle.
    Stop(usize),
    /// It says where it stands.
    Report(usize),
    /// Nothing has moved for a while.
    Stall,
}

#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) program: Program,
    /// The number of times that patience may end too early.
    pub(super) hasty_max: u8,
}

impl Run {
    fn op(&self, state: &State, process: usize, thread: usize) -> Option<Op> {
        let done = state.processes[process].threads[thread].done;
        self.program.processes[process][thread].get(done).copied()
    }

    fn threads(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let processes = self.program.processes.iter().enumerate();
        processes.flat_map(|(process, threads)| (0..threads.len()).map(move |t| (process, t)))
    }

    /// Counts the kernels of each thread that are over.
    fn finished(&self, state: &State) -> Vec<Vec<usize>> {
        let launched = |process: usize, thread: usize| {
            &self.program.processes[process][thread]
                [..state.processes[process].threads[thread].done]
        };
        let mut over: Vec<Vec<usize>> =
            self.program.processes.iter().map(|threads| vec![0; threads.len()]).collect();
        loop {
            let running: Vec<_> = self
                .threads()
                .filter_map(|(p, t)| launched(p, t).get(over[p][t]).map(|op| ((p, t), *op)))
                .collect();
            let ends = |op: &Op| match op {
                Op::Meet { .. } => true,
                Op::Kernel { .. } => {
                    let all =
                        self.threads().filter(|&(p, t)| self.program.processes[p][t].contains(op));
                    all.count() == running.iter().filter(|(_, other)| other == op).count()
                }
            };
            let ending: Vec<_> =
                running.iter().filter(|(_, op)| ends(op)).map(|(place, _)| *place).collect();
            if ending.is_empty() {
                return over;
            }
            for (process, thread) in ending {
                over[process][thread] += 1;
            }
        }
    }

    fn is_idle(&self, state: &State, process: usize) -> bool {
        let over = &self.finished(state)[process];
        over.iter()
            .zip(&state.processes[process].threads)
            .all(|(over, thread)| *over == thread.done)
    }

    fn lane(communicator: u8) -> Lane {
        let communicator = CommunicatorId(u128::from(communicator));
        Lane { communicator, series: Series::Collectives }
    }

    /// Counts the launches of a process on a communicator. A launch is counted before the gate, so one that is about to
    /// be made counts.
    fn count(&self, state: &State, process: usize, communicator: u8) -> u64 {
        let mut count = 0;
        for (thread, ops) in self.program.processes[process].iter().enumerate() {
            let stands = state.processes[process].threads[thread];
            let counted = stands.done + usize::from(stands.at == At::Gate);
            let of_it =
                |op: &&Op| matches!(op, Op::Kernel { counted: Some(c), .. } if *c == communicator);
            count += ops.iter().take(counted).filter(of_it).count() as u64;
        }
        count
    }

    fn communicators(&self, process: usize) -> BTreeSet<u8> {
        let ops = self.program.processes[process].iter().flatten();
        let counted = ops.filter_map(|op| match op {
            Op::Kernel { counted, .. } => *counted,
            Op::Meet { .. } => None,
        });
        counted.collect()
    }

    fn ranks_of(&self, communicator: u8) -> Vec<usize> {
        let all = 0..self.program.processes.len();
        all.filter(|process| self.communicators(*process).contains(&communicator)).collect()
    }

    fn rank(&self, process: usize, communicator: u8) -> Rank {
        let of = self.ranks_of(communicator);
        let rank = of.iter().position(|other| *other == process).unwrap();
        let [rank, ranks] = [rank, of.len()].map(|n| u32::try_from(n).unwrap());
        Rank { communicator: CommunicatorId(u128::from(communicator)), rank, ranks }
    }

    fn need(&self, state: &State, process: usize, communicator: u8) -> Need {
        let rank = self.rank(process, communicator).rank;
        let needed = self.count(state, process, communicator) + 1;
        Need { lane: Self::lane(communicator), rank, needed }
    }

    fn activity(&self, state: &State, process: usize) -> Activity {
        let stands = &state.processes[process];
        let communicators = self.communicators(process);
        let mut cut = CutReport { seen: Seen::default(), ..CutReport::default() };
        for &communicator in &communicators {
            let rank = self.rank(process, communicator);
            cut.ranks.push(rank);
            cut.counters.push(LaunchCount {
                lane: Self::lane(communicator),
                rank: rank.rank,
                launched: self.count(state, process, communicator),
            });
        }
        let mut activity = Activity::default();
        for (thread, at) in stands.threads.iter().enumerate().map(|(t, thread)| (t, thread.at)) {
            match (at, self.op(state, process, thread)) {
                (At::Cut, Some(Op::Kernel { counted: Some(communicator), .. })) => {
                    let needs = vec![self.need(state, process, communicator)];
                    cut.waiting.push(Waiting { what: String::new(), needs, waited_ms: 0 });
                }
                (At::Gate, op) => {
                    activity.waiting += 1;
                    if let Some(Op::Kernel { counted: Some(_), .. }) = op {
                        cut.inside.push(Inside { what: String::new(), inside_ms: 0 });
                    }
                }
                _ => {}
            }
        }
        activity.cut = cut;
        activity.is_idle = self.is_idle(state, process);
        let ready = (0..stands.threads.len()).filter(|t| self.is_ready(state, process, *t));
        activity.ready = ready.count() as u64;
        activity.steps = stands.threads.iter().map(|thread| thread.done as u64).sum();
        activity
    }

    fn is_ready(&self, state: &State, process: usize, thread: usize) -> bool {
        let stands = state.processes[process].threads[thread];
        stands.at == At::Gate && (!stands.is_blocked || self.is_idle(state, process))
    }

    fn waits(state: &State, process: usize) -> bool {
        state.processes[process].threads.iter().any(|thread| thread.at == At::Gate)
    }

    /// May it make one call more of those it was allowed?
    fn can_step(&self, state: &State, process: usize) -> bool {
        let stands = &state.processes[process];
        match stands.calls {
            Calls::None | Calls::Ready(0) | Calls::Each(0) | Calls::Turn(0) => false,
            Calls::Ready(_) => {
                let mut threads = 0..stands.threads.len();
                self.is_idle(state, process) == stands.was_idle
                    && threads.any(|thread| self.is_ready(state, process, thread))
            }
            Calls::Each(_) | Calls::Turn(_) => Self::waits(state, process),
        }
    }

    /// All that wait make a call, or the first one that is ready.
    fn step(&self, state: &State, next: &mut State, process: usize) {
        let go = |thread: &mut Thread| (thread.done, thread.at) = (thread.done + 1, At::Host);
        let was_idle = self.is_idle(state, process);
        match state.processes[process].calls {
            Calls::None => {}
            Calls::Each(count) => {
                let stands = &mut next.processes[process];
                stands.calls = Calls::Each(count - 1);
                stands.threads.iter_mut().filter(|thread| thread.at == At::Gate).for_each(go);
            }
            Calls::Turn(count) => {
                let stands = &mut next.processes[process];
                stands.threads.iter_mut().filter(|thread| thread.at == At::Gate).for_each(go);
                let is_idle = self.is_idle(next, process);
                next.processes[process].calls = Calls::Turn(if is_idle { 0 } else { count - 1 });
            }
            Calls::Ready(count) => {
                let mut threads = 0..state.processes[process].threads.len();
                let first = threads.find(|thread| self.is_ready(state, process, *thread)).unwrap();
                next.processes[process].calls = Calls::Ready(count - 1);
                go(&mut next.processes[process].threads[first]);
                if was_idle && !self.is_idle(next, process) {
                    next.processes[process].threads[first].is_blocked = true;
                }
            }
        }
        self.forget_blocked(next);
    }

    /// Clears the marks of blocked threads where the devices are idle: nobody keeps those busy.
    fn forget_blocked(&self, next: &mut State) {
        for process in 0..next.processes.len() {
            if self.is_idle(next, process) {
                next.processes[process]
                    .threads
                    .iter_mut()
                    .for_each(|thread| thread.is_blocked = false);
            }
        }
    }

    fn after(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Move(process, thread) => self.come(&mut next, process, thread),
            Action::Deliver(process) => {
                let (limits, calls) = next.processes[process].order.take()?;
                let was_idle = self.is_idle(state, process);
                let stands = &mut next.processes[process];
                (stands.limits, stands.calls, stands.was_idle) = (limits, calls, was_idle);
            }
            Action::Step(process) => {
                if !self.can_step(state, process) {
                    return None;
                }
                self.step(state, &mut next, process);
            }
            Action::Stop(process) => {
                let fresh = state.processes.iter().map(|process| process.report.as_ref());
                let makes_calls = self.can_step(state, process)
                    && matches!(state.processes[process].calls, Calls::Ready(_) | Calls::Turn(_));
                if !makes_calls || !state.stepper.is_idle_now(fresh) {
                    return None;
                }
                next.processes[process].calls = Calls::None;
            }
            Action::Report(process) => {
                if state.processes[process].order.is_some() || self.can_step(state, process) {
                    return None;
                }
                next.processes[process].calls = Calls::None;
                next.processes[process].report = Some(self.activity(state, process));
                Self::decide(&mut next, Pace::Moving);
            }
            Action::Stall => {
                if state.processes.iter().any(|process| process.report.is_none()) {
                    return None;
                }
                let is_hasty = self.moves().any(|action| self.after(state, action).is_some());
                if is_hasty && state.hasty == self.hasty_max {
                    return None;
                }
                next.hasty += u8::from(is_hasty);
                Self::decide(&mut next, Pace::Stalled);
            }
        }
        (next != *state).then_some(next)
    }

    fn come(&self, next: &mut State, process: usize, thread: usize) {
        let Some(op) = self.op(next, process, thread) else { return };
        let stands = next.processes[process].threads[thread];
        let moved = match (stands.at, op) {
            (At::Host, Op::Kernel { counted: None, .. }) => Thread { at: At::Gate, ..stands },
            (At::Host, Op::Kernel { counted: Some(_), .. } | Op::Meet { .. }) => {
                Thread { at: At::Cut, ..stands }
            }
            (At::Cut, Op::Kernel { counted: Some(communicator), .. }) => {
                let need = self.need(next, process, communicator);
                let admitted = next.processes[process].limits.admit(&[need]);
                Thread { at: if admitted { At::Gate } else { At::Cut }, ..stands }
            }
            (At::Cut, Op::Meet { threads, .. }) => {
                let has_come = |(p, t): &(usize, usize)| {
                    let other = next.processes[*p].threads[*t];
                    let place = self.program.processes[*p][*t].iter().position(|o| *o == op);
                    place.is_some_and(|place| {
                        other.done > place || (other.done == place && other.at == At::Cut)
                    })
                };
                if self.threads().filter(has_come).count() == threads {
                    Thread { done: stands.done + 1, at: At::Host, ..stands }
                } else {
                    stands
                }
            }
            (At::Gate | At::Cut, _) => stands,
        };
        next.processes[process].threads[thread] = moved;
    }

    /// As the coordinator does.
    fn decide(next: &mut State, pace: Pace) {
        let reports: Vec<_> = next.processes.iter().filter_map(|p| p.report.clone()).collect();
        if reports.len() < next.processes.len() {
            return;
        }
        let all: Vec<_> = reports.iter().collect();
        match next.stepper.update(&all, pace) {
            Decision::Drained => next.drained = true,
            Decision::Open(calls) => {
                let limits = next.stepper.limits().clone();
                for ((process, report), calls) in next.processes.iter_mut().zip(&reports).zip(calls)
                {
                    let limits = limits.for_member(&report.cut);
                    if calls != Calls::None || process.limits != limits {
                        process.order = Some((limits, calls));
                        process.report = None;
                    }
                }
            }
        }
    }

    fn moves(&self) -> impl Iterator<Item = Action> + '_ {
        let moves = self.threads().map(|(process, thread)| Action::Move(process, thread));
        let processes = 0..self.program.processes.len();
        moves.chain(processes.flat_map(|process| {
            [Action::Deliver, Action::Step, Action::Stop, Action::Report]
                .map(|action| action(process))
        }))
    }

    /// All that processes can have launched when their gates were shut at the cut: what is counted is closed.
    fn starts(&self) -> Vec<State> {
        let threads: Vec<_> = self.threads().collect();
        let mut found = BTreeSet::new();
        let mut left = vec![vec![0_usize; threads.len()]];
        while let Some(done) = left.pop() {
            if !found.insert(done.clone()) {
                continue;
            }
            for (index, &(process, thread)) in threads.iter().enumerate() {
                let next = self.program.processes[process][thread].get(done[index]);
                let come = |op: &Op| {
                    threads.iter().zip(&done).all(|(&(p, t), done)| {
                        let place =
                            self.program.processes[p][t].iter().position(|other| other == op);
                        place.is_none_or(|place| *done >= place)
                    })
                };
                if next.is_some_and(|op| matches!(op, Op::Kernel { .. }) || come(op)) {
                    let mut further = done.clone();
                    further[index] += 1;
                    left.push(further);
                }
            }
        }
        found.into_iter().filter_map(|done| self.start(&threads, &done)).collect()
    }

    fn start(&self, threads: &[(usize, usize)], done: &[usize]) -> Option<State> {
        let mut processes: Vec<Process> = Vec::new();
        for (&(process, _), &done) in threads.iter().zip(done) {
            if processes.len() == process {
                processes.push(Process {
                    threads: Vec::new(),
                    limits: Limits::default(),
                    calls: Calls::None,
                    was_idle: false,
                    report: None,
                    order: None,
                });
            }
            processes[process].threads.push(Thread { done, at: At::Host, is_blocked: true });
        }
        let mut state =
            State { processes, stepper: Stepper::new(Plan::default()), drained: false, hasty: 0 };
        let mut plan = Plan::default();
        let reports: Vec<_> =
            (0..state.processes.len()).map(|process| self.activity(&state, process).cut).collect();
        let _verdict = plan.update(&reports.iter().collect::<Vec<_>>(), Pace::Moving);
        let is_closed = reports.iter().all(|report| report.is_at_rest(plan.limits()));
        for (process, report) in state.processes.iter_mut().zip(&reports) {
            process.limits = plan.limits().for_member(report);
        }
        state.stepper = Stepper::new(plan);
        self.forget_blocked(&mut state);
        is_closed.then_some(state)
    }

    fn is_over(&self, state: &State) -> bool {
        (0..state.processes.len()).all(|process| self.is_idle(state, process))
    }

    /// Can nothing be launched any more?
    fn is_frozen(&self, state: &State) -> bool {
        (0..state.processes.len()).all(|process| !self.can_step(state, process))
    }
}

impl Model for Run {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        self.starts()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if !state.drained {
            actions.extend(self.moves());
            actions.push(Action::Stall);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        self.after(state, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::eventually("it is drained", |_, state: &State| state.drained),
            Property::always("all devices are idle then", |run: &Run, state: &State| {
                !state.drained || run.is_over(state)
            }),
            Property::always("nothing can be launched then", |run: &Run, state: &State| {
                !state.drained || run.is_frozen(state)
            }),
        ]
    }
}
