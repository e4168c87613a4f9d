//! The plan of a swap against processes that do as they are told, in any order: no device ever holds more than it may, all of it
//! comes to an end, and what can change hands does.

use std::collections::{BTreeMap, VecDeque};

use super::super::exchange::{Exchange, Move};
use super::super::hand_over::HandOver;
use crate::wire::{BlockShape, DeviceDelta, Needed, PhaseReport, StageLeft, StageReport, Window};
use vmm_pool::driver::{AllocationFlags, DeviceOrdinal};

const MIB: u64 = 1 << 20;
const MOST: usize = 100;

/// A block: the device, its size, and how it was asked for.
type Block = (usize, u64, Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ByAddress,
    ByHandle,
    /// Nobody else can be given it: it is shared, or kept.
    Own,
}

use Kind::{ByAddress, ByHandle, Own};

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
    hand_over: HandOver,
    leaving: Vec<Worker>,
    coming: Vec<Worker>,
    /// In use, by device, with what nobody owns.
    used: BTreeMap<usize, u64>,
    at_hand: BTreeMap<BlockShape, usize>,
    handed: usize,
    most_at_hand: usize,
    limits: BTreeMap<usize, u64>,
    /// Do those who come take nothing that was another's?
    refuses: bool,
    /// Do those who leave release all of it?
    hands_nothing: bool,
    /// Orders to come, but the first, that brought nothing.
    empty: usize,
}

fn uuid(device: usize) -> String {
    format!("GPU-{device}")
}

fn shape((device, size_bytes, kind): Block) -> BlockShape {
    let is_plain = kind == ByAddress;
    BlockShape { uuid: uuid(device), size_bytes, flags: AllocationFlags::default(), is_plain }
}

