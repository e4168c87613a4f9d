//! Paged memory through all kinds of pauses, some of which fail. Programs write and clear parts of chunks, and restore former
//! contents, while changes are looked for piece by piece. Every byte is compared.

#![expect(unsafe_code, reason = "uses of paged memory are copies through the driver")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sublet_pager::{In, Pager, WindowSize};
use vmm_pool::driver::sim::{FaultSpan, SimDriver};
use vmm_pool::driver::{AccessDesc, DeviceAddress, Driver as _, DriverCode, RawStream, VaRange};
use vmm_pool::{ByDevice, Contents, HostBudget, PieceBytes, PoolResult};

use crate::at_random::on_a_thread;
use crate::program::{LIMIT, unlimited, word_at};
use crate::random::{Random, bytes_of};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, SimPool, UNIT, UNLIMITED, WHOLE, class, create, free_bytes, holds, map,
    node, pool, write,
};

/// The size of a piece, which is written and checked as one.
const PIECE: u64 = 64 << 10;
/// The seed of other memory's contents.
const OTHERS: u64 = 7;
const STEPS: u32 = 60;
/// Each of these seeds has found a change of the code that lost contents: places that were too short, and fingerprints from
/// before a pause.
const SEEDS: [u64; 5] = [7, 12, 14, 16, 25];

/// A program's memory in the window.
struct Span {
    start: DeviceAddress,
    /// For each piece, the seeds of its contents, with the present one last: zero for zeros, `None` for unknown contents.
    pieces: Vec<Vec<Option<u64>>>,
}

impl Span {
    fn piece(&self, piece: usize) -> VaRange {
        VaRange::new(DeviceAddress(self.start.0 + piece as u64 * PIECE), PIECE)
    }
}

/// A value that was read, the right one, and its place.
type Read = (Box<[u8]>, u64, VaRange);

struct World {
    pool: SimPool,
    pager: Pager<SimDriver>,
    streams: [RawStream; 2],
    /// The stream of the last call. The next one waits for it.
    last: usize,
    spans: Vec<Span>,
    /// Other memory.
    others: Vec<VaRange>,
    /// Sources of copies, until the copies have been waited for.
    buffers: Vec<Box<[u8]>>,
    reads: Vec<Read>,
    random: Random,
    last_seed: u64,
    /// Are calls made while the spans that they use are held?
    holds: bool,
    /// The steps so far, for readers of a failure.
    log: Vec<String>,
}

fn piece_of(seed: u64) -> Box<[u8]> {
    bytes_of(seed).repeat(usize::try_from(PIECE / 16).expect("small")).into_boxed_slice()
}

// The application's calls.
impl World {
    fn new(seed: u64) -> Self {
        let (pool, mut random) = (pool(&node()), Random(seed));
        if !random.one_in(4) {
            pool.copies().detect_changes(true);
        }
        if random.one_in(2) {
            pool.copies().set_piece_bytes(PieceBytes::new(256 << 10).expect("a size"));
        }
        let driver = Arc::clone(pool.driver());
        let streams = [(); 2].map(|()| driver.stream_create().expect("a stream"));
        let size = WindowSize {
            window_bytes: 48 * UNIT,
            chunk_bytes: UNIT,
            frames_bytes: (3 + random.below(3)) * UNIT,
        };
        let pager = Pager::new(Arc::clone(pool.pool()), DEVICE, size, unlimited).expect("a window");
        let holds = random.one_in(4);
        if random.one_in(4) {
            pager.check_writes();
        }
        let others = (0..random.below(4)).map(|_| {
            let contents = random.of(&[Contents::File, Contents::Keep, Contents::Keep]);
            let handle = create(&pool, DEVICE, 2, class(contents));
            let range = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
            write(&pool, DEVICE, range, bytes_of(OTHERS));
            range
        });
        let others = others.collect();
        let (spans, buffers, reads, log) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (last, last_seed) = (0, 0);
        let mut world = Self {
            pool,
            pager,
            streams,
            last,
            spans,
            others,
            buffers,
            reads,
            random,
            last_seed,
            holds,
            log,
        };
        (0..4).for_each(|_| world.alloc());
        world
    }

