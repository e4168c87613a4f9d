//! Memory of a process that is larger than its frames, and used by its kernels. What is in it is compared with a model that is
//! never paged.

mod using;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use sublet_pager::{In, PageError, PageReport, PageResult, Pager, WindowSize};
use sublet_tests::{Outcome, Trouble};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, StreamKind};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver as _, RawEvent, RawStream, VaRange};
use vmm_pool::{DeviceReport, PoolError, PoolReport};

use crate::tally::{Counts, Tally};

use super::calls::{device_refused, fired, is_full};
use super::memory::PAGE_BYTES;
use super::{Charter, Sim, host, let_time_pass};

/// The library that the pool counts it under.
const LIBRARY: &str = "paged";
/// For what a pager does, without the time of pauses. Shorter than a worker may take for an answer.
const LIMIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(1);
const BLOCKS_MAX: usize = 8;
/// A pager has one stream for each way, and as many again from its first question on.
const PAGER_STREAMS: RangeInclusive<usize> = 2..=4;

/// What must be in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// It was another block's.
    Anything,
    Is(u64),
}

impl Holds {
    fn has(self, pattern: Option<u64>) -> bool {
        match self {
            Self::Anything => true,
            Self::Is(wanted) => pattern == Some(wanted),
        }
    }
}

#[derive(Clone, Debug)]
struct Block {
    start: DeviceAddress,
    pages: Vec<Holds>,
}

impl Block {
    fn range(&self) -> VaRange {
        VaRange::new(self.start, self.pages.len() as u64 * PAGE_BYTES)
    }

    fn part(&self, first: usize, pages: usize) -> VaRange {
        let start = DeviceAddress(self.start.0 + first as u64 * PAGE_BYTES);
        VaRange::new(start, pages as u64 * PAGE_BYTES)
    }
}

/// A pager, and what was made in its window.
struct Window {
    pager: Arc<Pager<SimDriver>>,
    size: WindowSize,
    frames: u64,
    blocks: Vec<Block>,
    /// The order that blocks are used in, by index, and the next place there.
    order: Vec<usize>,
    next: usize,
    /// Calls had been made to fail when it was made.
    fired: u64,
    /// Chunks that graphs use: they stay.
    kept: BTreeSet<u64>,
    /// What it had done when that was last counted.
    counted: PageReport,
}

impl Window {
    fn chunks_of(&self, range: VaRange) -> std::ops::RangeInclusive<u64> {
        let first = range.start.0 - self.pager.window().start.0;
        let last = first + range.size_bytes - 1;
        first / self.size.chunk_bytes..=last / self.size.chunk_bytes
    }

    /// Do these blocks fit the frames, next to what stays there?
    fn fits(&self, blocks: &[usize]) -> bool {
        let chunks = blocks.iter().flat_map(|index| self.chunks_of(self.blocks[*index].range()));
        let all: BTreeSet<_> = chunks.chain(self.kept.iter().copied()).collect();
        all.len() as u64 <= self.frames
    }

    fn is_kept(&self, block: usize) -> bool {
        self.chunks_of(self.blocks[block].range()).all(|chunk| self.kept.contains(&chunk))
    }

    fn starts(&self, blocks: &[usize]) -> Vec<DeviceAddress> {
        blocks.iter().map(|index| self.blocks[*index].start).collect()
    }
}

/// The pager of a process, for the thread that says what it holds.
pub(super) type Open = Arc<Mutex<Option<Arc<Pager<SimDriver>>>>>;

/// Is this chunk away, so that a resume of everything does not bring it?
pub(super) fn is_away(open: &Open, ranges: &[VaRange]) -> bool {
    let pager = open.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Some((pager, range)) = pager.zip(ranges.first()) else { return false };
    let report = pager.report();
    let offset = range.start.0.checked_sub(pager.window().start.0);
    let chunk = offset.and_then(|offset| usize::try_from(offset / report.chunk_bytes).ok());
    chunk.is_some_and(|chunk| report.chunks.as_bytes().get(chunk) == Some(&b'a'))
}

