//! The process at the other end of a connection: its identity, its socket, and whether it has ended.
//!
//! A socket does not tell that its process has ended. A forked child may hold the socket open, and then the kernel still
//! accepts connections and requests that no process will answer. A process id does not tell either. It stays in use until the
//! parent has waited for the process, and then may become another process's id. So the kernel gives a descriptor of the process
//! itself.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::kill;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use nix::sys::socket::{UnixCredentials, getsockopt};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};
use vmm_pool::{Uninherited, UninheritedFd};

use super::{Connection, TransportError, connect_now, poll_until};
use crate::error_text::is_shown;

/// The process at the other end, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(super) pid: Option<u32>,
}

impl Peer {
    pub(super) fn at(credentials: UnixCredentials) -> Self {
        // The kernel reports 0 for a process outside our pid namespace.
        Self { pid: u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0) }
    }

    /// The peer's process id in this process's namespace, or none if the peer is in a namespace that is not visible here.
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

impl Connection {
    /// Refuses a process of another pid namespace, as [`Connection::is_neighbour`] sees it.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn check_neighbour(&self) -> Result<(), TransportError> {
        match self.is_neighbour() {
            Ok(true) => Ok(()),
            Ok(false) => Err(TransportError::OtherNamespace { peer: self.peer }),
            Err(source) => Err(self.io_error("looking in /proc", source)),
        }
    }

    /// Is the peer's process in this pid namespace? Only then do both processes see each other. A process of a nested namespace
    /// has an id here, but sees no process of this namespace. Does not block.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_neighbour(&self) -> io::Result<bool> {
        let Some(pid) = self.peer.pid else { return Ok(false) };
        let process = self.process();
        let known = match process.end_event() {
            Some(process) => levels(&format!("/proc/self/fdinfo/{}", process.as_raw_fd()))?,
            None => None,
        };
        // Before Linux 5.5 no descriptor tells the namespace.
        let theirs = if known.is_some() { known } else { levels(&format!("/proc/{pid}/status"))? };
        // Checked last: an id names a process only as long as the process lives.
        if process.has_ended() {
            return Err(ErrorKind::NotConnected.into());
        }
        Ok(theirs.is_some() && theirs == levels("/proc/self/status")?)
    }

    /// Is the other end's process the process that listens at `path`? Otherwise the listener is returned. Does not block.
    ///
    /// # Errors
    /// The system's.
    pub fn listens_at(&self, path: &Path) -> io::Result<Result<(), Peer>> {
        let socket = connect_now(path)?;
        let (asks, listens) = (self.process(), Process::behind(&socket));
        let peer = Peer::at(getsockopt(&socket, PeerCredentials)?);
        // Checked after both: two processes with one id that both live until here are one process.
        if listens.has_ended() {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        if peer.pid.is_none() || peer != self.peer || asks.has_ended() {
            return Ok(Err(peer));
        }
        Ok(Ok(()))
    }
}

/// The number of pid namespaces that a process is in, counted from that of `/proc`, from the status file at `path`.
fn levels(path: &str) -> io::Result<Option<usize>> {
    let text = fs::read_to_string(path)?;
    let ids = text.lines().find_map(|line| line.strip_prefix("NSpid:"));
    Ok(ids.map(|ids| ids.split_whitespace().count()))
}

/// The process that a socket leads to: the process that listened, not the process that holds the socket now.
#[derive(Debug)]
pub enum Process {
    /// A descriptor that is readable once the process has ended, even if its parent has not waited for it.
    Known(OwnedFd),
    /// The process had ended before the lookup.
    Ended,
    /// The kernel does not tell which process it is.
    Unknown,
}

