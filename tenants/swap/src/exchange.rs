//! The order of moves during a swap of two tenants: which process moves how much next. It is a pure account of bytes by device,
//! from the processes' answers.
//!
//! A device holds at most the larger of the leaving and the coming bytes, and a window. Memory that was just released is granted
//! to the coming tenant with its next order; the leaving tenant waits for nothing. If all coming bytes fit into the free memory
//! at the start, the first tenant saves everything and releases its memory last. The driver clears released memory, and copies to
//! that device are slow meanwhile.

use std::collections::{BTreeMap, VecDeque};

use vmm_pool::Schedule;

use sublet_protocol::wire::{DeviceDelta, Needed, PhaseReport, StageLeft, Window};

/// The number of orders that a process has at a time. So it never waits for the coordinator between stages.
const AHEAD: usize = 2;

/// The usual window is this part of the larger of the two tenants on a device.
const WINDOW_PART: u64 = 16;
/// The smallest usual window. A smaller stage would end before the next order arrives.
const WINDOW_BYTES_MIN: u64 = 256 << 20;
/// The largest usual window. A stage of it takes a hundred times as long as its messages and calls, and the last stage, which
/// moves alone, is short.
const WINDOW_BYTES_MAX: u64 = 1 << 30;
/// If the usual window has no room for two of the largest coming allocation, the window has room for this number of them. The
/// leaving tenant would otherwise wait for each.
const WINDOW_ALLOCATIONS: u64 = 4;
/// Such a window is at most this part of the larger of the two tenants.
const WIDER_WINDOW_PART: u64 = 4;

/// The next order, with the index of its process among the leaving or the coming processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Save and release a window, or all that is left.
    Release(usize, Option<Window>),
    /// Report what has stayed: no process has memory left to release.
    Verify(usize),
    /// Create and fill this much memory.
    Restore(usize, Window),
}

/// The account of one swap. See the documentation of this module.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) window_bytes: u64,
    devices: BTreeMap<String, Device>,
    leaving: Vec<Leaver>,
    coming: Vec<Comer>,
    /// The tenant that was to come does so no more.
    is_coming_over: bool,
    /// All coming memory has room next to all leaving memory and a window.
    has_room_for_both: bool,
}

/// The account of one device, in bytes.
#[expect(clippy::struct_field_names, reason = "units end the name")]
#[derive(Debug, Default)]
struct Device {
    /// The free bytes before anything moved.
    free_bytes: u64,
    leaving_bytes: u64,
    coming_bytes: u64,
    gone_bytes: u64,
    /// Bytes that coming processes have created, or may create by an order.
    granted_bytes: u64,
}

/// Bytes by device.
type Bytes = BTreeMap<String, u64>;

/// A process of the leaving tenant.
#[derive(Debug)]
struct Leaver {
    /// The bytes that it still has, by its last answer.
    left: Bytes,
    next_stage: u32,
    due: usize,
    answers: usize,
    at: LeaverAt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaverAt {
    /// It gets orders for stages.
    Stages,
    /// A stage failed, or moved nothing. The rest is tried in one step.
    Trouble,
    /// It was ordered to release the rest.
    Releasing,
    /// It has released the rest.
    Released,
    /// It was ordered to report what has stayed.
    Verifying,
    /// It has reported, or is lost.
    Over,
}

/// A process of the coming tenant.
#[derive(Debug)]
struct Comer {
    /// By device: the bytes still to be created, and the smallest allocation among them; 0 if that is not known.
    left: BTreeMap<String, (u64, u64)>,
    next_stage: u32,
    /// The bytes by device that each order allows, for the orders that it has not answered yet.
    promised: VecDeque<Vec<(String, u64)>>,
    /// By device: the largest allowance, since the last creation there, that was too small for any allocation.
    too_little: Bytes,
}

impl Comer {
    /// Returns the bytes that no order under way covers, as far as is known.
    fn unasked(&self) -> BTreeMap<String, (u64, u64)> {
        let mut unasked = self.left.clone();
        for (uuid, bytes) in self.promised.iter().flatten() {
            if let Some((left, _)) = unasked.get_mut(uuid) {
                *left = left.saturating_sub(*bytes);
            }
        }
        unasked.retain(|_, (left, _)| *left > 0);
        unasked
    }
}

/// Adds up, by device, the bytes that several processes have or need.
pub(super) fn totals<'a>(deltas: impl IntoIterator<Item = &'a DeviceDelta>) -> Bytes {
    let mut totals = Bytes::new();
    for delta in deltas {
        let total: &mut u64 = totals.entry(delta.uuid.clone()).or_default();
        *total = total.saturating_add(delta.bytes);
    }
    totals
}

