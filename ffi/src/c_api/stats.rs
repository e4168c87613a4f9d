//! The memory that processes hold, and how much a tenant may hold, as JSON; and the version.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};

use crate::command::Command;
use serde::Serialize;

use super::pausing::{act, name_of, report_of, text};
use crate::last_call::{ARGUMENT, REFUSED, fail, guarded_length, joined, refused, write_text};
use crate::runtime::Member;

/// Returns the version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes the JSON that `find` returns. If it fails, the answer is -1, and `find` has kept the reason.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
unsafe fn write_found(
    find: impl FnOnce() -> Result<String, c_int>,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    // SAFETY: as this function's caller promises.
    guarded_length(|| find().map_or(-1, |text| unsafe { write_text(&text, buffer, size) }))
}

/// Writes the value that `find` returns as JSON. If it fails, the answer is -1, and `find` has kept the reason.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
pub(super) unsafe fn answer<T: Serialize>(
    find: impl FnOnce() -> Result<T, c_int>,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    let as_text = |found| {
        serde_json::to_string(&found).map_err(|error| {
            fail(
                REFUSED,
                &format!("the budgets and their use could not be written as JSON: {error}"),
            )
        })
    };
    // SAFETY: as this function's caller promises.
    unsafe { write_found(|| as_text(find()?), buffer, size) }
}

/// Writes the memory that this process holds, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_stats_json(buffer: *mut c_char, size: usize) -> i64 {
    let find = || joined().map(Member::stats).map_err(|trouble| refused(&trouble));
    // SAFETY: as this function's caller promises.
    unsafe { answer(find, buffer, size) }
}

/// Writes the memory that every process of a tenant holds, as JSON.
///
/// # Safety
/// `tenant` is null or a terminated string; `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tenant_stats_json(
    tenant: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    // SAFETY: as this function's caller promises.
    let find = || report_of(Command::Stats { tenant: unsafe { name_of(tenant) }? });
    // SAFETY: as this function's caller promises.
    unsafe { write_found(find, buffer, size) }
}

/// Writes the names of all tenants, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tenants_json(buffer: *mut c_char, size: usize) -> i64 {
    // SAFETY: as this function's caller promises.
    unsafe { write_found(|| report_of(Command::Tenants {}), buffer, size) }
}

/// Changes how much GPU memory a tenant may hold.
///
/// # Safety
/// Both are null or terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_set_budget(tenant: *const c_char, budgets: *const c_char) -> c_int {
    act(|| {
        if budgets.is_null() {
            return Err(fail(ARGUMENT, "budgets are needed: say for example 0=40GiB, or none"));
        }
        // SAFETY: as this function's caller promises.
        let budgets = Some(unsafe { text(budgets, "the budgets") }?.to_owned());
        // SAFETY: as this function's caller promises.
        Ok(Command::Budget { tenant: unsafe { name_of(tenant) }?, budgets })
    })
}

/// Writes a tenant's budget and held memory on each GPU, as JSON.
///
/// # Safety
/// `tenant` is null or a terminated string; `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_budget_json(
    tenant: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    // SAFETY: as this function's caller promises.
    let find = || report_of(Command::Budget { tenant: unsafe { name_of(tenant) }?, budgets: None });
    // SAFETY: as this function's caller promises.
    unsafe { write_found(find, buffer, size) }
}
