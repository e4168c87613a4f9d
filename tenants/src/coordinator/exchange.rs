//! Who moves how much next while two tenants change places: a pure account of bytes by device, kept from what the
//! processes say.
//!
//! No device holds more than the larger of what leaves and what comes there, and a window. Memory that has just been
//! released is given to whoever comes as it is told; what leaves waits for nobody. Memory that changes hands is gone and granted in one.
//!
//! What both have alike changes hands however much is free: whoever comes leaves it uncreated until it is handed over, but
//! for a head start of a window, with which the link is busy from the beginning. As much is released at the end.

use std::collections::{BTreeMap, VecDeque};

use super::hand_over::{Counts, HandOver, add_up, alike, as_count, bytes_on, cap, sum, take_one};
use crate::wire::{BlockShape, DeviceDelta, HANDED_MAX, Needed, PhaseReport, StageLeft, Window};

/// Orders that a process is sent before it has answered the first: it never waits for the coordinator between stages.
const AHEAD: usize = 2;

/// The usual window is this part of the larger of the two on a device,
const WINDOW_PART: u64 = 16;
/// and at least so much: below, a stage is over before the next order could be of use;
const WINDOW_BYTES_MIN: u64 = 256 << 20;
/// and at most so much: a stage is a hundred times as long as the messages and calls that begin and end it, and what the
/// last one moves alone is short.
const WINDOW_BYTES_MAX: u64 = 1 << 30;

/// What is created in place of being handed over is a window at most, and this part of what both have alike on a device,
const HEAD_START_PART: u64 = 8;
/// or this, where that is more.
const HEAD_START_MIN: u64 = 16 << 20;
/// Less than this part of what leaves is not worth the smaller stages of handing it over.
const ALIKE_PART_MIN: u64 = 8;

/// The next order, and to whom: an index among those that leave, or among those that come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Save and release a window.
    ReleaseStage(usize, Window),
    /// Save and release what is left.
    Release(usize),
    /// Say what has stayed: nobody has anything left to release.
    Verify(usize),
    /// Create and fill as much as this, besides what changes hands.
    RestoreStage(usize, Window),
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Exchange {
    window_bytes: u64,
    /// What one stage moves of a device: a window; where memory changes hands half of the largest head start, or two
    /// allocations as far as they fit into all of it, so that one is mapped while the other is filled.
    stage_bytes: u64,
    /// What one order has of a head start: half of it, so that there is another behind it from the beginning.
    first_bytes: u64,
    devices: BTreeMap<String, Device>,
    leaving: Vec<Leaver>,
    coming: Vec<Comer>,
    /// The tenant that was to come does so no more.
    is_coming_over: bool,
    /// What was handed over, and nobody has been given yet.
    at_hand: Counts,
    /// How many descriptors may be with us, or on their way to us, at a time.
    most_at_hand: usize,
    /// What changes hands; of the rest nobody is told anything.
    hand_over: HandOver,
}

/// What there is to know of one device.
#[expect(clippy::struct_field_names, reason = "units end the name")]
#[derive(Debug, Default)]
struct Device {
    /// Before anything moved.
    free_bytes: u64,
    leaving_bytes: u64,
    coming_bytes: u64,
    gone_bytes: u64,
    /// Taken by whoever comes, or promised to them.
    granted_bytes: u64,
    /// What may still be created in place of being handed over.
    head_start_bytes: u64,
}

/// Bytes by device.
type Bytes = BTreeMap<String, u64>;

