//! The pager's knowledge of the chunks of one window: a pure table, with no driver, clock or lock.
//!
//! | a chunk is | its row is | left by |
//! | --- | --- | --- |
//! | away | offloaded and set aside | wanted, and a frame is free: coming |
//! | coming | moving | the copy in has begun: here. It failed: away. In a window where uses are seen at launches: it is over |
//! | here | resident | idle, and somebody needs its frame: going |
//! | going | resident, then offloaded | its frame is taken: away. It failed: here |
//!
//! *Idle* is what nobody holds, with every use and every copy over. An idle chunk is *clean* if nothing was written since its
//! last copy out began and that copy is over.
//!
//! Callers have *spans*, which begin and end anywhere and may share chunks. A chunk is held, used and written by each
//! of its spans, and is freed when the last of them is.

mod asking;
mod figures;
mod graphs;
mod leaving;
mod spans;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use self::asking::Checks;
pub(super) use self::asking::{Asked, Unseen};
use self::spans::Spans;
use super::PageError;
use super::marks::Mark;
use super::prints::Prints;
use crate::VirtualHandle;

/// The effect of a use on the contents of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrote {
    No,
    Yes,
    /// Its device can say.
    Maybe,
}

/// A copy out of a chunk, or a question whether it is as its copy.
#[derive(Debug)]
struct Out {
    /// Those that are not known to be over, of the copy and the question.
    marks: Vec<Arc<Mark>>,
    /// The version that it is about.
    version: u64,
    /// The number of the question for fingerprints.
    question: Option<usize>,
    is_copy: bool,
}

/// A question about a chunk that its device has answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) id: usize,
    pub(super) question: usize,
    version: u64,
    is_copy: bool,
}

/// Of what lies in the place of a chunk.
#[derive(Debug, Default)]
struct Copied {
    /// If nobody but the pager has written there since.
    prints: Option<Prints>,
    /// All that has used the chunk since its place was current may have written.
    is_unsure: bool,
}

/// When the thread looks what is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Looks {
    Soon,
    WhenTold,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ChunkPlace {
    #[default]
    Away,
    Coming,
    Here,
    Going,
}

