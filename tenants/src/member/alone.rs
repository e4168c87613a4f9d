//! What a process does when its coordinator is gone.
//!
//! Nobody is asked for a step behind the point of no return before everybody has done all steps before it.
//! So a process that has done those cannot know alone which way the others went, and asks them: if one was
//! told to go on, all go on; if none was, none ever will be, and all go back. A process that has not done
//! them knows that nobody was told, and goes back.
//!
//! The question needs a connection made after the coordinator's end was seen. Whatever the coordinator sent
//! to the process that is asked lies in that one's socket by then, and its agent reads connections in the
//! order they were made, so its answer counts it.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmm_pool::driver::Driver;

use super::{Member, Progress};
use crate::scope::Scope;
use crate::transport::Connection;
use crate::wire::{Asked, Failure, FailureKind, MemberState, Phase, PhaseReport, Reply, Request};

/// How long all others together may take to say what they were told. Agents answer at once; only a stopped
/// process does not.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends a wait inside a phase early. Raised by the agent, seen by the worker, which alone lowers it.
#[derive(Debug)]
pub(super) struct CallingOff {
    raise: Sender<()>,
    raised: Receiver<()>,
}

impl Default for CallingOff {
    fn default() -> Self {
        let (raise, raised) = crossbeam_channel::unbounded();
        Self { raise, raised }
    }
}

impl CallingOff {
    pub(super) fn raise(&self) {
        // Both ends live as long as this does.
        let _sent = self.raise.send(());
    }

    pub(super) fn lower(&self) {
        while self.raised.try_recv().is_ok() {}
    }

    pub(super) fn is_raised(&self) -> bool {
        !self.raised.is_empty()
    }

    /// For waiting on it beside something else, without taking what is in it.
    pub(super) fn receiver(&self) -> &Receiver<()> {
        &self.raised
    }
}

/// What the others said of a pause or resume whose coordinator is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// One was told to go on.
    GoOn,
    /// None was.
    GoBack,
}

impl<D: Driver> Member<D> {
    /// Brings a pause or resume under way to an end without its coordinator. Runs on the worker thread,
    /// after the phase that the coordinator left behind.
    pub(super) fn settle(&self) -> Result<PhaseReport, Failure> {
        let (state, progress, asked) = {
            let standing = self.standing();
            (standing.state, standing.progress, standing.asked)
        };
        let (is_pause, failing) = match state {
            MemberState::Offloading => (true, Verdict::GoOn),
            MemberState::Restoring => (false, Verdict::GoBack),
            MemberState::Active => {
                self.cut().release();
                return Ok(PhaseReport::default());
            }
            MemberState::Paused => return Ok(PhaseReport::default()),
            MemberState::Faulted => {
                let message = format!("process {} is faulted: end it", std::process::id());
                return Err(Failure { kind: FailureKind::Faulted, message });
            }
        };
        let verdict = match (progress, asked) {
            (Progress::Ready, Some(asked)) => self.ask_others(asked.round),
            (Progress::Untouched | Progress::Moving | Progress::Ready, _) => Some(Verdict::GoBack),
        };
        // Paused is safe whatever a silent one does: contents are saved, and nobody writes to them.
        let verdict = verdict.unwrap_or(failing);
        let phase = match (is_pause, verdict) {
            (true, Verdict::GoOn) => Phase::Release,
            (true, Verdict::GoBack) => Phase::AbortPause,
            (false, Verdict::GoOn) => Phase::Activate,
            (false, Verdict::GoBack) => Phase::AbortResume,
        };
        self.note(format!(
            "the coordinator of a pause or resume ended half-way, and this process finished it alone \
             ({phase:?})"
        ));
        if let Some(Asked { round, .. }) = asked {
            // Others that ask us follow.
            self.standing().asked = Some(Asked { round, phase });
        }
        let outcome = match (is_pause, verdict) {
            (true, Verdict::GoOn) => self.release(),
            (true, Verdict::GoBack) => self.abort_pause(),
            (false, Verdict::GoOn) => self.activate(),
            (false, Verdict::GoBack) => self.abort_resume(&Scope::Whole),
        };
        match (outcome, self.state()) {
            // Where a pause could not be undone, standing paused is an end as well.
            (Err(failure), MemberState::Active | MemberState::Paused) => {
                Ok(PhaseReport { notes: vec![failure.message], ..PhaseReport::default() })
            }
            (outcome, _) => outcome,
        }
    }

    /// Was any other process told to go beyond the point of no return of `round`? None when none of those
    /// that answer was, and one does not answer.
    fn ask_others(&self, round: u64) -> Option<Verdict> {
        let deadline = Instant::now() + ASK_TIMEOUT;
        let mut all_answered = true;
        let sockets = self.dir.members().unwrap_or_default();
        for socket in sockets.iter().filter(|socket| socket.id != self.id) {
            let answer = Connection::connect(&socket.path, deadline)
                .and_then(|mut connection| connection.call(&Request::Hello, 0, deadline));
            match answer {
                Ok((Reply::Member(info), _)) => {
                    let asked = info.asked.filter(|asked| asked.round == round);
                    if asked.is_some_and(|asked| asked.phase.is_decided()) {
                        return Some(Verdict::GoOn);
                    }
                }
                Err(error) if error.nobody_listens() || error.peer_is_gone() => {}
                Ok(_) | Err(_) => {
                    tracing::warn!(member = %socket.id, "a peer did not say how far it was told to go");
                    all_answered = false;
                }
            }
        }
        all_answered.then_some(Verdict::GoBack)
    }
}
