//! The answers of our `dlsym`: one of our functions, or the loader's own answer.

#![expect(unsafe_code, reason = "reads the names that callers of dlsym ask for")]

use std::ffi::{CStr, c_char};

use super::library::Library;
use super::{Binding, Interposition, Pointer, loader};

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

impl Interposition {
    /// Our answer to `dlsym(handle, name)`, asked from `caller` in a process bound by `binding`.
    pub(crate) fn decide(
        &self,
        binding: Binding,
        handle: Pointer,
        name: &CStr,
        caller: usize,
    ) -> Decision {
        if name.to_bytes().starts_with(b"cu") {
            return self.decide_driver(binding, handle, name, caller);
        }
        let found =
            self.libraries.iter().find_map(|library| Some((library, library.number_of(name)?)));
        match found {
            Some((library, number)) => decide_library(library, binding, handle, number, caller),
            None => Decision::LOADER,
        }
    }

    fn decide_driver(
        &self,
        binding: Binding,
        handle: Pointer,
        name: &CStr,
        caller: usize,
    ) -> Decision {
        if !self.driver.hooks().any(|hook| hook.symbol.as_bytes() == name.to_bytes()) {
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
        let ours = self.driver.exchanged(found.as_ptr());
        if ours == found.as_ptr() {
            Decision::LOADER
        } else {
            Decision::answer(ours.expose_provenance())
        }
    }
}

/// Unlike the driver, a library may be missing, or there twice: our exports must be found only where its own
/// functions would have been.
fn decide_library(
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

/// [`Interposition::decide`] with the arguments of C. The address of the loader's own `dlsym` is known afterwards, which a
/// jump to it needs.
///
/// # Safety
/// `name` is null or a terminated string.
pub(crate) unsafe fn decided(
    interposition: &'static Interposition,
    handle: Pointer,
    name: *const c_char,
    caller: usize,
) -> Decision {
    if loader::find_dlsym().is_none() || name.is_null() || loader::is_looking() {
        return Decision::LOADER;
    }
    // Whoever opens a library asks it for a symbol next, before the library itself asks anybody.
    interposition.look_again();
    // SAFETY: the caller promises a terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    interposition.decide(interposition.binding(), handle, name, caller)
}
