//! The connections that an agent serves, and the limits on the time and memory that one of them may use.
//!
//! Nothing here blocks: an answer that a client does not receive waits in a queue of its own, and meanwhile nothing more is
//! read from that client. A client that stops in the middle of a message, or does not receive an answer, is closed after
//! [`STALL_MAX`]. The limits are listed in `docs/security.md`.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout};

use sublet_protocol::transport::{Connection, Direction, TransportError};
use sublet_protocol::wire::{Failure, FailureKind, Reply, Request};

/// The most connections of one agent: enough for the peers on a node and a few commands. When all are in use, a new connection
/// replaces the one that has been idle longest. The owner of that one connects again for its next request. A connection whose
/// request is not answered yet is never replaced. If there is no other, new connections wait in the listening socket's queue.
pub const CONNECTIONS_MAX: usize = 256;
/// The most unanswered requests of one connection. A coordinator that brings ranks to a cut sends new limits without waiting
/// for the answer to the last.
pub const OPEN_REQUESTS_MAX: usize = 256;
/// Requests answered on one connection before the other connections are served.
pub const REQUESTS_PER_TURN_MAX: usize = 16;
/// The longest time that a client may stop inside a message, or not receive an answer.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    number: u64,
    pub(super) connection: Connection,
    /// A socket path at which the client's process was seen to listen. It still does as long as the socket has its name.
    pub(super) listens_at: Option<PathBuf>,
    /// The number of requests that will be answered later.
    open_requests: usize,
    last_request: Instant,
    /// Has the client sent a request yet?
    was_served: bool,
    stalled_since: Option<Instant>,
}

/// All connections, by numbers that are never reused.
#[derive(Debug, Default)]
pub(super) struct Clients {
    list: Vec<Client>,
    last_number: u64,
}

impl Clients {
    /// Is there room for one more connection, perhaps after closing an idle one? `keep` is never closed.
    pub(super) fn has_room(&self, keep: Option<u64>) -> bool {
        self.list.len() < CONNECTIONS_MAX || self.idle(keep).is_some()
    }

    /// Adds a connection. Returns the client that was closed to make room for it. If no client is idle, the new connection is
    /// closed, and none is returned. `keep` is never closed.
    pub(super) fn add(&mut self, connection: Connection, keep: Option<u64>) -> Option<u64> {
        let mut closed = None;
        if self.list.len() >= CONNECTIONS_MAX {
            let Some(number) = self.idle(keep) else {
                tracing::warn!(peer = %connection.peer(), "too many connections: closed");
                return None;
            };
            tracing::debug!(peer = %connection.peer(), "too many connections: the longest idle goes");
            self.close(number);
            closed = Some(number);
        }
        self.last_number += 1;
        self.list.push(Client {
            number: self.last_number,
            connection,
            listens_at: None,
            open_requests: 0,
            last_request: Instant::now(),
            was_served: false,
            stalled_since: None,
        });
        closed
    }

    /// The client that has been idle longest.
    fn idle(&self, keep: Option<u64>) -> Option<u64> {
        let now = Instant::now();
        let mut candidates: Vec<&Client> = self
            .list
            .iter()
            .filter(|client| client.may_go(now) && Some(client.number) != keep)
            .collect();
        candidates.sort_unstable_by_key(|client| client.last_request);
        candidates.into_iter().find(|client| !client.has_unread()).map(|client| client.number)
    }

    pub(super) fn close(&mut self, number: u64) {
        self.list.retain(|client| client.number != number);
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        self.list.iter().map(|client| client.number).collect()
    }