/// One chunk.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// The number of spans that it is a part of.
    spans: u32,
    /// Its row, for as long as it belongs to a span, and until it is away behind that.
    pub(super) row: Option<VirtualHandle>,
    place: ChunkPlace,
    /// Its last span was freed. It belongs to nobody else before its row is gone.
    pub(super) is_freed: bool,
    /// The number of its holders. A holder of two of its spans counts twice.
    pub(super) holders: u32,
    /// The event behind each use that is not known to be over.
    uses: Vec<Arc<Mark>>,
    /// The number of writes to it since it was given out. Before the first write its contents are zero.
    version: u64,
    /// The version that its place in host memory has.
    saved_version: Option<u64>,
    /// The driver has refused to copy or unmap it: it is tried again for somebody who waits, or later.
    is_refused: bool,
    /// The copy out under way, or the question.
    out: Option<Out>,
    copied: Copied,
    /// The copy in under way.
    coming: Option<Arc<Mark>>,
    /// The number of the addresses for copies that have it, while it is filled there.
    aside: Option<usize>,
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
        self.place == ChunkPlace::Here
            && self.holders == 0
            && self.uses.is_empty()
            && self.out.is_none()
            && self.coming.is_none()
    }

    /// Has nobody written it, and nobody copied it?
    fn is_untouched(&self) -> bool {
        self.version == 0 && self.saved_version.is_none()
    }

    /// Would nothing be lost if it left now?
    pub(super) fn is_clean(&self) -> bool {
        self.is_freed || self.version == 0 || self.saved_version == Some(self.version)
    }

    /// Events behind its uses and copies that are not known to be over.
    pub(super) fn marks(&self) -> impl Iterator<Item = &Arc<Mark>> {
        let out = self.out.iter().flat_map(|out| &out.marks);
        self.uses.iter().chain(out).chain(&self.coming)
    }

    /// Returns the events that a stream must wait for before it uses it: the copy in, and for it may write, the copy
    /// out and the question.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &Arc<Mark>> {
        self.out.iter().flat_map(|out| &out.marks).chain(&self.coming)
    }

    /// Counts how often it failed to come.
    pub(super) fn failures(&self) -> u64 {
        self.failure.as_ref().map_or(0, |(count, _)| *count)
    }

    /// Why it did not come, if that is since there were `before` failures.
    pub(super) fn failure_since(&self, before: u64) -> Option<Arc<PageError>> {
        let (count, error) = self.failure.as_ref()?;
        (*count > before).then(|| Arc::clone(error))
    }

    /// The driver has refused to copy or unmap it.
    pub(super) fn refused(&mut self) {
        self.is_refused = true;
    }

    /// It may not leave, for this reason.
    pub(super) fn set_stays(&mut self, reason: Option<&'static str>) {
        self.stays = reason;
    }

    /// Its place in host memory has nothing.
    pub(super) fn forget_copy(&mut self) {
        self.saved_version = None;
        self.forget_prints();
    }

    /// Somebody else may have written to its place.
    pub(super) fn forget_prints(&mut self) {
        self.copied = Copied::default();
    }

    /// It is filled at these addresses for copies, and that is over when `mark` is.
    pub(super) fn filling(&mut self, slot: usize, mark: Option<Arc<Mark>>) {
        self.aside = Some(slot);
        self.coming = mark;
    }

    /// It is at the addresses for copies no more.
    pub(super) fn left_aside(&mut self) {
        self.aside = None;
    }

    /// The driver does not take it from there. Who waits for it is told.
    pub(super) fn stuck(&mut self, error: Arc<PageError>) {
        self.is_refused = true;
        self.failure = Some((self.failures() + 1, error));
    }

    /// The device is asked, before anything is copied.
    pub(super) fn asking(&mut self, asked: Asked) {
        let Asked { question, mark } = asked;
        let (marks, version) = (vec![mark], self.version);
        self.out = Some(Out { marks, version, question: Some(question), is_copy: false });
    }
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct WindowChunks {
    pub(super) chunks: Vec<Chunk>,
    /// The number of chunks that are not away.
    resident: usize,
    pub(super) spans: Spans,
    /// The most chunks that may be on the device.
    pub(super) frames: usize,
    /// As many as the driver or the budget gave, if that was less.
    pub(super) given: Option<usize>,
    /// Those that are to come: held ones first.
    queue: VecDeque<usize>,
    clock: u64,
    /// The number of uses before the next one of each chunk, as far as that is foretold.
    pub(super) next_uses: Vec<usize>,
    pub(super) is_ending: bool,
    pub(super) has_ended: bool,
    pub(super) looks_again: Looks,
    /// Threads whose chunks do not fit next to those that are held. Uses of others are ended for them.
    pub(super) without_room: usize,
    /// Frames that others wait for: none is taken meanwhile.
    pub(super) owed: usize,
    /// The most chunks that were used together.
    pub(super) most_together: usize,
    /// Threads that wait for copies of all that was written.
    pub(super) flushing: usize,
    /// Uses are seen at launches: a chunk is mapped when it is full.
    pub(super) is_looked: bool,
    /// The device has failed.
    pub(super) broken: Option<Arc<PageError>>,
    pub(super) counts: Counts,
    /// Questions that were answered, and nobody has looked.
    answered: Vec<Answered>,
    /// The search for writes that nobody has shown.
    pub(super) checks: Checks,
    /// Behind launches of graphs that are not known to be over.
    graph_uses: Vec<Arc<Mark>>,
    /// Uses that the driver did not say the end of.
    pub(super) lost_uses: usize,
    /// Addresses for copies where something is mapped for good.
    pub(super) lost_slots: Vec<usize>,
}

/// The counts of what was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) copied_out: u64,
    pub(super) copied_in: u64,
    /// Chunks that were not copied out, for they were as their copies.
    pub(super) unchanged: u64,
    pub(super) exchanges: u64,
    /// Uses that found all their chunks on the device, and those that did not.
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Chunks that were given a frame, and the time that the driver took to map and unmap chunks.
    pub(super) remaps: u64,
    pub(super) remapping: Duration,
}

impl WindowChunks {
    pub(super) fn new(window_bytes: u64, chunk_bytes: u64, frames: usize) -> Self {
        Self {
            chunks: Vec::new(),
            resident: 0,
            spans: Spans::new(window_bytes, chunk_bytes),
            frames,
            given: None,
            queue: VecDeque::new(),
            clock: 0,
            next_uses: Vec::new(),
            is_ending: false,
            has_ended: false,
            looks_again: Looks::Soon,
            without_room: 0,
            owed: 0,
            most_together: 1,
            flushing: 0,
            is_looked: false,
            broken: None,
            counts: Counts::default(),
            answered: Vec::new(),
            checks: Checks::default(),
            graph_uses: Vec::new(),
            lost_uses: 0,
            lost_slots: Vec::new(),
        }
    }

    /// Chunks that have a frame, or are about to.
    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    /// It is there from now on.
    pub(super) fn set_place(&mut self, id: usize, place: ChunkPlace) {
        let before = std::mem::replace(&mut self.chunks[id].place, place);
        self.resident += usize::from(place != ChunkPlace::Away);
        self.resident -= usize::from(before != ChunkPlace::Away);
    }

    /// Returns the largest number of chunks that may be on the device now.
    pub(super) fn frames_now(&self) -> usize {
        self.given.map_or(self.frames, |given| given.min(self.frames))
    }

