//! Finds `libsublet.so` in the process, and calls its functions.

#![expect(unsafe_code, reason = "opens libsublet.so and calls what its header declares")]

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::bindings::{Functions, SUBLET_ERROR_NOT_JOINED};

/// The error code that a text function means by -1.
// CAST: the header's codes are small.
const NOT_JOINED: c_int = SUBLET_ERROR_NOT_JOINED.cast_signed();

/// The size of the first buffer for an answer in JSON, in bytes.
const ANSWER_BYTES: usize = 4096;

/// Finds `name` in the library, or returns the exception that says that it is missing.
macro_rules! function {
    ($library:expr, $py:expr, $name:ident) => {
        $library.function($py, stringify!($name), $library.functions().$name)?
    };
}

/// Calls `name` of the library without the interpreter lock, and raises what its code means. What the arguments point to is moved into
/// the call, or outlives it.
macro_rules! call {
    ($library:expr, $py:expr, $what:literal, $name:ident($($argument:expr),*)) => {{
        let name = function!($library, $py, $name);
        // SAFETY: each use passes what the header asks for: terminated strings, as many entries as it says, and places that it may write to.
        $library.run($py, $what, move || unsafe { name($($argument),*) })
    }};
}

/// The JSON that `name` of the library writes.
macro_rules! answer {
    ($library:expr, $py:expr, $what:literal, $name:ident($($argument:expr),*)) => {{
        let name = function!($library, $py, $name);
        // SAFETY: the buffer has `size` bytes, and the other arguments are numbers.
        $library.answer($py, $what, &|buffer, size| unsafe { name($($argument,)* buffer, size) })
    }};
}

pub(crate) use {answer, call, function};

/// The functions of a `libsublet.so` that is in this process.
#[pyclass(frozen, module = "sublet._native")]
pub(crate) struct Library {
    functions: Functions,
}

/// Why a call of the library failed, as it says itself.
#[derive(Debug)]
struct Failure {
    code: c_int,
    /// One line; empty when the library says nothing.
    message: String,
    /// The fields, in JSON; `None` from a library that has no such answer.
    report: Option<String>,
}

/// A function that writes text to a buffer, as `sublet_stats_json` does.
type WriteText<'a> = &'a (dyn Fn(*mut c_char, usize) -> i64 + Send + Sync);

impl Library {
    /// The library that the process was started with; `None` when it was started without.
    pub(crate) fn preloaded() -> Option<Self> {
        // SAFETY: the functions of the global scope have the types of the header: no other library has
        // these names.
        let functions = unsafe { Functions::of(Handle::this().into()) };
        functions.sublet_version.is_some().then_some(Self { functions })
    }

    /// Opens the library at `path`. Other libraries do not see it.
    pub(crate) fn opened(path: PathBuf) -> PyResult<Self> {
        // SAFETY: libsublet.so does nothing when it is loaded, and is never unloaded.
        let handle = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let handle = handle.map_err(|error| {
            // The loader's own words, which name the file, are the cause.
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            PyOSError::new_err(format!("{error}{cause}"))
        })?;
        // SAFETY: its functions have the types of the header, from which both are made.
        let functions = unsafe { Functions::of(handle.into()) };
        Ok(Self { functions })
    }

    /// Returns the functions that were found in the library.
    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Its version, such as "0.1.0".
    pub(crate) fn version_text(&self) -> String {
        let Some(version) = self.functions.sublet_version else {
            return "unknown".to_owned();
        };
        // SAFETY: the function has no precondition.
        let text = unsafe { version() };
        // SAFETY: the header promises a terminated string that is never freed.
        unsafe { owned(text) }
    }

    /// `found`, or the exception that says which function the library lacks.
    pub(crate) fn function<F>(&self, py: Python<'_>, name: &str, found: Option<F>) -> PyResult<F> {
        found.ok_or_else(|| {
            let errors = py.import("sublet._errors");
            let missing = errors.and_then(|errors| {
                errors.call_method1("missing_function", (name, self.version_text()))
            });
            missing.map_or_else(|error| error, PyErr::from_value)
        })
    }

