//! The state of a pause with a shut gate, while calls may still be under way and devices may have work.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Select};

use super::leaving::Undone;
use super::still::{Failed, Quiesced, ShutGate};
use crate::driver::{Driver, DriverCode, DriverError};
use crate::gate::{Passage, WaitingCall};
use crate::pool::Pool;
use crate::waits::{Question, Waited, WorkLeft};

/// The longest interval between two checks for threads inside: calls leave without taking a lock.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The gate is shut, except for one call of each waiting thread ([`Draining::step_all`]). Calls may be under way, and
/// the devices may have work. Dropping this puts the gate back to its mode before.
#[derive(Debug)]
#[must_use = "dropping it puts the gate where it was"]
pub struct Draining<D: Driver> {
    /// The shut gate. It becomes a proof only when all threads are out and the devices are idle.
    shut: ShutGate<D>,
    /// The question whether the devices have finished the work that was launched before the last call was let in.
    question: Option<Question>,
    is_idle: bool,
    waits: usize,
    steps: u64,
    /// The slots of threads whose work may keep a device busy. No device waits for what these threads launch next on
    /// the same streams. Empty while the devices are idle.
    blocked: BTreeSet<u64>,
}

/// The activity of a process behind its shut gate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// The number of threads inside a call.
    pub inside: usize,
    /// The places that have work left. Empty while a thread is inside: then no place is asked.
    pub busy: Vec<Waited>,
    /// True if nobody is inside, and no device has work left.
    pub is_idle: bool,
}

/// The reason why the devices did not finish in time. The gate is still shut.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The GPU still had work at the deadline. Much work is queued, or a kernel never ends. The pause was undone, and
    /// the job runs. Pause between two steps, or with a longer `--timeout`.
    #[error("the devices did not finish in time")]
    Deadline {
        /// The last known activity.
        seen: Activity,
    },
    /// Another process of the tenant failed, so this one stopped its wait. The pause was undone. Look at the reason
    /// of the other process.
    #[error("the wait for the devices was called off")]
    CalledOff,
    /// At least so many CUDA streams are being captured, and a wait for the GPU would end the capture. The job runs
    /// on. Pause again after the capture.
    #[error("{count} stream(s) are being captured")]
    InCapture {
        /// The number of streams that are known to be under capture.
        count: usize,
    },
    /// The system gave no thread that waits for the GPU. The pause was undone, and the job runs. Raise the limit of
    /// threads (`ulimit -u`).
    #[error("no thread to wait for {place} with: {source}")]
    NoThread {
        /// The place that needed a thread.
        place: Waited,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A driver call failed while Sublet waited for the GPU, or work of the job itself has failed. The driver's code
    /// stands first. If the job fails too, its next call reports the same code.
    #[error("{source}: waiting for {place}")]
    Driver {
        /// The place that was waited for.
        place: Waited,
        /// The call and its code.
        #[source]
        source: DriverError,
    },
}

impl<D: Driver> Draining<D> {
    /// Makes the value for a gate that was open: all memory is on its devices, except memory that is set aside.
    pub(super) fn new(shut: ShutGate<D>) -> Self {
        // Nobody knows which threads' work is on the devices.
        let blocked = shut.pool().gate().threads().into_iter().collect();
        Self { shut, question: None, is_idle: false, waits: 0, steps: 0, blocked }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        self.shut.pool()
    }

    /// Is nobody inside a call?
    pub fn is_clear(&self) -> bool {
        self.pool().gate().inside() == 0
    }

    /// Waits until nobody is inside a call. A message on `called_off` ends the wait.
    ///
    /// # Errors
    /// [`DrainError::Deadline`], [`DrainError::CalledOff`].
    pub fn clear(
        &mut self,
        deadline: Instant,
        called_off: &Receiver<()>,
    ) -> Result<(), DrainError> {
        let look = |draining: &mut Self| {
            let inside = draining.pool().gate().inside();
            Ok(Activity { inside, ..Activity::default() })
        };
        self.wait_until(deadline, called_off, look, |seen| seen.inside == 0)
    }

