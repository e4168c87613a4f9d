//! The C interface as Rust sees it, generated from `include/sublet.h` by `cargo xtask bindgen`.
//!
//! Never edited: change the header and run the command.

#![allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_code,
    reason = "generated from C, whose names and forms it keeps"
)]

pub const SUBLET_OK: u32 = 0;
pub const SUBLET_ERROR_ARGUMENT: u32 = 1;
pub const SUBLET_ERROR_NOT_JOINED: u32 = 2;
pub const SUBLET_ERROR_RETRY: u32 = 3;
pub const SUBLET_ERROR_REFUSED: u32 = 4;
pub const SUBLET_ERROR_OUT_OF_DEVICE_MEMORY: u32 = 5;
pub const SUBLET_CONTENTS_KEEP: u32 = 0;
pub const SUBLET_CONTENTS_DISCARD: u32 = 1;
unsafe extern "C" {
    pub fn sublet_version() -> *const ::core::ffi::c_char;
    pub fn sublet_last_error() -> *const ::core::ffi::c_char;
    pub fn sublet_pause_tenant(
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_resume_tenant(
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int;
    pub fn sublet_is_paused() -> ::core::ffi::c_int;
    pub fn sublet_region_begin(
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int;
    pub fn sublet_region_end() -> ::core::ffi::c_int;
    pub fn sublet_stats_json(buffer: *mut ::core::ffi::c_char, size: usize) -> i64;
    pub fn ncclPause(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int;
    pub fn ncclResume(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int;
    pub fn ncclMemStats() -> ::core::ffi::c_int;
    pub fn ncclSetGroupID(id: ::core::ffi::c_int) -> ::core::ffi::c_int;
    pub fn ncclGetGroupID(id: *mut ::core::ffi::c_int) -> ::core::ffi::c_int;
}
