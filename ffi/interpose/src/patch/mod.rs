//! Our addresses in the libraries that the loader has bound elsewhere: walks over all that are loaded, and their
//! memory of each.
//!
//! 1. A library's import slots ([`slots`], found by [`object`]) of functions that we stand in for lead to us.
//! 2. Addresses of such functions of the provider's that it keeps in its own data are exchanged ([`kept_addresses`]).
//! 3. Weak references to us are null where nobody else has the function ([`weak`]).
//! 4. Libraries that are loaded later are looked at in the next call of our `dlsym`: a program that opens a library asks it
//!    for a symbol next. At a pause all are looked at again, also those in which nobody looked up a symbol, unless the loader's
//!    list and all slots are as the last walk left them.
//!
//! In a process that the loader bound to us all this is for libraries that have an order of their own
//! (`RTLD_DEEPBIND`), in which the C library's `dlsym` and the provider come before us. All others lead to us already.
//! Libraries in another namespace (`dlmopen`) are in no list; [`namespaces`] says whether the provider is in one.
//!
//! All is done inside one callback of `dl_iterate_phdr`. glibc holds the lock of its list of libraries
//! meanwhile (`dl_load_write_lock`): it adds none and unmaps none, so that what is read and written here is
//! mapped. The lock of [`Known`] is taken inside that callback, and its holder waits for no lock of the
//! loader's; nothing in here may call the loader, which takes its other lock first.

mod kept_addresses;
mod namespaces;
mod object;
pub(super) mod order;
mod protections;
mod slots;
#[cfg(test)]
mod tests;
pub(super) mod weak;

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock};

use namespaces::Elsewhere;
use object::{Loads, Object, Place};
use protections::Protections;
use slots::Settled;
use sublet_sync::sync::lock;

use super::loader::{Binding, is_file_of};
use super::provider::Provider;

/// The most looks at slots that the loader has not finished with.
const TRIES_MAX: u8 = 32;

/// The key by which an object is known again. One that is loaded in the place of another, from the same file, is the
/// same: its slots are where the other's were.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    name: CString,
    bias: usize,
    /// The numbers of its relocations: of calls, and of everything else.
    sizes: (usize, usize),
}

/// The record that walks keep about a library.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// Its imports of functions that we stand in for.
    places: Vec<Place>,
    /// The number of these imports that lead to us.
    pub slots: usize,
    /// The number of addresses that it kept and that were exchanged.
    pub exchanged: usize,
    /// Why something about it could not be done.
    pub problem: Option<String>,
    /// True when its data has been looked through.
    is_searched: bool,
    /// True when some import of it led past us.
    pub was_turned: bool,
    /// True when that was found at a pause only.
    ran_past_us: bool,
    /// The walk at which an import of a function led past us that looks names up.
    looked_up_at: Option<u64>,
    tries: u8,
    walk: u64,
    /// The walk that met it first.
    first_walk: u64,
}

impl Entry {
    /// Does it reach, or might it reach, a function that we replace?
    fn matters(&self) -> bool {
        !self.places.is_empty() || self.exchanged > 0 || self.problem.is_some()
    }
}

#[derive(Debug, Default)]
struct Known {
    entries: HashMap<Identity, Entry>,
    walks: u64,
    last: Findings,
}

/// The findings of a walk, by which a pause knows whether another walk would find anything else.
#[derive(Debug, Default)]
struct Findings {
    loads: Loads,
    /// The addresses that the provider lies at.
    providers: Vec<Range<usize>>,
    /// The slots of all imports of functions that we stand in for, and what they hold since.
    slots: Vec<(usize, usize)>,
    /// The number of things that were left to do.
    left: usize,
}

impl Findings {
    /// Would another walk write nothing? What a walk does follows from the loader's list, from tables that nobody writes to, and
    /// from what the slots hold: others may have written there. Asked in a callback of the loader's.
    fn hold(&self, loads: Loads) -> bool {
        let mut slots = self.slots.iter();
        self.loads == loads && self.left == 0 && slots.all(|slot| slots::holds(slot.0, slot.1))
    }
}

/// The state of a process's walks. The head of this module says in which order it is locked.
#[derive(Debug)]
pub(super) struct Patches {
    ours: OnceLock<Names>,
    known: LazyLock<Mutex<Known>>,
    /// The number of libraries that the loader had ever loaded at the last walk.
    loads: AtomicU64,
    /// Some slot was not ready at the last walk.
    unsettled: AtomicBool,
    /// The provider in other namespaces.
    elsewhere: Elsewhere,
}

/// A function of ours for imports of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ours {
    pub(super) address: usize,
    /// Whether the loader, too, binds imports of the name to us.
    pub(super) is_exported: bool,
}