    fn alloc(&mut self) {
        let in_chunk = UNIT / PIECE;
        let count = 1 + self.random.below(3 * in_chunk / 2).max(in_chunk / 4);
        let start = self.pager.alloc(count * PIECE).expect("addresses");
        self.log.push(format!("alloc {count} pieces at {start}"));
        let pieces = vec![vec![None]; usize::try_from(count).expect("small")];
        self.spans.push(Span { start, pieces });
    }

    fn free(&mut self) {
        if self.spans.len() > 2 {
            self.check();
            let at = self.one();
            let Span { start, .. } = self.spans.remove(at);
            self.log.push(format!("free {start}"));
            self.pager.free(start).expect("freed");
        }
    }

    fn one(&mut self) -> usize {
        self.random.index(self.spans.len())
    }

    /// Runs `work` as one call that names a span, on either stream, behind the call before.
    fn call(&mut self, at: usize, work: impl FnOnce(&mut Self, &SimDriver, RawStream)) {
        let (pool, driver) = (Arc::clone(self.pool.pool()), Arc::clone(self.pool.driver()));
        let (before, now) = (self.last, self.random.index(2));
        let raw = self.streams[now];
        if now != before {
            let event = driver.event_create().expect("an event");
            driver.event_record(event, self.streams[before]).expect("recorded");
            driver.stream_wait_event(raw, event).expect("ordered");
            // SAFETY: nobody else has it.
            unsafe { driver.event_destroy(event) }.expect("ended");
            self.last = now;
        }
        let span = self.spans[at].start;
        if self.holds {
            let held = self.pager.acquire(&[span], LIMIT);
            held.unwrap_or_else(|error| panic!("{error}\n{}", self.story()));
        }
        let begun = self.pager.begin_call(&[word_at(span, 8)], In::Stream(raw), LIMIT);
        let touched = begun.unwrap_or_else(|error| panic!("{error}\n{}", self.story()));
        let inside = pool.enter();
        work(self, &driver, raw);
        drop(inside);
        self.pager.end_call(&touched.expect("it is paged"));
        if self.holds {
            self.pager.release(&[span]).expect("released");
        }
    }

    /// Writes these seeds, each to its piece of the span.
    fn put(&mut self, at: usize, seeds: &[(usize, u64)]) {
        self.log.push(format!("put in {at}: {seeds:?}"));
        self.call(at, |world, driver, raw| {
            for &(piece, seed) in seeds {
                let bytes = piece_of(seed);
                let (range, source) = (world.spans[at].piece(piece), NonNull::from(&bytes[..]));
                // SAFETY: the buffer is kept until the device has been waited for; the chunk is held.
                unsafe { driver.copy_to_device(range, source.cast(), raw) }.expect("copied");
                world.buffers.push(bytes);
                world.spans[at].pieces[piece].push(Some(seed));
            }
        });
    }

    fn write(&mut self) {
        let at = self.one();
        let count = self.spans[at].pieces.len();
        let mut seeds = Vec::new();
        for _ in 0..=self.random.below(4) {
            let piece = self.random.index(count);
            let held = &self.spans[at].pieces[piece];
            // These are contents that the piece had some time before: a fingerprint that is out of date knows them.
            let before = held[held.len() - 1 - self.random.index(held.len().min(4))];
            self.last_seed += 1;
            let new = self.last_seed;
            let seed = self.random.of(&[0, before.unwrap_or(new), before.unwrap_or(new), new]);
            seeds.push((piece, seed));
        }
        if self.random.one_in(3) {
            // Zeros at the end of a chunk have no place in host memory.
            let end = self.random.index(count + 1);
            seeds.extend(
                (0..count).map(|piece| (piece, if piece < end { self.last_seed } else { 0 })),
            );
        }
        self.put(at, &seeds);
    }

