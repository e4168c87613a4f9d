//! The answers of our `dlsym`: one of our functions, or the loader's own answer.

use std::ffi::CStr;

use super::driver::Driver;
use super::library::Library;
use super::{Binding, Pointer, loader};

/// The answer to one question, in the two registers that the assembly of our `dlsym` looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Decision {
    address: Pointer,
    /// 0 when the loader answers.
    is_ours: usize,
}

impl Decision {
    /// The loader answers, as if it had been asked itself.
    pub(crate) const LOADER: Self = Self { address: std::ptr::null_mut(), is_ours: 0 };

    /// This is the answer; 0 is that there is no such function.
    pub(crate) fn answer(address: usize) -> Self {
        Self { address: std::ptr::with_exposed_provenance_mut(address), is_ours: 1 }
    }
}

/// The answer about a function of the driver's, asked from `caller` in a process bound by `binding`.
pub(super) fn decide_driver(
    driver: &Driver,
    binding: Binding,
    handle: Pointer,
    name: &CStr,
    caller: usize,
) -> Decision {
    if !driver.hooks().any(|hook| hook.symbol.as_bytes() == name.to_bytes()) {
        return Decision::LOADER;
    }
    let found = if handle == libc::RTLD_NEXT {
        None
    } else if handle != libc::RTLD_DEFAULT {
        loader::dlsym(handle, name)
    } else {
        match binding {
            // Whatever the caller would bind to, which is our export already.
            Binding::ByLoader => None,
            // The driver may come before us in the caller's order.
            Binding::ByAttach => loader::program()
                .and_then(|program| loader::dlsym(program, name))
                .or_else(|| loader::dlsym_of_file(caller, name)),
        }
    };
    let Some(found) = found else {
        return Decision::LOADER;
    };
    let ours = driver.exchanged(found.as_ptr());
    if ours == found.as_ptr() {
        Decision::LOADER
    } else {
        Decision::answer(ours.expose_provenance())
    }
}

/// The answer about function `number` of a library, asked as for [`decide_driver`]. Unlike the driver, a library may
/// be missing, or there twice: our exports must be found only where its own functions would have been.
pub(super) fn decide_library(
    library: &'static Library,
    binding: Binding,
    handle: Pointer,
    number: usize,
    caller: usize,
) -> Decision {
    let name = library.rows()[number].name;
    let copy = if handle == libc::RTLD_NEXT {
        if binding == Binding::ByAttach {
            // The caller came before us, and its order need not have us in it.
            return Decision::LOADER;
        }
        // Behind the caller is less than behind us: with nothing here the loader could only find us.
        return match loader::dlsym(libc::RTLD_NEXT, name) {
            Some(_) => Decision::LOADER,
            None => Decision::answer(0),
        };
    } else if handle == libc::RTLD_DEFAULT {
        library.behind_us().or_else(|| library.of_dependencies(caller))
    } else {
        let Some(found) = loader::dlsym(handle, name) else {
            return Decision::LOADER;
        };
        if loader::is_own(found.as_ptr().expose_provenance()) {
            // The handle of the program itself, whose order we are in, or of a library that needs us and this one.
            library.of_handle(handle).or_else(|| library.behind_us())
        } else {
            match library.of_handle(handle) {
                Some(copy) if copy.is_watched() => Some(copy),
                _ => return Decision::LOADER,
            }
        }
    };
    let found = copy.and_then(|copy| library.answer(copy, number));
    // Asked last, so that a name that is nowhere leaves the caller the loader's error.
    let found = found.or_else(|| {
        loader::dlsym(libc::RTLD_NEXT, name).map(|found| found.as_ptr().expose_provenance())
    });
    Decision::answer(found.unwrap_or(0))
}
