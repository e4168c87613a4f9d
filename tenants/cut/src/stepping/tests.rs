//! Programs whose kernels wait for each other are drained, in whatever order all moves.

mod run;

use stateright::{Checker, Model};

use super::{Activity, Calls, Decision, Stepper};
use crate::plan::{Pace, Plan};
use crate::{CommunicatorId, CutReport, Lane, LaunchCount, Rank, Series, Waiting};
use run::Run;

/// An operation of a thread. Kernels run in the order in which their thread has launched them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Op {
    /// A kernel that runs until all who take part run theirs of the same number. `Some` is the communicator where
    /// launches are counted.
    Kernel { number: u32, counted: Option<u8> },
    /// Waits on the host until as many threads have come to the meeting.
    Meet { number: u32, threads: usize },
}

/// The operations of all threads of all processes.
#[derive(Clone, Debug, Default)]
struct Program {
    processes: Vec<Vec<Vec<Op>>>,
    numbers: u32,
}

impl Program {
    fn new(processes: usize, threads: usize) -> Self {
        Self { processes: vec![vec![Vec::new(); threads]; processes], numbers: 0 }
    }

    /// Kernels of these threads that wait for each other.
    fn kernel(&mut self, counted: Option<u8>, of: &[(usize, usize)]) {
        self.numbers += 1;
        for &(process, thread) in of {
            self.processes[process][thread].push(Op::Kernel { number: self.numbers, counted });
        }
    }

    fn hidden(&mut self, of: &[usize]) {
        self.kernel(None, &of.iter().map(|process| (*process, 0)).collect::<Vec<_>>());
    }

    fn counted(&mut self, communicator: u8, of: &[usize]) {
        let threads: Vec<_> = of.iter().map(|process| (*process, 0)).collect();
        self.kernel(Some(communicator), &threads);
    }

    fn meet(&mut self, of: &[usize]) {
        self.numbers += 1;
        for process in of {
            self.processes[*process][0].push(Op::Meet { number: self.numbers, threads: of.len() });
        }
    }
}

fn drains(program: Program, hasty_max: u8) {
    let checker = Run { program, hasty_max }.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() > 20, "{}", checker.unique_state_count());
}

#[test]
fn an_all_reduce_that_nobody_counts_is_drained() {
    let mut program = Program::new(2, 1);
    (0..4).for_each(|_| program.hidden(&[0, 1]));
    drains(program.clone(), 0);
    drains(program, 1);
}

#[test]
fn three_ranks_in_pairs_are_drained() {
    let mut program = Program::new(3, 1);
    for pair in [[0, 1], [1, 2], [0, 2], [0, 1]] {
        program.hidden(&pair);
    }
    drains(program, 0);
}

#[test]
fn counted_and_uncounted_launches_are_drained_together() {
    let mut program = Program::new(2, 1);
    program.counted(1, &[0, 1]);
    program.hidden(&[0, 1]);
    program.counted(1, &[0, 1]);
    program.hidden(&[0, 1]);
    drains(program, 0);
}

#[test]
fn a_rank_that_waits_at_the_cut_for_what_others_need_is_let_on() {
    // Rank 1 waits at a collective with rank 2, before the kernel that rank 0 waits for.
    let mut program = Program::new(3, 1);
    program.hidden(&[0, 1]);
    program.counted(1, &[1, 2]);
    program.hidden(&[0, 1]);
    drains(program, 0);
}

#[test]
fn a_kernel_that_waits_for_another_thread_of_its_process_is_drained() {
    let mut program = Program::new(1, 2);
    (0..3).for_each(|_| program.kernel(None, &[(0, 0), (0, 1)]));
    drains(program, 0);
    let mut program = Program::new(2, 2);
    program.hidden(&[0, 1]);
    program.kernel(None, &[(0, 0), (0, 1)]);
    program.hidden(&[0, 1]);
    drains(program, 0);
}

#[test]
fn ranks_whose_peers_launch_by_another_thread_are_drained() {
    let mut program = Program::new(2, 2);
    (0..2).for_each(|_| program.kernel(None, &[(0, 0), (0, 1), (1, 0), (1, 1)]));
    drains(program, 0);
}

#[test]
fn ranks_that_meet_on_the_host_are_drained() {
    let mut program = Program::new(2, 1);
    program.hidden(&[0, 1]);
    program.meet(&[0, 1]);
    program.hidden(&[0, 1]);
    program.hidden(&[0, 1]);
    drains(program, 0);
}

#[test]
fn launches_that_wait_for_memory_are_not_let_on() {
    let lane = Lane { communicator: CommunicatorId(1), series: Series::Collectives };
    let rank = |rank| Rank { communicator: lane.communicator, rank, ranks: 2 };
    let activity = |own: u32, waits: bool, is_idle| {
        let needs = Vec::new();
        let waiting = Waiting { what: "ncclAllReduce".to_owned(), needs, waited_ms: 9 };
        let cut = CutReport {
            ranks: vec![rank(own)],
            counters: vec![LaunchCount { lane, rank: own, launched: 5 }],
            waiting: waits.then_some(waiting).into_iter().collect(),
            ..CutReport::default()
        };
        Activity { cut, is_idle, ..Activity::default() }
    };
    let mut stepper = Stepper::new(Plan::default());
    for pace in [Pace::Moving, Pace::Stalled, Pace::Stalled] {
        // The first device takes its time over what needs nobody.
        let seen = [activity(0, true, false), activity(1, true, true)];
        let decision = stepper.update(&[&seen[0], &seen[1]], pace);
        assert_eq!(decision, Decision::Open(vec![Calls::None; 2]));
    }
    let seen = [activity(0, true, true), activity(1, true, true)];
    assert_eq!(stepper.update(&[&seen[0], &seen[1]], Pace::Moving), Decision::Drained);
}
