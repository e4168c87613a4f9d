//! Cooperative termination of a two-phase commit: what a process does when its coordinator has ended, or is silent. A
//! silent one is hung up on, and counts as ended from then on.
//!
//! Nobody is told to take a step behind the point of no return before everybody has done all steps before it.
//! So a process that has prepared is in doubt: it cannot know alone which way the others went, and asks them: if one was
//! told to commit, all commit; if none was, none ever will be, and all abort. A process that has not
//! prepared knows that nobody was told, and aborts. One that has begun to release by stages knows that it was told, and
//! commits: it saves and releases what is left, as it could from the moment that it was prepared.
//!
//! One that is silent, as a process that is stopped, counts as told nothing: it may not have prepared, or may have been
//! told to undo what it had, and goes back when it goes on. Where it alone was told to commit, they part.
//!
//! The question needs a connection made after the coordinator's end was seen. Whatever the coordinator sent
//! to the process that is asked lies in that one's socket by then, and its agent reads that first, so its answer
//! counts it. A coordinator that was only stopped may go on at any time, though: so a process that is asked hangs up on it
//! before it answers, and can be told nothing afterwards that its answer did not count.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use vmm_pool::Schedule;
use vmm_pool::driver::Driver;

use super::Executor;
use super::reports::PhaseResult;
use crate::Presence;
use crate::failures::PID;
use crate::rounds::{Said, Verdict, known};
use sublet_protocol::identity::MemberId;
use sublet_protocol::phase::Action;
use sublet_protocol::run_dir::MemberSocket;
use sublet_protocol::transport::{Connection, Process, TransportError, poll_until};
use sublet_protocol::wire::{
    Ask as _, Failure, FailureKind, MemberState, Phase, PhaseReport, RoundEnd, Withdraw,
};

/// The longest time that all others together may take to say what they were told. Agents answer immediately; only a
/// stopped process does not.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers that have taken longer in all are requested again: others wait for as long for a process that is stopped,
const ANSWERS_COUNT: Duration = Duration::from_secs(1);
/// so often at most.
const ASKED_TIMES_MAX: u32 = 3;
/// Questions that are out at a time: each takes two descriptors of the application's process.
const ASKED_AT_ONCE: usize = 64;
/// The time before a process that could not be asked is tried again: there is no event for that.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// The longest time between two looks at whether the asked processes live. A process that had ended already when it was
/// asked makes no event, where something else holds its socket.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl<D: Driver> Executor<D> {
    /// Brings a pause or resume under way, which is `round`, to an end without its coordinator. Runs on the worker thread,
    /// after the phase that the coordinator left behind.
    pub(super) fn settle(&mut self, round: Option<u64>) -> PhaseResult {
        let action = match self.lifecycle.state() {
            MemberState::Offloading => Action::Pause,
            MemberState::Restoring => Action::Resume,
            MemberState::Active => {
                self.member.cut.release();
                return Ok(PhaseReport::default());
            }
            // Whether its contexts are away only the driver knows: the next command asks it.
            MemberState::Paused | MemberState::Deep => return Ok(PhaseReport::default()),
            MemberState::Faulted => {
                let message = format!("process {PID} is faulted: end it");
                return Err(Failure { kind: FailureKind::Faulted, message });
            }
        };
        let outlook = self.progress.outlook();
        let told = round.map_or(RoundEnd::Open, |round| self.member.rounds().told(round));
        let asked =
            || round.map_or(Verdict::Abort, |round| ask_others(&self.member.presence, round));
        let verdict = known(outlook, told).unwrap_or_else(asked);
        if let Some(round) = round {
            // Others that ask us follow.
            self.member.rounds().decide(round, verdict);
        }
        let phase = match verdict {
            Verdict::Commit => action.commit(),
            Verdict::Abort => Phase::Abort,
        };
        self.member.notes.add(format!(
            "the coordinator of a pause or resume ended half-way, and this process finished it alone \
             ({phase:?})"
        ));
        let outcome = match (action, verdict) {
            (Action::Pause, Verdict::Commit) => self.release(Schedule::SaveMeanwhile),
            (Action::Resume, Verdict::Commit) => self.activate(),
            (_, Verdict::Abort) => self.abort(),
        };
        match (outcome, self.lifecycle.state()) {
            // Where a pause could not be undone, to be paused is an end as well.
            (Err(failure), MemberState::Active | MemberState::Paused) => {
                Ok(PhaseReport { notes: vec![failure.message], ..PhaseReport::default() })
            }
            (outcome, _) => outcome,
        }
    }
}