    /// Runs `call` without the interpreter lock, and raises what its code means.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        what: &str,
        call: impl FnOnce() -> c_int + Send,
    ) -> PyResult<()> {
        let failure = py.detach(|| match call() {
            0 => None,
            code => Some(self.failure(code)),
        });
        failure.map_or(Ok(()), |failure| Err(failure.raised(py, what)))
    }

    /// Runs `call` as [`Library::run`] does; returns what the library reports about it, in JSON.
    pub(crate) fn reported(
        &self,
        py: Python<'_>,
        what: &str,
        call: impl FnOnce() -> c_int + Send,
    ) -> PyResult<String> {
        let found = self.functions.sublet_last_report_json;
        let write = self.function(py, "sublet_last_report_json", found)?;
        let answer = py.detach(|| match call() {
            // The report is this thread's: it is read before anything else runs here.
            0 => self.text(&|buffer, size| {
                // SAFETY: `text` passes a buffer of `size` bytes.
                unsafe { write(buffer, size) }
            }),
            code => Err(self.failure(code)),
        });
        answer.map_err(|failure| failure.raised(py, what))
    }

    /// Runs `call`, whose wait for a turn ends when the handler of a signal raises. That is raised then.
    pub(crate) fn waiting(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> PyResult<String>,
    ) -> PyResult<String> {
        let found = self.functions().sublet_ask_while_waiting;
        let ask = self.function(py, "sublet_ask_while_waiting", found)?;
        let mut raised: Option<PyErr> = None;
        // SAFETY: this thread asks until the second call, and `raised` lives as long.
        unsafe { ask(Some(handle_signals), (&raw mut raised).cast()) };
        let answer = call();
        // SAFETY: nobody is asked.
        unsafe { ask(None, ptr::null_mut()) };
        raised.map_or(answer, Err)
    }

    /// The text that `write` gives, without the interpreter lock.
    pub(crate) fn answer(
        &self,
        py: Python<'_>,
        what: &str,
        write: WriteText<'_>,
    ) -> PyResult<String> {
        py.detach(|| self.text(write)).map_err(|failure| failure.raised(py, what))
    }

    /// Reads a text of whatever length.
    fn text(&self, write: WriteText<'_>) -> Result<String, Failure> {
        read(write).ok_or_else(|| self.failure(NOT_JOINED))
    }

    /// Why the last call on this thread failed.
    fn failure(&self, code: c_int) -> Failure {
        let message = self.functions.sublet_last_error.map_or_else(String::new, |last| {
            // SAFETY: the function has no precondition.
            let text = unsafe { last() };
            // SAFETY: the header promises a terminated string, valid until the next call on this thread.
            unsafe { owned(text) }
        });
        Failure { code, message, report: self.error_report() }
    }

    fn error_report(&self) -> Option<String> {
        let write = self.functions.sublet_last_error_json?;
        read(&|buffer, size| {
            // SAFETY: `read` passes a buffer of `size` bytes.
            unsafe { write(buffer, size) }
        })
    }
}

/// The text that `write` gives, of whatever length; `None` when it fails.
fn read(write: WriteText<'_>) -> Option<String> {
    let mut buffer = vec![0_u8; ANSWER_BYTES];
    loop {
        // A negative length is the only failure.
        let length = usize::try_from(write(buffer.as_mut_ptr().cast(), buffer.len())).ok()?;
        if length < buffer.len() {
            buffer.truncate(length);
            return Some(String::from_utf8_lossy(&buffer).into_owned());
        }
        // It may have grown again by the next time.
        buffer.resize(length.saturating_add(ANSWER_BYTES), 0);
    }
}

impl Failure {
    /// The exception that `sublet._errors` makes of it.
    fn raised(self, py: Python<'_>, what: &str) -> PyErr {
        let Self { code, message, report } = self;
        let made = py
            .import("sublet._errors")
            .and_then(|errors| errors.call_method1("from_code", (what, code, message, report)));
        made.map_or_else(|error| error, PyErr::from_value)
    }
}

/// # Safety
/// `text` is null or a terminated string.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: checked not to be null; the caller's for the rest.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Adds what was done to `done`.
pub(crate) fn noted(
    done: Option<&Bound<'_, PyList>>,
    answer: PyResult<String>,
) -> PyResult<String> {
    if let (Some(done), Ok(answer)) = (done, &answer) {
        done.append(answer)?;
    }
    answer
}

/// Has Python handle signals, as the header declares it. `raised` is an `Option<PyErr>`: what a handler has raised.
unsafe extern "C" fn handle_signals(raised: *mut c_void) -> c_int {
    let error = Python::attach(|py| py.check_signals().err());
    let is_raised = error.is_some();
    // SAFETY: `waiting` has passed it, on this thread, and does not use it meanwhile.
    unsafe { *raised.cast::<Option<PyErr>>() = error };
    c_int::from(is_raised)
}
