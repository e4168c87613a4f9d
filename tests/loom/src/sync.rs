//! The names of `sublet_sync::sync`, on loom.
//!
//! Two things are not loom's own. **Sequential consistency**: loom takes a sequentially consistent access for one
//! that acquires and releases, by which the argument of `slots.rs` does not hold. Here each such access also
//! passes a *turnstile* of its location, in the one order that all of them have: a load sees no less than all
//! sequentially consistent stores to that location before it. An access with a weaker ordering does not pass, so
//! weakening one is noticed. **Time**: a wait with a time-out can end at any moment, so it gives the lock up, lets
//! others run, and takes it again.
//!
//! What loom cannot show: load buffering (a load that sees what a later store of its own thread has led to), and that
//! a fence is missing where another thread fences later (its fences take in what others have seen).

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
pub use std::sync::PoisonError;
pub use std::sync::atomic::Ordering;
use std::sync::{self, LockResult, TryLockError, TryLockResult};
use std::time::Duration;

pub use loom::thread::yield_now;

use loom::sync::{self as model, atomic::fence};

/// The place of a location in the order of all sequentially consistent accesses.
#[derive(Debug)]
struct Turnstile(model::atomic::AtomicUsize);

impl Turnstile {
    fn new() -> Self {
        Self(model::atomic::AtomicUsize::new(0))
    }

    /// After a store: what this thread did before is visible to every later load.
    fn stored(&self, order: Ordering) {
        if order == Ordering::SeqCst {
            self.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Before a load. Exchanges read the newest value, plain loads of loom may read any.
    fn load(&self, order: Ordering) {
        if order == Ordering::SeqCst {
            self.0.fetch_add(0, Ordering::Acquire);
        }
    }
}

const fn of_load(order: Ordering) -> Ordering {
    if matches!(order, Ordering::SeqCst) { Ordering::Acquire } else { order }
}

const fn of_store(order: Ordering) -> Ordering {
    if matches!(order, Ordering::SeqCst) { Ordering::Release } else { order }
}

const fn of_exchange(order: Ordering) -> Ordering {
    if matches!(order, Ordering::SeqCst) { Ordering::AcqRel } else { order }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// As the one of the standard library.
        #[derive(Debug)]
        pub struct $name {
            value: model::atomic::$name,
            turnstile: Turnstile,
        }

        impl $name {
            /// Holds `value`.
            pub fn new(value: $value) -> Self {
                Self { value: model::atomic::$name::new(value), turnstile: Turnstile::new() }
            }

            /// What it holds, or held.
            pub fn load(&self, order: Ordering) -> $value {
                self.turnstile.load(order);
                self.value.load(of_load(order))
            }

            /// Holds `value` from here on.
            pub fn store(&self, value: $value, order: Ordering) {
                self.value.store(value, of_store(order));
                self.turnstile.stored(order);
            }

            /// The same; gives what it held.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                self.exchange(order, || self.value.swap(value, of_exchange(order)))
            }

            /// Holds what `change` makes of it; gives what it held.
            ///
            /// # Errors
            /// What it holds, where `change` makes nothing of it.
            pub fn fetch_update(
                &self,
                store: Ordering,
                load: Ordering,
                change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                self.turnstile.load(load);
                let before = self.value.fetch_update(of_exchange(store), of_load(load), change);
                self.turnstile.stored(store);
                before
            }

            /// Adds, wrapping; gives what it held.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.exchange(order, || self.value.fetch_add(value, of_exchange(order)))
            }

            /// Subtracts, wrapping; gives what it held.
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.exchange(order, || self.value.fetch_sub(value, of_exchange(order)))
            }

            fn exchange(&self, order: Ordering, act: impl FnOnce() -> $value) -> $value {
                let before = act();
                self.turnstile.stored(order);
                before
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(0)
            }
        }
    };
}

atomic!(AtomicU8, u8);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);

/// As the one of the standard library, with its orderings: a reference that goes releases, the last that goes
/// acquires, and [`Arc::strong_count`] is relaxed.
#[derive(Debug)]
pub struct Arc<T>(sync::Arc<Counted<T>>);

#[derive(Debug)]
struct Counted<T> {
    strong: model::atomic::AtomicUsize,
    value: T,
}

impl<T> Arc<T> {
    /// The first reference to `value`.
    pub fn new(value: T) -> Self {
        Self(sync::Arc::new(Counted { strong: model::atomic::AtomicUsize::new(1), value }))
    }

    /// How many references there are, or were.
    pub fn strong_count(this: &Self) -> usize {
        this.0.strong.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        self.0.strong.fetch_add(1, Ordering::Relaxed);
        Self(sync::Arc::clone(&self.0))
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        if self.0.strong.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
        }
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

/// As the one of the standard library.
#[derive(Debug, Default)]
pub struct Mutex<T>(model::Mutex<T>);

/// The lock of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    held: model::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    /// Holds `value`.
    pub fn new(value: T) -> Self {
        Self(model::Mutex::new(value))
    }

    /// Waits for the lock.
    ///
    /// # Errors
    /// None: in a model a panic ends everything.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { mutex: self, held })
    }
}

impl<T> Mutex<T> {
    /// The lock, if nobody has it.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`].
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        let held = self.0.try_lock().map_err(|_| TryLockError::WouldBlock)?;
        Ok(MutexGuard { mutex: self, held })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

/// As the one of the standard library.
#[derive(Debug, Default)]
pub struct Condvar(model::Condvar);

/// Nobody asks it why a wait ended.
#[derive(Debug)]
pub struct WaitTimeoutResult;

impl Condvar {
    /// Nobody waits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits to be woken.
    ///
    /// # Errors
    /// None: in a model a panic ends everything.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let MutexGuard { mutex, held } = guard;
        let held = self.0.wait(held).unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { mutex, held })
    }

    /// Waits for a time that may end at any moment.
    ///
    /// # Errors
    /// None: in a model a panic ends everything.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        _time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let mutex = guard.mutex;
        drop(guard);
        loom::thread::yield_now();
        let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((guard, WaitTimeoutResult))
    }

    /// Wakes all who wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// As the one of the standard library, for the threads of a model.
pub struct LocalKey<T: 'static>(
    /// What the macro makes.
    pub loom::thread::LocalKey<T>,
);

impl<T: 'static> fmt::Debug for LocalKey<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalKey").finish_non_exhaustive()
    }
}

impl<T: 'static> LocalKey<T> {
    /// Uses this thread's value, unless the thread has dropped it.
    ///
    /// # Errors
    /// It has.
    pub fn try_with<R>(
        &'static self,
        act: impl FnOnce(&T) -> R,
    ) -> Result<R, loom::thread::AccessError> {
        self.0.try_with(act)
    }
}

impl<T: Copy + 'static> LocalKey<Cell<T>> {
    /// A copy of this thread's value.
    pub fn get(&'static self) -> T {
        self.0.with(Cell::get)
    }

    /// Sets this thread's value.
    pub fn set(&'static self, value: T) {
        self.0.with(|cell| cell.set(value));
    }
}

macro_rules! locals {
    ($($(#[$doc:meta])* $vis:vis static $name:ident: $type:ty = const { $init:expr };)*) => {$(
        $(#[$doc])*
        $vis static $name: $crate::sync::LocalKey<$type> =
            $crate::sync::LocalKey(loom::thread::LocalKey {
                init: (|| $init) as fn() -> $type,
                _p: std::marker::PhantomData,
            });
    )*};
}
pub(crate) use locals as thread_local;
