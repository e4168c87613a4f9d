//! The answers of our `dlsym`: one of our functions, or the loader's own answer.

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

use super::library::Library;
use super::loader::{self, Binding, Pointer};
use super::patch::order;
use super::provider::Provider;

/// The answer to one lookup, in the two registers that the assembly of our `dlsym` reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Decision {
    address: Pointer,
    /// 0 when the loader answers.
    is_ours: usize,
}

impl Decision {
    /// The loader answers, as if it had been called itself.
    pub const LOADER: Self = Self { address: std::ptr::null_mut(), is_ours: 0 };

    /// Returns a decision with this answer; 0 means that there is no such function.
    pub(super) fn answer(address: usize) -> Self {
        Self { address: std::ptr::with_exposed_provenance_mut(address), is_ours: 1 }
    }
}

/// Decides the answer about a function of the provider, looked up from `caller`. A name is found only where it would be found
/// without us: libraries take a name of the provider as a sign that the provider exists.
pub(super) fn decide_provider(
    provider: &Provider,
    handle: Pointer,
    name: &CStr,
    caller: usize,
) -> Decision {
    if !provider.has(name) {
        return Decision::LOADER;
    }
    let found = if handle == libc::RTLD_NEXT {
        next_of_provider(provider, name, caller)
    } else if handle != libc::RTLD_DEFAULT {
        loader::dlsym(handle, name)
    } else {
        match Binding::of_process() {
            // The function that the caller would bind to. It is our export if no other library comes first.
            Binding::ByLoader => loader::program().and_then(|program| loader::dlsym(program, name)),
            // The provider may come before us in the caller's order.
            Binding::ByAttach => {
                loader::program().and_then(|program| loader::dlsym(program, name)).or_else(|| {
                    let (_, file) = loader::image_of(caller)?;
                    loader::with_function(&file, name, |found| found)
                })
            }
        }
    };
    let Some(found) = found else {
        return Decision::LOADER;
    };
    if loader::is_own(found.as_ptr().expose_provenance()) {
        let is_there = match Binding::of_process() {
            Binding::ByLoader => {
                is_behind_us(name) || handle == libc::RTLD_DEFAULT && is_around(name, caller)
            }
            // After an attach, no library is after this one.
            Binding::ByAttach => provider.library().symbol(name).is_some(),
        };
        // The loader's lookup has just failed, and the caller reads that error.
        return if is_there { Decision::LOADER } else { Decision::answer(0) };
    }
    let ours = provider.exchanged(found.as_ptr());
    if ours == found.as_ptr() {
        Decision::LOADER
    } else {
        Decision::answer(ours.expose_provenance())
    }
}

/// Would a program that names no library find `name` without this library?
pub(super) fn is_behind_us(name: &CStr) -> bool {
    loader::dlsym(libc::RTLD_NEXT, name).is_some()
}

/// Does a library that was loaded together with `caller`, and is searched for it, have `name`?
fn is_around(name: &CStr, caller: usize) -> bool {
    let found = order::around(caller).iter().any(|file| own(file, name).is_some());
    if !found {
        let _error_of_the_search = is_behind_us(name);
    }
    found
}

/// Returns the function `name` of the loaded file at `path` itself. Functions of its dependencies are found when those are
/// searched.
fn own(path: &CString, name: &CStr) -> Option<NonNull<c_void>> {
    loader::with_function(path, name, |found| found).filter(|found| {
        let holder = loader::image_of(found.as_ptr().expose_provenance());
        holder.is_some_and(|(_, holder)| holder == *path)
    })
}

/// Returns the function `name` that the loader finds after `caller`; else whether `RTLD_GLOBAL` may lead further.
fn next(name: &CStr, caller: usize) -> Result<NonNull<c_void>, bool> {
    let behind = order::behind(caller);
    behind.files.iter().find_map(|file| own(file, name)).ok_or(behind.goes_on)
}

/// The provider's function, or another library's in its place, that the loader finds behind `caller`. Where libraries that
/// are in no certain order may have it, the provider's own: what passes us by is worse than what is found too often.
fn next_of_provider(provider: &Provider, name: &CStr, caller: usize) -> Option<NonNull<c_void>> {
    if loader::file_of(caller).is_some_and(|file| provider.is_left_out(file.as_bytes())) {
        return None;
    }
    next(name, caller)
        .or_else(|goes_on| {
            let library = provider.library();
            let is_known = goes_on && library.is_loaded();
            is_known.then(|| library.symbol(name)).flatten().ok_or(())
        })
        .ok()
}

/// The answer about function `number` of a library, looked up behind `caller`. A library that stands between us and the
/// watched copy gets what is behind it: what we call calls on there.
fn decide_next(library: &'static Library, number: usize, caller: usize) -> Decision {
    let name = library.rows()[number].name;
    let whole = match Binding::of_process() {
        Binding::ByLoader => Some(libc::RTLD_NEXT),
        Binding::ByAttach => loader::program(),
    };
    let further = |goes_on| whole.filter(|_| goes_on).and_then(|whole| loader::dlsym(whole, name));
    let found = next(name, caller).map_or_else(further, Some);
    let found = found.map(|found| found.as_ptr().expose_provenance());
    let is_others =
        |found: &usize| !loader::is_own(*found) && !loader::is_same_file(*found, caller);
    if let Some(found) = found.filter(is_others) {
        // The copy that all callers find without naming a library is known as that one first.
        let _first = library.behind_us();
        let copy = library.of_dependencies(found);
        let watched = copy.filter(|copy| copy.is_watched() && copy.function(number) == Some(found));
        let ours = watched.and_then(|copy| library.answer(copy, number));
        return ours.map_or(Decision::LOADER, Decision::answer);
    }
    if Binding::of_process() == Binding::ByAttach {
        return Decision::LOADER;
    }
    // Behind the caller is less than behind us: with nothing here the loader could only find us.
    match loader::dlsym(libc::RTLD_NEXT, name) {
        Some(_) => Decision::LOADER,
        None => Decision::answer(0),
    }
}

/// The answer about function `number` of a library, asked as for [`decide_provider`]. Unlike the provider, a library may
/// be missing, or there twice: our exports must be found only where its own functions would have been.
pub(super) fn decide_library(
    library: &'static Library,
    handle: Pointer,
    number: usize,
    caller: usize,
) -> Decision {
    let name = library.rows()[number].name;
    let copy = if handle == libc::RTLD_NEXT {
        return decide_next(library, number, caller);
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
    // This lookup is last, so that a name that is nowhere leaves the loader's error for the caller.
    let found = found.or_else(|| {
        loader::dlsym(libc::RTLD_NEXT, name).map(|found| found.as_ptr().expose_provenance())
    });
    Decision::answer(found.unwrap_or(0))
}
