//! Pauses and resumes of one pool by all ways and of all kinds, in random order, with a call of the driver's that fails in a third
//! of them. Every byte is compared.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, VaRange};
use vmm_pool::{
    ByDevice, Class, Contents, PieceBytes, PoolResult, SavedError, Selection, Tags, VirtualHandle,
    Whose,
};

use crate::random::{Random, bytes_of};
use crate::stage::{
    DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, create, holds, map, pool, reserve, write,
};

/// What is written, and looked at, as one.
const PIECE: u64 = 256 << 10;
const TAGS: [&str; 2] = ["a", "b"];

struct Memory {
    device: DeviceOrdinal,
    handle: VirtualHandle,
    places: Vec<VaRange>,
    size_bytes: u64,
    tag: &'static str,
    contents: Contents,
    /// By piece, what it has held, now last: zero for zeros, none for what nobody knows.
    seeds: Vec<Vec<Option<u64>>>,
    is_away: bool,
}

struct World {
    pool: SimPool,
    all: Vec<Memory>,
    random: Random,
    last_seed: u64,
    unused: Vec<VaRange>,
    /// What was done, for readers of a failure.
    log: Vec<String>,
}

fn named(tag: &str) -> Tags {
    Tags::Named(BTreeSet::from([tag.to_owned()]))
}

fn piece_of(range: VaRange, piece: usize) -> VaRange {
    VaRange::new(DeviceAddress(range.start.0 + piece as u64 * PIECE), PIECE)
}

// What the application does.
impl World {
    fn new(seed: u64) -> Self {
        let pool = pool(&SimNode::private(&[512 << 20; 2]).expect("a node"));
        let (all, log, unused) = (Vec::new(), Vec::new(), Vec::new());
        Self { pool, all, random: Random(seed), last_seed: 0, unused, log }
    }

    fn create(&mut self) {
        let random = &mut self.random;
        let size_bytes = UNIT * (1 + random.below(4));
        let device = if random.one_in(4) { OTHER } else { DEVICE };
        let tag = random.of(&["", "a", "b"]);
        let kinds = [Contents::Discard, Contents::File, Contents::Keep, Contents::Keep];
        let contents = random.of(&kinds);
        let class = Class { library: "test", tag: tag.to_owned(), contents };
        let handle = create(&self.pool, device, size_bytes / UNIT, class);
        let rights = [AccessDesc::read_write(device)];
        let count = if random.one_in(5) { 2 } else { 1 };
        let places: Vec<_> =
            (0..count).map(|_| map(&self.pool, handle, size_bytes, &rights)).collect();
        let pieces = usize::try_from(size_bytes / PIECE).expect("small");
        let is_cleared = random.one_in(2);
        if is_cleared {
            write(&self.pool, device, places[0], bytes_of(0));
        }
        let seeds = vec![vec![is_cleared.then_some(0)]; pieces];
        self.log
            .push(format!("create {handle:?} {tag:?} {contents:?} of {size_bytes} on {device}"));
        let is_away = false;
        self.all.push(Memory { device, handle, places, size_bytes, tag, contents, seeds, is_away });
    }

    fn one_of(&mut self, choose: impl Fn(&Memory) -> bool) -> Option<usize> {
        let chosen: Vec<usize> = (0..self.all.len()).filter(|at| choose(&self.all[*at])).collect();
        (!chosen.is_empty()).then(|| self.random.of(&chosen))
    }

    fn write(&mut self) {
        let Some(at) = self.one_of(|memory| !memory.is_away && !memory.places.is_empty()) else {
            return;
        };
        for _ in 0..=self.random.below(5) {
            let memory = &mut self.all[at];
            let piece = self.random.index(memory.seeds.len());
            let held = &mut memory.seeds[piece];
            // What it held some time before: a fingerprint that is out of date knows it.
            let before = held[held.len() - 1 - self.random.index(held.len().min(4))];
            self.last_seed += 1;
            let seed = match self.random.below(3) {
                0 => 0,
                1 => before.unwrap_or(self.last_seed),
                _ => self.last_seed,
            };
            let place = self.random.of(&memory.places);
            write(&self.pool, memory.device, piece_of(place, piece), bytes_of(seed));
            held.push(Some(seed));
        }
        self.log.push(format!("write {at}"));
    }

    fn free(&mut self) {
        let Some(at) = self.one_of(|_| true) else { return };
        let memory = self.all.remove(at);
        for place in &memory.places {
            self.pool.unmap(*place).expect("unmapped");
        }
        self.pool.release(memory.handle).expect("released");
        self.log.push(format!("free {at}"));
    }

    fn remap(&mut self) {
        let Some(at) = self.one_of(|memory| !memory.is_away) else { return };
        let memory = &mut self.all[at];
        if memory.places.is_empty() || self.random.one_in(2) {
            let rights = [AccessDesc::read_write(memory.device)];
            memory.places.push(map(&self.pool, memory.handle, memory.size_bytes, &rights));
        } else {
            self.pool.unmap(memory.places.remove(0)).expect("unmapped");
        }
        self.log.push(format!("remap {at}: {}", memory.places.len()));
    }

