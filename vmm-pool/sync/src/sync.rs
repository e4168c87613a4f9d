//! The standard library's synchronisation, for files that choose memory orderings themselves.
//!
//! `tests/loom` compiles these files again: `slots.rs`, `gate.rs`, the cut and the `budgets/src/slots.rs` of `tenants`.
//! It gives them a module of this name that uses loom, which tries their interleavings and stale reads. So these files
//! must import from here.

pub use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
pub use std::thread::{LocalKey, yield_now};
pub use std::thread_local;

/// Locks `mutex`, even if a thread has panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
