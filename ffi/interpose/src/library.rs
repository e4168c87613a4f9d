//! Libraries whose public functions we export under their own names, and the choice of the copy for a call.
//!
//! A process may have more than one copy of a library. The first one that is seen is watched. Others are left alone, and the
//! process's owner is told. A copy is identified by the address of its landmark, a name that no table has.
//!
//! None of our locks is held around the loader's functions, which take the loader's locks: callers may be inside of a library's
//! initialiser. So two threads may find the same copy simultaneously, and one of them finds it again.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::loader::{self, AddressOf, Binding};

/// The most copies of one library that are distinguished.
const COPIES_MAX: usize = 8;

/// The destination of a function's calls.
#[derive(Clone, Copy, Debug)]
pub enum Treatment {
    /// Calls go to this function of ours.
    Replace(AddressOf),
    /// Calls go to the library's own function, after our function here has got its name.
    Tell(fn(&CStr)),
}

/// A function that we replace.
#[derive(Debug)]
pub struct Row {
    /// The function's name.
    pub name: &'static CStr,
    /// The destination of its calls.
    pub verdict: Treatment,
    /// Our export of that name.
    pub exported: AddressOf,
}

/// The marks of a library, and its functions that Sublet replaces.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// The beginning of its functions' names.
    pub prefix: &'static str,
    /// A name that every copy has and that we do not export.
    pub landmark: &'static CStr,
    /// The file name under which it is distributed. The names of its files begin with the part before the first dot.
    pub file: &'static CStr,
    /// The functions that we stand in for, by number.
    pub table: &'static [Row],
    /// Called once for each copy that is found, with its path, and whether Sublet watches it.
    pub found: fn(&CStr, bool),
}

/// A library, and what is known of its copies in this process. Lives as long as the process; shared by all
/// threads.
#[derive(Debug)]
pub struct Library {
    description: Description,
    copies: [OnceLock<Loaded>; COPIES_MAX],
    sites: Sites,
}

/// One copy of a library. It is never unloaded, because it is opened once more when it is found.
#[derive(Debug)]
pub struct Loaded {
    number: usize,
    /// The address at which the file is mapped.
    base: usize,
    scope: Scope,
    table: &'static [Row],
    /// [`UNKNOWN`], [`ABSENT`], or an address; by number of the function.
    functions: Box<[AtomicUsize]>,
}

const UNKNOWN: usize = 0;
const ABSENT: usize = 1;

/// The place in which names are looked up.
#[derive(Clone, Copy, Debug)]
enum Scope {
    /// After this library, in the order that the whole program uses.
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
        loader::dlsym(handle, name).map(|found| found.as_ptr().expose_provenance())
    }
}

impl Loaded {
    /// Is this the copy that Sublet watches?
    pub fn is_watched(&self) -> bool {
        self.number == 0
    }

    /// Returns the copy's own function of this number.
    pub fn function(&self, number: usize) -> Option<usize> {
        let known = self.functions.get(number)?;
        match known.load(Ordering::Relaxed) {
            UNKNOWN => {
                let found = self.scope.find(self.table[number].name);
                known.store(found.unwrap_or(ABSENT), Ordering::Relaxed);
                found
            }
            ABSENT => None,
            address => Some(address),
        }
    }

    /// Returns the copy's own function of another name.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        self.scope.find(name).map(std::ptr::with_exposed_provenance_mut)
    }
}

impl Library {
    /// Creates a library of which no copy is known yet.
    pub const fn new(description: Description) -> Self {
        Self { description, copies: [const { OnceLock::new() }; COPIES_MAX], sites: Sites::new() }
    }

