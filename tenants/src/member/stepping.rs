//! What a process does behind its shut gate until its devices are idle, as [`crate::stepping`] decides it for all. Runs
//! on the worker thread.

use std::time::{Duration, Instant};

use vmm_pool::Draining;
use vmm_pool::driver::Driver;

use super::Member;
use super::failures::{drain_failure, wrong_state};
use super::progress::Progress;
use crate::stepping::{Activity, Calls, HeldCall, SeenActivity, StepOrder};
use crate::wire::{Failure, FailureKind, MemberState, Reply};

/// How long a watcher goes without looking: threads come to the gate without a word to us.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How long a thread that was let in may be inside before the others go on without it: its call may wait for them.
const CALL_PATIENCE: Duration = Duration::from_millis(5);
/// How long a device may be busy after a call before it counts as one that waits for something.
const BUSY_PATIENCE: Duration = Duration::from_millis(2);
/// The same in the turn of a busy process, which may be hundreds of calls.
const TURN_PATIENCE: Duration = Duration::from_millis(1);
/// How many calls a process makes one right after the other while its devices stay idle. The coordinator hears of
/// each later one before the next is made, if it has made a device of another process idle.
const CALLS_AT_SPEED: u64 = 64;
/// How long that takes.
const WORD_TIME: Duration = Duration::from_millis(1);
/// How long threads may take from one call to the next.
const COME_PATIENCE: Duration = Duration::from_millis(1);
/// Waiting calls that a report lists.
const LISTED_MAX: usize = 16;

impl<D: Driver> Member<D> {
    /// Does `step`, and says what the process does as soon as that is other than `seen`, or at `until`, or when
    /// something else is requested than what [`crate::cut::Cut::claim`] gave `asked` for.
    pub(super) fn run_step(
        &self,
        holder: u64,
        step: StepOrder,
        seen: SeenActivity,
        asked: u64,
        until: Instant,
    ) -> Reply {
        let taken = self.lifecycle.expect(MemberState::Offloading);
        match taken.and_then(|()| self.next_of(Progress::into_draining)) {
            Err(failure) => self.refuse(failure),
            Ok((mut draining, selection)) => {
                let watch = Watch { holder, asked, until };
                let activity = self.step_and_watch(&mut draining, step, seen, &watch);
                self.set_progress(Progress::Draining(draining, selection));
                match activity {
                    Ok(activity) => Reply::Activity(Box::new(activity)),
                    Err(failure) => self.refuse(failure),
                }
            }
        }
    }

    fn step_and_watch(
        &self,
        draining: &mut Draining<D>,
        step: StepOrder,
        seen: SeenActivity,
        watch: &Watch,
    ) -> Result<Activity, Failure> {
        let StepOrder { order, limits, calls } = step;
        if let Some(limits) = limits
            && !self.cut.hold(watch.holder, limits)
        {
            return Err(wrong_state("the hold ended with its holder".to_owned()));
        }
        match calls {
            Calls::None => {}
            Calls::Ready(count) => self.step_ready(draining, count, watch)?,
            Calls::Each(count) => self.step_each(draining, (count, None), watch)?,
            Calls::Turn(count) => self.step_each(draining, (count, Some(TURN_PATIENCE)), watch)?,
        }
        loop {
            let activity = self.activity(draining, order)?;
            if calls != Calls::None || activity.seen() != seen || self.is_over(watch) {
                return Ok(activity);
            }
            let left = watch.until.saturating_duration_since(Instant::now());
            draining.wait_for_change(left.min(LOOK_EVERY), self.calling_off.receiver());
        }
    }

