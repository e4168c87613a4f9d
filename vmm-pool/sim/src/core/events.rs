//! Events.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Core, lock};
use crate::SimContext;
use crate::memory::Coded;
use crate::stream::{Mark, Work};
use sublet_driver::{DeviceOrdinal, DriverCode, RawEvent, RawStream};

const FIRST: u64 = 0x6000_0000;
const STEP: u64 = 0x10;

/// All events of a process.
#[derive(Debug, Default)]
pub(super) struct Events {
    live: BTreeMap<u64, Event>,
    made: u64,
}

#[derive(Clone, Debug)]
struct Event {
    context: SimContext,
    /// The point of a stream that the event stands for; `None` before the first record.
    mark: Option<Mark>,
}

impl Core {
    fn event(&self, event: RawEvent) -> Coded<Event> {
        lock(&self.events).live.get(&event.0).cloned().ok_or(DriverCode::INVALID_HANDLE)
    }

    pub(super) fn event_count(&self) -> usize {
        lock(&self.events).live.len()
    }

    /// Makes an event of the primary context of `device`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn new_event(self: &Arc<Self>, device: DeviceOrdinal) -> Coded<RawEvent> {
        self.device(device)?;
        let mut events = lock(&self.events);
        let id = FIRST + events.made * STEP;
        events.made += 1;
        events.live.insert(id, Event { context: device.into(), mark: None });
        Ok(RawEvent(id))
    }

    /// Ends an event.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn end_event(&self, event: RawEvent) -> Coded<()> {
        lock(&self.events).live.remove(&event.0).map(drop).ok_or(DriverCode::INVALID_HANDLE)
    }

    /// Makes `event` stand for the work of `stream` so far.
    ///
    /// # Errors
    /// `INVALID_HANDLE`, also for a stream of another context; the failure of earlier work on the device.
    pub fn record_event(&self, event: RawEvent, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        if self.event(event)?.context != entry.context {
            return Err(DriverCode::INVALID_HANDLE);
        }
        let mark = self.submit_to(&entry, Work::new(|_| Ok(())))?;
        let mut events = lock(&self.events);
        let known = events.live.get_mut(&event.0).ok_or(DriverCode::INVALID_HANDLE)?;
        known.mark = Some(mark);
        Ok(())
    }

    /// Is the work done that `event` stands for?
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn event_idle(&self, event: RawEvent) -> Coded<bool> {
        let Event { context, mark } = self.event(event)?;
        self.device_failure(context.device)?;
        let Some(mark) = mark else { return Ok(true) };
        self.called();
        let is_reached = mark.is_reached();
        if is_reached {
            mark.show();
        }
        Ok(is_reached)
    }

    /// Waits for the work that `event` stands for.
    ///
    /// # Errors
    /// As [`Self::event_idle`].
    pub fn wait_event(&self, event: RawEvent) -> Coded<()> {
        let Event { context, mark } = self.event(event)?;
        if let Some(mark) = mark {
            self.while_waiting(|| mark.show());
        }
        self.device_failure(context.device)
    }

    /// Makes later work of `stream` wait for the work that `event` stands for now.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the stream's device.
    pub fn order_behind(&self, stream: RawStream, event: RawEvent) -> Coded<()> {
        let entry = self.stream(stream)?;
        let mark = self.event(event)?.mark;
        self.device_failure(entry.context.device)?;
        if let Some(mark) = mark {
            entry.come_behind(mark);
        }
        Ok(())
    }
}
