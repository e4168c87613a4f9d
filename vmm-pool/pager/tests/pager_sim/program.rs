//! A program that uses paged memory on two streams, and knows its right contents.

#![expect(
    unsafe_code,
    reason = "uses of paged memory are copies through the driver, or kernels that nobody sees"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use sublet_pager::{In, PageError, Pager};
use vmm_pool::driver::sim::{SimDriver, Touch, Work};
use vmm_pool::driver::{
    DeviceAddress, Driver, DriverCode, DriverResult, RawEvent, RawStream, VaRange,
};
use vmm_pool::{HostBudget, Pool};

pub(crate) use crate::paged::{pager, unlimited};
use crate::process::SimPool;
use crate::stage::{CAPACITY_BYTES, DEVICE, UNIT, free_bytes, node, pattern, pause, pool, resume};

pub(crate) const LIMIT: Duration = Duration::from_mins(1);
/// The time to wait for an event that should not happen.
pub(crate) const SHORT: Duration = Duration::from_millis(200);

/// Waits until `is_so` returns true, for at most [`LIMIT`].
pub(crate) fn until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "it does not come");
        std::thread::yield_now();
    }
}

/// Pauses and resumes the process again and again.
pub(crate) fn pause_until(pool: Arc<Pool<SimDriver>>, stop: &AtomicBool) {
    pool.driver().make_current(DEVICE).expect("device 0");
    let process = SimPool::of(pool);
    while !stop.load(Ordering::Acquire) {
        pause(&process);
        resume(&process);
        // At least one call goes in before the next.
        let mark = process.gate().mark();
        while process.gate().mark() == mark && !stop.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
}

/// The contents that memory should have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Holds {
    Zeros,
    Pattern(u64),
    /// The memory was another's.
    Anything,
}

/// The part of a span that is in one chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) range: VaRange,
    pub(crate) holds: Holds,
}

/// Returns a word that a call's arguments have.
pub(crate) fn word_at(start: DeviceAddress, offset: u64) -> VaRange {
    VaRange::new(DeviceAddress(start.0 + offset), 1)
}

pub(crate) fn bytes_of(holds: Holds, size_bytes: u64) -> Vec<u8> {
    let count = usize::try_from(size_bytes).expect("small");
    match holds {
        Holds::Pattern(seed) => pattern(seed).repeat(count.div_ceil(16))[..count].to_vec(),
        Holds::Zeros | Holds::Anything => vec![0; count],
    }
}

/// Writes `size_bytes` of the span, which is one chunk, from `offset` on, as a kernel does that has the address from device
/// memory.
pub(crate) fn write_unseen(stage: &Stage, span: usize, holds: Holds, offset: u64, size_bytes: u64) {
    let range = stage.spans[span][0].range;
    let part = VaRange::new(DeviceAddress(range.start.0 + offset), size_bytes);
    let guard = stage.driver().core().access(DEVICE, &[(part, Touch::Write)]).expect("mapped");
    let at = usize::try_from(part.start.0).expect("small");
    let start: *mut u8 = std::ptr::with_exposed_provenance_mut(at);
    for (index, byte) in bytes_of(holds, size_bytes).into_iter().enumerate() {
        // SAFETY: the guard keeps these bytes writable.
        unsafe { start.wrapping_add(index).write_volatile(byte) };
    }
    drop(guard);
}

/// Reads the byte of `range` at `offset`, as a kernel does whose use nobody has shown.
pub(crate) fn byte_unseen(
    driver: &SimDriver,
    range: VaRange,
    offset: usize,
) -> Result<u8, DriverCode> {
    let access = driver.core().access(DEVICE, &[(range, Touch::Read)])?;
    let at = usize::try_from(range.start.0).expect("small") + offset;
    let byte: *const u8 = std::ptr::with_exposed_provenance(at);
    // SAFETY: the guard keeps the byte readable.
    let byte = unsafe { byte.read_volatile() };
    drop(access);
    Ok(byte)
}

