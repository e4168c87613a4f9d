//! The search: all interleavings of small programs, and random ones of large.

use stateright::{Checker, Model, Property};

use super::model::{Action, Run, State};
use super::programs::{self, Group, Program};

impl Model for Run {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![self.start()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.extend(self.all_actions(state));
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        self.after(state, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // Checked where nothing more can happen, which at a cut is so immediately.
            Property::eventually("it ends at a cut", |_, state: &State| state.settled),
            Property::always(
                "what is launched at the cut is closed",
                |run: &Run, state: &State| !state.settled || run.is_closed(state),
            ),
            Property::always("nothing can be launched at the cut", |run: &Run, state: &State| {
                !state.settled || run.is_frozen(state)
            }),
            Property::always("no stall, nobody beyond the furthest", |run: &Run, state: &State| {
                state.stalls + state.hasty_stalls > 0 || run.is_within_order(state)
            }),
            Property::always("no more stalls than it needs", |run: &Run, state: &State| {
                run.hasty_stalls_max > 0 || state.stalls <= run.stalls_max
            }),
            Property::sometimes("there is a cut", |_, state: &State| state.settled),
        ]
    }
}

/// Tries all interleavings, of launching and of holding.
fn holds_always(program: Program, hasty_stalls_max: u8, stalls_max: u8) {
    let checker =
        Run { program, hasty_stalls_max, stalls_max }.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() > 50, "{}", checker.unique_state_count());
}

#[test]
fn one_communicator_comes_to_a_cut() {
    holds_always(programs::plain(2, 4), 0, 0);
    holds_always(programs::plain(3, 2), 0, 0);
    holds_always(programs::plain(2, 3), 2, 0);
}

#[test]
fn tensor_and_data_parallel_ranks_come_to_a_cut() {
    holds_always(programs::tensor_and_data_parallel(), 0, 0);
}

#[test]
fn a_pipeline_comes_to_a_cut() {
    holds_always(programs::pipeline(), 0, 0);
}

#[test]
fn two_threads_a_rank_come_to_a_cut() {
    holds_always(programs::two_threads(), 0, 0);
}

#[test]
fn signals_come_to_a_cut() {
    holds_always(programs::signals(), 0, 0);
}

#[test]
fn graphs_and_launches_come_to_a_cut() {
    holds_always(programs::graphs(), 0, 0);
}

#[test]
fn ranks_that_meet_on_the_host_come_to_a_cut_by_stalls() {
    holds_always(programs::meetings(), 0, 2);
}

#[test]
fn a_communicator_in_the_making_comes_to_a_cut() {
    holds_always(programs::creation(), 0, 2);
}

#[test]
fn ranks_that_wait_on_the_host_for_many_launches_come_to_a_cut_by_few_stalls() {
    holds_always(programs::mixed_rollout(), 0, 3);
    holds_always(programs::mixed_rollout(), 1, 3);
}

/// All are held when process 1 has made one launch, and go on as far as they may, with a stall wherever nothing moves:
/// how many stalls that takes.
fn stalls_of(program: Program) -> u8 {
    let run = Run { program, hasty_stalls_max: 0, stalls_max: u8::MAX };
    let mut state = run.start();
    (0..2).for_each(|_| run.step(&mut state, 1, 0));
    (0..run.program.processes.len()).for_each(|process| run.exchange(&mut state, process));
    while !state.settled {
        let moves = run.all_actions(&state);
        state = moves.iter().find_map(|action| run.after(&state, *action)).unwrap();
    }
    assert!(run.is_closed(&state) && run.is_frozen(&state));
    state.stalls
}

#[test]
fn a_wait_that_many_launches_end_takes_as_many_stalls_as_their_number_has_digits() {
    for (launches, stalls) in [(1, 1), (3, 2), (15, 4), (100, 7), (400, 9)] {
        assert_eq!(stalls_of(programs::rollout(launches)), stalls, "{launches} launches");
    }
}

/// Random numbers that a seed gives again (`SplitMix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }
}

