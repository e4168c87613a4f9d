//! What a process does in a pause or resume by stages, where that differs from one at once. Runs on the worker thread.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::repeat_n;
use std::os::fd::OwnedFd;
use std::time::Instant;

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{
    Arriving, ByDevice, Copies, Departing, Failed, Handed, Left, Moved, Selection, Shape, Shapes,
    UninheritedFd,
};

use super::Member;
use super::failures::pool_failure;
use super::fetch::may_be_the_drivers;
use super::phases::{Resume, report};
use super::progress::Progress;
use crate::descriptors::{descriptor_limit, free_descriptors, out_of_the_way};
use crate::host_memory::budget;
use crate::phase::{Stages, Window};
use crate::references::Stay;
use crate::scope::Scope;
use crate::wire::{
    BlockShape, Failure, HANDED_MAX, MemberState, PhaseReport, StageLeft, StageReport,
};

/// Shapes of which somebody is told what is missing.
const SHAPES_MAX: usize = 64;
/// Descriptors that are left to the application, while memory changes hands.
const KEPT_FREE: usize = 4 * HANDED_MAX;

/// How many descriptors of memory that changes hands this process has room for. Whoever takes some keeps them for as
/// long as it has that memory, and the application has at least half of all.
fn room_for_handed() -> usize {
    free_descriptors().saturating_sub(KEPT_FREE.max(descriptor_limit() / 2))
}

/// How many may be with it at once, on their way to another.
fn most_handed() -> usize {
    room_for_handed().min(HANDED_MAX)
}

