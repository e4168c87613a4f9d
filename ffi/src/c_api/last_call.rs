//! The outcome of each thread's last call: its error, and its report.

#![expect(unsafe_code, reason = "exports the C interface and writes into callers' buffers")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

use serde::Serialize;
use serde_json::{Value, json};
use tenants::code::Code;
use tenants::coordinator::{BudgetReport, Outcome, PrepareReport, Swap, Trouble, staying};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::switching::Switched;
use vmm_pool::PinnedBytes;

use super::{NOT_JOINED, OK, REFUSED};
use crate::runtime;

/// The outcome of one thread's last call.
#[derive(Debug, Default)]
struct Last {
    message: CString,
    error: Value,
    report: Value,
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

/// An error with a code and words. The caller reads the words, so they are no warning in the log.
pub(crate) fn fail(code: c_int, message: &str) -> c_int {
    tracing::info!(code, "{message}");
    say_no(code, message)
}

/// An error of a function whose callers do not ask for [`sublet_last_error`]: its words go to the log as a warning.
pub(crate) fn fail_aloud(code: c_int, message: &str) -> c_int {
    tracing::warn!(code, "{message}");
    say_no(code, message)
}

/// The answer no to a question: kept like an error, and logged as none.
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

/// Runs a function of the interface; a panic of ours becomes an error instead of unwinding into C.
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

/// This process has no device memory under Sublet.
pub(crate) fn not_joined() -> c_int {
    if runtime::is_forked() {
        return say_no(
            NOT_JOINED,
            "this process was forked from one that holds device memory under Sublet, and neither CUDA nor Sublet \
             outlives a fork: start processes afresh ('spawn' in Python), or fork before CUDA is used",
        );
    }
    let whose = runtime::tenant_name().map_or_else(
        |_| "this process".to_owned(),
        |tenant| format!("this process of tenant '{tenant}'"),
    );
    say_no(NOT_JOINED, &format!("{whose} has no GPU memory yet"))
}

/// Keeps the report of what was done, or the trouble, and returns the code.
fn answered<T>(done: Result<T, Trouble>, report: impl FnOnce(T) -> Value) -> c_int {
    done.map_or_else(|trouble| refused(&trouble), |done| keep_report(report(done)))
}

/// [`answered`] for a pause or a resume.
pub(crate) fn settled(outcome: Result<Outcome, Trouble>) -> c_int {
    answered(outcome, |outcome| json_of(&outcome))
}

/// [`answered`] for a swap of two tenants.
pub(crate) fn swapped(outcome: Result<Swap, Trouble>) -> c_int {
    answered(outcome, |swap| {
        json!({
            "paused": json_of(&swap.paused),
            "resumed": json_of(&swap.resumed),
            "wall_us": swap.wall_us,
        })
    })
}

/// [`answered`] for a tenant that was to get its GPUs.
pub(crate) fn switched(outcome: Result<Switched, Trouble>) -> c_int {
    answered(outcome, |Switched { had_them, victims, reasons, changes, unrecorded }| {
        let paused: Vec<_> = victims.iter().map(TenantName::as_str).collect();
        let changes: Vec<Value> = changes.iter().map(|(_, outcome)| json_of(outcome)).collect();
        let how = if had_them { "already" } else { "completed" };
        json!({
            "outcome": how, "paused": paused, "reasons": reasons, "changes": changes,
            "unrecorded": unrecorded,
        })
    })
}

/// [`answered`] for a resume that queued: its report, and who was paused and why.
pub(crate) fn resumed_in_turn(outcome: Result<Switched, Trouble>) -> c_int {
    answered(outcome, |Switched { victims, reasons, changes, unrecorded, .. }| {
        let resumed = changes.last().map_or(Outcome::AlreadyActive, |(_, own)| own.clone());
        let mut report = json_of(&resumed);
        let paused: Vec<_> = victims.iter().map(TenantName::as_str).collect();
        if let Some(fields) = report.as_object_mut() {
            fields.insert("paused".to_owned(), json!(paused));
            fields.insert("reasons".to_owned(), json!(reasons));
            fields.insert("unrecorded".to_owned(), json!(unrecorded));
        }
        report
    })
}

/// [`answered`] for host memory ahead of a pause.
pub(crate) fn brought_in(outcome: Result<PrepareReport, Trouble>) -> c_int {
    answered(outcome, |report| with_completeness(&report, report.is_complete()))
}

/// [`answered`] for a change of a tenant's budgets.
pub(crate) fn budgeted(outcome: Result<BudgetReport, Trouble>) -> c_int {
    answered(outcome, |report| with_completeness(&report, report.failures.is_empty()))
}

/// [`settled`] for an action that all processes of a tenant began together.
pub(crate) fn settled_together(outcome: Result<Option<Outcome>, Trouble>) -> c_int {
    match outcome {
        Ok(Some(outcome)) => keep_report(json_of(&outcome)),
        // Another process has the account.
        Ok(None) => keep_report(json!({"outcome": "completed"})),
        Err(error) => {
            // Callers of ncclPause look at its code only, so the words go to the log.
            tracing::warn!("{}", chain(&error));
            refused(&error)
        }
    }
}

/// [`settled`] for the caller's own tenant, of which no process need have GPU memory yet.
pub(crate) fn settled_for_own(outcome: Result<Outcome, Trouble>) -> c_int {
    match outcome {
        Err(trouble) if trouble.is_gone() => settled_nothing(),
        outcome => settled(outcome),
    }
}

/// Keeps the report that there is no memory yet to do anything with.
pub(crate) fn settled_nothing() -> c_int {
    keep_report(json!({"outcome": "nothing"}))
}

fn keep_report(report: Value) -> c_int {
    let _kept = LAST.try_with(|last| last.borrow_mut().report = report);
    OK
}

fn with_outcome(report: &impl Serialize, outcome: &str) -> Value {
    let mut report = serde_json::to_value(report).unwrap_or_default();
    if let Some(fields) = report.as_object_mut() {
        fields.insert("outcome".to_owned(), json!(outcome));
    }
    report
}

fn with_completeness(report: &impl Serialize, is_complete: bool) -> Value {
    with_outcome(report, if is_complete { "completed" } else { "partial" })
}

fn json_of(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Completed(report) if report.is_partial() => {
            // Callers that look at the code only would not know.
            tracing::warn!("not wholly as asked: {}", report.remarks().join("; "));
            with_outcome(report, "partial")
        }
        Outcome::Completed(report) => with_outcome(report, "completed"),
        Outcome::AlreadyPaused { stays } if !stays.is_empty() => {
            let stayed_bytes = PinnedBytes::total_bytes(stays);
            tracing::warn!("paused already: {}", staying(stays).collect::<Vec<_>>().join("; "));
            json!({"outcome": "partial", "stayed_bytes": stayed_bytes, "stays": stays})
        }
        Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => json!({"outcome": "already"}),
    }
}

