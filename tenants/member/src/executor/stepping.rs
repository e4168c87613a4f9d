//! The work of a process behind its closed gate until its devices are idle, as [`sublet_protocol::stepping`] decides it for all
//! processes. It runs on the worker thread.

use std::time::{Duration, Instant};

use vmm_pool::Draining;
use vmm_pool::driver::Driver;

use super::Executor;
use crate::Member;
use crate::failures::{PID, drain_failure, wrong_state};
use crate::progress::Progress;
use sublet_protocol::stepping::{Activity, Calls, HeldCall, StepOrder};
use sublet_protocol::wire::{Failure, FailureKind, MemberState, Reply, StepOn};

/// The longest time that a watcher waits between two looks: threads reach the gate without notifying it.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The longest wait for a thread that was let in, before the others go on without it. Its call may wait for them.
const CALL_PATIENCE: Duration = Duration::from_millis(5);
/// The time that a device may be busy after a call before it counts as waiting for something.
const BUSY_PATIENCE: Duration = Duration::from_millis(2);
/// The same time in the turn of a busy process, which may be hundreds of calls.
const TURN_PATIENCE: Duration = Duration::from_millis(1);
/// The number of calls that a process makes in direct succession while its devices stay idle. If a later call makes a device of
/// another process idle, the coordinator learns of it before the next call.
const CALLS_AT_SPEED: u64 = 64;
/// The time until the coordinator learns of a call.
const WORD_TIME: Duration = Duration::from_millis(1);
/// The longest time of threads between one call to the next.
const COME_PATIENCE: Duration = Duration::from_millis(1);
/// The number of waiting calls that a report lists.
const LISTED_MAX: usize = 16;

impl<D: Driver> Executor<D> {
    /// Does a step, and reports the activity of the process. The report comes as soon as the activity differs from the facts
    /// that the coordinator knows, at `until`, or after another request. `asked` is the number from
    /// [`sublet_protocol::cut::Cut::claim`].
    pub(super) fn run_step(
        &mut self,
        holder: u64,
        on: StepOn,
        asked: u64,
        until: Instant,
    ) -> Reply {
        let taken = self.lifecycle.expect(MemberState::Offloading);
        match taken.and_then(|()| self.next_of(Progress::into_draining)) {
            Err(failure) => self.refuse(failure),
            Ok((mut draining, selection)) => {
                let member = &*self.member;
                let mut stepper = Stepper { member, draining: &mut draining, asked, until };
                let activity = stepper.step_and_watch(holder, on);
                self.progress = Progress::Draining(draining, selection);
                match activity {
                    Ok(activity) => Reply::Activity(Box::new(activity)),
                    Err(failure) => self.refuse(failure),
                }
            }
        }
    }
}

/// A process behind its closed gate, until another request arrives.
struct Stepper<'a, D: Driver> {
    member: &'a Member<D>,
    draining: &'a mut Draining<D>,
    asked: u64,
    until: Instant,
}

