//! The plan of a swap against processes that do as they are told, in any order: no device ever holds more than it may, and all
//! of it comes to an end.

use std::collections::{BTreeMap, VecDeque};

use super::{Exchange, Move};
use sublet_protocol::wire::{DeviceDelta, Needed, PhaseReport, StageLeft, StageReport, Window};
use vmm_pool::Schedule;
use vmm_pool::driver::DeviceOrdinal;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A block: the device, and its size.
type Block = (usize, u64);

#[derive(Clone, Debug, Default)]
struct Worker {
    /// Own memory that is still to move.
    left: Vec<Block>,
    told: VecDeque<Told>,
}

#[derive(Clone, Debug)]
enum Told {
    Stage(Window),
    Release,
    Verify,
}

struct Swapped {
    plan: Exchange,
    leaving: Vec<Worker>,
    coming: Vec<Worker>,
    /// In use, by device.
    used: BTreeMap<usize, u64>,
    limits: BTreeMap<usize, u64>,
    /// Orders to come, but the first, that brought nothing.
    empty: usize,
}

fn uuid(device: usize) -> String {
    format!("GPU-{device}")
}

fn bytes_by_device(blocks: &[Block]) -> BTreeMap<usize, u64> {
    let mut bytes = BTreeMap::new();
    for (device, size_bytes) in blocks {
        *bytes.entry(*device).or_insert(0) += size_bytes;
    }
    bytes
}

fn deltas(bytes: &BTreeMap<usize, u64>, free: &BTreeMap<usize, u64>) -> Vec<DeviceDelta> {
    let delta = |(device, bytes): (&usize, &u64)| DeviceDelta {
        device: DeviceOrdinal(0),
        uuid: uuid(*device),
        bytes: *bytes,
        free_bytes: free.get(device).copied().unwrap_or(0),
        total_bytes: 1 << 40,
    };
    bytes.iter().map(delta).collect()
}

fn needed(blocks: &[Block], free: &BTreeMap<usize, u64>) -> Needed {
    let largest_bytes = blocks.iter().map(|block| block.1).max().unwrap_or(0);
    Needed { devices: deltas(&bytes_by_device(blocks), free), largest_bytes }
}

impl Swapped {
    fn new(leaving: Vec<Vec<Block>>, coming: Vec<Vec<Block>>, window: u64, free: u64) -> Self {
        let free: BTreeMap<usize, u64> = [(0, free), (1, free)].into();
        let all = |workers: &[Vec<Block>]| bytes_by_device(&workers.concat());
        let (out, back) = (all(&leaving), all(&coming));
        let gives: Vec<_> =
            leaving.iter().map(|blocks| deltas(&bytes_by_device(blocks), &free)).collect();
        let needs: Vec<_> = coming.iter().map(|blocks| needed(blocks, &free)).collect();
        let both_fit = back.iter().all(|(device, bytes)| free[device] >= bytes + window);
        let limits = [0, 1].map(|device| {
            let of = |bytes: &BTreeMap<usize, u64>| bytes.get(&device).copied().unwrap_or(0);
            let most = if both_fit { u64::MAX } else { of(&out).max(of(&back)) + window };
            (device, (of(&out) + free[&device]).min(most))
        });
        let worker = |left| Worker { left, told: VecDeque::new() };
        Self {
            plan: Exchange::new(Some(window), &gives, &needs),
            leaving: leaving.into_iter().map(worker).collect(),
            coming: coming.into_iter().map(worker).collect(),
            used: out,
            limits: limits.into(),
            empty: 0,
        }
    }

    fn send(&mut self) {
        while let Some(next) = self.plan.next() {
            let (worker, told) = match next {
                Move::Release(index, Some(window)) => {
                    (&mut self.leaving[index], Told::Stage(window))
                }
                Move::Release(index, None) => (&mut self.leaving[index], Told::Release),
                Move::Verify(index) => (&mut self.leaving[index], Told::Verify),
                Move::Restore(index, window) => (&mut self.coming[index], Told::Stage(window)),
            };
            worker.told.push_back(told);
        }
    }

    fn report(blocks: &[Block], moved: &[Block]) -> PhaseReport {
        let smallest = |device| {
            let there = blocks.iter().filter(|block| block.0 == device);
            there.map(|block| block.1).min().unwrap_or(0)
        };
        let left = bytes_by_device(blocks).into_iter().map(|(device, bytes)| StageLeft {
            uuid: uuid(device),
            bytes,
            smallest_bytes: smallest(device),
        });
        let stage = StageReport { copied_bytes: 0, left: left.collect() };
        let devices = deltas(&bytes_by_device(moved), &BTreeMap::new());
        PhaseReport { devices, stage: Some(stage), ..PhaseReport::default() }
    }

