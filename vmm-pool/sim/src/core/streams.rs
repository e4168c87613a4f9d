//! Streams and their order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::{Core, lock};
use crate::SimContext;
use crate::memory::Coded;
use crate::stream::{Mark, Stream, StreamKind, Work};
use sublet_driver::{DeviceOrdinal, DriverCode, RawStream, VaRange};

const STREAM_ID_FIRST: u64 = 0x5000_0000;
const STREAM_ID_STEP: u64 = 0x10;

#[derive(Debug)]
pub(super) struct Streams {
    pub(super) live: BTreeMap<u64, Arc<Stream>>,
    /// Streams that have ended before their work was done. A wait for their context waits for them too.
    ending: Vec<Arc<Stream>>,
    next: u64,
    /// Values of streams that have ended, reused last in first out as the real driver does.
    ended: Vec<u64>,
    pub(super) defaults: BTreeMap<SimContext, Arc<Stream>>,
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
    /// Makes a stream of a context. A device stands for its primary context.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `OUT_OF_MEMORY` when no thread can be started.
    pub fn new_stream(
        self: &Arc<Self>,
        context: impl Into<SimContext>,
        kind: StreamKind,
    ) -> Coded<RawStream> {
        let context = context.into();
        self.device(context.device)?;
        let mut streams = lock(&self.streams);
        Ok(self.start_stream(&mut streams, context, kind)?.id)
    }

    fn start_stream(
        self: &Arc<Self>,
        streams: &mut Streams,
        context: SimContext,
        kind: StreamKind,
    ) -> Coded<Arc<Stream>> {
        let reused = streams.ended.last().copied();
        let id = RawStream(reused.unwrap_or(streams.next));
        let (stream, thread) =
            Stream::start(self, id, context, kind).map_err(|_| DriverCode::OUT_OF_MEMORY)?;
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

    /// Returns the default stream of a context.
    ///
    /// # Errors
    /// As [`Self::new_stream`].
    pub fn default_stream(self: &Arc<Self>, context: impl Into<SimContext>) -> Coded<RawStream> {
        let context = context.into();
        self.device(context.device)?;
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.defaults.get(&context) {
            return Ok(stream.id);
        }
        let stream = self.start_stream(&mut streams, context, StreamKind::Default)?;
        streams.defaults.insert(context, stream.clone());
        Ok(stream.id)
    }

    pub(super) fn stream(&self, stream: RawStream) -> Coded<Arc<Stream>> {
        lock(&self.streams).live.get(&stream.0).cloned().ok_or(DriverCode::INVALID_HANDLE)
    }

    /// Returns the device of `stream`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn stream_device(&self, stream: RawStream) -> Coded<DeviceOrdinal> {
        Ok(self.stream_context(stream)?.device)
    }