    /// So many bytes of the window that belong to no span, and the chunks among them that have no row: the caller gives each
    /// one.
    pub(super) fn alloc(&mut self, size_bytes: u64) -> Option<(u64, Vec<usize>)> {
        let chunks = self.chunks.iter().enumerate();
        let freed = chunks.filter(|(_, chunk)| chunk.is_freed).map(|(id, _)| id);
        let (start, ids) = self.spans.take(size_bytes, freed)?;
        if self.chunks.len() < ids.end {
            self.chunks.resize_with(ids.end, Chunk::default);
        }
        self.chunks[ids.clone()].iter_mut().for_each(|chunk| chunk.spans += 1);
        Some((start, ids.filter(|&id| self.chunks[id].row.is_none()).collect()))
    }

    /// The span is gone. Chunks of no other are freed: those that are away come out, with their rows, and are
    /// [`WindowChunks::gone`] when these are; what is on the device goes when its uses are over, also those that another thread is
    /// about to end. A call may wait for one because its parameters have the address by chance: that comes first. `None`: there is
    /// no such span.
    pub(super) fn free(&mut self, start: u64) -> Option<Vec<(usize, VirtualHandle)>> {
        let ids = self.spans.remove(start)?;
        let mut away = Vec::new();
        for id in ids {
            let chunk = &mut self.chunks[id];
            chunk.spans -= 1;
            if chunk.spans > 0 {
                continue;
            }
            chunk.is_freed = true;
            if chunk.holders == 0 {
                self.queue.retain(|queued| *queued != id);
            }
            away.extend(self.take_freed(id).map(|row| (id, row)));
        }
        Some(away)
    }

    /// The row of a chunk that belongs to nobody any more, is away, and is held by nobody.
    pub(super) fn take_freed(&mut self, id: usize) -> Option<VirtualHandle> {
        let chunk = &mut self.chunks[id];
        let is_over = chunk.is_freed && chunk.place == ChunkPlace::Away && chunk.holders == 0;
        if is_over { chunk.row.take() } else { None }
    }

    /// All such chunks, with their rows: who held them has let go.
    pub(super) fn take_all_freed(&mut self) -> Vec<(usize, VirtualHandle)> {
        let all = 0..self.chunks.len();
        all.filter_map(|id| Some((id, self.take_freed(id)?))).collect()
    }

