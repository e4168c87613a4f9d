//! Whether the process at the other end has ended.
//!
//! Its sockets do not tell: a child that it forked may hold them open, and then they take connections, and
//! questions, that nobody will ever answer. Nor does its id, which stays taken until its parent has waited for
//! it, and then may become another's. So the kernel gives a descriptor of the process itself.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::kill;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};

use super::{connect_now, poll_until};

/// The process that a socket leads to: the one that listened, not the one that holds the socket now.
#[derive(Debug)]
pub(crate) enum Process {
    /// Readable once the process has ended, also while nobody has waited for it.
    Known(OwnedFd),
    /// It had ended when it was looked for.
    Ended,
    /// The kernel does not say which it is.
    Unknown,
}

impl Process {
    /// The process at the other end of `stream`, which this side has connected. It need not have an id in our
    /// pid namespace, from Linux 6.5 on.
    pub(crate) fn behind(stream: &impl AsFd) -> Self {
        let id = getsockopt(stream, PeerCredentials).map_or(0, |credentials| credentials.pid());
        match getsockopt(stream, PeerPidfd) {
            Ok(process) => Self::Known(process),
            // What Linux 6.5 to 6.15 say of a process that its parent has waited for.
            Err(Errno::ESRCH | Errno::EINVAL) => Self::Ended,
            Err(_) => Self::of_id(id),
        }
    }

    fn of_id(id: i32) -> Self {
        let Some(pid) = rustix::process::Pid::from_raw(id) else {
            return Self::Unknown;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => Self::Known(process),
            Err(_) if kill(Pid::from_raw(id), None) == Err(Errno::ESRCH) => Self::Ended,
            Err(_) => Self::Unknown,
        }
    }

    /// Is it known to have ended? Does not block.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Known(process) => {
                let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
                matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..))
            }
            Self::Ended => true,
            Self::Unknown => false,
        }
    }

    /// Waits for its end. None where that cannot be known.
    pub(crate) fn ends_before(&self, deadline: Instant) -> Option<bool> {
        match self {
            Self::Known(process) => {
                let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
                Some(poll_until(&mut fds, deadline).unwrap_or(false))
            }
            Self::Ended => Some(true),
            Self::Unknown => None,
        }
    }

    /// What becomes readable at its end.
    pub(crate) fn end_event(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Known(process) => Some(process.as_fd()),
            Self::Ended | Self::Unknown => None,
        }
    }
}

/// Has the process that listened at `path` ended? Does not block.
pub(crate) fn has_ended(path: &Path) -> bool {
    match connect_now(path) {
        Ok(stream) => Process::behind(&stream).has_ended(),
        Err(errno) => matches!(errno, Errno::ECONNREFUSED | Errno::ENOENT),
    }
}

/// The start of a process's command line, as `/proc` shows it.
pub fn command_of(pid: u32) -> String {
    const SHOWN_MAX: usize = 120;
    let raw = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = raw.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    words.join(" ").chars().take(SHOWN_MAX).collect()
}

/// Is the process stopped by a signal, so that SIGCONT continues it? False when that cannot be known. One that a debugger holds is another
/// matter: SIGCONT does nothing for it.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat_words(&stat).next() == Some("T")
}

/// What `/proc/<pid>/stat` says behind the command's name: the state, by a letter, the parent, and more. The name, in brackets, may hold
/// anything, brackets and spaces too.
pub fn stat_words(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace()
}
