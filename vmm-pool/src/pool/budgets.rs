//! The pool's part in budgets: memory that is there when counting begins, and what callers ask.

use std::sync::Arc;

use super::Pool;
use crate::budget::{Account, Charge, Figure};
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::{PoolError, PoolResult};
use crate::ledger::Selection;

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

    /// Refuses where the budget, as it stands now, does not have what a resume of `selection` brings back. Takes nothing.
    ///
    /// # Errors
    /// [`crate::PoolError::OverBudget`].
    pub fn check_budget(&self, selection: &Selection) -> PoolResult<()> {
        if !selection.is_by_tag() {
            return Ok(());
        }
        for (device, asked_bytes) in self.offloaded_bytes(selection) {
            let Some(figure) = self.budget.figure(device) else { continue };
            let Some(budget_bytes) = figure.budget_bytes else { continue };
            let held_bytes = figure.held_bytes;
            if asked_bytes > budget_bytes.saturating_sub(held_bytes) {
                return Err(PoolError::OverBudget {
                    device,
                    asked_bytes,
                    held_bytes,
                    budget_bytes,
                });
            }
        }
        Ok(())
    }

    /// What may be held on `device`, and is, by all who share the budget. `None` where nothing counts.
    pub fn budget_figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        self.budget.figure(device)
    }
}
