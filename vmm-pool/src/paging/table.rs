//! What the pager knows of the chunks of one window: a pure table, with no driver, clock or lock.
//!
//! | a chunk is | its row is | left by |
//! | --- | --- | --- |
//! | away | offloaded and set aside | wanted, and a frame is free: coming |
//! | coming | moving | the copy in has begun: here. It failed: away |
//! | here | resident | idle, and somebody needs its frame: going |
//! | going | resident, then offloaded | its frame is taken: away. It failed: here |
//!
//! *Idle* is what nobody holds, with every use and every copy over. An idle chunk is *clean* if nothing was written since its
//! last copy out began and that copy is over.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::PageError;
use crate::VirtualHandle;
use crate::driver::RawEvent;

/// An event of the pager's. When nobody knows it any more it is used again.
#[derive(Debug)]
pub(super) struct Mark {
    pub(super) event: RawEvent,
    spare: Arc<Mutex<Vec<RawEvent>>>,
}

impl Mark {
    pub(super) fn new(event: RawEvent, spare: &Arc<Mutex<Vec<RawEvent>>>) -> Arc<Self> {
        Arc::new(Self { event, spare: Arc::clone(spare) })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(self.event);
    }
}

/// Where a chunk is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Away,
    Coming,
    Here,
    Going,
}

/// One chunk.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Its row, for as long as it belongs to a span, and until it is away behind that.
    pub(super) row: Option<VirtualHandle>,
    pub(super) place: Place,
    /// Its span was freed.
    pub(super) is_freed: bool,
    /// How many hold it.
    pub(super) holders: u32,
    /// What stands behind each use that is not known to be over.
    uses: Vec<Arc<Mark>>,
    /// How often it was written since it was given out. Before that it is zero.
    version: u64,
    /// The version that its place in host memory has.
    saved_version: Option<u64>,
    /// The driver has refused to copy or unmap it: it is tried again for somebody who waits, or later.
    is_refused: bool,
    /// The copy out under way, and the version that it takes.
    out: Option<(Arc<Mark>, u64)>,
    /// The copy in under way.
    coming: Option<Arc<Mark>>,
    /// The next use was announced.
    is_promised: bool,
    /// It may not leave.
    stays: Option<&'static str>,
    /// When it was used last, in uses.
    last: u64,
    /// The last failure to bring it, and how many there were.
    failure: Option<(u64, Arc<PageError>)>,
}

impl Chunk {
    /// Does nobody hold it, with all that was begun over?
    pub(super) fn is_idle(&self) -> bool {
        self.place == Place::Here
            && self.holders == 0
            && self.uses.is_empty()
            && self.out.is_none()
            && self.coming.is_none()
    }

    /// Would nothing be lost if it left now?
    pub(super) fn is_clean(&self) -> bool {
        self.is_freed || self.version == 0 || self.saved_version == Some(self.version)
    }

    /// Events behind its uses and copies that are not known to be over.
    pub(super) fn marks(&self) -> impl Iterator<Item = &Arc<Mark>> {
        let out = self.out.as_ref().map(|(mark, _)| mark);
        self.uses.iter().chain(out).chain(&self.coming)
    }

    /// What a stream must wait for before it uses it: the copy in, and the copy out, for it may write.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &Arc<Mark>> {
        self.out.as_ref().map(|(mark, _)| mark).into_iter().chain(&self.coming)
    }

    /// How often it failed to come.
    pub(super) fn failures(&self) -> u64 {
        self.failure.as_ref().map_or(0, |(count, _)| *count)
    }
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) chunks: Vec<Chunk>,
    /// By index of the first chunk.
    spans: BTreeMap<usize, usize>,
    window_chunks: usize,
    /// The most chunks that may be on the device.
    pub(super) frames: usize,
    /// As many as the driver or the budget gave, if that was less.
    pub(super) given: Option<usize>,
    /// Those that are to come: held ones first.
    queue: VecDeque<usize>,
    clock: u64,
    pub(super) is_ending: bool,
    pub(super) has_ended: bool,
    /// The device has failed.
    pub(super) broken: Option<Arc<PageError>>,
    pub(super) counts: Counts,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) copied_out: u64,
    pub(super) copied_in: u64,
    pub(super) exchanges: u64,
    /// Uses that found all their chunks on the device, and those that did not.
    pub(super) hits: u64,
    pub(super) misses: u64,
}

impl Table {
    pub(super) fn new(window_chunks: usize, frames: usize) -> Self {
        Self {
            chunks: Vec::new(),
            spans: BTreeMap::new(),
            window_chunks,
            frames,
            given: None,
            queue: VecDeque::new(),
            clock: 0,
            is_ending: false,
            has_ended: false,
            broken: None,
            counts: Counts::default(),
        }
    }

