//! The synchronisation that files with memory orderings of their own use: that of the standard library.
//!
//! `tests/loom` compiles these files again (`slots.rs`, `gate.rs`, the cut and the `budgets/src/slots.rs` of `tenants`) with a module of this
//! name that stands on loom, which tries their interleavings and stale reads. What such a file uses must therefore
//! come from here.

pub use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
pub use std::thread::{LocalKey, yield_now};
pub use std::thread_local;

/// Locks `mutex`, also behind a thread that has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
