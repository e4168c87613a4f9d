//! Functions by which libraries register memory with devices, unseen by the driver. They have the libraries' own names.
//! Registered memory stays in place until its registration ends (`sublet_registrations`).
//!
//! | library | functions | who uses them |
//! | --- | --- | --- |
//! | libibverbs | `ibv_reg_mr`, `ibv_reg_mr_iova`, `ibv_reg_mr_iova2`, `ibv_rereg_mr`, `ibv_dereg_mr` | NCCL, UCX, NVSHMEM, Mooncake, NIXL, through nvidia-peermem |
//! | libmlx5 | `mlx5dv_devx_umem_reg`, `mlx5dv_devx_umem_reg_ex`, `mlx5dv_devx_umem_dereg` | queues in device memory |
//! | libgdrapi | `gdr_pin_buffer`, `gdr_pin_buffer_v2`, `gdr_unpin_buffer`, `gdr_close` | NCCL, UCX, NVSHMEM |
//!
//! Registrations by a descriptor (`ibv_reg_dmabuf_mr`) are seen when the driver makes it, `cuMemGetHandleForAddressRange`.
//! Registrations by `cuFile` are not seen: a process that has its device file open is not paused (`attach::unseen_pins`).

mod gdrcopy;
mod mlx5;
mod verbs;

use std::ffi::{CStr, c_int};

use sublet_registrations::Key;
use sublet_registrations::registrations::NETWORK_CARD;
use vmm_pool::driver::{DeviceAddress, VaRange};

use crate::look::Names;
use crate::replaced::look_at;
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

pub(crate) use gdrcopy::{FILE as GDRCOPY_FILE, GDRCOPY};
pub(crate) use mlx5::MLX5;
pub(crate) use verbs::{FILE as VERBS_FILE, VERBS};

/// Runs `ours` in a process that has joined, and `plain`, the library's own call, in any other. Nothing unwinds into the
/// caller. If Sublet's code fails before the library was called, the library is called.
fn seen<T>(ours: impl FnOnce(&'static Member) -> T, plain: impl FnOnce() -> T) -> T {
    let Some(member) = runtime::member() else {
        return plain();
    };
    runtime::netted(|| ours(member)).unwrap_or_else(|_| {
        // A fault of Sublet. The library made the registration all the same, and a pause does not know of it. Do not pause
        // this process from now on.
        member.notes().add("a registration failed inside; please report this".to_owned());
        plain()
    })
}

/// As [`Registrations::register`](sublet_registrations::Registrations::register). Paged memory is first moved to the device, and
/// cannot leave before its registration is known. For memory that cannot be moved there, the library reports that it does not
/// exist.
fn registered<T>(
    member: &Member,
    range: VaRange,
    reason: &'static str,
    call: impl FnOnce() -> T,
    key: impl FnOnce(&T) -> Option<Key>,
) -> T {
    let _here = look_at("a registration", Names::Ranges(&[range]), std::ptr::null_mut());
    runtime::REGISTRATIONS.register(member, range, reason, call, key)
}

/// As [`registered`], for functions that create an object of the range. `key` identifies the object.
fn made(
    address: Pointer,
    length: usize,
    own: impl Fn() -> Pointer,
    key: fn(usize) -> Key,
) -> Pointer {
    let key = |made: &Pointer| (!made.is_null()).then(|| key(made.addr()));
    seen(|member| registered(member, range_of(address, length), NETWORK_CARD, &own, key), &own)
}

/// Ends the registration of `key` if the library does.
fn ended(key: Key, own: impl Fn() -> c_int) -> c_int {
    seen(|member| runtime::REGISTRATIONS.unregister(member, key, &own, |code| *code == 0), &own)
}

fn range_of(start: Pointer, size_bytes: usize) -> VaRange {
    VaRange::new(DeviceAddress(start.addr() as u64), size_bytes as u64)
}

/// Called for each copy of such a library that is found.
fn found(path: &CStr, is_watched: bool) {
    let path = path.to_string_lossy();
    if is_watched {
        tracing::debug!(%path, "registrations are watched");
    } else if let Some(member) = runtime::member() {
        // Sublet does not see the memory that the second library registers with a device. A pause would move this
        // memory while the device uses it. Use one library of this kind.
        member.notes().add(format!(
            "a second library of its kind, {path}, registers memory: a pause would move that memory while the device \
             uses it; keep one"
        ));
    }
}

/// The function for the case that no copy of the library has it: no memory is registered, or the function does not exist.
extern "C" fn nothing() -> usize {
    0
}

/// As [`nothing`], for functions that return an error number.
extern "C" fn no_library() -> c_int {
    libc::ENOSYS
}
