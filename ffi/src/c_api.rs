//! `include/sublet.h`, function by function. The header is the source of truth.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use sublet_nccl::pausing;
use tenants::coordinator::CoordinatorError;
use tenants::identity::TenantName;
use tenants::region;
use tenants::wire::{Action, MemberState};
use vmm_pool::{Contents, PoolReport};

use crate::{bindings, runtime};

const OK: c_int = code(bindings::SUBLET_OK);
const ARGUMENT: c_int = code(bindings::SUBLET_ERROR_ARGUMENT);
const NOT_JOINED: c_int = code(bindings::SUBLET_ERROR_NOT_JOINED);
const RETRY: c_int = code(bindings::SUBLET_ERROR_RETRY);
const REFUSED: c_int = code(bindings::SUBLET_ERROR_REFUSED);
const OUT_OF_DEVICE_MEMORY: c_int = code(bindings::SUBLET_ERROR_OUT_OF_DEVICE_MEMORY);

/// A constant of the header as the type that its functions return.
const fn code(value: u32) -> c_int {
    // CAST: the header's codes are small.
    value.cast_signed()
}

const NCCL_SUCCESS: c_int = 0;
const NCCL_UNHANDLED_CUDA_ERROR: c_int = 1;
const NCCL_INVALID_ARGUMENT: c_int = 4;
const NCCL_INVALID_USAGE: c_int = 5;

/// How long `ncclPause` waits for the other processes to call it too. They stand at the same step, so the
/// wait is short unless one of them is stuck.
const TOGETHER_TIMEOUT: Duration = Duration::from_mins(2);

static GROUP_ID: AtomicI32 = AtomicI32::new(GROUP_UNSET);
const GROUP_UNSET: i32 = i32::MIN;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn fail(code: c_int, message: &str) -> c_int {
    tracing::warn!(code, "{message}");
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let _kept = LAST_ERROR.try_with(|last| last.replace(text));
    code
}

/// Runs a function of the interface; a panic of ours becomes an error instead of unwinding into C.
fn guarded(work: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| fail(REFUSED, "Sublet failed inside; please report this"))
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// # Safety
/// `tenant` is null or a terminated string.
unsafe fn tenant_of(tenant: *const c_char) -> Result<TenantName, c_int> {
    if tenant.is_null() {
        return runtime::tenant_name().map_err(|reason| fail(ARGUMENT, &reason));
    }
    // SAFETY: the caller passes a terminated string.
    let name = unsafe { CStr::from_ptr(tenant) }.to_string_lossy();
    TenantName::new(&name).map_err(|error| fail(ARGUMENT, &error.to_string()))
}

unsafe fn act_for_all(tenant: *const c_char, action: Action, timeout_ms: u32) -> c_int {
    runtime::start_log();
    // SAFETY: as this function's caller promises.
    let tenant = match unsafe { tenant_of(tenant) } {
        Ok(tenant) => tenant,
        Err(code) => return code,
    };
    let run_dir = match runtime::run_dir() {
        Ok(run_dir) => run_dir,
        Err(reason) => return fail(REFUSED, &reason),
    };
    let timeout = (timeout_ms > 0).then(|| Duration::from_millis(u64::from(timeout_ms)));
    match pausing::act_for_all(&run_dir, &tenant, action, timeout) {
        Ok(_) => OK,
        Err(error) => fail(code_of(&error), &pausing::chain(&error)),
    }
}

fn code_of(error: &CoordinatorError) -> c_int {
    match error.missing_device_bytes() {
        Some(_) => OUT_OF_DEVICE_MEMORY,
        None if error.is_retryable() => RETRY,
        None => REFUSED,
    }
}

/// Pauses every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_pause_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    guarded(|| unsafe { act_for_all(tenant, Action::Pause, timeout_ms) })
}

