//! Device memory whose holders can do with less. They give some up if other memory of the process finds no room.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::Pool;
use crate::budget::Figure;
use crate::driver::{DeviceOrdinal, Driver};

/// The longest time that a lender may need to give memory up.
const LIMIT: Duration = Duration::from_secs(10);

/// A holder of device memory that it can do without. Any thread may call it.
pub trait Lender: Debug + Send + Sync {
    /// Returns the bytes on the device that it can do without. They can leave when queued work has ended. Bytes that it
    /// must give up already do not count.
    fn spare_bytes(&self, device: DeviceOrdinal) -> u64;

    /// Returns the bytes on the device that were requested and that it has not given up yet.
    fn owed_bytes(&self, device: DeviceOrdinal) -> u64;

    /// Requests `bytes` of the spare memory. It is given up when its uses are over, and the lender does not use it
    /// again meanwhile.
    fn ask(&self, bytes: u64);

    /// Waits until all requested memory is released to the driver, for at most `limit`; time in a pause does not count.
    /// Returns whether that is so. After the limit the rest of the request is void.
    fn wait(&self, limit: Duration) -> bool;
}

/// All lenders of a process. Its lock is a leaf. Lenders that have ended are forgotten.
#[derive(Debug, Default)]
pub struct Lenders(Mutex<Vec<Weak<dyn Lender>>>);

impl Lenders {
    /// Adds a lender, for as long as it lives.
    pub fn add(&self, lender: Weak<dyn Lender>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(lender);
    }

    fn all(&self) -> Vec<Arc<dyn Lender>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the lenders with spare memory on the device, and its size, the largest first.
    pub fn on(&self, device: DeviceOrdinal) -> Vec<(u64, Arc<dyn Lender>)> {
        let all = self.all().into_iter();
        let mut found: Vec<_> = all.map(|lender| (lender.spare_bytes(device), lender)).collect();
        found.retain(|(spare_bytes, _)| *spare_bytes > 0);
        found.sort_by_key(|(spare_bytes, _)| std::cmp::Reverse(*spare_bytes));
        found
    }
}

impl<D: Driver> Pool<D> {
    /// Makes lenders give up `bytes` of the device, and waits until they have. Returns whether any did: then the caller
    /// may retry its allocation. Nothing is given up if that would not be enough, together with free memory. A context
    /// of the device must be current, and the caller must not be inside the gate. *Blocks* while that memory is in use,
    /// for some 10 s at most.
    ///
    /// # Driver calls
    /// `cuMemGetInfo`, if a lender has spare memory there.
    pub fn make_room(&self, device: DeviceOrdinal, bytes: u64) -> bool {
        let lenders = self.lenders.on(device);
        let spare_bytes: u64 = lenders.iter().map(|(spare, _)| spare).sum();
        if spare_bytes == 0 {
            return false;
        }
        let free_bytes = self.driver.memory_info().map_or(0, |info| info.free_bytes);
        if spare_bytes.saturating_add(free_bytes) < bytes {
            return false;
        }
        let given = ask(lenders, bytes).iter().filter(|lender| lender.wait(LIMIT)).count();
        given > 0
    }

    /// Requests from lenders the memory that exceeds the budget of each device. Does not block.
    pub fn yield_to_budgets(&self) {
        let lenders = self.lenders.all();
        if lenders.is_empty() {
            return;
        }
        for device in self.holdings.devices() {
            let figure = self.budget.figure(device);
            let Some(Figure { budget_bytes: Some(budget_bytes), held_bytes }) = figure else {
                continue;
            };
            let owed_bytes: u64 = lenders.iter().map(|lender| lender.owed_bytes(device)).sum();
            let over_bytes = held_bytes.saturating_sub(budget_bytes);
            ask(self.lenders.on(device), over_bytes.saturating_sub(owed_bytes));
        }
    }
}

/// Requests `bytes` in total from the lenders, one after the other. Returns the lenders that got a request.
fn ask(lenders: Vec<(u64, Arc<dyn Lender>)>, bytes: u64) -> Vec<Arc<dyn Lender>> {
    let mut left = bytes;
    let mut asked = Vec::new();
    for (spare_bytes, lender) in lenders {
        if left == 0 {
            break;
        }
        lender.ask(left.min(spare_bytes));
        left = left.saturating_sub(spare_bytes);
        asked.push(lender);
    }
    asked
}
