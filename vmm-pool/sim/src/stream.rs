//! Streams: one worker thread each, which does the submitted work later and in order.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use super::SimContext;
use super::core::{Core, Touch};
use sublet_driver::{DeviceAddress, DriverCode, RawStream, VaRange};

type Run = dyn Fn(&Core) -> Result<(), DriverCode> + Send + Sync;

/// The time at which work no longer uses the ranges that it touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// The time when the work is done.
    Done,
    /// The time when its caller has waited for it, or has asked and heard that it is done. Until then it may be under way,
    /// however fast it was here.
    Seen,
}

/// A piece of work of a stream. It may run any number of times: a graph replays it.
#[derive(Clone)]
pub struct Work {
    run: Arc<Run>,
    /// The ranges that the work touches, by start.
    touches: Arc<[(VaRange, Touch)]>,
    /// The first range that the caller named.
    first: VaRange,
    ends: Ends,
    /// The work only waits for another stream.
    is_wait: bool,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("touches", &self.touches).finish_non_exhaustive()
    }
}

impl Work {
    /// Makes work that names no ranges that it touches.
    pub fn new(run: impl Fn(&Core) -> Result<(), DriverCode> + Send + Sync + 'static) -> Self {
        let first = VaRange::new(DeviceAddress(0), 0);
        Self { run: Arc::new(run), touches: Arc::new([]), first, ends: Ends::Done, is_wait: false }
    }

    /// Makes work that waits for another stream, so that later work of this stream comes behind it.
    pub(super) fn waiting(wait: impl Fn() + Send + Sync + 'static) -> Self {
        let run = move |_: &Core| {
            wait();
            Ok(())
        };
        Self { is_wait: true, ..Self::new(run) }
    }

    /// Adds `ranges` that the work touches. If one is unmapped before the work is done, it is unmapped under the work.
    #[must_use]
    pub fn touching(self, ranges: impl IntoIterator<Item = (VaRange, Touch)>) -> Self {
        let mut touches: Vec<_> = ranges.into_iter().collect();
        let first = touches.first().map_or(self.first, |(range, _)| *range);
        touches.sort_by_key(|(range, _)| range.start);
        Self { touches: touches.into(), first, ..self }
    }

    /// The first range that the work touches.
    pub(super) fn first_range(&self) -> VaRange {
        self.first
    }

    /// Marks work of a caller that knows no events and no callbacks: work that the caller has not waited for is under way.
    /// Other work that it queues meanwhile for the same bytes on another stream has no order with this work.
    #[must_use]
    pub(super) fn until_seen(self) -> Self {
        Self { ends: Ends::Seen, ..self }
    }
}

fn end(range: VaRange) -> u64 {
    range.start.0.saturating_add(range.size_bytes)
}

pub(super) fn meet(one: VaRange, other: VaRange) -> bool {
    one.start.0 < end(other) && other.start.0 < end(one)
}

/// The ranges that a stream's work uses until the stream has come to a point.
struct InUse {
    point: u64,
    /// The ranges, by start.
    touches: Arc<[(VaRange, Touch)]>,
    ends: Ends,
}

impl InUse {
    fn is_over(&self, queue: &Queue) -> bool {
        self.point
            <= match self.ends {
                Ends::Done => queue.completed,
                Ends::Seen => queue.seen,
            }
    }

    fn meets(&self, range: VaRange) -> bool {
        self.touches.iter().any(|(touched, _)| meet(*touched, range))
    }

    /// Do both use the same bytes, and does one of them write there?
    fn conflicts(&self, work: &Work) -> bool {
        let mut ours = self.touches.iter().peekable();
        let mut theirs = work.touches.iter().peekable();
        // Both lists are in one order. Each range is compared with all that begin before it. Of those, the one that reaches
        // furthest decides.
        let (mut our_reach, mut their_reach) = (Reach::default(), Reach::default());
        loop {
            let start = |touch: Option<&&(VaRange, Touch)>| touch.map(|(range, _)| range.start);
            let is_ours = match (start(ours.peek()), start(theirs.peek())) {
                (None, None) => return false,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (Some(one), Some(other)) => one <= other,
            };
            let next = if is_ours { ours.next() } else { theirs.next() };
            let Some((range, touch)) = next else { return false };
            if range.size_bytes == 0 {
                continue;
            }
            let (same, opposite) = if is_ours {
                (&mut our_reach, &their_reach)
            } else {
                (&mut their_reach, &our_reach)
            };
            let met = match touch {
                Touch::Read => opposite.of_writes,
                Touch::Write => opposite.of_all,
            };
            if met > range.start.0 {
                return true;
            }
            same.add(*range, *touch);
        }
    }
}

/// The highest end of the ranges of a list that have been looked at.
#[derive(Default)]
struct Reach {
    of_all: u64,
    of_writes: u64,
}

impl Reach {
    fn add(&mut self, range: VaRange, touch: Touch) {
        self.of_all = self.of_all.max(end(range));
        if touch == Touch::Write {
            self.of_writes = self.of_writes.max(end(range));
        }
    }
}