    /// The functions that we stand in for, by number.
    pub fn rows(&self) -> &'static [Row] {
        self.description.table
    }

    /// Returns the beginning of its functions' names.
    pub(super) fn prefix(&self) -> &'static str {
        self.description.prefix
    }

    /// Returns the number of the function `name`.
    pub(super) fn number_of(&self, name: &CStr) -> Option<usize> {
        if !name.to_bytes().starts_with(self.prefix().as_bytes()) {
            return None;
        }
        self.rows().iter().position(|row| row.name == name)
    }

    fn copy(&self, number: usize) -> Option<&Loaded> {
        self.copies.get(number)?.get()
    }

    /// Returns the copy that we watch, once one has been seen.
    pub fn watched(&self) -> Option<&Loaded> {
        self.copy(0)
    }

    /// Returns the copy whose landmark is at `landmark`; its names are looked up in `scope`.
    fn copy_at(&self, landmark: usize, scope: Scope) -> Option<&Loaded> {
        let (base, path) = loader::image_of(landmark)?;
        for (number, place) in self.copies.iter().enumerate() {
            if let Some(copy) = self.copy(number) {
                if copy.base == base {
                    return Some(copy);
                }
                continue;
            }
            let scope = match scope {
                Scope::BehindUs => Scope::BehindUs,
                Scope::Handle(_) => Scope::Handle(loader::open_loaded(&path)?.expose_provenance()),
            };
            // The landmark's library must not go away, wherever it is looked up.
            let _kept = loader::open_loaded(&path);
            let table = self.rows();
            let functions = table.iter().map(|_| AtomicUsize::new(UNKNOWN)).collect();
            if place.set(Loaded { number, base, scope, table, functions }).is_ok() {
                (self.description.found)(&path, number == 0);
                return self.copy(number);
            }
            // Another thread has stored a copy here, perhaps the same one.
            if let Some(copy) = self.copy(number).filter(|copy| copy.base == base) {
                return Some(copy);
            }
        }
        None
    }

    /// Returns the copy that a program finds without naming a library.
    pub(super) fn behind_us(&self) -> Option<&Loaded> {
        match Binding::of_process() {
            // After an attach, this library comes last, so none is after it. The landmark is not ours.
            Binding::ByAttach => self.of_handle(loader::program()?),
            Binding::ByLoader => {
                self.copy_at(Scope::BehindUs.find(self.description.landmark)?, Scope::BehindUs)
            }
        }
    }

    /// Returns the copy of `handle`, which must be an explicit handle.
    pub(super) fn of_handle(&self, handle: *mut c_void) -> Option<&Loaded> {
        let scope = Scope::Handle(handle.expose_provenance());
        self.copy_at(scope.find(self.description.landmark)?, scope)
    }

    /// Returns the copy that the library at `address` is, or depends on.
    pub(super) fn of_dependencies(&self, address: usize) -> Option<&Loaded> {
        self.of_file(&loader::image_of(address)?.1)
    }

    fn of_file(&self, path: &CStr) -> Option<&Loaded> {
        let handle = loader::open_loaded(path)?;
        let found = self.of_handle(handle);
        loader::close(handle);
        found
    }

    /// Returns the copy for a call from code at `caller`, and whether that copy itself makes the call. It is the copy to which
    /// the loader would have bound the caller without us: by the program's order first, then by the caller's own dependencies.
    fn of_caller(&self, caller: usize) -> Option<(&Loaded, bool)> {
        if let Some(site) = self.sites.find(caller) {
            return self.copy(site.number()).map(|copy| (copy, site.is_own()));
        }
        let copy = self.behind_us().or_else(|| self.of_dependencies(caller));
        let copy = copy.or_else(|| self.anywhere())?;
        let is_own = self.is_file_of(caller, copy);
        self.sites.keep(Site::new(caller, copy.number, is_own), caller);
        Some((copy, is_own))
    }

    /// Returns a copy for callers that depend on none: the watched copy, or the one that is loaded under the library's file name.
    pub fn anywhere(&self) -> Option<&Loaded> {
        self.watched().or_else(|| self.of_file(self.description.file))
    }

    /// Is the caller the copy's own code? Code of a program or framework that the copy is linked into is not.
    fn is_file_of(&self, caller: usize, copy: &Loaded) -> bool {
        let stem = self.description.file.to_bytes().split(|byte| *byte == b'.').next();
        let stem = stem.unwrap_or_default();
        loader::image_of(caller).is_some_and(|(base, path)| {
            let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            // `libnccl.so.2` and `libnccl2.so`, and not `libnccl_ep.so`.
            let rest = name.strip_prefix(stem);
            let is_file = rest.is_some_and(|rest| {
                rest.first().is_none_or(|next| *next == b'.' || next.is_ascii_digit())
            });
            base == copy.base && is_file
        })
    }

    /// Returns the function for a call of function `number` from code at `caller`. `None` if there is no copy, or it lacks the
    /// function: the function must not seem to exist.
    pub fn target(&self, number: usize, caller: usize) -> Option<usize> {
        let (copy, is_own) = self.of_caller(caller)?;
        let own = copy.function(number)?;
        if !copy.is_watched() || is_own {
            return Some(own);
        }
        let row = self.rows().get(number)?;
        match row.verdict {
            Treatment::Replace(ours) => Some(ours()),
            Treatment::Tell(called) => {
                called(row.name);
                Some(own)
            }
        }
    }

    /// Returns the address that `dlsym` returns for function `number` of `copy`. This tells no one: callers may look up all names
    /// and use few.
    pub(super) fn answer(&self, copy: &Loaded, number: usize) -> Option<usize> {
        let own = copy.function(number)?;
        if !copy.is_watched() {
            return Some(own);
        }
        let row = self.rows().get(number)?;
        Some(match row.verdict {
            Treatment::Replace(ours) => ours(),
            Treatment::Tell(_) => (row.exported)(),
        })
    }
}

