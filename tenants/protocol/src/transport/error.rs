//! The errors of the transport between two processes.

use std::io;
use std::path::PathBuf;

use super::Peer;
use super::frame::FrameError;
use super::process::command_next_to_library;
use crate::wire::PROTOCOL_VERSION;

/// Why a message did not get through.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Nobody could be reached.
    #[error("connection to {} failed", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The socket could not be opened.
    #[error("no socket could be opened at {}", path.display())]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The process has reached its limit of open files. Close some, or raise it (`prlimit --pid PID --nofile=N`).
    #[error("no connection could be taken: {source}{}", room_for_files(source))]
    Accept {
        #[source]
        source: io::Error,
    },
    /// The peer runs as another user.
    #[error(
        "{peer} runs as user {peer_uid} and this process as {own_uid}: run all processes of a tenant as one user"
    )]
    ForeignPeer { peer: Peer, peer_uid: u32, own_uid: u32 },
    /// The peer does not see this process, or is not seen.
    #[error(
        "{peer} is not in this process's pid namespace, and no memory passes between two: start both in one (docker run \
         --pid=container:NAME)"
    )]
    OtherNamespace { peer: Peer },
    /// The peer does not speak our language at all: another program listens there.
    #[error("{peer} sent something that is no Sublet message")]
    NotSublet { peer: Peer },
    /// The peer speaks another version of our language. The job has not changed: pause or resume it with the command in the
    /// message.
    #[error(
        "{peer} speaks protocol version {peer_version} and process {own_pid} (this one) speaks {own_version}: \
         run all processes of a tenant with one Sublet version{}",
        peer.pid().map(own_command_of).unwrap_or_default()
    )]
    VersionMismatch { peer: Peer, peer_version: u16, own_pid: u32, own_version: u16 },
    /// A message is longer than any may be.
    #[error("a message from or to {peer} has {length} bytes, and {limit} are the limit")]
    TooLong { peer: Peer, length: usize, limit: usize },
    /// More descriptors than a message may carry.
    #[error("a message from or to {peer} brings {count} descriptors, and {limit} are the limit")]
    TooManyFds { peer: Peer, count: usize, limit: usize },
    /// Descriptors came with a message that brings none; the kernel closed them.
    #[error("{peer} sent descriptors where none belong")]
    UnexpectedFds { peer: Peer },
    /// Other descriptors came than were announced.
    #[error("{peer} announced {announced} descriptors and {received} came")]
    FdCount { peer: Peer, announced: usize, received: usize },
    /// The system did not install all descriptors in this process.
    #[error(
        "descriptors from {peer} did not fit into this process: raise its limit of open files (ulimit -n)"
    )]
    FdsTruncated { peer: Peer },
    /// The bytes of a message make no sense.
    #[error("a message from {peer} could not be decoded")]
    Malformed {
        peer: Peer,
        #[source]
        source: postcard::Error,
    },
    /// A message could not be turned into bytes.
    #[error("a message to {peer} could not be encoded")]
    Unencodable {
        peer: Peer,
        #[source]
        source: postcard::Error,
    },
    /// The peer hung up between messages.
    #[error("{peer} closed its connection")]
    Closed { peer: Peer },
    /// The peer hung up inside a message.
    #[error("{peer} closed its connection in the middle of a message")]
    ClosedMidFrame { peer: Peer },
    /// The peer did not send, or take, a message in time. It may be stopped, swapped out or busy: `--timeout` gives
    /// more time.
    #[error("{peer} did not {} in time", waiting_to.verb())]
    Deadline { peer: Peer, waiting_to: Direction },
    /// The peer sent a reply that is no answer to what it was asked.
    #[error("{peer} answered another question than it was asked")]
    AnotherAnswer { peer: Peer },
    /// An earlier error left the connection between two messages; open a new one.
    #[error("the connection to {peer} is out of step after an earlier error")]
    OutOfStep { peer: Peer },
    /// The system refused.
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
    /// From us to the peer.
    Send,
    /// From the peer to us.
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
    /// Returns the error for bytes from `peer` that are no frame that we take.
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

    /// Has this process, or the machine, as many files open as it may?
    pub fn is_for_want_of_descriptors(&self) -> bool {
        matches!(self, Self::Accept { source } if is_for_want_of_descriptors(source))
    }

    /// Is there nobody at the socket's name, so that it may be removed?
    pub fn nobody_listens(&self) -> bool {
        matches!(self, Self::Connect { source, .. }
            if matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound))
    }

    /// Has the peer hung up?
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
