//! The library that returns its functions by address, as CUDA's driver does, and the exchange of its addresses for ours.
//!
//! Callers find such functions by the loader's `dlsym`, by the library's own look-up function, and by plain ELF binding. The
//! first two are answered by **identity**: the library is asked as the caller asked, and its answer is exchanged when it is
//! the address of a function that we stand in for. So names, versions and flags stay the library's own rules.

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::loader::{self, AddressOf, Pointer, is_file_of};

/// A library that the application brings into the process. It is never loaded from here, because libraries check whether it is
/// loaded.
#[derive(Debug)]
pub struct Resident {
    file: &'static CStr,
    handle: AtomicPtr<c_void>,
}

impl Resident {
    /// The library that is found under the name `file`.
    pub const fn new(file: &'static CStr) -> Self {
        Self { file, handle: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn handle(&self) -> Option<Pointer> {
        let known = self.handle.load(Ordering::Acquire);
        if !known.is_null() {
            return Some(known);
        }
        let opened = loader::open_loaded(self.file)?;
        self.handle.store(opened, Ordering::Release);
        Some(opened)
    }

    /// Returns its own function of this exact name; `None` while it is not in the process.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        loader::dlsym(self.handle()?, name)
    }

    /// Is it in the process? Opens nothing.
    pub fn is_loaded(&self) -> bool {
        loader::open_loaded(self.file).map(loader::close).is_some()
    }

    /// The beginning of its file's name in any version.
    fn stem(&self) -> &'static [u8] {
        stem_of(self.file)
    }
}

/// The beginning of the names of all versions of `file`: `lib.so` of `lib.so.1`.
pub(super) fn stem_of(file: &CStr) -> &[u8] {
    const END: &[u8] = b".so";
    let name = file.to_bytes();
    let end = name.windows(END.len()).position(|part| part == END);
    &name[..end.map_or(name.len(), |start| start + END.len())]
}

/// A function of such a library, looked up when it is first called.
#[derive(Debug)]
pub struct Real {
    library: &'static Resident,
    name: &'static CStr,
    address: AtomicUsize,
}

impl Real {
    /// The function `name` of `library`.
    pub const fn new(library: &'static Resident, name: &'static CStr) -> Self {
        Self { library, name, address: AtomicUsize::new(0) }
    }

    /// Returns the function's address; `None` if the library lacks it, or is not in the process.
    #[inline]
    pub fn address(&self) -> Option<Pointer> {
        let known = self.address.load(Ordering::Relaxed);
        if known == 0 { self.look_up() } else { Some(std::ptr::with_exposed_provenance_mut(known)) }
    }

    #[cold]
    fn look_up(&self) -> Option<Pointer> {
        let found = self.library.symbol(self.name)?.as_ptr();
        self.address.store(found.expose_provenance(), Ordering::Relaxed);
        Some(found)
    }
}

/// A function of the provider, and our replacement.
#[derive(Clone, Copy, Debug)]
pub struct Hook {
    /// Its exported name.
    pub symbol: &'static str,
    /// Ours.
    pub ours: AddressOf,
}

/// Addresses of a library's functions, each with ours. Sorted by address.
#[derive(Debug, Default)]
pub struct Exchange {
    pairs: Vec<(usize, usize)>,
}

impl Exchange {
    /// Built from pairs of the library's address and ours. An address that several names share keeps the first.
    fn new(mut pairs: Vec<(usize, usize)>) -> Self {
        pairs.retain(|pair| pair.0 != 0);
        pairs.sort_by_key(|pair| pair.0);
        pairs.dedup_by_key(|pair| pair.0);
        Self { pairs }
    }

    /// Returns our function for the library's function at `real`.
    pub(super) fn ours_for(&self, real: usize) -> Option<usize> {
        let index = self.pairs.binary_search_by_key(&real, |pair| pair.0).ok()?;
        Some(self.pairs[index].1)
    }

    /// Returns the range of all the library's addresses; `None` if there are none.
    pub(super) fn span(&self) -> Option<std::ops::RangeInclusive<usize>> {
        Some(self.pairs.first()?.0..=self.pairs.last()?.0)
    }
}

