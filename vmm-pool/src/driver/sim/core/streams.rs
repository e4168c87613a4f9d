//! Streams and their order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::{Core, lock};
use crate::driver::sim::memory::Coded;
use crate::driver::sim::stream::{Stream, StreamKind, Work};
use crate::driver::{DeviceOrdinal, DriverCode, RawStream};

const STREAM_ID_FIRST: u64 = 0x5000_0000;
const STREAM_ID_STEP: u64 = 0x10;

#[derive(Debug)]
pub(super) struct Streams {
    pub(super) live: BTreeMap<u64, Arc<Stream>>,
    /// Those that have ended before their work was done. Who waits for their device waits for it too.
    ending: Vec<Arc<Stream>>,
    next: u64,
    /// Values of streams that have ended, reused last in first out as the real driver does.
    ended: Vec<u64>,
    pub(super) defaults: BTreeMap<i32, Arc<Stream>>,
    pub(super) threads: Vec<JoinHandle<()>>,
}

impl Streams {
    pub(super) fn new() -> Self {
        Self {
            live: BTreeMap::new(),
            ending: Vec::new(),
            next: STREAM_ID_FIRST,
            ended: Vec::new(),
            defaults: BTreeMap::new(),
            threads: Vec::new(),
        }
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
        let reused = streams.ended.last().copied();
        let id = RawStream(reused.unwrap_or(streams.next));
        let (stream, thread) =
            Stream::start(self, id, device, kind).map_err(|_| DriverCode::OUT_OF_MEMORY)?;
        if reused.is_some() {
            streams.ended.pop();
        } else {
            streams.next += STREAM_ID_STEP;
        }
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

    /// How `stream` is ordered against others.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn stream_kind(&self, stream: RawStream) -> Coded<StreamKind> {
        Ok(self.stream(stream)?.kind)
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
        let mut streams = lock(&self.streams);
        if let Some(ended) = streams.live.remove(&stream.0) {
            streams.ended.push(stream.0);
            streams.ending.retain(|stream| stream.pending().is_some());
            streams.ending.push(ended);
        }
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

    /// Waits for all work submitted to `device` by this process.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; the failure of earlier work on the device.
    pub fn wait_device(&self, device: DeviceOrdinal) -> Coded<()> {
        let points: Vec<_> = {
            let streams = lock(&self.streams);
            let of_device =
                streams.live.values().chain(&streams.ending).filter(|found| found.device == device);
            of_device.filter_map(|stream| Some((stream.clone(), stream.pending()?))).collect()
        };
        for (stream, point) in points {
            stream.wait_until(point);
        }
        self.device_failure(device)
    }
}
