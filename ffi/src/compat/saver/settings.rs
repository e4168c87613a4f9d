//! The settings of each thread, and the environment's for all.

use std::cell::{Cell, RefCell};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use sublet_torch_allocator::{Backend, Environment, Settings};
use tenants::region::{self, Base};

use crate::c_api::{self, last_call::fail_aloud};
use crate::environment;
use crate::runtime;

/// The environment's settings, read once.
pub(super) fn environment() -> &'static Environment {
    static READ: LazyLock<Environment> = LazyLock::new(|| Environment::read(environment::variable));
    &READ
}

/// Has any memory been allocated whose backups are to lie in host memory that a resume gives back?
static HAS_MAPPED_BACKUPS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static SETTINGS: RefCell<Settings> = RefCell::new(Settings::new(environment()));
    /// True while the thread's region does not follow its settings yet.
    static IS_CHANGED: Cell<bool> = const { Cell::new(true) };
}

/// Changes what this thread has set. Counts from its next allocation on: callers change one thing after another.
pub(super) fn change(set: impl FnOnce(&mut Settings)) {
    SETTINGS.with_borrow_mut(set);
    IS_CHANGED.set(true);
}

/// Reads what this thread has set.
pub(super) fn ask<T>(read: impl FnOnce(&Settings) -> T) -> T {
    SETTINGS.with_borrow(|own| read(own))
}

/// Can what this thread asks for be paused by this interface?
pub(super) fn is_interesting() -> bool {
    SETTINGS.try_with(|own| own.borrow().interesting).unwrap_or(false)
}

/// Makes the thread's region follow its settings.
pub(super) fn settle() {
    // During thread teardown nothing is set any more.
    if IS_CHANGED.try_with(Cell::take).unwrap_or(false) {
        let _gone = SETTINGS.try_with(|own| apply(&own.borrow()));
    }
}

/// Has the pool follow what is set for the whole process.
pub(super) fn tell_pool() {
    if let Some(member) = runtime::member() {
        member.pool().copies().retain(environment().retain.load(Ordering::Relaxed));
        member.pool().copies().give_back(HAS_MAPPED_BACKUPS.load(Ordering::Relaxed));
    }
}

fn apply(own: &Settings) {
    if own.interesting && own.cpu_backup && own.backend == Backend::Mapped {
        HAS_MAPPED_BACKUPS.store(true, Ordering::Relaxed);
    }
    tell_pool();
    let base = own.base(environment());
    // Its callers wake memory up before they use it.
    if let Base::Region { tag, .. } = &base {
        region::agree_to_run_without(tag);
    }
    if let Err(error) = region::set_base(base) {
        fail_aloud(c_api::ARGUMENT, &format!("memory of this thread cannot be paused: {error}"));
    }
}
