//! Weak references that the loader has bound to us because this library was loaded with the program.
//!
//! A program checks a weak reference to learn whether a library is loaded. Our function would make an absent library seem loaded,
//! so such references are cleared before the program starts. The references of libraries that are opened later stay as the loader
//! binds them: a thread may be between its look at the reference and its call.

use std::ffi::{CStr, CString};
use std::ops::ControlFlow;

use super::object::{self, Object};
use super::protections::Protections;
use super::slots;

/// A weak reference that leads to us.
struct Found {
    slot: usize,
    name: CString,
}

/// Makes each weak reference to a function of Sublet's (`is_ours`) null if no other library has that function
/// (`is_there`).
///
/// Called once, as this library is initialised: all that came with the program is bound, and none of its threads runs.
pub(crate) fn clear(
    is_own: fn(usize) -> bool,
    is_ours: impl Fn(&CStr) -> bool,
    is_there: impl Fn(&CStr) -> bool,
) {
    let mut found = Vec::new();
    object::each(&mut |_, object| {
        found.extend(object.iter().flat_map(|object| leading_to(object, is_own)));
        ControlFlow::Continue(())
    });
    found.retain(|found| is_ours(&found.name) && !is_there(&found.name));
    if found.is_empty() {
        return;
    }
    let protections = Protections::read();
    for found in found {
        if let Err(why) = slots::clear(found.slot, &protections) {
            tracing::warn!(name = %found.name.to_string_lossy(), why, "a weak reference stays");
        }
    }
}

/// Returns the weak references of `object` that lead to us.
fn leading_to(object: &Object<'_>, is_own: fn(usize) -> bool) -> Vec<Found> {
    let Some(imports) = object.imports() else { return Vec::new() };
    let weak = imports.places().filter_map(|place| object.import_at(&imports, place));
    let weak = weak.filter(|import| import.is_weak);
    let ours = weak.filter(|import| object.word(import.slot).map(slots::value).is_some_and(is_own));
    ours.map(|import| Found { slot: import.slot, name: import.name.to_owned() }).collect()
}