    /// Lets all that wait make `count` calls; up to one after which the devices are idle in so much time, if any is given.
    fn step_each(
        &self,
        draining: &mut Draining<D>,
        (count, idle_within): (u32, Option<Duration>),
        watch: &Watch,
    ) -> Result<(), Failure> {
        for _ in 0..count {
            if self.is_over(watch) || !self.somebody_waits(draining, watch)? {
                break;
            }
            draining.step_all();
            self.wait_until(CALL_PATIENCE, draining, watch, Draining::is_clear);
            if let Some(patience) = idle_within
                && self.is_idle_soon(patience, draining, watch)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Lets threads that are ready make `count` calls in all, as long as the devices stay what they were.
    fn step_ready(
        &self,
        draining: &mut Draining<D>,
        count: u32,
        watch: &Watch,
    ) -> Result<(), Failure> {
        let was_idle = self.look(draining)?.is_idle;
        for _ in 0..count {
            if self.is_over(watch) || !self.somebody_waits(draining, watch)? {
                break;
            }
            let Some(slot) = draining.step_one() else { break };
            self.wait_until(CALL_PATIENCE, draining, watch, Draining::is_clear);
            let is_idle = self.is_idle_soon(BUSY_PATIENCE, draining, watch)?;
            if was_idle && !is_idle {
                draining.note_blocked(slot);
            }
            if is_idle != was_idle {
                break;
            }
            if draining.steps() > CALLS_AT_SPEED {
                self.wait_until(WORD_TIME, draining, watch, |_| false);
            }
        }
        Ok(())
    }

    /// Is there something else to do?
    fn is_over(&self, watch: &Watch) -> bool {
        Instant::now() >= watch.until
            || self.cut.is_asked_since(watch.asked)
            || self.calling_off.is_raised()
    }

    /// Does a thread wait that can be let in? Those that come in a moment count.
    fn somebody_waits(&self, draining: &Draining<D>, watch: &Watch) -> Result<bool, Failure> {
        let waits = |draining: &Draining<D>| !draining.pool().gate().waiting().is_empty();
        if !self.wait_until(COME_PATIENCE, draining, watch, waits) {
            return Ok(false);
        }
        if draining.wants_capture() {
            return Err(Failure {
                kind: FailureKind::InCapture,
                message: format!(
                    "process {} is about to capture a stream, and its devices wait for what comes then: pause again \
                     when the capture has ended",
                    std::process::id()
                ),
            });
        }
        Ok(true)
    }

    /// Are the devices idle before `patience` ends?
    fn is_idle_soon(
        &self,
        patience: Duration,
        draining: &mut Draining<D>,
        watch: &Watch,
    ) -> Result<bool, Failure> {
        let until = Instant::now() + patience;
        loop {
            if self.look(draining)?.is_idle {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over(watch) {
                return Ok(false);
            }
            draining.wait_for_change(left, self.calling_off.receiver());
        }
    }

    /// Waits for `happened`, for at most `patience`; says whether it has.
    fn wait_until(
        &self,
        patience: Duration,
        draining: &Draining<D>,
        watch: &Watch,
        happened: impl Fn(&Draining<D>) -> bool,
    ) -> bool {
        let until = Instant::now() + patience;
        while !happened(draining) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over(watch) {
                return false;
            }
            draining.wait_for_step(left);
        }
        true
    }

    /// What the devices do, as far as they can be asked now.
    fn look(&self, draining: &mut Draining<D>) -> Result<vmm_pool::Activity, Failure> {
        let looked = draining.look(|| self.captures().under_way());
        looked.map_err(|error| drain_failure(&error, &draining.pool().gate().waiting()))
    }

    fn activity(&self, draining: &mut Draining<D>, order: u64) -> Result<Activity, Failure> {
        // Before the devices: who comes out after a look at them is seen as inside.
        let cut = self.cut.report(self.captures().under_way());
        let looked = self.look(draining)?;
        let waiting = draining.pool().gate().waiting();
        let calls = waiting.iter().take(LISTED_MAX);
        Ok(Activity {
            order,
            cut,
            inside: looked.inside as u64,
            waiting: waiting.len() as u64,
            ready: draining.ready().len() as u64,
            calls: calls.map(|call| HeldCall::new(call.call.name(), call.waited)).collect(),
            busy: looked.busy.iter().map(ToString::to_string).collect(),
            is_idle: looked.is_idle,
            steps: draining.steps(),
        })
    }
}

/// For whom, and for how long.
struct Watch {
    holder: u64,
    asked: u64,
    until: Instant,
}
