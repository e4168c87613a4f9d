//! The interface of `torch_memory_saver` in one process: the settings of its callers, and their effect.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use tenants::member::Member;
use tenants::region::{self, Base, RegionError};
use vmm_pool::SavedError;
use vmm_pool::driver::{DeviceAddress, Driver, VaRange};
use vmm_pool::sync::lock;

use crate::settings::{Backend, Environment, Settings};

thread_local! {
    /// The settings of this thread; `None` until they are first needed.
    static SETTINGS: RefCell<Option<Settings>> = const { RefCell::new(None) };
    /// True while the thread's settings are not applied to its region yet.
    static IS_CHANGED: Cell<bool> = const { Cell::new(true) };
}

type Backups = BTreeMap<(u64, u64), Box<[u8]>>;

/// The interface's state, shared by all threads of a process.
#[derive(Debug)]
pub struct Saver {
    environment: LazyLock<Environment>,
    /// Free device memory that an allocation in a region must leave; 0 for none.
    margin_bytes: AtomicU64,
    /// Has any memory been allocated whose backups are in host memory that a resume gives back?
    has_mapped_backups: AtomicBool,
    /// Copies of backups that are in several pieces: one copy for each caller's request, by device address and size. A copy is
    /// kept as long as its backup.
    together: Mutex<Backups>,
}

impl Saver {
    /// Makes the interface for a process. `read` reads its environment, once.
    pub const fn new(read: fn() -> Environment) -> Self {
        Self {
            environment: LazyLock::new(read),
            margin_bytes: AtomicU64::new(0),
            has_mapped_backups: AtomicBool::new(false),
            together: Mutex::new(Backups::new()),
        }
    }

    fn with<T>(&self, own: &RefCell<Option<Settings>>, work: impl FnOnce(&mut Settings) -> T) -> T {
        work(own.borrow_mut().get_or_insert_with(|| Settings::new(&self.environment)))
    }

    /// Changes the settings of this thread. They apply from its next allocation on: callers change one setting after another.
    pub fn change(&self, set: impl FnOnce(&mut Settings)) {
        SETTINGS.with(|own| self.with(own, set));
        IS_CHANGED.set(true);
    }

    /// Reads the settings of this thread.
    pub fn ask<T>(&self, read: impl FnOnce(&Settings) -> T) -> T {
        SETTINGS.with(|own| self.with(own, |own| read(own)))
    }

