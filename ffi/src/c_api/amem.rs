//! The pause functions of `AMem` NCCL, with the names, types and results that its callers expect.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::io::Write as _;

use crate::command::Command;
use vmm_pool::PoolReport;

use super::pausing::act;
use crate::last_call::{OK, fail_aloud, guarded};
use crate::{environment, runtime};

const NCCL_SUCCESS: c_int = 0;
const NCCL_UNHANDLED_CUDA_ERROR: c_int = 1;
const NCCL_INVALID_ARGUMENT: c_int = 4;
const NCCL_INVALID_USAGE: c_int = 5;

/// Runs a command that all processes of the tenant make, and returns its result. Sublet's own callers find a more exact code in
/// `sublet_last_error_json`. Others read only the result, so the message goes to the log.
fn together(command: Command) -> c_int {
    match act(|| Ok(command)) {
        OK => NCCL_SUCCESS,
        _ => NCCL_UNHANDLED_CUDA_ERROR,
    }
}

/// Pauses the tenant once every process of it has called this.
///
/// # Safety
/// The argument is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclPause(_comm: *mut c_void) -> c_int {
    together(Command::PauseTogether {})
}

/// Resumes the tenant once every process of it has called this.
///
/// # Safety
/// The argument is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclResume(_comm: *mut c_void) -> c_int {
    together(Command::ResumeTogether {})
}

/// Prints this process's device memory, even if there is none yet.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemStats() -> c_int {
    guarded(|| {
        let pool = runtime::member().map(|member| member.stats().pool).unwrap_or_default();
        let text = mem_stats(&pool);
        match std::io::stdout().lock().write_all(text.as_bytes()) {
            Ok(()) => NCCL_SUCCESS,
            Err(error) => fail_aloud(NCCL_INVALID_USAGE, &format!("standard output: {error}")),
        }
    })
}

fn mem_stats(pool: &PoolReport) -> String {
    let mut text = String::new();
    let (mut own, mut resident, mut imported) = (0, 0, 0);
    for device in &pool.devices {
        for class in &device.classes {
            let tag = if class.tag.is_empty() { "-" } else { &class.tag };
            let _written = writeln!(
                text,
                "sublet: {} library={} tag={} contents={:?} own={} resident={} imported={}",
                device.device,
                class.library,
                tag,
                class.contents,
                class.own_bytes,
                class.resident_bytes,
                class.imported_bytes
            );
            own += class.own_bytes;
            resident += class.resident_bytes;
            imported += class.imported_bytes;
        }
        for pinned in &device.pinned {
            let _written = writeln!(
                text,
                "sublet: {} stays={} in {} allocations: {}",
                device.device, pinned.bytes, pinned.count, pinned.reason
            );
        }
    }
    let _written =
        writeln!(text, "sublet: total own={own} resident={resident} imported={imported}");
    text
}

/// Sets the group of this process.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSetGroupID(id: c_int) -> c_int {
    guarded(|| {
        if id < 0 {
            return fail_aloud(NCCL_INVALID_ARGUMENT, &format!("{id} is no group: give 0 or more"));
        }
        if runtime::member().is_some() {
            let message = "the group is fixed by the first device memory: set it before that";
            return fail_aloud(NCCL_UNHANDLED_CUDA_ERROR, message);
        }
        environment::set_group_id(id);
        NCCL_SUCCESS
    })
}

/// Writes the group of this process.
///
/// # Safety
/// `id` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetGroupID(id: *mut c_int) -> c_int {
    guarded(|| {
        if id.is_null() {
            return fail_aloud(NCCL_INVALID_ARGUMENT, "ncclGetGroupID needs somewhere to write");
        }
        // SAFETY: checked not to be null; the caller's for one integer.
        unsafe { id.write(environment::current().group_id()) };
        NCCL_SUCCESS
    })
}
