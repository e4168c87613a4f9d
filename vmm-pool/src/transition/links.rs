//! Who makes the copies of a step: a neighbour's link, beside their device's own, and a kernel, in place of its engine.

#![expect(unsafe_code, reason = "has copies made")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::still::Still;
use crate::driver::{DeviceOrdinal, Driver, PeerAttribute};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::links::{Haul, Hauled, Lanes, Refusal, Route, Way, carry};
use crate::pool::Pool;
use crate::waits::{Answer, Waited};

/// What copies of a step may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// The copy engine of each device: another tenant's copies go the other way beside them, which a kernel would slow down.
    Engine,
    /// Each device's own link.
    OneLink,
    /// Another device's too, where that was asked for and there is one.
    TwoLinks,
}

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
    /// Has `work` make copies of one device, by the haul that it is given or by itself where it is given none. `bytes` says
    /// how much there is to copy, by device.
    ///
    /// # Safety
    /// As [`carry`].
    pub(super) unsafe fn with_links(
        &self,
        log: &mut StepLog,
        through: Through,
        way: Way,
        quiet: Quiet,
        bytes: &BTreeMap<DeviceOrdinal, u64>,
        work: impl FnOnce(&mut StepLog, Option<(&Haul, u64)>) -> PoolResult<()>,
    ) -> PoolResult<()> {
        let Some(lanes) = self.pool.lanes(log, through, way, quiet, bytes) else {
            return work(log, None);
        };
        let added = |haul: Option<&Haul>| work(log, haul.map(|haul| (haul, lanes.parcel_bytes)));
        // SAFETY: as the caller vouches.
        let (outcome, hauled) = unsafe { carry(&self.pool.deferred, &lanes, way, added) };
        self.pool.note_hauled(log, &lanes, hauled);
        outcome
    }
}