/// Adds up numbers of other processes, without overflow.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// Returns the window for a device. The larger tenant has `moved_bytes` there, and the largest allocation of the coming one is
/// `largest_bytes`.
fn usual_window(moved_bytes: u64, largest_bytes: u64) -> u64 {
    let usual = (moved_bytes / WINDOW_PART).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
    if usual >= largest_bytes.saturating_mul(2) {
        return usual;
    }
    let wider = largest_bytes.saturating_mul(WINDOW_ALLOCATIONS);
    wider.min(moved_bytes / WIDER_WINDOW_PART).max(usual)
}

impl Exchange {
    /// Begins the account. `leaving` has the bytes of each leaving process on each device, and `coming` the needs of each coming
    /// process. Without `window_bytes` the usual window is used.
    pub(super) fn new(
        window_bytes: Option<u64>,
        leaving: &[Vec<DeviceDelta>],
        coming: &[Needed],
    ) -> Self {
        let needs = || coming.iter().flat_map(|needed| &needed.devices);
        let mut devices: BTreeMap<String, Device> = BTreeMap::new();
        for (uuid, bytes) in totals(leaving.iter().flatten()) {
            devices.entry(uuid).or_default().leaving_bytes = bytes;
        }
        for (uuid, bytes) in totals(needs()) {
            devices.entry(uuid).or_default().coming_bytes = bytes;
        }
        for delta in needs() {
            let device = devices.entry(delta.uuid.clone()).or_default();
            device.free_bytes = delta.free_bytes;
        }
        let moved = devices.values().map(|device| device.leaving_bytes.max(device.coming_bytes));
        let largest = coming.iter().map(|needed| needed.largest_bytes);
        let usual = usual_window(moved.max().unwrap_or(0), largest.max().unwrap_or(0));
        let leavers = leaving.iter().map(|deltas| Leaver {
            left: totals(deltas),
            next_stage: 0,
            due: 0,
            answers: 0,
            at: LeaverAt::Stages,
        });
        let comers = coming.iter().map(|needed| Comer {
            left: totals(&needed.devices)
                .into_iter()
                .map(|(uuid, bytes)| (uuid, (bytes, 0)))
                .collect(),
            next_stage: 0,
            promised: VecDeque::new(),
            too_little: Bytes::new(),
        });
        let window_bytes = window_bytes.unwrap_or(usual).max(1);
        let has_room = |device: &Device| {
            let needed_bytes = device.coming_bytes.saturating_add(window_bytes);
            device.coming_bytes == 0 || device.free_bytes >= needed_bytes
        };
        Self {
            has_room_for_both: devices.values().all(has_room),
            window_bytes,
            devices,
            leaving: leavers.collect(),
            coming: comers.collect(),
            is_coming_over: false,
        }
    }

    /// Returns when the last step of the leaving processes saves the rest.
    pub(super) fn rest(&self) -> Schedule {
        if self.has_room_for_both { Schedule::SaveFirst } else { Schedule::SaveMeanwhile }
    }

    /// Returns the bytes that move in both directions.
    pub(super) fn total_bytes(&self) -> u64 {
        let bytes = self
            .devices
            .values()
            .map(|device| device.leaving_bytes.saturating_add(device.coming_bytes));
        sum(bytes)
    }

    /// Returns the next order, and counts it as sent. None if answers have to come first, or no work is left.
    pub(super) fn next(&mut self) -> Option<Move> {
        self.next_of_leaving().or_else(|| self.next_of_coming())
    }

    /// Has all leaving memory left, and has no coming process an open order? The rest of the coming memory does not need stages
    /// any more.
    pub(super) fn is_over(&self) -> bool {
        let all_left = self.leaving.iter().all(|leaver| leaver.at == LeaverAt::Over);
        let has_begun = |comer: &Comer| comer.next_stage > 0 && comer.promised.is_empty();
        all_left && (self.is_coming_over || self.coming.iter().all(has_begun))
    }