/// Our functions by the names that libraries import them by.
#[derive(Debug)]
struct Names {
    addresses: HashMap<&'static [u8], Ours>,
    /// The bytes that some name begins with: most imports of a process begin otherwise, and all are asked about.
    first_bytes: [bool; 256],
}

impl Names {
    fn new(addresses: HashMap<&'static [u8], Ours>) -> Self {
        let mut first_bytes = [false; 256];
        for &first in addresses.keys().filter_map(|name| name.first()) {
            first_bytes[usize::from(first)] = true;
        }
        Self { addresses, first_bytes }
    }

    fn of(&self, name: &CStr) -> Option<Ours> {
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
            elsewhere: Elsewhere::new(),
        }
    }

    /// Makes what walks need from `names`: our functions by the names that libraries import them by. `names` may ask the
    /// loader: two threads may both ask it, and one answer is then dropped.
    pub(super) fn prepare(&self, names: impl FnOnce() -> HashMap<&'static [u8], Ours>) {
        LazyLock::force(&self.known);
        if self.ours.get().is_none() {
            let _set_by_another = self.ours.set(Names::new(names()));
        }
    }

    /// Returns our function for imports of `name`.
    pub(super) fn import(&self, name: &CStr) -> Option<usize> {
        Some(self.ours.get()?.of(name)?.address)
    }

    /// Walks over all libraries of the process. Does nothing before [`prepare`](Self::prepare).
    pub(super) fn walk(&'static self, provider: &'static Provider, purpose: Purpose) {
        if self.walk_once(provider, purpose) && provider.exchange().is_some() {
            // The library whose initialiser brought the provider in may keep functions of it already.
            self.walk_once(provider, Purpose::Patch);
        }
    }

    /// The file of a provider whose callers no walk sees, found at the last walk of [`Purpose::Pause`].
    pub(super) fn provider_elsewhere(&self) -> Option<String> {
        self.elsewhere.found()
    }

    /// True when the walk met the provider, which has not been asked yet which of its functions are exchanged.
    fn walk_once(&'static self, provider: &'static Provider, purpose: Purpose) -> bool {
        let Some(ours) = self.ours.get() else {
            return false;
        };
        let nested = WALKING.try_with(|walking| walking.replace(true)).unwrap_or(true);
        if nested {
            return false;
        }
        let mut walk = Walk {
            provider,
            patches: self,
            ours,
            purpose,
            known: None,
            protections: OnceCell::new(),
            unsettled: false,
            wants_provider: false,
            is_done: false,
            found: Findings::default(),
        };
        object::each(&mut |loads, object| walk.visit(loads, object));
        let _cleared = WALKING.try_with(|walking| walking.set(false));
        let Some(mut known) = walk.known.take() else {
            return false;
        };
        let mut is_unknown = false;
        if !walk.is_done {
            // Libraries that were not met have been unloaded.
            let (walks, is_met) = (known.walks, !walk.found.providers.is_empty());
            known.entries.retain(|_, entry| {
                entry.is_searched |= !is_met;
                entry.walk == walks
            });
            known.last = walk.found;
            is_unknown = is_met && walk.wants_provider && provider.known_exchange().is_none();
            self.unsettled.store(walk.unsettled, Ordering::Release);
        }
        let (loads, providers) = (known.last.loads, known.last.providers.clone());
        drop(known);
        if purpose == Purpose::Pause {
            self.elsewhere.look(provider, loads, &providers);
        }
        is_unknown
    }

    /// Is a library loaded whose file name begins with `file`? The last walk answers.
    pub(super) fn has_loaded(&self, file: &[u8]) -> bool {
        lock(&self.known).entries.keys().any(|identity| is_file_of(identity.name.to_bytes(), file))
    }

    /// The library that may have looked up functions of the one whose file's name begins with `file`: a function by which
    /// it does that led past us when the other was loaded already.
    pub(super) fn looked_up_past_us(&self, file: &[u8]) -> Option<String> {
        let known = lock(&self.known);
        let others = |identity: &Identity| is_file_of(identity.name.to_bytes(), file);
        let first_seen =
            |(identity, entry): (&Identity, &Entry)| others(identity).then_some(entry.first_walk);
        let since = known.entries.iter().find_map(first_seen)?;
        let looked = known.entries.iter().find(|(identity, entry)| {
            !others(identity) && entry.looked_up_at.is_some_and(|at| at >= since)
        });
        looked.map(|(identity, _)| identity.name.to_string_lossy().into_owned())
    }

    /// The libraries that reach, or may reach, anything that we stand in for; by path. Calls nothing of the loader's.
    pub(super) fn entries(&self) -> Vec<(String, Entry)> {
        let known = lock(&self.known);
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
    /// True while this thread walks: functions that it calls may look up a symbol.
    static WALKING: Cell<bool> = const { Cell::new(false) };
}

