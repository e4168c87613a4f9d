//! The errors of the transport between two processes.

use std::io;
use std::path::PathBuf;

use super::Peer;
use super::frame::FrameError;
use super::process::command_next_to_library;
use crate::wire::PROTOCOL_VERSION;

/// The reason why a message did not get through.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// No process took the connection. It has ended, or its socket is gone. The system's answer follows. `sublet ps`
    /// shows the live processes.
    #[error("connection to {} failed", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The process could not make its socket in the run directory. The system's answer follows. Check the disk and
    /// the limit of open files (`ulimit -n`).
    #[error("no socket could be opened at {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The process has reached its limit of open files, so no command can reach it. The job runs on. Close files in
    /// it, or raise the limit (`prlimit --pid PID --nofile=N`).
    #[error("no connection could be taken: {source}{}", room_for_files(source))]
    Accept {
        #[source]
        source: io::Error,
    },
    /// A process obeys only its own user. Nothing was changed. Run all processes of a tenant, and the command, as one
    /// user. A process that changes its user (`setuid`) must do so before its first use of a GPU.
    #[error(
        "{peer} runs as user {peer_uid} and this process as {own_uid}: run all processes of a tenant as one user"
    )]
    ForeignPeer { peer: Peer, peer_uid: u32, own_uid: u32 },
    /// Device memory passes only between processes that see each other's process ids. The memory was not opened.
    /// Start both containers in one namespace (`docker run --pid=container:NAME`).
    #[error(
        "{peer} is not in this process's pid namespace, and processes of two pid namespaces share no memory: start \
         both in one (docker run --pid=container:NAME)"
    )]
    OtherNamespace { peer: Peer },
    /// Another program listens at that socket. Nothing was changed. `sublet doctor` checks the run directory.
    #[error("{peer} sent something that is no Sublet message")]
    NotSublet { peer: Peer },
    /// The command and the job have different versions of Sublet. The job has not changed. Pause or resume it with
    /// the command in the message. If no such command is left, install the old wheel into a folder of its own (`pip
    /// install --target FOLDER WHEEL`).
    #[error(
        "{peer} speaks protocol version {peer_version} and process {own_pid} (this one) speaks {own_version}: \
         run all processes of a tenant with one Sublet version{}",
        peer.pid().map(own_command_of).unwrap_or_default()
    )]
    VersionMismatch { peer: Peer, peer_version: u16, own_pid: u32, own_version: u16 },
    /// A message is longer than the limit. The tenant has more processes, streams or allocations than one message can
    /// name. Run fewer processes in one tenant.
    #[error("a message from or to {peer} has {length} bytes, and {limit} are the limit")]
    TooLong { peer: Peer, length: usize, limit: usize },
    /// A message carries more file descriptors than the limit. This is a fault of Sublet.
    #[error("a message from or to {peer} brings {count} descriptors, and {limit} are the limit")]
    TooManyFds { peer: Peer, count: usize, limit: usize },
    /// A message brought file descriptors that it should not have. The kernel closed them. This is a fault of Sublet,
    /// or another program is connected.
    #[error("{peer} sent descriptors where none belong")]
    UnexpectedFds { peer: Peer },
    /// A message brought another number of file descriptors than it said. This is a fault of Sublet.
    #[error("{peer} announced {announced} descriptors and {received} came")]
    FdCount { peer: Peer, announced: usize, received: usize },
    /// The process has too few free file descriptors for the shared memory that it received. Raise the limit (`ulimit
    /// -n`), then run the command again.
    #[error(
        "descriptors from {peer} did not fit into this process: raise its limit of open files (ulimit -n)"
    )]
    FdsTruncated { peer: Peer },
    /// The contents of a message are invalid. The processes have different versions (`sublet stats TENANT`), or this
    /// is a fault of Sublet.
    #[error("a message from {peer} could not be decoded")]
    Malformed {
        peer: Peer,
        #[source]
        source: postcard::Error,
    },
    /// A message could not be written. This is a fault of Sublet.
    #[error("a message to {peer} could not be encoded")]
    Unencodable {
        peer: Peer,
        #[source]
        source: postcard::Error,
    },
    /// The other process closed the connection. It has probably ended. `sublet ps` shows whether it lives.
    #[error("{peer} closed its connection")]
    Closed { peer: Peer },
    /// The other process closed the connection inside a message. It has probably ended. `sublet ps` shows whether it
    /// lives.
    #[error("{peer} closed its connection in the middle of a message")]
    ClosedMidFrame { peer: Peer },
    /// The other process is stopped, swapped out or very busy, and did not send or receive a message before the
    /// deadline. `--timeout` gives more time.
    #[error("{peer} did not {} in time", waiting_to.verb())]
    Deadline { peer: Peer, waiting_to: Direction },
    /// The reply does not belong to the request. This is a fault of Sublet.
    #[error("{peer} answered another question than it was asked")]
    AnotherAnswer { peer: Peer },
    /// An earlier error ended inside a message, so this connection cannot be used. The next command opens another.
    #[error("the connection to {peer} is out of step after an earlier error")]
    OutOfStep { peer: Peer },
    /// The system refused to send or receive. Its answer follows. `sublet ps` shows whether the other process lives.
    #[error("{operation} failed on the connection to {peer}")]
    Io {
        operation: &'static str,
        peer: Peer,
        #[source]
        source: io::Error,
    },
}

/// The direction in which a message was to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this process to the peer.
    Send,
    /// From the peer to this process.
    Receive,
}

impl Direction {
    fn verb(self) -> &'static str {
        match self {
            Self::Send => "take a message",
            Self::Receive => "answer",
        }
    }
}

impl TransportError {
    /// Returns the error for bytes from `peer` that are no acceptable frame.
    pub(super) fn of_frame(error: FrameError, peer: Peer) -> Self {
        match error {
            FrameError::NotSublet => Self::NotSublet { peer },
            FrameError::Version { found } => Self::VersionMismatch {
                peer,
                peer_version: found,
                own_pid: std::process::id(),
                own_version: PROTOCOL_VERSION,
            },
            FrameError::TooLong { length, limit } => Self::TooLong { peer, length, limit },
            FrameError::TooManyFds { count, limit } => Self::TooManyFds { peer, count, limit },
            FrameError::Length { .. } => Self::ClosedMidFrame { peer },
            FrameError::Malformed(source) => Self::Malformed { peer, source },
        }
    }

    /// Has this process, or the machine, as many files open as allowed?
    pub fn is_for_want_of_descriptors(&self) -> bool {
        matches!(self, Self::Accept { source } if is_for_want_of_descriptors(source))
    }

    /// Does no process listen at the socket's name, so that the name may be removed?
    pub fn nobody_listens(&self) -> bool {
        matches!(self, Self::Connect { source, .. }
            if matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound))
    }

    /// Has the peer closed the connection?
    pub fn peer_is_gone(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::ClosedMidFrame { .. }) || self.nobody_listens()
    }
}

fn is_for_want_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The command that can pause and resume a process of another version.
fn own_command_of(pid: u32) -> String {
    match command_next_to_library(pid) {
        Some(path) => format!("; the command of process {pid}'s version is {}", path.display()),
        None => format!(
            "; no command lies next to the library of process {pid} any more: install the version that it was started \
             with into a folder of its own, and use the command there"
        ),
    }
}

fn room_for_files(error: &io::Error) -> &'static str {
    let is_full = is_for_want_of_descriptors(error);
    if is_full { "; raise the limit of open files (ulimit -n), or close some" } else { "" }
}
