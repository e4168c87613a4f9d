//! Framed messages over Unix sockets, with descriptors.
//!
//! ```text
//! magic "SBLT" | version u16 | descriptors u16 | payload length u32 | payload (postcard)
//! ```
//!
//! Integers are little-endian. Descriptors travel with the first byte of a frame, and the header has their number. A frame with
//! another number is refused whole, and its descriptors are closed. A side that expects none ([`Limits::fds_max`]) reads with
//! no room for any, so that the kernel never installs them. Every wait has a deadline. A receive that reaches its deadline may
//! be continued, as no byte is lost. After any other error the connection is [`TransportError::OutOfStep`]. Both sides refuse
//! peers of another user.
//!
//! A process that reads a frame of another version answers with an empty frame of its own version, so that both sides can say
//! which version each speaks.
//!
//! Nothing here takes a lock, starts a thread, prints or raises a signal.

mod error;
pub mod frame;
mod process;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use nix::unistd::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use error::{Direction, TransportError};
pub use frame::{Limits, PAYLOAD_BYTES_MAX, REQUEST_BYTES_MAX};
pub use process::{BINDING_EXTENSION, Process, Watched, has_ended, is_stopped, user_of};
pub use process::{Listener, Peer, command_installed_with, command_of};

use vmm_pool::UninheritedFd;

use frame::{FdRoom, FrameError, HEADER_BYTES, Header, Outgoing};

use crate::wire::{Ask, FDS_PER_MESSAGE_MAX, Failure, Reply, Request};

/// The most bytes of a payload that are read in one piece. Memory grows with the bytes that arrive, not with the length in a
/// header.
const READ_BYTES: usize = 16 * 1024;
/// The time between attempts: a full queue of a listening socket gives no event when it has room again.
const CONNECT_BACK_OFF: Duration = Duration::from_millis(5);

/// A connection to one other process. Send from one thread at a time.
#[derive(Debug)]
pub struct Connection {
    stream: UninheritedFd,
    peer: Peer,
    limits: Limits,
    /// The longest payload of each expected answer, in their order.
    due: VecDeque<usize>,
    /// Did this side open the connection?
    asks: bool,
    incoming: Incoming,
    outgoing: Outgoing,
    condition: Condition,
}

/// The frame that is arriving. Dropping it closes its descriptors.
#[derive(Debug, Default)]
struct Incoming {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    announced: Option<Header>,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// A frame's payload and descriptors.
type Frame = (Vec<u8>, Vec<OwnedFd>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    InStep,
    OutOfStep,
}

impl Connection {
    /// Connects to the process that listens at `path`.
    ///
    /// # Errors
    /// [`TransportError::Connect`]; [`TransportError::ForeignPeer`].
    pub fn connect(path: &Path, deadline: Instant) -> Result<Self, TransportError> {
        let failed = |source: io::Error| TransportError::Connect { path: path.to_owned(), source };
        let stream = loop {
            match connect_now(path) {
                Err(Errno::EAGAIN) if Instant::now() < deadline => {
                    pause_thread(CONNECT_BACK_OFF);
                }
                Err(Errno::EAGAIN) => return Err(failed(ErrorKind::TimedOut.into())),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(failed(errno.into())),
                Ok(stream) => break stream,
            }
        };
        Self::from_nonblocking(stream, Limits::REPLIES).map(|made| Self { asks: true, ..made })
    }

    /// Wraps a stream that a listening socket of ours accepted.
    ///
    /// # Errors
    /// [`TransportError::ForeignPeer`]; [`TransportError::Io`].
    pub fn accepted(stream: UnixStream) -> Result<Self, TransportError> {
        Self::with_limits(stream, Limits::REQUESTS)
    }

    fn with_limits(stream: UnixStream, limits: Limits) -> Result<Self, TransportError> {
        stream.set_nonblocking(true).map_err(|source| TransportError::Io {
            operation: "fcntl",
            peer: Peer { pid: None },
            source,
        })?;
        Self::from_nonblocking(stream.into(), limits)
    }

    fn from_nonblocking(stream: OwnedFd, limits: Limits) -> Result<Self, TransportError> {
        let credentials =
            getsockopt(&stream, PeerCredentials).map_err(|errno| TransportError::Io {
                operation: "getsockopt(SO_PEERCRED)",
                peer: Peer { pid: None },
                source: errno.into(),
            })?;
        let peer = Peer::at(credentials);
        let own_uid = geteuid().as_raw();
        if credentials.uid() != own_uid {
            return Err(TransportError::ForeignPeer { peer, peer_uid: credentials.uid(), own_uid });
        }
        Ok(Self {
            stream: stream.into(),
            peer,
            limits,
            due: VecDeque::new(),
            asks: false,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            condition: Condition::InStep,
        })
    }