    fn set(&mut self) {
        let random = &mut self.random;
        let piece_bytes = PieceBytes::new(random.of(&[16, 64, 256, 2048]) << 10).expect("a size");
        self.pool.copies().set_piece_bytes(piece_bytes);
        let detects = !random.one_in(4);
        self.pool.copies().detect_changes(detects);
        self.pool.copies().retain(random.one_in(4));
        self.pool.copies().give_back(random.one_in(6));
        self.pool.copies().set_group_bytes(UNIT << random.below(4));
        self.log.push(format!("set {piece_bytes:?}, detects changes: {detects}"));
    }

    fn mark_unused(&mut self) {
        let Some(at) = self.one_of(|memory| !memory.is_away && !memory.places.is_empty()) else {
            return;
        };
        let place = self.all[at].places[0];
        let count = place.size_bytes / PIECE;
        let first = self.random.below(count);
        let size_bytes = PIECE * (1 + self.random.below(count - first));
        let start = DeviceAddress(place.start.0 + first * PIECE);
        self.unused.push(VaRange::new(start, size_bytes));
    }
}

// Ways to leave and to come.
impl World {
    /// In a third of all cases one of the next calls of the driver fails.
    fn maybe_fail(&mut self) {
        if self.random.one_in(3) {
            let nth = 1 + self.random.below(60);
            self.pool.driver().faults().fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
            self.log.push(format!("  call {nth} fails"));
        }
    }

    fn fail_no_more(&self) {
        self.pool.driver().faults().clear();
    }

    /// `step`, and once more without a failure where it fails.
    fn done<T>(&mut self, step: impl Fn(&SimPool) -> PoolResult<T>) -> T {
        step(&self.pool).unwrap_or_else(|error| {
            self.log.push(format!("  {error}"));
            self.fail_no_more();
            step(&self.pool).expect("at the second try")
        })
    }

    fn window(&mut self) -> ByDevice {
        [DEVICE, OTHER].map(|device| (device, UNIT * (1 + self.random.below(8)))).into()
    }

    /// False when it was undone.
    fn leave(&mut self, selection: &Selection) -> bool {
        let unused = std::mem::take(&mut self.unused);
        self.pool.mark_unused(&unused);
        let (by_stages, stages) = (self.random.one_in(2), self.random.below(6));
        self.log.push(format!("leave {selection:?}, stages {by_stages} {stages}"));
        // Calls of the draining are not what fails.
        self.pool.drain();
        self.maybe_fail();
        let begun = if by_stages {
            self.pool.reserve(selection, UNLIMITED)
        } else {
            self.pool.save(selection, UNLIMITED)
        };
        if begun.is_err() || self.random.one_in(6) {
            self.done(SimPool::remount);
            self.fail_no_more();
            drop(self.pool.commit_resume());
            self.log.push("  undone".to_owned());
            return false;
        }
        if by_stages {
            for _ in 0..stages {
                let window = self.window();
                if let Err(error) = self.pool.release_stage(&window) {
                    self.log.push(format!("  stage: {error}"));
                }
            }
            self.done(SimPool::release_rest);
        } else {
            self.done(SimPool::release_selected);
        }
        self.fail_no_more();
        self.forget(selection, &unused);
        true
    }

    /// What memory that has left holds no more.
    fn forget(&mut self, selection: &Selection, unused: &[VaRange]) {
        let tags = if let Selection::Tagged(tags, _) = selection { Some(tags) } else { None };
        let leaves = |memory: &Memory| tags.is_none_or(|tags| tags.has(memory.tag));
        for memory in self.all.iter_mut().filter(|memory| !memory.is_away && leaves(memory)) {
            let only = if let [only] = memory.places[..] { Some(only) } else { None };
            for (piece, held) in memory.seeds.iter_mut().enumerate() {
                let is_unused = only.map(|place| piece_of(place, piece)).is_some_and(|place| {
                    let meets =
                        |range: &VaRange| range.start < place.end() && place.start < range.end();
                    unused.iter().any(meets)
                });
                if memory.contents == Contents::Discard || is_unused {
                    held.push(None);
                }
            }
        }
    }

    fn come(&mut self, selection: &Selection) {
        loop {
            let by_stages = *selection == WHOLE && self.random.one_in(2);
            self.log.push(format!("come {selection:?} by stages {by_stages}"));
            self.maybe_fail();
            let outcome =
                if by_stages { self.come_by_stages() } else { self.come_at_once(selection) };
            self.fail_no_more();
            let is_back = outcome.is_ok();
            self.log.push(format!("  {outcome:?}"));
            if is_back && !self.random.one_in(6) {
                break;
            }
            self.pool.undo_resume().expect("given up");
        }
        drop(self.pool.commit_resume());
    }

