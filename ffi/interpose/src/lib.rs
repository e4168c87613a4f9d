//! The engine that leads callers to Sublet's functions instead of other libraries'.
//!
//! It has no table of its own. It gets the functions of others, and Sublet's replacements, as one value, an [`Interposition`]. A
//! further library needs a further [`Library`] in that value.
//!
//! * [`loader`]: the dynamic loader's own functions, called without the hooks.
//! * [`provider`]: the library that returns its functions by address, and the exchange of its addresses for ours.
//! * [`library`]: libraries whose public functions we export under their own names, and the choice of the copy for a call.
//! * `lookup`: the answers of our `dlsym`.
//! * `patch`: our addresses written into libraries that the loader has bound elsewhere.
//!
//! The engine decides which function a caller gets. It knows no GPU, no memory and no other process. Nothing here prints,
//! exits or unwinds.

#![expect(unsafe_code, reason = "reads the names that callers of dlsym ask for")]

pub mod library;
pub mod loader;
mod lookup;
mod patch;
pub mod provider;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_char};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use library::Library;
use lookup::{decide_library, decide_provider};
use patch::{Ours, Patches};
use provider::Provider;

pub use loader::{AddressOf, Binding, Pointer};
pub use lookup::Decision;
pub use patch::{Entry, Purpose};

/// Returns the function at `address`, with the type of ours.
///
/// # Safety
/// The function there has the signature of `_ours`, which is a pointer to a function.
pub unsafe fn alike<F: Copy>(_ours: F, address: Pointer) -> F {
    const { assert!(size_of::<F>() == size_of::<Pointer>()) };
    // SAFETY: as this function's caller promises, and both are as large.
    unsafe { std::mem::transmute_copy(&address) }
}

/// An argument type that the compiler infers.
#[macro_export]
macro_rules! any {
    ($value:expr) => {
        _
    };
}

/// A C string of an identifier.
#[macro_export]
macro_rules! c_name {
    ($symbol:ident) => {
        match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        }
    };
}

/// A function of the loader, and our replacement.
#[derive(Clone, Copy, Debug)]
pub struct LoaderFunction {
    /// Its name.
    pub name: &'static CStr,
    /// Ours.
    pub ours: AddressOf,
    /// Do we export that name? A function that is not exported is reached only through the slots of libraries that import it.
    pub is_exported: bool,
}

/// The functions that ours replace in this process, and the engine's findings about the process.
///
/// Shared by all threads. None of its locks is held around the loader's functions, which take the loader's locks.
#[derive(Debug)]
pub struct Interposition {
    provider: Provider,
    libraries: &'static [&'static Library],
    /// The loader's functions with our replacements, exported ones first.
    loader: &'static [LoaderFunction],
    patches: Patches,
    is_forked: AtomicBool,
    /// Whether the loader binds the program to us: [`UNASKED`], or an answer. No lock is held around the query, which takes the
    /// loader's lock: the caller may hold that one.
    is_ours_first: AtomicU8,
    /// The process that first walked; 0 when none has.
    walker: AtomicU32,
}

/// Is `handle` a pseudo-handle, which names no certain library?
fn is_pseudo(handle: Pointer) -> bool {
    handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT
}

const UNASKED: u8 = 0;
const OURS: u8 = 1;
const ANOTHERS: u8 = 2;

/// The longest time that a walk may take in a forked child.
const CHILD_WALK_MAX: Duration = Duration::from_secs(2);

