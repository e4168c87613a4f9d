//! Weak references that the loader has bound to us because we came with the program.
//!
//! A weak reference is a question: is the library here? Ours would answer yes for a library that is not, so those references are
//! null again before the program starts. The references of libraries that are opened later stay as the loader binds them: a thread
//! may be between its look at the reference and its call.

#![expect(unsafe_code, reason = "asks the loader which libraries there are")]

use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::object::Object;
use super::protections::Protections;
use super::slots;

/// A weak reference that leads to us.
struct Found {
    slot: usize,
    name: CString,
}

struct Search {
    /// Weak references of all libraries that lead to us.
    found: Vec<Found>,
    own: fn(usize) -> bool,
}

/// Makes null each weak reference to a function of ours, told by `is_ours`, which `is_there` says that nobody else has.
///
/// Called once, as this library is initialised: all that came with the program is bound, and none of its threads runs.
pub(crate) fn clear(
    is_own: fn(usize) -> bool,
    is_ours: impl Fn(&CStr) -> bool,
    is_there: impl Fn(&CStr) -> bool,
) {
    let mut search = Search { found: Vec::new(), own: is_own };
    // SAFETY: `visit` is a callback as `dl_iterate_phdr` takes it, and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found.retain(|found| is_ours(&found.name) && !is_there(&found.name));
    if search.found.is_empty() {
        return;
    }
    let protections = Protections::read();
    for found in search.found {
        if let Err(why) = slots::clear(found.slot, &protections) {
            tracing::warn!(name = %found.name.to_string_lossy(), why, "a weak reference stays");
        }
    }
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    let search: *mut Search = data.cast();
    // SAFETY: `clear` passes its own, which nobody else uses meanwhile.
    let search = unsafe { &mut *search };
    // SAFETY: the loader passes a valid structure for the time of the call.
    let info = unsafe { &*info };
    // SAFETY: this is the callback, and the object is dropped before it returns.
    let object = unsafe { Object::of_loader(info) };
    let looked = object.map(|object| catch_unwind(AssertUnwindSafe(|| search.look_at(&object))));
    drop(looked);
    0
}

impl Search {
    fn look_at(&mut self, object: &Object<'_>) {
        let Some(imports) = object.imports() else { return };
        for place in imports.places() {
            let import = object.import_at(&imports, place).filter(|import| import.is_weak);
            let Some(import) = import else { continue };
            let leads_to = object.word(import.slot).map(slots::value);
            if leads_to.is_some_and(self.own) {
                self.found.push(Found { slot: import.slot, name: import.name.to_owned() });
            }
        }
    }
}
