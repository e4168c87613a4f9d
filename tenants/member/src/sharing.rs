//! Memory that a process shares with others: the memory that it lends, and the memory that it imports.
//!
//! Lock order: all locks here are leaves. No thread waits for another process's answer under one.

mod borrowing;
mod fetch;
mod lending;
mod sharers;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use vmm_pool::Pool;
use vmm_pool::driver::Driver;

pub use fetch::ImportError;
pub(super) use fetch::Missing;
pub(super) use lending::HandedOut;
pub use lending::IPC_LIBRARY;
use lending::KnownBorrower;
use sharers::Sharers;

use super::{lifecycle::Lifecycle, presence::Presence};
use sublet_protocol::identity::MemberId;

/// The shared memory of a process: see the head of this module.
#[derive(Debug)]
pub struct Sharing<D: Driver> {
    pool: Arc<Pool<D>>,
    presence: Arc<Presence>,
    lifecycle: Arc<Lifecycle>,
    sharers: Sharers<D>,
    /// Processes of other tenants to which memory was lent.
    borrowers: Mutex<HashMap<MemberId, KnownBorrower>>,
}

impl<D: Driver> Sharing<D> {
    pub(super) fn new(
        pool: Arc<Pool<D>>,
        presence: Arc<Presence>,
        lifecycle: Arc<Lifecycle>,
    ) -> Self {
        let sharers = Sharers::new(Arc::clone(&pool), Arc::clone(&presence));
        Self { pool, presence, lifecycle, sharers, borrowers: Mutex::default() }
    }

    /// The processes with which memory is shared.
    pub(super) fn sharers(&self) -> &Sharers<D> {
        &self.sharers
    }
}
