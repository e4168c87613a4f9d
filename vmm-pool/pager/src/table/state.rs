//! The place of a chunk, as callers see it: one state, one transition function.
//!
//! ```text
//!          Framed           Filled         LeftSlot, when it is full
//!   Away --------> Coming --------> Filling ---------> Coming
//!    ^ ^             | |
//!    | '---Failed----' '--Came--> Here
//!    |
//!    |        Claimed             Copied            Over
//!    |  Here ---------> Claimed ---------> Saving --------> Here
//!    |                    | |
//!    '--------Left--------' '--Kept--> Here
//! ```
//!
//! A chunk is filled at addresses of the pager's own, and mapped when it is full.

use std::sync::Arc;

use crate::marks::Mark;

/// The place of one chunk.
#[derive(Debug, Default)]
pub(super) enum ChunkState {
    /// The chunk's row is offloaded and set aside.
    #[default]
    Away,
    /// The chunk has a frame, which is about to be mapped.
    Coming,
    /// The chunk is mapped at the addresses for copies number `slot`. It is full when `copy` is over.
    Filling { slot: usize, copy: Option<Arc<Mark>> },
    /// The chunk is mapped, with its contents.
    Here,
    /// The chunk is mapped. It is being copied out, or its device is asked about it.
    Saving(Out),
    /// The chunk is out of use: a copy out is about to begin, or its frame is about to be taken.
    Claimed,
}

/// A copy out of a chunk, or a question whether the chunk equals its copy.
#[derive(Debug)]
pub(crate) struct Out {
    /// The events of the copy and the question that are not known to be over.
    pub(super) marks: Vec<Arc<Mark>>,
    /// The version of the contents that is copied or asked about.
    pub(super) version: u64,
    /// The number of the question for fingerprints.
    pub(super) question: Option<usize>,
    pub(super) is_copy: bool,
}

/// A change in the place of a chunk.
#[derive(Debug)]
pub(crate) enum ChunkEvent {
    /// The chunk is given a frame.
    Framed,
    /// The chunk has its contents at the addresses for copies number `slot` when `copy` is over. Without `copy` it has them
    /// now.
    Filled { slot: usize, copy: Option<Arc<Mark>> },
    /// The chunk has left the addresses for copies.
    LeftSlot,
    /// The chunk is mapped, with its contents.
    Came,
    /// The chunk does not come.
    Failed,
    /// The chunk is taken out of use.
    Claimed,
    /// A copy of the chunk, or a question about it, has begun.
    Copied(Out),
    /// The chunk is in use again.
    Kept,
    /// The copy or question that was under way is over.
    Over,
    /// The frame of the chunk is taken.
    Left,
}

impl ChunkState {
    /// Returns the state after `event`, and a copy out or question that is over.
    ///
    /// # Errors
    /// The unchanged state, if it does not have that event.
    pub(super) fn next(self, event: ChunkEvent) -> Result<(Self, Option<Out>), Self> {
        Ok(match (self, event) {
            (Self::Away, ChunkEvent::Framed)
            | (Self::Filling { copy: None, .. }, ChunkEvent::LeftSlot) => (Self::Coming, None),
            (Self::Coming, ChunkEvent::Filled { slot, copy }) => {
                (Self::Filling { slot, copy }, None)
            }
            (Self::Filling { slot, .. }, ChunkEvent::Over) => {
                (Self::Filling { slot, copy: None }, None)
            }
            (Self::Coming, ChunkEvent::Came) | (Self::Claimed, ChunkEvent::Kept) => {
                (Self::Here, None)
            }
            (Self::Here, ChunkEvent::Claimed) => (Self::Claimed, None),
            (Self::Claimed, ChunkEvent::Copied(out)) => (Self::Saving(out), None),
            (Self::Saving(out), ChunkEvent::Over) => (Self::Here, Some(out)),
            (Self::Coming, ChunkEvent::Failed) | (Self::Claimed, ChunkEvent::Left) => {
                (Self::Away, None)
            }
            (state, _) => return Err(state),
        })
    }

