//! Device memory that counts against a budget.
//!
//! The pool knows no tenant and no other process: the count for all of them is an [`Account`], given to
//! [`crate::Pool::count_against`]. What one allocation has taken of it is a [`Charge`], which lives next to the driver's
//! handle and gives back when it is dropped. Until an account is given, making memory costs one load more.
//!
//! An allocation that does not fit is refused in `Budget::charge`, before any call of the driver's.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use crate::driver::DeviceOrdinal;
use crate::error::{PoolError, PoolResult};

/// The place in an account where memory is counted. It stays valid as long as the account lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub usize);

/// The limit of an account on a device, and the amount held there, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The most that may be held; none where nothing is set.
    pub budget_bytes: Option<u64>,
    /// The amount held by all who share the account.
    pub held_bytes: u64,
}

/// Why an account does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverBudget {
    /// The most that may be held, in bytes.
    pub budget_bytes: u64,
    /// The amount held already, in bytes.
    pub held_bytes: u64,
}

/// A count of the memory held on each device. Any thread may call it. It waits for no driver, and for others for
/// moments only.
pub trait Account: Debug + Send + Sync + 'static {
    /// Takes `size_bytes` on `device` where that fits. `None` where the device is not counted.
    ///
    /// # Errors
    /// [`OverBudget`]; nothing is taken.
    fn take(&self, device: DeviceOrdinal, size_bytes: u64) -> Result<Option<Entry>, OverBudget>;

    /// As [`Account::take`], whether it fits or not: for memory that is there already, or that comes back.
    fn take_anyway(&self, device: DeviceOrdinal, size_bytes: u64) -> Option<Entry>;

    /// Gives back what was taken at `place`.
    fn give_back(&self, place: Entry, size_bytes: u64);

    /// Returns the limit and the amount held on `device`; `None` where the device is not counted.
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
    /// Is it of so many bytes?
    pub(crate) fn is(&self, size_bytes: u64) -> bool {
        self.size_bytes == size_bytes
    }

    /// Takes a part out. `None` where there is not as much.
    pub(crate) fn split(&mut self, size_bytes: u64) -> Option<Self> {
        self.size_bytes = self.size_bytes.checked_sub(size_bytes)?;
        Some(Self { account: Arc::clone(&self.account), place: self.place, size_bytes })
    }
}

/// Does memory that the driver makes by itself count against a budget?
#[derive(Debug)]
pub enum Counted {
    /// It does not: the driver moves it between device and host.
    No,
    /// It does, where a budget counts.
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
    /// Counts from now on. False where something counts already.
    pub(crate) fn set(&self, account: Arc<dyn Account>) -> bool {
        self.0.set(account).is_ok()
    }

    /// Does anything count?
    pub fn counts(&self) -> bool {
        self.0.get().is_some()
    }

    /// Takes room for an allocation that is about to be made, by the driver itself too; nothing where nothing counts, or it is no device's.
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

    /// As [`Budget::charge`], whether it fits or not.
    pub(crate) fn charge_anyway(
        &self,
        device: Option<DeviceOrdinal>,
        size_bytes: u64,
    ) -> Option<Charge> {
        let (account, device) = (self.0.get()?, device?);
        account.take_anyway(device, size_bytes).map(|place| of(account, place, size_bytes))
    }

    /// The limit on `device`, and the bytes held there, of all processes that share the budget; `None` where nothing counts.
    pub fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        self.0.get()?.figure(device)
    }
}

fn of(account: &Arc<dyn Account>, place: Entry, size_bytes: u64) -> Charge {
    Charge { account: Arc::clone(account), place, size_bytes }
}
