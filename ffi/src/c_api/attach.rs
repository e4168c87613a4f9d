//! The attach to Sublet without `LD_PRELOAD`.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};

use tenants::identity::{FamilyName, TenantName};

use super::pausing::{code_of, name_of, text};
use super::stats::answer;
use crate::attach::{self, Refusal};
use crate::last_call::{ARGUMENT, OK, REFUSED, fail};
use crate::runtime;

/// Attaches this running process to Sublet.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_attach(tenant: *const c_char) -> c_int {
    code_of(|| {
        runtime::start_log();
        // SAFETY: as this function's caller promises.
        let chosen = unsafe { name_of(tenant) }?.map(|name| TenantName::new(&name)).transpose();
        let chosen = chosen.map_err(|error| fail(ARGUMENT, &error.to_string()))?;
        Ok(match attach::attach(chosen) {
            Ok(()) => OK,
            Err(Refusal::OtherTenant(reason)) => fail(ARGUMENT, &reason),
            Err(Refusal::Impossible(reason)) => fail(REFUSED, reason),
        })
    })
}

/// Sets the family of this process.
///
/// # Safety
/// `family` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_set_family(family: *const c_char) -> c_int {
    code_of(|| {
        // SAFETY: as this function's caller promises.
        let name = unsafe { text(family, "the family's name") }?;
        let chosen = FamilyName::new(name).map_err(|error| error.to_string());
        let chosen = chosen.and_then(runtime::choose_family);
        chosen.map(|()| OK).map_err(|reason| fail(ARGUMENT, &reason))
    })
}

/// Writes the report of the attach, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_attach_report_json(buffer: *mut c_char, size: usize) -> i64 {
    // SAFETY: as this function's caller promises.
    unsafe { answer(|| Ok(attach::report()), buffer, size) }
}