    fn next_of_leaving(&mut self) -> Option<Move> {
        let window_bytes = self.window_bytes;
        let all_released = self.all_released();
        for (index, leaver) in self.leaving.iter_mut().enumerate() {
            match leaver.at {
                LeaverAt::Stages if leaver.due < AHEAD => {
                    let asked = window_bytes.saturating_mul(leaver.due as u64);
                    let most = leaver.left.values().copied().max().unwrap_or(0);
                    leaver.due += 1;
                    // No process needs room made for it.
                    let needs_no_room = self.is_coming_over || self.has_room_for_both;
                    if most.saturating_sub(asked) <= window_bytes || needs_no_room {
                        leaver.at = LeaverAt::Releasing;
                        return Some(Move::Release(index, None));
                    }
                    let stage = leaver.next_stage;
                    leaver.next_stage += 1;
                    let devices = leaver.left.keys().map(|uuid| (uuid.clone(), window_bytes));
                    let window = Window { stage, devices: devices.collect() };
                    return Some(Move::Release(index, Some(window)));
                }
                LeaverAt::Trouble if leaver.due == 0 => {
                    leaver.due += 1;
                    leaver.at = LeaverAt::Releasing;
                    return Some(Move::Release(index, None));
                }
                LeaverAt::Released if all_released => {
                    leaver.due += 1;
                    leaver.at = LeaverAt::Verifying;
                    return Some(Move::Verify(index));
                }
                LeaverAt::Stages
                | LeaverAt::Trouble
                | LeaverAt::Releasing
                | LeaverAt::Released
                | LeaverAt::Verifying
                | LeaverAt::Over => {}
            }
        }
        None
    }

    fn all_released(&self) -> bool {
        self.leaving.iter().all(|leaver| match leaver.at {
            LeaverAt::Released | LeaverAt::Verifying | LeaverAt::Over => true,
            LeaverAt::Stages | LeaverAt::Trouble | LeaverAt::Releasing => false,
        })
    }

    fn next_of_coming(&mut self) -> Option<Move> {
        if self.is_coming_over {
            return None;
        }
        let all_released = self.all_released();
        // The process with the fewest orders under way goes first, and among equals the one that needs most.
        let mut order: Vec<usize> = (0..self.coming.len()).collect();
        order.sort_by_key(|index| {
            let comer = &self.coming[*index];
            let left = sum(comer.left.values().map(|(left, _)| *left));
            (comer.promised.len(), std::cmp::Reverse(left))
        });
        for index in order {
            let comer = &self.coming[index];
            let is_first = comer.next_stage == 0;
            // The rest is created in one step with the phases after it.
            if comer.promised.len() >= AHEAD || (all_released && !is_first) {
                continue;
            }
            let granted = self.granted(index, all_released);
            let begins = is_first && (comer.left.is_empty() || all_released);
            if granted.is_empty() && !begins {
                continue;
            }
            for (uuid, bytes) in &granted {
                if let Some(device) = self.devices.get_mut(uuid) {
                    device.granted_bytes = device.granted_bytes.saturating_add(*bytes);
                }
            }
            let comer = &mut self.coming[index];
            let window = Window { stage: comer.next_stage, devices: granted.clone() };
            comer.next_stage += 1;
            comer.promised.push_back(granted);
            return Some(Move::Restore(index, window));
        }
        None
    }

    /// Returns the bytes that a process may create now, by device.
    fn granted(&self, index: usize, all_released: bool) -> Vec<(String, u64)> {
        let comer = &self.coming[index];
        let mut granted = Vec::new();
        for (uuid, (left, smallest)) in comer.unasked() {
            let allowed = self.allowed(&uuid, all_released);
            let worth_it = left.min(smallest.max(self.window_bytes / 2));
            let bytes = left.min(allowed);
            let too_little = comer.too_little.get(&uuid).copied().unwrap_or(0);
            if allowed >= worth_it && bytes > too_little {
                granted.push((uuid, bytes));
            }
        }
        granted
    }

