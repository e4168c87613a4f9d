//! The memory that processes hold, as JSON; and the version.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::c_char;

use tenants::coordinator::{Coordinator, Options};
use tenants::error_text::chain;
use tenants::identity::TenantName;

use super::last_call::{fail, guarded_length, not_joined, write_text};
use super::pausing::{run_dir, tenant_of};
use super::{ARGUMENT, REFUSED};
use crate::runtime;

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes `value` as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
pub(super) unsafe fn answer(
    value: &impl serde::Serialize,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    match serde_json::to_string(value) {
        // SAFETY: as this function's caller promises.
        Ok(text) => unsafe { write_text(&text, buffer, size) },
        Err(error) => {
            fail(REFUSED, &format!("what is held could not be written as JSON: {error}"));
            -1
        }
    }
}

/// The memory that this process holds, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_stats_json(buffer: *mut c_char, size: usize) -> i64 {
    guarded_length(|| {
        let Some(member) = runtime::member() else {
            not_joined();
            return -1;
        };
        // SAFETY: as this function's caller promises.
        unsafe { answer(&member.stats(), buffer, size) }
    })
}

/// The memory that every process of a tenant holds, as JSON.
///
/// # Safety
/// `tenant` is null or a terminated string; `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tenant_stats_json(
    tenant: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    guarded_length(|| {
        // SAFETY: as this function's caller promises.
        let (Ok(tenant), Ok(run_dir)) = (unsafe { tenant_of(tenant) }, run_dir()) else {
            return -1;
        };
        match Coordinator::new(run_dir, tenant, Options::default()).stats() {
            // SAFETY: as this function's caller promises.
            Ok(stats) => unsafe { answer(&stats, buffer, size) },
            Err(error) => {
                fail(ARGUMENT, &chain(&error));
                -1
            }
        }
    })
}

/// The names of the tenants there are, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tenants_json(buffer: *mut c_char, size: usize) -> i64 {
    guarded_length(|| {
        let Ok(run_dir) = run_dir() else {
            return -1;
        };
        match run_dir.live_tenants() {
            Ok(tenants) => {
                let names: Vec<&str> = tenants.iter().map(TenantName::as_str).collect();
                // SAFETY: as this function's caller promises.
                unsafe { answer(&names, buffer, size) }
            }
            Err(error) => {
                fail(REFUSED, &chain(&error));
                -1
            }
        }
    })
}
