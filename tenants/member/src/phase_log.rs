//! The phases of a process's last pause and resume, and the lengths of its pauses, for people.

use std::collections::BTreeMap;
use std::sync::Mutex;

use vmm_pool::sync::lock;

use sublet_protocol::phase::{Action, Stage};
use sublet_protocol::wire::{PauseTimes, Phase, PhaseReport};

/// The log: see the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(super) struct PhaseLog(Mutex<LoggedPhases>);

/// The contents of a [`PhaseLog`].
#[derive(Clone, Debug, Default)]
pub(super) struct LoggedPhases {
    /// The phases of the last pause and resume.
    pub(super) last: BTreeMap<Action, Vec<(Phase, PhaseReport)>>,
    pub(super) pause_times: PauseTimes,
}

impl PhaseLog {
    /// Records the begin of a pause or resume: forgets the last one.
    pub(super) fn begin(&self, action: Action) {
        lock(&self.0).last.remove(&action);
    }

    /// Adds the report of a phase.
    pub(super) fn record(&self, phase: Phase, report: &PhaseReport) {
        let action = match (phase.stage(), phase.action()) {
            (Stage::Prepare | Stage::Commit, Some(action)) => action,
            (Stage::AtRest, Some(Action::Pause)) => Action::Pause,
            // A thaw comes before the resume begins, and that begin clears the last entries.
            (Stage::Abort | Stage::Settle, _)
            | (_, None)
            | (Stage::AtRest, Some(Action::Resume)) => return,
        };
        let mut logged = lock(&self.0);
        let phases = logged.last.entry(action).or_default();
        match phases.last_mut() {
            Some((last, stages)) if *last == phase => {
                stages.add(report.clone());
            }
            Some(_) | None => phases.push((phase, report.clone())),
        }
    }

    /// Records that the last pause is over for all processes.
    pub(super) fn end_pause(&self) {
        let mut logged = lock(&self.0);
        let pause = logged.last.get(&Action::Pause).into_iter().flatten();
        let all_us = pause.map(|(_, report)| report.elapsed_us).sum();
        logged.pause_times.add(all_us);
    }

    /// Returns a copy of the log.
    pub(super) fn all(&self) -> LoggedPhases {
        lock(&self.0).clone()
    }
}
