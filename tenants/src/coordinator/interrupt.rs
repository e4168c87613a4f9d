//! How somebody else calls a pause or resume off.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::transport::poll_until;

/// Becomes raised once and stays so. Clones share it.
#[derive(Clone, Debug)]
pub struct Interrupt {
    pipe: Arc<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    /// Nobody reads it: the interrupt is raised as soon as a byte is in it.
    read: OwnedFd,
    /// Keeps a wait from being woken because the last writer is gone.
    _write: OwnedFd,
}

impl Interrupt {
    /// An interrupt, and the descriptor that raises it when anything is written to it. Writing is all that
    /// a signal handler may do.
    ///
    /// # Errors
    /// When the system gives no pipe.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let raise = write.try_clone()?;
        Ok((Self { pipe: Arc::new(Pipe { read, _write: write }) }, raise))
    }

    /// Was anything written? Does not block.
    pub fn is_raised(&self) -> bool {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Waits until it is raised, at most for `duration`.
    pub fn wait(&self, duration: Duration) {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        if let Err(error) = poll_until(&mut fds, Instant::now() + duration) {
            tracing::debug!(%error, "the interrupt could not be waited for");
        }
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.read.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_is_raised_by_one_byte_and_stays_so() {
        let (interrupt, raise) = Interrupt::new().unwrap();
        assert!(!interrupt.is_raised());
        nix::unistd::write(&raise, &[1]).unwrap();
        let other = interrupt.clone();
        assert!(interrupt.is_raised() && other.is_raised());
        drop(raise);
        assert!(interrupt.is_raised());
    }

    #[test]
    fn an_interrupt_that_nobody_can_raise_any_more_is_not_raised() {
        let (interrupt, raise) = Interrupt::new().unwrap();
        drop(raise);
        assert!(!interrupt.is_raised());
    }
}