impl Process {
    /// The process at the other end of `stream`, which this side has connected. From Linux 6.5 on, the process needs no id in
    /// our pid namespace.
    pub fn behind(stream: &impl AsFd) -> Self {
        let id = getsockopt(stream, PeerCredentials).map_or(0, |credentials| credentials.pid());
        match getsockopt(stream, PeerPidfd) {
            Ok(process) => Self::Known(process),
            // The answers of Linux 6.5 to 6.15 for a process whose parent has waited for it.
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

    /// Is the process known to have ended? Does not block.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::Known(process) => {
                let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
                matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..))
            }
            Self::Ended => true,
            Self::Unknown => false,
        }
    }

    /// Makes a handle to keep: a forked child does not keep it. None if the end of the process cannot be known.
    pub fn into_watched(self) -> Option<Watched> {
        match self {
            Self::Known(process) => Some(Watched(Some(process.into()))),
            Self::Ended => Some(Watched(None)),
            Self::Unknown => None,
        }
    }

    /// Waits for the end of the process. None if that cannot be known.
    pub fn ends_before(&self, deadline: Instant) -> Option<bool> {
        match self {
            Self::Known(process) => {
                let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
                Some(poll_until(&mut fds, deadline).unwrap_or(false))
            }
            Self::Ended => Some(true),
            Self::Unknown => None,
        }
    }

    /// Returns the descriptor that becomes readable at the end of the process. None if the process has ended or is unknown.
    pub fn end_event(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Known(process) => Some(process.as_fd()),
            Self::Ended | Self::Unknown => None,
        }
    }
}

/// A process whose end this handle reports.
#[derive(Debug)]
pub struct Watched(Option<UninheritedFd>);

impl Watched {
    /// Has the process ended? Does not block.
    pub fn has_ended(&self) -> bool {
        self.0.as_ref().is_none_or(|process| {
            let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..))
        })
    }
}

/// Has the process that listened at `path` ended? A missing name does not prove it: the process may make the name again. Does
/// not block.
pub fn has_ended(path: &Path) -> bool {
    match connect_now(path) {
        Ok(stream) => Process::behind(&stream).has_ended(),
        Err(errno) => errno == Errno::ECONNREFUSED,
    }
}

/// The start of a process's command line, as `/proc` shows it, with blanks for characters that a terminal would obey.
pub fn command_of(pid: u32) -> String {
    const SHOWN_MAX: usize = 120;
    let raw = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = raw.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    let shown = |character| if is_shown(character) { character } else { ' ' };
    words.join(" ").chars().take(SHOWN_MAX).map(shown).collect()
}

/// The `sublet` command that was installed with the library of process `pid`; none if either is missing.
pub(super) fn command_next_to_library(pid: u32) -> Option<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let mut files = maps.lines().filter_map(|line| Some(Path::new(line.get(line.find('/')?..)?)));
    let library = files.find(|file| file.ends_with("libsublet.so"))?;
    command_installed_with(library)?.canonicalize().ok()
}

/// Returns the `sublet` command that was installed with `library`, next to it or in `../bin`.
pub fn command_installed_with(library: &Path) -> Option<PathBuf> {
    let folder = library.parent()?;
    let mut places = ["", "../bin"].map(|place| folder.join(place).join("sublet")).into_iter();
    places.find(|path| path.is_file())
}

/// Is the process stopped by a signal, so that SIGCONT continues it? False if that cannot be known. A process that a debugger
/// holds does not count: SIGCONT does nothing for it.
pub fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat_words(&stat).next() == Some("T")
}

/// The user that the process acts as now, if the kernel tells.
pub fn user_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the words of `/proc/<pid>/stat` behind the command's name: the state, by a letter, the parent, and more. The name,
/// in brackets, may contain any character, also brackets and spaces.
pub(super) fn stat_words(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace()
}

// The listening socket of a process.

/// The extension of a name in the making. It is as long as that of a socket, so that both fit a socket path or neither does.
pub const BINDING_EXTENSION: &str = "bind";

/// A listening socket. Dropping it leaves its name behind, because a forked child drops its copy too; [`Listener::close`]
/// removes the name, and a name without a listener is removed by the next process that finds it.
#[derive(Debug)]
pub struct Listener {
    socket: Uninherited<UnixListener>,
    path: PathBuf,
    /// Device and inode of the file with the name.
    inode: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. The name appears only when the socket accepts connections. So a refused peer knows that no process
    /// will answer there.
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

    /// Does the socket's name still lead to it? Otherwise the name was removed, perhaps with its directory.
    pub fn is_named(&self) -> bool {
        self.inode.is_some() && inode(&self.path) == self.inode
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next connection, if one waits, and checks that it is from our user. Does not block.
    ///
    /// # Errors
    /// [`TransportError::ForeignPeer`], [`TransportError::Io`] and [`TransportError::Accept`]; the listener stays usable.
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
                Err(source) => return Err(TransportError::Accept { source }),
            }
        }
    }

    /// Ends listening and removes the name.
    ///
    /// # Errors
    /// The error of the system; a name that is gone already is no error.
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
