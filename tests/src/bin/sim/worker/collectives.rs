//! Launches that wait for other ranks, counted by the cut as the preload object counts NCCL's.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use sublet_tests::{Outcome, Trouble};
use tenants::cut::{CommunicatorId, Counter, Increment, Lane, Rank, Series};
use vmm_pool::driver::sim::{StreamKind, Work};
use vmm_pool::driver::{DeviceOrdinal, DriverCode, RawStream};
use vmm_pool::gate::Passage;

use super::Sim;
use super::board::Board;
use crate::orders::Generation;

/// How far the host may run ahead of the device.
const AHEAD_MAX: u64 = 8;
const WORLD: u32 = 0;
/// The first lane of messages from a rank to the next.
const MESSAGES: u32 = 3;

/// The communicators of one process, and the stream of its device that their kernels run on.
pub(super) struct Collectives {
    member: Arc<Sim>,
    stream: RawStream,
    table: Option<Table>,
    ahead: u64,
}

struct Table {
    generation: Generation,
    board: Arc<Board>,
}

/// One lane of one step, and who takes part.
struct Part {
    lane: u32,
    ranks: Vec<u32>,
}

impl Collectives {
    pub(super) fn new(member: Arc<Sim>, device: DeviceOrdinal) -> Outcome<Self> {
        let core = member.pool().driver().core();
        core.ensure_context(device).map_err(refused)?;
        let stream = core.new_stream(device, StreamKind::NonBlocking).map_err(refused)?;
        Ok(Self { member, stream, table: None, ahead: 0 })
    }

    /// Leaves the communicators there were and takes its ranks in new ones.
    pub(super) fn join(&mut self, generation: Generation) -> Outcome {
        self.leave()?;
        let board = Arc::new(Board::open(&generation.board)?);
        for (communicator, rank, ranks) in ranks_in(&generation) {
            self.member.cut().add_rank(Rank { communicator, rank, ranks });
        }
        self.table = Some(Table { generation, board });
        Ok(())
    }

    pub(super) fn leave(&mut self) -> Outcome {
        self.wait()?;
        if let Some(table) = self.table.take() {
            for (communicator, rank, _) in ranks_in(&table.generation) {
                self.member.cut().remove_rank(communicator, rank);
            }
        }
        Ok(())
    }

    /// Has a rank died, so that nothing can go on?
    pub(super) fn are_aborted(&self) -> Outcome<bool> {
        match &self.table {
            Some(table) => Ok(table.board.is_aborted()?),
            None => Ok(false),
        }
    }

    /// Waits until the device has done all launches.
    pub(super) fn wait(&mut self) -> Outcome {
        self.ahead = 0;
        self.member.pool().driver().core().wait_stream(self.stream).map_err(refused)
    }

    /// Launches this rank's part of a step, if it has one; says how many launches that were.
    pub(super) fn step(&mut self, seed: u64, step: u64) -> Outcome<u64> {
        let Some(table) = &self.table else {
            return Ok(0);
        };
        let mut parts = parts_of(seed, step, table.generation.ranks);
        parts.retain(|part| part.ranks.contains(&table.generation.rank));
        if parts.is_empty() {
            return Ok(0);
        }
        let cut = self.member.cut();
        let counters: Vec<Arc<Counter>> = parts
            .iter()
            .map(|part| {
                let (lane, rank) = lane_of(&table.generation, part.lane);
                cut.counter(lane, rank)
            })
            .collect();
        let increment = |counter| Increment { counter: Arc::clone(counter), launches: 1 };
        let increments: Vec<Increment> = counters.iter().map(increment).collect();
        let launches = increments.len() as u64;
        {
            let _launch = cut.enter("simulated group", &increments);
            let _pass = self.member.gate().pass(Passage::Use);
            let counts: Vec<u64> = counters.iter().map(|counter| counter.launched()).collect();
            let work = kernel(table, parts, counts);
            self.member.pool().driver().core().enqueue(self.stream, work).map_err(refused)?;
        }
        self.ahead += 1;
        if self.ahead >= AHEAD_MAX {
            self.wait()?;
        }
        Ok(launches)
    }
}

