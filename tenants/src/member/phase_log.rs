//! The phases of a process's last pause and resume, and how long its pauses took, for people.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::phase::{Action, Stage};
use crate::wire::{Asked, PauseTimes, Phase, PhaseReport};

/// See the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(super) struct PhaseLog(Mutex<LoggedPhases>);

/// What a [`PhaseLog`] says.
#[derive(Clone, Debug, Default)]
pub(super) struct LoggedPhases {
    /// The last step that was requested.
    pub(super) asked: Option<Asked>,
    pub(super) last_pause: Vec<(Phase, PhaseReport)>,
    pub(super) last_resume: Vec<(Phase, PhaseReport)>,
    pub(super) pause_times: PauseTimes,
}

impl PhaseLog {
    fn logged(&self) -> MutexGuard<'_, LoggedPhases> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_asked(&self, asked: Asked) {
        self.logged().asked = Some(asked);
    }

    /// A pause or resume begins: forgets the last.
    pub(super) fn begin(&self, action: Action) {
        self.logged().of(action).clear();
    }

    /// Adds what a phase has done.
    pub(super) fn record(&self, phase: Phase, report: &PhaseReport) {
        let action = match (phase.stage(), phase.action()) {
            (Stage::Prepare | Stage::Commit, Some(action)) => action,
            (Stage::AtRest, Some(Action::Pause)) => Action::Pause,
            // A thaw comes before the resume begins, which clears what the last has left.
            (Stage::Abort | Stage::Settle, _)
            | (_, None)
            | (Stage::AtRest, Some(Action::Resume)) => return,
        };
        let mut logged = self.logged();
        let phases = logged.of(action);
        match phases.last_mut() {
            Some((last, stages)) if *last == phase => {
                stages.add(report.clone());
            }
            Some(_) | None => phases.push((phase, report.clone())),
        }
    }

    /// The last pause is over for all processes.
    pub(super) fn end_pause(&self) {
        let mut logged = self.logged();
        let all_us = logged.last_pause.iter().map(|(_, report)| report.elapsed_us).sum();
        logged.pause_times.add(all_us);
    }

    /// All that it says now.
    pub(super) fn all(&self) -> LoggedPhases {
        self.logged().clone()
    }
}

impl LoggedPhases {
    fn of(&mut self, action: Action) -> &mut Vec<(Phase, PhaseReport)> {
        match action {
            Action::Pause => &mut self.last_pause,
            Action::Resume => &mut self.last_resume,
        }
    }
}