/// A process of the tenant that leaves.
#[derive(Debug)]
struct Leaver {
    /// As it said last.
    left: Bytes,
    /// What of it could change hands.
    gives: Counts,
    next_stage: u32,
    due: usize,
    /// What each stage that it has not answered yet hands over at most.
    asked: VecDeque<Counts>,
    answers: usize,
    at: LeaverAt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaverAt {
    /// It is sent stages.
    Stages,
    /// A stage was not done, or moved nothing: what is left is tried in one step.
    Trouble,
    /// It was told to release what is left.
    Releasing,
    /// It has.
    Released,
    /// It was told to say what has stayed.
    Verifying,
    /// It has, or is lost.
    Over,
}

/// A process of the tenant that comes.
#[derive(Debug)]
struct Comer {
    /// What is still to be created, and the smallest allocation of it; 0 while that is not known.
    left: BTreeMap<String, (u64, u64)>,
    next_stage: u32,
    /// What it lacks that may be another's memory, as it said last.
    lacks: Counts,
    /// What of that it lacks for certain when it has done all that it was told.
    wants: Counts,
    /// It has not taken what it was handed.
    refuses: bool,
    /// What each order that it has not answered yet allows.
    promised: VecDeque<Promise>,
    /// What it was allowed last where it had nothing so small.
    too_little: Bytes,
}

#[derive(Debug)]
struct Promise {
    /// With what changes hands.
    bytes: Bytes,
    /// What it may create.
    granted: Vec<(String, u64)>,
    /// How many allocations change hands.
    handed: usize,
    /// What it leaves uncreated.
    kept: Counts,
}

impl Comer {
    /// What no order that is under way is about, as far as can be told.
    fn unasked(&self) -> BTreeMap<String, (u64, u64)> {
        let mut unasked = self.left.clone();
        for (uuid, bytes) in self.promised.iter().flat_map(|promise| &promise.bytes) {
            if let Some((left, _)) = unasked.get_mut(uuid) {
                *left = left.saturating_sub(*bytes);
            }
        }
        unasked.retain(|_, (left, _)| *left > 0);
        unasked
    }
}

/// Bytes by device that several processes have or need there.
pub(super) fn totals<'a>(deltas: impl IntoIterator<Item = &'a DeviceDelta>) -> Bytes {
    let mut totals = Bytes::new();
    for delta in deltas {
        let total: &mut u64 = totals.entry(delta.uuid.clone()).or_default();
        *total = total.saturating_add(delta.bytes);
    }
    totals
}

impl Exchange {
    /// `leaving` and `coming` have, for each process, what it has or needs on each device. `window_bytes` is the usual one
    /// where it is none. Nothing changes hands.
    pub(super) fn new(
        window_bytes: Option<u64>,
        leaving: &[Vec<DeviceDelta>],
        coming: &[Vec<DeviceDelta>],
    ) -> Self {
        let mut devices: BTreeMap<String, Device> = BTreeMap::new();
        for (uuid, bytes) in totals(leaving.iter().flatten()) {
            devices.entry(uuid).or_default().leaving_bytes = bytes;
        }
        for (uuid, bytes) in totals(coming.iter().flatten()) {
            devices.entry(uuid).or_default().coming_bytes = bytes;
        }
        for delta in coming.iter().flatten() {
            let device = devices.entry(delta.uuid.clone()).or_default();
            device.free_bytes = delta.free_bytes;
        }
        let largest = devices.values().map(|device| device.leaving_bytes.max(device.coming_bytes));
        let usual =
            (largest.max().unwrap_or(0) / WINDOW_PART).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
        let leavers = leaving.iter().map(|deltas| Leaver {
            left: totals(deltas),
            gives: Counts::new(),
            next_stage: 0,
            due: 0,
            asked: VecDeque::new(),
            answers: 0,
            at: LeaverAt::Stages,
        });
        let comers = coming.iter().map(|deltas| Comer {
            left: totals(deltas).into_iter().map(|(uuid, bytes)| (uuid, (bytes, 0))).collect(),
            next_stage: 0,
            lacks: Counts::new(),
            wants: Counts::new(),
            refuses: false,
            promised: VecDeque::new(),
            too_little: Bytes::new(),
        });
        let window_bytes = window_bytes.unwrap_or(usual).max(1);
        Self {
            window_bytes,
            stage_bytes: window_bytes,
            first_bytes: window_bytes,
            devices,
            leaving: leavers.collect(),
            coming: comers.collect(),
            is_coming_over: false,
            at_hand: Counts::new(),
            most_at_hand: 0,
            hand_over: HandOver::Nothing,
        }
    }