/// Known call sites, in the places that their addresses allow.
#[derive(Debug)]
struct Sites([AtomicU64; SITES_MAX]);

const SITES_MAX: usize = 1024;
/// The number of places that one address allows: a process has some tens of call sites.
const SITE_PLACES: usize = 4;

/// A call site: its address, and in the bits above it the number of its copy and whether it is in that copy itself. 0 means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site(u64);

impl Site {
    const NUMBER_SHIFT: u32 = 48;
    const OWN: u64 = 1 << 56;
    const ADDRESS: u64 = (1 << Self::NUMBER_SHIFT) - 1;

    fn new(caller: usize, number: usize, is_own: bool) -> Self {
        let own = if is_own { Self::OWN } else { 0 };
        Self(caller as u64 & Self::ADDRESS | (number as u64) << Self::NUMBER_SHIFT | own)
    }

    fn is_at(self, caller: usize) -> bool {
        self.0 & Self::ADDRESS == caller as u64 & Self::ADDRESS
    }

    fn number(self) -> usize {
        usize::try_from((self.0 & !Self::OWN) >> Self::NUMBER_SHIFT).unwrap_or(COPIES_MAX)
    }

    fn is_own(self) -> bool {
        self.0 & Self::OWN != 0
    }
}

impl Sites {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SITES_MAX])
    }

    fn places(&self, caller: usize) -> impl Iterator<Item = &AtomicU64> {
        // Return addresses can be anywhere. The low bits distinguish neighbours.
        let first = caller ^ (caller >> 10);
        (0..SITE_PLACES).map(move |next| &self.0[first.wrapping_add(next) % SITES_MAX])
    }

    fn find(&self, caller: usize) -> Option<Site> {
        self.places(caller)
            .map(|place| Site(place.load(Ordering::Relaxed)))
            .find(|site| site.is_at(caller))
    }

    /// Stores a call site. Two threads may take one place simultaneously; the site that is lost is looked up again later.
    fn keep(&self, site: Site, caller: usize) {
        let free = self.places(caller).find(|place| place.load(Ordering::Relaxed) == 0);
        if let Some(place) = free.or_else(|| self.places(caller).next()) {
            place.store(site.0, Ordering::Relaxed);
        }
    }
}

