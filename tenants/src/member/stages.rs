//! What a process does in a pause or resume by stages, where that differs from one in a single step. Runs on the worker thread.

use std::collections::BTreeMap;
use std::time::Instant;

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{ByDevice, Left, Moved};

use super::Member;
use super::failures::pool_failure;
use super::phases::report;
use super::progress::Progress;
use super::resuming::Resume;
use crate::phase::Window;
use crate::scope::Scope;
use crate::wire::{Failure, MemberState, PhaseReport, StageLeft, StageReport};

impl<D: Driver> Member<D> {
    /// The point of no return of a pause by stages, or behind it.
    pub(super) fn release_stage(&self, window: &Window) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let (mut departing, _) =
            self.next_of(|progress| progress.into_departing(Some(window.stage)))?;
        let moved = departing.release_stage(&self.known(window));
        let left = departing.left();
        self.set_progress(Progress::Departing(departing, window.stage.saturating_add(1)));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(self.staged(moved, left))
    }

    /// Brings back as much as is allowed. The first stage shuts the gate.
    pub(super) fn restore_stage(
        &self,
        scope: &Scope,
        window: &Window,
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
        let moved = arriving.restore_stage(&self.known(window));
        let left = arriving.left();
        self.set_progress(Progress::Arriving(arriving, window.stage.saturating_add(1)));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(self.staged(moved, left))
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

    pub(super) fn staged(&self, moved: Moved, left: BTreeMap<DeviceOrdinal, Left>) -> PhaseReport {
        let left = left.into_iter().map(|(device, left)| StageLeft {
            uuid: self.pool.uuid(device),
            bytes: left.bytes,
            smallest_bytes: left.smallest_bytes,
        });
        let copied_bytes = moved.copied_bytes;
        let stage = Some(StageReport { copied_bytes, left: left.collect() });
        let devices = self.deltas(&self.by_device(moved.bytes));
        PhaseReport { devices, stage, ..report(moved.log) }
    }
}
