//! Makes nodes, for programs that bring this library along.

#![expect(unsafe_code, reason = "exports a C function")]

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt as _;

use vmm_pool::driver::sim::SimNode;

/// Makes a node in the directory `dir`, which must not hold one, with `count` devices of `capacity_bytes` each. Returns 0, or
/// the system's error number. May be called from any thread, before `cuInit` too, and does not wait.
///
/// # Safety
/// `dir` points to a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn simcuda_make_node(
    dir: *const c_char,
    count: usize,
    capacity_bytes: u64,
) -> c_int {
    // SAFETY: the caller promises it.
    let dir = OsStr::from_bytes(unsafe { CStr::from_ptr(dir) }.to_bytes());
    match SimNode::create(dir, &vec![capacity_bytes; count]) {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
    }
}
