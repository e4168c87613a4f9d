//! What is done when a pause or resume ends before its point of no return: all members go back, and the error says why.

use std::time::Duration;

use super::CoordinatorError;
use super::peers::Question as _;
use super::report::{Event, MemberFailure, Step};
use super::session::{Session, Stop};
use super::shortage::short_devices;
use super::steps::StepResult;
use crate::run_dir::RunDirError;
use crate::wire::{Action, FailureKind, GiveUp, MemberState};

/// How long a member may take to hear that what it waits for will not happen.
const TELL_TIMEOUT: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Undoes all that was done in `members` and makes the error of it.
    pub(super) fn roll_back(
        &mut self,
        action: Action,
        members: &[usize],
        stop: Stop,
    ) -> CoordinatorError {
        let mut failures = stop.failures();
        (self.progress)(Event::RollingBack { failures: &failures });
        // A member that still waits for its application has done nothing yet, and stops when we hang up.
        for index in members {
            if self.peers.owes(*index, Step::Consent(action)) {
                self.peers.drop_link(*index);
            }
        }
        let up = |index: &usize| self.peers.is_up(*index);
        let targets: Vec<usize> = members.iter().copied().filter(up).collect();
        let undo = self.question(action.abort());
        let mut result = StepResult::default();
        for index in targets {
            // One that is silent already gets the message, but not another full wait.
            let timeout = if self.peers.is_overdue(index) {
                self.options.reply_margin
            } else {
                self.options.phase_timeout(action.abort()) + self.options.reply_margin
            };
            if let Err(failure) = self.peers.ask(index, &undo, timeout) {
                result.failures.push((index, failure));
            }
        }
        let failed_step = failures.first().map(|failure| failure.step);
        while let Some(answer) = self.peers.next_answer(None) {
            let peer = answer.peer;
            if answer.step == undo.step() {
                match answer.to(&undo) {
                    Ok(report) => result.done.push((peer, report)),
                    // It was under way, and is undone by another's word.
                    Err(failure) if failure.failure.kind == FailureKind::CalledOff => {}
                    Err(failure) => result.failures.push((peer, failure)),
                }
                continue;
            }
            // Late news of the step that failed is part of why; of a member lost meanwhile, too.
            let is_why = |failure: &MemberFailure| {
                Some(failure.step) == failed_step && failure.failure.kind != FailureKind::CalledOff
            };
            failures.extend(answer.failure().filter(is_why));
        }
        let out_of_memory = failures
            .iter()
            .any(|member| matches!(member.failure.kind, FailureKind::OutOfDeviceMemory { .. }));
        let undone: Vec<usize> = result.done.iter().map(|(index, _)| *index).collect();
        let shortages =
            if out_of_memory { short_devices(&self.needs(&undone)) } else { Vec::new() };
        let (tenant, undo_failures) = (self.tenant(), result.into_failures());
        let info = members.first().and_then(|index| self.peers.list[*index].info.as_ref());
        let runs = info.is_some_and(|info| info.state == MemberState::Active);
        match stop {
            Stop::Joined if undo_failures.is_empty() => CoordinatorError::Joined { tenant },
            Stop::LockGone if undo_failures.is_empty() => RunDirError::LockGone { tenant }.into(),
            Stop::CalledOff => CoordinatorError::CalledOff { tenant, action, runs, undo_failures },
            stop @ (Stop::Failed(_) | Stop::HostShort(..) | Stop::Joined | Stop::LockGone) => {
                CoordinatorError::Refused {
                    tenant,
                    action,
                    runs,
                    shortages,
                    host_short: stop.host_shortage(),
                    failures,
                    undo_failures,
                }
            }
        }
    }

    /// Lets the applications that wait for `action` together go on with the same error.
    pub(super) fn tell_waiting(
        &mut self,
        action: Action,
        members: &[usize],
        error: &CoordinatorError,
    ) {
        let news = GiveUp { action, why: error.to_string() };
        for index in members {
            if self.peers.is_up(*index)
                && let Err(failure) = self.peers.ask(*index, &news, TELL_TIMEOUT)
            {
                tracing::debug!(%failure, "a waiting member was not told");
            }
        }
        while let Some(answer) = self.peers.next_answer(None) {
            if let Some(failure) = answer.failure() {
                tracing::debug!(%failure, "a waiting member did not take the news");
            }
        }
    }
}