/// Points of streams that later work comes after.
#[derive(Clone, Debug, Default)]
pub(super) struct Behind {
    /// The points by the stream's address in memory, which nothing else has while the entry exists.
    points: BTreeMap<usize, (Weak<Stream>, u64)>,
}

impl Behind {
    /// Returns the point of `stream` among them; 0 for none.
    pub(super) fn of(&self, stream: &Arc<Stream>) -> u64 {
        self.points.get(&Arc::as_ptr(stream).addr()).map_or(0, |(_, point)| *point)
    }

    fn add(&mut self, stream: &Weak<Stream>, point: u64) {
        let entry = self.points.entry(stream.as_ptr().addr());
        let known = &mut entry.or_insert_with(|| (stream.clone(), 0)).1;
        *known = point.max(*known);
    }

    fn join(&mut self, other: &Self) {
        other.points.values().for_each(|(stream, point)| self.add(stream, *point));
        self.points.retain(|_, (stream, _)| stream.strong_count() > 0);
    }
}

/// A point of a stream, and the points that the stream has waited for before it.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    stream: Weak<Stream>,
    point: u64,
    behind: Behind,
}

impl Mark {
    /// Waits until the stream has reached the point. All work of a stream that is gone is done.
    pub(super) fn wait(&self) {
        if let Some(stream) = self.stream.upgrade() {
            stream.wait_until(self.point);
        }
    }

    /// Has the stream reached the point?
    pub(super) fn is_reached(&self) -> bool {
        self.stream.upgrade().is_none_or(|stream| stream.lock().completed >= self.point)
    }

    /// Waits as [`Self::wait`] does, for a caller who then knows that all this work is done, on every stream.
    pub(super) fn show(&self) {
        self.wait();
        for (stream, point) in self.all().points.values() {
            if let Some(stream) = stream.upgrade() {
                let mut queue = stream.lock();
                queue.seen = queue.seen.max(*point);
            }
        }
    }

    fn all(&self) -> Behind {
        let mut all = self.behind.clone();
        all.add(&self.stream, self.point);
        all
    }
}

/// The relation of a stream to the default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The default stream itself: it waits for all blocking streams, and they wait for it.
    Default,
    /// Ordered against the default stream.
    Blocking,
    /// Independent of the default stream.
    NonBlocking,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    /// The point that the stream has reached as far as its caller knows.
    seen: u64,
    in_use: Vec<InUse>,
    /// The points of streams that later work waits for.
    behind: Behind,
    /// No more work comes; the worker ends when the queue is empty.
    ending: bool,
    /// The driver is ending: queued work is dropped, and nobody waits any more.
    aborted: bool,
}

impl Queue {
    fn forget_unused(&mut self) {
        let used = std::mem::take(&mut self.in_use);
        self.in_use = used.into_iter().filter(|used| !used.is_over(self)).collect();
    }
}