    fn come_by_stages(&mut self) -> PoolResult<()> {
        for _ in 0..=self.random.below(5) {
            let window = self.window();
            self.pool.restore_stage(&window)?;
        }
        self.pool.restore_rest(usize::MAX).map(drop)
    }

    fn come_at_once(&mut self, selection: &Selection) -> PoolResult<()> {
        self.pool.create_own(selection)?;
        self.pool.restore_own(usize::MAX).map(drop)
    }

    fn while_away(&mut self, all: bool) {
        for _ in 0..self.random.below(4) {
            match self.random.below(3) {
                0 if all => self.free(),
                1 => {
                    let most_bytes = UNIT * self.random.below(40);
                    let until = Instant::now() + Duration::from_mins(5);
                    let spilled = self.pool.host_memory().spill(most_bytes, until, &|| false);
                    self.log.push(format!("  spill {most_bytes}: {spilled:?}"));
                }
                _ => {
                    if let Some(at) = self.one_of(|memory| all || memory.is_away) {
                        self.check_away(at);
                    }
                }
            }
        }
    }

    fn whole(&mut self) {
        if self.leave(&WHOLE) {
            self.while_away(true);
            self.come(&WHOLE);
        }
    }

    fn of_tag(&mut self) {
        let tag = self.random.of(&TAGS);
        if self.all.iter().any(|memory| memory.tag == tag && memory.is_away) {
            self.bring_back(tag);
        } else if self.leave(&Selection::Tagged(named(tag), Whose::Everybody)) {
            let all = self.all.iter_mut().filter(|memory| memory.tag == tag);
            all.for_each(|memory| memory.is_away = true);
            self.while_away(false);
        }
    }

    fn bring_back(&mut self, tag: &str) {
        self.come(&Selection::SetAside(named(tag), Whose::Everybody));
        let all = self.all.iter_mut().filter(|memory| memory.tag == tag);
        all.for_each(|memory| memory.is_away = false);
    }
}

// What must hold.
impl World {
    fn story(&self) -> String {
        self.log.join("\n")
    }

    fn check_away(&mut self, at: usize) {
        let memory = &self.all[at];
        let Some(place) = memory.places.first().copied() else { return };
        if memory.contents == Contents::Discard {
            return;
        }
        let mut seen = vec![0; usize::try_from(PIECE).expect("small")];
        for (piece, held) in memory.seeds.iter().enumerate() {
            let known = held.last().copied().flatten();
            match (self.pool.saved().read(piece_of(place, piece).start, &mut seen), known) {
                (Ok(()), Some(seed)) => {
                    let is_it = seen.chunks(16).all(|part| *part == bytes_of(seed));
                    assert!(is_it, "saved piece {piece} of {at}\n{}", self.story());
                }
                (Ok(()), None) | (Err(SavedError::Resident(_)), _) => {}
                // All of it was said to be of no worth.
                (Err(SavedError::NotKept(_)), None) => return,
                (Err(error), _) => panic!("{error}: {at}\n{}", self.story()),
            }
        }
        if self.random.one_in(4) {
            let is_lent = self.pool.saved().at(place).is_ok();
            self.log.push(format!("  lent {at}: {is_lent}"));
        }
    }

    fn check(&self) {
        for (at, memory) in self.all.iter().enumerate().filter(|(_, memory)| !memory.is_away) {
            let extra = memory.places.is_empty().then(|| {
                let range = reserve(&self.pool, memory.size_bytes);
                let rights = [AccessDesc::read_write(memory.device)];
                self.pool.map(range, 0, memory.handle).expect("mapped");
                self.pool.set_access(range, &rights).expect("access");
                range
            });
            for place in memory.places.iter().chain(&extra) {
                for (piece, held) in memory.seeds.iter().enumerate() {
                    let Some(seed) = held.last().copied().flatten() else { continue };
                    let is_it =
                        holds(&self.pool, memory.device, piece_of(*place, piece), bytes_of(seed));
                    assert!(is_it, "piece {piece} of {at} at {}\n{}", place.start, self.story());
                }
            }
            if let Some(extra) = extra {
                self.pool.unmap(extra).expect("unmapped");
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(14) {
            0 | 1 if self.all.len() < 12 => self.create(),
            2 if self.all.len() > 6 => self.free(),
            3 => self.remap(),
            4 => self.set(),
            5 => self.mark_unused(),
            6..=8 => self.write(),
            9 | 10 => self.whole(),
            11 | 12 => self.of_tag(),
            _ => {}
        }
        self.check();
    }
}

#[test]
fn any_ways_of_leaving_and_coming_lose_no_byte() {
    for seed in 1..4 {
        let mut world = World::new(seed);
        (0..4).for_each(|_| world.create());
        (0..40).for_each(|_| world.step());
        for tag in TAGS {
            if world.all.iter().any(|memory| memory.tag == tag && memory.is_away) {
                world.bring_back(tag);
            }
        }
        world.check();
    }
}