    /// The same, and memory changes hands where both have some of one shape, of the kind that `hand_over` names, and `most`
    /// descriptors at a time. `leaving` is what each process could give.
    pub(super) fn with_hand_over(
        mut self,
        hand_over: HandOver,
        leaving: &[Vec<(BlockShape, u32)>],
        coming: &[Needed],
        most: usize,
    ) -> Self {
        let mut alike = alike(leaving, coming);
        alike.retain(|shape, _| hand_over.takes(shape));
        let alike_bytes = sum(self.devices.keys().map(|uuid| bytes_on(&alike, uuid)));
        let leaving_bytes = sum(self.devices.values().map(|device| device.leaving_bytes));
        if most == 0 || alike_bytes == 0 || alike_bytes < leaving_bytes / ALIKE_PART_MIN {
            return self;
        }
        self.hand_over = hand_over;
        for (leaver, shapes) in self.leaving.iter_mut().zip(leaving) {
            leaver.gives = hand_over.of(shapes);
        }
        for (comer, needed) in self.coming.iter_mut().zip(coming) {
            comer.lacks = hand_over.of(&needed.shapes);
            comer.wants.clone_from(&comer.lacks);
        }
        let (mut most_bytes, mut largest_bytes) = (0, 0);
        for (uuid, device) in &mut self.devices {
            let there = alike.keys().filter(|shape| shape.uuid == *uuid);
            let largest = there.map(|shape| shape.size_bytes).max().unwrap_or(0);
            let part = bytes_on(&alike, uuid) / HEAD_START_PART;
            device.head_start_bytes = part.max(HEAD_START_MIN).max(largest).min(self.window_bytes);
            most_bytes = device.head_start_bytes.max(most_bytes);
            largest_bytes = largest.max(largest_bytes);
        }
        self.first_bytes = most_bytes.div_ceil(2).max(1);
        self.stage_bytes = largest_bytes.saturating_mul(2).min(most_bytes).max(self.first_bytes);
        self.most_at_hand = most;
        self
    }

    /// The same, with a window of four allocations of `largest_bytes` where the usual one has no room for two, and nothing changes
    /// hands: what leaves would wait for what comes, allocation by allocation. At most a quarter of the larger of the two.
    pub(super) fn widened(mut self, largest_bytes: u64) -> Self {
        let moved =
            self.devices.values().map(|device| device.leaving_bytes.max(device.coming_bytes));
        let most = moved.max().unwrap_or(0) / 4;
        let is_narrow = self.window_bytes < largest_bytes.saturating_mul(2);
        if is_narrow && self.most_at_hand == 0 {
            let window_bytes = largest_bytes.saturating_mul(4).min(most).max(self.window_bytes);
            self.window_bytes = window_bytes;
            self.stage_bytes = window_bytes;
            self.first_bytes = window_bytes;
        }
        self
    }

    /// How many of a shape nobody has been asked to hand over who does, as far as can be told.
    fn missing(&self, shape: &BlockShape) -> u32 {
        let wants = self.coming.iter().filter_map(|comer| comer.wants.get(shape));
        let here = self.at_hand.get(shape).copied().unwrap_or(0);
        let asked = self.leaving.iter().map(|leaver| leaver.asked_of(shape, self.stage_bytes));
        add_up(wants.copied()).saturating_sub(add_up(asked.chain([here])))
    }

    /// What can still be handed over to somebody.
    fn supply(&self) -> Counts {
        let mut supply = self.at_hand.clone();
        for leaver in &self.leaving {
            for (shape, count) in &leaver.gives {
                let count = match leaver.at {
                    LeaverAt::Stages => *count,
                    // As it was told before.
                    LeaverAt::Trouble | LeaverAt::Releasing => {
                        leaver.asked_of(shape, self.stage_bytes).min(*count)
                    }
                    LeaverAt::Released | LeaverAt::Verifying | LeaverAt::Over => 0,
                };
                let all: &mut u32 = supply.entry(shape.clone()).or_insert(0);
                *all = all.saturating_add(count);
            }
        }
        supply
    }

    /// What a process leaves uncreated, because it can be handed over to it; besides what is `handed` to it now.
    fn kept_by(&self, index: usize, handed: &[BlockShape]) -> Counts {
        let mut kept = self.coming[index].wants.clone();
        for shape in handed {
            take_one(&mut kept, shape);
        }
        if kept.is_empty() {
            return kept;
        }
        let mut supply = self.supply();
        for shape in handed {
            take_one(&mut supply, shape);
        }
        for (shape, count) in &mut kept {
            let others = self.coming[..index].iter().filter_map(|comer| comer.wants.get(shape));
            let there = supply.get(shape).copied().unwrap_or(0);
            *count = there.saturating_sub(add_up(others.copied())).min(*count);
        }
        kept.retain(|_, count| *count > 0);
        kept
    }

