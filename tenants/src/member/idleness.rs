//! For how long this process has done nothing: nothing launched, by the marks that threads leave at the gate, and nothing left to do on its
//! devices, by a look behind the gate as a pause takes it.
//!
//! Launches pay nothing for it: the gate counts who goes in and out for itself. So what is known is as old as the last look: one comes with every answer, and
//! one whenever the agent looks after its socket.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;

use super::Member;
use super::progress::Progress;
use crate::time::micros;
use crate::wire::{Idleness, MemberState, Reply};

/// How long the gate stays shut for a look at the devices at most.
const LOOK_MAX: Duration = Duration::from_millis(10);

/// What was seen last. A leaf.
#[derive(Debug, Default)]
pub(super) struct Watch(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// The gate's mark, and since when it stands still.
    mark: u64,
    since: Option<Instant>,
    /// The devices had nothing left to do, after what was launched by then.
    is_drained: bool,
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Driver> Member<D> {
    /// For how long it has done nothing, as far as somebody has looked: this is a look. Blocks nowhere, and calls no driver.
    pub fn idleness(&self) -> Idleness {
        let gate = self.gate();
        let waiting_calls = gate.waiting().len() as u64;
        let is_inside = gate.inside() > 0;
        let mark = gate.mark();
        let mut seen = self.idle.seen();
        if is_inside || seen.mark != mark || seen.since.is_none() {
            *seen = Seen { mark, since: Some(Instant::now()), is_drained: false };
        }
        let quiet = seen.since.map_or(Duration::ZERO, |since| since.elapsed());
        let quiet_us = micros(quiet);
        Idleness { quiet_us, is_drained: seen.is_drained, waiting_calls }
    }

    /// Looks whether the devices have work left, where nothing was launched for `quiet_us`. On the worker thread, which takes no step of a pause
    /// meanwhile. A thread that comes to the gate at this moment waits for some milliseconds.
    pub(super) fn run_idle(&self, quiet_us: u64) -> Reply {
        let before = self.idleness();
        let is_at_rest = matches!(*self.progress(), Progress::Rest(_));
        let may_look =
            is_at_rest && self.lifecycle.state() == MemberState::Active && self.captures() == 0;
        if before.is_drained || before.quiet_us < quiet_us || !may_look {
            return Reply::Idleness(before);
        }
        let mark = self.idle.seen().mark;
        let Ok(mut draining) = self.begin_pause() else { return Reply::Idleness(before) };
        let until = Instant::now() + LOOK_MAX;
        let is_idle = loop {
            // A capture that begins now waits at the gate.
            match draining.look(|| self.captures()) {
                Ok(activity) if activity.is_idle => break true,
                Ok(activity) if activity.inside > 0 => break false,
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "the devices were not looked at");
                    break false;
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            draining.wait_for_change(left, self.calling_off.receiver());
        };
        // A thread that has come to the gate since has something to launch.
        let is_drained = is_idle && self.gate().mark() == mark;
        self.set_progress(Progress::Rest(draining.reopen().done.end()));
        if is_drained {
            let mut seen = self.idle.seen();
            seen.is_drained = seen.mark == mark;
        }
        Reply::Idleness(self.idleness())
    }
}
