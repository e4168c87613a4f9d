//! The registrations of memory with devices, while they last.

use std::collections::HashMap;
use std::sync::Mutex;

use tenants::member::Member;
use vmm_pool::Registered;
use vmm_pool::driver::{Driver, VaRange};
use vmm_pool::sync::lock;

/// Why memory that a network card holds stays.
pub const NETWORK_CARD: &str =
    "registered with a network card, which holds its pages; set NCCL_NET_GDR_LEVEL=LOC to avoid it";

/// Why memory that GDRCopy has mapped stays.
pub const GDRCOPY: &str =
    "pinned by GDRCopy, which holds its pages; set NCCL_GDRCOPY_ENABLE=0 to avoid it";

/// A registration, by the value that its library returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// The address of an `ibv_mr`.
    Region(usize),
    /// The address of an `mlx5dv_devx_umem`.
    UserMemory(usize),
    /// A handle of GDRCopy, of one opened `gdr_t`.
    GdrCopy {
        /// The address of the `gdr_t`.
        context: usize,
        /// The handle's number.
        handle: u64,
    },
}

/// The registrations of one process. All threads share them. No call is made under the lock.
#[derive(Debug, Default)]
pub struct Registrations(Mutex<HashMap<Key, Registered>>);

impl Registrations {
    /// Registers `range` by `call`, the library's own function. `key` returns the value of the registration, or none after a
    /// failure.
    ///
    /// Host memory goes straight to `call`. Memory of the pool is held in place before `call` begins. While that memory is away
    /// the thread waits, as for every other use.
    pub fn register<D: Driver, T>(
        &self,
        member: &Member<D>,
        range: VaRange,
        reason: &'static str,
        call: impl FnOnce() -> T,
        key: impl FnOnce(&T) -> Option<Key>,
    ) -> T {
        if !member.pool().holdings().has_mapping_in(range) {
            return call();
        }
        let registered = member.pool().enter().register(range, reason);
        let made = call();
        match key(&made) {
            Some(key) => {
                tracing::info!(address = %range.start, bytes = range.size_bytes, ?key, "registered");
                // The value belonged to a registration that its library ended unseen.
                let before = lock(&self.0).insert(key, registered);
                end(member, before);
            }
            None => end(member, Some(registered)),
        }
        made
    }

    /// Ends the registration `key` by `call`, the library's own function. If that fails, as `is_done` says, the registration
    /// stays.
    pub fn unregister<D: Driver, T>(
        &self,
        member: &Member<D>,
        key: Key,
        call: impl FnOnce() -> T,
        is_done: impl FnOnce(&T) -> bool,
    ) -> T {
        // It is taken out first: the library may give the value out again as soon as it has released it.
        let registered = lock(&self.0).remove(&key);
        let answer = call();
        if is_done(&answer) {
            end(member, registered);
        } else if let Some(registered) = registered {
            lock(&self.0).insert(key, registered);
        }
        answer
    }

    /// Ends all registrations of the `gdr_t` at `context`, by `call`, the library's own function. If that fails, as `is_done`
    /// says, they stay.
    pub fn unregister_all<D: Driver, T>(
        &self,
        member: &Member<D>,
        context: usize,
        call: impl FnOnce() -> T,
        is_done: impl FnOnce(&T) -> bool,
    ) -> T {
        let is_of = |key: &Key| matches!(key, Key::GdrCopy { context: of, .. } if *of == context);
        let all: Vec<_> = lock(&self.0).extract_if(|key, _| is_of(key)).collect();
        let answer = call();
        if is_done(&answer) {
            for (_, registered) in all {
                end(member, Some(registered));
            }
        } else {
            lock(&self.0).extend(all);
        }
        answer
    }
}

fn end<D: Driver>(member: &Member<D>, registered: Option<Registered>) {
    if let Some(registered) = registered.filter(|registered| !registered.is_empty()) {
        member.pool().enter_giving_up().unregister(&registered);
    }
}