/// The functions of the provider that we replace.
#[derive(Debug)]
pub struct Provider {
    library: &'static Resident,
    /// The beginning of the names of all its functions.
    prefix: &'static str,
    /// The beginnings of the file names of libraries that it brings along.
    companions: &'static [&'static str],
    hooks: &'static [&'static [Hook]],
    /// Further addresses at which it hands out its function of a name.
    further: fn(&'static str) -> Vec<usize>,
    /// Made when it is first needed, and never freed or changed.
    exchange: OnceLock<Exchange>,
}

impl Provider {
    /// Functions of `library` that begin with `prefix`: those of all tables of `hooks`. The library brings `companions`
    /// along, by the beginnings of their files' names. `further` gives what its look-up function answers, where that is not
    /// the address of the exported symbol.
    pub const fn new(
        library: &'static Resident,
        prefix: &'static str,
        companions: &'static [&'static str],
        hooks: &'static [&'static [Hook]],
        further: fn(&'static str) -> Vec<usize>,
    ) -> Self {
        Self { library, prefix, companions, hooks, further, exchange: OnceLock::new() }
    }

    /// The library itself.
    pub(super) fn library(&self) -> &'static Resident {
        self.library
    }

    pub(super) fn prefix(&self) -> &'static str {
        self.prefix
    }

    /// Returns every function that we replace.
    pub(super) fn hooks(&self) -> impl Iterator<Item = &'static Hook> {
        self.hooks.iter().copied().flatten()
    }

    /// Is `name` a function that we replace?
    pub(super) fn has(&self, name: &CStr) -> bool {
        self.hooks().any(|hook| hook.symbol.as_bytes() == name.to_bytes())
    }

    /// Is the file at `path` the library's own?
    pub(super) fn is_own(&self, path: &[u8]) -> bool {
        is_file_of(path, self.library.stem())
    }

    /// Is the file at `path` its own, one that it brings along, the loader or the C library? Their own calls are not ours to
    /// see.
    pub(super) fn is_left_out(&self, path: &[u8]) -> bool {
        let mut others = self.companions.iter().chain(&loader::FILES);
        self.is_own(path) || others.any(|begin| is_file_of(path, begin.as_bytes()))
    }

    /// The addresses to exchange, when they are known already. Calls neither the library nor the loader.
    pub(super) fn known_exchange(&self) -> Option<&Exchange> {
        self.exchange.get()
    }

    /// The addresses to exchange. Built without a lock, since callers may hold the loader's: two threads may
    /// both build it, and one copy is then dropped.
    pub fn exchange(&self) -> Option<&Exchange> {
        if self.exchange.get().is_none() {
            let _set_by_another = self.exchange.set(self.build()?);
        }
        self.exchange.get()
    }

    fn build(&self) -> Option<Exchange> {
        let mut pairs = Vec::new();
        for hook in self.hooks() {
            let Ok(name) = CString::new(hook.symbol) else {
                continue;
            };
            // Names that this library lacks are skipped: CUDA's driver writes down each question that it refuses, and driver 580
            // dies of that in a child that was forked after NVML had started (`tests/tests/preload_object/forks.rs`).
            let Some(address) = self.library.symbol(&name) else {
                continue;
            };
            let further = (self.further)(hook.symbol).into_iter();
            let all = std::iter::once(address.as_ptr().expose_provenance()).chain(further);
            pairs.extend(all.map(|address| (address, (hook.ours)())));
        }
        // Names that this library lacks have left an error that the caller has not made.
        loader::forget_error();
        (!pairs.is_empty()).then(|| Exchange::new(pairs))
    }

    /// Returns our function for the library's function at `real`, or `real` itself if there is none.
    pub fn exchanged(&self, real: Pointer) -> Pointer {
        let ours = self.exchange().and_then(|known| known.ours_for(real.expose_provenance()));
        ours.map_or(real, std::ptr::with_exposed_provenance_mut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_addresses_are_exchanged() {
        let exchange = Exchange::new(vec![(20, 200), (10, 100), (0, 1), (20, 300)]);
        assert_eq!(exchange.ours_for(10), Some(100));
        assert_eq!(exchange.ours_for(20), Some(200));
        assert_eq!(exchange.ours_for(0), None);
        assert_eq!(exchange.ours_for(15), None);
        assert_eq!(exchange.span(), Some(10..=20));
        assert_eq!(Exchange::default().span(), None);
    }

    #[test]
    fn files_of_all_versions_begin_alike() {
        assert_eq!(stem_of(c"libcuda.so.1"), b"libcuda.so");
        assert_eq!(stem_of(c"libcuda"), b"libcuda");
    }
}
