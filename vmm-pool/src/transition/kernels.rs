//! Who makes the copies of a resume: a kernel, instead of the copy engine of the device.

#![expect(unsafe_code, reason = "has copies made")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::still::Still;
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::links::{Haul, carry};
use crate::pool::Pool;
use crate::waits::{Answer, Waited};

/// What is known of the application's own work on a device that copies go to. A kernel of its own that waits for what comes
/// after a resume would keep one of ours waiting, and the resume with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quiet {
    /// There is none, and nothing can begin any.
    Known,
    /// Nothing can begin any, and the device may be asked.
    Asked,
    /// There may be some.
    Unknown,
}

/// How long it may take to find that the application has left nothing on a device that would keep a kernel of ours waiting.
const IDLE_WITHIN: Duration = Duration::from_millis(5);

impl<D: Driver> Still<'_, D> {
    /// Has `work` make copies to one device, by the haul that it is given or by itself where it is given none. `bytes` says
    /// how much there is to copy, by device. Kernels copy where `quiet` says that they may.
    ///
    /// # Safety
    /// As [`carry`].
    pub(super) unsafe fn with_kernels(
        &self,
        log: &mut StepLog,
        quiet: Option<Quiet>,
        bytes: &BTreeMap<DeviceOrdinal, u64>,
        work: impl FnOnce(&mut StepLog, Option<(&Haul, u64)>) -> PoolResult<()>,
    ) -> PoolResult<()> {
        let Some((device, parcel_bytes)) = self.pool.copied_by_kernels(quiet, bytes) else {
            return work(log, None);
        };
        let added = |haul: Option<&Haul>| work(log, haul.map(|haul| (haul, parcel_bytes)));
        // SAFETY: as the caller vouches.
        let (outcome, hauled) = unsafe { carry(&self.pool.deferred, device, added) };
        log.kernel_bytes += hauled.kernel_bytes;
        log.driver_calls += hauled.driver_calls;
        outcome
    }
}

impl<D: Driver> Pool<D> {
    /// The one device that kernels may copy to, if there is one, and how much at once, in bytes.
    fn copied_by_kernels(
        &self,
        quiet: Option<Quiet>,
        bytes: &BTreeMap<DeviceOrdinal, u64>,
    ) -> Option<(DeviceOrdinal, u64)> {
        let (quiet, kernels) = (quiet?, self.kernels.get()?);
        let mut copied = bytes.iter().filter(|(_, bytes)| **bytes > 0);
        let (Some((&device, &bytes)), None) = (copied.next(), copied.next()) else { return None };
        let may_copy = bytes >= kernels.least_bytes && self.is_quiet(device, quiet);
        may_copy.then_some((device, kernels.parcel_bytes))
    }

    /// Has the application no work left on `device`?
    fn is_quiet(&self, device: DeviceOrdinal, quiet: Quiet) -> bool {
        match quiet {
            Quiet::Known => return true,
            Quiet::Unknown => return false,
            Quiet::Asked => {}
        }
        let Ok(question) = self.waits.ask(vec![Waited::Device(device)]) else { return false };
        let until = Instant::now() + IDLE_WITHIN;
        loop {
            match self.waits.look(&question) {
                Answer::Idle => return true,
                Answer::Failed(..) => return false,
                Answer::Busy(_) => {}
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            let _looks_again = self.waits.ended().recv_timeout(left);
        }
    }
}