    /// Chunks that have a frame, or are about to.
    pub(super) fn resident(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.place != Place::Away).count()
    }

    /// How many there may be.
    pub(super) fn frames_now(&self) -> usize {
        self.given.map_or(self.frames, |given| given.min(self.frames))
    }

    /// So many chunks side by side, which belong to nobody and are away. They are the caller's from then on, who gives each
    /// a row.
    pub(super) fn alloc(&mut self, count: usize) -> Option<Range<usize>> {
        let mut is_taken: Vec<_> = self.chunks.iter().map(|chunk| chunk.row.is_some()).collect();
        for (&first, &count) in &self.spans {
            is_taken[first..first + count].fill(true);
        }
        let mut begin = 0;
        let mut at = 0;
        while at < self.chunks.len() && at - begin < count {
            if is_taken[at] {
                begin = at + 1;
            }
            at += 1;
        }
        let all = begin..begin + count;
        if count == 0 || all.end > self.window_chunks {
            return None;
        }
        if self.chunks.len() < all.end {
            self.chunks.resize_with(all.end, Chunk::default);
        }
        self.spans.insert(all.start, count);
        Some(all)
    }

    /// The chunks of the span that begins with this one.
    pub(super) fn span(&self, first: usize) -> Option<Range<usize>> {
        self.spans.get(&first).map(|count| first..first + count)
    }

    /// The span is gone. Its rows that are away come out; what is on the device goes when its uses are over.
    pub(super) fn free(&mut self, first: usize) -> Vec<VirtualHandle> {
        let Some(count) = self.spans.remove(&first) else { return Vec::new() };
        let mut away = Vec::new();
        for id in first..first + count {
            let chunk = &mut self.chunks[id];
            chunk.is_freed = true;
            chunk.holders = 0;
            self.queue.retain(|queued| *queued != id);
            if self.chunks[id].place == Place::Away {
                away.extend(self.take_freed(id));
            }
        }
        away
    }

    /// The row of a chunk that belongs to nobody any more and is away.
    pub(super) fn take_freed(&mut self, id: usize) -> Option<VirtualHandle> {
        let chunk = &mut self.chunks[id];
        if !chunk.is_freed || chunk.place != Place::Away {
            return None;
        }
        std::mem::take(chunk).row
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Could all of these be held, with what is held already?
    pub(super) fn fits(&self, ids: &[usize]) -> bool {
        let others = self.chunks.iter().enumerate();
        let others = others.filter(|(id, chunk)| {
            let is_kept =
                chunk.holders > 0 || (chunk.stays.is_some() && chunk.place != Place::Away);
            is_kept && !ids.contains(id)
        });
        others.count() + ids.len() <= self.frames
    }

    /// Somebody is about to use these: they stay, or come first.
    pub(super) fn hold(&mut self, ids: &[usize]) {
        let now = self.tick();
        let mut is_hit = true;
        for &id in ids.iter().rev() {
            let chunk = &mut self.chunks[id];
            chunk.holders += 1;
            chunk.is_promised = false;
            chunk.last = now;
            if chunk.place != Place::Here {
                is_hit = false;
                self.queue.retain(|queued| *queued != id);
                self.queue.push_front(id);
            }
        }
        self.counts.hits += u64::from(is_hit);
        self.counts.misses += u64::from(!is_hit);
    }

    /// Nobody uses them after all.
    pub(super) fn let_go(&mut self, ids: &[usize]) {
        for &id in ids {
            let chunk = &mut self.chunks[id];
            chunk.holders = chunk.holders.saturating_sub(1);
            if chunk.holders == 0 {
                self.queue.retain(|queued| *queued != id);
            }
        }
    }

    /// Are all of them on the device?
    pub(super) fn are_here(&self, ids: &[usize]) -> bool {
        ids.iter().all(|&id| self.chunks[id].place == Place::Here)
    }

    /// A use is over when `mark` is.
    pub(super) fn used(&mut self, ids: &[usize], mark: &Arc<Mark>, has_written: bool) {
        let now = self.tick();
        for &id in ids {
            let chunk = &mut self.chunks[id];
            chunk.holders = chunk.holders.saturating_sub(1);
            chunk.is_refused = false;
            chunk.last = now;
            chunk.uses.push(Arc::clone(mark));
            if has_written {
                chunk.version += 1;
            }
        }
    }

    /// It may not leave: the next time others are asked before it.
    pub(super) fn used_now(&mut self, id: usize) {
        self.chunks[id].last = self.tick();
        self.chunks[id].is_refused = true;
    }

    /// They will be used soon, in this order, behind what was announced before.
    pub(super) fn announce(&mut self, ids: &[usize]) {
        for &id in ids {
            let now = self.tick();
            let chunk = &mut self.chunks[id];
            chunk.last = now;
            chunk.is_promised = true;
            if chunk.place != Place::Here && !self.queue.contains(&id) {
                self.queue.push_back(id);
            }
        }
    }

    /// The next that is to come.
    pub(super) fn next_wanted(&self) -> Option<usize> {
        let first = self.queue.front().copied()?;
        (self.chunks[first].place == Place::Away).then_some(first)
    }

    /// Takes an idle chunk out of use, for a copy out to begin or for its frame: a thread that wants it waits. Its row, and whether its
    /// contents are somebody's. `None` if it is not idle.
    pub(super) fn claim(&mut self, id: usize) -> Option<(VirtualHandle, bool)> {
        let chunk = &mut self.chunks[id];
        let row = chunk.row.filter(|_| chunk.is_idle())?;
        chunk.place = Place::Going;
        Some((row, chunk.version > 0 && !chunk.is_freed))
    }

    /// It is where it was.
    pub(super) fn unclaim(&mut self, id: usize) {
        self.chunks[id].place = Place::Here;
        self.queue.retain(|queued| *queued != id);
    }

    /// Those that could give their frame to `newcomer`, in the order to ask them in: what is freed, then what was used
    /// longest ago. What was announced gives it only to somebody who waits.
    pub(super) fn victims(&self, newcomer: usize) -> Vec<usize> {
        let somebody_waits = self.chunks[newcomer].holders > 0;
        let all = self.chunks.iter().enumerate().filter(|(_, chunk)| {
            let is_wanted = chunk.is_promised && !chunk.is_freed;
            let stays = chunk.stays.is_some() && chunk.is_refused;
            chunk.place == Place::Here
                && chunk.holders == 0
                && !stays
                && (somebody_waits || !is_wanted)
        });
        let key = |chunk: &Chunk| (!chunk.is_freed, chunk.is_promised, chunk.last);
        let mut all: Vec<_> = all.map(|(id, chunk)| (key(chunk), id)).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// One that nobody needs on the device: it is freed, or there are more than there may be. It is idle.
    pub(super) fn surplus(&self) -> Option<usize> {
        let is_above = self.resident() > self.frames;
        let idle = self.chunks.iter().enumerate();
        let idle = idle.filter(|(_, chunk)| {
            chunk.is_idle() && !chunk.is_refused && (chunk.is_freed || is_above)
        });
        idle.min_by_key(|(_, chunk)| (!chunk.is_freed, chunk.last)).map(|(id, _)| id)
    }

    /// The idle one that was used longest ago and is not clean.
    pub(super) fn to_clean(&self) -> Option<usize> {
        let dirty = self.chunks.iter().enumerate();
        let dirty =
            dirty.filter(|(_, chunk)| chunk.is_idle() && !chunk.is_clean() && !chunk.is_refused);
        dirty.min_by_key(|(_, chunk)| chunk.last).map(|(id, _)| id)
    }

    /// Copies out that are under way.
    pub(super) fn copies_out(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.out.is_some()).count()
    }

    /// A copy of all of it is over.
    pub(super) fn copied_out(&mut self, id: usize) {
        let chunk = &mut self.chunks[id];
        chunk.saved_version = Some(chunk.version);
        self.counts.copied_out += 1;
    }

    /// The driver has refused to copy or unmap it.
    pub(super) fn refused(&mut self, id: usize) {
        self.chunks[id].is_refused = true;
    }

    /// What the driver refused is tried again.
    pub(super) fn try_again(&mut self) {
        self.given = None;
        self.chunks.iter_mut().for_each(|chunk| chunk.is_refused = false);
    }

    /// All spans are freed. Rows that are away come out.
    pub(super) fn free_all(&mut self) -> Vec<VirtualHandle> {
        let spans: Vec<_> = self.spans.keys().copied().collect();
        spans.into_iter().flat_map(|first| self.free(first)).collect()
    }

    /// Chunks of spans.
    pub(super) fn owned(&self) -> usize {
        self.spans.values().sum()
    }

    /// Chunks that may not leave.
    pub(super) fn staying(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.stays.is_some()).count()
    }

    /// Is everything that was written saved, as far as nobody holds it?
    pub(super) fn is_all_clean(&self) -> bool {
        self.chunks.iter().all(|chunk| chunk.place == Place::Away || chunk.is_clean())
    }

    /// A copy of all of it has begun, which is over when `mark` is.
    pub(super) fn copying_out(&mut self, id: usize, mark: Arc<Mark>) {
        let chunk = &mut self.chunks[id];
        chunk.out = Some((mark, chunk.version));
        self.counts.copied_out += 1;
    }

    /// Its place in host memory has nothing.
    pub(super) fn forget_copy(&mut self, id: usize) {
        self.chunks[id].saved_version = None;
    }

    /// Its contents are on their way, and there when `mark` is over; with none they are there.
    pub(super) fn came(&mut self, id: usize, mark: Option<Arc<Mark>>, was_copied: bool) {
        let chunk = &mut self.chunks[id];
        chunk.place = Place::Here;
        chunk.coming = mark;
        self.queue.retain(|queued| *queued != id);
        self.counts.copied_in += u64::from(was_copied);
    }

    /// It did not come. Who waits for it is told.
    pub(super) fn failed(&mut self, id: usize, error: Arc<PageError>) {
        let chunk = &mut self.chunks[id];
        chunk.place = Place::Away;
        chunk.failure = Some((chunk.failures() + 1, error));
        chunk.is_promised = false;
        self.queue.retain(|queued| *queued != id);
    }

    /// Why it did not come, if that is since there were `before` failures.
    pub(super) fn failure_since(&self, id: usize, before: u64) -> Option<Arc<PageError>> {
        let (count, error) = self.chunks[id].failure.as_ref()?;
        (*count > before).then(|| Arc::clone(error))
    }

    /// It may not leave.
    pub(super) fn stays(&mut self, id: usize, reason: Option<&'static str>) {
        self.chunks[id].stays = reason;
    }

    /// All that is on its way and may be over.
    pub(super) fn marks(&self) -> Vec<Arc<Mark>> {
        let mut marks: Vec<_> = self.chunks.iter().flat_map(Chunk::marks).cloned().collect();
        marks.sort_unstable_by_key(|mark| Arc::as_ptr(mark).addr());
        marks.dedup_by_key(|mark| Arc::as_ptr(mark).addr());
        marks
    }

    /// These are over.
    pub(super) fn are_over(&mut self, over: &[Arc<Mark>]) {
        let is_over = |mark: &Arc<Mark>| over.iter().any(|known| Arc::ptr_eq(known, mark));
        for chunk in &mut self.chunks {
            chunk.uses.retain(|mark| !is_over(mark));
            if chunk.coming.as_ref().is_some_and(is_over) {
                chunk.coming = None;
            }
            if let Some((_, version)) = chunk.out.take_if(|(mark, _)| is_over(mark)) {
                chunk.saved_version = Some(version);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> Arc<Mark> {
        Mark::new(RawEvent(1), &Arc::default())
    }

    fn table(chunks: usize, frames: usize) -> Table {
        let mut table = Table::new(16, frames);
        table.alloc(chunks).expect("room");
        table
    }

    fn bring(table: &mut Table, id: usize) {
        table.came(id, None, false);
    }

    #[test]
    fn what_was_written_since_its_copy_began_is_not_clean() {
        let mut table = table(1, 1);
        bring(&mut table, 0);
        table.hold(&[0]);
        let first = mark();
        table.used(&[0], &first, true);
        table.are_over(&[first]);
        assert!(table.chunks[0].is_idle() && !table.chunks[0].is_clean());
        let out = mark();
        table.copying_out(0, Arc::clone(&out));
        let second = mark();
        table.hold(&[0]);
        table.used(&[0], &second, true);
        table.are_over(&[out, second]);
        assert!(table.chunks[0].is_idle() && !table.chunks[0].is_clean());
        let out = mark();
        table.copying_out(0, Arc::clone(&out));
        assert!(!table.chunks[0].is_idle(), "a copy is under way");
        table.are_over(&[out]);
        assert!(table.chunks[0].is_idle() && table.chunks[0].is_clean());
    }

    #[test]
    fn a_use_on_one_stream_is_not_over_because_a_later_one_on_another_is() {
        let mut table = table(1, 1);
        bring(&mut table, 0);
        let (earlier, later) = (mark(), mark());
        table.hold(&[0]);
        table.used(&[0], &earlier, false);
        table.hold(&[0]);
        table.used(&[0], &later, false);
        table.are_over(&[later]);
        assert!(!table.chunks[0].is_idle());
        table.are_over(&[earlier]);
        assert!(table.chunks[0].is_idle());
    }

    #[test]
    fn what_was_announced_gives_its_frame_only_to_somebody_who_waits() {
        let mut table = table(3, 2);
        bring(&mut table, 0);
        bring(&mut table, 1);
        table.announce(&[0, 1, 2]);
        assert!(table.victims(2).is_empty());
        table.hold(&[2]);
        assert_eq!(table.victims(2), [0, 1]);
    }

    #[test]
    fn addresses_of_a_span_are_given_out_again_when_all_of_it_is_away() {
        let mut table = table(2, 2);
        for id in 0..2 {
            table.chunks[id].row = Some(VirtualHandle::new(id, 1));
        }
        bring(&mut table, 1);
        assert_eq!(table.free(0), [VirtualHandle::new(0, 1)]);
        assert_eq!(table.alloc(2), Some(2..4));
        table.chunks[1].place = Place::Away;
        assert_eq!(table.take_freed(1), Some(VirtualHandle::new(1, 1)));
        assert_eq!(table.alloc(2), Some(0..2));
    }
}