/// A program that uses paged memory on two streams.
pub(crate) struct Stage {
    /// Work that waits until this is dropped. It is dropped first.
    pub(crate) held: Vec<Sender<()>>,
    pub(crate) pool: SimPool,
    pub(crate) pager: Option<Pager<SimDriver>>,
    pub(crate) streams: [RawStream; 2],
    /// The event behind the last use on each stream, for the order of the program itself.
    pub(crate) order: [RawEvent; 2],
    /// The host memory of copies, until the copies have been waited for.
    pub(crate) buffers: Vec<Box<[u8]>>,
    /// The bytes that were read, and their right contents.
    pub(crate) reads: Vec<(Box<[u8]>, Holds)>,
    pub(crate) spans: Vec<Vec<Place>>,
    pub(crate) next_seed: u64,
}

impl Stage {
    pub(crate) fn new(frames: u64) -> Self {
        Self::within(frames, unlimited)
    }

    pub(crate) fn within(
        frames: u64,
        budget: impl Fn(u64) -> HostBudget + Send + Sync + 'static,
    ) -> Self {
        Self::of(pool(&node()), frames, budget)
    }

    /// Makes a program whose streams work in an order by a seed.
    pub(crate) fn in_order(frames: u64, seed: Option<u64>) -> Self {
        let pool = pool(&node());
        if let Some(seed) = seed {
            pool.driver().core().schedule(seed);
        }
        Self::of(pool, frames, unlimited)
    }

    pub(crate) fn of(
        pool: SimPool,
        frames: u64,
        budget: impl Fn(u64) -> HostBudget + Send + Sync + 'static,
    ) -> Self {
        let driver = Arc::clone(pool.driver());
        let streams = [(); 2].map(|()| driver.stream_create().expect("a stream"));
        let order = [(); 2].map(|()| driver.event_create().expect("an event"));
        let pager = Some(pager(&pool, frames, budget));
        Self {
            pool,
            pager,
            streams,
            order,
            buffers: Vec::new(),
            reads: Vec::new(),
            held: Vec::new(),
            spans: Vec::new(),
            next_seed: 1,
        }
    }

    pub(crate) fn pager(&self) -> &Pager<SimDriver> {
        self.pager.as_ref().expect("until the end")
    }

    pub(crate) fn driver(&self) -> &SimDriver {
        self.pool.driver()
    }

    pub(crate) fn alloc(&mut self, chunks: u64) -> Option<usize> {
        self.alloc_bytes(chunks * UNIT)
    }

    pub(crate) fn alloc_bytes(&mut self, size_bytes: u64) -> Option<usize> {
        let mut start = self.pager().alloc(size_bytes).ok()?.0;
        let end = start + size_bytes;
        let mut places = Vec::new();
        while start < end {
            let size_bytes = (start / UNIT * UNIT + UNIT).min(end) - start;
            let holds = if size_bytes == UNIT { Holds::Zeros } else { Holds::Anything };
            places.push(Place { range: VaRange::new(DeviceAddress(start), size_bytes), holds });
            start += size_bytes;
        }
        self.spans.push(places);
        Some(self.spans.len() - 1)
    }

    /// Allocates `count` spans of one chunk each.
    pub(crate) fn alloc_each(&mut self, count: u64) {
        for _ in 0..count {
            self.alloc(1).expect("addresses");
        }
    }

    /// Frees a span. The number of each later span is one less from now on.
    pub(crate) fn free(&mut self, span: usize) {
        self.pager().free(self.start_of(span)).expect("freed");
        self.spans.remove(span);
    }

    pub(crate) fn start_of(&self, span: usize) -> DeviceAddress {
        self.spans[span][0].range.start
    }

