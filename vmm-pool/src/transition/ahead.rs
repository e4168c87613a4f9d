//! Host memory for the next pause, brought in while the application runs.

use std::time::Duration;

use crate::driver::{DeviceOrdinal, Driver, PciAddress};
use crate::error::{Describe, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Layout, Selection, Survey};
use crate::pool::Pool;
use crate::store::{Copies, Pins, Store};

/// Threads that touch memory while the application runs.
const TOUCHERS_MAX: usize = 2;

/// Host memory of one process, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStanding {
    /// Held for saved contents, in bytes.
    pub held_bytes: u64,
    /// What a pause of everything would hold, in bytes: as much as is kept of device memory, and after a pause what
    /// that used and what has come to it since.
    pub wanted_bytes: u64,
    /// The size of what is brought in next, in bytes; 0 when nothing is missing.
    pub next_bytes: u64,
}

/// What came of [`Pool::bring_in`].
#[derive(Debug, PartialEq, Eq)]
pub enum BroughtIn {
    /// Nothing is missing.
    Enough,
    /// One chunk more is held, or on its way to a pause that waited for it.
    Chunk {
        /// Its size.
        size_bytes: u64,
        /// What was done for it.
        log: StepLog,
    },
    /// A pause or resume is under way, or another thread brings a chunk in.
    NotNow,
}

impl<D: Driver> Pool<D> {
    /// What is held of host memory, and what a pause would hold. Waits for nothing.
    pub fn host_standing(&self) -> HostStanding {
        let (kept, filed) = self.wanted_places();
        let held = self.ahead.figures();
        HostStanding {
            held_bytes: held.bytes(),
            wanted_bytes: held.wanted_bytes(kept, filed > 0),
            next_bytes: held.missing_chunk_bytes(kept, filed > 0),
        }
    }

    /// Where contents of a pause of everything would end in arena and file.
    fn wanted_places(&self) -> (u64, u64) {
        let (kept, filed, kept_bytes) = {
            let ledger = self.ledger();
            let survey = Survey::default();
            let whole = ledger.choose(&Selection::Whole);
            let end = |store| Layout::of(&ledger, &whole, store, &survey, Copies::All).end_bytes;
            (end(Store::Host), end(Store::File), ledger.kept_bytes())
        };
        let kept = match self.ahead.figures().used {
            Some(used) => kept.min(used.end_bytes + kept_bytes.saturating_sub(used.kept_bytes)),
            None => kept,
        };
        (kept, filed)
    }

    /// Brings in one chunk of the host memory that a pause of everything would take beyond what is held, as long as no
    /// more than `most_bytes` are held with it. The application runs meanwhile, and a pause that comes takes the chunk as
    /// it is: no lock is held while it is touched and pinned, by a few threads. Makes no context: where there is none, the
    /// chunk is pinned by the pause. To be called on a thread of ours that does nothing else.
    ///
    /// # Errors
    /// [`crate::PoolError::HostMemoryRefused`], [`crate::PoolError::Driver`]; what was held before is held still.
    ///
    /// # Driver calls
    /// `cuThreadExchangeStreamCaptureMode`, `cuDevicePrimaryCtxGetState`, `cuCtxSetCurrent`, `cuMemHostRegister`.
    pub fn bring_in(&self, most_bytes: u64) -> PoolResult<BroughtIn> {
        if self.ahead.is_held() || self.gate().is_shut() {
            return Ok(BroughtIn::NotNow);
        }
        let (kept, filed) = self.wanted_places();
        let devices = self.devices();
        let nodes = self.nodes_of(&devices);
        let claimed = {
            let Some(mut arena) = self.try_arena() else {
                return Ok(BroughtIn::NotNow);
            };
            let held = self.ahead.figures();
            let next_bytes = held.missing_chunk_bytes(kept, filed > 0);
            if next_bytes == 0 || held.bytes() + next_bytes > most_bytes {
                return Ok(BroughtIn::Enough);
            }
            arena.set_nodes(nodes);
            arena.claim(kept, filed > 0)
        };
        let Some((claim, mut how)) = claimed else {
            return Ok(BroughtIn::NotNow);
        };
        how.toucher_threads = how.toucher_threads.clamp(1, TOUCHERS_MAX);
        let size_bytes = claim.size_bytes();
        let pins = self.pins_beside_work(&devices, size_bytes)?;
        let mut log = StepLog::default();
        claim.bring_in(&mut log, &*self.driver, &how, pins)?;
        if let Some(mut arena) = self.try_arena() {
            arena.take_delivered();
        }
        Ok(BroughtIn::Chunk { size_bytes, log })
    }

