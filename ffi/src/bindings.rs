//! The C interface, generated from `include/sublet.h` by `cargo xtask bindgen`.
//!
//! Never edited: change the header and run the command. What becomes of the functions says the macro `functions` of the crate
//! that has this module.

#![allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    clippy::expect_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_debug_implementations,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "generated from C, whose names and forms it keeps"
)]

pub const SUBLET_OK: u32 = 0;
pub const SUBLET_ERROR_ARGUMENT: u32 = 1;
pub const SUBLET_ERROR_NOT_JOINED: u32 = 2;
pub const SUBLET_ERROR_RETRY: u32 = 3;
pub const SUBLET_ERROR_REFUSED: u32 = 4;
pub const SUBLET_ERROR_OUT_OF_DEVICE_MEMORY: u32 = 5;
pub const SUBLET_ERROR_OUT_OF_HOST_MEMORY: u32 = 6;
pub const SUBLET_ERROR_LOST: u32 = 7;
pub const SUBLET_CONTENTS_KEEP: u32 = 0;
pub const SUBLET_CONTENTS_DISCARD: u32 = 1;
pub const SUBLET_CONTENTS_FILE: u32 = 2;
pub const SUBLET_RUNS_WITHOUT: u32 = 256;
pub const SUBLET_WHOSE_TENANT: u32 = 0;
pub const SUBLET_WHOSE_PROCESS: u32 = 1;
pub type sublet_is_called_off = ::core::option::Option<
    unsafe extern "C" fn(context: *mut ::core::ffi::c_void) -> ::core::ffi::c_int,
>;
pub type sublet_unused_source =
    ::core::option::Option<unsafe extern "C" fn(context: *mut ::core::ffi::c_void, token: u64)>;
functions! {
    pub fn sublet_version() -> *const ::core::ffi::c_char;
    pub fn sublet_last_error() -> *const ::core::ffi::c_char;
    pub fn sublet_last_error_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn sublet_last_report_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn sublet_command(json: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_pause_tenant(
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_resume_tenant(
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_resume_in_turn(
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_swap_tenants(
        from: *const ::core::ffi::c_char,
        to: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_swap_tags(
        from: *const ::core::ffi::c_char,
        out_tags: *const *const ::core::ffi::c_char,
        out_count: usize,
        to: *const ::core::ffi::c_char,
        in_tags: *const *const ::core::ffi::c_char,
        in_count: usize,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_switch_tenant(
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_turn_begin(wait_ms: u32) -> ::core::ffi::c_int;
    pub fn sublet_turn_end() -> ::core::ffi::c_int;
    pub fn sublet_ask_while_waiting(
        is_called_off: sublet_is_called_off,
        context: *mut ::core::ffi::c_void,
    ) -> ::core::ffi::c_int;
    pub fn sublet_prepare_tenant(
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_set_budget(
        tenant: *const ::core::ffi::c_char,
        budgets: *const ::core::ffi::c_char,
    ) -> ::core::ffi::c_int;
    pub fn sublet_budget_json(
        tenant: *const ::core::ffi::c_char,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64;
    pub fn sublet_pause_tags(
        tenant: *const ::core::ffi::c_char,
        tags: *const *const ::core::ffi::c_char,
        count: usize,
        whose: ::core::ffi::c_int,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_resume_tags(
        tenant: *const ::core::ffi::c_char,
        tags: *const *const ::core::ffi::c_char,
        count: usize,
        whose: ::core::ffi::c_int,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_is_paused() -> ::core::ffi::c_int;
    pub fn sublet_tag_is_paused(tag: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_changes() -> u64;
    pub fn sublet_region_begin(
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int;
    pub fn sublet_region_begin_on(
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
        device: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int;
    pub fn sublet_region_begin_none() -> ::core::ffi::c_int;
    pub fn sublet_region_end() -> ::core::ffi::c_int;
    pub fn sublet_region_begin_all_threads(
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
        device: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int;
    pub fn sublet_region_end_all_threads() -> ::core::ffi::c_int;
    pub fn sublet_set_file_dir(path: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_host_copy(
        address: u64,
        size_bytes: u64,
        host: *mut *const ::core::ffi::c_void,
    ) -> ::core::ffi::c_int;
    pub fn sublet_host_copy_out(
        address: u64,
        size_bytes: u64,
        target: *mut ::core::ffi::c_void,
    ) -> ::core::ffi::c_int;
    pub fn sublet_set_unused_source(
        source: sublet_unused_source,
        context: *mut ::core::ffi::c_void,
    ) -> ::core::ffi::c_int;
    pub fn sublet_unused(
        token: u64,
        starts: *const u64,
        sizes: *const u64,
        count: usize,
    ) -> ::core::ffi::c_int;
    pub fn sublet_page_open(
        device: ::core::ffi::c_int,
        window_bytes: u64,
        chunk_bytes: u64,
        frames_bytes: u64,
        pager: *mut u64,
    ) -> ::core::ffi::c_int;
    pub fn sublet_page_close(pager: u64) -> ::core::ffi::c_int;
    pub fn sublet_page_region(pager: u64, tag: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_page_alloc(pager: u64, size_bytes: u64, span: *mut u64) -> ::core::ffi::c_int;
    pub fn sublet_page_free(pager: u64, span: u64) -> ::core::ffi::c_int;
    pub fn sublet_page_acquire(
        pager: u64,
        spans: *const u64,
        count: usize,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_page_release(pager: u64, spans: *const u64, count: usize) -> ::core::ffi::c_int;
    pub fn sublet_page_announce(pager: u64, spans: *const u64, count: usize) -> ::core::ffi::c_int;
    pub fn sublet_page_flush(pager: u64, timeout_ms: u32) -> ::core::ffi::c_int;
    pub fn sublet_page_set_frames(
        pager: u64,
        frames_bytes: u64,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_page_plan_json(pager: u64, buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn sublet_page_json(pager: u64, buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn sublet_torch_malloc(
        size: isize,
        device: ::core::ffi::c_int,
        stream: *mut ::core::ffi::c_void,
    ) -> *mut ::core::ffi::c_void;
    pub fn sublet_torch_free(
        ptr: *mut ::core::ffi::c_void,
        size: isize,
        device: ::core::ffi::c_int,
        stream: *mut ::core::ffi::c_void,
    );
    pub fn sublet_stats_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn sublet_tenant_stats_json(
        tenant: *const ::core::ffi::c_char,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64;
    pub fn sublet_tenants_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn ncclPause(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int;
    pub fn ncclResume(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int;
    pub fn ncclMemStats() -> ::core::ffi::c_int;
    pub fn ncclSetGroupID(id: ::core::ffi::c_int) -> ::core::ffi::c_int;
    pub fn ncclGetGroupID(id: *mut ::core::ffi::c_int) -> ::core::ffi::c_int;
    pub fn sublet_set_family(family: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_attach(tenant: *const ::core::ffi::c_char) -> ::core::ffi::c_int;
    pub fn sublet_attach_report_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
}
