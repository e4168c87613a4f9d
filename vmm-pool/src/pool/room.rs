//! Device memory that gives way. Paged memory can do with fewer frames: it gives some up if other memory of the process finds no room.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::Pool;
use crate::driver::{DeviceOrdinal, Driver};

/// How long each may take to give.
const LIMIT: Duration = Duration::from_secs(10);

/// Who has device memory that it can do without. Any thread may ask.
pub(crate) trait Lender: Debug + Send + Sync {
    /// How much of it there is on the device, in bytes.
    fn spare_bytes(&self, device: DeviceOrdinal) -> u64;

    /// Asks for so much, which is given when uses are over. It counts once until then: who has not given all yet is asked for no more.
    fn ask(&self, bytes: u64);

    /// Waits until it has given all that it was asked for, or has ended, for so much of the time that the process is not paused.
    fn wait(&self, limit: Duration);
}

/// All of a process. A leaf; those who have ended are forgotten.
#[derive(Debug, Default)]
pub(crate) struct Lenders(Mutex<Vec<Weak<dyn Lender>>>);

impl Lenders {
    pub(crate) fn add(&self, lender: Weak<dyn Lender>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(lender);
    }

    /// Those with memory to spare on the device, who has most first, with how much it is.
    pub(crate) fn on(&self, device: DeviceOrdinal) -> Vec<(u64, Arc<dyn Lender>)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all = all.iter().filter_map(Weak::upgrade);
        let mut found: Vec<_> = all.map(|lender| (lender.spare_bytes(device), lender)).collect();
        found.retain(|(spare_bytes, _)| *spare_bytes > 0);
        found.sort_by_key(|(spare_bytes, _)| std::cmp::Reverse(*spare_bytes));
        found
    }
}

impl<D: Driver> Pool<D> {
    /// Has paged memory give up so much of the device, or what it has, and waits until it has done so. Did any? Then what found no
    /// room may be tried again. The caller is not inside of the gate. *Blocks* for as long as that memory is in use, some 10 s at most.
    pub fn make_room(&self, device: DeviceOrdinal, bytes: u64) -> bool {
        let mut left = bytes;
        let mut asked = Vec::new();
        for (spare_bytes, lender) in self.lenders.on(device) {
            if left == 0 {
                break;
            }
            lender.ask(left.min(spare_bytes));
            left = left.saturating_sub(spare_bytes);
            asked.push(lender);
        }
        for lender in &asked {
            lender.wait(LIMIT);
        }
        !asked.is_empty()
    }
}
