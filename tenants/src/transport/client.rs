//! The side that asks: a question and its answer belong together by type.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::{Condition, Connection, TransportError};
use crate::wire::{Ask, FDS_PER_MESSAGE_MAX, Failure, Reply, Request};

impl Connection {
    /// Asks `question` and waits for its answer, or for why it is refused.
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

    /// The answer to `question`, which was sent before, if all of it is here already. Does not block.
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
        let answer = self.send(request, &[], deadline).and_then(|()| self.receive(deadline));
        self.limits.fds_max = 0;
        answer
    }
}
