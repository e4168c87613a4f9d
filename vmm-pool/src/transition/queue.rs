//! The queue of what is still to leave or to come by stages, and the record of a stage. The queue is kept from stage to
//! stage, so that a stage costs as much as it moves.

use std::collections::{BTreeMap, VecDeque};

use crate::driver::DeviceOrdinal;
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::Row;

/// Of those that do not fit into a stage, how many are passed over for later ones that may.
const PASSED_OVER_MAX: usize = 64;

/// Bytes by device.
pub type ByDevice = BTreeMap<DeviceOrdinal, u64>;

/// The memory that is still to be moved on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// All of it.
    pub bytes: u64,
    /// The smallest allocation.
    pub smallest_bytes: u64,
}

/// The record of what a window has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// As of any step; its bytes are those of `bytes`.
    pub log: StepLog,
    /// Device memory that is gone, or has come.
    pub bytes: ByDevice,
    /// Contents copied between devices and the host.
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
    /// None where it takes no room in a stage, and goes with the next one.
    place: Option<Place>,
    /// Counts as what is left.
    counts: Option<(DeviceOrdinal, u64)>,
}

/// The room that an allocation takes in a stage.
#[derive(Clone, Copy, Debug)]
struct Place {
    device: DeviceOrdinal,
    /// Those of rank 0 go first.
    rank: usize,
    bytes: u64,
}

/// All that wait, in the ledger's order.
#[derive(Debug, Default)]
pub(super) struct Queue {
    unlimited: Vec<Waiting>,
    /// By rank.
    by_device: BTreeMap<DeviceOrdinal, [VecDeque<Waiting>; 2]>,
    left: BTreeMap<DeviceOrdinal, Tally>,
}

/// Sizes of what is left, and how many there are of each.
#[derive(Debug, Default)]
struct Tally {
    bytes: u64,
    sizes: BTreeMap<u64, usize>,
}

/// The amount that a stage may take of one device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Allowance {
    /// So many bytes, and one allocation at least.
    AtLeastOne(u64),
    /// No more than so many bytes.
    AtMost(u64),
}

impl Waiting {
    /// Takes no room in a stage.
    pub(super) fn unlimited(row: &Row) -> Self {
        Self { row: row.handle(), place: None, counts: None }
    }

    /// Takes `bytes` of the room that a stage has on its device.
    pub(super) fn of(row: &Row, rank: usize, bytes: u64) -> Self {
        let place = row.device().map(|device| Place { device, rank, bytes });
        Self { row: row.handle(), place, counts: None }
    }

    /// It is left until its stage has moved it.
    pub(super) fn counting(self, row: &Row) -> Self {
        Self { counts: row.device().map(|device| (device, row.size_bytes())), ..self }
    }
}

impl Queue {
    /// Behind the others.
    pub(super) fn add(&mut self, waiting: Waiting) {
        self.count(&waiting);
        match waiting.place {
            None => self.unlimited.push(waiting),
            Some(Place { device, rank, .. }) => {
                self.by_device.entry(device).or_default()[rank].push_back(waiting);
            }
        }
    }

    /// Before the others: its stage has not moved it.
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

    /// Those that take room first, then those that take none.
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

/// Takes what fits from the front, and passes over some that do not.
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