    /// Checks the activity after each change, until it `is_enough`.
    fn wait_until(
        &mut self,
        deadline: Instant,
        called_off: &Receiver<()>,
        mut look: impl FnMut(&mut Self) -> Result<Activity, DrainError>,
        is_enough: impl Fn(&Activity) -> bool,
    ) -> Result<(), DrainError> {
        loop {
            let seen = look(self)?;
            if is_enough(&seen) {
                return Ok(());
            }
            if !called_off.is_empty() {
                return Err(DrainError::CalledOff);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DrainError::Deadline { seen });
            }
            self.wait_for_change(left, called_off);
        }
    }

    /// Returns the number of calls that were let in so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Lets each waiting thread make one call. Returns how many threads that are. No capture begins: see
    /// [`Draining::wants_capture`].
    pub fn step_all(&mut self) -> usize {
        self.step(|_| true)
    }

    /// Lets one of the ready threads, the one that has waited longest, make one call. Returns its slot.
    pub fn step_one(&mut self) -> Option<u64> {
        let slot = self.ready().first().map(|call| call.slot)?;
        (self.step(|waiting| waiting == slot) > 0).then_some(slot)
    }

    fn step(&mut self, chosen: impl Fn(u64) -> bool) -> usize {
        let count = self.pool().gate().step(chosen);
        self.steps += count as u64;
        if count > 0 {
            self.is_idle = false;
            self.question = None;
        }
        count
    }

    /// Returns the waiting threads whose next launch a device may wait for, the longest wait first. If the devices are
    /// idle, these are all waiting threads. Otherwise they are the threads that have not made the devices busy since
    /// they were idle.
    pub fn ready(&self) -> Vec<WaitingCall> {
        let waiting = self.pool().gate().waiting().into_iter();
        let is_ready =
            |call: &WaitingCall| call.passage.can_step() && !self.blocked.contains(&call.slot);
        waiting.filter(is_ready).collect()
    }

    /// Records that the call of the thread of `slot`, which was let in, has made an idle device busy.
    pub fn note_blocked(&mut self, slot: u64) {
        self.blocked.insert(slot);
    }

    /// Does a thread wait to begin a stream capture? No step lets it in: a wait for a device would end the capture.
    pub fn wants_capture(&self) -> bool {
        self.pool().gate().waiting().iter().any(|call| call.passage == Passage::Capture)
    }

    /// Returns the activity of the process. When nobody is inside, the devices are asked whether they are idle: those
    /// that can access memory of the pool, and the application's own contexts. Does not block;
    /// [`Draining::wait_for_change`] waits for the time to look again. `captures` returns the number of streams under
    /// capture. It is called once nobody is inside, so that it sees a capture that the last call has begun.
    ///
    /// # Errors
    /// [`DrainError::InCapture`], with no capture disturbed; [`DrainError::NoThread`], [`DrainError::Driver`].
    ///
    /// # Driver calls
    /// `cuCtxSynchronize` for each, on separate threads.
    pub fn look(&mut self, captures: impl FnOnce() -> usize) -> Result<Activity, DrainError> {
        let inside = self.pool().gate().inside();
        if inside > 0 {
            self.is_idle = false;
            self.question = None;
            return Ok(Activity { inside, ..Activity::default() });
        }
        let count = captures();
        if count > 0 {
            return Err(DrainError::InCapture { count });
        }
        if self.is_idle {
            return Ok(Activity { is_idle: true, ..Activity::default() });
        }
        let question = if let Some(question) = self.question.take() {
            question
        } else {
            let devices = self.pool().devices_at_work().into_iter().map(Waited::Device);
            let own = (self.pool().own_contexts)().into_iter().map(Waited::OwnContext);
            let places: Vec<_> = devices.chain(own).collect();
            self.waits += places.len();
            let asked = self.pool().waits().ask(places);
            asked.map_err(|(place, source)| DrainError::NoThread { place, source })?
        };
        match self.pool().waits().look(&question) {
            WorkLeft::Idle => {
                self.is_idle = true;
                self.blocked.clear();
                Ok(Activity { is_idle: true, ..Activity::default() })
            }
            WorkLeft::Busy(busy) => {
                self.question = Some(question);
                Ok(Activity { busy, ..Activity::default() })
            }
            // This capture is older than Sublet's work in the process, so nobody has counted it.
            WorkLeft::Failed(_, source) if source.code == DriverCode::STREAM_CAPTURE_IMPLICIT => {
                Err(DrainError::InCapture { count: 1 })
            }
            WorkLeft::Failed(place, source) => Err(DrainError::Driver { place, source }),
        }
    }

    /// Waits until a device is idle, or a thread comes out or to the gate, for at most `time`. A message on
    /// `called_off` ends the wait. May return early.
    pub fn wait_for_change(&self, time: Duration, called_off: &Receiver<()>) {
        // Without a question to the devices there is no answer to wait for. Threads inside at the last look may be out
        // by now.
        if self.question.is_none() || !self.is_clear() {
            // After a missed wake-up, the next look comes in time.
            self.pool().gate().wait_for_change(time.min(LOOK_EVERY));
            return;
        }
        let ended = self.pool().waits().ended();
        let mut either = Select::new();
        either.recv(ended);
        either.recv(called_off);
        // The message on `called_off` stays there, because others read it too.
        if either.ready_timeout(time).is_ok() {
            let _taken = ended.try_recv();
        }
    }

    /// Waits until a thread comes to the gate, goes in or comes out, for at most `time`. May return early.
    pub fn wait_for_step(&self, time: Duration) {
        self.pool().gate().wait_for_change(time.min(LOOK_EVERY));
    }

    /// Waits until nobody is inside and the devices have no work left. From then on importers are given nothing. A
    /// message on `called_off` ends the wait. No stream may be under capture.
    ///
    /// Each device has a separate thread that waits for it, because nothing can cancel a wait inside the driver. At
    /// `deadline` such a wait goes on without a listener, and ends with the work.
    ///
    /// # Errors
    /// [`DrainError`], with the [`Draining`], for another try or to be dropped.
    ///
    /// # Driver calls
    /// As [`Draining::look`]. The number of waits since the gate was shut is returned with the proof.
    pub fn drain(
        mut self,
        deadline: Instant,
        called_off: &Receiver<()>,
    ) -> Result<(Quiesced<D>, usize), Failed<Self, DrainError>> {
        let look = |draining: &mut Self| draining.look(|| 0);
        if let Err(error) = self.wait_until(deadline, called_off, look, |seen| seen.is_idle) {
            return Err(Failed::new(self, error));
        }
        let Self { shut, waits, .. } = self;
        Ok((Quiesced::of_idle(shut), waits))
    }

    /// Gives the pause up.
    pub fn reopen(self) -> Undone<D> {
        self.shut.reopen()
    }
}