    /// Gives a piece some contents, then other contents while a pause comes, and then the first again.
    fn toggle(&mut self) {
        let at = self.one();
        let piece = self.random.index(self.spans[at].pieces.len());
        self.last_seed += 2;
        let first = self.last_seed - 1;
        let second = self.random.of(&[0, self.last_seed, self.last_seed]);
        self.put(at, &[(piece, first)]);
        self.flush();
        if self.random.one_in(2) {
            self.put(at, &[(piece, first)]);
            self.flush();
        }
        self.put(at, &[(piece, second)]);
        if self.random.one_in(3) {
            self.flush();
        }
        (0..=self.random.below(2)).for_each(|_| self.pause());
        self.put(at, &[(piece, first)]);
        if self.random.one_in(3) {
            self.flush();
        }
        // The piece leaves, and comes back.
        (0..self.spans.len()).filter(|other| *other != at).for_each(|other| self.read(other));
        self.read(at);
        self.check();
    }

    fn flush(&mut self) {
        self.log.push("flush".to_owned());
        self.pager.flush(LIMIT).expect("all is copied");
    }

    fn read(&mut self, at: usize) {
        self.call(at, |world, driver, raw| {
            let span = &world.spans[at];
            for (piece, held) in span.pieces.iter().enumerate() {
                let Some(seed) = held.last().copied().flatten() else { continue };
                let (mut bytes, range) = (piece_of(seed + 1), span.piece(piece));
                let target = NonNull::from(&mut bytes[..]).cast();
                // SAFETY: as for writes.
                unsafe { driver.copy_to_host(target, range, raw) }.expect("copied");
                world.reads.push((bytes, seed, range));
            }
        });
    }
}

// Pauses and resumes.
impl World {
    /// Makes one of the next driver calls fail, in a third of all cases.
    fn maybe_fail(&mut self) {
        if self.random.one_in(3) {
            let nth = 1 + self.random.below(60);
            let code = self.random.of(&[DriverCode::UNKNOWN, DriverCode::OUT_OF_MEMORY]);
            self.log.push(format!("  call {nth} fails: {code:?}"));
            self.pool.driver().faults().fail_any(FaultSpan::Nth(nth), code);
        }
    }

    fn fail_no_more(&self) {
        self.pool.driver().faults().clear();
    }

    /// Runs `step`, and after a failure once more without an injected one.
    fn done<T>(&mut self, step: impl Fn(&SimPool) -> PoolResult<T>) -> T {
        step(&self.pool).unwrap_or_else(|error| {
            self.log.push(format!("  {error}"));
            self.fail_no_more();
            step(&self.pool).expect("at the second try")
        })
    }

    fn units(&mut self, end: u64) -> ByDevice {
        ByDevice::from([(DEVICE, UNIT * self.random.below(end))])
    }

    fn pause(&mut self) {
        if self.random.one_in(2) {
            self.check();
        }
        if self.leave() {
            self.freeze();
            self.come();
        }
    }

    /// Pauses. False if the pause was undone.
    fn leave(&mut self) -> bool {
        let by_stages = self.random.one_in(2);
        self.log.push(format!("leave by stages {by_stages}"));
        // Calls of the draining do not fail.
        self.pool.drain();
        self.maybe_fail();
        let is_short = self.random.one_in(5);
        let budget =
            if is_short { HostBudget(Some(self.random.below(4) * UNIT)) } else { UNLIMITED };
        let begun = if by_stages {
            self.pool.reserve(&WHOLE, budget)
        } else {
            self.pool.save(&WHOLE, budget)
        };
        if begun.is_err() || self.random.one_in(3) {
            self.done(SimPool::remount);
            self.fail_no_more();
            drop(self.pool.commit_resume());
            self.log.push(format!("  undone: {:?}", begun.err()));
            return false;
        }
        if by_stages {
            for _ in 0..self.random.below(4) {
                let window = self.units(6);
                if let Err(error) = self.pool.release_stage(&window) {
                    self.log.push(format!("  stage: {error}"));
                }
            }
            self.done(SimPool::release_rest);
        } else {
            self.done(SimPool::release_selected);
        }
        self.fail_no_more();
        true
    }

    fn freeze(&mut self) {
        if self.random.one_in(4) {
            let (frozen, _) = self.pool.keeper().freeze(LIMIT).expect("all is away");
            self.log.push("  frozen".to_owned());
            drop(frozen.thaw());
        }
    }

