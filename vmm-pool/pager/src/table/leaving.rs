//! The choice of the chunks that leave: which may give their frames, in which order, and which are copied out before anybody
//! needs their frames.
//!
//! The order is that of the next uses, as far as they are foretold: the chunk that is used last leaves first. Queued work may
//! still use that chunk. An idle chunk that is used sooner would have to come back soon. With few frames, such chunks would
//! cause most traffic. So only the later half of the chunks that are here leaves. A caller who needs a frame waits until one of
//! that half is idle.

use std::cmp::Reverse;

use vmm_pool::VirtualHandle;

use super::{Chunk, WindowChunks};

impl WindowChunks {
    /// Returns the chunks that could give their frame to `newcomer`, in the order to try. Freed chunks come first, then the
    /// chunk that is used last. Of two that are not foretold, the clean one comes first. An announced chunk gives its frame
    /// only to a caller who waits.
    pub(crate) fn victims(&self, newcomer: usize) -> Vec<usize> {
        let somebody_waits = self.chunks[newcomer].is_held();
        let all = self.chunks.iter().enumerate().filter(|(_, chunk)| {
            let is_wanted = chunk.is_promised && !chunk.is_freed();
            let stays = chunk.stays && chunk.is_refused;
            chunk.is_here() && !chunk.is_held() && !stays && (somebody_waits || !is_wanted)
        });
        // A chunk that is used before the newcomer does not leave for it, unless somebody waits.
        let newcomers = self.demand.next_use(newcomer);
        let is_later = |id: usize| self.demand.next_use(id) >= newcomers;
        let all = all.filter(|&(id, chunk)| somebody_waits || chunk.is_freed() || is_later(id));
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|&(id, chunk)| {
            let is_kept = (!chunk.is_freed(), chunk.is_promised, chunk.is_refused);
            (is_kept, Reverse(self.demand.next_use(id)), !chunk.is_clean(), chunk.last)
        });
        all.into_iter().map(|(id, _)| id).collect()
    }

    /// Returns the chunks here that can leave when queued work has ended: nobody holds them but the lists of calls that
    /// `lists_of` counts.
    fn free_soon(&self, lists_of: impl Fn(usize) -> u32) -> impl Iterator<Item = usize> {
        let here = self.chunks.iter().enumerate().filter(move |&(id, chunk)| {
            chunk.is_here() && !chunk.stays && !(chunk.is_held() && chunk.holders > lists_of(id))
        });
        here.map(|(id, _)| id)
    }

    /// Returns the least number of uses before the next use in the later half of the chunks of [`WindowChunks::free_soon`].
    pub(crate) fn later_half(&self, lists_of: impl Fn(usize) -> u32) -> usize {
        let mut next_uses: Vec<_> =
            self.free_soon(lists_of).map(|id| self.demand.next_use(id)).collect();
        let middle = next_uses.len() / 2;
        if next_uses.is_empty() { 0 } else { *next_uses.select_nth_unstable(middle).1 }
    }

    /// Is the chunk freed, or its next use no sooner than `later_half`?
    pub(crate) fn is_used_late(&self, id: usize, later_half: usize) -> bool {
        self.chunks[id].is_freed() || self.demand.next_use(id) >= later_half
    }

    /// Returns an idle chunk that nobody needs on the device: it is freed, or there are too many.
    pub(crate) fn surplus(&self) -> Option<usize> {
        let is_above = self.resident > self.demand.frames_now() || self.demand.owed() > 0;
        let is_surplus =
            |chunk: &Chunk| chunk.is_idle() && !chunk.is_refused && (chunk.is_freed() || is_above);
        let freed = self.chunks.iter().position(|chunk| chunk.is_freed() && is_surplus(chunk));
        freed.or_else(|| self.used_last(is_surplus))
    }

    /// Returns the chunks that stay though nobody holds them, each with its row.
    pub(crate) fn staying_idle(&self) -> Vec<(usize, VirtualHandle)> {
        let all = self.chunks.iter().enumerate();
        let staying = all.filter(|(_, chunk)| chunk.stays && !chunk.is_held());
        staying.filter_map(|(id, chunk)| Some((id, chunk.row?))).collect()
    }

    /// Counts the chunks of [`WindowChunks::free_soon`] that could still give their frames up for good. Twice the most that
    /// were used together stay.
    pub(crate) fn spare(&self, lists_of: impl Fn(usize) -> u32) -> usize {
        let above = self.resident.saturating_sub(2 * self.most_together.max(1));
        self.free_soon(lists_of).count().min(above).saturating_sub(self.demand.owed())
    }

    /// Returns the chunk that is used last, among those that `is_meant` names.
    fn used_last(&self, is_meant: impl Fn(&Chunk) -> bool) -> Option<usize> {
        let all = self.chunks.iter().enumerate().filter(|(_, chunk)| is_meant(chunk));
        let last = all.max_by_key(|(id, chunk)| (self.demand.next_use(*id), Reverse(chunk.last)));
        last.map(|(id, _)| id)
    }

    /// Returns the idle, unclean chunk that is used last: it is to give its frame first. A chunk that is used soon may be
    /// written again before it leaves. If there are frames for all, none leaves, but somebody may want copies of all.
    pub(crate) fn to_clean(&self, later_half: usize) -> Option<usize> {
        let is_dirty = |chunk: &Chunk| chunk.is_idle() && !chunk.is_clean() && !chunk.is_refused;
        if self.demand.flushing > 0 {
            return self.used_last(is_dirty);
        }
        let all = self.chunks.iter().filter(|chunk| chunk.row.is_some() && !chunk.is_freed());
        if all.count() <= self.demand.frames_now() {
            return None;
        }
        self.used_last(is_dirty).filter(|&id| self.is_used_late(id, later_half))
    }
}