/// Was any other process told to go beyond the point of no return of `round`? One that does not say counts as one that
/// was told nothing: it may not even have prepared, and then goes back when it can.
fn ask_others(presence: &Presence, round: u64) -> Verdict {
    for _ in 0..ASKED_TIMES_MAX {
        let began = Instant::now();
        let verdict = ask_others_once(presence, round, began + ASK_TIMEOUT);
        let took = began.elapsed();
        match verdict {
            Ok(Verdict::Commit) => return Verdict::Commit,
            // Those that answered first may have gone on since, without one that was silent for long.
            Ok(Verdict::Abort) if took < ANSWERS_COUNT => break,
            // Those that answered first may have gone on since. Else this process was stopped itself, and the others
            // have gone on without it.
            Err(Silent) if took < ASK_TIMEOUT + ANSWERS_COUNT => {
                let again = ask_others_once(presence, round, Instant::now() + ANSWERS_COUNT);
                return again.unwrap_or(Verdict::Abort);
            }
            Ok(Verdict::Abort) | Err(Silent) => {}
        }
    }
    Verdict::Abort
}

/// Asks all at a time, so that one that is silent takes nobody else's time to answer.
fn ask_others_once(presence: &Presence, round: u64, deadline: Instant) -> Result<Verdict, Silent> {
    let sockets = presence.dir().members().unwrap_or_default();
    if !sockets.iter().any(|socket| socket.id == presence.id()) {
        tracing::warn!("the tenant's directory has gone: the others cannot be asked");
        return Err(Silent);
    }
    let mut to_ask: VecDeque<MemberSocket> =
        sockets.into_iter().filter(|socket| socket.id != presence.id()).collect();
    let mut asked: Vec<Question> = Vec::new();
    let mut all_answered = true;
    let mut said = Said::default();
    while !(asked.is_empty() && to_ask.is_empty()) {
        let now = Instant::now();
        if now >= deadline {
            let silent = asked.iter().map(|question| question.member);
            for member in silent.chain(to_ask.iter().map(|socket| socket.id)) {
                tracing::warn!(%member, "a peer did not say how far it was told to go");
            }
            return Err(Silent);
        }
        let mut look_again = deadline.min(now + LOOK_EVERY);
        while asked.len() < ASKED_AT_ONCE
            && let Some(socket) = to_ask.pop_front()
        {
            match Question::ask(&socket, round) {
                Ok(question) => asked.push(question),
                Err(error) if error.peer_is_gone() => {}
                Err(error) => {
                    // Its queue is full, or we have no descriptor for it now.
                    tracing::debug!(%error, "a peer could not be asked yet");
                    to_ask.push_back(socket);
                    look_again = deadline.min(now + ASK_AGAIN);
                    break;
                }
            }
        }
        let mut fds: Vec<PollFd<'_>> = asked.iter().flat_map(Question::events).collect();
        if let Err(error) = poll_until(&mut fds, look_again) {
            tracing::warn!(%error, "the others could not be waited for");
            return Err(Silent);
        }
        drop(fds);
        asked.retain_mut(|question| match question.answer() {
            Heard::Nothing => true,
            Heard::Gone => false,
            Heard::Nonsense => {
                all_answered = false;
                false
            }
            Heard::Told(told) => {
                said.hear(told);
                false
            }
        });
        if let Some(verdict) = said.verdict() {
            return Ok(verdict);
        }
    }
    if all_answered { Ok(Verdict::Abort) } else { Err(Silent) }
}

/// One of the others did not say what it was told, and none of those that did was told anything.
struct Silent;

/// A question to one other process.
struct Question {
    member: MemberId,
    asked: Withdraw,
    connection: Connection,
    process: Process,
}

/// The outcome of a question so far.
enum Heard {
    Nothing,
    Told(RoundEnd),
    /// It has ended.
    Gone,
    Nonsense,
}

impl Question {
    fn ask(socket: &MemberSocket, round: u64) -> Result<Self, TransportError> {
        let now = Instant::now();
        let mut connection = Connection::connect(&socket.path, now)?;
        let asked = Withdraw { round };
        let process = connection.process();
        // Something else holds its socket.
        if process.has_ended() {
            return Err(TransportError::Closed { peer: connection.peer() });
        }
        connection.ask(&asked.to_request(), now)?;
        Ok(Self { member: socket.id, asked, connection, process })
    }

    /// Returns the events to wait for: the answer, or the end of the asked process.
    fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let fds = std::iter::once(self.connection.as_fd()).chain(self.process.end_event());
        fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN))
    }

    fn answer(&mut self) -> Heard {
        // Looked at first: what it sent before its end counts.
        let has_ended = self.process.has_ended();
        match self.connection.try_answer(&self.asked) {
            Ok(None) if has_ended => Heard::Gone,
            Ok(None) => Heard::Nothing,
            Ok(Some(Ok(told))) => Heard::Told(told),
            Err(error) if error.peer_is_gone() => Heard::Gone,
            Ok(Some(Err(_))) | Err(_) => {
                tracing::warn!(member = %self.member, "a peer's answer makes no sense");
                Heard::Nonsense
            }
        }
    }
}
