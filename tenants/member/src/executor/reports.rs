//! The report of a step: its times, its bytes by device, and the free memory there.

use std::collections::BTreeMap;

use vmm_pool::driver::{DeviceOrdinal, Driver};
use vmm_pool::{ByDevice, Left, Moved, Pool, StepLog};

use sublet_protocol::phase::Window;
use sublet_protocol::wire::{DeviceDelta, Failure, PhaseReport, StageLeft, StageReport};

/// The result of a step.
pub(super) type PhaseResult = Result<PhaseReport, Failure>;

/// The devices of `bytes`, with the driver's present figures. Makes their contexts current on this thread.
pub(super) fn deltas<D: Driver>(
    pool: &Pool<D>,
    bytes: BTreeMap<DeviceOrdinal, u64>,
) -> Vec<DeviceDelta> {
    let driver = pool.driver();
    let delta = |(device, bytes)| {
        let info = driver.make_current(device).and_then(|()| driver.memory_info());
        DeviceDelta {
            device,
            uuid: pool.devices().uuid(device),
            bytes,
            free_bytes: info.map_or(0, |info| info.free_bytes),
            total_bytes: info.map_or(0, |info| info.total_bytes),
        }
    };
    bytes.into_iter().map(delta).collect()
}

/// `window` by the ordinals of the devices in this process.
pub(super) fn known<D: Driver>(pool: &Pool<D>, window: &Window) -> ByDevice {
    let devices = pool.holdings().devices().into_iter();
    let named = devices.filter_map(|device| {
        let uuid = pool.devices().uuid(device);
        let (_, bytes) = window.devices.iter().find(|(name, _)| *name == uuid)?;
        Some((device, *bytes))
    });
    named.collect()
}

/// The report of a stage; `left` is still to be moved.
pub(super) fn staged<D: Driver>(
    pool: &Pool<D>,
    moved: Moved,
    left: BTreeMap<DeviceOrdinal, Left>,
) -> PhaseReport {
    let left = left.into_iter().map(|(device, left)| StageLeft {
        uuid: pool.devices().uuid(device),
        bytes: left.bytes,
        smallest_bytes: left.smallest_bytes,
    });
    let stage = Some(StageReport { copied_bytes: moved.copied_bytes, left: left.collect() });
    PhaseReport { devices: deltas(pool, moved.bytes), stage, ..report(moved.log) }
}

pub(super) fn report(log: StepLog) -> PhaseReport {
    PhaseReport {
        driver_calls: log.driver_calls,
        bytes: log.bytes,
        steps: log.steps.into_iter().map(|step| (step.name.to_owned(), step.elapsed_us)).collect(),
        kept: log.kept,
        notes: log.notes,
        ..PhaseReport::default()
    }
}
