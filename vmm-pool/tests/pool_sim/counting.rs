//! A count of what several pools hold.

use std::sync::{Arc, Mutex, MutexGuard};

use vmm_pool::budget::{Account, Entry, Figure, OverBudget};
use vmm_pool::driver::DeviceOrdinal;

use crate::stage::{SimPool, UNIT};

pub(crate) const BUDGET_BYTES: u64 = 32 * UNIT;

/// What each of several pools holds of two devices, and the budgets of these.
#[derive(Debug)]
pub(crate) struct Shared(Mutex<[Counted; 2]>);

#[derive(Debug)]
struct Counted {
    budget_bytes: Option<u64>,
    held_bytes: Vec<u64>,
}

impl Counted {
    fn figure(&self) -> Figure {
        let held_bytes = self.held_bytes.iter().sum();
        Figure { budget_bytes: self.budget_bytes, held_bytes }
    }
}

impl Shared {
    fn all(&self) -> MutexGuard<'_, [Counted; 2]> {
        self.0.lock().expect("no panic")
    }

    pub(crate) fn set_budget(&self, device: usize, budget_bytes: Option<u64>) {
        self.all()[device].budget_bytes = budget_bytes;
    }

    pub(crate) fn figure(&self, device: usize) -> Figure {
        self.all()[device].figure()
    }
}

/// The part of one pool in a count of several.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) shared: Arc<Shared>,
    pub(crate) slot: usize,
}

impl Account for Slot {
    fn take(&self, device: DeviceOrdinal, bytes: u64) -> Result<Option<Entry>, OverBudget> {
        let place = usize::try_from(device.0).expect("a device");
        let counted = &mut self.shared.all()[place];
        let Figure { budget_bytes, held_bytes } = counted.figure();
        match budget_bytes {
            Some(budget_bytes) if held_bytes + bytes > budget_bytes => {
                Err(OverBudget { budget_bytes, held_bytes })
            }
            Some(_) | None => {
                counted.held_bytes[self.slot] += bytes;
                Ok(Some(Entry(place)))
            }
        }
    }

    fn take_anyway(&self, device: DeviceOrdinal, bytes: u64) -> Option<Entry> {
        let place = usize::try_from(device.0).expect("a device");
        self.shared.all()[place].held_bytes[self.slot] += bytes;
        Some(Entry(place))
    }

    fn give_back(&self, place: Entry, bytes: u64) {
        self.shared.all()[place.0].held_bytes[self.slot] -= bytes;
    }

    fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        Some(self.shared.figure(usize::try_from(device.0).ok()?))
    }
}

/// A count for so many pools.
pub(crate) fn shared(slots: usize) -> Arc<Shared> {
    let counted = |budget_bytes| Counted { budget_bytes, held_bytes: vec![0; slots] };
    Arc::new(Shared(Mutex::new([Some(BUDGET_BYTES), Some(3 * BUDGET_BYTES)].map(counted))))
}

pub(crate) fn counts(pool: &SimPool, shared: &Arc<Shared>, slot: usize) {
    assert!(pool.count_against(Arc::new(Slot { shared: Arc::clone(shared), slot })));
}