    /// A chunk that was freed has no row any more: its addresses are anybody's.
    pub(super) fn gone(&mut self, id: usize) {
        self.set_place(id, ChunkPlace::Away);
        self.chunks[id] = Chunk::default();
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Could these, each named once, be held, with what is held already?
    pub(super) fn fits(&self, ids: &[usize]) -> bool {
        let others = self.chunks.iter().enumerate();
        let others = others.filter(|(id, chunk)| {
            let is_kept =
                chunk.holders > 0 || (chunk.stays.is_some() && chunk.place != ChunkPlace::Away);
            is_kept && !ids.contains(id)
        });
        others.count() + ids.len() <= self.frames
    }

    /// Somebody is about to use these: they stay, or come first.
    pub(super) fn hold(&mut self, ids: &[usize]) {
        let now = self.tick();
        self.most_together = self.most_together.max(ids.len());
        let mut is_hit = true;
        for &id in ids.iter().rev() {
            self.checks.used(id);
            let chunk = &mut self.chunks[id];
            chunk.holders += 1;
            chunk.is_promised = false;
            chunk.last = now;
            if chunk.place != ChunkPlace::Here {
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
        ids.iter().all(|&id| self.chunks[id].place == ChunkPlace::Here)
    }

    /// A use is over when `mark` is; without one it is over.
    pub(super) fn used(&mut self, ids: &[usize], mark: Option<&Arc<Mark>>, wrote: Wrote) {
        let now = self.tick();
        for &id in ids {
            let chunk = &mut self.chunks[id];
            chunk.holders = chunk.holders.saturating_sub(1);
            chunk.is_refused = false;
            chunk.is_promised &= !self.is_looked;
            chunk.last = now;
            chunk.uses.extend(mark.cloned());
            let was_clean = chunk.saved_version == Some(chunk.version);
            chunk.copied.is_unsure &= wrote != Wrote::Yes;
            if wrote != Wrote::No {
                chunk.copied.is_unsure |= was_clean && wrote == Wrote::Maybe;
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
            if chunk.place != ChunkPlace::Here && !self.queue.contains(&id) {
                self.queue.push_back(id);
            }
        }
    }

    /// The next that is to come.
    pub(super) fn next_wanted(&self) -> Option<usize> {
        let is_away = |id: &usize| self.chunks[*id].place == ChunkPlace::Away;
        if self.is_looked {
            // Others are filled meanwhile.
            return self.queue.iter().copied().find(is_away);
        }
        self.queue.front().copied().filter(is_away)
    }

    /// Takes an idle chunk out of use, for a copy out to begin or for its frame: a thread that wants it waits. Its row, and whether its
    /// contents are somebody's. `None` if it is not idle.
    pub(super) fn claim(&mut self, id: usize) -> Option<(VirtualHandle, bool)> {
        let chunk = &mut self.chunks[id];
        let row = chunk.row.filter(|_| chunk.is_idle())?;
        let has_contents = chunk.version > 0 && !chunk.is_freed;
        self.set_place(id, ChunkPlace::Going);
        Some((row, has_contents))
    }

    /// The same for its frame. `None` also if it was used since it was found ready.
    pub(super) fn claim_ready(&mut self, id: usize) -> Option<(VirtualHandle, bool)> {
        if self.is_ready(id) { self.claim(id) } else { None }
    }

    /// It is where it was.
    pub(super) fn unclaim(&mut self, id: usize) {
        self.set_place(id, ChunkPlace::Here);
        self.queue.retain(|queued| *queued != id);
    }

    /// Copies out that are under way.
    pub(super) fn copies_out(&self) -> usize {
        let outs = self.chunks.iter().filter_map(|chunk| chunk.out.as_ref());
        outs.filter(|out| out.is_copy).count()
    }

    /// Allows what the driver refused to be tried again.
    pub(super) fn try_again(&mut self) {
        self.given = None;
        self.chunks.iter_mut().for_each(|chunk| chunk.is_refused = false);
    }

    /// All spans are freed, as by [`WindowChunks::free`], and nobody holds anything any more.
    pub(super) fn free_all(&mut self) -> Vec<(usize, VirtualHandle)> {
        self.chunks.iter_mut().for_each(|chunk| chunk.holders = 0);
        self.spans.starts().into_iter().filter_map(|start| self.free(start)).flatten().collect()
    }

    /// Is everything that was written saved, but for chunks that graphs use?
    pub(super) fn is_all_clean(&self, captured: &[usize]) -> bool {
        let is_clean = |chunk: &Chunk| chunk.place == ChunkPlace::Away || chunk.is_clean();
        let mut chunks = self.chunks.iter().enumerate();
        chunks.all(|(id, chunk)| is_clean(chunk) || captured.contains(&id))
    }

    /// Its contents are on their way, and there when `mark` is over; with none they are there.
    pub(super) fn came(&mut self, id: usize, mark: Option<Arc<Mark>>, was_copied: bool) {
        self.set_place(id, ChunkPlace::Here);
        self.chunks[id].coming = mark;
        self.queue.retain(|queued| *queued != id);
        self.counts.copied_in += u64::from(was_copied);
    }

    /// It did not come. Who waits for it is told.
    pub(super) fn failed(&mut self, id: usize, error: Arc<PageError>) {
        self.set_place(id, ChunkPlace::Away);
        let chunk = &mut self.chunks[id];
        chunk.failure = Some((chunk.failures() + 1, error));
        chunk.is_promised = false;
        self.queue.retain(|queued| *queued != id);
    }

    /// All that is on its way and may be over.
    pub(super) fn marks(&self) -> Vec<Arc<Mark>> {
        let of_chunks = self.chunks.iter().flat_map(Chunk::marks);
        let mut marks: Vec<_> = of_chunks.chain(&self.graph_uses).cloned().collect();
        marks.sort_unstable_by_key(|mark| Arc::as_ptr(mark).addr());
        marks.dedup_by_key(|mark| Arc::as_ptr(mark).addr());
        marks
    }

    /// These are over.
    pub(super) fn are_over(&mut self, over: &[Arc<Mark>]) {
        let is_over = |mark: &Arc<Mark>| over.iter().any(|known| Arc::ptr_eq(known, mark));
        self.graph_uses.retain(|mark| !is_over(mark));
        for (id, chunk) in self.chunks.iter_mut().enumerate() {
            chunk.uses.retain(|mark| !is_over(mark));
            if chunk.coming.as_ref().is_some_and(is_over) {
                chunk.coming = None;
            }
            let out = chunk.out.take_if(|out| {
                out.marks.retain(|mark| !is_over(mark));
                out.marks.is_empty()
            });
            if let Some(out) = out {
                let Out { version, question, is_copy, .. } = out;
                if is_copy {
                    chunk.saved_version = Some(version);
                }
                self.answered.extend(question.map(|question| Answered {
                    id,
                    question,
                    version,
                    is_copy,
                }));
            }
        }
    }
}

/// Each of these once.
pub(super) fn distinct(ids: &[usize]) -> Vec<usize> {
    let mut each = ids.to_vec();
    each.sort_unstable();
    each.dedup();
    each
}

#[cfg(test)]
mod tests;
