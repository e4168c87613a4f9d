//! The memory that processes hold, and how much a tenant may hold, as JSON; and the version.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};
use std::path::Path;

use tenants::budget::{Budgets, gpus};
use tenants::coordinator::{BudgetReport, Coordinator, Options};
use tenants::error_text::chain;

use super::last_call::{budgeted, fail, guarded_length, not_joined, refused, write_text};
use super::pausing::{code_of, run_dir, tenant_of, text};
use super::{ARGUMENT, REFUSED};
use crate::runtime;

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes what `find` finds as JSON. If it finds nothing, the answer is -1, and `find` has kept the reason.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
pub(super) unsafe fn answer<T: serde::Serialize>(
    find: impl FnOnce() -> Result<T, c_int>,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    guarded_length(|| {
        let Ok(found) = find() else { return -1 };
        match serde_json::to_string(&found) {
            // SAFETY: as this function's caller promises.
            Ok(text) => unsafe { write_text(&text, buffer, size) },
            Err(error) => {
                fail(REFUSED, &format!("what is held could not be written as JSON: {error}"));
                -1
            }
        }
    })
}

/// The memory that this process holds, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_stats_json(buffer: *mut c_char, size: usize) -> i64 {
    let find = || runtime::member().map(tenants::member::Member::stats).ok_or_else(not_joined);
    // SAFETY: as this function's caller promises.
    unsafe { answer(find, buffer, size) }
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
    let find = || {
        // SAFETY: as this function's caller promises.
        let (tenant, run_dir) = (unsafe { tenant_of(tenant) }?, run_dir()?);
        let stats = Coordinator::new(run_dir, tenant, Options::default()).stats();
        stats.map_err(|error| fail(ARGUMENT, &chain(&error)))
    };
    // SAFETY: as this function's caller promises.
    unsafe { answer(find, buffer, size) }
}

/// The names of the tenants there are, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_tenants_json(buffer: *mut c_char, size: usize) -> i64 {
    let find = || {
        let tenants = run_dir()?.live_tenants().map_err(|error| fail(REFUSED, &chain(&error)))?;
        Ok(tenants.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    // SAFETY: as this function's caller promises.
    unsafe { answer(find, buffer, size) }
}

/// # Safety
/// `tenant` is null or a terminated string.
unsafe fn coordinator_of(tenant: *const c_char) -> Result<Coordinator, c_int> {
    runtime::start_log();
    // SAFETY: as this function's caller promises.
    let tenant = unsafe { tenant_of(tenant) }?;
    Ok(Coordinator::new(run_dir()?, tenant, Options::default()))
}

/// Changes how much GPU memory a tenant may hold.
///
/// # Safety
/// Both are null or terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_set_budget(tenant: *const c_char, budgets: *const c_char) -> c_int {
    code_of(|| {
        if budgets.is_null() {
            return Err(fail(ARGUMENT, "budgets are needed: say for example 0=40GiB, or none"));
        }
        // SAFETY: as this function's caller promises.
        let given = unsafe { text(budgets, "the budgets") }?;
        let given: Budgets = given.parse().map_err(|error| fail(ARGUMENT, &chain(&error)))?;
        let on_machine = given.check(Path::new(gpus::NODE_GPUS));
        on_machine.map_err(|error| fail(ARGUMENT, &chain(&error)))?;
        // SAFETY: as this function's caller promises.
        let coordinator = unsafe { coordinator_of(tenant) }?;
        Ok(budgeted(coordinator.change_budgets(&given)))
    })
}

/// What a tenant may hold of each GPU, and holds, as JSON.
///
/// # Safety
/// `tenant` is null or a terminated string; `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_budget_json(
    tenant: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    let find = || {
        // SAFETY: as this function's caller promises.
        let coordinator = unsafe { coordinator_of(tenant) }?;
        let found = coordinator.budgets().map_err(|error| refused(&error))?;
        Ok(found.unwrap_or_else(|| BudgetReport::none(coordinator.tenant())))
    };
    // SAFETY: as this function's caller promises.
    unsafe { answer(find, buffer, size) }
}
