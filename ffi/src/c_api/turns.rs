//! Getting the GPUs from others, and turns on them.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tenants::switching::{self, SwitchOptions, Turn, TurnOptions};
use tenants::wire::MemberState;

use super::last_call::{fail, switched};
use super::pausing::{code_of, run_dir, tenant_of};
use super::{ARGUMENT, OK};
use crate::runtime;

/// How long a turn is waited for where nothing is said.
const WAIT: Duration = Duration::from_mins(10);

/// Turns of this process that have begun and not ended.
static TURNS: Mutex<Vec<Turn>> = Mutex::new(Vec::new());

fn is_paused() -> bool {
    let is_away = |state| matches!(state, MemberState::Paused | MemberState::Deep);
    runtime::member().is_some_and(|member| is_away(member.state()))
}

/// Has a tenant get its GPUs.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_switch_tenant(tenant: *const c_char, wait_ms: u32) -> c_int {
    code_of(|| {
        runtime::start_log();
        // SAFETY: as this function's caller promises.
        let tenant = unsafe { tenant_of(tenant) }?;
        let wait = Duration::from_millis(u64::from(wait_ms));
        let checkpointer = runtime::checkpointer();
        let options = SwitchOptions { wait, checkpointer, ..SwitchOptions::default() };
        Ok(switched(switching::switch(&run_dir()?, &tenant, &options, &mut |_| {})))
    })
}

/// Begins a turn of this process.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_turn_begin(wait_ms: u32) -> c_int {
    code_of(|| {
        runtime::start_log();
        // SAFETY: null is the caller's own tenant.
        let tenant = unsafe { tenant_of(std::ptr::null()) }?;
        let wait = if wait_ms == 0 { WAIT } else { Duration::from_millis(u64::from(wait_ms)) };
        let options = TurnOptions { wait, checkpointer: runtime::checkpointer(), is_paused };
        let begun = Turn::begin(&run_dir()?, &tenant, options);
        Ok(switched(begun.map(|(turn, done)| {
            TURNS.lock().unwrap_or_else(PoisonError::into_inner).push(turn);
            done
        })))
    })
}

/// Ends the turn of this process that began last.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_turn_end() -> c_int {
    code_of(|| {
        let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let none = || fail(ARGUMENT, "no turn of this process has begun, or all have ended");
        drop(turn.ok_or_else(none)?);
        Ok(OK)
    })
}