/// Keeps trouble and returns its number.
pub(crate) fn refused(trouble: &Trouble) -> c_int {
    let (code, message) = (Code::from(trouble).number(trouble.is_retryable()), chain(trouble));
    tracing::info!(code, "{message}");
    let (devices, tags) = (json!(trouble.shortages()), json!(trouble.known_tags()));
    let missing_bytes = trouble.missing_device_bytes();
    keep(code, &message, described(code, &message, missing_bytes, &devices, &tags))
}

/// Writes `text` with a terminating zero where it fits; the length that it has.
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

/// Why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_last_error() -> *const c_char {
    let empty: &CStr = c"";
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(empty.as_ptr())
}

fn json_answer(pick: impl FnOnce(&Last) -> Value) -> String {
    LAST.try_with(|last| pick(&last.borrow())).unwrap_or_default().to_string()
}

/// Why the last call of this thread failed, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_last_error_json(buffer: *mut c_char, size: usize) -> i64 {
    let text = json_answer(|last| last.error.clone());
    // SAFETY: as this function's caller promises.
    unsafe { write_text(&text, buffer, size) }
}

/// The report of the last pause, resume, swap, preparation or change of budgets of this thread, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_last_report_json(buffer: *mut c_char, size: usize) -> i64 {
    let text = json_answer(|last| last.report.clone());
    // SAFETY: as this function's caller promises.
    unsafe { write_text(&text, buffer, size) }
}
