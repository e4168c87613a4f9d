//! Device memory that gives way: its holders can do with less, and give some up if other memory of the process finds no room.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::Pool;
use crate::budget::Figure;
use crate::driver::{DeviceOrdinal, Driver};

/// The time that each lender may take to give.
const LIMIT: Duration = Duration::from_secs(10);

/// A holder of device memory that it can do without. Any thread may ask.
pub trait Lender: Debug + Send + Sync {
    /// Returns the bytes on the device that it can do without. They leave when work that is queued has ended. Bytes
    /// that it is to give already do not count.
    fn spare_bytes(&self, device: DeviceOrdinal) -> u64;

    /// Returns the bytes that were requested of it there and that it has not given yet.
    fn owed_bytes(&self, device: DeviceOrdinal) -> u64;

    /// Asks for so much of that. It is given when uses are over, and taken again by nobody meanwhile.
    fn ask(&self, bytes: u64);

    /// Waits until all that it is to give has gone back to the driver, for so much of the time that the process is not paused. Did it?
    /// Nobody asks for the rest any more then.
    fn wait(&self, limit: Duration) -> bool;
}

/// All of a process. A leaf; those who have ended are forgotten.
#[derive(Debug, Default)]
pub struct Lenders(Mutex<Vec<Weak<dyn Lender>>>);

impl Lenders {
    /// One more, for as long as it lives.
    pub fn add(&self, lender: Weak<dyn Lender>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(lender);
    }

    fn all(&self) -> Vec<Arc<dyn Lender>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Those with memory to spare on the device, who has most first, with how much it is.
    pub fn on(&self, device: DeviceOrdinal) -> Vec<(u64, Arc<dyn Lender>)> {
        let all = self.all().into_iter();
        let mut found: Vec<_> = all.map(|lender| (lender.spare_bytes(device), lender)).collect();
        found.retain(|(spare_bytes, _)| *spare_bytes > 0);
        found.sort_by_key(|(spare_bytes, _)| std::cmp::Reverse(*spare_bytes));
        found
    }
}

impl<D: Driver> Pool<D> {
    /// Has lenders give up so much of the device, and waits until they have. Did any? Then what found no room may be tried again. Nothing
    /// is given up if that, with what is free, would not be enough. A context of the device is current, and the
    /// caller is not inside of the gate. *Blocks* for as long as that memory is in use, some 10 s at most.
    ///
    /// # Driver calls
    /// `cuMemGetInfo`, if anybody has memory to spare there.
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

    /// Asks lenders for what is held of each device beyond a budget, and waits for nothing.
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

/// Asks one after the other for so many bytes in all. Returns those that were asked.
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
