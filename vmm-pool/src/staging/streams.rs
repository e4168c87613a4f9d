//! Streams for copies.

#![expect(unsafe_code, reason = "ends streams through the driver")]

use crate::driver::{DeviceOrdinal, Driver, RawStream};
use crate::error::{Describe, PoolResult};
use crate::pool::Pool;

/// Two streams of one device, taken in turn, so that the next copy is queued while one runs.
#[derive(Debug)]
pub(crate) struct CopyStreams<'a, D: Driver> {
    pool: &'a Pool<D>,
    device: DeviceOrdinal,
    streams: [RawStream; 2],
    next: usize,
}

impl<'a, D: Driver> CopyStreams<'a, D> {
    /// Makes `device`'s context current on this thread and two streams in it.
    pub(crate) fn open(pool: &'a Pool<D>, device: DeviceOrdinal) -> PoolResult<Self> {
        let about = || "stream for copies".to_owned();
        let driver = pool.driver();
        driver.make_current(device).about(about, 0, Some(device))?;
        let first = driver.stream_create().about(about, 0, Some(device))?;
        match driver.stream_create() {
            Ok(second) => Ok(Self { pool, device, streams: [first, second], next: 0 }),
            Err(error) => {
                end_stream(pool, device, first);
                Err(error).about(about, 0, Some(device))
            }
        }
    }

    pub(crate) fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// The stream whose turn it is, after its earlier work is done.
    pub(crate) fn take_idle(&mut self) -> PoolResult<RawStream> {
        let stream = self.take();
        self.finish(stream)?;
        Ok(stream)
    }

    /// The stream whose turn it is.
    pub(crate) fn take(&mut self) -> RawStream {
        self.next = 1 - self.next;
        self.streams[self.next]
    }

    fn finish(&self, stream: RawStream) -> PoolResult<()> {
        let about = || "copies of contents".to_owned();
        let driver = self.pool.driver();
        driver.make_current(self.device).about(about, 0, Some(self.device))?;
        driver.stream_synchronize(stream).about(about, 0, Some(self.device))
    }

    /// Waits for both streams.
    pub(crate) fn finish_all(&self) -> PoolResult<()> {
        let first = self.finish(self.streams[0]);
        first.and(self.finish(self.streams[1]))
    }
}

impl<D: Driver> Drop for CopyStreams<'_, D> {
    fn drop(&mut self) {
        for stream in self.streams {
            end_stream(self.pool, self.device, stream);
        }
    }
}

/// Ends a stream of ours; files it when the driver keeps it.
fn end_stream<D: Driver>(pool: &Pool<D>, device: DeviceOrdinal, stream: RawStream) {
    // SAFETY: the stream is ours; its queued work completes before it ends.
    if let Err(error) = unsafe { pool.driver().stream_destroy(stream) } {
        tracing::error!(%error, device = device.0, "a copy stream stays until the next pause");
        pool.strays().streams.push((device, stream));
    }
}
