//! Pieces that change at random between pauses, some of which fail: every byte is there afterwards.

use proptest::prelude::*;
use proptest::test_runner::Config;
use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{DeviceAddress, DriverCode, VaRange};
use vmm_pool::{Contents, HostBudget, PieceBytes, Registered};

use super::{CHUNK, memory, save, tagged};
use crate::stage::{
    DEVICE, SimPool, UNLIMITED, WHOLE, end_streams, holds, pattern, pause, pool, resume,
    resume_tags, write,
};

/// Memory whose pieces a test changes at will, and what they must hold.
struct Changing {
    pool: SimPool,
    ranges: Vec<VaRange>,
    /// By range and piece, what it has held, now last; zero for zeros.
    seeds: Vec<Vec<Vec<u64>>>,
    /// By range, what has a pause leave it in place.
    pins: Vec<Option<Registered>>,
    last_seed: u64,
}

/// Ranges at most.
const RANGES_MAX: usize = 12;

/// What a piece is changed to.
#[derive(Clone, Copy, Debug)]
enum To {
    Zeros,
    /// What it held before: a fingerprint that is out of date knows it.
    Before,
    New,
}

impl Changing {
    fn new() -> Self {
        let pool = pool(&SimNode::private(&[CHUNK]).expect("a node"));
        pool.copies().detect_changes(true);
        pool.copies().set_piece_bytes(PieceBytes::new(1 << 20).expect("a size"));
        let contents = [("", Contents::Keep), ("tag", Contents::Keep), ("", Contents::File)];
        let ranges: Vec<_> = contents.map(|(tag, contents)| memory(&pool, tag, contents, 2)).into();
        let seeds = ranges.iter().map(|_| vec![vec![0]; 4]).collect();
        Self { pool, ranges, seeds, pins: vec![None, None, None], last_seed: 0 }
    }

    fn piece(&self, range: usize, piece: usize) -> VaRange {
        let start = self.ranges[range].start.0 + ((piece as u64) << 20);
        VaRange::new(DeviceAddress(start), 1 << 20)
    }

    fn add(&mut self) {
        if self.ranges.len() < RANGES_MAX {
            self.ranges.push(memory(&self.pool, "", Contents::Keep, 2));
            self.seeds.push(vec![vec![0]; 4]);
            self.pins.push(None);
        }
    }

    fn pin_or_not(&mut self, range: usize) {
        self.pins[range] = match self.pins[range].take() {
            Some(pin) => {
                self.pool.enter_giving_up().unregister(&pin);
                None
            }
            None => Some(self.pool.enter().register(self.ranges[range], "a network card")),
        };
    }

    fn change(&mut self, range: usize, piece: usize, to: To) {
        self.last_seed += 1;
        let held = &self.seeds[range][piece];
        let before = held.iter().rev().find(|seed| held.last() != Some(seed)).copied();
        let seed = match to {
            To::Zeros => 0,
            To::Before => before.unwrap_or(self.last_seed),
            To::New => self.last_seed,
        };
        write(&self.pool, DEVICE, self.piece(range, piece), bytes_of(seed));
        self.seeds[range][piece].push(seed);
    }

    fn check(&self, when: &str) {
        for (range, seeds) in self.seeds.iter().enumerate() {
            for (piece, seeds) in seeds.iter().enumerate() {
                let bytes = bytes_of(seeds.last().copied().unwrap_or(0));
                let place = self.piece(range, piece);
                assert!(holds(&self.pool, DEVICE, place, bytes), "{when}: {piece} of {range}");
            }
        }
    }
}

fn bytes_of(seed: u64) -> [u8; 16] {
    if seed == 0 { [0; 16] } else { pattern(seed) }
}

/// A change, or a pause that goes one of several ways.
#[derive(Clone, Debug)]
enum Turn {
    Change {
        range: usize,
        piece: usize,
        to: To,
    },
    /// Another one.
    Add,
    /// A network card holds it from now on, or no more.
    Pin {
        range: usize,
    },
    Cycle,
    TagCycle,
    /// The nth driver call of the save fails, and the pause is undone.
    FailSave {
        nth: u64,
    },
    /// Saved, and undone for another's sake.
    Undo,
    /// The nth driver call of the restore fails, it is undone, and tried again.
    FailRestore {
        nth: u64,
    },
    /// No host memory more than there is.
    Tight,
}

