//! Clearing addresses that are used again: new memory holds nothing of what was there.

#![expect(unsafe_code, reason = "fills device memory through the driver")]

use std::sync::Arc;
use std::time::Duration;

use crate::driver::{
    DeviceOrdinal, Driver, DriverCode, DriverError, DriverOp, DriverResult, RawStream, VaRange,
};
use crate::error::{Describe, PoolResult};
use crate::pool::{Entered, Use};

/// How long it may take; a device clears a terabyte in a second, where nothing keeps it busy.
const TIMEOUT: Duration = Duration::from_secs(10);

impl<D: Driver> Entered<'_, D, Use> {
    /// Fills `range` with zeros, on a thread of ours: the caller's context and captures stay as they are.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`], with `NOT_READY` where the device does not come to it in time.
    pub(super) fn clear(&self, range: VaRange, device: Option<DeviceOrdinal>) -> PoolResult<()> {
        let about = || format!("clearing of memory at {}, to be used again", range.start);
        let late = DriverError { op: DriverOp::StreamSynchronize, code: DriverCode::NOT_READY };
        let place = device.ok_or(late).about(about, range.size_bytes, device)?;
        let (tell, told) = crossbeam_channel::bounded(1);
        let driver = Arc::clone(&self.pool.driver);
        let thread = std::thread::Builder::new().name("sublet-clear".to_owned());
        let begun = thread.spawn(move || {
            let _nobody_waits = tell.send(clear_on_this_thread(driver.as_ref(), range, place));
        });
        let outcome = match begun.map(|_| told.recv_timeout(TIMEOUT)) {
            Ok(Ok((outcome, left))) => {
                if let Some(stream) = left {
                    self.pool.deferred.end_stream_later(place, stream);
                }
                outcome
            }
            Ok(Err(_)) | Err(_) => Err(late),
        };
        outcome.about(about, range.size_bytes, device)
    }
}

/// Says also which stream the driver would not end.
fn clear_on_this_thread<D: Driver>(
    driver: &D,
    range: VaRange,
    device: DeviceOrdinal,
) -> (DriverResult<()>, Option<RawStream>) {
    let current = driver.make_current(device).and_then(|()| driver.stand_beside_captures());
    let stream = match current.and_then(|()| driver.stream_create()) {
        Ok(stream) => stream,
        Err(error) => return (Err(error), None),
    };
    // SAFETY: the range is mapped, and stays so: the caller is inside the gate and its slab lives, and nobody has been given these
    // addresses to use.
    let filled = unsafe { driver.fill_with_zeros(range, stream) };
    let outcome = filled.and_then(|()| driver.stream_synchronize(stream));
    // SAFETY: the stream is ours, and nobody queues anything there any more.
    let ended = unsafe { driver.stream_destroy(stream) };
    (outcome, ended.is_err().then_some(stream))
}
