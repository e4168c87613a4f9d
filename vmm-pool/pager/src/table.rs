//! The pager's knowledge of the chunks of one window: a pure table, with no driver, clock or lock.
//!
//! `state` has the places of a chunk. The row of a chunk is offloaded and set aside while the chunk is away. The row is moving
//! while the chunk is on its way, and resident while it is here.
//!
//! An *idle* chunk is one that nobody holds, whose uses and copies are all over. An idle chunk is *clean* if nothing was
//! written since its last copy out began, and that copy is over.
//!
//! Callers have *spans*, which begin and end anywhere and may share chunks. A chunk is held, used and written by each
//! of its spans, and is freed when the last of them is.

mod asking;
mod chunk;
mod contents;
mod demand;
mod graphs;
mod leaving;
mod state;

use std::ops::Range;
use std::sync::Arc;

use vmm_pool::VirtualHandle;

use self::asking::Checks;
pub(super) use self::asking::{Asked, Unseen};
pub(super) use self::chunk::Chunk;
use self::demand::Demand;
pub(super) use self::state::ChunkEvent;
use self::state::Out;
use super::PageError;
use super::marks::Mark;
use super::report::Figures;
use super::spans::Spans;

/// A question that the device has answered: the chunk, the number of the question, and its `Out`.
pub(super) type Answered = (usize, usize, Out);

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct WindowChunks {
    chunks: Vec<Chunk>,
    pub(super) demand: Demand,
    /// The number of chunks that are not away.
    resident: usize,
    clock: u64,
    /// The most chunks that were used together.
    most_together: usize,
    pub(super) is_ending: bool,
    pub(super) has_ended: bool,
    /// The device has failed.
    pub(super) broken: Option<Arc<PageError>>,
    pub(super) figures: Figures,
    /// Answered questions whose answers nobody has read yet.
    answered: Vec<Answered>,
    /// The search for writes that nobody has shown.
    pub(super) checks: Checks,
    /// Events behind launches of graphs that are not known to be over.
    graph_uses: Vec<Arc<Mark>>,
    /// The number of uses whose end the driver did not report.
    pub(super) lost_uses: usize,
    /// The addresses for copies where something is mapped for good.
    pub(super) lost_slots: Vec<usize>,
}

impl WindowChunks {
    pub(super) fn new(frames: usize) -> Self {
        Self { demand: Demand::new(frames), ..Self::default() }
    }

    /// The number of chunks that have a frame, or are about to get one.
    pub(super) fn resident(&self) -> usize {
        self.resident
    }

    /// Changes the place of a chunk.
    pub(super) fn change(&mut self, id: usize, event: ChunkEvent) {
        let chunk = &mut self.chunks[id];
        self.resident -= usize::from(!chunk.is_away());
        chunk.change(event);
        self.resident += usize::from(!chunk.is_away());
    }

    /// All chunks, in the order of their addresses.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Allocates `size_bytes` of the window that belong to no span. Also returns the chunks among them that have no row: the
    /// caller gives each a row.
    pub(super) fn alloc(
        &mut self,
        spans: &mut Spans,
        size_bytes: u64,
    ) -> Option<(u64, Vec<usize>)> {
        let chunks = self.chunks.iter().enumerate();
        let freed = chunks.filter(|(_, chunk)| chunk.is_freed()).map(|(id, _)| id);
        let (start, ids) = spans.take(size_bytes, freed)?;
        if self.chunks.len() < ids.end {
            self.chunks.resize_with(ids.end, Chunk::default);
        }
        self.chunks[ids.clone()].iter_mut().for_each(|chunk| *chunk.spans.get_or_insert(0) += 1);
        Some((start, ids.filter(|&id| self.chunks[id].row.is_none()).collect()))
    }

    /// Removes the span of these chunks. Returns its chunks that belong to no other span and are freed: they are
    /// [`WindowChunks::gone`] when their rows are. Chunks on the device go when their uses are over, also those that another
    /// thread is about to end. A call may wait for a freed chunk because its parameters have the address by chance. Then that
    /// call comes first.
    pub(super) fn free(&mut self, ids: Range<usize>) -> Vec<usize> {
        for chunk in &mut self.chunks[ids.clone()] {
            chunk.spans = chunk.spans.map(|spans| spans - 1);
        }
        let freed: Vec<_> = ids.filter(|&id| self.chunks[id].is_freed()).collect();
        let chunks = &self.chunks;
        self.demand.forget_all_but(|id| !freed.contains(&id) || chunks[id].is_held());
        freed
    }