fn any_turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        10 => (0..RANGES_MAX, 0..4_usize, prop::sample::select(vec![To::Zeros, To::Before, To::New]))
            .prop_map(|(range, piece, to)| Turn::Change { range, piece, to }),
        2 => Just(Turn::Add),
        3 => (0..RANGES_MAX).prop_map(|range| Turn::Pin { range }),
        3 => Just(Turn::Cycle),
        2 => Just(Turn::TagCycle),
        3 => (1..40_u64).prop_map(|nth| Turn::FailSave { nth }),
        1 => Just(Turn::Undo),
        1 => (1..30_u64).prop_map(|nth| Turn::FailRestore { nth }),
        3 => Just(Turn::Tight),
    ]
}

impl Changing {
    fn take(&mut self, turn: &Turn) {
        match *turn {
            Turn::Change { range, piece, to } => {
                return self.change(range % self.ranges.len(), piece, to);
            }
            Turn::Add => return self.add(),
            Turn::Pin { range } => return self.pin_or_not(range % self.ranges.len()),
            Turn::Cycle => {
                pause(&self.pool);
                resume(&self.pool);
            }
            Turn::TagCycle => {
                save(&self.pool, &tagged("tag"));
                resume_tags(&self.pool, &["tag"]);
            }
            Turn::FailSave { nth } => {
                let faults = self.pool.driver().faults();
                self.pool.drain();
                faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
                let saved = self.pool.save(&WHOLE, UNLIMITED);
                faults.clear();
                drop(saved);
                self.pool.remount().expect("undone");
                drop(self.pool.commit_resume());
            }
            Turn::Undo => {
                self.pool.save(&WHOLE, UNLIMITED).expect("saved");
                self.pool.remount().expect("undone");
                drop(self.pool.commit_resume());
            }
            Turn::FailRestore { nth } => {
                pause(&self.pool);
                self.pool.create_own(&WHOLE).expect("memory");
                let faults = self.pool.driver().faults();
                faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
                let restored = self.pool.restore_own(usize::MAX);
                faults.clear();
                drop(restored);
                self.pool.undo_resume().expect("given up again");
                resume(&self.pool);
            }
            Turn::Tight => {
                let held = self.pool.save(&WHOLE, HostBudget(Some(0)));
                if held.is_ok() {
                    self.pool.release_selected().expect("released");
                    resume(&self.pool);
                } else {
                    self.pool.remount().expect("undone");
                    drop(self.pool.commit_resume());
                }
            }
        }
        self.check(&format!("{turn:?}"));
    }
}

proptest! {
    #![proptest_config(Config { cases: 24, max_shrink_iters: 60, ..Config::default() })]

    #[test]
    fn any_changes_pauses_and_failures_leave_every_byte(
        turns in prop::collection::vec(any_turn(), 1..40),
    ) {
        let mut changing = Changing::new();
        for turn in &turns {
            changing.take(turn);
        }
        changing.take(&Turn::Cycle);
    }
}

#[test]
fn any_call_of_a_second_pause_may_fail_and_the_third_is_right() {
    let mut changing = Changing::new();
    for piece in 0..4 {
        for range in 0..3 {
            changing.change(range, piece, if piece == 3 { To::Zeros } else { To::New });
        }
    }
    changing.take(&Turn::Cycle);
    for nth in 1.. {
        for range in 0..3 {
            // One changes, one turns zero, and one turns to something.
            let piece = usize::try_from(nth).expect("small") % 4;
            changing.change(range, piece, To::New);
            let to = if nth % 2 == 0 { To::Zeros } else { To::Before };
            changing.change(range, (piece + 1) % 4, to);
        }
        end_streams(&changing.pool);
        let before = changing.pool.driver().faults().fired();
        changing.take(&Turn::FailSave { nth });
        let is_over = changing.pool.driver().faults().fired() == before;
        changing.take(&Turn::Cycle);
        if is_over {
            assert!(nth > 16, "only {nth} calls were met");
            return;
        }
    }
}
