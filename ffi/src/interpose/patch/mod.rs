//! Our addresses in the libraries that the loader has bound elsewhere: walks over all that are loaded, and their
//! memory of each.
//!
//! 1. A library's import slots ([`slots`], found by [`object`]) of functions that we stand in for lead to us.
//! 2. Addresses of such functions of the driver's that it keeps in its own data are exchanged ([`kept_addresses`]).
//! 3. Libraries that are loaded later are looked at in the next call of our `dlsym`: a program that opens a library asks it
//!    for a symbol next.
//!
//! All is done inside one callback of `dl_iterate_phdr`. glibc holds the lock of its list of libraries
//! meanwhile (`dl_load_write_lock`): it adds none and unmaps none, so that what is read and written here is
//! mapped. The lock of [`Known`] is taken inside that callback, and its holder waits for no lock of the
//! loader's; nothing in here may call the loader, which takes its other lock first.

#![expect(unsafe_code, reason = "asks the loader which libraries there are")]

mod kept_addresses;
mod object;
mod protections;
mod slots;

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use object::{Object, Place};
use protections::Protections;
use slots::Settled;

use super::driver::Driver;

/// How often slots that the loader is not done with are looked at again.
const TRIES_MAX: u8 = 32;

/// The key by which an object is known again. One that is loaded in the place of another, from the same file, is the
/// same: its slots are where the other's were.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    name: CString,
    bias: usize,
    /// How many relocations it has.
    sizes: (usize, usize),
}

/// The memory that walks have of a library.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    /// Its imports of functions that we stand in for.
    places: Vec<Place>,
    /// How many of these lead to us.
    pub(crate) slots: usize,
    /// How many addresses were exchanged that it kept.
    pub(crate) exchanged: usize,
    /// Why something about it could not be done.
    pub(crate) problem: Option<String>,
    /// True when its data has been looked through.
    is_searched: bool,
    tries: u8,
    walk: u64,
}

impl Entry {
    /// Does it reach anything that we stand in for, or might it?
    fn matters(&self) -> bool {
        !self.places.is_empty() || self.exchanged > 0 || self.problem.is_some()
    }
}

#[derive(Debug, Default)]
struct Known {
    entries: HashMap<Identity, Entry>,
    walks: u64,
}

/// The state of a process's walks. The head of this module says in which order it is locked.
#[derive(Debug)]
pub(super) struct Patches {
    ours: OnceLock<Names>,
    known: LazyLock<Mutex<Known>>,
    /// How many libraries the loader had ever loaded at the last walk.
    loads: AtomicU64,
    /// Some slot was not ready at the last walk.
    unsettled: AtomicBool,
}

/// Our functions by the names that libraries import them by.
#[derive(Debug)]
struct Names {
    addresses: HashMap<&'static [u8], usize>,
    /// The bytes that some name begins with: most imports of a process begin otherwise, and all are asked about.
    first_bytes: [bool; 256],
}

impl Names {
    fn new(addresses: HashMap<&'static [u8], usize>) -> Self {
        let mut first_bytes = [false; 256];
        for &first in addresses.keys().filter_map(|name| name.first()) {
            first_bytes[usize::from(first)] = true;
        }
        Self { addresses, first_bytes }
    }

    fn of(&self, name: &CStr) -> Option<usize> {
        let name = name.to_bytes();
        let &first = name.first()?;
        self.first_bytes[usize::from(first)].then(|| self.addresses.get(name).copied()).flatten()
    }
}

