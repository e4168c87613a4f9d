//! Programs of ranks that launch, as they are made from one order in which all of it can be done.

use std::collections::BTreeMap;

use super::super::{CommunicatorId, Lane, Rank, Series};

/// An operation of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Launches, all or nothing.
    Launch {
        /// When in the order that the program was made from; 0 where there is none.
        place: u32,
        /// On which lane, by which rank, and how much.
        increments: Vec<(Lane, u32, u64)>,
    },
    /// Makes a communicator: does not return before all its ranks have come.
    Create {
        /// The rank that it gives.
        local: Rank,
        /// The count that it adds to the lane of the communicator's creation.
        increments: [(Lane, u32, u64); 1],
    },
    /// Waits on the host until so many threads have come to the same meeting.
    Meet { meeting: u32, threads: usize },
}

impl Op {
    /// Returns the counts that it adds, each with its lane and rank.
    pub(super) fn increments(&self) -> &[(Lane, u32, u64)] {
        match self {
            Self::Launch { increments, .. } => increments,
            Self::Create { increments, .. } => increments,
            Self::Meet { .. } => &[],
        }
    }

    /// When in the order of the program.
    pub(super) fn place(&self) -> u32 {
        match self {
            Self::Launch { place, .. } => *place,
            Self::Create { .. } | Self::Meet { .. } => 0,
        }
    }
}

/// A process: its threads, each doing one thing after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Process {
    /// Ranks from the beginning on.
    pub(super) ranks: Vec<Rank>,
    pub(super) threads: Vec<Vec<Op>>,
}

/// The operations of all processes.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    pub(super) processes: Vec<Process>,
    place: u32,
    meetings: u32,
    communicators: u128,
}

/// The processes of a communicator, by rank.
#[derive(Clone, Debug)]
pub(super) struct Group {
    id: CommunicatorId,
    processes: Vec<usize>,
}

impl Group {
    fn local(&self, rank: usize) -> Rank {
        let [rank, ranks] = [rank, self.processes.len()].map(|n| u32::try_from(n).unwrap());
        Rank { communicator: self.id, rank, ranks }
    }

    pub(super) fn collectives(&self) -> Lane {
        Lane { communicator: self.id, series: Series::Collectives }
    }

    fn signals(&self, from: usize, to: usize) -> Lane {
        let [from, to] = [from, to].map(|rank| self.local(rank).rank);
        Lane { communicator: self.id, series: Series::Signal { from, to, index: 0, context: 0 } }
    }
}

impl Program {
    /// So many processes of so many threads, which do nothing.
    pub(super) fn new(processes: usize, threads: usize) -> Self {
        let process = Process { ranks: Vec::new(), threads: vec![Vec::new(); threads] };
        Self { processes: vec![process; processes], ..Self::default() }
    }

    /// Does each process do one thing after the other?
    pub(super) fn is_sequential(&self) -> bool {
        self.processes.iter().all(|process| process.threads.len() == 1)
    }

    /// A communicator that is there.
    pub(super) fn group(&mut self, processes: &[usize]) -> Group {
        let group = self.group_to_come(processes);
        for (rank, process) in processes.iter().enumerate() {
            self.processes[*process].ranks.push(group.local(rank));
        }
        group
    }

    /// A communicator that is to be made.
    pub(super) fn group_to_come(&mut self, processes: &[usize]) -> Group {
        self.communicators += 1;
        Group { id: CommunicatorId(self.communicators), processes: processes.to_vec() }
    }

    /// Its making, in each process' first thread.
    pub(super) fn create(&mut self, group: &Group) {
        for (rank, process) in group.processes.iter().enumerate() {
            let local = group.local(rank);
            let lane = Lane { communicator: group.id, series: Series::Creation };
            let create = Op::Create { local, increments: [(lane, local.rank, 1)] };
            self.processes[*process].threads[0].push(create);
        }
    }

    /// One thing in the order of all: in each process, what it launches of it as one.
    fn at_once(&mut self, thread: usize, parts: BTreeMap<usize, Vec<(Lane, u32, u64)>>) {
        self.place += 1;
        let place = self.place;
        for (process, increments) in parts {
            self.processes[process].threads[thread].push(Op::Launch { place, increments });
        }
    }

    /// A collective of `group`.
    pub(super) fn collective(&mut self, group: &Group) {
        self.collective_in(0, group);
    }

    /// A collective of `group` in the thread of that number.
    pub(super) fn collective_in(&mut self, thread: usize, group: &Group) {
        self.graph_in(thread, &[(group, 1)]);
    }

    /// A graph with collectives of several communicators, the same in all their processes.
    pub(super) fn graph(&mut self, of: &[(&Group, u64)]) {
        self.graph_in(0, of);
    }

    fn graph_in(&mut self, thread: usize, of: &[(&Group, u64)]) {
        let mut parts: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        for (group, launches) in of {
            for (rank, process) in group.processes.iter().enumerate() {
                let increment = (group.collectives(), group.local(rank).rank, *launches);
                parts.entry(*process).or_default().push(increment);
            }
        }
        self.at_once(thread, parts);
    }

    /// Messages between ranks of `group`, as one group call in each process.
    pub(super) fn messages(&mut self, group: &Group, pairs: &[(usize, usize)]) {
        let mut parts: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        for (from, to) in pairs {
            let series = Series::Pair { from: group.local(*from).rank, to: group.local(*to).rank };
            let lane = Lane { communicator: group.id, series };
            for rank in [*from, *to] {
                let increment = (lane, group.local(rank).rank, 1);
                parts.entry(group.processes[rank]).or_default().push(increment);
            }
        }
        self.at_once(0, parts);
    }