    /// Counts the chunks of these spans.
    pub(crate) fn chunks_of(&self, spans: &[usize]) -> usize {
        let places = spans.iter().flat_map(|&span| &self.spans[span]);
        let chunks = places.map(|place| place.range.start.0 / UNIT);
        chunks.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// Holds the work on this stream from here on, until somebody has to wait for it.
    pub(crate) fn hold(&mut self, stream: usize) {
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let goes = std::sync::Mutex::new(goes);
        let held = Work::new(move |_| {
            let _gone = goes.lock().map(|goes| goes.recv());
            Ok(())
        });
        self.driver().core().enqueue(self.streams[stream], held).expect("held");
        self.held.push(go);
    }

    pub(crate) fn try_use(
        &mut self,
        spans: &[usize],
        stream: usize,
        writes: bool,
    ) -> Result<(), String> {
        let starts: Vec<_> = spans.iter().map(|&span| self.start_of(span)).collect();
        let raw = self.streams[stream];
        self.held.clear();
        let text = |error: PageError| error.to_string();
        // Any byte of a used span will do.
        let words: Vec<_> = starts.iter().map(|start| word_at(*start, 7)).collect();
        let begun = self.pager().begin_call(&words, In::Stream(raw), LIMIT).map_err(text)?;
        let touched = begun.expect("it is paged");
        let launched = self.launch(spans, stream, writes);
        self.pager().end_call(&touched);
        launched.map_err(|error| error.to_string())
    }

    /// Captures a graph that uses a span.
    pub(crate) fn capture(&self, span: usize) {
        let word = word_at(self.start_of(span), 0);
        let kept = self.pager().begin_call(&[word], In::Graph, LIMIT).expect("here");
        self.pager().end_call(&kept.expect("paged"));
    }

    /// Uses a span by a call on the first stream, whose work waits until somebody has to wait for it.
    pub(crate) fn use_without_end(&mut self, span: usize) {
        let (word, stream) = (word_at(self.start_of(span), 0), In::Stream(self.streams[0]));
        let begun = self.pager().begin_call(&[word], stream, LIMIT).expect("here");
        self.hold(0);
        self.launch(&[span], 0, true).expect("it does not end");
        self.pager().end_call(&begun.expect("paged"));
    }

    pub(crate) fn launch(
        &mut self,
        spans: &[usize],
        stream: usize,
        writes: bool,
    ) -> DriverResult<()> {
        let pool = Arc::clone(self.pool.pool());
        let driver = Arc::clone(self.pool.driver());
        let _entered = pool.enter();
        let raw = self.streams[stream];
        // The program itself orders its uses: one comes after another.
        for event in self.order {
            driver.stream_wait_event(raw, event)?;
        }
        for &span in spans {
            for index in 0..self.spans[span].len() {
                let place = self.spans[span][index];
                let (range, size_bytes) = (place.range, place.range.size_bytes);
                if writes {
                    let holds = Holds::Pattern(self.next_seed);
                    let source = bytes_of(holds, size_bytes).into_boxed_slice();
                    let pointer = NonNull::from(&source[..]).cast();
                    // SAFETY: the buffer is kept until the devices have been waited for; the chunk is held.
                    unsafe { driver.copy_to_device(range, pointer, raw) }?;
                    self.next_seed += 1;
                    self.spans[span][index].holds = holds;
                    self.buffers.push(source);
                } else {
                    let mut target = bytes_of(Holds::Pattern(0), size_bytes).into_boxed_slice();
                    let pointer = NonNull::from(&mut target[..]).cast();
                    // SAFETY: as above.
                    unsafe { driver.copy_to_host(pointer, range, raw) }?;
                    self.reads.push((target, place.holds));
                }
            }
        }
        driver.event_record(self.order[stream], raw)
    }

    /// Waits for the device, and checks all bytes that were read.
    pub(crate) fn check(&mut self) {
        self.held.clear();
        self.driver().synchronize().expect("the context lives");
        for (read, holds) in self.reads.drain(..) {
            let is_so = read[..] == bytes_of(holds, read.len() as u64)[..];
            assert!(is_so || matches!(holds, Holds::Anything), "not what was written: {holds:?}");
        }
        self.buffers.clear();
    }

    pub(crate) fn use_all(&mut self, writes: bool) {
        for span in 0..self.spans.len() {
            self.try_use(&[span], span % 2, writes).expect("a use");
        }
    }

    /// Ends the program: everything is given back.
    pub(crate) fn end(mut self) {
        self.check();
        let pager = self.pager.take();
        drop(pager);
        for stream in self.streams {
            // SAFETY: the stage's own.
            unsafe { self.driver().stream_destroy(stream) }.expect("ended");
        }
        for event in self.order {
            // SAFETY: the stage's own.
            unsafe { self.driver().event_destroy(event) }.expect("ended");
        }
        assert_eq!(crate::stage::end_streams(&self.pool), 0, "but for those that the pool keeps");
        let census = self.driver().census();
        assert_eq!(census.events, 0, "{census:?}");
        assert_eq!(free_bytes(&self.pool, DEVICE), CAPACITY_BYTES);
        assert_eq!((census.handles, census.reservations, census.mappings), (0, 0, 0), "{census:?}");
    }
}
