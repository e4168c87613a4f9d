//! What the methods of [`Library`] have in common: texts as C takes them, what callers undo, and signals.

#![expect(unsafe_code, reason = "calls what the header of libsublet.so declares")]

use std::ffi::{CString, NulError, c_char, c_int, c_void};
use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::library::{Library, c_text};

/// Does something with a tenant within a time, as the header declares it.
pub(crate) type ActOnTenant = unsafe extern "C" fn(*const c_char, u32) -> c_int;
/// Begins a region, as the header declares it.
pub(crate) type BeginRegion = unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
/// Pauses or resumes tags, as the header declares it.
pub(crate) type ActOnTags =
    unsafe extern "C" fn(*const c_char, *const *const c_char, usize, c_int, u32) -> c_int;

/// The pointer that C takes: null for none.
pub(crate) fn pointer(text: Option<&CString>) -> *const c_char {
    text.map_or(ptr::null(), |text| text.as_ptr())
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

impl Library {
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

    pub(crate) fn act_on_tenant(
        &self,
        py: Python<'_>,
        what: &str,
        act: ActOnTenant,
        tenant: Option<&str>,
        time_ms: u32,
    ) -> PyResult<String> {
        let tenant = c_text(tenant)?;
        // SAFETY: null or a terminated string that outlives the call.
        self.reported(py, what, || unsafe { act(pointer(tenant.as_ref()), time_ms) })
    }

    pub(crate) fn begin_region(
        &self,
        py: Python<'_>,
        begin: BeginRegion,
        tag: &str,
        contents: c_int,
        device: Option<c_int>,
        begun: Option<&Bound<'_, PyList>>,
    ) -> PyResult<()> {
        let c_tag = CString::new(tag)?;
        // SAFETY: a terminated string that outlives the call.
        let begin = || unsafe { begin(c_tag.as_ptr(), contents, device.unwrap_or(-1)) };
        noted(begun, self.run(py, "region", begin).map(|()| tag.to_owned())).map(drop)
    }

    /// For a function that takes nothing.
    pub(crate) fn simply(
        &self,
        py: Python<'_>,
        what: &str,
        act: unsafe extern "C" fn() -> c_int,
    ) -> PyResult<()> {
        // SAFETY: these functions have no precondition.
        self.run(py, what, || unsafe { act() })
    }

    #[expect(clippy::too_many_arguments, reason = "the header's, and what tells pause from resume")]
    pub(crate) fn act_on_tags(
        &self,
        py: Python<'_>,
        what: &str,
        act: ActOnTags,
        tenant: Option<&str>,
        tags: Vec<String>,
        whose: c_int,
        timeout_ms: u32,
    ) -> PyResult<String> {
        let tenant = c_text(tenant)?;
        let tags = c_texts(tags)?;
        self.reported(py, what, || {
            let tags = pointers(&tags);
            // SAFETY: null or a terminated string; as many of those as are named; all outlive the call.
            unsafe { act(pointer(tenant.as_ref()), array(&tags), tags.len(), whose, timeout_ms) }
        })
    }
}

pub(crate) fn c_texts(texts: Vec<String>) -> Result<Vec<CString>, NulError> {
    texts.into_iter().map(CString::new).collect()
}

pub(crate) fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// Null stands for none.
pub(crate) fn array(pointers: &[*const c_char]) -> *const *const c_char {
    if pointers.is_empty() { ptr::null() } else { pointers.as_ptr() }
}