    /// The events behind what is under way.
    pub(super) fn under_way(&self) -> &[Arc<Mark>] {
        match self {
            Self::Filling { copy, .. } => copy.as_slice(),
            Self::Saving(out) => &out.marks,
            Self::Away | Self::Coming | Self::Here | Self::Claimed => &[],
        }
    }

    /// Removes events that are over from those under way. True if none is left.
    pub(super) fn ends(&mut self, is_over: impl Fn(&Arc<Mark>) -> bool) -> bool {
        if let Self::Saving(out) = self {
            out.marks.retain(|mark| !is_over(mark));
            return out.marks.is_empty();
        }
        self.under_way().first().is_some_and(is_over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_pool::driver::RawEvent;

    fn mark() -> Arc<Mark> {
        Arc::new(Mark::new(RawEvent(1), &Arc::default()))
    }

    fn states() -> [ChunkState; 7] {
        let out = Out { marks: vec![mark()], version: 1, question: None, is_copy: true };
        [
            ChunkState::Away,
            ChunkState::Coming,
            ChunkState::Filling { slot: 2, copy: Some(mark()) },
            ChunkState::Filling { slot: 2, copy: None },
            ChunkState::Here,
            ChunkState::Saving(out),
            ChunkState::Claimed,
        ]
    }

    fn events() -> [ChunkEvent; 11] {
        let out = Out { marks: Vec::new(), version: 1, question: Some(3), is_copy: false };
        [
            ChunkEvent::Framed,
            ChunkEvent::Filled { slot: 2, copy: Some(mark()) },
            ChunkEvent::Filled { slot: 2, copy: None },
            ChunkEvent::LeftSlot,
            ChunkEvent::Came,
            ChunkEvent::Failed,
            ChunkEvent::Claimed,
            ChunkEvent::Copied(out),
            ChunkEvent::Kept,
            ChunkEvent::Over,
            ChunkEvent::Left,
        ]
    }

    /// The name of a state.
    fn name(state: &ChunkState) -> &'static str {
        match state {
            ChunkState::Away => "away",
            ChunkState::Coming => "coming",
            ChunkState::Filling { copy: Some(_), .. } => "filling",
            ChunkState::Filling { copy: None, .. } => "full",
            ChunkState::Here => "here",
            ChunkState::Saving(_) => "saving",
            ChunkState::Claimed => "claimed",
        }
    }

    #[test]
    fn each_state_has_these_events_and_stays_as_it_is_at_all_others() {
        // By the place of the event.
        let have = [
            ("away", vec![(0, "coming")]),
            ("coming", vec![(1, "filling"), (2, "full"), (4, "here"), (5, "away")]),
            ("filling", vec![(9, "full")]),
            ("full", vec![(3, "coming"), (9, "full")]),
            ("here", vec![(6, "claimed")]),
            ("saving", vec![(9, "here")]),
            ("claimed", vec![(7, "saving"), (8, "here"), (10, "away")]),
        ];
        for (index, (before, have)) in have.into_iter().enumerate() {
            for (place, event) in events().into_iter().enumerate() {
                let state = states().into_iter().nth(index).expect("a state");
                assert_eq!(name(&state), before);
                let wanted = have.iter().find(|(at, _)| *at == place).map(|(_, after)| *after);
                let told = format!("{before} at {event:?}");
                match state.next(event) {
                    Ok((now, out)) => {
                        assert_eq!(Some(name(&now)), wanted, "{told}");
                        assert_eq!(out.is_some(), before == "saving", "{told}");
                    }
                    Err(same) => {
                        assert_eq!((name(&same), None), (before, wanted), "{told}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_copy_out_and_its_question_are_over_when_both_are() {
        let (copy, question) = (mark(), mark());
        let marks = vec![Arc::clone(&copy), Arc::clone(&question)];
        let mut state =
            ChunkState::Saving(Out { marks, version: 1, question: Some(0), is_copy: true });
        assert!(!state.ends(|mark| Arc::ptr_eq(mark, &question)));
        assert_eq!(state.under_way().len(), 1);
        assert!(state.ends(|mark| Arc::ptr_eq(mark, &copy)));
    }
}