impl<D: Driver> Member<D> {
    /// Takes all that saving takes. What would leave is told by device, so that somebody else can count on it.
    pub(super) fn reserve(
        &self,
        stays: &[Stay],
        copies: Copies,
        stages: Stages,
    ) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
        self.forget_ended();
        let stays: Vec<_> = stays.iter().map(|stay| (stay.id, stay.reason)).collect();
        let budget = |held_bytes| budget(held_bytes, &(self.config.host_limits)());
        match quiesced.reserve(selection, &stays, copies, budget) {
            Ok((reserved, log)) => {
                let leaving = self.by_device(self.pool.resident_bytes(reserved.selection()));
                let devices = self.deltas(&leaving);
                // In one stage nothing changes hands.
                let stage = (stages == Stages::Many).then(|| {
                    let shapes = self.told(self.pool.shapes_to_give(reserved.selection()));
                    StageReport { shapes, ..StageReport::default() }
                });
                self.set_progress(Progress::Reserved(reserved));
                Ok(PhaseReport { devices, stage, ..report(log) })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Leaving(*state));
                Err(pool_failure(&error))
            }
        }
    }

    /// The point of no return of a pause by stages, or behind it. Descriptors of what is handed over join `beside`.
    pub(super) fn release_stage(
        &self,
        window: &Window,
        beside: &mut Vec<OwnedFd>,
    ) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let mut departing = self.next_of(|progress| progress.into_departing(window.stage))?;
        let moved = departing.release_stage(&self.known(window), &self.wanted(window));
        let left = departing.left();
        let more = if window.wanted.is_empty() {
            Vec::new()
        } else {
            self.told(self.pool.shapes_to_give(departing.selection()))
        };
        self.set_progress(Progress::Departing(departing, window.stage.saturating_add(1)));
        let (moved, handed) = moved.map_err(|error| pool_failure(&error))?;
        let (shapes, fds): (Vec<_>, Vec<_>) =
            handed.into_iter().map(|Handed { shape, fd }| (self.named(shape), fd)).unzip();
        beside.extend(fds.into_iter().map(UninheritedFd::into_fd));
        Ok(self.staged(moved, left, shapes, more))
    }

    /// What `window` wants handed over, as far as this process has descriptors for it.
    fn wanted(&self, window: &Window) -> Shapes {
        self.of_window(window, if window.wanted.is_empty() { 0 } else { most_handed() })
    }

    /// Those of `window`, so many at most.
    fn of_window(&self, window: &Window, mut room: usize) -> Shapes {
        let mut wanted = Shapes::new();
        for (shape, count) in &window.wanted {
            let count = usize::try_from(*count).unwrap_or(usize::MAX).min(room);
            if let Some(shape) = self.of_here(shape).filter(|_| count > 0) {
                room -= count;
                wanted.insert(shape, count);
            }
        }
        wanted
    }

    /// What of `selection` is away and could come back as another tenant's memory, those shapes with most bytes.
    pub(super) fn shapes_to_take(&self, selection: &Selection) -> Vec<(BlockShape, u32)> {
        let mut shapes = self.told(self.pool.shapes_to_take(selection));
        if shapes.is_empty() {
            return shapes;
        }
        let mut room = u32::try_from(room_for_handed()).unwrap_or(u32::MAX);
        for (_, count) in &mut shapes {
            *count = (*count).min(room);
            room -= *count;
        }
        shapes.retain(|(_, count)| *count > 0);
        shapes
    }

    /// Plain memory, which changes hands unless told otherwise, and of each kind those with most bytes first.
    fn told(&self, shapes: Shapes) -> Vec<(BlockShape, u32)> {
        let mut shapes: Vec<_> = shapes.into_iter().collect();
        let bytes = |shape: &Shape, count: usize| shape.size_bytes.saturating_mul(count as u64);
        shapes.sort_by_key(|(shape, count)| Reverse((shape.is_plain, bytes(shape, *count))));
        shapes.truncate(SHAPES_MAX);
        let named = shapes
            .into_iter()
            .map(|(shape, count)| (self.named(shape), u32::try_from(count).unwrap_or(u32::MAX)));
        named.collect()
    }

    fn named(&self, shape: Shape) -> BlockShape {
        let Shape { device, size_bytes, flags, is_plain } = shape;
        BlockShape { uuid: self.pool.uuid(device), size_bytes, flags, is_plain }
    }

    fn of_here(&self, shape: &BlockShape) -> Option<Shape> {
        let BlockShape { uuid, size_bytes, flags, is_plain } = shape;
        let mut devices = self.pool.devices().into_iter();
        let device = devices.find(|device| self.pool.uuid(*device) == *uuid)?;
        Some(Shape { device, size_bytes: *size_bytes, flags: *flags, is_plain: *is_plain })
    }

    /// The end of a pause by stages, also when only one of them was taken, or none.
    pub(super) fn release_rest(
        &self,
        departing: Departing<D>,
        next: u32,
    ) -> Result<PhaseReport, Failure> {
        let selection = departing.selection().clone();
        match departing.release() {
            Ok((done, moved)) => {
                let stayed_bytes = self.stand_released(selection, done)?;
                let report = self.staged(moved, BTreeMap::new(), Vec::new(), Vec::new());
                Ok(PhaseReport { stayed_bytes, ..report })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Departing(*state, next));
                Err(pool_failure(&error))
            }
        }
    }

    /// Brings back as much as is allowed, and what `fds` hold for it. What `window` wants is to be handed over later, and is
    /// not created now. The first stage shuts the gate.
    pub(super) fn restore_stage(
        &self,
        scope: &Scope,
        window: &Window,
        fds: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<PhaseReport, Failure> {
        let mut arriving = if window.stage == 0 {
            match self.begin_resume(scope, deadline)? {
                Resume::Aside(shut, aside) => shut.arrive(aside),
                Resume::Away(shut, away) => shut.arrive(away),
            }
        } else {
            self.expect(MemberState::Restoring)?;
            let (arriving, next) = self.next_of(Progress::into_arriving)?;
            if next != window.stage {
                return Err(self.out_of_turn(Progress::Arriving(arriving, next)));
            }
            arriving
        };
        let handed = window.handed.iter().zip(fds).filter(|(_, fd)| may_be_the_drivers(fd));
        let handed = handed.filter_map(|(shape, fd)| {
            Some(Handed { shape: self.of_here(shape)?, fd: out_of_the_way(fd).into() })
        });
        // The others are created.
        let handed = handed.take(if window.handed.is_empty() { 0 } else { room_for_handed() });
        let kept = self.of_window(window, usize::MAX);
        let moved = arriving.restore_stage(&self.known(window), handed.collect(), &kept);
        let left = arriving.left();
        let more = if window.wanted.is_empty() && window.handed.is_empty() {
            Vec::new()
        } else {
            self.shapes_to_take(arriving.selection())
        };
        self.set_progress(Progress::Arriving(arriving, window.stage.saturating_add(1)));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        let taken = moved.taken.iter();
        let taken = taken.flat_map(|(shape, count)| repeat_n(self.named(*shape), *count));
        let taken = taken.collect();
        Ok(self.staged(moved, left, taken, more))
    }

    /// The end of it, before imports.
    pub(super) fn restore_rest(&self, arriving: Arriving<D>) -> Result<PhaseReport, Failure> {
        match arriving.restore_rest(free_descriptors() / 4) {
            Ok((returning, moved)) => {
                self.set_progress(Progress::Returning(returning));
                Ok(self.staged(moved, BTreeMap::new(), Vec::new(), Vec::new()))
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Returning(*state));
                Err(pool_failure(&error))
            }
        }
    }

    /// `window` by the numbers that devices have in this process.
    fn known(&self, window: &Window) -> ByDevice {
        let devices = self.pool.devices().into_iter();
        let named = devices.filter_map(|device| {
            let uuid = self.pool.uuid(device);
            let (_, bytes) = window.devices.iter().find(|(name, _)| *name == uuid)?;
            Some((device, *bytes))
        });
        named.collect()
    }

    fn staged(
        &self,
        moved: Moved,
        left: BTreeMap<DeviceOrdinal, Left>,
        handed: Vec<BlockShape>,
        shapes: Vec<(BlockShape, u32)>,
    ) -> PhaseReport {
        let left = left.into_iter().map(|(device, left)| StageLeft {
            uuid: self.pool.uuid(device),
            bytes: left.bytes,
            smallest_bytes: left.smallest_bytes,
        });
        let copied_bytes = moved.copied_bytes;
        let stage = Some(StageReport { copied_bytes, left: left.collect(), handed, shapes });
        let devices = self.deltas(&self.by_device(moved.bytes));
        PhaseReport { devices, stage, ..report(moved.log) }
    }
}
