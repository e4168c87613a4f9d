//! How callers come to call us in place of the driver, of NCCL, or of another library.
//!
//! An engine without a table of its own: the functions of others and ours in their place are handed to it as a value, an
//! [`Interposition`], by [`crate::interposed`]. A further library is a further [`Library`] in that value.
//!
//! * [`loader`]: the dynamic loader's own functions, past ours.
//! * [`driver`]: the driver's own functions, past ours, and the exchange of its addresses for ours.
//! * [`library`]: libraries whose public functions we export under their own names; which copy a call is for.
//! * [`lookup`]: what our `dlsym` answers.
//! * [`patch`]: our addresses written into libraries that the loader has bound elsewhere.
//!
//! It decides which function a caller gets. The functions themselves are not its matter.

pub(crate) mod driver;
pub(crate) mod library;
pub(crate) mod loader;
pub(crate) mod lookup;
pub(crate) mod patch;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use driver::Driver;
use library::Library;
use patch::{Patches, Purpose};

/// An argument that is only passed on.
pub(crate) type Pointer = *mut c_void;

/// The address of a function of ours. A function itself, because no constant may hold an address as a number.
pub(crate) type AddressOf = fn() -> usize;

/// How the libraries of this process were bound to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binding {
    /// By the loader: we come before the driver and before all libraries that we stand in for.
    ByLoader,
    /// By an attach: we came after the others, and may be in no library's search order.
    ByAttach,
}

/// The functions that ours stand in for in this process, and the engine's findings about the process.
///
/// Shared by all threads. No lock of it is held around the loader's functions, which take its own.
#[derive(Debug)]
pub(crate) struct Interposition {
    driver: Driver,
    libraries: &'static [&'static Library],
    loader: &'static [(&'static CStr, AddressOf)],
    patches: Patches,
    is_attached: AtomicBool,
    is_forked: AtomicBool,
}

impl Interposition {
    /// Functions of the driver, of `libraries`, and of the loader by their names, with ours in their place.
    pub(crate) const fn new(
        driver: Driver,
        libraries: &'static [&'static Library],
        loader: &'static [(&'static CStr, AddressOf)],
    ) -> Self {
        Self {
            driver,
            libraries,
            loader,
            patches: Patches::new(),
            is_attached: AtomicBool::new(false),
            is_forked: AtomicBool::new(false),
        }
    }

    /// The driver's functions.
    pub(crate) const fn driver(&self) -> &Driver {
        &self.driver
    }

    /// How this process's libraries were bound to us.
    pub(crate) fn binding(&self) -> Binding {
        if self.is_attached.load(Ordering::Acquire) { Binding::ByAttach } else { Binding::ByLoader }
    }

    /// From now on this process's libraries are bound to us by an attach.
    pub(crate) fn bind_by_attach(&self) {
        for library in self.libraries {
            library.bind_by_attach();
        }
        self.is_attached.store(true, Ordering::Release);
    }

    /// Patches nothing any more: we are a forked child, where a lock of the loader's may be held for ever.
    pub(crate) fn set_forked(&self) {
        self.is_forked.store(true, Ordering::Relaxed);
    }

    /// True in a forked child.
    pub(crate) fn is_forked(&self) -> bool {
        self.is_forked.load(Ordering::Relaxed)
    }

    /// Patches what was loaded since the last time, in a process that was attached to. Blocks on no lock but
    /// the loader's of its list, which no thread holds while it waits for us.
    pub(crate) fn look_again(&'static self) {
        if self.binding() == Binding::ByAttach && !self.is_forked() {
            patch::walk(self, Purpose::PatchWhatIsNew);
        }
    }

    /// True when the loader binds the program's `dlsym`, or what else of the loader's we stand in for, to ours.
    pub(crate) fn is_bound_by_loader(&self) -> bool {
        self.loader.first().is_some_and(|(name, _)| {
            let found = loader::program().and_then(|program| loader::dlsym(program, name));
            found.is_some_and(|found| loader::is_own(found.as_ptr().expose_provenance()))
        })
    }

    /// Our functions by the names that libraries import them by.
    fn imports(&self) -> impl Iterator<Item = (&'static [u8], usize)> {
        let driver = self.driver.hooks().map(|hook| (hook.symbol.as_bytes(), (hook.wrapper)()));
        let rows = self.libraries.iter().flat_map(|library| library.rows());
        let libraries = rows.map(|row| (row.name.to_bytes(), (row.exported)()));
        let loader = self.loader.iter().map(|(name, ours)| (name.to_bytes(), ours()));
        driver.chain(libraries).chain(loader)
    }
}
