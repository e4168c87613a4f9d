//! Signals between the threads of a member.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use nix::{errno::Errno, fcntl::OFlag};

/// Wakes the agent from any thread.
#[derive(Clone, Debug)]
pub(super) struct Waker(Arc<OwnedFd>);

/// The agent's end of the pipe.
#[derive(Debug)]
pub(super) struct Wakeups(pub(super) OwnedFd);

/// Makes both ends of a pipe.
pub(super) fn wake_pair() -> io::Result<(Waker, Wakeups)> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    Ok((Waker(Arc::new(write)), Wakeups(read)))
}

impl Waker {
    pub(super) fn wake(&self) {
        // If the pipe is full, the agent wakes anyway.
        let _woken = nix::unistd::write(&*self.0, &[1]);
    }
}

impl Wakeups {
    pub(super) fn clear(&self) {
        let mut bytes = [0; 64];
        while let Ok(1..) | Err(Errno::EINTR) = nix::unistd::read(&self.0, &mut bytes) {}
    }
}

/// Ends a wait inside a phase early. The agent raises it, and the worker sees it; only the worker lowers it.
#[derive(Debug)]
pub(super) struct CallingOff {
    raise: Sender<()>,
    raised: Receiver<()>,
}

impl Default for CallingOff {
    fn default() -> Self {
        let (raise, raised) = crossbeam_channel::unbounded();
        Self { raise, raised }
    }
}

impl CallingOff {
    pub(super) fn raise(&self) {
        // Both ends live as long as this object.
        let _sent = self.raise.send(());
    }

    pub(super) fn lower(&self) {
        while self.raised.try_recv().is_ok() {}
    }

    pub(super) fn is_raised(&self) -> bool {
        !self.raised.is_empty()
    }

    /// The receiver, for waiting on it together with other events. The wait leaves the message in it.
    pub(super) fn receiver(&self) -> &Receiver<()> {
        &self.raised
    }
}