fn bytes_by_device(blocks: &[Block]) -> BTreeMap<usize, u64> {
    let mut bytes = BTreeMap::new();
    for (device, size_bytes, _) in blocks {
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

/// What of it could change hands.
fn shapes_of(blocks: &[Block]) -> Vec<(BlockShape, u32)> {
    let mut shapes = BTreeMap::new();
    for block in blocks.iter().filter(|(.., kind)| *kind != Own) {
        *shapes.entry(shape(*block)).or_insert(0) += 1;
    }
    shapes.into_iter().collect()
}

impl Swapped {
    fn new(leaving: Vec<Vec<Block>>, coming: Vec<Vec<Block>>, window: u64, free: u64) -> Self {
        Self::with(HandOver::Plain, leaving, coming, window, free)
    }

    fn with(
        hand_over: HandOver,
        leaving: Vec<Vec<Block>>,
        coming: Vec<Vec<Block>>,
        window: u64,
        free: u64,
    ) -> Self {
        let free: BTreeMap<usize, u64> = [(0, free), (1, free)].into();
        let all = |workers: &[Vec<Block>]| bytes_by_device(&workers.concat());
        let (out, back) = (all(&leaving), all(&coming));
        let gives: Vec<_> =
            leaving.iter().map(|blocks| deltas(&bytes_by_device(blocks), &free)).collect();
        let needs: Vec<_> =
            coming.iter().map(|blocks| deltas(&bytes_by_device(blocks), &free)).collect();
        let needed: Vec<_> = coming
            .iter()
            .zip(&needs)
            .map(|(blocks, devices)| Needed { devices: devices.clone(), shapes: shapes_of(blocks) })
            .collect();
        let shapes: Vec<_> = leaving.iter().map(|blocks| shapes_of(blocks)).collect();
        let plan = Exchange::new(Some(window), &gives, &needs)
            .with_hand_over(hand_over, &shapes, &needed, MOST);
        let limits = [0, 1].map(|device| {
            let of = |bytes: &BTreeMap<usize, u64>| bytes.get(&device).copied().unwrap_or(0);
            (device, (of(&out) + free[&device]).min(of(&out).max(of(&back)) + window))
        });
        let worker = |left| Worker { left, told: VecDeque::new() };
        Self {
            plan,
            hand_over,
            leaving: leaving.into_iter().map(worker).collect(),
            coming: coming.into_iter().map(worker).collect(),
            used: out,
            at_hand: BTreeMap::new(),
            handed: 0,
            most_at_hand: 0,
            limits: limits.into(),
            refuses: false,
            hands_nothing: false,
            empty: 0,
        }
    }

    /// What nobody wants any more is free.
    fn let_go(&mut self) {
        for shape in self.plan.unwanted() {
            *self.at_hand.get_mut(&shape).expect("at hand") -= 1;
            *self.used.entry(usize::from(shape.uuid == uuid(1))).or_insert(0) -= shape.size_bytes;
        }
    }

    fn send(&mut self) {
        while let Some(next) = self.plan.next() {
            if let Move::ReleaseStage(_, window) | Move::RestoreStage(_, window) = &next {
                let shapes = window.wanted.iter().map(|(shape, _)| shape).chain(&window.handed);
                for shape in shapes {
                    match self.hand_over {
                        HandOver::Nothing => panic!("{shape:?}"),
                        HandOver::Plain => assert!(shape.is_plain, "{shape:?}"),
                        HandOver::All => {}
                    }
                }
            }
            let (worker, told) = match next {
                Move::ReleaseStage(index, window) => {
                    (&mut self.leaving[index], Told::Stage(window))
                }
                Move::Release(index) => (&mut self.leaving[index], Told::Release),
                Move::Verify(index) => (&mut self.leaving[index], Told::Verify),
                Move::RestoreStage(index, window) => {
                    assert!(window.stage > 0 || window.handed.is_empty(), "told before");
                    for shape in &window.handed {
                        let there = self.at_hand.get_mut(shape).expect("at hand");
                        *there = there.checked_sub(1).expect("as many as there are");
                    }
                    (&mut self.coming[index], Told::Stage(window))
                }
            };
            worker.told.push_back(told);
        }
    }

    fn report(
        blocks: &[Block],
        moved: &[Block],
        handed: Vec<BlockShape>,
        asked: bool,
    ) -> PhaseReport {
        let left = bytes_by_device(blocks).into_iter().map(|(device, bytes)| StageLeft {
            uuid: uuid(device),
            bytes,
            smallest_bytes: blocks
                .iter()
                .filter(|block| block.0 == device)
                .map(|block| block.1)
                .min()
                .unwrap_or(0),
        });
        let shapes = if asked { shapes_of(blocks) } else { Vec::new() };
        let stage = StageReport { copied_bytes: 0, left: left.collect(), handed, shapes };
        let devices = deltas(&bytes_by_device(moved), &BTreeMap::new());
        PhaseReport { devices, stage: Some(stage), ..PhaseReport::default() }
    }

    fn release(&mut self, index: usize) {
        let told = self.leaving[index].told.pop_front().expect("told");
        let mut left = std::mem::take(&mut self.leaving[index].left);
        let (mut moved, mut handed) = (Vec::new(), Vec::new());
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
                let mut wanted: BTreeMap<_, _> = window.wanted.iter().cloned().collect();
                for block in moved.iter().filter(|(.., kind)| *kind != Own && !self.hands_nothing) {
                    if let Some(count) = wanted.get_mut(&shape(*block)).filter(|count| **count > 0)
                    {
                        *count -= 1;
                        handed.push(shape(*block));
                    }
                }
            }
        }
        let gone: u64 = moved.iter().map(|block| block.1).sum();
        let kept: u64 = handed.iter().map(|shape: &BlockShape| shape.size_bytes).sum();
        assert!(kept <= gone);
        for block in &moved {
            *self.used.entry(block.0).or_insert(0) -= block.1;
        }
        for shape in &handed {
            *self.at_hand.entry(shape.clone()).or_insert(0) += 1;
            let device = usize::from(shape.uuid == uuid(1));
            *self.used.entry(device).or_insert(0) += shape.size_bytes;
        }
        self.handed += handed.len();
        self.most_at_hand = self.most_at_hand.max(self.at_hand.values().sum());
        let asked = matches!(&told, Told::Stage(window) if !window.wanted.is_empty());
        let report = Self::report(&left, &moved, handed, asked);
        self.leaving[index].left = left;
        match told {
            Told::Stage(_) => self.plan.released(index, &report),
            Told::Release | Told::Verify => self.plan.released_all(index, &report),
        }
    }

    fn restore(&mut self, index: usize) {
        let Some(Told::Stage(window)) = self.coming[index].told.pop_front() else {
            panic!("only stages");
        };
        let mut left = std::mem::take(&mut self.coming[index].left);
        let (mut moved, mut took) = (Vec::new(), Vec::new());
        let asked = !window.wanted.is_empty() || !window.handed.is_empty();
        for handed in window.handed {
            let fits = |block: &Block| block.2 != Own && shape(*block) == handed;
            if let Some(at) = left.iter().position(fits).filter(|_| !self.refuses) {
                moved.push(left.remove(at));
                took.push(handed);
            } else {
                let device = usize::from(handed.uuid == uuid(1));
                *self.used.entry(device).or_insert(0) -= handed.size_bytes;
            }
        }
        // What is to be handed over later stays away.
        let mut spare: BTreeMap<BlockShape, u32> = shapes_of(&left).into_iter().collect();
        for (shape, kept) in &window.wanted {
            let spare = spare.get_mut(shape).expect("it lacks that");
            *spare = spare.checked_sub(*kept).expect("it lacks as many");
        }
        for (name, bytes) in &window.devices {
            let mut taken = 0;
            left.retain(|block| {
                let spare = spare.get_mut(&shape(*block)).filter(|_| block.2 != Own);
                let is_kept = spare.as_ref().is_some_and(|spare| **spare == 0);
                let comes = uuid(block.0) == *name && taken + block.1 <= *bytes && !is_kept;
                if comes {
                    if let Some(spare) = spare {
                        *spare -= 1;
                    }
                    taken += block.1;
                    moved.push(*block);
                    *self.used.entry(block.0).or_insert(0) += block.1;
                }
                !comes
            });
        }
        self.empty += usize::from(moved.is_empty() && window.stage > 0);
        let report = Self::report(&left, &moved, took, asked);
        self.coming[index].left = left;
        self.plan.restored(index, &report);
    }

    /// Runs to the end, answers in the order of `random`.
    fn run(&mut self, random: &mut fastrand::Rng) {
        loop {
            self.let_go();
            self.send();
            for (device, used) in &self.used {
                assert!(
                    *used <= self.limits[device],
                    "{used} of {} on {device}",
                    self.limits[device]
                );
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
        assert!(self.at_hand.values().all(|count| *count == 0), "all of it was given on");
    }
}

fn blocks(random: &mut fastrand::Rng, sizes: &[u64]) -> Vec<Block> {
    let count = random.usize(..60);
    let block = |random: &mut fastrand::Rng| {
        let size = sizes[random.usize(..sizes.len())] * MIB;
        let kind = [ByAddress, ByAddress, ByHandle, Own][random.usize(..4)];
        (random.usize(..2), size, kind)
    };
    (0..count).map(|_| block(random)).collect()
}

#[test]
fn whatever_changes_hands_no_device_holds_more_than_it_may_and_all_comes_to_an_end() {
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
        let hand_over = [HandOver::Plain, HandOver::All, HandOver::Nothing][random.usize(..3)];
        let mut swapped = Swapped::with(hand_over, leaving, coming, window, all);
        swapped.run(&mut random);
        assert!(swapped.most_at_hand <= MOST, "seed {seed}");
    }
}

#[test]
fn what_was_asked_for_by_handle_changes_hands_only_where_all_may() {
    // Processes tell of all they have in every answer, whatever is to change hands.
    let block = |at: usize| (0, 64 * MIB, if at.is_multiple_of(2) { ByAddress } else { ByHandle });
    let all = vec![(0..120).map(block).collect::<Vec<_>>()];
    let handed = |hand_over| {
        let mut swapped = Swapped::with(hand_over, all.clone(), all.clone(), 256 * MIB, 0);
        in_step(&mut swapped);
        swapped.handed
    };
    assert_eq!(handed(HandOver::Nothing), 0);
    assert!((50..=60).contains(&handed(HandOver::Plain)), "{}", handed(HandOver::Plain));
    assert!(handed(HandOver::All) > 100, "{}", handed(HandOver::All));
}

#[test]
fn of_two_that_are_alike_most_changes_hands() {
    for size in [2, 20, 64] {
        let all =
            vec![vec![(0, size * MIB, ByAddress); 200], vec![(1, size * MIB, ByAddress); 200]];
        let window = 20 * size * MIB;
        let mut swapped = Swapped::new(all.clone(), all, window, window);
        swapped.run(&mut fastrand::Rng::with_seed(size));
        assert!(swapped.handed >= 280, "{size}: {}", swapped.handed);
    }
}

/// Both go at one speed: whoever has been told something longest answers next, as soon as both have.
fn in_step(swapped: &mut Swapped) -> Idle {
    let mut idle = Idle::default();
    loop {
        swapped.let_go();
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

/// How often a side had nothing to do, and something left.
#[derive(Debug, Default, PartialEq, Eq)]
struct Idle {
    out: usize,
    back: usize,
}

const GIB: u64 = 1024 * MIB;

#[test]
fn however_much_is_free_all_that_is_alike_changes_hands_but_a_window() {
    for (size, window) in [(512 * MIB, GIB), (512 * MIB, 2 * GIB), (20 * MIB, 256 * MIB)] {
        for free in [window, 100 * GIB] {
            let all = vec![vec![(0, size, ByAddress); 96]];
            let mut swapped = Swapped::new(all.clone(), all, window, free);
            let idle = in_step(&mut swapped);
            let most = 96 - usize::try_from(window / size).unwrap();
            assert_eq!(swapped.handed, most, "{size} {window} {free}");
            assert_eq!((idle, swapped.empty), (Idle::default(), 0), "{size} {window} {free}");
        }
    }
}

#[test]
fn small_tenants_hand_over_most_of_what_they_have_with_the_usual_window_too() {
    for (size, count) in [(2, 192), (16, 24), (32, 12), (64, 6)] {
        let all = vec![vec![(0, size * MIB, ByAddress); count]];
        let mut swapped = Swapped::new(all.clone(), all, 256 * MIB, 640 * MIB);
        let idle = in_step(&mut swapped);
        assert!(swapped.handed * 5 >= count * 4, "{size}: {} of {count}", swapped.handed);
        assert_eq!(idle.out, 0);
    }
}

#[test]
fn where_nothing_else_is_free_all_that_is_alike_changes_hands() {
    let all = vec![vec![(0, 64 * MIB, ByAddress); 60]];
    let mut swapped = Swapped::new(all.clone(), all, 256 * MIB, 0);
    let idle = in_step(&mut swapped);
    assert_eq!((swapped.handed, idle.out), (60, 0));
}

#[test]
fn several_processes_on_several_devices_hand_over_what_they_have_alike() {
    let blocks = |device, count| vec![(device, 64 * MIB, ByAddress); count];
    // Two processes on one device, and one on another, in another order and in other parts.
    let out = vec![blocks(0, 40), blocks(1, 60), blocks(0, 20)];
    let back = vec![blocks(1, 60), blocks(0, 30), blocks(0, 30)];
    for free in [512 * MIB, 100 * GIB] {
        for seed in 0..100 {
            let mut swapped = Swapped::new(out.clone(), back.clone(), 512 * MIB, free);
            swapped.run(&mut fastrand::Rng::with_seed(seed));
            // A head start on each device, and what was exported for a process that has come to lack it no more.
            assert!(swapped.handed >= 100, "{free} {seed}: {}", swapped.handed);
        }
    }
}

#[test]
fn whatever_else_they_have_what_both_have_alike_changes_hands() {
    let alike = |count| vec![(0, 64 * MIB, ByAddress); count];
    let others = |size, count| vec![(0, size * MIB, Own); count];
    let mixed = |one: Vec<Block>, two: Vec<Block>| {
        let mut all: Vec<Block> = Vec::new();
        for at in 0..one.len().max(two.len()) {
            all.extend(one.get(at).into_iter().chain(two.get(at)));
        }
        all
    };
    let (window, few) = (512 * MIB, 8);
    let cases = [
        ("alike last", [others(32, 80), alike(40)].concat(), [alike(40), others(48, 50)].concat()),
        ("alike first", [alike(40), others(32, 80)].concat(), [others(48, 50), alike(40)].concat()),
        ("in turn", mixed(alike(40), others(64, 40)), mixed(others(64, 40), alike(40))),
        ("a smaller one comes", [alike(40), others(64, 60)].concat(), alike(40)),
        ("a larger one comes", alike(40), [others(64, 60), alike(40)].concat()),
        ("more alike come", alike(40), alike(90)),
        ("more alike leave", alike(90), alike(40)),
    ];
    for (name, out, back) in cases {
        for free in [4 * GIB, 100 * GIB] {
            let mut swapped = Swapped::new(vec![out.clone()], vec![back.clone()], window, free);
            in_step(&mut swapped);
            assert!(swapped.handed >= 40 - few, "{name}, {free} free: {}", swapped.handed);
            assert!(swapped.empty <= 2, "{name}, {free} free: {} empty", swapped.empty);
            for seed in 0..50 {
                let mut swapped = Swapped::new(vec![out.clone()], vec![back.clone()], window, free);
                swapped.run(&mut fastrand::Rng::with_seed(seed));
                assert!(swapped.handed >= 40 - few - 4, "{name} {seed}: {}", swapped.handed);
            }
        }
    }
}

#[test]
fn who_leaves_and_hands_nothing_over_holds_up_nobody_who_waits_for_it() {
    let all = vec![vec![(0, 64 * MIB, ByAddress); 60]];
    let mut swapped = Swapped::new(all.clone(), all, 256 * MIB, 100 * GIB);
    swapped.hands_nothing = true;
    let idle = in_step(&mut swapped);
    assert_eq!(swapped.handed, 0);
    // It follows stage by stage.
    assert!(swapped.coming[0].left.len() <= 8, "{}", swapped.coming[0].left.len());
    assert_eq!(idle.out, 0);
}

#[test]
fn who_refuses_what_was_anothers_is_handed_no_more_of_it() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let all = vec![vec![(0, 2 * MIB, ByAddress); 300], vec![(1, 2 * MIB, ByAddress); 300]];
        let mut swapped = Swapped::new(all.clone(), all, 16 * MIB, 16 * MIB);
        swapped.refuses = true;
        swapped.run(&mut random);
        // What was asked for before the first answers.
        assert!(swapped.handed <= 2 * MOST, "seed {seed}: {}", swapped.handed);
    }
}

#[test]
fn numbers_that_nobody_can_mean_end_in_no_sum_and_answers_without_end_in_the_rest() {
    let most = (0, u64::MAX, ByAddress);
    let free = [(0, u64::MAX)].into();
    let needs = vec![deltas(&[(0, u64::MAX)].into(), &free); 3];
    let shapes = vec![(shape(most), u32::MAX); 1];
    let needed: Vec<_> = needs
        .iter()
        .map(|devices| Needed { devices: devices.clone(), shapes: shapes.clone() })
        .collect();
    let gives = vec![shapes; 3];
    let mut plan = Exchange::new(Some(MIB), &needs, &needs).with_hand_over(
        HandOver::Plain,
        &gives,
        &needed,
        MOST,
    );
    assert_eq!(plan.total_bytes(), u64::MAX);
    let (mut stages, mut told) = (0, VecDeque::new());
    loop {
        while let Some(next) = plan.next() {
            told.push_back(next);
        }
        if plan.is_over() {
            break;
        }
        let said = Swapped::report(&[most], &[most], vec![shape(most); 3], true);
        match told.pop_front().expect("an order") {
            Move::ReleaseStage(index, _) => {
                stages += 1;
                plan.released(index, &said);
            }
            Move::Release(index) => plan.released_all(index, &said),
            Move::Verify(index) => plan.left_for_good(index),
            Move::RestoreStage(index, _) => plan.restored(index, &said),
        }
        if stages == 100 {
            plan.hurry();
        }
    }
    assert!(stages < 110, "{stages}");
}

#[test]
fn nothing_changes_hands_where_nothing_is_alike_or_a_tenant_comes_no_more() {
    let (out, back) =
        (vec![vec![(0, 4 * MIB, ByAddress); 50]], vec![vec![(0, 2 * MIB, ByAddress); 100]]);
    let mut swapped = Swapped::new(out.clone(), back, 16 * MIB, 16 * MIB);
    swapped.run(&mut fastrand::Rng::with_seed(1));
    assert_eq!(swapped.handed, 0);
    let mut swapped = Swapped::new(out.clone(), out, 16 * MIB, 16 * MIB);
    swapped.send();
    swapped.release(0);
    assert!(swapped.handed > 0);
    swapped.plan.end_coming();
    swapped.coming.clear();
    let wanted = std::iter::from_fn(|| swapped.plan.next()).filter_map(|next| match next {
        Move::ReleaseStage(_, window) => Some(window.wanted.len()),
        Move::Release(_) | Move::Verify(_) => None,
        Move::RestoreStage(..) => Some(1),
    });
    assert_eq!(wanted.sum::<usize>(), 0);
}

#[test]
fn little_that_is_alike_makes_no_small_stages_of_all_the_rest() {
    let large = |size| (0, size, ByAddress);
    let both = |other| [vec![large(2 * MIB); 10], vec![large(other); 60]].concat();
    let (here, away) = (both(20 * MIB), both(22 * MIB));
    let mut swapped = Swapped::new(vec![here], vec![away], 256 * MIB, 4 << 30);
    swapped.run(&mut fastrand::Rng::with_seed(1));
    assert_eq!(swapped.handed, 0);
}

#[test]
fn allocations_of_which_the_usual_window_has_no_room_for_two_move_by_larger_ones() {
    const GIB: u64 = 1 << 30;
    let blocks = |size_bytes, count| vec![vec![(0, size_bytes, ByAddress); count]];
    let window = |size_bytes: u64, count: usize, hands_over: bool| {
        let free = BTreeMap::new();
        let leaving = blocks(size_bytes, count);
        let gives: Vec<_> =
            leaving.iter().map(|blocks| deltas(&bytes_by_device(blocks), &free)).collect();
        let shapes: Vec<_> = leaving.iter().map(|blocks| shapes_of(blocks)).collect();
        let needed = Needed { devices: gives[0].clone(), shapes: shapes[0].clone() };
        let mut plan = Exchange::new(None, &gives, &gives);
        if hands_over {
            plan = plan.with_hand_over(HandOver::Plain, &shapes, &[needed], MOST);
        }
        plan.widened(size_bytes).window_bytes()
    };
    assert_eq!(window(GIB / 2, 40, false), GIB, "two fit");
    assert_eq!(window(GIB, 20, false), 4 * GIB);
    assert_eq!(window(GIB, 20, true), GIB, "what changes hands waits for nobody");
    assert_eq!(window(5 * GIB, 4, false), 5 * GIB, "a quarter of all at most");
    assert_eq!(window(20 * GIB, 1, false), 5 * GIB);
}