/// A grid of tensor, data and pipeline parallel ranks that does random steps.
fn grid(tensor: usize, data: usize, stages: usize, length: usize, random: &mut Random) -> Program {
    let at = |t: usize, d: usize, s: usize| (s * data + d) * tensor + t;
    let mut program = Program::new(tensor * data * stages, 1);
    let mut groups: Vec<Group> = Vec::new();
    for s in 0..stages {
        for d in 0..data {
            groups.push(program.group(&(0..tensor).map(|t| at(t, d, s)).collect::<Vec<_>>()));
        }
        for t in 0..tensor {
            groups.push(program.group(&(0..data).map(|d| at(t, d, s)).collect::<Vec<_>>()));
        }
    }
    let mut pipes = Vec::new();
    for d in 0..data {
        for t in 0..tensor {
            pipes.push(program.group(&(0..stages).map(|s| at(t, d, s)).collect::<Vec<_>>()));
        }
    }
    for _ in 0..length {
        match random.below(4) {
            0 if stages > 1 => {
                let stage = random.below(stages - 1);
                let pipe = &pipes[random.below(pipes.len())];
                let there = (stage, stage + 1);
                let both = [there, (stage + 1, stage)];
                program.messages(pipe, if random.below(2) == 0 { &both[..1] } else { &both });
            }
            1 => {
                let (first, second) = (random.below(groups.len()), random.below(groups.len()));
                let launches = 1 + random.below(3) as u64;
                if first == second {
                    program.graph(&[(&groups[first], launches)]);
                } else {
                    program.graph(&[(&groups[first], launches), (&groups[second], 1)]);
                }
            }
            _ => program.collective(&groups[random.below(groups.len())]),
        }
    }
    program
}

/// One random interleaving of `program`, held at a random instant.
fn walk(program: Program, random: &mut Random) {
    let run = Run { program, hasty_stalls_max: 0, stalls_max: 0 };
    let mut state = run.start();
    let processes = run.program.processes.len();
    // Everybody runs for a while before the first is held.
    for _ in 0..random.below(1 + 2 * processes * 8) {
        run.step(&mut state, random.below(processes), 0);
    }
    while !state.settled {
        let before = state.clone();
        for _ in 0..20 * processes {
            let process = random.below(processes);
            match random.below(5) {
                0 => run.exchange(&mut state, process),
                _ => run.step(&mut state, process, 0),
            }
            if state.settled {
                break;
            }
        }
        if state == before {
            let mut all = run.all_actions(&state).into_iter();
            let next = all.find_map(|action| run.after(&state, action));
            state = next.unwrap_or_else(|| panic!("stuck before the cut: {state:#?}"));
        }
    }
    assert_eq!(state.stalls, 0, "a stall that nothing called for");
    assert!(run.is_closed(&state), "{state:#?}");
    assert!(run.is_frozen(&state), "{state:#?}");
    assert!(run.is_within_order(&state), "{state:#?}");
}

fn walk_grids(seeds: std::ops::Range<u64>, sizes: &[(usize, usize, usize)], length: usize) {
    for seed in seeds {
        let mut random = Random(seed);
        let (tensor, data, stages) = sizes[random.below(sizes.len())];
        let length = 1 + random.below(length);
        tell_seed(seed, (tensor, data, stages), length);
        let program = grid(tensor, data, stages, length, &mut random);
        walk(program, &mut random);
    }
}

/// Shown with a failure, so that it can be had again.
#[expect(clippy::print_stdout, reason = "the test's own output names the seed that failed")]
fn tell_seed(seed: u64, size: (usize, usize, usize), length: usize) {
    println!("seed {seed}: grid {size:?}, {length} launches");
}

#[test]
fn small_grids_come_to_a_cut_without_a_stall_for_many_seeds() {
    walk_grids(0..500, &[(2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 1, 4)], 24);
}

#[test]
fn grids_of_up_to_64_ranks_come_to_a_cut_without_a_stall() {
    walk_grids(1000..1008, &[(4, 2, 2), (2, 4, 4), (4, 4, 4), (8, 8, 1), (2, 2, 8)], 100);
}