    fn release(&mut self, index: usize) {
        let told = self.leaving[index].told.pop_front().expect("told");
        let mut left = std::mem::take(&mut self.leaving[index].left);
        let mut moved = Vec::new();
        match &told {
            Told::Verify => {
                self.plan.left_for_good(index);
                return;
            }
            Told::Release => moved.append(&mut left),
            Told::Stage(window) => {
                let mut taken: BTreeMap<usize, u64> = BTreeMap::new();
                left.retain(|block| {
                    let allowed = window.devices.iter().find(|(name, _)| *name == uuid(block.0));
                    let allowed = allowed.map_or(0, |(_, bytes)| *bytes);
                    let taken = taken.entry(block.0).or_insert(0);
                    let goes = allowed > 0 && (*taken == 0 || *taken + block.1 <= allowed);
                    if goes {
                        *taken += block.1;
                        moved.push(*block);
                    }
                    !goes
                });
            }
        }
        for block in &moved {
            *self.used.entry(block.0).or_insert(0) -= block.1;
        }
        let report = Self::report(&left, &moved);
        self.leaving[index].left = left;
        match told {
            Told::Stage(_) | Told::Release | Told::Verify => self.plan.released(index, &report),
        }
    }

    fn restore(&mut self, index: usize) {
        let Some(Told::Stage(window)) = self.coming[index].told.pop_front() else {
            panic!("only stages");
        };
        let mut left = std::mem::take(&mut self.coming[index].left);
        let mut moved = Vec::new();
        for (name, bytes) in &window.devices {
            let mut taken = 0;
            left.retain(|block| {
                let comes = uuid(block.0) == *name && taken + block.1 <= *bytes;
                if comes {
                    taken += block.1;
                    moved.push(*block);
                    *self.used.entry(block.0).or_insert(0) += block.1;
                }
                !comes
            });
        }
        self.empty += usize::from(moved.is_empty() && window.stage > 0);
        let report = Self::report(&left, &moved);
        self.coming[index].left = left;
        self.plan.restored(index, &report);
    }

    /// Runs to the end, answers in the order of `random`.
    fn run(&mut self, random: &mut fastrand::Rng) {
        loop {
            self.send();
            for (device, used) in &self.used {
                let limit = self.limits[device];
                assert!(*used <= limit, "{used} of {limit} on {device}");
            }
            if self.plan.is_over() {
                break;
            }
            let busy = |workers: &[Worker]| {
                let all = workers.iter().enumerate();
                all.filter(|(_, worker)| !worker.told.is_empty())
                    .map(|(index, _)| index)
                    .collect::<Vec<_>>()
            };
            let (out, back) = (busy(&self.leaving), busy(&self.coming));
            assert!(!(out.is_empty() && back.is_empty()), "a halt");
            let at = random.usize(..out.len() + back.len());
            match out.get(at) {
                Some(index) => self.release(*index),
                None => self.restore(back[at - out.len()]),
            }
        }
        assert!(self.leaving.iter().all(|worker| worker.left.is_empty()));
    }
}

fn blocks(random: &mut fastrand::Rng, sizes: &[u64]) -> Vec<Block> {
    let count = random.usize(..60);
    let block =
        |random: &mut fastrand::Rng| (random.usize(..2), sizes[random.usize(..sizes.len())] * MIB);
    (0..count).map(|_| block(random)).collect()
}

#[test]
fn no_device_holds_more_than_it_may_and_all_comes_to_an_end() {
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let sizes = &[2, 2, 20, 64][..random.usize(1..=4)];
        let workers = |random: &mut fastrand::Rng| {
            (0..random.usize(1..4)).map(|_| blocks(random, sizes)).collect::<Vec<_>>()
        };
        let (leaving, coming) = (workers(&mut random), workers(&mut random));
        let window = 64 * MIB * random.u64(1..4);
        // All of it fits in the end.
        let all: u64 = coming.iter().flatten().map(|block| block.1).sum();
        Swapped::new(leaving, coming, window, all).run(&mut random);
    }
}

/// Both go at one speed: the one that was told something longest ago answers next, as soon as both have.
fn in_step(swapped: &mut Swapped) -> Idle {
    let mut idle = Idle::default();
    loop {
        swapped.send();
        if swapped.plan.is_over() {
            return idle;
        }
        let told = |workers: &[Worker]| workers.iter().any(|worker| !worker.told.is_empty());
        let (out, back) = (told(&swapped.leaving), told(&swapped.coming));
        assert!(out || back, "a halt");
        let misses = |workers: &[Worker]| workers.iter().any(|worker| !worker.left.is_empty());
        idle.out += usize::from(!out && misses(&swapped.leaving));
        idle.back += usize::from(!back && misses(&swapped.coming));
        for index in 0..swapped.leaving.len() {
            if !swapped.leaving[index].told.is_empty() {
                swapped.release(index);
            }
        }
        for index in 0..swapped.coming.len() {
            if !swapped.coming[index].told.is_empty() {
                swapped.restore(index);
            }
        }
    }
}

/// The number of times that each side had nothing to do though something was left.
#[derive(Debug, Default)]
struct Idle {
    out: usize,
    back: usize,
}