    /// Returns the process at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Has only a part of a message arrived?
    pub fn is_mid_frame(&self) -> bool {
        self.incoming.header_filled > 0
    }

    /// The process at the other end of a connection that this side opened.
    pub fn process(&self) -> Process {
        Process::behind(&self.stream)
    }

    /// Is anything queued that the peer has not received yet?
    pub fn has_queued(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends `message` with `fds`, which the caller still owns. Queued messages are sent first.
    ///
    /// # Errors
    /// [`TransportError::TooLong`] and [`TransportError::TooManyFds`] before anything is sent;
    /// [`TransportError::Deadline`]; [`TransportError::Closed`]; [`TransportError::Io`].
    pub fn send<T: Serialize + ?Sized>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let frame = self.encode(message, fds.len())?;
        while !self.flush()? {
            self.wait(PollFlags::POLLOUT, deadline, Direction::Send)
                .inspect_err(|_| self.condition = Condition::OutOfStep)?;
        }
        let sent = self.send_frame(&frame, fds, deadline);
        if sent.is_err() {
            self.condition = Condition::OutOfStep;
        }
        sent
    }

    /// Queues `message` with `fds`; [`Connection::flush`] sends it. Does not block.
    ///
    /// # Errors
    /// [`TransportError::TooLong`] and [`TransportError::TooManyFds`], with nothing queued;
    /// [`TransportError::OutOfStep`].
    pub fn queue<T: Serialize + ?Sized>(
        &mut self,
        message: &T,
        fds: Vec<OwnedFd>,
    ) -> Result<(), TransportError> {
        let frame = self.encode(message, fds.len())?;
        self.outgoing.push(frame, fds.into_iter().map(UninheritedFd::from).collect());
        Ok(())
    }

    /// Sends queued messages, as far as the peer receives now. True when none is left. Does not block.
    ///
    /// # Errors
    /// [`TransportError::Closed`]; [`TransportError::Io`]; [`TransportError::OutOfStep`] after either.
    pub fn flush(&mut self) -> Result<bool, TransportError> {
        if self.condition == Condition::OutOfStep {
            return Err(TransportError::OutOfStep { peer: self.peer });
        }
        while let Some(frame) = self.outgoing.first() {
            let fds: Vec<BorrowedFd<'_>> = frame.fds.iter().map(AsFd::as_fd).collect();
            match frame::send(self.stream.as_fd(), &frame.bytes[frame.sent..], &fds) {
                Ok(bytes) => self.outgoing.advance(bytes),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => {
                    self.condition = Condition::OutOfStep;
                    return Err(self.io_error("sendmsg", errno.into()));
                }
            }
        }
        Ok(true)
    }

    /// Encodes `message` as a frame that may be sent on this connection.
    fn encode<T: Serialize + ?Sized>(
        &self,
        message: &T,
        fds: usize,
    ) -> Result<Vec<u8>, TransportError> {
        let peer = self.peer;
        if self.condition == Condition::OutOfStep {
            return Err(TransportError::OutOfStep { peer });
        }
        if fds > FDS_PER_MESSAGE_MAX {
            return Err(TransportError::TooManyFds {
                peer,
                count: fds,
                limit: FDS_PER_MESSAGE_MAX,
            });
        }
        let frame = frame::encode(message, fds)
            .map_err(|source| TransportError::Unencodable { peer, source })?;
        let length = frame.len() - HEADER_BYTES;
        if length > PAYLOAD_BYTES_MAX {
            return Err(TransportError::TooLong { peer, length, limit: PAYLOAD_BYTES_MAX });
        }
        Ok(frame)
    }

    fn send_frame(
        &self,
        frame: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let mut sent = 0;
        while sent < frame.len() {
            let with_fds = if sent == 0 { fds } else { &[] };
            match frame::send(self.stream.as_fd(), &frame[sent..], with_fds) {
                Ok(bytes) => sent += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    self.wait(PollFlags::POLLOUT, deadline, Direction::Send)?;
                }
                Err(errno) => return Err(self.io_error("sendmsg", errno.into())),
            }
        }
        Ok(())
    }

