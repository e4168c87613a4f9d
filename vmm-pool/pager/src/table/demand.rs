//! The demand for a window's frames: chunks that are to come, their next uses, and memory that others wait for.

use std::collections::VecDeque;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// The most chunks that may be on the device.
    frames: usize,
    /// As many as the driver or the budget gave, if that was less.
    given: Option<usize>,
    /// Those that are to come: held ones first.
    queue: VecDeque<usize>,
    /// The number of uses before the next one of each chunk, as far as that is foretold.
    next_uses: Vec<usize>,
    /// Threads whose chunks do not fit next to those that are held. Uses of others are ended for them.
    pub(crate) without_room: usize,
    /// Frames that others wait for: none is taken meanwhile.
    owed: usize,
    /// Threads that wait for copies of all that was written.
    pub(crate) flushing: usize,
    /// The pager's thread looks when it is told.
    pub(crate) is_asleep: bool,
}

// Frames.
impl Demand {
    pub(super) fn new(frames: usize) -> Self {
        Self { frames, ..Self::default() }
    }

    pub(crate) fn frames(&self) -> usize {
        self.frames
    }

    /// Returns the largest number of chunks that may be on the device now.
    pub(crate) fn frames_now(&self) -> usize {
        self.given.map_or(self.frames, |given| given.min(self.frames))
    }

    pub(crate) fn set_frames(&mut self, frames: usize) {
        (self.frames, self.given) = (frames, None);
    }

    pub(crate) fn is_narrow(&self) -> bool {
        self.given.is_some()
    }

    /// There are no more frames than those that are taken, until that is tried again.
    pub(crate) fn narrow(&mut self, resident: usize) {
        self.given = Some(resident.min(self.frames_now()));
    }

    /// More frames may be tried.
    pub(crate) fn widen(&mut self) {
        self.given = None;
    }
}

// Others who wait.
impl Demand {
    pub(crate) fn owed(&self) -> usize {
        self.owed
    }

    /// So many frames more are to be given up.
    pub(crate) fn owe(&mut self, frames: usize) {
        self.owed += frames;
    }

    /// A frame has gone back to the driver. True if somebody waited for it.
    pub(crate) fn gave(&mut self) -> bool {
        let is_owed = self.owed > 0;
        self.owed -= usize::from(is_owed);
        is_owed
    }

    /// Nobody waits for frames any more.
    pub(crate) fn owe_nothing(&mut self) {
        self.owed = 0;
    }

    /// Does somebody wait for more than there is, with so many on the device?
    pub(crate) fn is_short(&self, resident: usize) -> bool {
        resident > self.frames_now() || self.without_room > 0 || self.flushing > 0 || self.owed > 0
    }
}

// What comes next.
impl Demand {
    pub(super) fn queue(&self) -> impl Iterator<Item = usize> {
        self.queue.iter().copied()
    }

    /// It comes before all others.
    pub(super) fn want_first(&mut self, id: usize) {
        self.forget(id);
        self.queue.push_front(id);
    }

    /// It comes behind all others.
    pub(super) fn want(&mut self, id: usize) {
        if !self.queue.contains(&id) {
            self.queue.push_back(id);
        }
    }

    /// Nobody waits for it.
    pub(super) fn forget(&mut self, id: usize) {
        self.queue.retain(|queued| *queued != id);
    }

    /// Nobody waits for those that are not meant.
    pub(super) fn forget_all_but(&mut self, is_meant: impl Fn(usize) -> bool) {
        self.queue.retain(|id| is_meant(*id));
    }

    pub(crate) fn foretell(&mut self, next_uses: Vec<usize>) {
        self.next_uses = next_uses;
    }

    /// Counts the uses before the next one of this chunk. The most if that is not foretold.
    pub(super) fn next_use(&self, id: usize) -> usize {
        self.next_uses.get(id).copied().unwrap_or(usize::MAX)
    }
}