pub(super) struct Stream {
    pub(super) id: RawStream,
    pub(super) context: SimContext,
    pub(super) kind: StreamKind,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.id)
            .field("context", &self.context)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Makes a stream and starts its worker.
    pub(super) fn start(
        core: &Arc<Core>,
        id: RawStream,
        context: SimContext,
        kind: StreamKind,
    ) -> std::io::Result<(Arc<Self>, JoinHandle<()>)> {
        let stream =
            Arc::new(Self { id, context, kind, queue: Mutex::default(), changed: Condvar::new() });
        let (worker, core) = (stream.clone(), core.clone());
        let thread = thread::Builder::new()
            .name(format!("sim-stream-{:x}", id.0))
            .spawn(move || worker.run(&core))?;
        Ok((stream, thread))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, core: &Core) {
        while let Some(work) = self.next() {
            if work.is_wait {
                self.run_one(core, &work);
            } else {
                core.in_turn(self.id, || self.run_one(core, &work));
            }
            // The objects that the work holds are dropped before anybody hears that it is done.
            drop(work);
            self.lock().completed += 1;
            self.changed.notify_all();
        }
    }

    fn run_one(&self, core: &Core, work: &Work) {
        // Nothing runs on a device whose earlier work failed.
        if core.device_failure(self.context.device).is_ok() {
            let done = catch_unwind(AssertUnwindSafe(|| (work.run)(core)))
                .unwrap_or(Err(DriverCode::LAUNCH_FAILED));
            if let Err(code) = done {
                core.last_words.ended(work.first_range(), || format!("work of {self:?}: {work:?}"));
                core.fail_device(self.context.device, code);
            }
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if queue.aborted {
                return None;
            }
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.ending {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Adds work. Returns the point of the stream at which it is done.
    pub(super) fn submit(self: &Arc<Self>, work: Work) -> Mark {
        let mut queue = self.lock();
        queue.submitted += 1;
        let point = queue.submitted;
        if !work.touches.is_empty() {
            queue.forget_unused();
            let touches = work.touches.clone();
            queue.in_use.push(InUse { point, touches, ends: work.ends });
        }
        queue.work.push_back(work);
        let mark = Mark { stream: Arc::downgrade(self), point, behind: queue.behind.clone() };
        drop(queue);
        self.changed.notify_all();
        mark
    }

    /// Makes later work wait for `mark`.
    pub(super) fn come_behind(self: &Arc<Self>, mark: Mark) {
        self.lock().behind.join(&mark.all());
        self.submit(Work::waiting(move || mark.wait()));
    }

    /// Returns the points of streams that later work waits for.
    pub(super) fn behind(&self) -> Behind {
        self.lock().behind.clone()
    }

    /// Returns the point that the stream reaches when all work submitted so far is done; `None` if it is done already.
    pub(super) fn pending(&self) -> Option<u64> {
        let queue = self.lock();
        (queue.completed < queue.submitted).then_some(queue.submitted)
    }

    pub(super) fn wait_until(&self, point: u64) {
        let mut queue = self.lock();
        while queue.completed < point && !queue.aborted {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the point that the stream reaches when all work submitted so far is done.
    pub(super) fn mark(self: &Arc<Self>) -> Mark {
        let queue = self.lock();
        let (point, behind) = (queue.submitted, queue.behind.clone());
        Mark { stream: Arc::downgrade(self), point, behind }
    }

    /// Is all submitted work done? If so, the stream's caller knows it from now on.
    pub(super) fn show_if_idle(self: &Arc<Self>) -> bool {
        let mark = self.mark();
        let is_idle = mark.is_reached();
        if is_idle {
            mark.show();
        }
        is_idle
    }

    /// Does its work use a part of `range`?
    pub(super) fn uses(&self, range: VaRange) -> bool {
        let queue = self.lock();
        queue.in_use.iter().any(|used| !used.is_over(&queue) && used.meets(range))
    }

    /// Describes the ranges that its work uses, and its progress, for an error.
    pub(super) fn uses_in_words(&self) -> String {
        let queue = self.lock();
        let used = queue.in_use.iter().filter(|used| !used.is_over(&queue));
        let used: Vec<_> = used.map(|used| (used.point, used.ends, &used.touches)).collect();
        let Queue { submitted, completed, seen, .. } = &*queue;
        format!("{self:?} ({submitted} submitted, {completed} done, seen to {seen}: {used:?})")
    }

    /// Does its work use anything that its caller does not know to be done?
    pub(super) fn uses_anything(&self) -> bool {
        let queue = self.lock();
        queue.completed < queue.submitted || queue.in_use.iter().any(|used| !used.is_over(&queue))
    }

    /// Does its work that comes after `point` conflict with `work`? `work` is for another stream, and waits for this one only
    /// up to `point`.
    pub(super) fn races_with(&self, work: &Work, point: u64) -> bool {
        if work.ends == Ends::Done {
            return false;
        }
        let queue = self.lock();
        let later = queue.in_use.iter().filter(|used| used.point > point);
        let mut used = later.filter(|used| used.ends == Ends::Seen);
        used.any(|used| !used.is_over(&queue) && used.conflicts(work))
    }

    pub(super) fn end(&self) {
        self.lock().ending = true;
        self.changed.notify_all();
    }

    pub(super) fn abort(&self) {
        let mut queue = self.lock();
        queue.aborted = true;
        let dropped = std::mem::take(&mut queue.work);
        drop(queue);
        self.changed.notify_all();
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    type Touches = Vec<(VaRange, Touch)>;

    fn touches() -> impl Strategy<Value = Touches> {
        let touch = prop_oneof![Just(Touch::Read), Just(Touch::Write)];
        let range = (0..60_u64, 1..12_u64)
            .prop_map(|(start, size_bytes)| VaRange::new(DeviceAddress(start), size_bytes));
        vec((range, touch), 0..6)
    }

    fn conflict_one_by_one(ours: &Touches, theirs: &Touches) -> bool {
        let writes = |one: Touch, other: Touch| one == Touch::Write || other == Touch::Write;
        ours.iter().any(|(range, one)| {
            theirs.iter().any(|(met, other)| meet(*range, *met) && writes(*one, *other))
        })
    }

    proptest! {
        #[test]
        fn work_conflicts_where_two_ranges_meet_and_one_is_written(
            ours in touches(),
            theirs in touches(),
        ) {
            let expected = conflict_one_by_one(&ours, &theirs);
            let work = |touches: Touches| Work::new(|_| Ok(())).touching(touches);
            let in_use = InUse { point: 1, touches: work(ours).touches, ends: Ends::Seen };
            prop_assert_eq!(in_use.conflicts(&work(theirs)), expected);
        }
    }

    #[test]
    fn a_range_without_bytes_conflicts_with_nothing() {
        let touch =
            |start, size_bytes| (VaRange::new(DeviceAddress(start), size_bytes), Touch::Write);
        let in_use = InUse { point: 1, touches: Arc::new([touch(0, 64)]), ends: Ends::Seen };
        assert!(!in_use.conflicts(&Work::new(|_| Ok(())).touching([touch(32, 0)])));
        assert!(in_use.conflicts(&Work::new(|_| Ok(())).touching([touch(32, 1)])));
    }
}
