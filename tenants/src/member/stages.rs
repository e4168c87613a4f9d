//! What a process does in a pause or resume by stages, where that differs from one at once. Runs on the worker thread.

use std::collections::BTreeMap;
use std::time::Instant;

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{Arriving, ByDevice, Copies, Departing, Failed, Left, Moved};

use super::Member;
use super::failures::pool_failure;
use super::phases::{Resume, report};
use super::progress::Progress;
use crate::descriptors::free_descriptors;
use crate::host_memory::budget;
use crate::phase::Window;
use crate::references::Stay;
use crate::scope::Scope;
use crate::wire::{Failure, MemberState, PhaseReport, StageLeft, StageReport};

impl<D: Driver> Member<D> {
    /// Takes all that saving takes. What would leave is told by device, so that somebody else can count on it.
    pub(super) fn reserve(&self, stays: &[Stay], copies: Copies) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let (quiesced, selection) = self.next_of(Progress::into_quiesced)?;
        self.forget_ended();
        let stays: Vec<_> = stays.iter().map(|stay| (stay.id, stay.reason)).collect();
        let budget = |held_bytes| budget(held_bytes, &(self.config.host_limits)());
        match quiesced.reserve(selection, &stays, copies, budget) {
            Ok((reserved, log)) => {
                let leaving = self.by_device(self.pool.resident_bytes(reserved.selection()));
                let devices = self.deltas(&leaving);
                self.set_progress(Progress::Reserved(reserved));
                Ok(PhaseReport { devices, ..report(log) })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Leaving(*state));
                Err(pool_failure(&error))
            }
        }
    }

    /// The point of no return of a pause by stages, or behind it.
    pub(super) fn release_stage(&self, window: &Window) -> Result<PhaseReport, Failure> {
        self.expect(MemberState::Offloading)?;
        let mut departing = self.next_of(|progress| progress.into_departing(window.stage))?;
        let moved = departing.release_stage(&self.known(window));
        let left = departing.left();
        self.set_progress(Progress::Departing(departing, window.stage.saturating_add(1)));
        let moved = moved.map_err(|error| pool_failure(&error))?;
        Ok(self.staged(moved, left))
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
                let report = self.staged(moved, BTreeMap::new());
                Ok(PhaseReport { stayed_bytes, ..report })
            }
            Err(Failed { state, error }) => {
                self.set_progress(Progress::Departing(*state, next));
                Err(pool_failure(&error))
            }
        }
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

    /// The end of it, before imports.
    pub(super) fn restore_rest(&self, arriving: Arriving<D>) -> Result<PhaseReport, Failure> {
        match arriving.restore_rest(free_descriptors() / 4) {
            Ok((returning, moved)) => {
                self.set_progress(Progress::Returning(returning));
                Ok(self.staged(moved, BTreeMap::new()))
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

    fn staged(&self, moved: Moved, left: BTreeMap<DeviceOrdinal, Left>) -> PhaseReport {
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
