//! The queue of allocations that later stages must move, and the record of a stage. The queue lasts from stage to
//! stage, so that a stage costs as much as it moves.

use std::collections::{BTreeMap, VecDeque};

use crate::driver::DeviceOrdinal;
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::Row;

/// The number of allocations too large for a stage that are skipped, to find later ones that fit.
const PASSED_OVER_MAX: usize = 64;

/// A number of bytes for each device.
pub type ByDevice = BTreeMap<DeviceOrdinal, u64>;

/// The memory on one device that must still be moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// All such memory, in bytes.
    pub bytes: u64,
    /// The size of the smallest allocation, in bytes.
    pub smallest_bytes: u64,
}

/// The record of a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// The times of the steps of this window. Its bytes are those of `bytes`.
    pub log: StepLog,
    /// The device memory that was released or restored.
    pub bytes: ByDevice,
    /// The contents that were copied between devices and the host, in bytes.
    pub copied_bytes: u64,
}

impl Moved {
    pub(super) fn add(&mut self, other: Self) {
        self.log.add(other.log);
        self.copied_bytes += other.copied_bytes;
        for (device, bytes) in other.bytes {
            *self.bytes.entry(device).or_insert(0) += bytes;
        }
    }
}

/// One allocation that waits for its stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) row: VirtualHandle,
    /// The room that it needs. None if it needs none, and moves with the next stage.
    place: Option<Place>,
    /// The device and the size that count as left.
    counts: Option<(DeviceOrdinal, u64)>,
}

/// The room that an allocation needs in a stage.
#[derive(Clone, Copy, Debug)]
struct Place {
    device: DeviceOrdinal,
    /// Allocations of rank 0 move first.
    rank: usize,
    bytes: u64,
}

/// All allocations that wait, in the ledger's order.
#[derive(Debug, Default)]
pub(super) struct Queue {
    unlimited: Vec<Waiting>,
    /// The allocations that need room, by device and rank.
    by_device: BTreeMap<DeviceOrdinal, [VecDeque<Waiting>; 2]>,
    left: BTreeMap<DeviceOrdinal, Tally>,
}

/// The sizes of allocations that are left, and the number of each size.
#[derive(Debug, Default)]
struct Tally {
    bytes: u64,
    sizes: BTreeMap<u64, usize>,
}

/// The memory that a stage may move on one device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Allowance {
    /// This number of bytes, and at least one allocation.
    AtLeastOne(u64),
    /// No more than this number of bytes.
    AtMost(u64),
}

impl Waiting {
    /// Makes an entry that needs no room in a stage.
    pub(super) fn unlimited(row: &Row) -> Self {
        Self { row: row.handle(), place: None, counts: None }
    }

    /// Makes an entry that needs `bytes` of the room that a stage has on its device.
    pub(super) fn of(row: &Row, rank: usize, bytes: u64) -> Self {
        let place = row.device().map(|device| Place { device, rank, bytes });
        Self { row: row.handle(), place, counts: None }
    }

    /// Counts the entry as left until its stage has moved it.
    pub(super) fn counting(self, row: &Row) -> Self {
        Self { counts: row.device().map(|device| (device, row.size_bytes())), ..self }
    }
}

impl Queue {
    /// Adds an entry behind the others.
    pub(super) fn add(&mut self, waiting: Waiting) {
        self.count(&waiting);
        match waiting.place {
            None => self.unlimited.push(waiting),
            Some(Place { device, rank, .. }) => {
                self.by_device.entry(device).or_default()[rank].push_back(waiting);
            }
        }
    }

    /// Puts an entry back before the others, because its stage has not moved it.
    pub(super) fn put_back(&mut self, waiting: Waiting) {
        self.count(&waiting);
        match waiting.place {
            None => self.unlimited.push(waiting),
            Some(Place { device, rank, .. }) => {
                self.by_device.entry(device).or_default()[rank].push_front(waiting);
            }
        }
    }

    fn count(&mut self, waiting: &Waiting) {
        if let Some((device, bytes)) = waiting.counts {
            let tally = self.left.entry(device).or_default();
            tally.bytes += bytes;
            *tally.sizes.entry(bytes).or_insert(0) += 1;
        }
    }

    fn uncount(&mut self, waiting: &Waiting) {
        let Some((device, bytes)) = waiting.counts else { return };
        let Some(tally) = self.left.get_mut(&device) else { return };
        tally.bytes -= bytes;
        if let Some(count) = tally.sizes.get_mut(&bytes) {
            *count -= 1;
            if *count == 0 {
                tally.sizes.remove(&bytes);
            }
        }
        if tally.sizes.is_empty() {
            self.left.remove(&device);
        }
    }

    /// Takes the entries of a stage: those that need room first, then those that need none.
    pub(super) fn take(
        &mut self,
        window: impl Fn(DeviceOrdinal) -> Option<Allowance>,
        still_waits: impl Fn(VirtualHandle) -> bool,
    ) -> (Vec<Waiting>, Vec<Waiting>) {
        let mut others = std::mem::take(&mut self.unlimited);
        let mut taken = Vec::new();
        let mut gone = Vec::new();
        for (device, ranks) in &mut self.by_device {
            let Some(window) = window(*device) else { continue };
            let mut bytes = 0;
            for queue in ranks {
                take_from(queue, window, &mut bytes, &still_waits, (&mut taken, &mut gone));
            }
        }
        others.retain(|waiting| {
            let waits = still_waits(waiting.row);
            if !waits {
                gone.push(*waiting);
            }
            waits
        });
        for waiting in taken.iter().chain(&others).chain(&gone) {
            self.uncount(waiting);
        }
        (taken, others)
    }

    /// Returns the memory that is left, by device.
    pub(super) fn left(&self) -> BTreeMap<DeviceOrdinal, Left> {
        let left = self.left.iter().filter_map(|(device, tally)| {
            let (&smallest_bytes, _) = tally.sizes.first_key_value()?;
            Some((*device, Left { bytes: tally.bytes, smallest_bytes }))
        });
        left.collect()
    }
}

/// Takes the entries that fit from the front, and skips some that do not.
fn take_from(
    queue: &mut VecDeque<Waiting>,
    window: Allowance,
    bytes: &mut u64,
    still_waits: impl Fn(VirtualHandle) -> bool,
    (taken, gone): (&mut Vec<Waiting>, &mut Vec<Waiting>),
) {
    let mut passed_over = Vec::new();
    while passed_over.len() < PASSED_OVER_MAX
        && let Some(waiting) = queue.pop_front()
    {
        let wanted = waiting.place.map_or(0, |place| place.bytes);
        if !still_waits(waiting.row) {
            gone.push(waiting);
            continue;
        }
        let fits = match window {
            Allowance::AtLeastOne(most) => *bytes == 0 || bytes.saturating_add(wanted) <= most,
            Allowance::AtMost(most) => bytes.saturating_add(wanted) <= most,
        };
        if fits {
            *bytes += wanted;
            taken.push(waiting);
        } else {
            passed_over.push(waiting);
        }
    }
    for waiting in passed_over.into_iter().rev() {
        queue.push_front(waiting);
    }
}
