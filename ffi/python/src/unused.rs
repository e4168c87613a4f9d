//! The question of a pause, which memory need not be saved, put to a function of Python's.

#![expect(unsafe_code, reason = "is called by libsublet.so, and answers it")]

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

/// `sublet_unused` of the library that asks.
pub(crate) type SayUnused = unsafe extern "C" fn(u64, *const u64, *const u64, usize) -> c_int;
/// The function that the library calls.
pub(crate) type Ask = unsafe extern "C" fn(*mut c_void, u64);

/// The function of Python's that is asked, and the library's function that takes the answer.
#[derive(Debug)]
pub(crate) struct Source {
    function: Py<PyAny>,
    answer: SayUnused,
}

/// Called by the library on a thread of its own.
///
/// # Safety
/// `context` is of [`Source::leaked`].
pub(crate) unsafe extern "C" fn ask(context: *mut c_void, token: u64) {
    // SAFETY: it was leaked, and is only read.
    let source = unsafe { &*context.cast::<Source>() };
    // Nothing may unwind into the library. Without an answer all is saved.
    catch_unwind(AssertUnwindSafe(|| Python::try_attach(|py| source.respond(py, token)))).ok();
}

impl Source {
    /// A source for the life of the process: a question may be on its way when another one is set.
    pub(crate) fn leaked(function: Py<PyAny>, answer: SayUnused) -> &'static Self {
        Box::leak(Box::new(Self { function, answer }))
    }

    fn respond(&self, py: Python<'_>, token: u64) {
        let blocks = self.function.call0(py).and_then(|blocks| blocks.extract(py));
        let blocks: Vec<(u64, u64)> = match blocks {
            Ok(blocks) => blocks,
            Err(error) => return error.write_unraisable(py, Some(self.function.bind(py))),
        };
        let (starts, sizes): (Vec<u64>, Vec<u64>) = blocks.into_iter().unzip();
        py.detach(|| {
            // SAFETY: both lists have as many entries as are named. An answer that comes too late is refused,
            // and nobody waits for it any more.
            unsafe { (self.answer)(token, starts.as_ptr(), sizes.as_ptr(), starts.len()) };
        });
    }
}