    /// What a stage that is about to be asked for is to hand over, besides what others hand over already.
    fn wanted(&self, leaver: usize) -> Counts {
        let mut wanted = Counts::new();
        if self.is_coming_over {
            return wanted;
        }
        let number = |counts: &Counts| counts.values().map(|count| *count as usize).sum::<usize>();
        let asked = self.leaving.iter().flat_map(|leaver| &leaver.asked).map(number);
        let at_hand = number(&self.at_hand) + asked.sum::<usize>();
        let mut room = self.most_at_hand.saturating_sub(at_hand).min(HANDED_MAX);
        // As many as a stage copies, and where there is room more of what needs no copy.
        let share = self.most_at_hand / (AHEAD * self.leaving.len().max(1));
        let mut gives: Vec<_> = self.leaving[leaver].gives.keys().collect();
        // The largest first: they save most.
        gives.sort_by_key(|shape| std::cmp::Reverse(shape.size_bytes));
        for shape in gives {
            let of_stage = of_stage(shape, self.stage_bytes).max(as_count(share as u64));
            let count = self.missing(shape).min(of_stage).min(as_count(room as u64));
            if count > 0 {
                room -= count as usize;
                wanted.insert(shape.clone(), count);
            }
        }
        wanted
    }

    /// The window.
    pub(super) fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Everything that moves, both ways.
    pub(super) fn total_bytes(&self) -> u64 {
        let bytes = self
            .devices
            .values()
            .map(|device| device.leaving_bytes.saturating_add(device.coming_bytes));
        sum(bytes)
    }

    /// The next order to be sent now, which counts as sent. None when answers have to come first, or nothing is left to
    /// be done.
    pub(super) fn next(&mut self) -> Option<Move> {
        self.next_of_leaving().or_else(|| self.next_of_coming())
    }

    /// Has everything left that can, and is nothing asked of those who come? What is still missing of them has no reason
    /// to come by stages any more.
    pub(super) fn is_over(&self) -> bool {
        let all_left = self.leaving.iter().all(|leaver| leaver.at == LeaverAt::Over);
        let has_begun = |comer: &Comer| comer.next_stage > 0 && comer.promised.is_empty();
        all_left && (self.is_coming_over || self.coming.iter().all(has_begun))
    }