/// The work of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Looks at everything and writes.
    Patch,
    /// As `Patch`, unless nothing was loaded since the last walk.
    PatchWhatIsNew,
    /// As `Patch`, unless nothing is left to find, before a pause: a library that nobody has looked at before may have called
    /// past us all the time.
    Pause,
}

/// One walk under way.
struct Walk {
    provider: &'static Provider,
    patches: &'static Patches,
    ours: &'static Names,
    purpose: Purpose,
    known: Option<MutexGuard<'static, Known>>,
    protections: OnceCell<Protections>,
    unsettled: bool,
    /// True if a library may keep functions of the provider.
    wants_provider: bool,
    /// True if the walk had nothing to do.
    is_done: bool,
    found: Findings,
}

impl Walk {
    fn visit(&mut self, loads: Loads, object: Option<Object<'_>>) -> ControlFlow<()> {
        if self.known.is_none() {
            let patches = self.patches;
            if self.purpose == Purpose::PatchWhatIsNew
                && loads.0 == patches.loads.load(Ordering::Acquire)
                && !patches.unsettled.load(Ordering::Acquire)
            {
                return ControlFlow::Break(());
            }
            let known = self.known.insert(lock(&patches.known));
            self.is_done = self.purpose == Purpose::Pause && known.last.hold(loads);
            if self.is_done {
                return ControlFlow::Break(());
            }
            known.walks += 1;
            self.found.loads = loads;
            patches.loads.store(loads.0, Ordering::Release);
        }
        if let Some(object) = object {
            // Until it has been looked at to the end.
            self.found.left += 1;
            self.look_at(&object);
            self.found.left -= 1;
        }
        ControlFlow::Continue(())
    }

    fn look_at(&mut self, object: &Object<'_>) {
        if self.provider.is_own(object.name.to_bytes()) {
            self.found.providers.extend(object.span());
        }
        if object.contains((object::each as *const ()).addr())
            || self.provider.is_left_out(object.name.to_bytes())
        {
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
            *entry = Entry { walk, first_walk: walk, ..Entry::default() };
            entry.places = imports.places().filter(|&place| named(place).is_some()).collect();
        }
        entry.slots = 0;
        let (mut is_ready, mut turned, mut looked) = (true, false, false);
        for (import, ours) in entry.places.iter().filter_map(|&place| named(place)) {
            // Read only where there is something to write, once a walk.
            let protections = || self.protections.get_or_init(Protections::read);
            let settled = slots::settle(object, &import, ours.address, protections);
            let holds = if settled == Settled::Absent { 0 } else { ours.address };
            self.found.slots.push((import.slot, holds));
            entry.slots += usize::from(matches!(settled, Settled::Ours | Settled::Turned));
            match settled {
                Settled::Ours | Settled::Absent => {}
                Settled::Turned if ours.is_exported => turned = true,
                Settled::Turned => looked = true,
                Settled::NotYet => is_ready = false,
                Settled::Refused(why) => entry.problem = Some(why),
            }
        }
        self.found.left += usize::from(!is_ready || entry.problem.is_some());
        if !is_ready {
            entry.tries = entry.tries.saturating_add(1);
            if entry.tries < TRIES_MAX {
                self.unsettled = true;
            } else {
                entry.problem = Some("the loader never finished with its imports".to_owned());
            }
        }
        if turned || looked {
            entry.looked_up_at = Some(walk);
        }
        if turned {
            // What it looked up by then it did not look up through us.
            entry.is_searched = false;
            entry.was_turned = true;
            entry.ran_past_us |= self.purpose == Purpose::Pause;
        }
        let may_keep = Binding::of_process() == Binding::ByAttach || entry.was_turned;
        if !may_keep || entry.is_searched || !is_ready {
            return;
        }
        let Some(exchange) = self.provider.known_exchange() else {
            self.wants_provider = true;
            self.found.left += 1;
            return;
        };
        let protections = self.protections.get_or_init(Protections::read);
        entry.exchanged += kept_addresses::exchange(object, exchange, protections);
        entry.is_searched = true;
        if Binding::of_process() == Binding::ByLoader && entry.ran_past_us && entry.exchanged == 0 {
            entry.problem = Some(OPENED_PAST_US.to_owned());
        }
    }
}

/// The problem of a library that was first seen at a pause, and led past us.
const OPENED_PAST_US: &str = "it was opened with RTLD_DEEPBIND, and may have taken the driver's functions past libsublet.so: \
     open it without that flag";
