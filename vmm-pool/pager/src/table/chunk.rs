//! One chunk: its place, its contents, and its holders.

use std::sync::Arc;

use vmm_pool::VirtualHandle;

use super::Asked;
use super::contents::Contents;
use super::state::{ChunkEvent, ChunkState, Out};
use crate::PageError;
use crate::marks::Mark;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    state: ChunkState,
    pub(super) contents: Contents,
    /// The number of spans that the chunk is a part of. It is 0 from the end of the last span until its row is gone, and `None`
    /// while the chunk belongs to nobody.
    pub(super) spans: Option<u32>,
    /// The chunk's row. It has one while it belongs to a span, and after that until it is away.
    pub(super) row: Option<VirtualHandle>,
    /// The number of holders. A holder of two spans of the chunk counts twice.
    pub(super) holders: u32,
    /// The event behind each use that is not known to be over.
    pub(super) uses: Vec<Arc<Mark>>,
    /// The driver has refused to copy or unmap the chunk. It is tried again for a caller who waits, or later.
    pub(super) is_refused: bool,
    /// The next use was announced.
    pub(super) is_promised: bool,
    /// The chunk may not leave.
    pub(super) stays: bool,
    /// The time of the last use, in uses.
    pub(super) last: u64,
    /// The last failure to bring the chunk, and its time, in uses.
    pub(super) failure: Option<(u64, Arc<PageError>)>,
}

impl Chunk {
    /// Changes the state, in place. The state must have this event. Returns a copy out or a question that is over.
    pub(super) fn change(&mut self, event: ChunkEvent) -> Option<Out> {
        let (state, out) = std::mem::take(&mut self.state).next(event).unwrap_or_else(|state| {
            debug_assert!(false, "an event that is none of {state:?}");
            tracing::error!(?state, "a chunk is not where a step of paging takes it to be");
            (state, None)
        });
        self.state = state;
        out
    }

    /// Records that a copy out or a question has begun.
    pub(super) fn begin_out(
        &mut self,
        is_copy: bool,
        mark: Option<Arc<Mark>>,
        asked: Option<Asked>,
    ) {
        let (version, question) = (self.contents.version(), asked.as_ref().map(|it| it.question));
        let marks: Vec<_> = mark.into_iter().chain(asked.map(|asked| asked.mark)).collect();
        if marks.is_empty() {
            self.contents.saved(version);
            self.change(ChunkEvent::Kept);
        } else {
            self.change(ChunkEvent::Copied(Out { marks, version, question, is_copy }));
        }
        if is_copy {
            self.contents.forget_prints();
        }
    }

    /// Records that these events are over. Returns a copy out or a question that is over.
    pub(super) fn are_over(&mut self, is_over: impl Fn(&Arc<Mark>) -> bool) -> Option<Out> {
        self.uses.retain(|mark| !is_over(mark));
        let out = self.state.ends(is_over).then(|| self.change(ChunkEvent::Over)).flatten()?;
        if out.is_copy {
            self.contents.saved(out.version);
        }
        Some(out)
    }

    /// Is it on no device?
    pub(super) fn is_away(&self) -> bool {
        matches!(self.state, ChunkState::Away)
    }

    /// Is it mapped and usable?
    pub(super) fn is_here(&self) -> bool {
        matches!(self.state, ChunkState::Here | ChunkState::Saving(_))
    }

    /// Is it held by nobody, with all uses and copies over?
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.state, ChunkState::Here) && self.holders == 0 && self.uses.is_empty()
    }

    /// Could it leave now without a loss?
    pub(super) fn is_clean(&self) -> bool {
        self.is_freed() || self.contents.is_clean()
    }

    /// Was its last span freed? It belongs to nobody else before its row is gone.
    pub(crate) fn is_freed(&self) -> bool {
        self.spans == Some(0)
    }

    /// Is it a part of a span?
    pub(crate) fn is_owned(&self) -> bool {
        self.spans > Some(0)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holders > 0
    }

    pub(crate) fn stays(&self) -> bool {
        self.stays
    }

    pub(crate) fn row(&self) -> Option<VirtualHandle> {
        self.row
    }

    /// Returns the number of its addresses for copies, and whether it is full and is to be mapped.
    pub(super) fn slot(&self) -> Option<(usize, bool)> {
        let ChunkState::Filling { slot, copy } = &self.state else { return None };
        Some((*slot, copy.is_none() && !self.is_refused))
    }

    /// Returns the copy out or the question that is under way.
    pub(super) fn out(&self) -> Option<&Out> {
        if let ChunkState::Saving(out) = &self.state { Some(out) } else { None }
    }

    /// Events behind its uses and copies that are not known to be over.
    pub(crate) fn marks(&self) -> impl Iterator<Item = &Arc<Mark>> {
        self.uses.iter().chain(self.under_way())
    }

    /// See [`ChunkState::under_way`].
    pub(super) fn under_way(&self) -> &[Arc<Mark>] {
        self.state.under_way()
    }

    /// Returns the error that kept the chunk from coming, for a caller that has held it since `held`.
    pub(crate) fn failure_since(&self, held: u64) -> Option<Arc<PageError>> {
        let (when, error) = self.failure.as_ref()?;
        (*when >= held).then(|| Arc::clone(error))
    }

    /// Returns the letter for its place in [`crate::PageReport::chunks`].
    pub(crate) fn letter(&self) -> char {
        match self.state {
            ChunkState::Away if self.is_owned() => 'a',
            ChunkState::Away => '-',
            ChunkState::Saving(_) => 'o',
            ChunkState::Coming | ChunkState::Filling { .. } => 'i',
            ChunkState::Here | ChunkState::Claimed if self.is_clean() => 'h',
            ChunkState::Here | ChunkState::Claimed => 'w',
        }
    }
}
