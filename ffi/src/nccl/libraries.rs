//! Which NCCL a call is for.
//!
//! A process may hold more than one: the first that is seen is watched, others are left alone and people are
//! told. A library is known by where its `ncclGetVersion` is, a name that nobody stands in for.
//!
//! No lock of ours is held around the loader's functions, which take its own: callers may be inside of a
//! library's initialiser. Two threads may then find the same library at once, and one finds it again.

#![expect(unsafe_code, reason = "asks the dynamic loader which library calls, and which it calls")]

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use super::{FUNCTIONS, TABLE};
use crate::{attach, real, runtime};

/// A name that we do not export, and every NCCL has.
const LANDMARK: &CStr = c"ncclGetVersion";
/// The file name under which NCCL is distributed.
const FILE: &CStr = c"libnccl.so.2";
/// How many different ones are told apart.
const LIBRARIES_MAX: usize = 8;

/// One NCCL. Never unloaded: it is opened once more when it is found.
#[derive(Debug)]
pub(crate) struct Library {
    number: usize,
    /// Where the file is mapped.
    base: usize,
    handle: Scope,
    /// [`UNKNOWN`], [`ABSENT`], or an address.
    functions: [AtomicUsize; FUNCTIONS],
}

const UNKNOWN: usize = 0;
const ABSENT: usize = 1;

/// Where names are looked up.
#[derive(Clone, Copy, Debug)]
enum Scope {
    /// Behind us in the order that the whole program uses.
    BehindUs,
    /// A handle, exposed.
    Handle(usize),
}

impl Scope {
    fn find(self, name: &CStr) -> Option<usize> {
        let handle = match self {
            Self::BehindUs => libc::RTLD_NEXT,
            Self::Handle(handle) => std::ptr::with_exposed_provenance_mut(handle),
        };
        real::dlsym(handle, name).map(|found| found.as_ptr().expose_provenance())
    }
}

static LIBRARIES: [AtomicPtr<Library>; LIBRARIES_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; LIBRARIES_MAX];

impl Library {
    /// Is it the one that we watch?
    pub(crate) fn is_watched(&self) -> bool {
        self.number == 0
    }

    /// Its own function of this number.
    pub(crate) fn function(&self, number: usize) -> Option<usize> {
        match self.functions[number].load(Ordering::Relaxed) {
            UNKNOWN => {
                let found = self.handle.find(TABLE[number].name);
                self.functions[number].store(found.unwrap_or(ABSENT), Ordering::Relaxed);
                found
            }
            ABSENT => None,
            address => Some(address),
        }
    }

    /// Its own function of another name.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        self.handle.find(name).map(std::ptr::with_exposed_provenance_mut)
    }
}

fn known(number: usize) -> Option<&'static Library> {
    let library = LIBRARIES.get(number)?.load(Ordering::Acquire);
    // SAFETY: a non-null value was leaked from a box in `library_of` and is never freed.
    unsafe { library.as_ref() }
}

/// The NCCL that we watch, once one has been seen.
pub(crate) fn watched() -> Option<&'static Library> {
    known(0)
}

/// The NCCL whose landmark is at `landmark`; names of it are looked up in `scope`.
fn library_of(landmark: usize, scope: Scope) -> Option<&'static Library> {
    let (base, path) = real::image_of(landmark)?;
    for (number, place) in LIBRARIES.iter().enumerate() {
        if let Some(library) = known(number) {
            if library.base == base {
                return Some(library);
            }
            continue;
        }
        let handle = match scope {
            Scope::BehindUs => Scope::BehindUs,
            Scope::Handle(_) => Scope::Handle(real::open_loaded(&path)?.expose_provenance()),
        };
        // The landmark's library must not go away, wherever it is looked up.
        let _kept = real::open_loaded(&path);
        let functions = [const { AtomicUsize::new(UNKNOWN) }; FUNCTIONS];
        let fresh = Box::into_raw(Box::new(Library { number, base, handle, functions }));
        let (null, order) = (std::ptr::null_mut(), Ordering::AcqRel);
        if place.compare_exchange(null, fresh, order, Ordering::Acquire).is_ok() {
            note_second(number, &path);
            return known(number);
        }
        // SAFETY: the exchange failed, so nobody else has seen this box.
        drop(unsafe { Box::from_raw(fresh) });
        // Another thread has put one here: perhaps this one.
        if let Some(library) = known(number).filter(|library| library.base == base) {
            return Some(library);
        }
    }
    None
}