impl Interposition {
    /// Creates the engine's value from the functions of the provider, of `libraries`, and of the loader, with our replacements.
    pub const fn new(
        provider: Provider,
        libraries: &'static [&'static Library],
        loader: &'static [LoaderFunction],
    ) -> Self {
        Self {
            provider,
            libraries,
            loader,
            patches: Patches::new(),
            is_forked: AtomicBool::new(false),
            is_ours_first: AtomicU8::new(UNASKED),
            walker: AtomicU32::new(0),
        }
    }

    /// Returns the functions that are exchanged by address.
    pub const fn provider(&self) -> &Provider {
        &self.provider
    }

    /// Notes that an attach binds this process's libraries to us from now on.
    pub fn bind_by_attach(&'static self) {
        self.prepare();
        loader::IS_ATTACHED.store(true, Ordering::Release);
    }

    /// Clears the program's weak references to functions that only this library has.
    pub fn start(&self) {
        let is_ours = |name: &CStr| self.provider.has(name) || self.row(name).is_some();
        patch::weak::clear(loader::is_own, is_ours, lookup::is_behind_us);
        loader::forget_error();
    }

    /// Stops all patches in a forked child, where a lock of the loader may be held for ever.
    pub fn set_forked(&self) {
        self.is_forked.store(true, Ordering::Relaxed);
    }

    /// Is this a forked child?
    pub fn is_forked(&self) -> bool {
        self.is_forked.load(Ordering::Relaxed)
    }

    /// Patches libraries that were loaded since the last walk. Blocks only on the lock of the loader's list, which no thread
    /// holds while it waits for us.
    fn look_again(&'static self) {
        if self.walks() && !self.is_child() {
            self.walk(Purpose::PatchWhatIsNew);
        }
    }

    /// Do walks write in this process? They do not if another library's `dlsym` comes before ours: its calls come to us.
    fn walks(&self) -> bool {
        Binding::of_process() == Binding::ByAttach || self.is_bound_by_loader()
    }

    /// Is this a forked child of a process that had walked? A lock of the loader may be held there for ever.
    pub fn is_child(&self) -> bool {
        let own = std::process::id();
        let order = Ordering::Relaxed;
        self.is_forked()
            || self.walker.compare_exchange(0, own, order, order).is_err_and(|walker| walker != own)
    }

    /// Walks before a pause, and returns why work of this process may reach a device past the hooks, if it may. In a forked child
    /// a separate thread walks. It is left behind if the loader's lock is held for ever.
    pub fn escape(&'static self) -> Option<String> {
        if !self.walks() {
            return None;
        }
        if self.is_child() {
            let (done, walked) = std::sync::mpsc::channel();
            let walk = move || {
                self.walk(Purpose::Pause);
                let _heard = done.send(());
            };
            sublet_sync::threads::spawn("sublet-walk", walk, |_| {}).ok()?;
            walked.recv_timeout(CHILD_WALK_MAX).ok()?;
        } else {
            self.walk(Purpose::Pause);
        }
        let problem = |(path, entry): (String, Entry)| Some((path, entry.problem?));
        let missed = self.walked().into_iter().find_map(problem);
        let missed =
            missed.map(|(path, why)| format!("launches from {path} may pass Sublet by ({why})"));
        missed.or_else(|| {
            let library = self.patches.provider_elsewhere()?;
            Some(format!(
                "{library} is loaded in a namespace of its own (dlmopen), and launches through it pass Sublet by: \
                 open what uses it with dlopen"
            ))
        })
    }

    /// Does the loader bind the program to our functions instead of its own, such as `dlsym`?
    pub fn is_bound_by_loader(&self) -> bool {
        let known = self.is_ours_first.load(Ordering::Relaxed);
        if known != UNASKED {
            return known == OURS;
        }
        let is_ours = self.loader.first().is_some_and(|function| {
            let found = loader::program().and_then(|program| loader::dlsym(program, function.name));
            found.is_some_and(|found| loader::is_own(found.as_ptr().expose_provenance()))
        });
        self.is_ours_first.store(if is_ours { OURS } else { ANOTHERS }, Ordering::Relaxed);
        is_ours
    }

    /// Prepares the data that walks need. Called before [`bind_by_attach`](Self::bind_by_attach) lets other threads walk, so that
    /// none of it is allocated under the loader's lock.
    pub fn prepare(&'static self) {
        self.patches.prepare(|| {
            let exported = |address| Ours { address, is_exported: true };
            let hooks = self.provider.hooks();
            let provider = hooks.map(|hook| (hook.symbol.as_bytes(), exported((hook.ours)())));
            let rows = self.libraries.iter().flat_map(|library| library.rows());
            let libraries = rows.map(|row| (row.name.to_bytes(), exported((row.exported)())));
            let loader = self.loader.iter().map(|function| {
                let ours = Ours { address: (function.ours)(), is_exported: function.is_exported };
                (function.name.to_bytes(), ours)
            });
            let all = provider.chain(libraries).chain(loader);
            if !self.is_bound_by_loader() {
                return all.collect();
            }
            all.filter(|(name, _)| !self.is_anothers(name)).collect()
        });
    }

    /// In a process that the loader bound to us: does another library or the program come before us with its own function `name`?
    /// Then callers are meant to find that function.
    fn is_anothers(&self, name: &[u8]) -> bool {
        let Some(name) = CString::new(name).ok() else {
            return false;
        };
        let found = loader::program().and_then(|program| loader::dlsym(program, &name));
        let found = found.map(|found| found.as_ptr().expose_provenance());
        found.is_some_and(|found| {
            !loader::is_own(found)
                && loader::file_of(found)
                    .is_some_and(|file| !self.provider.is_left_out(file.as_bytes()))
        })
    }

    /// Returns our function for imports of `name`. None before [`prepare`](Self::prepare).
    pub fn import(&self, name: &CStr) -> Option<usize> {
        self.patches.import(name)
    }

    /// Walks over all libraries of the process.
    pub fn walk(&'static self, purpose: Purpose) {
        self.prepare();
        self.patches.walk(&self.provider, purpose);
    }

    /// Returns the libraries that reach, or may reach, a function that we replace; by path. Calls no function of the loader.
    pub fn walked(&self) -> Vec<(String, Entry)> {
        self.patches.entries()
    }

    /// Checks whether all calls of the library that is distributed as `file` come to us. The last walk answers.
    ///
    /// # Errors
    /// The reason why they may not: it is not among the loader's libraries, or a library may have looked up its functions past
    /// us.
    pub fn sees_calls_of(&self, file: &CStr) -> Result<(), String> {
        if !self.walks() {
            return Err("another library's dlsym comes before that of Sublet".to_owned());
        }
        let stem = provider::stem_of(file);
        let name = String::from_utf8_lossy(stem);
        if !self.patches.has_loaded(stem) {
            return Err(format!("{name} is not loaded, so that something else registers there"));
        }
        match self.patches.looked_up_past_us(stem) {
            Some(by) => Err(format!("{by} may have looked {name} up past Sublet")),
            None => Ok(()),
        }
    }

    /// Returns our answer to `dlvsym(handle, name, version)`: our function, if the version is the one with which the watched copy
    /// is called.
    ///
    /// # Safety
    /// `name` and `version` are null or terminated strings.
    pub unsafe fn answer_versioned(
        &'static self,
        handle: Pointer,
        name: *const c_char,
        version: *const c_char,
    ) -> Decision {
        // The jump needs it.
        loader::REAL_DLVSYM.store(libc::dlvsym as *const () as usize, Ordering::Release);
        if is_pseudo(handle) || name.is_null() || version.is_null() {
            return Decision::LOADER;
        }
        // SAFETY: the caller promises a terminated string.
        let name = unsafe { CStr::from_ptr(name) };
        if !self.is_for_us(handle, name) {
            return Decision::LOADER;
        }
        let Some((library, number)) = self.row(name) else {
            return Decision::LOADER;
        };
        // SAFETY: as above.
        let version = unsafe { CStr::from_ptr(version) };
        let Some(found) = loader::dlvsym(handle, name, version) else {
            return Decision::LOADER;
        };
        let ours = library.of_handle(handle).and_then(|copy| {
            let own = copy.function(number)?;
            let is_it = own == found.as_ptr().expose_provenance();
            is_it.then(|| library.answer(copy, number)).flatten()
        });
        ours.map_or(Decision::LOADER, Decision::answer)
    }

    /// May `name` be one of our functions? Libraries that were loaded meanwhile are patched first.
    ///
    /// Other names in no certain library are recognised by their first bytes: sanitizers and allocators look them up before
    /// thread-locals work, and before memory can be allocated. A lookup in a certain library may be the program's first in a
    /// library that it has just opened, before that library looks up any name.
    fn is_for_us(&'static self, handle: Pointer, name: &CStr) -> bool {
        let is_ours = self.may_have(name);
        if !is_ours && is_pseudo(handle) && Binding::of_process() == Binding::ByLoader {
            return false;
        }
        if loader::is_looking() {
            return false;
        }
        self.look_again();
        is_ours
    }

    /// Does `name` begin like a name in a table?
    fn may_have(&self, name: &CStr) -> bool {
        let others = self.libraries.iter().map(|library| library.prefix());
        let mut prefixes = std::iter::once(self.provider.prefix()).chain(others);
        prefixes.any(|prefix| name.to_bytes().starts_with(prefix.as_bytes()))
    }

    /// Returns the library that has `name` in its table, and the number there.
    fn row(&self, name: &CStr) -> Option<(&'static Library, usize)> {
        self.libraries.iter().find_map(|library| Some((*library, library.number_of(name)?)))
    }

    /// Our answer to `dlsym(handle, name)`, asked from `caller`.
    fn decide(&self, handle: Pointer, name: &CStr, caller: usize) -> Decision {
        if name.to_bytes().starts_with(self.provider.prefix().as_bytes()) {
            return decide_provider(&self.provider, handle, name, caller);
        }
        match self.row(name) {
            Some((library, number)) => decide_library(library, handle, number, caller),
            None => Decision::LOADER,
        }
    }

    /// Our answer to `dlsym(handle, name)`, asked from `caller`. The address of the loader's own `dlsym` is known
    /// afterwards, which a jump to it needs.
    ///
    /// # Safety
    /// `name` is null or a terminated string.
    pub unsafe fn answer(
        &'static self,
        handle: Pointer,
        name: *const c_char,
        caller: usize,
    ) -> Decision {
        if loader::find_dlsym().is_none() || name.is_null() {
            return Decision::LOADER;
        }
        // SAFETY: the caller promises a terminated string.
        let name = unsafe { CStr::from_ptr(name) };
        if !self.is_for_us(handle, name) {
            return Decision::LOADER;
        }
        self.decide(handle, name, caller)
    }
}