    /// Returns the events to wait for: room for an answer if one is queued, else a request.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.list.iter().map(|client| {
            let waits = client.connection.has_queued();
            let events = if waits { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            PollFd::new(client.connection.as_fd(), events)
        })
    }

    /// The next time at which a client has been stopped for too long, or may be closed because it sends no request.
    pub(super) fn next_stall(&self) -> Option<Instant> {
        let stalled = self.list.iter().filter_map(|client| client.stalled_since).min();
        let is_full = self.list.len() >= CONNECTIONS_MAX;
        let now = Instant::now();
        let mute = self.list.iter().filter(|client| is_full && !client.was_served);
        let mute = mute.map(|client| client.last_request).filter(|at| *at + STALL_MAX > now).min();
        stalled.into_iter().chain(mute).min().map(|at| at + STALL_MAX)
    }

    /// Sends queued answers to client `number`, then reads its next request; none if no request has arrived, or an answer is
    /// still queued.
    ///
    /// # Errors
    /// The connection cannot be used any more, or has been stopped for too long.
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
            client.was_served = true;
            client.stalled_since = None;
        }
        client.note_stall()?;
        Ok(request.map(|(request, _no_fds)| request))
    }

    /// Notes that client `number` has a request that will be answered later. False if it already has too many of them.
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

    /// Answers client `number`, as far as it receives the answer now; the rest follows in its turns.
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
            // The client's next turn finds the same error, and closes the connection.
            tracing::debug!(%error, "an answer was not delivered");
        }
    }

    /// The connection of client `number`.
    pub(super) fn connection(&self, number: u64) -> Option<&Connection> {
        Some(&self.get(number)?.connection)
    }

    /// Returns the number of requests of client `number` that will be answered later.
    pub(super) fn owed(&self, number: u64) -> usize {
        self.get(number).map_or(0, |client| client.open_requests)
    }

    /// Has client `number` ended, or closed the connection? Earlier messages may still be unread.
    pub(super) fn has_ended(&self, number: u64) -> bool {
        self.get(number).is_none_or(Client::has_ended)
    }

    fn get(&self, number: u64) -> Option<&Client> {
        self.list.iter().find(|client| client.number == number)
    }

    pub(super) fn find(&mut self, number: u64) -> Option<&mut Client> {
        self.list.iter_mut().find(|client| client.number == number)
    }
}

impl Client {
    /// May this connection be closed, since no request on it is known? A client that has just connected is about to send one.
    fn may_go(&self, now: Instant) -> bool {
        let asks_nothing = self.was_served || now >= self.last_request + STALL_MAX;
        asks_nothing
            && self.open_requests == 0
            && !self.connection.is_mid_frame()
            && !self.connection.has_queued()
    }

    /// Is there an unread request?
    fn has_unread(&self) -> bool {
        let mut fds = [PollFd::new(self.connection.as_fd(), PollFlags::POLLIN)];
        let ready = matches!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1..));
        let hung_up = fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP));
        ready && !hung_up
    }

    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.connection.as_fd(), PollFlags::POLLIN)];
        let looked = nix::poll::poll(&mut fds, PollTimeout::ZERO).is_ok();
        let hung_up = fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP));
        // A child that the client has forked may hold the client's end of the connection.
        looked && (hung_up || self.connection.process().has_ended())
    }

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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use sublet_protocol::transport::frame::encode;

    /// The full number of clients, and their other ends.
    fn full() -> (Clients, Vec<UnixStream>) {
        let mut clients = Clients::default();
        let ends = (0..CONNECTIONS_MAX).map(|_| connect(&mut clients).0).collect();
        (clients, ends)
    }

    /// A new client's other end, and the client that was closed for it.
    fn connect(clients: &mut Clients) -> (UnixStream, Option<u64>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let closed = clients.add(Connection::accepted(theirs).unwrap(), None);
        (ours, closed)
    }

    fn ask(end: &mut UnixStream) {
        std::io::Write::write_all(end, &encode(&Request::Hello, 0).unwrap()).unwrap();
    }

    #[test]
    fn clients_whose_questions_are_not_answered_keep_their_places() {
        let (mut clients, mut ends) = full();
        assert!(!clients.has_room(None), "one that is about to ask would have to go");
        for end in &mut ends {
            ask(end);
        }
        assert!(!clients.has_room(None), "one that has asked would have to go");
        let [first, second, third] = [0, 1, 2].map(|index| clients.numbers()[index]);
        for number in [second, first, third] {
            assert_eq!(clients.next_request(number).unwrap().unwrap(), Request::Hello);
        }
        assert!(clients.open_request(second));
        ask(&mut ends[0]);
        // The second client waits for its answer, and the first has sent another request.
        assert_eq!(connect(&mut clients).1, Some(third));
        assert!(!clients.has_room(None));
        clients.answer_open(second, &Reply::Noted);
        assert!(!clients.has_room(Some(second)));
        assert_eq!(connect(&mut clients).1, Some(second));
    }

    #[test]
    fn clients_that_have_hung_up_or_ask_nothing_hold_no_place_for_long() {
        let (mut clients, mut ends) = full();
        let number = clients.numbers()[0];
        ask(&mut ends[0]);
        assert_eq!(clients.next_request(number).unwrap().unwrap(), Request::Hello);
        drop(ends);
        assert!(clients.has_room(None));
        let (mut clients, _ends) = full();
        let mute_until = clients.next_stall().unwrap();
        assert!(mute_until > Instant::now() && mute_until <= Instant::now() + STALL_MAX);
        for client in &mut clients.list {
            client.last_request -= STALL_MAX;
        }
        assert!(clients.has_room(None));
        assert_eq!(clients.next_stall(), None);
    }
}