    fn next_of_leaving(&mut self) -> Option<Move> {
        let (window_bytes, stage_bytes) = (self.window_bytes, self.stage_bytes);
        let all_released = self.all_released();
        for index in 0..self.leaving.len() {
            // What is released at the end changes hands no more.
            let at_the_end = if self.is_missing_any_of(index) { 0 } else { window_bytes };
            let leaver = &mut self.leaving[index];
            match leaver.at {
                LeaverAt::Stages if leaver.due < AHEAD => {
                    let asked = stage_bytes.saturating_mul(leaver.due as u64);
                    let most = leaver.left.values().copied().max().unwrap_or(0);
                    leaver.due += 1;
                    // There is nobody to make room for.
                    if most.saturating_sub(asked) <= at_the_end || self.is_coming_over {
                        leaver.at = LeaverAt::Releasing;
                        return Some(Move::Release(index));
                    }
                    let stage = leaver.next_stage;
                    leaver.next_stage += 1;
                    let devices = leaver.left.keys().map(|uuid| (uuid.clone(), stage_bytes));
                    let devices: Vec<_> = devices.collect();
                    let wanted = self.wanted(index);
                    self.leaving[index].asked.push_back(wanted.clone());
                    let wanted = wanted.into_iter().collect();
                    let window = Window { stage, devices, wanted, handed: Vec::new() };
                    return Some(Move::ReleaseStage(index, window));
                }
                LeaverAt::Trouble if leaver.due == 0 => {
                    leaver.due += 1;
                    leaver.at = LeaverAt::Releasing;
                    return Some(Move::Release(index));
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

    /// Has a process that leaves something that somebody lacks, and is not on its way?
    fn is_missing_any_of(&self, leaver: usize) -> bool {
        let leaver = &self.leaving[leaver];
        let more = |(shape, count): (&BlockShape, &u32)| {
            *count > leaver.asked_of(shape, self.stage_bytes) && self.missing(shape) > 0
        };
        !self.is_coming_over && leaver.gives.iter().any(more)
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
        // Whoever has least under way, and of those whoever needs most.
        let mut order: Vec<usize> = (0..self.coming.len()).collect();
        order.sort_by_key(|index| {
            let comer = &self.coming[*index];
            let left = sum(comer.left.values().map(|(left, _)| *left));
            (comer.promised.len(), std::cmp::Reverse(left))
        });
        for index in order {
            let comer = &self.coming[index];
            let is_first = comer.next_stage == 0;
            if comer.promised.len() >= AHEAD {
                continue;
            }
            // Those that may bring descriptors follow the first.
            let handed = if is_first { Vec::new() } else { self.for_comer(index) };
            // The rest comes in one step with what follows it.
            if all_released && !is_first && handed.is_empty() {
                continue;
            }
            let mut kept = self.kept_by(index, &handed);
            let granted = self.granted(index, &handed, &mut kept, all_released);
            let comer = &self.coming[index];
            let needs_nothing = comer.left.is_empty();
            // One that memory will be handed to is told so before.
            let is_awaited = !comer.wants.is_empty();
            let begins = is_first && (needs_nothing || all_released || is_awaited);
            if granted.is_empty() && handed.is_empty() && !begins {
                continue;
            }
            for (uuid, bytes) in &granted {
                if let Some(device) = self.devices.get_mut(uuid) {
                    device.granted_bytes = device.granted_bytes.saturating_add(*bytes);
                }
            }
            let mut promised: Bytes = granted.iter().cloned().collect();
            for shape in &handed {
                let bytes: &mut u64 = promised.entry(shape.uuid.clone()).or_default();
                *bytes = bytes.saturating_add(shape.size_bytes);
                take_one(&mut self.at_hand, shape);
            }
            let comer = &mut self.coming[index];
            let stage = comer.next_stage;
            comer.next_stage += 1;
            comer.wants.clone_from(&kept);
            let wanted = kept.clone().into_iter().collect();
            let devices = granted.clone();
            comer.promised.push_back(Promise {
                bytes: promised,
                granted,
                handed: handed.len(),
                kept,
            });
            let window = Window { stage, devices, wanted, handed };
            return Some(Move::RestoreStage(index, window));
        }
        None
    }

    /// What a process may create now, by device, besides what is `handed` to it. What of that is a head start is `kept` no
    /// more.
    fn granted(
        &mut self,
        index: usize,
        handed: &[BlockShape],
        kept: &mut Counts,
        all_released: bool,
    ) -> Vec<(String, u64)> {
        let hands_over = self.most_at_hand > 0;
        let mut granted = Vec::new();
        for (uuid, (left, smallest)) in self.coming[index].unasked() {
            let there = handed.iter().filter(|shape| shape.uuid == uuid);
            let handed_bytes = sum(there.map(|shape| shape.size_bytes));
            let allowed = self.allowed(&uuid, all_released);
            let left = left.saturating_sub(handed_bytes).saturating_sub(bytes_on(kept, &uuid));
            let too_little = self.coming[index].too_little.get(&uuid).copied().unwrap_or(0);
            let worth_it = left.min(smallest.max(self.window_bytes / 2));
            // What is handed over meanwhile does not wait for long.
            let most = smallest.max(self.stage_bytes).max(too_little.saturating_mul(2));
            let bytes = left.min(allowed).min(if hands_over { most } else { u64::MAX });
            if allowed >= worth_it && bytes > too_little {
                granted.push((uuid, bytes));
            } else if handed_bytes == 0 {
                let bytes = self.head_start(&uuid, allowed, kept);
                granted.extend((bytes > 0).then_some((uuid, bytes)));
            }
        }
        granted
    }

    /// Takes as much of what is `kept` on a device as one order may create in place of it.
    fn head_start(&mut self, uuid: &str, allowed: u64, kept: &mut Counts) -> u64 {
        let Some(device) = self.devices.get_mut(uuid) else { return 0 };
        let mut taken: u64 = 0;
        let mut shapes: Vec<_> = kept.iter_mut().filter(|(shape, _)| shape.uuid == uuid).collect();
        shapes.sort_by_key(|(shape, _)| std::cmp::Reverse(shape.size_bytes));
        for (shape, count) in shapes {
            let size_bytes = shape.size_bytes.max(1);
            let most = allowed.saturating_sub(taken).min(device.head_start_bytes);
            let of_order = self.first_bytes.saturating_sub(taken) / size_bytes;
            let of_order = if taken == 0 { of_order.max(1) } else { of_order };
            let number = as_count((most / size_bytes).min(of_order)).min(*count);
            let bytes = size_bytes.saturating_mul(u64::from(number));
            *count -= number;
            taken = taken.saturating_add(bytes);
            device.head_start_bytes = device.head_start_bytes.saturating_sub(bytes);
        }
        kept.retain(|_, count| *count > 0);
        taken
    }

    /// What is at hand for this process, as much as one order brings.
    fn for_comer(&self, index: usize) -> Vec<BlockShape> {
        let mut handed = Vec::new();
        for (shape, wants) in &self.coming[index].wants {
            let here = self.at_hand.get(shape).copied().unwrap_or(0);
            let room = HANDED_MAX.saturating_sub(handed.len());
            let count = usize::try_from(here.min(*wants)).unwrap_or(usize::MAX).min(room);
            handed.extend(std::iter::repeat_n(shape, count).cloned());
        }
        handed
    }

    /// How much more may be taken on a device now.
    fn allowed(&self, uuid: &str, all_released: bool) -> u64 {
        let Some(device) = self.devices.get(uuid) else { return 0 };
        if all_released {
            // What else there may be in the way only the driver knows. What is at hand is nobody's to create.
            return if self.at_hand.is_empty() { u64::MAX } else { 0 };
        }
        // What a process shares is free when the others have let go of it too, which they do in their first step.
        let counts =
            self.leaving.iter().all(|leaver| leaver.answers > 0 || leaver.at == LeaverAt::Over);
        let gone_bytes = if counts { device.gone_bytes } else { 0 };
        let free = device.free_bytes.saturating_add(gone_bytes);
        let stays = device.leaving_bytes.saturating_sub(gone_bytes);
        let most = device.leaving_bytes.max(device.coming_bytes).saturating_add(self.window_bytes);
        free.min(most.saturating_sub(stays)).saturating_sub(device.granted_bytes)
    }

    /// A process that leaves has done a stage, or all that was left.
    pub(super) fn released(&mut self, index: usize, report: &PhaseReport) {
        self.add_gone(&report.devices);
        let moved_bytes = sum(report.devices.iter().map(|delta| delta.bytes));
        let handed = report.stage.iter().flat_map(|stage| &stage.handed);
        for shape in handed {
            let device = self.devices.entry(shape.uuid.clone()).or_default();
            device.granted_bytes = device.granted_bytes.saturating_add(shape.size_bytes);
            *self.at_hand.entry(shape.clone()).or_insert(0) += 1;
        }
        let hand_over = self.hand_over;
        let leaver = &mut self.leaving[index];
        leaver.answers += 1;
        leaver.due = leaver.due.saturating_sub(1);
        let asked = leaver.asked.pop_front().unwrap_or_default();
        leaver.left = left_of(report).map(|left| (left.uuid.clone(), left.bytes)).collect();
        if !asked.is_empty() {
            leaver.gives = shapes_of(hand_over, report);
        }
        let left = &leaver.left;
        cap(&mut leaver.gives, |uuid| left.get(uuid).copied().unwrap_or(0));
        if leaver.at == LeaverAt::Stages && moved_bytes == 0 && !leaver.left.is_empty() {
            leaver.at = LeaverAt::Trouble;
        }
    }

    /// A process that leaves has released all that it can.
    pub(super) fn released_all(&mut self, index: usize, report: &PhaseReport) {
        self.released(index, report);
        if self.leaving[index].at == LeaverAt::Releasing {
            self.leaving[index].at = LeaverAt::Released;
        }
    }

    /// Too much time has passed. Whoever leaves is told to release what is left, whatever has come of its stages.
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

    /// A process that leaves could not do a stage. It has what is left on its devices, and can be told to release that.
    pub(super) fn stage_failed(&mut self, index: usize) {
        let leaver = &mut self.leaving[index];
        leaver.due = leaver.due.saturating_sub(1);
        leaver.asked.pop_front();
        if leaver.at == LeaverAt::Stages {
            leaver.at = LeaverAt::Trouble;
        }
    }

    /// A process that leaves has said all, or is lost.
    pub(super) fn left_for_good(&mut self, index: usize) {
        let leaver = &mut self.leaving[index];
        leaver.at = LeaverAt::Over;
        leaver.asked.clear();
    }

    /// Is nothing asked any more of this process, which was to leave?
    pub(super) fn has_left_for_good(&self, index: usize) -> bool {
        self.leaving[index].at == LeaverAt::Over
    }

    /// A process that comes has done a stage.
    pub(super) fn restored(&mut self, index: usize, report: &PhaseReport) {
        let hand_over = self.hand_over;
        let comer = &mut self.coming[index];
        comer.left = left_of(report)
            .map(|left| (left.uuid.clone(), (left.bytes, left.smallest_bytes)))
            .collect();
        let Some(promise) = comer.promised.pop_front() else { return };
        let Promise { bytes, granted, handed, kept } = promise;
        let taken = report.stage.as_ref().map_or(0, |stage| stage.handed.len());
        // It has refused some, and would refuse more: all that it lacks is created.
        comer.refuses |= taken < handed;
        // None, where it was free to create all of them.
        let is_told = handed > 0 || !kept.is_empty();
        comer.lacks = if is_told { shapes_of(hand_over, report) } else { Counts::new() };
        let wants = comer.promised.back().map_or(&comer.lacks, |last| &last.kept);
        comer.wants = if comer.refuses { Counts::new() } else { wants.clone() };
        let taken_on = |uuid: &str| {
            let taken = report.devices.iter().filter(|delta| delta.uuid == *uuid);
            sum(taken.map(|delta| delta.bytes))
        };
        for (uuid, bytes) in granted {
            if taken_on(&uuid) == 0 {
                let known = comer.too_little.entry(uuid).or_insert(0);
                *known = bytes.max(*known);
            } else {
                comer.too_little.remove(&uuid);
            }
        }
        for (uuid, bytes) in bytes {
            if let Some(device) = self.devices.get_mut(&uuid) {
                let others = device.granted_bytes.saturating_sub(bytes);
                device.granted_bytes = others.saturating_add(taken_on(&uuid));
            }
        }
    }

    /// What was handed over and nobody wants any more, which is to be the driver's again: it counts as free.
    pub(super) fn unwanted(&mut self) -> Vec<BlockShape> {
        let mut unwanted = Vec::new();
        for (shape, count) in &mut self.at_hand {
            let wants = self.coming.iter().filter_map(|comer| comer.wants.get(shape));
            let wants = add_up(wants.copied());
            while *count > wants {
                *count -= 1;
                unwanted.push(shape.clone());
                if let Some(device) = self.devices.get_mut(&shape.uuid) {
                    device.granted_bytes = device.granted_bytes.saturating_sub(shape.size_bytes);
                }
            }
        }
        self.at_hand.retain(|_, count| *count > 0);
        unwanted
    }

    /// The tenant that was to come does so no more. What has changed hands is nobody's.
    pub(super) fn end_coming(&mut self) {
        self.is_coming_over = true;
        self.at_hand.clear();
    }
}

impl Leaver {
    /// How many of a shape the stages hand over that it has not answered yet, when they are of so many bytes.
    fn asked_of(&self, shape: &BlockShape, stage_bytes: u64) -> u32 {
        let asked = self.asked.iter().filter_map(|counts| counts.get(shape));
        add_up(asked.map(|count| of_stage(shape, stage_bytes).min(*count)))
    }
}

/// As many of a shape as a stage of so many bytes copies.
fn of_stage(shape: &BlockShape, stage_bytes: u64) -> u32 {
    as_count(stage_bytes.div_ceil(shape.size_bytes.max(1)))
}

fn shapes_of(hand_over: HandOver, report: &PhaseReport) -> Counts {
    report.stage.as_ref().map(|stage| hand_over.of(&stage.shapes)).unwrap_or_default()
}

fn left_of(report: &PhaseReport) -> impl Iterator<Item = &StageLeft> {
    report.stage.iter().flat_map(|stage| &stage.left)
}
