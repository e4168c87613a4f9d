//! Streams and their order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::{Core, lock};
use crate::driver::sim::memory::Coded;
use crate::driver::sim::stream::{Stream, StreamKind, Work};
use crate::driver::{DeviceOrdinal, DriverCode, RawEvent, RawStream};

const STREAM_ID_FIRST: u64 = 0x5000_0000;
const STREAM_ID_STEP: u64 = 0x10;

/// An event, and the point of a stream that it stands for.
#[derive(Clone, Debug)]
struct Event {
    device: DeviceOrdinal,
    recorded: Option<(Arc<Stream>, u64)>,
}

#[derive(Debug)]
pub(super) struct Streams {
    pub(super) live: BTreeMap<u64, Arc<Stream>>,
    next: u64,
    pub(super) defaults: BTreeMap<i32, Arc<Stream>>,
    pub(super) threads: Vec<JoinHandle<()>>,
    events: BTreeMap<u64, Event>,
}

impl Streams {
    pub(super) fn new() -> Self {
        Self {
            live: BTreeMap::new(),
            next: STREAM_ID_FIRST,
            defaults: BTreeMap::new(),
            threads: Vec::new(),
            events: BTreeMap::new(),
        }
    }
}

impl Streams {
    pub(super) fn clear_events(&mut self) {
        self.events.clear();
    }
}

impl Core {
    /// Makes a stream.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `OUT_OF_MEMORY` when no thread can be started.
    pub fn new_stream(
        self: &Arc<Self>,
        device: DeviceOrdinal,
        kind: StreamKind,
    ) -> Coded<RawStream> {
        self.device(device)?;
        let mut streams = lock(&self.streams);
        Ok(self.start_stream(&mut streams, device, kind)?.id)
    }

    fn start_stream(
        self: &Arc<Self>,
        streams: &mut Streams,
        device: DeviceOrdinal,
        kind: StreamKind,
    ) -> Coded<Arc<Stream>> {
        let id = RawStream(streams.next);
        let (stream, thread) =
            Stream::start(self, id, device, kind).map_err(|_| DriverCode::OUT_OF_MEMORY)?;
        streams.next += STREAM_ID_STEP;
        streams.threads.retain(|thread| !thread.is_finished());
        streams.threads.push(thread);
        streams.live.insert(id.0, stream.clone());
        Ok(stream)
    }

    /// The default stream of `device`.
    ///
    /// # Errors
    /// As [`Self::new_stream`].
    pub fn default_stream(self: &Arc<Self>, device: DeviceOrdinal) -> Coded<RawStream> {
        self.device(device)?;
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.defaults.get(&device.0) {
            return Ok(stream.id);
        }
        let stream = self.start_stream(&mut streams, device, StreamKind::Default)?;
        streams.defaults.insert(device.0, stream.clone());
        Ok(stream.id)
    }

    fn stream(&self, stream: RawStream) -> Coded<Arc<Stream>> {
        lock(&self.streams).live.get(&stream.0).cloned().ok_or(DriverCode::INVALID_HANDLE)
    }

    /// The device of `stream`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn stream_device(&self, stream: RawStream) -> Coded<DeviceOrdinal> {
        Ok(self.stream(stream)?.device)
    }

    /// Ends a stream; its work still completes.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for no stream, or a default one.
    pub fn end_stream(&self, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        if entry.kind == StreamKind::Default {
            return Err(DriverCode::INVALID_HANDLE);
        }
        entry.end();
        lock(&self.streams).live.remove(&stream.0);
        Ok(())
    }

    /// How many streams there are, default ones not counted.
    pub(super) fn stream_count(&self) -> usize {
        let streams = lock(&self.streams);
        streams.live.values().filter(|stream| stream.kind != StreamKind::Default).count()
    }

    /// Submits work to a stream, after what the order against the default stream asks for.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn enqueue(&self, stream: RawStream, work: Work) -> Coded<()> {
        let entry = self.stream(stream)?;
        self.device_failure(entry.device)?;
        if entry.kind == StreamKind::NonBlocking {
            entry.submit(work);
            return Ok(());
        }
        let _order = lock(&self.submit);
        for other in self.ordered_before(&entry) {
            if let Some(point) = other.pending() {
                entry.submit(Arc::new(move |_| {
                    other.wait_until(point);
                    Ok(())
                }));
            }
        }
        entry.submit(work);
        Ok(())
    }

    /// The streams whose earlier work comes before new work of `stream`.
    fn ordered_before(&self, stream: &Stream) -> Vec<Arc<Stream>> {
        let wanted = match stream.kind {
            StreamKind::Default => StreamKind::Blocking,
            StreamKind::Blocking => StreamKind::Default,
            StreamKind::NonBlocking => return Vec::new(),
        };
        lock(&self.streams)
            .live
            .values()
            .filter(|other| other.device == stream.device && other.kind == wanted)
            .cloned()
            .collect()
    }

    /// Waits for the work of `stream`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn wait_stream(&self, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        if let Some(point) = entry.pending() {
            entry.wait_until(point);
        }
        self.device_failure(entry.device)
    }

    /// Is the work of `stream` done?
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn stream_idle(&self, stream: RawStream) -> Coded<bool> {
        let entry = self.stream(stream)?;
        self.device_failure(entry.device)?;
        Ok(entry.pending().is_none())
    }

    /// Makes an event, for streams of `device`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn new_event(&self, device: DeviceOrdinal) -> Coded<RawEvent> {
        self.device(device)?;
        let mut streams = lock(&self.streams);
        let id = streams.next;
        streams.next += STREAM_ID_STEP;
        streams.events.insert(id, Event { device, recorded: None });
        Ok(RawEvent(id))
    }

    /// Ends an event.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn end_event(&self, event: RawEvent) -> Coded<()> {
        lock(&self.streams).events.remove(&event.0).map(drop).ok_or(DriverCode::INVALID_HANDLE)
    }

    pub(super) fn event_count(&self) -> usize {
        lock(&self.streams).events.len()
    }

    /// Lets `event` stand for all work submitted to `stream` so far.
    ///
    /// # Errors
    /// `INVALID_HANDLE`, also for a stream of another device; the failure of earlier work on the device.
    pub fn record_event(&self, event: RawEvent, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        self.device_failure(entry.device)?;
        let mut streams = lock(&self.streams);
        let found = streams.events.get_mut(&event.0).filter(|found| found.device == entry.device);
        let point = entry.submitted();
        found.ok_or(DriverCode::INVALID_HANDLE)?.recorded = Some((entry, point));
        Ok(())
    }

    /// Waits for the work that `event` stands for.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn wait_event(&self, event: RawEvent) -> Coded<()> {
        let found = lock(&self.streams).events.get(&event.0).cloned();
        let found = found.ok_or(DriverCode::INVALID_HANDLE)?;
        if let Some((stream, point)) = found.recorded {
            stream.wait_until(point);
        }
        self.device_failure(found.device)
    }

    /// Waits for all work submitted to `device` by this process.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; the failure of earlier work on the device.
    pub fn wait_device(&self, device: DeviceOrdinal) -> Coded<()> {
        let points: Vec<_> = lock(&self.streams)
            .live
            .values()
            .filter(|stream| stream.device == device)
            .filter_map(|stream| Some((stream.clone(), stream.pending()?)))
            .collect();
        for (stream, point) in points {
            stream.wait_until(point);
        }
        self.device_failure(device)
    }
}