impl Patches {
    pub(super) const fn new() -> Self {
        Self {
            ours: OnceLock::new(),
            known: LazyLock::new(Mutex::default),
            loads: AtomicU64::new(0),
            unsettled: AtomicBool::new(false),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes what walks need from `names`: our functions by the names that libraries import them by.
    pub(super) fn prepare(&self, names: impl FnOnce() -> HashMap<&'static [u8], usize>) {
        LazyLock::force(&self.known);
        self.ours.get_or_init(|| Names::new(names()));
    }

    /// Our function for imports of `name`.
    #[cfg(test)]
    pub(super) fn import(&self, name: &CStr) -> Option<usize> {
        self.ours.get()?.of(name)
    }

    /// Walks over all libraries of the process. Does nothing before [`prepare`](Self::prepare).
    pub(super) fn walk(&'static self, driver: &'static Driver, purpose: Purpose) {
        if self.walk_once(driver, purpose) == Met::Unknown && driver.exchange().is_some() {
            // The library whose initialiser brought the driver in may keep functions of it already.
            self.walk_once(driver, Purpose::Patch);
        }
    }

    fn walk_once(&'static self, driver: &'static Driver, purpose: Purpose) -> Met {
        let Some(ours) = self.ours.get() else {
            return Met::Known;
        };
        let nested = WALKING.try_with(|walking| walking.replace(true)).unwrap_or(true);
        if nested {
            return Met::Known;
        }
        let mut walk = Walk {
            driver,
            patches: self,
            ours,
            purpose,
            known: None,
            protections: OnceCell::new(),
            unsettled: false,
            met_driver: false,
        };
        // SAFETY: `visit` is a callback as `dl_iterate_phdr` takes it, and its data outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut walk).cast()) };
        let _cleared = WALKING.try_with(|walking| walking.set(false));
        let Some(mut known) = walk.known.take() else {
            return Met::Known;
        };
        // Libraries that were not met have been unloaded.
        let walks = known.walks;
        known.entries.retain(|_, entry| {
            entry.is_searched |= !walk.met_driver;
            entry.walk == walks
        });
        let unknown =
            walk.met_driver && purpose != Purpose::Look && driver.known_exchange().is_none();
        self.unsettled.store(walk.unsettled, Ordering::Release);
        match (walk.met_driver, unknown) {
            (false, _) => Met::Absent,
            (true, true) => Met::Unknown,
            (true, false) => Met::Known,
        }
    }

    /// The libraries that reach, or may reach, anything that we stand in for; by path. Calls nothing of the loader's.
    pub(super) fn entries(&self) -> Vec<(String, Entry)> {
        let known = self.known();
        let mattering = known.entries.iter().filter(|(_, entry)| entry.matters());
        let mut entries: Vec<_> = mattering
            .map(|(identity, entry)| (identity.name.to_string_lossy().into_owned(), entry.clone()))
            .collect();
        drop(known);
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        entries
    }
}

thread_local! {
    /// Set while this thread walks: what it calls may ask for a symbol.
    static WALKING: Cell<bool> = const { Cell::new(false) };
}

/// The work of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Only looks, since the loader has bound everything to us.
    Look,
    /// Looks at everything and writes.
    Patch,
    /// As `Patch`, unless nothing was loaded since the last walk.
    PatchWhatIsNew,
}

/// One walk under way.
struct Walk {
    driver: &'static Driver,
    patches: &'static Patches,
    ours: &'static Names,
    purpose: Purpose,
    known: Option<MutexGuard<'static, Known>>,
    protections: OnceCell<Protections>,
    unsettled: bool,
    met_driver: bool,
}

/// Whether a walk met the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Met {
    /// It is not in the process, so that no library keeps a function of it.
    Absent,
    /// It is there, and it is known which of its functions are exchanged.
    Known,
    /// It is there, and has not been asked yet.
    Unknown,
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    let walk: *mut Walk = data.cast();
    // SAFETY: `walk` passes its own, which nobody else uses meanwhile.
    let walk = unsafe { &mut *walk };
    // SAFETY: the loader passes a valid structure for the time of the call.
    let info = unsafe { &*info };
    if walk.known.is_none() {
        let patches = walk.patches;
        if walk.purpose == Purpose::PatchWhatIsNew
            && info.dlpi_adds == patches.loads.load(Ordering::Acquire)
            && !patches.unsettled.load(Ordering::Acquire)
        {
            return 1;
        }
        let mut known = patches.known();
        known.walks += 1;
        walk.known = Some(known);
        patches.loads.store(info.dlpi_adds, Ordering::Release);
    }
    // SAFETY: this is the callback, and the object is dropped before it returns.
    let object = unsafe { Object::of_loader(info) };
    let looked = object.map(|object| catch_unwind(AssertUnwindSafe(|| walk.look_at(&object))));
    if matches!(looked, Some(Err(_))) {
        tracing::error!("a library could not be looked at; please report this");
    }
    0
}

impl Walk {
    fn look_at(&mut self, object: &Object<'_>) {
        self.met_driver |= is_file(object.name, DRIVER_FILE);
        if object.contains((visit as *const ()).addr()) || is_left_out(object.name) {
            return;
        }
        let Some(known) = self.known.as_mut() else {
            return;
        };
        let walk = known.walks;
        let Some(imports) = object.imports() else {
            return;
        };
        let identity =
            Identity { name: object.name.to_owned(), bias: object.bias, sizes: imports.sizes() };
        let is_new = !known.entries.contains_key(&identity);
        let entry = known.entries.entry(identity).or_default();
        entry.walk = walk;
        let named = |place: Place| {
            let import = object.import_at(&imports, place)?;
            Some((import, self.ours.of(import.name)?))
        };
        let is_same = entry.places.iter().all(|&place| named(place).is_some());
        if is_new || !is_same {
            *entry = Entry { walk, ..Entry::default() };
            entry.places = imports.places().filter(|&place| named(place).is_some()).collect();
        }
        if self.purpose == Purpose::Look {
            entry.slots = entry.places.len();
            return;
        }
        entry.slots = 0;
        let mut is_ready = true;
        for (import, ours) in entry.places.iter().filter_map(|&place| named(place)) {
            // Read only where there is something to write, once a walk.
            let protections = || self.protections.get_or_init(Protections::read);
            match slots::settle(object, &import, ours, protections) {
                Settled::Ours => entry.slots += 1,
                Settled::Absent => {}
                Settled::NotYet => is_ready = false,
                Settled::Refused(why) => entry.problem = Some(why),
            }
        }
        if !is_ready {
            entry.tries = entry.tries.saturating_add(1);
            if entry.tries < TRIES_MAX {
                self.unsettled = true;
            } else {
                entry.problem = Some("the loader never finished with its imports".to_owned());
            }
        }
        if let Some(exchange) = self.driver.known_exchange()
            && !entry.is_searched
            && is_ready
        {
            let protections = self.protections.get_or_init(Protections::read);
            entry.exchanged += kept_addresses::exchange(object, exchange, protections);
            entry.is_searched = true;
        }
    }
}

/// The driver itself and the loader: their own calls are not ours to see.
fn is_left_out(name: &CStr) -> bool {
    [DRIVER_FILE, b"ld-linux", b"libc.so", b"linux-vdso"].iter().any(|file| is_file(name, file))
}

/// How the driver's file name begins.
const DRIVER_FILE: &[u8] = b"libcuda.so";

fn is_file(name: &CStr, begin: &[u8]) -> bool {
    let file = name.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    file.starts_with(begin)
}