/// Resumes every process of a tenant.
///
/// # Safety
/// `tenant` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_resume_tenant(tenant: *const c_char, timeout_ms: u32) -> c_int {
    // SAFETY: as this function's caller promises.
    guarded(|| unsafe { act_for_all(tenant, Action::Resume, timeout_ms) })
}

/// Is this process's memory given back now?
#[unsafe(no_mangle)]
pub extern "C" fn sublet_is_paused() -> c_int {
    c_int::from(runtime::member().is_some_and(|member| member.state() == MemberState::Paused))
}

/// Begins a region on this thread.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_region_begin(tag: *const c_char, contents: c_int) -> c_int {
    guarded(|| {
        if tag.is_null() {
            return fail(ARGUMENT, "a region needs a tag");
        }
        // SAFETY: the caller passes a terminated string.
        let Ok(tag) = (unsafe { CStr::from_ptr(tag) }).to_str() else {
            return fail(ARGUMENT, "a region's tag is UTF-8");
        };
        let contents = match contents {
            0 => Contents::Keep,
            1 => Contents::Discard,
            other => {
                return fail(
                    ARGUMENT,
                    &format!("{other} is no SUBLET_CONTENTS_ value: use 0 or 1"),
                );
            }
        };
        match region::begin(tag, contents) {
            Ok(()) => OK,
            Err(error) => fail(ARGUMENT, &error.to_string()),
        }
    })
}

/// Ends the innermost region of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_region_end() -> c_int {
    guarded(|| match region::end() {
        Ok(()) => OK,
        Err(error) => fail(ARGUMENT, &error.to_string()),
    })
}

/// What this process holds, as JSON.
///
/// # Safety
/// `buffer` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_stats_json(buffer: *mut c_char, size: usize) -> i64 {
    let text = catch_unwind(|| {
        let member = runtime::member()?;
        serde_json::to_string(&member.stats()).ok()
    });
    let Ok(Some(text)) = text else {
        fail(NOT_JOINED, "this process holds no device memory under Sublet yet");
        return -1;
    };
    if text.len() < size && !buffer.is_null() {
        let target: *mut u8 = buffer.cast();
        // SAFETY: the caller's buffer has `size` bytes, more than the text.
        unsafe { target.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        // SAFETY: the text is shorter than the buffer, so this is inside it.
        let end = unsafe { target.add(text.len()) };
        // SAFETY: as above.
        unsafe { end.write(0) };
    }
    i64::try_from(text.len()).unwrap_or(i64::MAX)
}

/// [`TOGETHER_TIMEOUT`], or what `SUBLET_TOGETHER_TIMEOUT_MS` says.
fn together_timeout() -> Duration {
    std::env::var("SUBLET_TOGETHER_TIMEOUT_MS")
        .ok()
        .and_then(|value| value.parse().ok())
        .map_or(TOGETHER_TIMEOUT, Duration::from_millis)
}

fn act_together(action: Action) -> c_int {
    guarded(|| {
        let Some(member) = runtime::member() else {
            // Nothing was ever allocated here, so there is nothing to pause, and nobody waits for us.
            return NCCL_SUCCESS;
        };
        match pausing::act_together(member, action, together_timeout()) {
            Ok(()) => NCCL_SUCCESS,
            Err(error) => fail(NCCL_UNHANDLED_CUDA_ERROR, &pausing::chain(&error)),
        }
    })
}

/// Pauses the tenant once every process of it has called this.
///
/// # Safety
/// The argument is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclPause(_comm: *mut c_void) -> c_int {
    act_together(Action::Pause)
}

/// Resumes the tenant once every process of it has called this.
///
/// # Safety
/// The argument is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclResume(_comm: *mut c_void) -> c_int {
    act_together(Action::Resume)
}

