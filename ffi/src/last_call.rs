//! The outcome of each thread's last call of the C interface: its error, and its report.

#![expect(unsafe_code, reason = "exports the C interface and writes into callers' buffers")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Display;

use serde_json::{Value, json};
use tenants::code::Code;
use tenants::coordinator::Trouble;
use tenants::error_text::chain;

use crate::bindings;
use crate::runtime::{self, Member};

pub(crate) const OK: c_int = code(bindings::SUBLET_OK);
pub(crate) const ARGUMENT: c_int = code(bindings::SUBLET_ERROR_ARGUMENT);
pub(crate) const NOT_JOINED: c_int = code(bindings::SUBLET_ERROR_NOT_JOINED);
pub(crate) const RETRY: c_int = code(bindings::SUBLET_ERROR_RETRY);
pub(crate) const REFUSED: c_int = code(bindings::SUBLET_ERROR_REFUSED);
pub(crate) const OUT_OF_DEVICE_MEMORY: c_int = code(bindings::SUBLET_ERROR_OUT_OF_DEVICE_MEMORY);
pub(crate) const OUT_OF_HOST_MEMORY: c_int = code(bindings::SUBLET_ERROR_OUT_OF_HOST_MEMORY);

/// Fails to compile when the numbers of [`Code`] and those of the header differ.
const _: () = {
    assert!(Code::Usage.number(false) == ARGUMENT);
    assert!(Code::Busy.number(true) == RETRY && Code::Driver.number(false) == REFUSED);
    assert!(Code::GpuFull.number(true) == OUT_OF_DEVICE_MEMORY);
    assert!(Code::HostFull.number(true) == OUT_OF_HOST_MEMORY);
    assert!(Code::Lost.number(false) == code(bindings::SUBLET_ERROR_LOST));
};

/// Converts a constant of the header to the type that its functions return.
const fn code(value: u32) -> c_int {
    // CAST: the header's codes are small.
    value.cast_signed()
}

/// The outcome of one thread's last call.
#[derive(Debug, Default)]
struct Last {
    message: CString,
    error: Value,
    /// The report in JSON; none if there is none.
    report: Option<String>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Keeps an error for this thread and returns its code.
fn keep(code: c_int, message: &str, error: Value) -> c_int {
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let _kept = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        last.message = text;
        last.error = error;
    });
    code
}

/// Keeps an error with a code and a message. The caller reads the message, so the log gets no warning.
pub(crate) fn fail(code: c_int, message: &str) -> c_int {
    tracing::info!(code, "{message}");
    say_no(code, message)
}

/// Returns the code of work that can fail only because of the caller's arguments.
pub(crate) fn answered<E: Display>(result: Result<(), E>) -> c_int {
    result.map_or_else(|error| fail(ARGUMENT, &error.to_string()), |()| OK)
}

/// Keeps an error of a function whose callers do not read [`sublet_last_error`]. The log gets the message as a warning.
pub(crate) fn fail_aloud(code: c_int, message: &str) -> c_int {
    tracing::warn!(code, "{message}");
    say_no(code, message)
}

/// Keeps a negative answer like an error, but does not log it as one.
pub(crate) fn say_no(code: c_int, message: &str) -> c_int {
    tracing::debug!(code, "{message}");
    keep(code, message, described(code, message, None, &json!([]), &json!([])))
}

fn described(
    code: c_int,
    message: &str,
    missing_bytes: Option<u64>,
    devices: &Value,
    tags: &Value,
) -> Value {
    json!({
        "code": code, "message": message, "missing_bytes": missing_bytes, "devices": devices, "tags": tags,
    })
}

/// Runs a function of the interface. A panic in Sublet becomes an error instead of unwinding into C.
pub(crate) fn guarded(work: impl FnOnce() -> c_int) -> c_int {
    runtime::netted(work)
        .unwrap_or_else(|_| fail_aloud(REFUSED, "Sublet failed inside; please report this"))
}

/// [`guarded`] for a function that returns a length, or -1.
pub(crate) fn guarded_length(work: impl FnOnce() -> i64) -> i64 {
    runtime::netted(work).unwrap_or_else(|_| {
        fail_aloud(REFUSED, "Sublet failed inside; please report this");
        -1
    })
}

/// Returns the error that this process has no device memory under Sublet.
pub(crate) fn nobody() -> Trouble {
    if runtime::is_forked() {
        return Trouble::NotJoined(
            "this process was forked from a process with device memory, and neither CUDA nor Sublet works after such \
             a fork: start processes by 'spawn' (Python), or fork before CUDA is used"
                .to_owned(),
        );
    }
    let whose = runtime::tenant_name().map_or_else(
        |_| "this process".to_owned(),
        |tenant| format!("this process of tenant '{tenant}'"),
    );
    Trouble::NotJoined(format!("{whose} has no GPU memory yet"))
}

/// Returns the membership of this process in its tenant.
pub(crate) fn joined() -> Result<&'static Member, Trouble> {
    runtime::member().ok_or_else(nobody)
}

/// Keeps the error that this process has no device memory under Sublet.
pub(crate) fn not_joined() -> c_int {
    refused(&nobody())
}

/// Keeps the JSON report of a command, and returns the code of success.
pub(crate) fn keep_report(report: String) -> c_int {
    let _kept = LAST.try_with(|last| last.borrow_mut().report = Some(report));
    OK
}

/// Keeps an error and returns its code.
pub(crate) fn refused(trouble: &Trouble) -> c_int {
    if let Trouble::NotJoined(message) = trouble {
        return say_no(NOT_JOINED, message);
    }
    let (code, message) = (Code::from(trouble).number(trouble.is_retryable()), chain(trouble));
    tracing::info!(code, "{message}");
    let (devices, tags) = (json!(trouble.shortages()), json!(trouble.known_tags()));
    let missing_bytes = trouble.missing_device_bytes();
    keep(code, &message, described(code, &message, missing_bytes, &devices, &tags))
}

/// Writes `text` with a terminating zero, if it fits. Returns its length.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
pub(crate) unsafe fn write_text(text: &str, buffer: *mut c_char, size: usize) -> i64 {
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

/// Returns why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_last_error() -> *const c_char {
    let empty: &CStr = c"";
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(empty.as_ptr())
}

fn kept(pick: impl FnOnce(&Last) -> String) -> String {
    LAST.try_with(|last| pick(&last.borrow())).unwrap_or_default()
}

/// Writes why the last call of this thread failed, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_last_error_json(buffer: *mut c_char, size: usize) -> i64 {
    let text = kept(|last| last.error.to_string());
    // SAFETY: as this function's caller promises.
    unsafe { write_text(&text, buffer, size) }
}

/// Writes the report of this thread's last pause, resume, swap, preparation or change of budgets, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_last_report_json(buffer: *mut c_char, size: usize) -> i64 {
    let text = kept(|last| last.report.clone().unwrap_or_else(|| "null".to_owned()));
    // SAFETY: as this function's caller promises.
    unsafe { write_text(&text, buffer, size) }
}