fn note_second(number: usize, path: &CStr) {
    let path = path.to_string_lossy();
    if number == 0 {
        tracing::debug!(%path, "NCCL");
    } else if let Some(member) = runtime::member() {
        member.note(format!(
            "a second NCCL is in use, {path}: a pause in the middle of its collectives times out"
        ));
    } else {
        tracing::warn!(%path, "a second NCCL is in use, which is not watched");
    }
}

/// The NCCL that a program finds without naming a library.
pub(crate) fn behind_us() -> Option<&'static Library> {
    if attach::is_attached() {
        // We came after the others then, so that nothing is behind us. The landmark is not ours.
        return of_handle(real::program()?);
    }
    library_of(Scope::BehindUs.find(LANDMARK)?, Scope::BehindUs)
}

/// The NCCL that `handle`, which must be an explicit one, leads to.
pub(crate) fn of_handle(handle: *mut c_void) -> Option<&'static Library> {
    let scope = Scope::Handle(handle.expose_provenance());
    library_of(scope.find(LANDMARK)?, scope)
}

/// The NCCL that the library which holds `address` depends on, or is.
pub(crate) fn of_dependencies(address: usize) -> Option<&'static Library> {
    let (_, path) = real::image_of(address)?;
    let handle = real::open_loaded(&path)?;
    let found = of_handle(handle);
    real::close(handle);
    found
}

/// Call sites that have been looked up, in the places that their addresses allow.
static SITES: [AtomicU64; SITES_MAX] = [const { AtomicU64::new(0) }; SITES_MAX];
const SITES_MAX: usize = 1024;
/// How many places one address allows: a process has some tens of call sites.
const SITE_PLACES: usize = 4;

/// A call site: its address, above it the number of its NCCL, and whether it is in that NCCL itself. 0 when
/// there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site(u64);

impl Site {
    const NUMBER_SHIFT: u32 = 48;
    const OWN: u64 = 1 << 56;
    const ADDRESS: u64 = (1 << Self::NUMBER_SHIFT) - 1;

    fn new(caller: usize, library: &Library, is_own: bool) -> Self {
        let own = if is_own { Self::OWN } else { 0 };
        Self(caller as u64 & Self::ADDRESS | (library.number as u64) << Self::NUMBER_SHIFT | own)
    }

    fn is_at(self, caller: usize) -> bool {
        self.0 & Self::ADDRESS == caller as u64 & Self::ADDRESS
    }

    fn library(self) -> Option<(&'static Library, bool)> {
        let number = usize::try_from((self.0 & !Self::OWN) >> Self::NUMBER_SHIFT).ok()?;
        known(number).map(|library| (library, self.0 & Self::OWN != 0))
    }

    fn places(caller: usize) -> impl Iterator<Item = &'static AtomicU64> {
        // Return addresses are anywhere: the low bits tell neighbours apart.
        let first = caller ^ (caller >> 10);
        (0..SITE_PLACES).map(move |next| &SITES[first.wrapping_add(next) % SITES_MAX])
    }

    fn find(caller: usize) -> Option<Self> {
        Self::places(caller)
            .map(|place| Self(place.load(Ordering::Relaxed)))
            .find(|site| site.is_at(caller))
    }

    /// Two threads may take one place at once; the one that loses it is looked up again.
    fn keep(self, caller: usize) {
        let free = Self::places(caller).find(|place| place.load(Ordering::Relaxed) == 0);
        if let Some(place) = free.or_else(|| Self::places(caller).next()) {
            place.store(self.0, Ordering::Relaxed);
        }
    }
}

/// The NCCL that a call from code at `caller` is for, and whether that NCCL itself makes it. As the loader
/// would have bound the caller without us: the program's order first, then the caller's own dependencies.
pub(crate) fn of_caller(caller: usize) -> Option<(&'static Library, bool)> {
    if let Some(site) = Site::find(caller) {
        return site.library();
    }
    let library = behind_us().or_else(|| of_dependencies(caller)).or_else(anywhere)?;
    let is_own = is_nccl_file(caller, library);
    Site::new(caller, library, is_own).keep(caller);
    Some((library, is_own))
}

/// For callers that depend on no NCCL themselves, and were given the address.
fn anywhere() -> Option<&'static Library> {
    if let Some(library) = watched() {
        return Some(library);
    }
    let handle = real::open_loaded(FILE)?;
    let found = of_handle(handle);
    real::close(handle);
    found
}

/// Is the caller NCCL's own code? A program or framework that NCCL is linked into is not.
fn is_nccl_file(caller: usize, library: &Library) -> bool {
    real::image_of(caller).is_some_and(|(base, path)| {
        let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        base == library.base && name.starts_with(b"libnccl")
    })
}
