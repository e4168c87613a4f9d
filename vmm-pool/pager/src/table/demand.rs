//! The demand for a window's frames: chunks that are to come, their next uses, and memory that others wait for.

use std::collections::VecDeque;

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// The most chunks that may be on the device.
    frames: usize,
    /// The number of frames that the driver or the budget gave, if that was less.
    given: Option<usize>,
    /// The chunks that are to come: held ones first.
    queue: VecDeque<usize>,
    /// For each chunk: the number of uses before its next use, as far as that is foretold.
    next_uses: Vec<usize>,
    /// The number of threads whose chunks do not fit next to those that are held. Other uses are ended for these threads.
    pub(crate) without_room: usize,
    /// The number of frames that others wait for. The window takes no frame meanwhile.
    owed: usize,
    /// The number of threads that wait for copies of all writes.
    pub(crate) flushing: usize,
    /// The pager's thread sleeps until it is notified.
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

    /// Limits the frames to those that are taken, until more are tried again.
    pub(crate) fn narrow(&mut self, resident: usize) {
        self.given = Some(resident.min(self.frames_now()));
    }

    /// Lets more frames be tried.
    pub(crate) fn widen(&mut self) {
        self.given = None;
    }
}

// Other waiters.
impl Demand {
    pub(crate) fn owed(&self) -> usize {
        self.owed
    }

    /// Adds this number of frames to those that are to be given up.
    pub(crate) fn owe(&mut self, frames: usize) {
        self.owed += frames;
    }

    /// Records that a frame has gone back to the driver. True if somebody waited for it.
    pub(crate) fn gave(&mut self) -> bool {
        let is_owed = self.owed > 0;
        self.owed -= usize::from(is_owed);
        is_owed
    }

    /// Records that nobody waits for frames any more.
    pub(crate) fn owe_nothing(&mut self) {
        self.owed = 0;
    }

    /// Does somebody wait for more frames than there are, with `resident` chunks on the device?
    pub(crate) fn is_short(&self, resident: usize) -> bool {
        resident > self.frames_now() || self.without_room > 0 || self.flushing > 0 || self.owed > 0
    }
}

// What comes next.
impl Demand {
    pub(super) fn queue(&self) -> impl Iterator<Item = usize> {
        self.queue.iter().copied()
    }

    /// Puts the chunk before all others.
    pub(super) fn want_first(&mut self, id: usize) {
        self.forget(id);
        self.queue.push_front(id);
    }

    /// Puts the chunk behind all others.
    pub(super) fn want(&mut self, id: usize) {
        if !self.queue.contains(&id) {
            self.queue.push_back(id);
        }
    }

    /// Takes the chunk out of the queue.
    pub(super) fn forget(&mut self, id: usize) {
        self.queue.retain(|queued| *queued != id);
    }

    /// Takes all chunks out of the queue except those that `is_meant` names.
    pub(super) fn forget_all_but(&mut self, is_meant: impl Fn(usize) -> bool) {
        self.queue.retain(|id| is_meant(*id));
    }

    pub(crate) fn foretell(&mut self, next_uses: Vec<usize>) {
        self.next_uses = next_uses;
    }

    /// Counts the uses before the next use of this chunk. It is the largest number if that use is not foretold.
    pub(super) fn next_use(&self, id: usize) -> usize {
        self.next_uses.get(id).copied().unwrap_or(usize::MAX)
    }
}