/// See the head of this module.
pub(super) struct Paged {
    member: Arc<Sim>,
    random: Rng,
    device: DeviceOrdinal,
    number: u64,
    units_max: u64,
    patterns: u64,
    is_used: bool,
    open: Open,
    window: Option<Window>,
    streams: [RawStream; 2],
    /// Behind the last use on each.
    marks: [RawEvent; 2],
    /// What a kernel has found that must not be there.
    wrong: Arc<Mutex<Option<String>>>,
    /// A pager could not give all back, for a fault.
    is_stuck: bool,
    /// Calls had been made to fail, and host memory had been short so often, when all was last compared.
    fired: u64,
    shortages: u64,
    /// What was done since it was last asked.
    done: Counts,
}

/// What the rest of the account needs to know.
pub(super) struct PagedAccount {
    pub(super) places: usize,
    pub(super) streams: RangeInclusive<usize>,
    pub(super) is_exact: bool,
}

impl Paged {
    /// Half of the processes that keep contents page some memory.
    pub(super) fn new(member: Arc<Sim>, charter: &Charter, open: Open) -> Outcome<Self> {
        let mut random = Rng::with_seed(charter.seed ^ 0x9a6e);
        let is_used = charter.is_keeper && random.bool();
        let index = random.usize(..charter.devices.len());
        let device = DeviceOrdinal(charter.devices[index]);
        let core = member.pool().driver().core();
        core.ensure_context(device).map_err(device_refused)?;
        let stream = || core.new_stream(device, StreamKind::NonBlocking).map_err(device_refused);
        let mark = || core.new_event(device).map_err(device_refused);
        let (streams, marks) = ([stream()?, stream()?], [mark()?, mark()?]);
        Ok(Self {
            streams,
            marks,
            random,
            device,
            number: charter.number,
            units_max: charter.units_max,
            patterns: 0,
            is_used,
            open,
            window: None,
            wrong: Arc::default(),
            is_stuck: false,
            fired: 0,
            shortages: 0,
            done: Counts::new(),
            member,
        })
    }

    pub(super) fn wants_a_change(&mut self) -> bool {
        self.is_used && self.random.bool()
    }

    /// Does something random; says whether the driver and the host let it.
    pub(super) fn change(&mut self) -> Outcome<bool> {
        let Some(window) = &self.window else {
            return if self.random.u8(..4) == 0 { self.make_window() } else { Ok(true) };
        };
        let count = window.blocks.len();
        match self.random.u8(..40) {
            0..8 if count < BLOCKS_MAX => self.make_block(),
            8..11 if count > 0 => self.free_block(),
            11..14 => self.change_frames(),
            14 => self.flush(),
            15 => self.close(),
            16 if count > 0 => self.keep_one(),
            _ if count == 0 => self.make_block(),
            _ => self.use_some(),
        }
    }

    fn driver(&self) -> &SimDriver {
        self.member.pool().driver()
    }

    fn fired(&self) -> u64 {
        fired(&self.member)
    }

    /// Is it for an injected fault, a device that is full, or host memory that is short?
    fn is_explained(&self, error: &PageError) -> bool {
        let is_plain = match error {
            PageError::Shared(error) => return self.is_explained(error),
            PageError::Pool(PoolError::OutOfDeviceMemory { .. }) | PageError::WindowFull { .. } => {
                true
            }
            PageError::Pool(error) => is_full(error),
            PageError::OutOfHostMemory { .. } => host::shortages() > self.shortages,
            PageError::TooFewFrames { .. }
            | PageError::NotPaged { .. }
            | PageError::UnfitChunk { .. }
            | PageError::NoBytes
            | PageError::Late { .. }
            | PageError::Ended { .. }
            | PageError::NoThread(_) => false,
        };
        is_plain || self.fired() > self.fired
    }