    /// Takes the rows of all freed chunks that are away and that nobody holds. Returns the chunks with these rows.
    pub(super) fn take_freed(&mut self) -> Vec<(usize, VirtualHandle)> {
        let is_over = |chunk: &Chunk| chunk.is_freed() && chunk.is_away() && !chunk.is_held();
        let all = self.chunks.iter_mut().enumerate().filter(|(_, chunk)| is_over(chunk));
        all.filter_map(|(id, chunk)| Some((id, chunk.row.take()?))).collect()
    }

    /// Records that a freed chunk has no row any more: anybody may get its addresses.
    pub(super) fn gone(&mut self, id: usize) {
        debug_assert!(self.chunks[id].is_away(), "nothing of it is on the device");
        self.chunks[id] = Chunk::default();
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Can these chunks be held in addition to those that are held already? Each is named once.
    pub(super) fn fits(&self, ids: &[usize]) -> bool {
        let others = self.chunks.iter().enumerate();
        let others = others.filter(|(id, chunk)| {
            let is_kept = chunk.is_held() || (chunk.stays && !chunk.is_away());
            is_kept && !ids.contains(id)
        });
        others.count() + ids.len() <= self.demand.frames()
    }

    /// Holds these chunks for a use: they stay on the device, or come first. Returns the time, in uses.
    pub(super) fn hold(&mut self, ids: &[usize]) -> u64 {
        let now = self.tick();
        self.most_together = self.most_together.max(ids.len());
        let mut is_hit = true;
        for &id in ids.iter().rev() {
            self.checks.passed.take_if(|passed| *passed == id);
            let chunk = &mut self.chunks[id];
            chunk.holders += 1;
            (chunk.is_promised, chunk.last) = (false, now);
            if !chunk.is_here() {
                is_hit = false;
                self.demand.want_first(id);
            }
        }
        self.figures.hits += u64::from(is_hit);
        self.figures.misses += u64::from(!is_hit);
        now
    }

    /// Gives up the hold on these chunks without a use.
    pub(super) fn let_go(&mut self, ids: &[usize]) {
        for &id in ids {
            let chunk = &mut self.chunks[id];
            chunk.holders = chunk.holders.saturating_sub(1);
            if chunk.holders == 0 {
                self.demand.forget(id);
            }
        }
    }

    /// Are all of them on the device?
    pub(super) fn are_here(&self, ids: &[usize]) -> bool {
        ids.iter().all(|&id| self.chunks[id].is_here())
    }

    /// Records that a use is over when `mark` is. Without a mark it is over now.
    pub(super) fn used(&mut self, ids: &[usize], mark: Option<&Arc<Mark>>) {
        let now = self.tick();
        for &id in ids {
            let chunk = &mut self.chunks[id];
            chunk.holders = chunk.holders.saturating_sub(1);
            (chunk.is_refused, chunk.is_promised, chunk.last) = (false, false, now);
            chunk.uses.extend(mark.cloned());
            chunk.contents.used();
        }
    }

    /// Records that the chunk may not leave. The next time other chunks are tried before it.
    pub(super) fn used_now(&mut self, id: usize) {
        self.chunks[id].last = self.tick();
        self.chunks[id].is_refused = true;
    }

    /// Records that these chunks will be used soon, in this order, after those announced before.
    pub(super) fn announce(&mut self, ids: &[usize]) {
        for &id in ids {
            let now = self.tick();
            let chunk = &mut self.chunks[id];
            (chunk.is_promised, chunk.last) = (true, now);
            if !chunk.is_here() {
                self.demand.want(id);
            }
        }
    }

    /// Returns the next chunk that is to come.
    pub(super) fn next_wanted(&self) -> Option<usize> {
        // The other chunks in the queue are being filled already.
        self.demand.queue().find(|id| self.chunks[*id].is_away())
    }

    /// Takes an idle chunk out of use, to begin a copy out or to take its frame. A thread that wants the chunk waits. Returns
    /// its row, and whether it has contents that somebody needs. `None` if the chunk is not idle.
    pub(super) fn claim(&mut self, id: usize) -> Option<(VirtualHandle, bool)> {
        let chunk = &self.chunks[id];
        let row = chunk.row.filter(|_| chunk.is_idle())?;
        let has_contents = chunk.contents.version() > 0 && !chunk.is_freed();
        self.change(id, ChunkEvent::Claimed);
        Some((row, has_contents))
    }

    /// Does the same to take the frame. `None` also if the chunk was used since it was found ready.
    pub(super) fn claim_ready(&mut self, id: usize) -> Option<(VirtualHandle, bool)> {
        if self.is_ready(id) { self.claim(id) } else { None }
    }

    /// The chunk has this row from now on.
    pub(super) fn entered(&mut self, id: usize, row: VirtualHandle) {
        self.chunks[id].row = Some(row);
    }

    /// Records whether the chunk must stay.
    pub(super) fn set_stays(&mut self, id: usize, stays: bool) {
        self.chunks[id].stays = stays;
    }

    /// Records that the driver has refused to copy or unmap the chunk.
    pub(super) fn refused(&mut self, id: usize) {
        self.chunks[id].is_refused = true;
    }

    /// Records that the driver does not unmap a full chunk from the addresses for copies. Threads that wait for it get the
    /// error.
    pub(super) fn stuck(&mut self, id: usize, error: Arc<PageError>) {
        self.chunks[id].is_refused = true;
        self.chunks[id].failure = Some((self.clock, error));
    }

    /// Records that somebody else may have written to the chunk's place in host memory. If `is_gone`, the place has no contents
    /// any more.
    pub(super) fn forget_copy(&mut self, id: usize, is_gone: bool) {
        self.chunks[id].contents.forget_copy(is_gone);
    }

    /// Puts a claimed chunk into use again.
    pub(super) fn unclaim(&mut self, id: usize) {
        self.change(id, ChunkEvent::Kept);
        self.demand.forget(id);
    }

    /// The number of copies out that are under way.
    pub(super) fn copies_out(&self) -> usize {
        let outs = self.chunks.iter().filter_map(Chunk::out);
        outs.filter(|out| out.is_copy).count()
    }

    /// Allows another try of all that the driver refused.
    pub(super) fn try_again(&mut self) {
        self.demand.widen();
        self.chunks.iter_mut().for_each(|chunk| chunk.is_refused = false);
    }

    /// Records that all spans are freed, and that nobody holds anything any more.
    pub(super) fn free_all(&mut self) {
        for chunk in &mut self.chunks {
            (chunk.spans, chunk.holders) = (chunk.spans.map(|_| 0), 0);
        }
        self.demand.forget_all_but(|_| false);
    }

    /// Are all writes saved, except those to chunks that graphs use?
    pub(super) fn is_all_clean(&self, captured: &[usize]) -> bool {
        let is_clean = |chunk: &Chunk| chunk.is_away() || chunk.is_clean();
        let mut chunks = self.chunks.iter().enumerate();
        chunks.all(|(id, chunk)| is_clean(chunk) || captured.contains(&id))
    }

    /// Records that the chunk is mapped, with its contents.
    pub(super) fn came(&mut self, id: usize) {
        self.change(id, ChunkEvent::Came);
        self.demand.forget(id);
    }

    /// Records that the chunk did not come. Threads that wait for it get the error.
    pub(super) fn failed(&mut self, id: usize, error: Arc<PageError>) {
        if !self.chunks[id].is_away() {
            self.change(id, ChunkEvent::Failed);
        }
        self.chunks[id].failure = Some((self.clock, error));
        self.chunks[id].is_promised = false;
        self.demand.forget(id);
    }

    /// Returns the events that may be over, behind all uses and copies under way.
    pub(super) fn marks(&self) -> Vec<Arc<Mark>> {
        let of_chunks = self.chunks.iter().flat_map(Chunk::marks);
        let mut marks: Vec<_> = of_chunks.chain(&self.graph_uses).cloned().collect();
        marks.sort_unstable_by_key(|mark| Arc::as_ptr(mark).addr());
        marks.dedup_by_key(|mark| Arc::as_ptr(mark).addr());
        marks
    }

    /// Records that these events are over.
    pub(super) fn are_over(&mut self, over: &[Arc<Mark>]) {
        let is_over = |mark: &Arc<Mark>| over.iter().any(|known| Arc::ptr_eq(known, mark));
        self.graph_uses.retain(|mark| !is_over(mark));
        for (id, chunk) in self.chunks.iter_mut().enumerate() {
            if let Some(out) = chunk.are_over(is_over) {
                self.answered.extend(out.question.map(|question| (id, question, out)));
            }
        }
    }
}

/// Returns each of these chunks once.
pub(super) fn distinct(ids: &[usize]) -> Vec<usize> {
    let mut each = ids.to_vec();
    each.sort_unstable();
    each.dedup();
    each
}

#[cfg(test)]
mod tests;
