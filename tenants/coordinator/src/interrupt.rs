//! The interrupt, with which others call a pause or resume off.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use sublet_protocol::transport::poll_until;

/// An interrupt. It is raised once and stays so. Clones share it.
#[derive(Clone, Debug)]
pub struct Interrupt {
    source: Arc<Source>,
}

/// The source of an interrupt. It is never read: the interrupt is raised as soon as there is something to read.
#[derive(Debug)]
enum Source {
    Pipe {
        read: OwnedFd,
        /// Keeps a wait from ending because the last writer is gone.
        _write: OwnedFd,
    },
    Timer(TimerFd),
}

impl Interrupt {
    /// Makes an interrupt, and the descriptor that raises it when anything is written to it. Writing is all that a signal
    /// handler may do.
    ///
    /// # Errors
    /// When the system gives no pipe.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let raise = write.try_clone()?;
        Ok((Self { source: Arc::new(Source::Pipe { read, _write: write }) }, raise))
    }

    /// Makes an interrupt that is raised at `deadline`, and that nothing else raises.
    ///
    /// # Errors
    /// When the system gives no timer.
    pub fn at(deadline: Instant) -> io::Result<Self> {
        // A timer of zero length would never fire.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        timer.set(Expiration::OneShot(left.into()), TimerSetTimeFlags::empty())?;
        Ok(Self { source: Arc::new(Source::Timer(timer)) })
    }

    /// Is the interrupt raised? Does not block.
    pub fn is_raised(&self) -> bool {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Waits until the interrupt is raised, at most for `duration`.
    pub fn wait(&self, duration: Duration) {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        if let Err(error) = poll_until(&mut fds, Instant::now() + duration) {
            tracing::debug!(%error, "the interrupt could not be waited for");
        }
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &*self.source {
            Source::Pipe { read, .. } => read.as_fd(),
            Source::Timer(timer) => timer.as_fd(),
        }
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
    fn an_interrupt_of_a_deadline_is_raised_then_and_stays_so() {
        let now = Instant::now();
        let later = Interrupt::at(now + Duration::from_hours(1)).unwrap();
        assert!(!later.is_raised());
        for deadline in [now, now + Duration::from_millis(20)] {
            let interrupt = Interrupt::at(deadline).unwrap();
            interrupt.wait(Duration::from_mins(1));
            assert!(interrupt.is_raised() && interrupt.clone().is_raised());
            assert!(Instant::now() >= deadline);
        }
        assert!(!later.is_raised());
    }

    #[test]
    fn an_interrupt_that_nobody_can_raise_any_more_is_not_raised() {
        let (interrupt, raise) = Interrupt::new().unwrap();
        drop(raise);
        assert!(!interrupt.is_raised());
    }
}
