//! Counts device memory against a budget.
//!
//! The pool knows no tenant and no other process. An [`Account`], set by [`crate::Pool::count_against`], counts for all
//! of them. A [`Charge`] is what one allocation has taken from the account. It is stored next to the driver's handle,
//! and is given back when it is dropped. Without an account, creating memory costs one load more.
//!
//! `Budget::charge` refuses an allocation that does not fit, before any driver call.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use crate::driver::DeviceOrdinal;
use crate::error::{PoolError, PoolResult};

/// The place in an account where memory is counted. It stays valid as long as the account lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub usize);

/// The limit of an account on a device, and the memory held there, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The limit; none where no limit is set.
    pub budget_bytes: Option<u64>,
    /// The memory held by all processes that share the account.
    pub held_bytes: u64,
}

/// The reason why an account refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverBudget {
    /// The limit, in bytes.
    pub budget_bytes: u64,
    /// The memory held already, in bytes.
    pub held_bytes: u64,
}

/// Counts the memory held on each device. Any thread may call it. It never waits for a driver, and only for moments for
/// other threads.
pub trait Account: Debug + Send + Sync + 'static {
    /// Takes `size_bytes` on `device` if they fit. `None` if the device is not counted.
    ///
    /// # Errors
    /// [`OverBudget`]: nothing is taken.
    fn take(&self, device: DeviceOrdinal, size_bytes: u64) -> Result<Option<Entry>, OverBudget>;

    /// As [`Account::take`], even if the memory does not fit: for memory that exists already, or that a resume creates
    /// again.
    fn take_anyway(&self, device: DeviceOrdinal, size_bytes: u64) -> Option<Entry>;

    /// Gives `size_bytes` back that were taken at `place`.
    fn give_back(&self, place: Entry, size_bytes: u64);

    /// Returns the limit and the memory held on `device`. `None` if the device is not counted.
    fn figure(&self, device: DeviceOrdinal) -> Option<Figure>;
}

/// The part of an account that one allocation has taken. Dropping it gives the part back.
#[derive(Debug)]
pub struct Charge {
    account: Arc<dyn Account>,
    place: Entry,
    size_bytes: u64,
}

impl Charge {
    /// Is the charge of exactly `size_bytes`?
    pub(crate) fn is(&self, size_bytes: u64) -> bool {
        self.size_bytes == size_bytes
    }

    /// Splits a part off. `None` if the charge is smaller than that.
    pub(crate) fn split(&mut self, size_bytes: u64) -> Option<Self> {
        self.size_bytes = self.size_bytes.checked_sub(size_bytes)?;
        Some(Self { account: Arc::clone(&self.account), place: self.place, size_bytes })
    }
}

/// Says whether memory that the driver itself allocates counts against a budget.
#[derive(Debug)]
pub enum Counted {
    /// The memory does not count: the driver moves it between device and host.
    No,
    /// The memory counts, if there is a budget.
    Yes(Option<Charge>),
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.give_back(self.place, self.size_bytes);
    }
}

/// A pool's account, once it has one.
#[derive(Debug, Default)]
pub struct Budget(OnceLock<Arc<dyn Account>>);

impl Budget {
    /// Sets the account. False if the pool has one already.
    pub(crate) fn set(&self, account: Arc<dyn Account>) -> bool {
        self.0.set(account).is_ok()
    }

    /// Does the pool have an account?
    pub fn counts(&self) -> bool {
        self.0.get().is_some()
    }

    /// Charges an allocation that is about to be made, also one that the driver makes itself. Returns `None` if there
    /// is no account or no device.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`].
    pub fn charge(
        &self,
        device: Option<DeviceOrdinal>,
        size_bytes: u64,
    ) -> PoolResult<Option<Charge>> {
        let (Some(account), Some(device)) = (self.0.get(), device) else {
            return Ok(None);
        };
        match account.take(device, size_bytes) {
            Ok(place) => Ok(place.map(|place| of(account, place, size_bytes))),
            Err(OverBudget { budget_bytes, held_bytes }) => Err(PoolError::OverBudget {
                device,
                asked_bytes: size_bytes,
                held_bytes,
                budget_bytes,
            }),
        }
    }

    /// As [`Budget::charge`], even if the memory does not fit.
    pub(crate) fn charge_anyway(
        &self,
        device: Option<DeviceOrdinal>,
        size_bytes: u64,
    ) -> Option<Charge> {
        let (account, device) = (self.0.get()?, device?);
        account.take_anyway(device, size_bytes).map(|place| of(account, place, size_bytes))
    }

    /// Returns the limit on `device`, and the bytes that all processes of the budget hold there. `None` if there is no
    /// account.
    pub fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        self.0.get()?.figure(device)
    }
}

fn of(account: &Arc<dyn Account>, place: Entry, size_bytes: u64) -> Charge {
    Charge { account: Arc::clone(account), place, size_bytes }
}
