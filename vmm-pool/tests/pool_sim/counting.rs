//! A file in which several pools count what they hold.

use std::sync::Arc;

use vmm_pool::budget::{Account, Entry, Figure, Gpu, OverBudget, Shared};
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid};

use crate::stage::{SimPool, UNIT};

pub(crate) const BUDGET_BYTES: u64 = 32 * UNIT;

/// A slot of a file that several pools count in.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) shared: Arc<Shared>,
    pub(crate) slot: usize,
}

impl Account for Slot {
    fn take(&self, device: DeviceOrdinal, bytes: u64) -> Result<Option<Entry>, OverBudget> {
        let place = usize::try_from(device.0).expect("a device");
        self.shared.take(place, self.slot, bytes).map(|()| Some(Entry(place)))
    }

    fn take_anyway(&self, device: DeviceOrdinal, bytes: u64) -> Option<Entry> {
        let place = usize::try_from(device.0).expect("a device");
        self.shared.take_anyway(place, self.slot, bytes);
        Some(Entry(place))
    }

    fn give_back(&self, place: Entry, bytes: u64) {
        self.shared.give_back(place.0, self.slot, bytes);
    }

    fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        Some(self.shared.figure(usize::try_from(device.0).ok()?))
    }
}

/// A file in which so many processes count.
pub(crate) fn shared(slots: usize) -> Arc<Shared> {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(Shared::BYTES as u64).expect("its size");
    let shared = Shared::map(&file).expect("a mapping");
    shared.begin();
    for (number, budget_bytes) in [(1, Some(BUDGET_BYTES)), (2, Some(3 * BUDGET_BYTES))] {
        let figure = Figure { budget_bytes, held_bytes: 0 };
        shared.add(&Gpu { uuid: DeviceUuid([number; 16]), index: None, total_bytes: 0, figure });
    }
    (0..slots).for_each(|slot| shared.open_slot(slot));
    Arc::new(shared)
}

pub(crate) fn counts(pool: &SimPool, shared: &Arc<Shared>, slot: usize) {
    assert!(pool.count_against(Arc::new(Slot { shared: Arc::clone(shared), slot })));
}
