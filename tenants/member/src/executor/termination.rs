//! Cooperative termination of a two-phase commit: the work of a process after its coordinator has ended, or is silent. The
//! connection of a silent coordinator is closed, and the coordinator counts as ended from then on.
//!
//! No process is told to do a step after the point of no return before all processes have done all steps before it. So a
//! process that has prepared is in doubt. It cannot know alone which way the others went, and asks them. If one was told to
//! commit, all commit. If none was, none ever will be, and all abort. A process that has not prepared knows that no process was
//! told, and aborts. A process that has begun to release by stages knows that it was told, and commits. It saves and releases
//! the rest, as it could from the moment that it was prepared.
//!
//! A silent process, such as a stopped one, counts as told nothing. It may not have prepared, or may have been told to undo its
//! work, and goes back when it continues. If it alone was told to commit, the processes end in different states.
//!
//! The question needs a connection that was made after the coordinator's end was seen. By then all messages of the coordinator
//! to the asked process are in that process's socket. Its agent reads them first, so its answer includes them. But a
//! coordinator that was only stopped may continue at any time. So an asked process closes the coordinator's connection before
//! it answers. After that it cannot receive an order that its answer did not include.

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

/// The longest time in which all others together must report their orders. Agents answer immediately; only a stopped process
/// does not.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// The time after which the answers are requested again: others wait equally long for a stopped process.
const ANSWERS_COUNT: Duration = Duration::from_secs(1);
/// The most times that the answers are requested.
const ASKED_TIMES_MAX: u32 = 3;
/// The number of open questions at a time: each uses two descriptors of the application's process.
const ASKED_AT_ONCE: usize = 64;
/// The time before a process that could not be asked is tried again, since no event tells when it can be asked.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// The longest time between two checks whether the asked processes live. A process that had already ended when it was asked
/// makes no event, if another process holds its socket.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl<D: Driver> Executor<D> {
    /// Ends the pause or resume under way, which is `round`, without its coordinator. Runs on the worker thread, after the last
    /// phase that the coordinator ordered.
    pub(super) fn settle(&mut self, round: Option<u64>) -> PhaseResult {
        let action = match self.lifecycle.state() {
            MemberState::Offloading => Action::Pause,
            MemberState::Restoring => Action::Resume,
            MemberState::Active => {
                self.member.cut.release();
                return Ok(PhaseReport::default());
            }
            // Only the driver knows whether the contexts are off the devices: the next command asks it.
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
            // Others that ask this process follow the verdict.
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
            // If a pause could not be undone, the paused state is an end as well.
            (Err(failure), MemberState::Active | MemberState::Paused) => {
                Ok(PhaseReport { notes: vec![failure.message], ..PhaseReport::default() })
            }
            (outcome, _) => outcome,
        }
    }
}

/// Was any other process told to go beyond the point of no return of `round`? A process that does not answer counts as told
/// nothing: it may not even have prepared, and then goes back when it can.
fn ask_others(presence: &Presence, round: u64) -> Verdict {
    for _ in 0..ASKED_TIMES_MAX {
        let began = Instant::now();
        let verdict = ask_others_once(presence, round, began + ASK_TIMEOUT);
        let took = began.elapsed();
        match verdict {
            Ok(Verdict::Commit) => return Verdict::Commit,
            // The processes that answered first may have gone on since, without one that was silent for long.
            Ok(Verdict::Abort) if took < ANSWERS_COUNT => break,
            // The processes that answered first may have gone on since. Otherwise this process was stopped itself, and the
            // others have gone on without it.
            Err(Silent) if took < ASK_TIMEOUT + ANSWERS_COUNT => {
                let again = ask_others_once(presence, round, Instant::now() + ANSWERS_COUNT);
                return again.unwrap_or(Verdict::Abort);
            }
            Ok(Verdict::Abort) | Err(Silent) => {}
        }
    }
    Verdict::Abort
}

/// Asks all processes simultaneously, so that a silent process leaves the others their time to answer.
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
                    // The process's queue is full, or this process has no descriptor for the connection now.
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

/// One of the other processes did not report its order, and none of those that answered was told anything.
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
    /// The process has ended.
    Gone,
    Nonsense,
}

impl Question {
    fn ask(socket: &MemberSocket, round: u64) -> Result<Self, TransportError> {
        let now = Instant::now();
        let mut connection = Connection::connect(&socket.path, now)?;
        let asked = Withdraw { round };
        let process = connection.process();
        // Another process holds the socket.
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
        // Checked first: messages that the process sent before its end count.
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
