//! How much GPU memory a tenant may hold: asked, and changed while its processes run.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};
use std::path::Path;

use tenants::budget::{Budgets, gpus};
use tenants::coordinator::{BudgetReport, Coordinator, Options};
use tenants::error_text::chain;

use super::ARGUMENT;
use super::last_call::{budgeted, fail, guarded_length, refused};
use super::pausing::{code_of, run_dir, tenant_of, text};
use super::stats::answer;
use crate::runtime;

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
    guarded_length(|| {
        // SAFETY: as this function's caller promises.
        let Ok(coordinator) = (unsafe { coordinator_of(tenant) }) else {
            return -1;
        };
        match coordinator.budgets() {
            Ok(found) => {
                let report = found.unwrap_or_else(|| BudgetReport::none(coordinator.tenant()));
                // SAFETY: as this function's caller promises.
                unsafe { answer(&report, buffer, size) }
            }
            Err(error) => {
                refused(&error);
                -1
            }
        }
    })
}
