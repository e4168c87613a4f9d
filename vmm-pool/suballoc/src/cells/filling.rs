//! Zeros in memory that a cell had before, and another is to have.

#![expect(unsafe_code, reason = "fills device memory through the driver")]

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::driver::{
    DeviceOrdinal, Driver, DriverCode, DriverError, DriverOp, DriverResult, RawStream, VaRange,
};
use vmm_pool::{Describe, Entered, PoolResult};

/// The interval between two reports of a wait for a fill. A device clears a terabyte in a second, where nothing keeps
/// it busy. The wait ends with the fill and not before: a later fill would write to memory that is in use by then.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Fills `range` with zeros, on a thread of ours: the caller's context and captures stay as they are.
///
/// # Errors
/// [`vmm_pool::PoolError::Driver`], with `NOT_READY` where there is no thread to be had.
pub(super) fn clear<D: Driver>(
    entered: &Entered<'_, D>,
    range: VaRange,
    device: Option<DeviceOrdinal>,
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
    let outcome = match begun.map(|()| wait_for(&told, range)) {
        Ok(Some((outcome, left))) => {
            if let Some(stream) = left {
                entered.pool().deferred().end_stream_later(place, stream);
            }
            outcome
        }
        Ok(None) | Err(_) => Err(late),
    };
    outcome.about(about, range.size_bytes, device)
}

/// Waits for the outcome that the thread sends; none where the thread has ended without a word.
fn wait_for<T>(told: &crossbeam_channel::Receiver<T>, range: VaRange) -> Option<T> {
    loop {
        match told.recv_timeout(TOLD_EVERY) {
            Ok(said) => return Some(said),
            Err(crossbeam_channel::RecvTimeoutError::Disconnected) => return None,
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                tracing::warn!(address = %range.start, bytes = range.size_bytes, "a device does not come to filling memory that is to be used for something else");
            }
        }
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
    // SAFETY: the range is mapped, and stays so: the caller is inside the gate and its slab lives, and nobody may use these addresses
    // before the caller's call has come back.
    let filled = unsafe { driver.fill_with_zeros(range, stream) };
    let outcome = filled.and_then(|()| driver.stream_synchronize(stream));
    // SAFETY: the stream is ours, and nobody queues anything there any more.
    let ended = unsafe { driver.stream_destroy(stream) };
    (outcome, ended.is_err().then_some(stream))
}
