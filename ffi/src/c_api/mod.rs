//! `include/sublet.h`, function by function. The header is the source of truth.
//!
//! * [`pausing`]: pausing and resuming, whole or by tag.
//! * [`budgets`]: how much GPU memory a tenant may hold.
//! * [`turns`]: getting the GPUs from others, and turns on them.
//! * [`regions`]: which memory belongs to which tag.
//! * [`contents`]: contents while they are offloaded, and contents that the application does not need.
//! * [`paging`]: addresses whose contents are on the device by turns.
//! * [`stats`]: the memory that processes hold, as JSON.
//! * [`attach`]: coming under Sublet without `LD_PRELOAD`.
//! * [`last_call`]: the error and the report of each thread's last call.
//! * [`amem`]: the `ncclPause` family.

pub mod amem;
pub mod attach;
pub mod budgets;
pub mod contents;
pub mod last_call;
pub mod paging;
pub mod pausing;
pub mod regions;
pub mod stats;
pub mod turns;

use std::ffi::{c_char, c_int, c_void};

use crate::{bindings, pluggable};

pub(crate) const OK: c_int = code(bindings::SUBLET_OK);
pub(crate) const ARGUMENT: c_int = code(bindings::SUBLET_ERROR_ARGUMENT);
pub(crate) const NOT_JOINED: c_int = code(bindings::SUBLET_ERROR_NOT_JOINED);
pub(crate) const RETRY: c_int = code(bindings::SUBLET_ERROR_RETRY);
pub(crate) const REFUSED: c_int = code(bindings::SUBLET_ERROR_REFUSED);
pub(crate) const OUT_OF_DEVICE_MEMORY: c_int = code(bindings::SUBLET_ERROR_OUT_OF_DEVICE_MEMORY);
pub(crate) const OUT_OF_HOST_MEMORY: c_int = code(bindings::SUBLET_ERROR_OUT_OF_HOST_MEMORY);
pub(crate) const LOST: c_int = code(bindings::SUBLET_ERROR_LOST);

/// A constant of the header as the type that its functions return.
const fn code(value: u32) -> c_int {
    // CAST: the header's codes are small.
    value.cast_signed()
}

/// Fails to compile when a function here and its declaration in the header differ.
macro_rules! agrees {
    ($($name:ident in $module:ident: $type:ty;)*) => {
        const _: () = {
            $(
                let _: [$type; 2] = [bindings::$name, $module::$name];
            )*
        };
    };
}

agrees! {
    sublet_version in stats: unsafe extern "C" fn() -> *const c_char;
    sublet_last_error in last_call: unsafe extern "C" fn() -> *const c_char;
    sublet_last_error_json in last_call: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    sublet_last_report_json in last_call: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    sublet_pause_tenant in pausing: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_resume_tenant in pausing: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_swap_tenants in pausing: unsafe extern "C" fn(*const c_char, *const c_char, u32) -> c_int;
    sublet_swap_tags in pausing: unsafe extern "C" fn(
        *const c_char, *const *const c_char, usize, *const c_char, *const *const c_char, usize, u32
    ) -> c_int;
    sublet_pause_tags in pausing:
        unsafe extern "C" fn(*const c_char, *const *const c_char, usize, c_int, u32) -> c_int;
    sublet_resume_tags in pausing:
        unsafe extern "C" fn(*const c_char, *const *const c_char, usize, c_int, u32) -> c_int;
    sublet_resume_in_turn in pausing: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_switch_tenant in turns: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_turn_begin in turns: unsafe extern "C" fn(u32) -> c_int;
    sublet_turn_end in turns: unsafe extern "C" fn() -> c_int;
    sublet_prepare_tenant in pausing: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_set_budget in budgets: unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
    sublet_budget_json in budgets:
        unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> i64;
    sublet_is_paused in pausing: unsafe extern "C" fn() -> c_int;
    sublet_tag_is_paused in pausing: unsafe extern "C" fn(*const c_char) -> c_int;
    sublet_changes in pausing: unsafe extern "C" fn() -> u64;
    sublet_region_begin in regions: unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    sublet_region_begin_on in regions: unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
    sublet_region_begin_none in regions: unsafe extern "C" fn() -> c_int;
    sublet_region_end in regions: unsafe extern "C" fn() -> c_int;
    sublet_region_begin_all_threads in regions:
        unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
    sublet_region_end_all_threads in regions: unsafe extern "C" fn() -> c_int;
    sublet_host_copy in contents:
        unsafe extern "C" fn(u64, u64, *mut *const c_void) -> c_int;
    sublet_set_file_dir in contents: unsafe extern "C" fn(*const c_char) -> c_int;
    sublet_host_copy_out in contents: unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;
    sublet_set_unused_source in contents:
        unsafe extern "C" fn(bindings::sublet_unused_source, *mut c_void) -> c_int;
    sublet_unused in contents:
        unsafe extern "C" fn(u64, *const u64, *const u64, usize) -> c_int;
    sublet_page_open in paging: unsafe extern "C" fn(c_int, u64, u64, u64, *mut u64) -> c_int;
    sublet_page_close in paging: unsafe extern "C" fn(u64) -> c_int;
    sublet_page_alloc in paging: unsafe extern "C" fn(u64, u64, *mut u64) -> c_int;
    sublet_page_free in paging: unsafe extern "C" fn(u64, u64) -> c_int;
    sublet_page_acquire in paging:
        unsafe extern "C" fn(u64, *const u64, usize, u64, u32) -> c_int;
    sublet_page_release in paging:
        unsafe extern "C" fn(u64, *const u64, usize, u64, c_int) -> c_int;
    sublet_page_announce in paging: unsafe extern "C" fn(u64, *const u64, usize) -> c_int;
    sublet_page_flush in paging: unsafe extern "C" fn(u64, u32) -> c_int;
    sublet_page_set_frames in paging: unsafe extern "C" fn(u64, u64, u32) -> c_int;
    sublet_page_json in paging: unsafe extern "C" fn(u64, *mut c_char, usize) -> i64;
    sublet_torch_malloc in pluggable: unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
    sublet_torch_free in pluggable: unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);
    sublet_stats_json in stats: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    sublet_tenant_stats_json in stats:
        unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> i64;
    sublet_tenants_json in stats: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    sublet_set_family in attach: unsafe extern "C" fn(*const c_char) -> c_int;
    sublet_attach in attach: unsafe extern "C" fn(*const c_char) -> c_int;
    sublet_attach_report_json in attach: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    ncclPause in amem: unsafe extern "C" fn(*mut c_void) -> c_int;
    ncclResume in amem: unsafe extern "C" fn(*mut c_void) -> c_int;
    ncclMemStats in amem: unsafe extern "C" fn() -> c_int;
    ncclSetGroupID in amem: unsafe extern "C" fn(c_int) -> c_int;
    ncclGetGroupID in amem: unsafe extern "C" fn(*mut c_int) -> c_int;
}
