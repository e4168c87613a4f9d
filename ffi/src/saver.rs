//! The part of `torch_memory_saver`'s interface that affects new allocations.

#![expect(unsafe_code, reason = "calls the driver")]

use sublet_torch_allocator::{Environment, Saver};
use vmm_pool::driver::DriverCode;

use crate::driver::call_driver;
use crate::last_call::{ARGUMENT, fail_aloud};
use crate::{environment, runtime};

/// The interface's state in this process.
pub(crate) static SAVER: Saver = Saver::new(|| Environment::read(environment::variable));

/// Called before an allocation of any kind: applies the calling thread's settings to it.
pub(crate) fn settle() {
    let _settled = runtime::netted(|| {
        if let Err(error) = SAVER.settle(runtime::member()) {
            fail_aloud(ARGUMENT, &format!("memory of this thread cannot be paused: {error}"));
        }
    });
}

/// Called before an allocation of plain memory. Calls [`settle`], then returns true if `size_bytes` more on the current device
/// are to fail as out of memory.
pub(crate) fn refuses(size_bytes: usize) -> bool {
    settle();
    SAVER.refuses(size_bytes as u64, free_bytes)
}

/// Returns the free memory of the current device.
fn free_bytes() -> Option<u64> {
    let (mut free, mut total) = (0_usize, 0_usize);
    let places = (&raw mut free, &raw mut total);
    let code = call_driver!(cuMemGetInfo_v2(places.0 => *mut usize, places.1 => *mut usize));
    (code == DriverCode::SUCCESS.0).then_some(free as u64)
}