    /// Returns how many more bytes may be created on a device now.
    fn allowed(&self, uuid: &str, all_released: bool) -> u64 {
        let Some(device) = self.devices.get(uuid) else { return 0 };
        if all_released {
            // Only the driver knows what else may use the memory.
            return u64::MAX;
        }
        if self.has_room_for_both {
            return device.free_bytes.saturating_sub(device.granted_bytes);
        }
        // Shared memory is free when all its processes have released it, which they do in their first step.
        let counts =
            self.leaving.iter().all(|leaver| leaver.answers > 0 || leaver.at == LeaverAt::Over);
        let gone_bytes = if counts { device.gone_bytes } else { 0 };
        let free = device.free_bytes.saturating_add(gone_bytes);
        let stays = device.leaving_bytes.saturating_sub(gone_bytes);
        let most = device.leaving_bytes.max(device.coming_bytes).saturating_add(self.window_bytes);
        free.min(most.saturating_sub(stays)).saturating_sub(device.granted_bytes)
    }

    /// Notes that a leaving process has done a stage, or has released the rest.
    pub(super) fn released(&mut self, index: usize, report: &PhaseReport) {
        self.add_gone(&report.devices);
        let moved_bytes = sum(report.devices.iter().map(|delta| delta.bytes));
        let is_all = self.owes_all_alone(index);
        let leaver = &mut self.leaving[index];
        leaver.answers += 1;
        leaver.due = leaver.due.saturating_sub(1);
        leaver.left = left_of(report).map(|left| (left.uuid.clone(), left.bytes)).collect();
        if is_all {
            leaver.at = LeaverAt::Released;
        } else if leaver.at == LeaverAt::Stages && moved_bytes == 0 && !leaver.left.is_empty() {
            leaver.at = LeaverAt::Trouble;
        }
    }

    /// Has this leaving process done all its stages, with the order to release the rest still open?
    pub(super) fn owes_all_alone(&self, index: usize) -> bool {
        let leaver = &self.leaving[index];
        leaver.at == LeaverAt::Releasing && leaver.due == 1
    }

    /// Ends the stages because too much time has passed. Each leaving process is ordered to release the rest, whatever its stages
    /// have done.
    pub(super) fn hurry(&mut self) {
        for leaver in &mut self.leaving {
            if leaver.at == LeaverAt::Stages {
                leaver.at = LeaverAt::Trouble;
            }
        }
    }

    fn add_gone(&mut self, devices: &[DeviceDelta]) {
        for delta in devices {
            let device = self.devices.entry(delta.uuid.clone()).or_default();
            device.gone_bytes = device.gone_bytes.saturating_add(delta.bytes);
        }
    }

    /// Notes that a leaving process could not do a stage. It still has the rest on its devices, and can be ordered to release it.
    pub(super) fn stage_failed(&mut self, index: usize) {
        let leaver = &mut self.leaving[index];
        leaver.due = leaver.due.saturating_sub(1);
        if leaver.at == LeaverAt::Stages {
            leaver.at = LeaverAt::Trouble;
        }
    }

    /// Notes that a leaving process has reported everything, or is lost.
    pub(super) fn left_for_good(&mut self, index: usize) {
        self.leaving[index].at = LeaverAt::Over;
    }

    /// Does this leaving process get no more orders?
    pub(super) fn has_left_for_good(&self, index: usize) -> bool {
        self.leaving[index].at == LeaverAt::Over
    }

    /// Notes that a coming process has done a stage.
    pub(super) fn restored(&mut self, index: usize, report: &PhaseReport) {
        let comer = &mut self.coming[index];
        comer.left = left_of(report)
            .map(|left| (left.uuid.clone(), (left.bytes, left.smallest_bytes)))
            .collect();
        for (uuid, bytes) in comer.promised.pop_front().unwrap_or_default() {
            let taken = report.devices.iter().filter(|delta| delta.uuid == uuid);
            let taken_bytes = sum(taken.map(|delta| delta.bytes));
            if let Some(device) = self.devices.get_mut(&uuid) {
                let others = device.granted_bytes.saturating_sub(bytes);
                device.granted_bytes = others.saturating_add(taken_bytes);
            }
            if taken_bytes == 0 {
                let known = comer.too_little.entry(uuid).or_insert(0);
                *known = bytes.max(*known);
            } else {
                comer.too_little.remove(&uuid);
            }
        }
    }

    /// The tenant that was to come does so no more.
    pub(super) fn end_coming(&mut self) {
        self.is_coming_over = true;
    }
}

fn left_of(report: &PhaseReport) -> impl Iterator<Item = &StageLeft> {
    report.stage.iter().flat_map(|stage| &stage.left)
}

#[cfg(test)]
mod tests;
