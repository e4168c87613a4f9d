//! Memory that a process shares with others: what it lends, and what it imports.
//!
//! Lock order: all locks here are leaves. No answer of another process is waited for under one.

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

/// See the head of this module.
#[derive(Debug)]
pub struct Sharing<D: Driver> {
    pool: Arc<Pool<D>>,
    presence: Arc<Presence>,
    lifecycle: Arc<Lifecycle>,
    sharers: Sharers<D>,
    /// Processes of other tenants that memory was lent to.
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

    /// The processes that memory is shared with.
    pub(super) fn sharers(&self) -> &Sharers<D> {
        &self.sharers
    }
}