    /// For whom this thread can pin `size_bytes` without making a context, one of which is current then.
    fn pins_beside_work(&self, devices: &[DeviceOrdinal], size_bytes: u64) -> PoolResult<Pins> {
        let about = || "pinning of host memory".to_owned();
        let has_context = |device: &DeviceOrdinal| self.driver.has_primary_context(*device);
        let with_context = devices.iter().find(|device| has_context(device).unwrap_or(false));
        let Some(&device) = with_context else {
            return Ok(Pins::Nobody);
        };
        // A call of this thread must not spoil a capture of another one's.
        self.driver.stand_beside_captures().about(about, size_bytes, Some(device))?;
        self.driver.make_current(device).about(about, size_bytes, Some(device))?;
        Ok(Pins::of(devices))
    }

    /// Gives the pins of host memory up, or takes them again. What cannot be pinned again is copied slower, until a pause pins it.
    pub(super) fn set_pinned(&self, is_pinned: bool) -> StepLog {
        let (mut log, devices) = (StepLog::default(), self.devices());
        let mut arena = self.arena();
        let done = self.pins_beside_work(&devices, 0).and_then(|pins| {
            if is_pinned {
                return arena.pin_again(&mut log, pins);
            }
            arena.unpin_all(&mut log);
            Ok(())
        });
        if let Err(error) = done {
            tracing::warn!(%error, is_pinned, "host memory is pinned as it was");
        }
        log
    }

    /// Is host memory held that may be idle? Waits for nothing.
    pub fn holds_idle_memory(&self) -> bool {
        let saved_bytes = self.ledger().end_in(Store::Host);
        let held = self.ahead.figures();
        let last_start_bytes = held.chunk_bytes - held.last_chunk_bytes;
        held.has_ring || (held.last_chunk_bytes > 0 && last_start_bytes >= saved_bytes)
    }

    /// Gives one chunk of host memory back that holds no contents and no copies for readers. Returns its bytes: none
    /// when there is no such chunk, or a pause or resume is under way. To be called on a thread of ours that does
    /// nothing else.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]; the chunk stays.
    ///
    /// # Driver calls
    /// `cuThreadExchangeStreamCaptureMode`, `cuDevicePrimaryCtxGetState`, `cuCtxSetCurrent`, `cuMemHostUnregister`.
    pub fn give_idle_chunk_back(&self) -> PoolResult<u64> {
        let devices = self.devices();
        let Some(mut arena) = self.try_arena() else {
            return Ok(0);
        };
        // Looked at behind the lock: a pause takes its host memory under it, and has no other behind the point of no return.
        if self.gate().is_shut() || self.ahead.is_held() {
            return Ok(0);
        }
        let (end_bytes, is_file_used) = {
            let ledger = self.ledger();
            (ledger.end_in(Store::Host), ledger.end_in(Store::File) > 0)
        };
        self.pins_beside_work(&devices, 0)?;
        arena.shrink_by_one(end_bytes, !is_file_used)
    }

    /// Nothing is brought in from now on, because the process ends. Waits for the driver call under way, at most for
    /// as long as this.
    pub fn stop_bringing_in(&self, timeout: Duration) {
        self.ahead.end(timeout);
    }

    /// Has the process's end come?
    pub fn has_stopped_bringing_in(&self) -> bool {
        self.ahead.has_ended()
    }

    /// Says on which NUMA node a device is, for all host memory that is brought in from now on. None where the machine
    /// has only one, or does not say. Asked once a device.
    pub fn place_on_nodes(&self, node_of: fn(PciAddress) -> Option<u32>) {
        *self.node_of.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(node_of);
    }

    /// The nodes of all of `devices`, in order and once each: a chunk holds contents of any of them.
    pub(crate) fn nodes_of(&self, devices: &[DeviceOrdinal]) -> Vec<u32> {
        let node_of = *self.node_of.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(node_of) = node_of else {
            return Vec::new();
        };
        let node_of = |&device: &DeviceOrdinal| node_of(self.pci_address(device)?);
        let mut nodes: Vec<u32> = devices.iter().filter_map(node_of).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Where `device` is on the machine's buses; none where the driver does not say.
    pub fn pci_address(&self, device: DeviceOrdinal) -> Option<PciAddress> {
        use crate::driver::DeviceAttribute;
        let part = |attribute| {
            let value = self.driver.device_attribute(device, attribute).ok()?;
            u32::try_from(value).ok()
        };
        Some(PciAddress {
            domain: part(DeviceAttribute::PCI_DOMAIN_ID)?,
            bus: part(DeviceAttribute::PCI_BUS_ID)?,
            device: part(DeviceAttribute::PCI_DEVICE_ID)?,
        })
    }
}