    /// Waits for the next message. The caller owns the descriptors that come with it.
    ///
    /// # Errors [`TransportError::Deadline`], after which the same message may be waited for again; [`TransportError::Closed`];
    /// any variant for an invalid message.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        deadline: Instant,
    ) -> Result<(T, Vec<OwnedFd>), TransportError> {
        loop {
            if let Some(message) = self.try_receive()? {
                return Ok(message);
            }
            self.wait(PollFlags::POLLIN, deadline, Direction::Receive)?;
        }
    }

    /// The next message, if all of it has arrived. Does not block; meant for poll loops.
    ///
    /// # Errors
    /// As [`Connection::receive`], except for the deadline.
    pub fn try_receive<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, TransportError> {
        if self.condition == Condition::OutOfStep {
            return Err(TransportError::OutOfStep { peer: self.peer });
        }
        let received = self.try_receive_frame().and_then(|frame| {
            let Some((payload, fds)) = frame else {
                return Ok(None);
            };
            let message = frame::decode_payload(&payload)
                .map_err(|source| TransportError::Malformed { peer: self.peer, source })?;
            Ok(Some((message, fds)))
        });
        if received.is_err() {
            self.condition = Condition::OutOfStep;
            self.incoming = Incoming::default();
        }
        received
    }

    fn try_receive_frame(&mut self) -> Result<Option<Frame>, TransportError> {
        while self.incoming.missing_bytes() > 0 {
            if !self.read_some()? {
                return Ok(None);
            }
            if self.incoming.announced.is_none() && self.incoming.header_filled == HEADER_BYTES {
                self.incoming.announced = Some(self.check_header(self.incoming.header)?);
            }
        }
        let frame = std::mem::take(&mut self.incoming);
        self.due.pop_front();
        let announced = frame.announced.map_or(0, |announced| announced.fds);
        if frame.fds.len() != announced {
            return Err(TransportError::FdCount {
                peer: self.peer,
                announced,
                received: frame.fds.len(),
            });
        }
        Ok(Some((frame.payload, frame.fds)))
    }

    /// Reads once into the arriving frame. False if no bytes are available now.
    fn read_some(&mut self) -> Result<bool, TransportError> {
        let mut buffer = [0_u8; READ_BYTES];
        let want = self.incoming.missing_bytes().min(READ_BYTES);
        let target = &mut buffer[..want];
        let received = loop {
            let room = if self.limits.fds_max == 0 { FdRoom::None } else { FdRoom::Full };
            match frame::receive(self.stream.as_fd(), target, &mut self.incoming.fds, room) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(self.io_error("recvmsg", errno.into())),
                Ok(received) => break received,
            }
        };
        let peer = self.peer;
        if received.fds_truncated {
            return Err(if self.limits.fds_max == 0 {
                TransportError::UnexpectedFds { peer }
            } else {
                TransportError::FdsTruncated { peer }
            });
        }
        if self.incoming.fds.len() > self.limits.fds_max {
            let (count, limit) = (self.incoming.fds.len(), self.limits.fds_max);
            return Err(TransportError::TooManyFds { peer, count, limit });
        }
        if received.bytes == 0 {
            return Err(if self.incoming.header_filled == 0 {
                TransportError::Closed { peer }
            } else {
                TransportError::ClosedMidFrame { peer }
            });
        }
        self.incoming.take_in(&buffer[..received.bytes.min(want)]);
        Ok(true)
    }

    fn check_header(&self, header: [u8; HEADER_BYTES]) -> Result<Header, TransportError> {
        let most = self.due.front().copied().unwrap_or(self.limits.payload_bytes_max);
        let limits = Limits { payload_bytes_max: most, ..self.limits };
        Header::decode(header, limits).map_err(|error| {
            if matches!(error, FrameError::Version { .. }) {
                self.tell_own_version();
            }
            TransportError::of_frame(error, self.peer)
        })
    }

    /// Tells a peer of another version our version. Otherwise it would see only a closed connection.
    fn tell_own_version(&self) {
        let header = Header { fds: 0, payload_bytes: 0 }.encode();
        if let Err(errno) = frame::send(self.stream.as_fd(), &header, &[]) {
            tracing::debug!(peer = %self.peer, %errno, "a peer of another version was not told ours");
        }
    }

    /// Waits for `events`. Also reports the end of the peer's process, even if a child of that process holds the connection
    /// open.
    fn wait(
        &self,
        events: PollFlags,
        deadline: Instant,
        waiting_to: Direction,
    ) -> Result<(), TransportError> {
        let process = if self.asks { self.process() } else { Process::Unknown };
        let end = process.end_event().map(|end| PollFd::new(end, PollFlags::POLLIN));
        let own = PollFd::new(self.stream.as_fd(), events);
        let mut fds: Vec<PollFd<'_>> = std::iter::once(own).chain(end).collect();
        // A process that ended earlier makes no event: all that it sent has arrived.
        let had_ended = matches!(process, Process::Ended);
        let until = if had_ended { Instant::now() } else { deadline };
        match poll_until(&mut fds, until) {
            Ok(true) => {}
            Ok(false) if had_ended => return Err(TransportError::Closed { peer: self.peer }),
            Ok(false) => return Err(TransportError::Deadline { peer: self.peer, waiting_to }),
            Err(source) => return Err(self.io_error("poll", source)),
        }
        // Bytes that the process sent before its end count.
        let ended = fds.len() > 1 && fds[1].any() == Some(true);
        if ended && matches!(nix::poll::poll(&mut fds[..1], PollTimeout::ZERO), Ok(0)) {
            return Err(TransportError::Closed { peer: self.peer });
        }
        Ok(())
    }

    fn io_error(&self, operation: &'static str, source: io::Error) -> TransportError {
        let peer = self.peer;
        if matches!(
            source.kind(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected
        ) {
            return TransportError::Closed { peer };
        }
        TransportError::Io { operation, peer, source }
    }
}

