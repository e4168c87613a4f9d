//! The calls that the driver has refused, as driver 580 writes them down (`CUDA_LOG_FILE`, CUDA 12.9 and later).
//!
//! Its memory of them has a fault, seen on driver 580.159: NVML starts part of the driver. In a child that is forked after that, the
//! memory is made again by the first refusal, `cuInit` drops it if it was made before, and the next refusal is written through a null
//! pointer.

#![expect(unsafe_code, reason = "ends the process as the driver's own fault would")]

use std::env;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};

use vmm_pool::driver::DriverCode;

use crate::codes::name_of;
use crate::sim;

/// The process in which NVML has started part of the driver; 0 where none has.
static MANAGED: AtomicI32 = AtomicI32::new(0);
/// The process that was refused something before `cuInit`, and had been forked after NVML had started; 0 where none was.
static EARLY: AtomicI32 = AtomicI32::new(0);

/// NVML has asked the driver for its own tables in this process.
pub(crate) fn note_management() {
    MANAGED.store(sim::process_id(), Ordering::Relaxed);
}

/// Writes a refused call down.
pub(crate) fn note(symbol: &str, code: DriverCode) {
    if [DriverCode::NOT_INITIALIZED, DriverCode::DEINITIALIZED, DriverCode::NOT_READY]
        .contains(&code)
    {
        return;
    }
    let own = sim::process_id();
    let managed = MANAGED.load(Ordering::Relaxed);
    if sim::get().is_err() {
        if managed != 0 && managed != own {
            EARLY.store(own, Ordering::Relaxed);
        }
    } else if EARLY.load(Ordering::Relaxed) == own {
        // SAFETY: the process ends by it, as it would on the real driver.
        unsafe { libc::raise(libc::SIGSEGV) };
    }
    let Some(path) = env::var_os("CUDA_LOG_FILE") else {
        return;
    };
    let name = name_of(code.0).unwrap_or(c"unknown").to_string_lossy();
    if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
        let _not_written = writeln!(file, "{symbol}: {name}");
    }
}
