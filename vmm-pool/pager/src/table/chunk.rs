//! One chunk: its place, its contents, and those who have it.

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
    /// The number of spans that it is a part of. It is 0 from the end of the last until its row is gone, and none as long as it is nobody's.
    pub(super) spans: Option<u32>,
    /// Its row, for as long as it belongs to a span, and until it is away behind that.
    pub(super) row: Option<VirtualHandle>,
    /// The number of its holders. A holder of two of its spans counts twice.
    pub(super) holders: u32,
    /// The event behind each use that is not known to be over.
    pub(super) uses: Vec<Arc<Mark>>,
    /// The driver has refused to copy or unmap it: it is tried again for somebody who waits, or later.
    pub(super) is_refused: bool,
    /// The next use was announced.
    pub(super) is_promised: bool,
    /// It may not leave.
    pub(super) stays: bool,
    /// When it was used last, in uses.
    pub(super) last: u64,
    /// The last failure to bring it, and when that was, in uses.
    pub(super) failure: Option<(u64, Arc<PageError>)>,
}

impl Chunk {
    /// The change of its state, in place, which it must have. A copy out or a question that is over comes out.
    pub(super) fn change(&mut self, event: ChunkEvent) -> Option<Out> {
        let (state, out) = std::mem::take(&mut self.state).next(event).unwrap_or_else(|state| {
            debug_assert!(false, "an event that is none of {state:?}");
            tracing::error!(?state, "a chunk is not where a step of paging takes it to be");
            (state, None)
        });
        self.state = state;
        out
    }

    /// A copy out has begun, or a question.
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

    /// These events are over. A copy out or a question that is over comes out.
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

    /// Is it mapped, and may be used?
    pub(super) fn is_here(&self) -> bool {
        matches!(self.state, ChunkState::Here | ChunkState::Saving(_))
    }

    /// Does nobody hold it, with all that was begun over?
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.state, ChunkState::Here) && self.holders == 0 && self.uses.is_empty()
    }

    /// Would nothing be lost if it left now?
    pub(super) fn is_clean(&self) -> bool {
        self.is_freed() || self.contents.is_clean()
    }

    /// Its last span was freed. It belongs to nobody else before its row is gone.
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

    /// The number of the addresses for copies that have it, and whether it is to be mapped: it is full.
    pub(super) fn slot(&self) -> Option<(usize, bool)> {
        let ChunkState::Filling { slot, copy } = &self.state else { return None };
        Some((*slot, copy.is_none() && !self.is_refused))
    }

    /// The copy out under way, or the question.
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

    /// Why it did not come, to a caller that has held it since then.
    pub(crate) fn failure_since(&self, held: u64) -> Option<Arc<PageError>> {
        let (when, error) = self.failure.as_ref()?;
        (*when >= held).then(|| Arc::clone(error))
    }

    /// Its place, as [`crate::PageReport::chunks`] has it.
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
