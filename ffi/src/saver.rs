//! The part of `torch_memory_saver`'s interface in memory that is about to be made.

#![expect(unsafe_code, reason = "calls the driver")]

use sublet_torch_allocator::{Environment, Saver};
use vmm_pool::driver::DriverCode;

use crate::driver::call_driver;
use crate::last_call::{ARGUMENT, fail_aloud};
use crate::{environment, runtime};

/// The interface's state in this process.
pub(crate) static SAVER: Saver = Saver::new(|| Environment::read(environment::variable));

/// Before memory of any kind: files it under the calling thread's settings.
pub(crate) fn settle() {
    let _settled = runtime::netted(|| {
        if let Err(error) = SAVER.settle(runtime::member()) {
            fail_aloud(ARGUMENT, &format!("memory of this thread cannot be paused: {error}"));
        }
    });
}

/// Before plain memory: [`settle`], then true when `size_bytes` more on the current device are to fail as if there were no
/// memory.
pub(crate) fn refuses(size_bytes: usize) -> bool {
    settle();
    SAVER.refuses(size_bytes as u64, free_bytes)
}

/// Free memory of the current device.
fn free_bytes() -> Option<u64> {
    let (mut free, mut total) = (0_usize, 0_usize);
    let places = (&raw mut free, &raw mut total);
    let code = call_driver!(cuMemGetInfo_v2(places.0 => *mut usize, places.1 => *mut usize));
    (code == DriverCode::SUCCESS.0).then_some(free as u64)
}
