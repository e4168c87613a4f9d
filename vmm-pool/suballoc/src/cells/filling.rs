//! Zeros in memory that one cell had before and another is to get.

#![expect(unsafe_code, reason = "fills device memory through the driver")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use vmm_pool::driver::{
    DeviceOrdinal, Driver, DriverCode, DriverError, DriverOp, DriverResult, RawStream, VaRange,
};
use vmm_pool::{Describe, Entered, PoolResult};

/// The longest wait for a fill. An idle device clears a terabyte in a second.
const FILL_MAX: Duration = Duration::from_mins(1);

/// Fills `range` with zeros, on a thread of ours: the caller's context and captures stay as they are. Calls `on_late` if the
/// fill may still happen after this call has returned.
///
/// # Errors
/// [`vmm_pool::PoolError::Driver`], with `NOT_READY` if there is no thread, or if the fill takes longer than [`FILL_MAX`].
pub(super) fn clear<D: Driver>(
    entered: &Entered<'_, D>,
    range: VaRange,
    device: Option<DeviceOrdinal>,
    on_late: impl FnOnce(),
) -> PoolResult<()> {
    let about = || format!("filling of memory at {}, to be used for something else", range.start);
    let late = DriverError { op: DriverOp::StreamSynchronize, code: DriverCode::NOT_READY };
    let place = device.ok_or(late).about(about, range.size_bytes, device)?;
    let (tell, told) = crossbeam_channel::bounded(1);
    let driver = Arc::clone(entered.pool().driver());
    let begun = vmm_pool::threads::spawn(
        "sublet-fill",
        move || {
            let filled = clear_on_this_thread(driver.as_ref(), range, place);
            let _nobody_waits = tell.send(filled);
        },
        |_| {},
    );
    let outcome = match begun.map(|()| told.recv_timeout(FILL_MAX)) {
        Ok(Ok((outcome, left))) => {
            if let Some(stream) = left {
                entered.pool().deferred().end_stream_later(place, stream);
            }
            outcome
        }
        Ok(Err(RecvTimeoutError::Timeout)) => {
            on_late();
            Err(late)
        }
        Ok(Err(RecvTimeoutError::Disconnected)) | Err(_) => Err(late),
    };
    outcome.about(about, range.size_bytes, device)
}

/// Clears `range` on the calling thread. Also returns the stream, if the driver would not end it.
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
    // SAFETY: the range is mapped, and stays so: its slab lives, since the cell is held until the fill has ended. Nobody may
    // use these addresses before the caller's call has returned, or at all if that call did not wait for the end.
    let filled = unsafe { driver.fill_with_zeros(range, stream) };
    let outcome = filled.and_then(|()| driver.stream_synchronize(stream));
    // SAFETY: the stream is ours, and nobody queues anything there any more.
    let ended = unsafe { driver.stream_destroy(stream) };
    (outcome, ended.is_err().then_some(stream))
}
