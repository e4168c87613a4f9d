//! `sublet._native`: the C functions of `libsublet.so` for Python.
//!
//! It links nothing of ours and keeps no state: `Library` finds the functions in the process at run time,
//! since the library that was preloaded is the one that holds the memory. What an error code means as an
//! exception is settled in `sublet/_errors.py`.

mod bindings;
mod calls;
mod library;
mod unused;

/// The C functions of libsublet.so.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::library::Library;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
