//! `sublet._native`: the C functions of `libsublet.so` for Python.
//!
//! It links nothing of ours and keeps no state: `Library` finds the functions in the process at run time,
//! since the library that was preloaded is the one that holds the memory. What an error code means as an
//! exception is settled in `sublet/_errors.py`.

/// The functions of the C interface as `bindings` declares them, in a table of what a library has of them.
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $answer:ty)?;)*) => {
        /// Each is none if the library lacks it.
        pub(crate) struct Functions {
            $(pub(crate) $name: Option<unsafe extern "C" fn($($type),*) $(-> $answer)?>,)*
            /// Closed after the functions are gone.
            _library: libloading::Library,
        }

        impl Functions {
            /// # Safety
            /// The library's functions of these names have these types.
            pub(crate) unsafe fn of(library: libloading::Library) -> Self {
                $(let $name = unsafe { library.get(stringify!($name).as_bytes()) }.ok().map(|found| *found);)*
                Self { $($name,)* _library: library }
            }
        }
    };
}

#[path = "../../src/bindings.rs"]
mod bindings;
mod calls;
mod library;
mod unused;

/// The C functions of libsublet.so.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    use crate::bindings;

    #[pymodule_export]
    use crate::library::Library;

    /// Bytes of the stack that are cleared: what PyTorch needs between an optimizer's step in Python and its launches is less.
    const CLEARED_BYTES: usize = 128 << 10;

    /// Overwrites what earlier calls of this thread have left on its stack.
    #[pyfunction]
    #[inline(never)]
    #[expect(clippy::large_stack_arrays, reason = "it is the stack that is cleared")]
    fn clear_stack() {
        std::hint::black_box([0_u8; CLEARED_BYTES]);
    }

    // The header's numbers, so that Python types none of them.
    #[pymodule_export]
    const ERROR_ARGUMENT: u32 = bindings::SUBLET_ERROR_ARGUMENT;
    #[pymodule_export]
    const ERROR_NOT_JOINED: u32 = bindings::SUBLET_ERROR_NOT_JOINED;
    #[pymodule_export]
    const ERROR_RETRY: u32 = bindings::SUBLET_ERROR_RETRY;
    #[pymodule_export]
    const ERROR_OUT_OF_DEVICE_MEMORY: u32 = bindings::SUBLET_ERROR_OUT_OF_DEVICE_MEMORY;
    #[pymodule_export]
    const ERROR_OUT_OF_HOST_MEMORY: u32 = bindings::SUBLET_ERROR_OUT_OF_HOST_MEMORY;
    #[pymodule_export]
    const ERROR_LOST: u32 = bindings::SUBLET_ERROR_LOST;
    #[pymodule_export]
    const CONTENTS_KEEP: u32 = bindings::SUBLET_CONTENTS_KEEP;
    #[pymodule_export]
    const CONTENTS_DISCARD: u32 = bindings::SUBLET_CONTENTS_DISCARD;
    #[pymodule_export]
    const CONTENTS_FILE: u32 = bindings::SUBLET_CONTENTS_FILE;
    #[pymodule_export]
    const RUNS_WITHOUT: u32 = bindings::SUBLET_RUNS_WITHOUT;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
