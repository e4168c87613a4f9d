//! Walks over the loaded libraries, and what is remembered of each.
//!
//! All is done inside one callback of `dl_iterate_phdr`. glibc holds the lock of its list of libraries
//! meanwhile (`dl_load_write_lock`): it adds none and unmaps none, so that what is read and written here is
//! mapped. The lock of [`Known`] is taken inside that callback, and whoever holds it waits for no lock of the
//! loader's; nothing in here may call the loader, which takes its other lock first.

#![expect(unsafe_code, reason = "asks the loader which libraries there are")]

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::object::{Object, Place};
use super::protections::Protections;
use super::slots::{self, Settled};
use super::stored;
use crate::{lookup, real};

/// How often slots that the loader is not done with are looked at again.
const TRIES_MAX: u8 = 32;

/// By what an object is known again. One that is loaded in the place of another, from the same file, is the
/// same: its slots are where the other's were.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    name: CString,
    bias: usize,
    /// How many relocations it has.
    sizes: (usize, usize),
}

/// What is remembered of a library.
#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    /// Its imports of functions that we stand in for.
    places: Vec<Place>,
    /// How many of these lead to us.
    pub(super) slots: usize,
    /// How many addresses were exchanged that it kept.
    pub(super) exchanged: usize,
    /// Why something about it could not be done.
    pub(super) problem: Option<String>,
    /// Has its data been looked through?
    is_searched: bool,
    tries: u8,
    walk: u64,
}

impl Entry {
    /// Does it reach the driver or NCCL, or might it?
    pub(super) fn matters(&self) -> bool {
        !self.places.is_empty() || self.exchanged > 0 || self.problem.is_some()
    }
}

#[derive(Debug, Default)]
struct Known {
    entries: HashMap<Identity, Entry>,
    walks: u64,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
/// How many libraries the loader had ever loaded at the last walk.
static LOADS: AtomicU64 = AtomicU64::new(0);
/// Some slot was not ready at the last walk.
static UNSETTLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Set while this thread walks: what it calls may ask for a symbol.
    static WALKING: Cell<bool> = const { Cell::new(false) };
}

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a walk does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Only looks, since the loader has bound everything to us.
    Look,
    /// Looks at everything and writes.
    Patch,
    /// As `Patch`, unless nothing was loaded since the last walk.
    PatchWhatIsNew,
}

/// One walk under way.
struct Walk {
    purpose: Purpose,
    known: Option<MutexGuard<'static, Known>>,
    protections: OnceCell<Protections>,
    unsettled: bool,
    /// The driver was met.
    driver: bool,
}

/// Prepares what walks need, so that nothing of it is made under the loader's lock.
pub(super) fn prepare() {
    slots::prepare();
    LazyLock::force(&KNOWN);
}

/// Walks over all libraries of the process.
pub(super) fn walk(purpose: Purpose) {
    if walk_once(purpose) == Driver::Unknown && lookup::exchange().is_some() {
        // Whoever brought the driver in, in its initialiser, may keep functions of it already.
        walk_once(Purpose::Patch);
    }
}

/// What a walk met of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    /// It is not in the process, so that nobody keeps a function of it.
    Absent,
    /// It is there, and it is known which of its functions are exchanged.
    Known,
    /// It is there, and has not been asked yet.
    Unknown,
}

fn walk_once(purpose: Purpose) -> Driver {
    let nested = WALKING.try_with(|walking| walking.replace(true)).unwrap_or(true);
    if nested {
        return Driver::Known;
    }
    let mut walk = Walk {
        purpose,
        known: None,
        protections: OnceCell::new(),
        unsettled: false,
        driver: false,
    };
    // SAFETY: `visit` is a callback as `dl_iterate_phdr` takes it, and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut walk).cast()) };
    let _cleared = WALKING.try_with(|walking| walking.set(false));
    let Some(mut known) = walk.known.take() else {
        return Driver::Known;
    };
    // What was not met has been unloaded.
    let walks = known.walks;
    known.entries.retain(|_, entry| {
        entry.is_searched |= !walk.driver;
        entry.walk == walks
    });
    let unknown = walk.driver && purpose != Purpose::Look && lookup::known_exchange().is_none();
    UNSETTLED.store(walk.unsettled, Ordering::Release);
    match (walk.driver, unknown) {
        (false, _) => Driver::Absent,
        (true, true) => Driver::Unknown,
        (true, false) => Driver::Known,
    }
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
        if walk.purpose == Purpose::PatchWhatIsNew
            && info.dlpi_adds == LOADS.load(Ordering::Acquire)
            && !UNSETTLED.load(Ordering::Acquire)
        {
            return 1;
        }
        let mut known = known();
        known.walks += 1;
        walk.known = Some(known);
        LOADS.store(info.dlpi_adds, Ordering::Release);
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
        self.driver |= is_file(object.name, DRIVER_FILE);
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
            Some((import, slots::ours(import.name)?))
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
        if let Some(exchange) = lookup::known_exchange()
            && !entry.is_searched
            && is_ready
        {
            let protections = self.protections.get_or_init(Protections::read);
            entry.exchanged += stored::exchange(object, exchange, protections);
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

/// What is known of the libraries that matter, by path. Calls nothing of the loader's.
pub(super) fn entries() -> Vec<(String, Entry)> {
    let known = known();
    let mattering = known.entries.iter().filter(|(_, entry)| entry.matters());
    let mut entries: Vec<_> = mattering
        .map(|(identity, entry)| (identity.name.to_string_lossy().into_owned(), entry.clone()))
        .collect();
    drop(known);
    entries.sort_by(|one, other| one.0.cmp(&other.0));
    entries
}

/// Is the driver in the process? Opens nothing.
pub(super) fn driver_is_loaded() -> bool {
    real::is_loaded(c"libcuda.so.1")
}