#[test]
fn nobody_waits_where_a_window_is_free_and_the_first_never_does() {
    for (size, window) in [(512 * MIB, GIB), (512 * MIB, 2 * GIB), (20 * MIB, 256 * MIB)] {
        for free in [0, window, 100 * GIB] {
            let all = vec![vec![(0, size); 96]];
            let mut swapped = Swapped::new(all.clone(), all, window, free);
            let idle = in_step(&mut swapped);
            assert_eq!((idle.out, swapped.empty), (0, 0), "{size} {window} {free}");
            assert!(idle.back == 0 || free == 0, "{size} {window} {free}: {idle:?}");
        }
    }
}

#[test]
fn where_both_fit_the_first_saves_all_and_gives_it_back_last() {
    let all = vec![vec![(0, GIB); 8], vec![(1, GIB); 3]];
    for (free, both_fit) in [(8 * GIB, false), (9 * GIB, true)] {
        let swapped = || Swapped::new(all.clone(), all.clone(), GIB, free);
        let mut plan = swapped().plan;
        assert_eq!(plan.rest() == Schedule::SaveFirst, both_fit);
        let told: Vec<_> = std::iter::from_fn(|| plan.next()).collect();
        if both_fit {
            let window = |device, bytes| Window { stage: 0, devices: vec![(uuid(device), bytes)] };
            let moves = [
                Move::Release(0, None),
                Move::Release(1, None),
                Move::Restore(0, window(0, 8 * GIB)),
                Move::Restore(1, window(1, 3 * GIB)),
            ];
            assert_eq!(told, moves);
        } else {
            assert!(matches!(told[0], Move::Release(0, Some(_))), "{told:?}");
        }
        in_step(&mut swapped());
    }
}

#[test]
fn one_whose_room_others_have_taken_meanwhile_comes_when_the_first_has_left() {
    let all = vec![vec![(0, GIB); 8]];
    let mut swapped = Swapped::new(all.clone(), all, GIB, 9 * GIB);
    swapped.send();
    assert_eq!(swapped.coming[0].told.len(), 1);
    swapped.coming[0].told.clear();
    let report = Swapped::report(&swapped.coming[0].left, &[]);
    swapped.plan.restored(0, &report);
    assert_eq!(swapped.plan.next(), None, "as much was too much");
    swapped.release(0);
    assert_eq!(swapped.plan.next(), Some(Move::Verify(0)), "the rest comes in one step");
    swapped.plan.left_for_good(0);
    assert!(swapped.plan.is_over());
}

#[test]
fn one_that_has_nothing_so_small_is_not_told_again_to_take_as_little() {
    let (small, large) = (vec![vec![(0, 2 * MIB); 100]], vec![vec![(0, 64 * MIB); 3]]);
    let mut swapped = Swapped::new(small, large, 16 * MIB, 8 * MIB);
    in_step(&mut swapped);
    assert!(swapped.empty <= 2, "{}", swapped.empty);
}

#[test]
fn numbers_that_nobody_can_mean_end_in_no_sum_and_answers_without_end_in_the_rest() {
    let most = (0, u64::MAX);
    let free = [(0, u64::MAX)].into();
    let gives = vec![deltas(&[most].into(), &free); 3];
    let needs = vec![needed(&[most], &free); 3];
    let mut plan = Exchange::new(None, &gives, &needs);
    assert_eq!(plan.total_bytes(), u64::MAX);
    let (mut stages, mut told) = (0, VecDeque::new());
    loop {
        while let Some(next) = plan.next() {
            told.push_back(next);
        }
        if plan.is_over() {
            break;
        }
        let said = Swapped::report(&[most], &[most]);
        match told.pop_front().expect("an order") {
            Move::Release(index, window) => {
                stages += u32::from(window.is_some());
                plan.released(index, &said);
            }
            Move::Verify(index) => plan.left_for_good(index),
            Move::Restore(index, _) => plan.restored(index, &said),
        }
        if stages == 100 {
            plan.hurry();
        }
    }
    assert!(stages < 110, "{stages}");
}

#[test]
fn who_leaves_for_nobody_is_sent_no_further_stage() {
    let all = vec![vec![(0, 4 * MIB); 50]];
    let mut swapped = Swapped::new(all.clone(), all, 16 * MIB, 16 * MIB);
    swapped.send();
    swapped.release(0);
    swapped.plan.end_coming();
    let next: Vec<_> = std::iter::from_fn(|| swapped.plan.next()).collect();
    assert_eq!(next, [Move::Release(0, None)]);
}

#[test]
fn allocations_of_which_the_usual_window_has_no_room_for_two_move_by_larger_ones() {
    let window = |size_bytes: u64, count: usize| {
        let coming = [needed(&vec![(0, size_bytes); count], &BTreeMap::new())];
        let leaving = coming.each_ref().map(|needed| needed.devices.clone());
        Exchange::new(None, &leaving, &coming).window_bytes
    };
    assert_eq!(window(GIB / 2, 40), GIB, "two fit");
    assert_eq!(window(GIB, 20), 4 * GIB);
    assert_eq!(window(5 * GIB, 4), 5 * GIB, "a quarter of all at most");
    assert_eq!(window(20 * GIB, 1), 5 * GIB);
}