impl<D: Driver> Pool<D> {
    /// Who makes copies of one device, where that is not its engine alone.
    fn lanes(
        &self,
        log: &mut StepLog,
        through: Through,
        way: Way,
        quiet: Quiet,
        bytes: &BTreeMap<DeviceOrdinal, u64>,
    ) -> Option<Lanes> {
        let mut copied = bytes.iter().filter(|(_, bytes)| **bytes > 0);
        let (Some((&device, &bytes)), None) = (copied.next(), copied.next()) else { return None };
        let neighbour = match through {
            Through::Engine => return None,
            Through::OneLink => None,
            Through::TwoLinks => self.route(log, device, bytes),
        };
        let kernels = self.links.kernels().filter(|kernels| {
            way == Way::In && bytes >= kernels.least_bytes && self.is_quiet(device, quiet)
        });
        let parcel_bytes = match (neighbour, kernels) {
            (Some(route), _) => route.parcel_bytes,
            (None, Some(kernels)) => kernels.parcel_bytes,
            (None, None) => return None,
        };
        Some(Lanes { device, parcel_bytes, by_kernel: kernels.is_some(), neighbour })
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

    /// The way that copies take, where two links are to be used and there is a second one. Why there is none is noted, once.
    fn route(&self, log: &mut StepLog, device: DeviceOrdinal, bytes: u64) -> Option<Route> {
        let links = self.links.links()?;
        if bytes < links.least_bytes {
            return None;
        }
        let mut reasons = Vec::new();
        let mut found = None;
        for neighbour in self.others_of(device) {
            match self.reason_against(device, neighbour) {
                None => {
                    found = Some(neighbour);
                    break;
                }
                Some(reason) => reasons.push(format!("{neighbour} {reason}")),
            }
        }
        if let Some(kept) = self.links.kept().filter(|kept| found != Some(*kept)) {
            self.end_kept_context(kept);
        }
        let Some(neighbour) = found else {
            let why = match reasons.as_slice() {
                [] => "this process sees no other GPU".to_owned(),
                _ => reasons.join("; "),
            };
            let what = format!("copies of {device} take its own link alone: {why}");
            self.say_once(log, &what);
            return None;
        };
        let (parcel_bytes, keeps_context) = (links.parcel_bytes, links.keeps_context);
        Some(Route { device, neighbour, parcel_bytes, keeps_context })
    }

    /// All devices but this one: first those of the same NUMA node, and those that come next in the driver's order, so that
    /// processes on different devices choose different ones.
    fn others_of(&self, device: DeviceOrdinal) -> Vec<DeviceOrdinal> {
        let count = self.driver.device_count().unwrap_or(0);
        let mut others: Vec<_> =
            (device.0 + 1..count).chain(0..device.0).map(DeviceOrdinal).collect();
        let node = self.nodes_of(&[device]);
        others.sort_by_cached_key(|other| self.nodes_of(&[*other]) != node);
        others
    }

    /// Why copies of `device` do not pass through `neighbour`.
    fn reason_against(
        &self,
        device: DeviceOrdinal,
        neighbour: DeviceOrdinal,
    ) -> Option<&'static str> {
        let has = |attribute| {
            self.driver.peer_attribute(device, neighbour, attribute).is_ok_and(|value| value > 0)
        };
        // Of the application's: ours is known.
        let has_context = || {
            self.links.kept() != Some(neighbour)
                && self.driver.has_primary_context(neighbour).unwrap_or(true)
        };
        let shares_link = || {
            let shares = self.links.links().map(|links| links.shares_link);
            let at = (self.pci_address(device), self.pci_address(neighbour));
            matches!((shares, at), (Some(shares), (Some(one), Some(other))) if shares(one, other))
        };
        if self.links.is_refused(neighbour) {
            Some("has refused")
        } else if self.devices_with_any().contains(&neighbour) || has_context() {
            Some("is used by this process")
        } else if !has(PeerAttribute::ACCESS_SUPPORTED) {
            Some("is out of its reach")
        } else if !has(PeerAttribute::NATIVE_ATOMIC_SUPPORTED) {
            Some("is reached over the bus, not by a link between the two")
        } else if shares_link() {
            Some("is behind the same part of the bus")
        } else if self.links.is_held_elsewhere(&self.uuid(neighbour)) {
            Some("holds memory of another process, or that could not be asked")
        } else {
            None
        }
    }

    /// The neighbour is one no more. Where the process has memory there by now, the context serves that.
    fn end_kept_context(&self, kept: DeviceOrdinal) {
        self.links.set_kept(None);
        if self.devices_with_any().contains(&kept) {
            return;
        }
        if let Err(error) = self.driver.let_primary_context_go(kept) {
            tracing::warn!(%error, device = kept.0, "a context that copies have used stays");
        }
    }

    fn note_hauled(&self, log: &mut StepLog, lanes: &Lanes, hauled: Hauled) {
        let Hauled { kernel_bytes, neighbour_bytes, driver_calls, refusal, context_stays } = hauled;
        log.kernel_bytes += kernel_bytes;
        log.neighbour_bytes += neighbour_bytes;
        log.driver_calls += driver_calls;
        let Some(Route { device, neighbour, .. }) = lanes.neighbour else { return };
        self.links.set_kept(context_stays.then_some(neighbour));
        let Some(refusal) = refusal else { return };
        if !refusal.is_transient() {
            self.links.refuse(neighbour);
        }
        let why = match refusal {
            Refusal::InUse { used_bytes } => {
                tracing::info!(used_bytes, neighbour = neighbour.0, "in use");
                "other processes use it".to_owned()
            }
            Refusal::Driver(error) => error.to_string(),
        };
        let what =
            format!("copies of {device} take its own link alone, not that of {neighbour}: {why}");
        self.say_once(log, &what);
    }

    fn say_once(&self, log: &mut StepLog, what: &str) {
        if self.links.tells(what) {
            log.notes.push(format!("{what} (said once)"));
        }
    }
}