impl<D: Driver> Stepper<'_, D> {
    fn step_and_watch(&mut self, holder: u64, on: StepOn) -> Result<Activity, Failure> {
        let StepOn { step: StepOrder { order, limits, calls }, seen, .. } = on;
        if let Some(limits) = limits
            && !self.member.cut.hold(holder, limits)
        {
            return Err(wrong_state("the hold ended with its holder".to_owned()));
        }
        match calls {
            Calls::None => {}
            Calls::Ready(count) => self.step_ready(count)?,
            Calls::Each(count) => self.step_each(count, None)?,
            Calls::Turn(count) => self.step_each(count, Some(TURN_PATIENCE))?,
        }
        loop {
            let activity = self.activity(order)?;
            if calls != Calls::None || activity.seen() != seen || self.is_over() {
                return Ok(activity);
            }
            let left = self.until.saturating_duration_since(Instant::now());
            self.draining.wait_for_change(left.min(LOOK_EVERY), self.member.calling_off.receiver());
        }
    }

    /// Lets all waiting threads make `count` calls each. With `idle_within`, stops after a call that makes the devices idle in
    /// that time.
    fn step_each(&mut self, count: u32, idle_within: Option<Duration>) -> Result<(), Failure> {
        for _ in 0..count {
            if self.is_over() || !self.somebody_waits()? {
                break;
            }
            self.draining.step_all();
            self.wait_until(CALL_PATIENCE, Draining::is_clear);
            if let Some(patience) = idle_within
                && self.is_idle_soon(patience)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Lets ready threads make `count` calls in all, as long as the devices stay idle or stay busy.
    fn step_ready(&mut self, count: u32) -> Result<(), Failure> {
        let was_idle = self.look()?.is_idle;
        for _ in 0..count {
            if self.is_over() || !self.somebody_waits()? {
                break;
            }
            let Some(slot) = self.draining.step_one() else { break };
            self.wait_until(CALL_PATIENCE, Draining::is_clear);
            let is_idle = self.is_idle_soon(BUSY_PATIENCE)?;
            if was_idle && !is_idle {
                self.draining.note_blocked(slot);
            }
            if is_idle != was_idle {
                break;
            }
            if self.draining.steps() > CALLS_AT_SPEED {
                self.wait_until(WORD_TIME, |_| false);
            }
        }
        Ok(())
    }

    /// Is there another request, or is the time over?
    fn is_over(&self) -> bool {
        Instant::now() >= self.until
            || self.member.cut.is_asked_since(self.asked)
            || self.member.calling_off.is_raised()
    }

    /// Does a thread wait that can be let in? Threads that arrive within a moment count.
    fn somebody_waits(&self) -> Result<bool, Failure> {
        let waits = |draining: &Draining<D>| !draining.pool().gate().waiting().is_empty();
        if !self.wait_until(COME_PATIENCE, waits) {
            return Ok(false);
        }
        if self.draining.wants_capture() {
            // The GPU waits for work that the process is about to capture as a CUDA graph. The job runs on. Pause
            // again after the capture, or give a longer `--timeout`.
            return Err(FailureKind::InCapture.because(format!(
                    "process {PID} is about to capture a stream, and its devices wait for what comes then: pause again \
                     when the capture has ended"
                )));
        }
        Ok(true)
    }

    /// Are the devices idle before `patience` ends?
    fn is_idle_soon(&mut self, patience: Duration) -> Result<bool, Failure> {
        let until = Instant::now() + patience;
        loop {
            if self.look()?.is_idle {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return Ok(false);
            }
            self.draining.wait_for_change(left, self.member.calling_off.receiver());
        }
    }

    /// Waits for `happened`, for at most `patience`; returns whether it has.
    fn wait_until(&self, patience: Duration, happened: impl Fn(&Draining<D>) -> bool) -> bool {
        let until = Instant::now() + patience;
        while !happened(self.draining) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return false;
            }
            self.draining.wait_for_step(left);
        }
        true
    }

    /// Returns the activity of the devices, as far as they can be asked now.
    fn look(&mut self) -> Result<vmm_pool::Activity, Failure> {
        let looked = self.draining.look(|| self.member.captures().under_way());
        looked.map_err(|error| drain_failure(&error, &self.draining.pool().gate().waiting()))
    }

    fn activity(&mut self, order: u64) -> Result<Activity, Failure> {
        // Before the devices: a thread that leaves after the look at the devices then counts as inside.
        let cut = self.member.cut.report(self.member.captures().under_way());
        let looked = self.look()?;
        let waiting = self.draining.pool().gate().waiting();
        let calls = waiting.iter().take(LISTED_MAX);
        Ok(Activity {
            order,
            cut,
            inside: looked.inside as u64,
            waiting: waiting.len() as u64,
            ready: self.draining.ready().len() as u64,
            calls: calls.map(|call| HeldCall::new(call.call.name(), call.waited)).collect(),
            busy: looked.busy.iter().map(ToString::to_string).collect(),
            is_idle: looked.is_idle,
            steps: self.draining.steps(),
        })
    }
}