/// Prints this process's device memory.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemStats() -> c_int {
    guarded(|| {
        let Some(member) = runtime::member() else {
            return fail(
                NCCL_INVALID_USAGE,
                "this process holds no device memory under Sublet yet",
            );
        };
        let text = mem_stats(&member.stats().pool);
        match std::io::stdout().lock().write_all(text.as_bytes()) {
            Ok(()) => NCCL_SUCCESS,
            Err(error) => fail(NCCL_INVALID_USAGE, &format!("standard output: {error}")),
        }
    })
}

fn mem_stats(pool: &PoolReport) -> String {
    let mut text = String::new();
    let (mut own, mut resident, mut imported) = (0, 0, 0);
    for device in &pool.devices {
        for class in &device.classes {
            let tag = if class.tag.is_empty() { "-" } else { &class.tag };
            let _written = writeln!(
                text,
                "sublet: {} library={} tag={} contents={:?} own={} resident={} imported={}",
                device.device,
                class.library,
                tag,
                class.contents,
                class.own_bytes,
                class.resident_bytes,
                class.imported_bytes
            );
            own += class.own_bytes;
            resident += class.resident_bytes;
            imported += class.imported_bytes;
        }
        for pinned in &device.pinned {
            let _written = writeln!(
                text,
                "sublet: {} stays={} in {} allocations: {}",
                device.device, pinned.bytes, pinned.count, pinned.reason
            );
        }
    }
    let _written =
        writeln!(text, "sublet: total own={own} resident={resident} imported={imported}");
    text
}

/// The group of this process: as set, or `AMEM_GROUPID`, or 0.
pub(crate) fn group_id() -> i32 {
    match GROUP_ID.load(Ordering::Relaxed) {
        GROUP_UNSET => {
            std::env::var("AMEM_GROUPID").ok().and_then(|value| value.parse().ok()).unwrap_or(0)
        }
        id => id,
    }
}

/// Sets the group of this process.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSetGroupID(id: c_int) -> c_int {
    guarded(|| {
        if id < 0 {
            return fail(NCCL_INVALID_ARGUMENT, &format!("{id} is no group: give 0 or more"));
        }
        if runtime::member().is_some() {
            let message = "the group is fixed by the first device memory: set it before that";
            return fail(NCCL_UNHANDLED_CUDA_ERROR, message);
        }
        GROUP_ID.store(id, Ordering::Relaxed);
        NCCL_SUCCESS
    })
}

/// The group of this process.
///
/// # Safety
/// `id` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetGroupID(id: *mut c_int) -> c_int {
    guarded(|| {
        if id.is_null() {
            return fail(NCCL_INVALID_ARGUMENT, "ncclGetGroupID needs somewhere to write");
        }
        // SAFETY: checked not to be null; the caller's for one integer.
        unsafe { id.write(group_id()) };
        NCCL_SUCCESS
    })
}

/// Fails to compile when a function here and its declaration in the header differ.
macro_rules! agrees {
    ($($name:ident: $type:ty;)*) => {
        const _: () = {
            $(
                let _: [$type; 2] = [bindings::$name, $name];
            )*
        };
    };
}

agrees! {
    sublet_version: unsafe extern "C" fn() -> *const c_char;
    sublet_last_error: unsafe extern "C" fn() -> *const c_char;
    sublet_pause_tenant: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_resume_tenant: unsafe extern "C" fn(*const c_char, u32) -> c_int;
    sublet_is_paused: unsafe extern "C" fn() -> c_int;
    sublet_region_begin: unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    sublet_region_end: unsafe extern "C" fn() -> c_int;
    sublet_stats_json: unsafe extern "C" fn(*mut c_char, usize) -> i64;
    ncclPause: unsafe extern "C" fn(*mut c_void) -> c_int;
    ncclResume: unsafe extern "C" fn(*mut c_void) -> c_int;
    ncclMemStats: unsafe extern "C" fn() -> c_int;
    ncclSetGroupID: unsafe extern "C" fn(c_int) -> c_int;
    ncclGetGroupID: unsafe extern "C" fn(*mut c_int) -> c_int;
}