    /// Returns the context of `stream`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn stream_context(&self, stream: RawStream) -> Coded<SimContext> {
        Ok(self.stream(stream)?.context)
    }

    /// Returns the order of `stream` against others.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn stream_kind(&self, stream: RawStream) -> Coded<StreamKind> {
        Ok(self.stream(stream)?.kind)
    }

    /// Ends a stream; its work still completes.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for a value that is no stream, or for a default stream.
    pub fn end_stream(&self, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        if entry.kind == StreamKind::Default {
            return Err(DriverCode::INVALID_HANDLE);
        }
        entry.end();
        let mut streams = lock(&self.streams);
        if let Some(ended) = streams.live.remove(&stream.0) {
            streams.ended.push(stream.0);
            streams.ending.retain(|stream| stream.uses_anything());
            streams.ending.push(ended);
        }
        Ok(())
    }

    /// Counts the streams, default ones left out.
    pub(super) fn stream_count(&self) -> usize {
        let streams = lock(&self.streams);
        streams.live.values().filter(|stream| stream.kind != StreamKind::Default).count()
    }

    /// Submits work to a stream, behind the work that the default stream's order puts before it.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn enqueue(&self, stream: RawStream, work: Work) -> Coded<()> {
        self.submit_to(&self.stream(stream)?, work).map(drop)
    }

    /// Does the same as [`Self::enqueue`]. Returns the point of the stream at which the work is done.
    pub(super) fn submit_to(&self, entry: &Arc<Stream>, work: Work) -> Coded<Mark> {
        self.device_failure(entry.context.device)?;
        self.called();
        let mut others = self.all_streams().into_iter().filter(|other| other.id != entry.id);
        let behind = entry.behind();
        if let Some(other) = others.find(|other| other.races_with(&work, behind.of(other))) {
            tracing::error!(
                ?work,
                ?other,
                ?entry,
                "two streams use the same bytes without an order"
            );
            self.last_words.ended(work.first_range(), || {
                format!("{entry:?} gets {work:?}, without an order with {}", other.uses_in_words())
            });
            self.fail_device(entry.context.device, DriverCode::ILLEGAL_ADDRESS);
        }
        if entry.kind == StreamKind::NonBlocking {
            return Ok(entry.submit(work));
        }
        let _order = lock(&self.submit);
        for other in self.ordered_before(entry) {
            if let Some(point) = other.pending() {
                entry.submit(Work::waiting(move || other.wait_until(point)));
            }
        }
        Ok(entry.submit(work))
    }

    /// Returns the streams whose earlier work comes before new work of `stream`.
    fn ordered_before(&self, stream: &Stream) -> Vec<Arc<Stream>> {
        let wanted = match stream.kind {
            StreamKind::Default => StreamKind::Blocking,
            StreamKind::Blocking => StreamKind::Default,
            StreamKind::NonBlocking => return Vec::new(),
        };
        lock(&self.streams)
            .live
            .values()
            .filter(|other| other.context == stream.context && other.kind == wanted)
            .cloned()
            .collect()
    }

    /// Returns all streams. Those that have ended are among them until their work is known to be done.
    fn all_streams(&self) -> Vec<Arc<Stream>> {
        let streams = lock(&self.streams);
        streams.live.values().chain(&streams.ending).cloned().collect()
    }

    /// Ends the context of every device with running or queued work that uses a part of `range`: that memory goes now, and
    /// nobody waits for the work.
    pub(super) fn pull_from_under_work(&self, range: VaRange) {
        for stream in self.all_streams().into_iter().filter(|stream| stream.uses(range)) {
            tracing::error!(?range, ?stream, "memory goes that work still uses");
            self.last_words
                .ended(range, || format!("memory goes that is used by {}", stream.uses_in_words()));
            self.fail_device(stream.context.device, DriverCode::ILLEGAL_ADDRESS);
        }
    }

    /// Waits for the work of `stream`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn wait_stream(&self, stream: RawStream) -> Coded<()> {
        let entry = self.stream(stream)?;
        self.while_waiting(|| entry.mark().show());
        self.device_failure(entry.context.device)
    }

    /// Is work of `stream` queued or running? For tests: it does not count as a caller's knowledge that work is done.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    pub fn has_work(&self, stream: RawStream) -> Coded<bool> {
        Ok(self.stream(stream)?.pending().is_some())
    }

    /// Is the work of `stream` done?
    ///
    /// # Errors
    /// `INVALID_HANDLE`; the failure of earlier work on the device.
    pub fn stream_idle(&self, stream: RawStream) -> Coded<bool> {
        let entry = self.stream(stream)?;
        self.device_failure(entry.context.device)?;
        self.called();
        Ok(entry.show_if_idle())
    }

    /// Waits for all work submitted to `device` by this process.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; the failure of earlier work on the device.
    pub fn wait_device(&self, device: DeviceOrdinal) -> Coded<()> {
        self.wait_for(|stream| stream.context.device == device);
        self.device_failure(device)
    }

    /// Waits for all work submitted to one context.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; the failure of earlier work on the device.
    pub fn wait_context(&self, context: impl Into<SimContext>) -> Coded<()> {
        let context = context.into();
        self.wait_for(|stream| stream.context == context);
        self.device_failure(context.device)
    }

    fn wait_for(&self, is_meant: impl Fn(&Stream) -> bool) {
        let meant = self.all_streams().into_iter().filter(|stream| is_meant(stream));
        let marks: Vec<_> = meant.map(|stream| stream.mark()).collect();
        self.while_waiting(|| marks.iter().for_each(Mark::show));
    }

    /// Ends all streams of a context that ends.
    pub fn end_streams_of(&self, context: SimContext) {
        let mut streams = lock(&self.streams);
        streams.defaults.remove(&context);
        let of_context = streams.live.extract_if(.., |_, stream| stream.context == context);
        let gone: Vec<_> = of_context.collect();
        for (value, stream) in gone {
            stream.end();
            streams.ended.push(value);
        }
    }
}
