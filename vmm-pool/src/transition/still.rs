//! The proof that nothing of the application's touches the memory that a step moves.

use super::quiesced::{Quiesced, ShutGate};
use crate::driver::Driver;
use crate::pool::Pool;

/// While it lives, no call of the application's is under way, and no work of its on a device can touch the memory
/// that is moved. It covers all memory of the process. One of a part (of a set of allocations whose last work has been
/// waited for) would be one more way to make it, and the rows of that set.
pub(super) struct Still<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
}

impl<'a, D: Driver> Still<'a, D> {
    /// The gate is shut, and the devices have nothing left to do.
    pub(super) fn drained(quiesced: &'a Quiesced<D>) -> Self {
        Self { pool: quiesced.pool() }
    }

    /// The gate has been shut since before the memory came back, so that nothing has been launched that knows it. For
    /// steps that touch no other memory.
    pub(super) fn not_touched_yet(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }

    /// What a proof that is dropped has moved: it was drained, or not touched yet, when that began.
    pub(super) fn of_dropped(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }
}
