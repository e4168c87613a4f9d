//! The process at the other end of a connection: who it is, the socket that it is reached at, and whether it has ended.
//!
//! Sockets do not tell of its end: a child that it forked may hold them open, and then they take connections, and
//! questions, that nobody will ever answer. Nor does its id, which stays taken until its parent has waited for
//! it, and then may become another's. So the kernel gives a descriptor of the process itself.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::kill;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};
use vmm_pool::Uninherited;

use super::{Connection, TransportError, connect_now, poll_until};

/// The process at the other end, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(super) pid: Option<u32>,
}

impl Peer {
    /// Its process id in our namespace; none when it lives in one that we cannot see.
    pub fn pid(self) -> Option<u32> {
        self.pid
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process of another pid namespace"),
        }
    }
}

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

// Its socket.

/// Of a name in the making; as long as that of a socket, so that both fit a socket path or neither does.
pub(crate) const BINDING_EXTENSION: &str = "bind";

/// A listening socket. Dropping it leaves its name behind, because a forked child drops its copy too;
/// [`Listener::close`] removes the name, and a name without a listener is removed by the next that meets it.
#[derive(Debug)]
pub struct Listener {
    socket: Uninherited<UnixListener>,
    path: PathBuf,
    /// Device and inode of the name.
    inode: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. The name appears only when connections are taken, so a peer that is refused
    /// knows that nobody will ever answer there.
    ///
    /// # Errors
    /// [`TransportError::Bind`], also when the name exists or is too long.
    pub fn bind(path: &Path) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Bind { path: path.to_owned(), source };
        if fs::symlink_metadata(path).is_ok() {
            return Err(failed(ErrorKind::AddrInUse.into()));
        }
        let binding = path.with_extension(BINDING_EXTENSION);
        let socket = UnixListener::bind(&binding).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let inode = inode(&binding);
        fs::rename(&binding, path).map_err(failed)?;
        Ok(Self { socket: socket.into(), path: path.to_owned(), inode })
    }

    /// Does its name still lead to it? Otherwise it was removed, perhaps with all that was around it.
    pub fn is_named(&self) -> bool {
        self.inode.is_some() && inode(&self.path) == self.inode
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, if somebody waits; checks that it is of our user. Does not block.
    ///
    /// # Errors
    /// [`TransportError::ForeignPeer`] and [`TransportError::Io`]; the listener stays usable.
    pub fn accept(&self) -> Result<Option<Connection>, TransportError> {
        loop {
            match self.socket.accept() {
                Ok((stream, _address)) => return Connection::accepted(stream).map(Some),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(source) => {
                    let peer = Peer { pid: None };
                    return Err(TransportError::Io { operation: "accept", peer, source });
                }
            }
        }
    }

    /// Ends listening and removes the name.
    ///
    /// # Errors
    /// What the system returned; a name that is gone already is no error.
    pub fn close(self) -> std::io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}
