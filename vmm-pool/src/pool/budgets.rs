//! The pool's part in budgets: memory that is there when counting begins, and what callers ask.

use std::sync::Arc;

use super::Pool;
use crate::budget::{Account, Charge, Figure};
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::PoolResult;

impl<D: Driver> Pool<D> {
    /// Counts all own device memory against `account` from now on, for good: what there is already, whether it fits or
    /// not, and what is made later, where it fits. Imports count where they are owned, and what is away not at all. False
    /// where something counts already.
    pub fn count_against(&self, account: Arc<dyn Account>) -> bool {
        if !self.budget.set(account) {
            return false;
        }
        let charge = |size_bytes, device| self.budget.charge_anyway(device, size_bytes);
        // Whatever comes into either table from here on counts by itself.
        self.ledger().charge_all(charge);
        self.deferred.charge_all(charge);
        true
    }

    /// Takes room for memory that the driver is about to make by itself, given to [`Pool::native_allocated`] when it has.
    /// Nothing where no budget counts.
    ///
    /// # Errors
    /// [`crate::PoolError::OverBudget`].
    pub fn charge(&self, device: DeviceOrdinal, size_bytes: u64) -> PoolResult<Option<Charge>> {
        self.budget.charge(Some(device), size_bytes)
    }

    /// What may be held on `device`, and is, by all who share the budget. `None` where nothing counts.
    pub fn budget_figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        self.budget.figure(device)
    }
}