    /// So many signals of one rank of `group` to another.
    pub(super) fn signal(&mut self, group: &Group, (from, to): (usize, usize), launches: u64) {
        let increment = (group.signals(from, to), group.local(from).rank, launches);
        self.at_once(0, BTreeMap::from([(group.processes[from], vec![increment])]));
    }

    /// A wait for so many of them.
    pub(super) fn wait_for_signals(
        &mut self,
        group: &Group,
        (from, to): (usize, usize),
        launches: u64,
    ) {
        let increment = (group.signals(from, to), group.local(to).rank, launches);
        self.at_once(0, BTreeMap::from([(group.processes[to], vec![increment])]));
    }

    /// A meeting of the first threads of `processes`, on the host.
    pub(super) fn meet(&mut self, processes: &[usize]) {
        self.meetings += 1;
        let meet = Op::Meet { meeting: self.meetings, threads: processes.len() };
        for process in processes {
            self.processes[*process].threads[0].push(meet.clone());
        }
    }
}

/// One communicator of all, `steps` collectives.
pub(super) fn plain(ranks: usize, steps: usize) -> Program {
    let mut program = Program::new(ranks, 1);
    let group = program.group(&(0..ranks).collect::<Vec<_>>());
    for _ in 0..steps {
        program.collective(&group);
    }
    program
}

/// Tensor parallel pairs, data parallel pairs across them, and one for all: a step each.
pub(super) fn tensor_and_data_parallel() -> Program {
    let mut program = Program::new(4, 1);
    let tensor = [program.group(&[0, 1]), program.group(&[2, 3])];
    let data = [program.group(&[0, 2]), program.group(&[1, 3])];
    tensor.iter().chain(&data).for_each(|group| program.collective(group));
    program
}

/// A pipeline of three stages: forward, then back and forth together, then backward.
pub(super) fn pipeline() -> Program {
    let mut program = Program::new(3, 1);
    let group = program.group(&[0, 1, 2]);
    program.messages(&group, &[(0, 1)]);
    program.messages(&group, &[(1, 2)]);
    program.messages(&group, &[(0, 1)]);
    program.messages(&group, &[(1, 2), (2, 1)]);
    program.messages(&group, &[(1, 0)]);
    program
}

/// Each of two ranks has two threads with a communicator each.
pub(super) fn two_threads() -> Program {
    let mut program = Program::new(2, 2);
    let groups = [program.group(&[0, 1]), program.group(&[0, 1])];
    for _ in 0..2 {
        program.collective_in(0, &groups[0]);
        program.collective_in(1, &groups[1]);
    }
    program
}

/// Graphs with several launches on a lane, and launches between them.
pub(super) fn graphs() -> Program {
    let mut program = Program::new(3, 1);
    let (pair, all) = (program.group(&[0, 1]), program.group(&[0, 1, 2]));
    program.graph(&[(&pair, 3), (&all, 2)]);
    program.collective(&pair);
    program.collective(&all);
    program.graph(&[(&pair, 3), (&all, 2)]);
    program
}

/// Ranks that wait for each other on the host, between launches of which only one side is held.
pub(super) fn meetings() -> Program {
    let mut program = Program::new(3, 1);
    let (left, right) = (program.group(&[0, 1]), program.group(&[1, 2]));
    program.collective(&left);
    program.meet(&[0, 1]);
    program.collective(&right);
    program.collective(&right);
    program.meet(&[1, 2]);
    program.collective(&left);
    program
}

/// One rank has launched a collective with a second, which waits on the host for `launches` of two others among themselves.
pub(super) fn rollout(launches: usize) -> Program {
    let mut program = Program::new(4, 1);
    let (train, generate) = (program.group(&[0, 1]), program.group(&[2, 3]));
    (0..launches).for_each(|_| program.collective(&generate));
    program.meet(&[0, 2]);
    program.collective(&train);
    program.collective(&train);
    program.collective(&generate);
    program
}

/// The same, where those on the way launch on two lanes in turn, and graphs with several launches.
pub(super) fn mixed_rollout() -> Program {
    let mut program = Program::new(3, 1);
    let (train, own, both) = (program.group(&[0, 1]), program.group(&[2]), program.group(&[1, 2]));
    program.collective(&own);
    program.collective(&both);
    program.graph(&[(&own, 2), (&both, 1)]);
    program.collective(&own);
    program.meet(&[0, 2]);
    program.collective(&train);
    program.collective(&both);
    program
}

/// Signals that are waited for one by one and together, and more of them than anybody waits for.
pub(super) fn signals() -> Program {
    let mut program = Program::new(3, 1);
    let (all, pair) = (program.group(&[0, 1, 2]), program.group(&[0, 1]));
    program.signal(&all, (0, 1), 1);
    program.collective(&pair);
    program.signal(&all, (0, 1), 1);
    program.signal(&all, (2, 1), 1);
    program.wait_for_signals(&all, (0, 1), 2);
    program.wait_for_signals(&all, (2, 1), 1);
    program.collective(&all);
    program.signal(&all, (0, 1), 3);
    program.collective(&pair);
    program
}

/// A communicator that is made among others' launches.
pub(super) fn creation() -> Program {
    let mut program = Program::new(3, 1);
    let (all, pair) = (program.group(&[0, 1, 2]), program.group(&[1, 2]));
    let made = program.group_to_come(&[0, 1]);
    program.collective(&all);
    program.collective(&pair);
    program.create(&made);
    program.collective(&made);
    program.collective(&all);
    program
}