/// Makes the table of a library's functions, and our exports of their names.
///
/// `$library` is the [`Library`] that is made from the table; `$ours` the module of the functions that replace
/// its own, under their names; `$missing` a function that is called where no copy has the one that was called;
/// `$called` one that is told the names of those that are not replaced when code calls them.
/// No function may take a vector register.
#[macro_export]
macro_rules! interpose_library {
    (
        $library:ident; missing = $missing:path;
        replaced in $ours:ident { $($replaced:ident;)* }
        $(told to $called:path { $($told:ident;)* })?
    ) => {
        /// The functions by number.
        #[allow(
            non_camel_case_types,
            clippy::enum_variant_names,
            clippy::allow_attributes,
            reason = "named as the library names them"
        )]
        #[derive(Clone, Copy, Debug)]
        #[repr(usize)]
        pub(crate) enum Function { $($replaced,)* $($($told,)*)? }

        /// The table.
        const TABLE: &[$crate::library::Row] = &[
            $($crate::library::Row {
                name: $crate::c_name!($replaced),
                verdict: $crate::library::Treatment::Replace(
                    || ($ours::$replaced as *const ()).expose_provenance(),
                ),
                exported: || (exports::$replaced as *const ()).expose_provenance(),
            },)*
            $($($crate::library::Row {
                name: $crate::c_name!($told),
                verdict: $crate::library::Treatment::Tell($called),
                exported: || (exports::$told as *const ()).expose_provenance(),
            },)*)?
        ];

        /// Our exports of the library's names.
        pub(crate) mod exports {
            use super::Function;

            /// The function that a call of number `number` from code at `caller` goes to. Never null.
            extern "C" fn choose(number: usize, caller: usize) -> usize {
                let missing = || ($missing as *const ()).expose_provenance();
                super::$library.target(number, caller).unwrap_or_else(missing)
            }

            $($crate::exported!($replaced);)*
            $($($crate::exported!($told);)*)?
        }
    };
}

/// A function that passes any arguments on: it saves their registers, decides the target of the call, and jumps there.
#[macro_export]
macro_rules! exported {
    ($symbol:ident) => {
        /// Goes to the function that replaces it, or to the caller's own copy of the library.
        ///
        /// # Safety
        /// As the library's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol() {
            ::std::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "mov rsi, qword ptr [rsp + 48]",
                "mov edi, {number}",
                "sub rsp, 8",
                "call {choose}",
                "add rsp, 8",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                number = const Function::$symbol as usize,
                choose = sym choose,
            )
        }
    };
}

/// Calls the watched copy's own function, which the function of this name in scope stands in for; its answer, or none if no copy has
/// it. It is one of the table that the module of the caller has as `Function`.
#[macro_export]
macro_rules! call_own {
    ($library:ident, $symbol:ident ( $($value:expr),* $(,)? )) => {{
        let found = $library.watched().and_then(|copy| copy.function(Function::$symbol as usize));
        found.map(|address| {
            let ours: unsafe extern "C" fn($($crate::any!($value)),*) -> _ = $symbol;
            let address = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: the address is the library's function of this name, whose signature ours has.
            let own = unsafe { $crate::alike(ours, address) };
            // SAFETY: the arguments are the caller's own.
            unsafe { own($($value),*) }
        })
    }};
}

/// Functions instead of those of the library `$library`, for its `interpose_library!`: each has the library's own call as `$own`,
/// which answers `$missing` where the library has no such function.
#[macro_export]
macro_rules! instead_of {
    (
        $library:ident, missing = $missing:expr;
        $($(#[$doc:meta])* $symbol:ident ( $($arg:ident : $ty:ty),* ) -> $answer:ty, |$own:ident| $body:expr;)*
    ) => {$(
        $(#[$doc])*
        pub(super) unsafe extern "C" fn $symbol($($arg: $ty),*) -> $answer {
            let $own = || $crate::call_own!($library, $symbol($($arg),*)).unwrap_or($missing);
            $body
        }
    )*};
}