    fn come(&mut self) {
        loop {
            let by_stages = self.random.one_in(2);
            self.log.push(format!("come by stages {by_stages}"));
            self.maybe_fail();
            let outcome = if by_stages { self.come_by_stages() } else { self.come_at_once() };
            self.fail_no_more();
            self.log.push(format!("  {outcome:?}"));
            if outcome.is_ok() && !self.random.one_in(6) {
                break;
            }
            self.pool.undo_resume().expect("given up");
        }
        drop(self.pool.commit_resume());
    }

    fn come_by_stages(&mut self) -> PoolResult<()> {
        for _ in 0..=self.random.below(4) {
            let window = self.units(6);
            self.pool.restore_stage(&window)?;
        }
        self.pool.restore_rest(usize::MAX).map(drop)
    }

    fn come_at_once(&self) -> PoolResult<()> {
        self.pool.create_own(&WHOLE)?;
        self.pool.restore_own(usize::MAX).map(drop)
    }
}

// The checks.
impl World {
    fn story(&self) -> String {
        self.log.join("\n")
    }

    fn check(&mut self) {
        self.pool.driver().synchronize().expect("the context lives");
        self.buffers.clear();
        for (bytes, seed, range) in std::mem::take(&mut self.reads) {
            let is_it = bytes == piece_of(seed);
            assert!(is_it, "not {seed} but {:?} at {range:?}\n{}", &bytes[..16], self.story());
        }
    }

    fn check_all(&mut self) {
        (0..self.spans.len()).for_each(|at| self.read(at));
        self.check();
        for range in &self.others {
            let is_it = holds(&self.pool, DEVICE, *range, bytes_of(OTHERS));
            assert!(is_it, "other memory at {range:?}\n{}", self.story());
        }
    }

    fn step(&mut self) {
        match self.random.below(24) {
            0..=9 => self.write(),
            10..=13 => {
                let at = self.one();
                self.read(at);
            }
            14 if self.spans.len() < 9 => self.alloc(),
            15 => self.free(),
            16 => self.flush(),
            17 => {
                let frames = 3 + self.random.below(4);
                self.log.push(format!("{frames} frames"));
                self.pager.set_frames(frames * UNIT, LIMIT).expect("frames");
            }
            18 => {
                let at = self.one();
                self.pager.announce(&[self.spans[at].start]).expect("announced");
            }
            19 => self.check_all(),
            20 => {
                let pool = Arc::clone(self.pool.pool());
                pool.make_room(DEVICE, UNIT * self.random.below(40));
            }
            21 | 22 => self.toggle(),
            _ => self.pause(),
        }
    }

    fn end(mut self) {
        self.check_all();
        assert_eq!(self.pager.report().unseen, [], "all was shown\n{}", self.story());
        let story = self.story();
        let Self { pool, pager, streams, others, .. } = self;
        drop(pager);
        for stream in streams {
            // SAFETY: nobody else has it.
            unsafe { pool.driver().stream_destroy(stream) }.expect("ended");
        }
        let others_bytes: u64 = others.iter().map(|range| range.size_bytes).sum();
        assert_eq!(free_bytes(&pool, DEVICE) + others_bytes, CAPACITY_BYTES, "{story}");
    }
}

/// The last of the seeds is `SUBLET_TEST_SEED`, which `cargo xtask test` sets, or another at each run. `SUBLET_TEST_ROUNDS` makes more of them.
#[expect(clippy::print_stdout, reason = "a failure shows the seed that repeats it")]
#[test]
fn any_ways_of_pausing_lose_no_byte_of_what_is_paged() {
    let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = read("SUBLET_TEST_SEED").unwrap_or_else(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock that is right");
        u64::from(since.subsec_nanos())
    });
    let more = first..first + read("SUBLET_TEST_ROUNDS").unwrap_or(1);
    for seed in SEEDS.into_iter().chain(more) {
        println!("SUBLET_TEST_SEED={seed}");
        on_a_thread(move || {
            let mut world = World::new(seed);
            (0..STEPS).for_each(|_| world.step());
            world.end();
        });
    }
}
