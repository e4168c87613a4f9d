//! Events.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{Core, SimContext, Work};
use vmm_pool::driver::{DriverCode, RawStream};

use crate::abi::Coded;
use crate::capture::Capture;
use crate::sim::{Sim, lock};

const FIRST: u64 = 0x6200_0000;
const STEP: u64 = 0x10;
/// How often a wait looks whether the device has failed, in which case the event never comes.
const RECHECK: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub(crate) struct Events {
    live: BTreeMap<u64, Arc<Event>>,
    made: u64,
}

#[derive(Debug)]
pub(crate) struct Event {
    context: SimContext,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    recorded: u64,
    reached: u64,
    reached_at: Option<Instant>,
    /// The capture that the last record belongs to.
    capture: Option<Arc<Capture>>,
}

impl State {
    /// An event that was recorded last in a capture can be neither asked about nor waited for.
    fn check_not_captured(&self) -> Coded<()> {
        if self.capture.is_some() { Err(DriverCode::CAPTURED_EVENT) } else { Ok(()) }
    }
}

impl Event {
    fn reach(&self, point: u64) {
        let mut state = lock(&self.state);
        state.reached = state.reached.max(point);
        state.reached_at = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Waits until the record number `point` is reached.
    fn wait(&self, core: &Core, point: u64) -> Coded<()> {
        let mut state = lock(&self.state);
        while state.reached < point {
            core.device_failure(self.context.device)?;
            if core.is_closing() {
                return Err(DriverCode::DEINITIALIZED);
            }
            state =
                self.changed.wait_timeout(state, RECHECK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Sim {
    pub(crate) fn create_event(&self) -> Coded<u64> {
        let event = Arc::new(Event {
            context: self.current_context()?,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut events = lock(&self.events);
        let id = FIRST + events.made * STEP;
        events.made += 1;
        events.live.insert(id, event);
        Ok(id)
    }

    pub(crate) fn destroy_event(&self, event: u64) -> Coded<()> {
        lock(&self.events).live.remove(&event).map(drop).ok_or(DriverCode::INVALID_HANDLE)
    }

    fn event(&self, event: u64) -> Coded<Arc<Event>> {
        lock(&self.events).live.get(&event).cloned().ok_or(DriverCode::INVALID_HANDLE)
    }

    pub(crate) fn record_event(&self, event: u64, stream: RawStream) -> Coded<()> {
        let event = self.event(event)?;
        if event.context != self.core.stream_context(stream)? {
            return Err(DriverCode::INVALID_HANDLE);
        }
        let capture = self.capture_of(stream);
        let captured = capture.is_some();
        let point = {
            let mut state = lock(&event.state);
            state.capture = capture;
            if !captured {
                state.recorded += 1;
            }
            state.recorded
        };
        if captured {
            return Ok(());
        }
        self.core.enqueue(
            stream,
            Work::new(move |_| {
                event.reach(point);
                Ok(())
            }),
        )
    }

    /// Makes later work of `stream` wait for what `event` recorded last; in a capture, the stream joins.
    pub(crate) fn wait_event(&self, stream: RawStream, event: u64) -> Coded<()> {
        let event = self.event(event)?;
        let (point, capture) = {
            let state = lock(&event.state);
            (state.recorded, state.capture.clone())
        };
        if let Some(capture) = capture.filter(|capture| !capture.is_ended()) {
            return self.join_capture(stream, &capture);
        }
        self.submit(stream, Work::new(move |core| event.wait(core, point)))
    }

    pub(crate) fn query_event(&self, event: u64) -> Coded<()> {
        self.forbid_in_capture()?;
        self.is_reached(event)
    }

    /// The same for a call that captures allow.
    fn is_reached(&self, event: u64) -> Coded<()> {
        let event = self.event(event)?;
        self.core.device_failure(event.context.device)?;
        let state = lock(&event.state);
        state.check_not_captured()?;
        if state.reached < state.recorded {
            return Err(DriverCode::NOT_READY);
        }
        Ok(())
    }

    pub(crate) fn synchronize_event(&self, event: u64) -> Coded<()> {
        self.forbid_in_capture()?;
        let event = self.event(event)?;
        let point = {
            let state = lock(&event.state);
            state.check_not_captured()?;
            state.recorded
        };
        event.wait(&self.core, point)?;
        self.core.device_failure(event.context.device)
    }

    /// Milliseconds from `start` to `end`.
    pub(crate) fn elapsed_ms(&self, start: u64, end: u64) -> Coded<f32> {
        let mut times = [start, end].into_iter().map(|event| {
            self.is_reached(event)?;
            let event = self.event(event)?;
            let at = lock(&event.state).reached_at;
            at.ok_or(DriverCode::INVALID_HANDLE)
        });
        let (Some(start), Some(end)) = (times.next(), times.next()) else {
            unreachable!("two events give two times");
        };
        Ok(end?.saturating_duration_since(start?).as_secs_f32() * 1000.0)
    }
}