fn refused(code: DriverCode) -> Trouble {
    Trouble::new(format!("the simulated device refused with {code}"))
}

/// Arrives at each part and waits for the others, as one kernel does for all that a group holds.
fn kernel(table: &Table, parts: Vec<Part>, counts: Vec<u64>) -> Work {
    let (board, rank) = (Arc::clone(&table.board), table.generation.rank);
    Work::new(move |core| {
        let failed = |_| DriverCode::UNKNOWN;
        for (part, count) in parts.iter().zip(&counts) {
            board.arrive(part.lane, rank, *count).map_err(failed)?;
        }
        let mut patience = Duration::from_micros(50);
        for (part, count) in parts.iter().zip(&counts) {
            while !board.have_arrived(part.lane, &part.ranks, *count).map_err(failed)? {
                if core.is_closing() || board.is_aborted().map_err(failed)? {
                    return Ok(());
                }
                wait_a_moment(patience);
                patience = (patience * 2).min(Duration::from_millis(2));
            }
        }
        Ok(())
    })
}

#[expect(clippy::disallowed_methods, reason = "a kernel that waits for another device polls")]
fn wait_a_moment(time: Duration) {
    std::thread::sleep(time);
}

/// What the ranks do together in a step: the same for all that ask with the same seed.
fn parts_of(seed: u64, step: u64, ranks: u32) -> Vec<Part> {
    let mut random = Rng::with_seed(seed ^ step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let world = || Part { lane: WORLD, ranks: (0..ranks).collect() };
    let half = |index: u32| Part { lane: 1 + index, ranks: half(index, ranks) };
    let message = |from: u32| Part { lane: MESSAGES + from, ranks: vec![from, (from + 1) % ranks] };
    match random.u32(..10) {
        0..4 => vec![world()],
        4..6 if ranks > 1 => vec![half(0), half(1)],
        6..8 if ranks > 1 => vec![message(random.u32(..ranks))],
        8 if ranks > 1 => vec![world(), message(random.u32(..ranks))],
        _ => Vec::new(),
    }
}

/// The ranks of the first or the second half.
fn half(index: u32, ranks: u32) -> Vec<u32> {
    let middle = ranks.div_ceil(2);
    if index == 0 { (0..middle).collect() } else { (middle..ranks).collect() }
}

fn communicator(generation: &Generation, index: u32) -> CommunicatorId {
    // The generation is in the part that people see.
    CommunicatorId((u128::from(generation.number) << 96) | u128::from(index))
}

/// A rank's place in every communicator that it is in: the world and its half.
fn ranks_in(generation: &Generation) -> Vec<(CommunicatorId, u32, u32)> {
    let Generation { rank, ranks, .. } = *generation;
    let mut locals = vec![(communicator(generation, WORLD), rank, ranks)];
    for index in 0..2 {
        let members = half(index, ranks);
        if let (Some(first), Ok(size)) = (members.first(), u32::try_from(members.len()))
            && members.contains(&rank)
        {
            locals.push((communicator(generation, 1 + index), rank - first, size));
        }
    }
    locals
}

/// The cut's lane for one of the board's, and this rank's number there.
fn lane_of(generation: &Generation, lane: u32) -> (Lane, u32) {
    let Generation { rank, ranks, .. } = *generation;
    if lane >= MESSAGES {
        let from = lane - MESSAGES;
        let series = Series::Pair { from, to: (from + 1) % ranks };
        return (Lane { communicator: communicator(generation, WORLD), series }, rank);
    }
    let middle = ranks.div_ceil(2);
    let place = if lane == 2 { rank - middle } else { rank };
    let communicator = communicator(generation, lane);
    (Lane { communicator, series: Series::Collectives }, place)
}