    /// What an answer comes to: `None` if something explains the refusal.
    fn judged<T>(&mut self, what: &str, result: PageResult<T>) -> Outcome<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            // What the driver has not said to be over once stays, and others wait for it.
            Err(PageError::Late { .. })
                if self.window.as_ref().is_some_and(|window| self.fired() > window.fired) =>
            {
                self.is_stuck = true;
                self.count("windows given up after a fault", 1);
                self.close().map(|_| None)
            }
            Err(error) if self.is_explained(&error) => {
                self.count("refused", 1);
                Ok(None)
            }
            Err(error) => {
                let report = self.window.as_ref().map(|window| window.pager.report());
                Err(Trouble::new(format!("{what}: {error}; {report:?}")))
            }
        }
    }

    /// The same of what may come later.
    fn judged_later(&mut self, what: &str, result: PageResult<()>) -> Outcome<bool> {
        match result {
            Err(PageError::Late { .. }) => Ok(true),
            result => self.judged(what, result).map(|done| done.is_some()),
        }
    }

    fn count(&mut self, name: &str, by: u64) {
        Tally::count(&mut self.done, name, by);
    }

    /// What was done since this was last asked.
    pub(super) fn take_done(&mut self) -> Counts {
        self.count_window();
        std::mem::take(&mut self.done)
    }

    /// Adds what the pager has done since this was last asked.
    fn count_window(&mut self) {
        let Some(window) = &mut self.window else { return };
        let now = window.pager.report();
        let before = std::mem::replace(&mut window.counted, now.clone());
        let by = [
            ("exchanges", now.exchanges - before.exchanges),
            ("chunks in", (now.in_bytes - before.in_bytes) / now.chunk_bytes),
            ("chunks out", (now.out_bytes - before.out_bytes) / now.chunk_bytes),
            ("unchanged", (now.unchanged_bytes - before.unchanged_bytes) / now.chunk_bytes),
            ("calls", now.calls - before.calls),
        ];
        for (name, count) in by {
            self.count(name, count);
        }
    }

    fn make_window(&mut self) -> Outcome<bool> {
        let random = &mut self.random;
        let chunk_bytes = random.u64(1..=2) * GRANULARITY_BYTES;
        // Few most of the time; more than a process has otherwise now and then.
        let most = if random.u8(..4) == 0 { 2 * self.units_max } else { self.units_max.min(3) };
        let frames = random.u64(1..=most);
        let size = WindowSize {
            window_bytes: 32 * chunk_bytes,
            chunk_bytes,
            frames_bytes: frames * chunk_bytes,
        };
        let checks_writes = random.bool();
        let fired = self.fired();
        let (pool, budget) = (Arc::clone(self.member.pool()), self.member.host_budget());
        let made = Pager::new(pool, self.device, size, budget);
        let Some(pager) = self.judged("a window", made)? else { return Ok(false) };
        if checks_writes {
            pager.check_writes();
        }
        let pager = Arc::new(pager);
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&pager));
        self.window = Some(Window {
            pager,
            size: WindowSize { frames_bytes: most * chunk_bytes, ..size },
            frames,
            blocks: Vec::new(),
            order: Vec::new(),
            next: 0,
            fired,
            kept: BTreeSet::new(),
            counted: PageReport::default(),
        });
        self.count("windows", 1);
        Ok(true)
    }

    /// Gives the window back with all that is in it, now and then while kernels still use that.
    fn close(&mut self) -> Outcome<bool> {
        if self.is_stuck || self.random.bool() {
            self.wait()?;
        }
        self.count_window();
        if let Some(window) = self.window.take() {
            judge_unseen(&window)?;
            *self.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(true)
    }

    fn make_block(&mut self) -> Outcome<bool> {
        let Some(window) = &self.window else { return Ok(true) };
        let chunk_pages = window.size.chunk_bytes / PAGE_BYTES;
        let pages = match self.random.u8(..4) {
            0 => self.random.u64(1..=chunk_pages),
            1 if window.frames > 1 => self.random.u64(chunk_pages..=2 * chunk_pages),
            _ => chunk_pages,
        };
        let made = window.pager.alloc(pages * PAGE_BYTES);
        let Some(start) = self.judged("a paged block", made)? else { return Ok(false) };
        let Some(window) = &mut self.window else { return Ok(true) };
        // What is alone in its chunk is zero.
        let (first, chunk) = (start.0 - window.pager.window().start.0, window.size.chunk_bytes);
        let (from, to) =
            (first.next_multiple_of(chunk), (first + pages * PAGE_BYTES) / chunk * chunk);
        let page_at = |index: u64| {
            let at = first + index * PAGE_BYTES;
            if (from..to).contains(&at) { Holds::Is(0) } else { Holds::Anything }
        };
        window.order.push(window.blocks.len());
        window.blocks.push(Block { start, pages: (0..pages).map(page_at).collect() });
        Ok(true)
    }

    fn free_block(&mut self) -> Outcome<bool> {
        let Some(window) = &mut self.window else { return Ok(true) };
        let index = self.random.usize(..window.blocks.len());
        let block = window.blocks.swap_remove(index);
        window.order = (0..window.blocks.len()).collect();
        let is_others = |chunk: &u64| {
            let mut others = window.blocks.iter().map(Block::range);
            others.any(|other| window.chunks_of(other).contains(chunk))
        };
        let alone: Vec<_> =
            window.chunks_of(block.range()).filter(|chunk| !is_others(chunk)).collect();
        window.kept.retain(|chunk| !alone.contains(chunk));
        let freed = window.pager.free(block.start);
        self.judged("a block that is freed", freed).map(|freed| freed.is_some())
    }

    fn change_frames(&mut self) -> Outcome<bool> {
        let Some(window) = &mut self.window else { return Ok(true) };
        let chunk = window.size.chunk_bytes;
        let least = window.kept.len() as u64 + 1;
        let most = (window.size.frames_bytes / chunk).max(least);
        window.frames = self.random.u64(least..=most);
        // They shrink when uses end and the host has room for contents, which a rank that others wait for does not wait for.
        let set = window.pager.set_frames(window.frames * chunk, Duration::ZERO);
        self.judged_later("other frames", set)
    }

    /// A graph uses a block: its chunks stay.
    fn keep_one(&mut self) -> Outcome<bool> {
        if !self.make_current()? {
            return Ok(false);
        }
        let Some(window) = &mut self.window else { return Ok(true) };
        let index = self.random.usize(..window.blocks.len());
        let range = window.blocks[index].range();
        let kept: BTreeSet<_> =
            window.kept.iter().copied().chain(window.chunks_of(range)).collect();
        // Others need a frame, too.
        if kept.len() as u64 >= window.frames {
            return Ok(true);
        }
        let begun = window.pager.begin_call(&[window.blocks[index].part(0, 1)], In::Graph, LIMIT);
        let Some(touched) = self.judged("a call in a graph", begun)? else { return Ok(false) };
        let touched = touched.ok_or_else(|| Trouble::new("what is paged is not known"))?;
        if let Some(window) = &mut self.window {
            window.pager.end_call(&touched);
            window.kept = kept;
        }
        self.count("blocks of graphs", 1);
        Ok(true)
    }

    /// What a driver's call needs. False if an injected fault is in the way.
    fn make_current(&self) -> Outcome<bool> {
        match self.driver().make_current(self.device) {
            Ok(()) => Ok(true),
            Err(_) if self.fired() > self.fired => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn flush(&mut self) -> Outcome<bool> {
        let Some(window) = &self.window else { return Ok(true) };
        let flushed = window.pager.flush(Duration::ZERO);
        self.judged_later("copies to the host", flushed)
    }

    /// Waits for kernels, and looks at what they found.
    pub(super) fn wait(&mut self) -> Outcome {
        for stream in self.streams {
            self.driver().core().wait_stream(stream).map_err(device_refused)?;
        }
        let found = self.wrong.lock().unwrap_or_else(PoisonError::into_inner).take();
        match found {
            Some(found) => {
                let report = self.window.as_ref().map(|window| window.pager.report());
                Err(Trouble::new(format!("{found}; {report:?}")))
            }
            None => Ok(()),
        }
    }

    /// Compares all that is paged. The process runs, and no call is made to fail. Adds what was compared.
    pub(super) fn check(&mut self, checked_bytes: &mut u64) -> Outcome {
        self.wait()?;
        if let Some(window) = &self.window {
            let set = window.pager.set_frames(window.frames * window.size.chunk_bytes, LIMIT);
            self.judged("other frames", set)?;
        }
        if let Some(window) = self.window.as_ref().filter(|_| self.random.u8(..4) == 0) {
            let flushed = window.pager.flush(LIMIT);
            self.judged("copies to the host", flushed)?;
        }
        let count = self.window.as_ref().map_or(0, |window| window.blocks.len());
        let mut all: Vec<_> = (0..count).collect();
        self.random.shuffle(&mut all);
        for index in all {
            // Frames may be fewer than it needs, or the device full.
            let Some(window) = &self.window else { break };
            let bytes = window.blocks[index].range().size_bytes;
            if window.fits(&[index]) && self.use_blocks(&[index], false)? {
                *checked_bytes += bytes;
            }
        }
        self.wait()?;
        if let Some(window) = &self.window {
            judge_unseen(window)?;
        }
        self.fired = self.fired();
        self.shortages = host::shortages();
        Ok(())
    }

    /// What the pool has on record, once a window is gone that was closed while the process was paused: the pager's thread ends it
    /// behind the resume, perhaps when there is another one.
    pub(super) fn report(&self) -> PoolReport {
        let deadline = Instant::now() + LIMIT;
        loop {
            let report = self.member.pool().report();
            let own: u64 = report.devices.iter().map(own_bytes_on).sum();
            let window = self.window.as_ref().map(|window| window.pager.report());
            let is_ending = !self.is_stuck && own > window.map_or(0, |window| window.paged_bytes);
            if !is_ending || Instant::now() >= deadline {
                return report;
            }
            let_time_pass(LOOK_EVERY);
        }
    }

    /// What the pool has on record for it.
    pub(super) fn account(&self, report: &PoolReport) -> Outcome<PagedAccount> {
        let pager = self.window.as_ref().map(|window| window.pager.report()).unwrap_or_default();
        let own: u64 = report.devices.iter().map(own_bytes_on).sum();
        let resident: u64 = report.devices.iter().map(resident_bytes_on).sum();
        if !self.is_stuck && (own, resident) != (pager.paged_bytes, pager.resident_bytes) {
            return Err(Trouble::new(format!(
                "{own} bytes of chunks, {resident} resident: {pager:?}"
            )));
        }
        let chunks = if resident == 0 { 0 } else { resident / pager.chunk_bytes.max(1) };
        let (least, most) = if self.window.is_some() { PAGER_STREAMS.into_inner() } else { (0, 0) };
        Ok(PagedAccount {
            places: usize::try_from(chunks)?,
            streams: self.streams.len() + least..=self.streams.len() + most,
            is_exact: !self.is_stuck,
        })
    }

    /// Lets everything go. The caller is not inside the gate.
    pub(super) fn free_all(&mut self) -> Outcome {
        self.close().map(drop)
    }
}

/// Checks that all writes were seen.
fn judge_unseen(window: &Window) -> Outcome {
    match window.pager.report().unseen.first() {
        Some(found) => Err(Trouble::new(format!("a write that was told: {found}"))),
        None => Ok(()),
    }
}

/// Own bytes that are paged on one device.
pub(super) fn own_bytes_on(row: &DeviceReport) -> u64 {
    row.classes.iter().filter(|class| class.library == LIBRARY).map(|class| class.own_bytes).sum()
}

/// The part of these bytes that is on the device now.
pub(super) fn resident_bytes_on(row: &DeviceReport) -> u64 {
    let paged = row.classes.iter().filter(|class| class.library == LIBRARY);
    paged.map(|class| class.resident_bytes).sum()
}