    /// Sets the free device memory that allocations in regions must leave, in bytes.
    pub fn set_margin(&self, bytes: u64) {
        self.margin_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Would `size_bytes` more leave less free memory than the margin? `free_bytes` returns the free memory.
    pub fn refuses(&self, size_bytes: u64, free_bytes: impl FnOnce() -> Option<u64>) -> bool {
        let margin_bytes = self.margin_bytes.load(Ordering::Relaxed);
        let is_interesting =
            || SETTINGS.try_with(|own| self.with(own, |own| own.interesting)).unwrap_or(false);
        if margin_bytes == 0 || !is_interesting() {
            return false;
        }
        let short = free_bytes().filter(|free| margin_bytes.saturating_add(size_bytes) > *free);
        if let Some(free_bytes) = short {
            tracing::info!(size_bytes, margin_bytes, free_bytes, "refused to keep the margin");
        }
        short.is_some()
    }

    /// Applies the thread's settings to its region, before memory is made. `member` is this process's part in its tenant, once
    /// it has joined.
    ///
    /// # Errors
    /// The reason why memory of this thread cannot be paused.
    pub fn settle<D: Driver>(&self, member: Option<&Member<D>>) -> Result<(), RegionError> {
        // A thread that is ending has no settings any more.
        if !IS_CHANGED.try_with(Cell::take).unwrap_or(false) {
            return Ok(());
        }
        SETTINGS.try_with(|own| self.with(own, |own| self.apply(own, member))).unwrap_or(Ok(()))
    }

    fn apply<D: Driver>(
        &self,
        own: &Settings,
        member: Option<&Member<D>>,
    ) -> Result<(), RegionError> {
        if own.interesting && own.cpu_backup && own.backend == Backend::Mapped {
            self.has_mapped_backups.store(true, Ordering::Relaxed);
        }
        self.tell(member);
        let base = own.base(&self.environment);
        // The callers of this interface wake memory up before they use it.
        if let Base::Region { tag, .. } = &base {
            region::agree_to_run_without(tag);
        }
        region::set_base(base)
    }

    /// Applies the settings of the whole process to the pool.
    pub fn tell<D: Driver>(&self, member: Option<&Member<D>>) {
        if let Some(copies) = member.map(|member| member.pool().copies()) {
            copies.retain(self.retains());
            copies.give_back(self.has_mapped_backups.load(Ordering::Relaxed));
        }
    }

    /// Sets whether backups in host memory are kept after a resume. [`tell`](Self::tell) applies it to the pool.
    pub fn set_retains(&self, retains: bool) {
        self.environment.retains.store(retains, Ordering::Relaxed);
    }

    /// Are backups in host memory kept after a resume?
    pub fn retains(&self) -> bool {
        self.environment.retains.load(Ordering::Relaxed)
    }

    /// Frees copies of backups that no longer exist.
    pub fn forget_passed<D: Driver>(&self, member: &Member<D>) {
        lock(&self.together).retain(|&(start, size_bytes), _| {
            let range = VaRange::new(DeviceAddress(start), size_bytes);
            matches!(
                member.pool().saved_or_retained().at(range),
                Ok(_) | Err(SavedError::InPieces(_))
            )
        });
    }

    /// Returns the place of the saved bytes of `range`. If they are in several pieces, it returns one copy of them. `None` if
    /// none are saved in host memory. Valid until the next pause or resume of that memory.
    pub fn backup<D: Driver>(&self, member: &Member<D>, range: VaRange) -> Option<NonNull<u8>> {
        self.forget_passed(member);
        let (start, size_bytes) = (range.start, range.size_bytes);
        if size_bytes == 0 {
            return None;
        }
        match member.pool().saved_or_retained().at(range) {
            Ok(place) => return Some(place),
            Err(SavedError::InPieces(_)) => {}
            // Callers also request backups of memory that is not away.
            Err(error) => {
                tracing::debug!(%error, "no backup");
                return None;
            }
        }
        let length = usize::try_from(size_bytes).ok()?;
        let mut known = lock(&self.together);
        let copy = match known.entry((start.0, size_bytes)) {
            Entry::Occupied(copy) => copy.into_mut(),
            Entry::Vacant(place) => place.insert(vec![0_u8; length].into_boxed_slice()),
        };
        // The copy is made each time: there may have been another pause since.
        member.pool().saved_or_retained().read(start, copy).ok()?;
        NonNull::new(copy.as_mut_ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margin_counts_in_regions_alone() {
        let saver = Saver::new(|| Environment::read(|_| None));
        let refuses = |size_bytes, free_bytes| saver.refuses(size_bytes, || free_bytes);
        saver.set_margin(10);
        assert!(!refuses(100, Some(20)), "no region");
        saver.change(|own| own.interesting = true);
        assert!(refuses(11, Some(20)) && !refuses(10, Some(20)));
        assert!(!refuses(u64::MAX, None), "nobody knows what is free");
        saver.set_margin(0);
        assert!(!refuses(100, Some(20)), "no margin");
    }

    #[test]
    fn each_thread_has_settings_of_its_own() {
        static SAVER: Saver = Saver::new(|| Environment::read(|_| None));
        SAVER.change(|own| own.set_tag("weights"));
        let here = || SAVER.ask(|own| own.tag_text().to_owned());
        let other = std::thread::spawn(here).join().expect("a tag");
        assert_eq!((here().as_c_str(), other.as_c_str()), (c"weights", c"default"));
    }
}