// The asking side: a question and its answer belong together by type.
impl Connection {
    /// Asks `question` and waits for its answer, or for the reason of a refusal.
    ///
    /// # Errors
    /// As [`Connection::exchange`]; [`TransportError::AnotherAnswer`].
    pub fn call<A: Ask>(
        &mut self,
        question: &A,
        deadline: Instant,
    ) -> Result<Result<A::Answer, Failure>, TransportError> {
        let request = question.to_request();
        let (reply, fds) = self.exchange(&request, question.fds_max(), deadline)?;
        self.paired(question, reply, fds)
    }

    /// The answer to `question`, which was sent before, if all of it has arrived. Does not block.
    ///
    /// # Errors
    /// As [`Connection::try_receive`]; [`TransportError::AnotherAnswer`].
    pub fn try_answer<A: Ask>(
        &mut self,
        question: &A,
    ) -> Result<Option<Result<A::Answer, Failure>>, TransportError> {
        match self.try_receive()? {
            Some((reply, fds)) => self.paired(question, reply, fds).map(Some),
            None => Ok(None),
        }
    }

    fn paired<A: Ask>(
        &mut self,
        question: &A,
        reply: Reply,
        fds: Vec<OwnedFd>,
    ) -> Result<Result<A::Answer, Failure>, TransportError> {
        question.outcome_in(reply, fds).ok_or_else(|| {
            self.condition = Condition::OutOfStep;
            TransportError::AnotherAnswer { peer: self.peer }
        })
    }

    /// Sends `request`. The longest answer to it limits the payload that is accepted.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn ask(&mut self, request: &Request, deadline: Instant) -> Result<(), TransportError> {
        self.due.push_back(request.reply_bytes_max().unwrap_or(PAYLOAD_BYTES_MAX));
        self.send(request, &[], deadline)
    }

    /// Sends `request` and waits for a reply of any kind, which may bring up to `fds_max` descriptors.
    ///
    /// # Errors
    /// As [`Connection::send`] and [`Connection::receive`].
    pub fn exchange(
        &mut self,
        request: &Request,
        fds_max: usize,
        deadline: Instant,
    ) -> Result<(Reply, Vec<OwnedFd>), TransportError> {
        self.limits.fds_max = fds_max.min(FDS_PER_MESSAGE_MAX);
        let answer = self.ask(request, deadline).and_then(|()| self.receive(deadline));
        self.limits.fds_max = 0;
        answer
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Incoming {
    /// Returns the missing bytes of the header, or of the payload once the header is known.
    fn missing_bytes(&self) -> usize {
        match self.announced {
            None => HEADER_BYTES - self.header_filled,
            Some(announced) => announced.payload_bytes - self.payload.len(),
        }
    }

    /// Adds bytes, never more than [`Incoming::missing_bytes`].
    fn take_in(&mut self, bytes: &[u8]) {
        if self.announced.is_some() {
            self.payload.extend_from_slice(bytes);
        } else {
            let end = self.header_filled + bytes.len();
            self.header[self.header_filled..end].copy_from_slice(bytes);
            self.header_filled = end;
        }
    }
}

/// Waits until one of `fds` is ready. False if `deadline` passes first. Signals do not end the wait.
///
/// # Errors
/// The system's error.
pub fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the thread sleeps through the last fraction of a millisecond instead of spinning.
        let timeout_ms = left.as_nanos().div_ceil(1_000_000).min(60_000);
        let timeout = PollTimeout::try_from(timeout_ms).unwrap_or(PollTimeout::ZERO);
        match nix::poll::poll(fds, timeout) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a listening socket with a full queue gives no event when it has room again"
)]
fn pause_thread(duration: Duration) {
    std::thread::sleep(duration);
}

fn connect_now(path: &Path) -> nix::Result<OwnedFd> {
    let stream = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream)
}
