//! Frames on their way to a peer that takes them in its own time.

use std::collections::VecDeque;

use vmm_pool::UninheritedFd;

/// One frame, as far as it has not been sent. Its descriptors travel with its first byte.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) bytes: Vec<u8>,
    pub(super) sent: usize,
    pub(super) fds: Vec<UninheritedFd>,
}

/// Frames that wait, in order. Dropping it closes their descriptors.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: VecDeque<Frame>,
}

impl Outgoing {
    pub(super) fn push(&mut self, bytes: Vec<u8>, fds: Vec<UninheritedFd>) {
        self.frames.push_back(Frame { bytes, sent: 0, fds });
    }

    pub(super) fn first(&self) -> Option<&Frame> {
        self.frames.front()
    }

    /// The peer has taken so many bytes more of the first frame.
    pub(super) fn advance(&mut self, bytes: usize) {
        let Some(frame) = self.frames.front_mut() else {
            return;
        };
        frame.sent += bytes;
        // The kernel holds its own references from here on.
        frame.fds.clear();
        if frame.sent >= frame.bytes.len() {
            self.frames.pop_front();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}
