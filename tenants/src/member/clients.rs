//! The connections that an agent serves, and how much one of them may take of its time and memory.
//!
//! Nothing here blocks: an answer that a client does not take waits in a queue of its own, and while it
//! does, nothing more is read from that client. A client that stands still in the middle of a message, or
//! does not take an answer, is closed after [`STALL_MAX`]. The limits are listed in `docs/security.md`.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::sockets::{Noted, Sockets};
use crate::transport::{Connection, Direction, TransportError};
use crate::wire::{Failure, FailureKind, Reply, Request};

/// Connections one agent keeps: peers on a node and a few commands fit. When all are taken, a new one
/// takes the place of the one that has been idle longest.
pub const CONNECTIONS_MAX: usize = 256;
/// Requests of one connection that may be unanswered at a time: a coordinator that brings ranks to a cut
/// sends new limits without waiting for the answer to the last.
pub const OPEN_REQUESTS_MAX: usize = 256;
/// Requests answered on one connection before the others have their turn.
pub const REQUESTS_PER_TURN_MAX: usize = 16;
/// How long a client may stand still inside a message, or with an answer that it does not take.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// One connection.
#[derive(Debug)]
struct Client {
    number: u64,
    /// Goes before the connection does.
    _noted: Noted,
    connection: Connection,
    /// Requests that are answered later and have not been.
    open_requests: usize,
    last_request: Instant,
    stalled_since: Option<Instant>,
}

/// All connections, by numbers that are never used twice.
#[derive(Debug)]
pub(super) struct Clients {
    list: Vec<Client>,
    next_number: u64,
    sockets: Arc<Sockets>,
}

impl Clients {
    pub(super) fn new(sockets: Arc<Sockets>) -> Self {
        Self { list: Vec::new(), next_number: 1, sockets }
    }

    /// Takes a connection in. Returns the client that had to go for it; none when nobody is idle, and
    /// then the new one is closed. `keep` never goes.
    pub(super) fn add(&mut self, connection: Connection, keep: Option<u64>) -> Option<u64> {
        let mut closed = None;
        if self.list.len() >= CONNECTIONS_MAX {
            let idle = self.list.iter().filter(|c| c.open_requests == 0 && Some(c.number) != keep);
            let Some(number) = idle.min_by_key(|c| c.last_request).map(|c| c.number) else {
                tracing::warn!(peer = %connection.peer(), "too many connections: closed");
                return None;
            };
            tracing::warn!(peer = %connection.peer(), "too many connections: the longest idle goes");
            self.close(number);
            closed = Some(number);
        }
        self.list.push(Client {
            number: self.next_number,
            _noted: self.sockets.note(&connection),
            connection,
            open_requests: 0,
            last_request: Instant::now(),
            stalled_since: None,
        });
        self.next_number += 1;
        closed
    }

    pub(super) fn close(&mut self, number: u64) {
        self.list.retain(|client| client.number != number);
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        self.list.iter().map(|client| client.number).collect()
    }

    /// What to wait for: room for an answer where one waits, else a request.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.list.iter().map(|client| {
            let waits = client.connection.has_queued();
            let events = if waits { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            PollFd::new(client.connection.as_fd(), events)
        })
    }

    /// When the next client will have stood still for too long.
    pub(super) fn next_stall(&self) -> Option<Instant> {
        self.list.iter().filter_map(|client| client.stalled_since).min().map(|at| at + STALL_MAX)
    }

    /// Sends what waits for client `number`, then takes its next request; none when it has not come, or
    /// an answer is still waiting.
    ///
    /// # Errors
    /// When the connection is of no use any more, or has stood still for too long.
    pub(super) fn next_request(&mut self, number: u64) -> Result<Option<Request>, TransportError> {
        let Some(client) = self.find(number) else {
            return Ok(None);
        };
        if !client.connection.flush()? {
            return client.note_stall().map(|()| None);
        }
        let request = client.connection.try_receive::<Request>()?;
        if request.is_some() {
            client.last_request = Instant::now();
            client.stalled_since = None;
        }
        client.note_stall()?;
        Ok(request.map(|(request, _no_fds)| request))
    }

    /// Client `number` has asked for something that will be answered later. False when it has too much
    /// of that already.
    pub(super) fn open_request(&mut self, number: u64) -> bool {
        let Some(client) = self.find(number) else {
            return false;
        };
        let fits = client.open_requests < OPEN_REQUESTS_MAX;
        client.open_requests += usize::from(fits);
        fits
    }

    /// Answers an earlier [`Clients::open_request`].
    pub(super) fn answer_open(&mut self, number: u64, reply: &Reply) {
        if let Some(client) = self.find(number) {
            client.open_requests = client.open_requests.saturating_sub(1);
        }
        self.answer(number, reply, Vec::new());
    }

    /// Answers client `number`, as far as it takes the answer now; the rest follows in its turns.
    pub(super) fn answer(&mut self, number: u64, reply: &Reply, fds: Vec<OwnedFd>) {
        let Some(client) = self.find(number) else {
            return;
        };
        let sent = match client.connection.queue(reply, fds) {
            Err(error @ TransportError::TooLong { .. }) => {
                let failure = Failure { kind: FailureKind::Unknown, message: error.to_string() };
                client.connection.queue(&Reply::Failed(failure), Vec::new())
            }
            queued => queued,
        };
        let flushed = sent.and_then(|()| client.connection.flush());
        if let Err(error) = flushed.and_then(|_all| client.note_stall()) {
            // Its next turn finds the same, and closes it.
            tracing::debug!(%error, "an answer was not delivered");
        }
    }

    fn find(&mut self, number: u64) -> Option<&mut Client> {
        self.list.iter_mut().find(|client| client.number == number)
    }
}

impl Client {
    fn note_stall(&mut self) -> Result<(), TransportError> {
        let (mid_frame, queued) = (self.connection.is_mid_frame(), self.connection.has_queued());
        if !mid_frame && !queued {
            self.stalled_since = None;
            return Ok(());
        }
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        if since.elapsed() < STALL_MAX {
            return Ok(());
        }
        let waiting_to = if queued { Direction::Send } else { Direction::Receive };
        Err(TransportError::Deadline { peer: self.connection.peer(), waiting_to })
    }
}
