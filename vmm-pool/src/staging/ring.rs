//! A ring of pinned slots between devices and host memory that is not pinned.
//!
//! The pausing thread fills slots: it queues copies into one until it is full, marks the point on the stream
//! with an event and hands the slot to the copiers. A copier waits for the event, copies the slot to its
//! final place, where page faults bring the memory in, and hands the slot back. Only the pausing thread
//! knows what is under way; copiers share nothing but two channels.
//!
//! ```text
//!   fill --jobs--> copier, copier, .. --landed--> fill, or wait
//! ```

#![expect(
    unsafe_code,
    reason = "copies between host addresses, and starts copies through the driver"
)]

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::chunk::HostPlace;
use super::length_of;
use crate::driver::{
    DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverError, DriverOp, DriverResult,
    RawEvent, RawStream, VaRange,
};
use crate::error::{Describe, PoolResult};
use crate::vacate::StepLog;

/// Number of the next slot to be handed to the copiers: those before it are what a group waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark(u64);

/// A stream, with the device that it and its events belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceStream {
    pub(crate) device: DeviceOrdinal,
    pub(crate) stream: RawStream,
}

/// An event, with the device whose streams it may mark.
pub(super) type DeviceEvent = (DeviceOrdinal, RawEvent);

/// A slot that copies are being queued into.
#[derive(Debug)]
struct Filling {
    slot: HostPlace,
    target: HostPlace,
    filled_bytes: u64,
    through: DeviceStream,
}

/// A filled slot on its way to `target`.
#[derive(Debug)]
struct Job {
    mark: Mark,
    slot: HostPlace,
    target: HostPlace,
    length: usize,
    device: DeviceOrdinal,
    event: RawEvent,
}

/// A slot whose copier is done with it.
#[derive(Debug)]
struct Landed {
    job: Job,
    outcome: DriverResult<()>,
}

/// See the head of this module. Dropping it lets the copiers finish what they were given and joins them.
#[derive(Debug)]
pub(super) struct Ring<D: Driver> {
    driver: Arc<D>,
    slot_bytes: u64,
    free: Vec<HostPlace>,
    filling: Option<Filling>,
    next: Mark,
    under_way: BTreeSet<Mark>,
    failure: Option<DriverError>,
    /// Events that stand for nothing under way.
    events: Vec<DeviceEvent>,
    /// `None` once the copiers are to end.
    jobs: Option<Sender<Job>>,
    landed: Receiver<Landed>,
    copiers: Vec<JoinHandle<()>>,
}

impl<D: Driver> Ring<D> {
    /// A ring of `slots`. `None` when no thread can be had.
    ///
    /// # Safety
    /// The slots are pinned memory of `slot_bytes` each, mapped and used by nobody else while the ring
    /// lives and until all streams that it was given are done.
    pub(super) unsafe fn open(
        driver: &Arc<D>,
        slots: Vec<HostPlace>,
        slot_bytes: u64,
        copier_threads: usize,
    ) -> Option<Self> {
        let (jobs, taken) = unbounded();
        let (done, landed) = unbounded();
        let mut copiers = Vec::new();
        for _ in 0..copier_threads.max(1) {
            let (driver, taken, done) = (Arc::clone(driver), taken.clone(), done.clone());
            let thread = std::thread::Builder::new().name("sublet-copy".to_owned());
            match thread.spawn(move || copy_out(&*driver, &taken, &done)) {
                Ok(copier) => copiers.push(copier),
                Err(error) => tracing::debug!(%error, "a copier less"),
            }
        }
        if copiers.is_empty() {
            return None;
        }
        Some(Self {
            driver: Arc::clone(driver),
            slot_bytes,
            free: slots,
            filling: None,
            next: Mark::default(),
            under_way: BTreeSet::new(),
            failure: None,
            events: Vec::new(),
            jobs: Some(jobs),
            landed,
            copiers,
        })
    }

    /// Takes over events that the driver kept when an earlier ring ended.
    pub(super) fn adopt(&mut self, events: &mut Vec<DeviceEvent>) {
        self.events.append(events);
    }

    /// Starts copies of `source` to `target` by way of the ring. Waits while all slots are in use.
    ///
    /// # Safety
    /// `source` stays mapped until the stream is done. `target` is valid for writes of as many bytes, and
    /// nobody else touches them, until [`Ring::wait_for`] says that they have landed or the ring is gone.
    pub(super) unsafe fn pass(
        &mut self,
        log: &mut StepLog,
        source: VaRange,
        target: NonNull<u8>,
        through: DeviceStream,
    ) -> PoolResult<()> {
        // SAFETY: as for this function.
        let outcome = unsafe { self.queue(log, source, target, through) };
        let object = || format!("saving of {} through the ring", source.start);
        self.fail_for_good(outcome).about(object, source.size_bytes, Some(through.device))
    }

    /// Hands the slot being filled to the copiers. The mark stands for it and all before it.
    pub(super) fn flush(&mut self, log: &mut StepLog) -> PoolResult<Mark> {
        let outcome = self.hand_over(log);
        self.fail_for_good(outcome).about(|| "event of the ring".to_owned(), 0, None)
    }

    /// Waits until everything before `mark` is in its final place.
    pub(super) fn wait_for(&mut self, mark: Mark) -> PoolResult<()> {
        let mut outcome = Ok(());
        while outcome.is_ok() && self.under_way.first().is_some_and(|first| *first < mark) {
            outcome = self.hear();
        }
        self.fail_for_good(outcome).about(|| "copies through the ring".to_owned(), 0, None)
    }

    /// After one failure every call fails: what was lost on the way is waited for no more, and a slot whose
    /// copy was not seen to end is used no more.
    fn fail_for_good<T>(&mut self, outcome: DriverResult<T>) -> DriverResult<T> {
        let first = self.failure;
        self.failure = first.or(outcome.as_ref().err().copied());
        first.map_or(outcome, Err)
    }

    unsafe fn queue(
        &mut self,
        log: &mut StepLog,
        source: VaRange,
        target: NonNull<u8>,
        through: DeviceStream,
    ) -> DriverResult<()> {
        let mut done_bytes = 0;
        while done_bytes < source.size_bytes {
            // SAFETY: the offset lies inside the target.
            let place = unsafe { target.add(length_of(done_bytes)) };
            let mut filling = self.slot_for(log, HostPlace(place), through)?;
            let room_bytes = self.slot_bytes - filling.filled_bytes;
            let length_bytes = room_bytes.min(source.size_bytes - done_bytes);
            let from = VaRange::new(DeviceAddress(source.start.0 + done_bytes), length_bytes);
            // SAFETY: what is filled is at most the slot's size.
            let into = unsafe { filling.slot.0.add(length_of(filling.filled_bytes)) };
            log.call();
            log.measured("queue copies to the ring", || {
                // SAFETY: the place lies in a slot that is ours until its job has landed; the caller keeps
                // the source mapped.
                unsafe { self.driver.copy_to_host(into, from, through.stream) }
            })?;
            filling.filled_bytes += length_bytes;
            done_bytes += length_bytes;
            let is_full = filling.filled_bytes == self.slot_bytes;
            self.filling = Some(filling);
            if is_full {
                self.hand_over(log)?;
            }
        }
        Ok(())
    }

    /// The slot being filled when `place` continues it, another one otherwise.
    fn slot_for(
        &mut self,
        log: &mut StepLog,
        place: HostPlace,
        through: DeviceStream,
    ) -> DriverResult<Filling> {
        if let Some(filling) = self.filling.take() {
            // SAFETY: what is filled came from inside the target, so this is in it, or its end.
            let end = unsafe { filling.target.0.add(length_of(filling.filled_bytes)) };
            if end == place.0 && filling.through == through {
                return Ok(filling);
            }
            self.filling = Some(filling);
            self.hand_over(log)?;
        }
        while let Ok(landed) = self.landed.try_recv() {
            self.take_in(landed)?;
        }
        loop {
            // The last to come back is the first to be used: part of it is in a cache.
            if let Some(slot) = self.free.pop() {
                return Ok(Filling { slot, target: place, filled_bytes: 0, through });
            }
            log.measured("wait for a slot of the ring", || self.hear())?;
        }
    }

    fn hand_over(&mut self, log: &mut StepLog) -> DriverResult<Mark> {
        let Some(filling) = self.filling.take() else {
            return Ok(self.next);
        };
        let DeviceStream { device, stream } = filling.through;
        let known = self.events.iter().position(|(of, _)| *of == device);
        let event = match known {
            Some(index) => self.events.swap_remove(index).1,
            None => self.driver.event_create()?,
        };
        log.call();
        if let Err(error) = self.driver.event_record(event, stream) {
            self.events.push((device, event));
            return Err(error);
        }
        let mark = self.next;
        self.next = Mark(mark.0 + 1);
        self.under_way.insert(mark);
        let length = length_of(filling.filled_bytes);
        let job = Job { mark, slot: filling.slot, target: filling.target, length, device, event };
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => Ok(self.next),
            Some(Err(_)) | None => Err(COPIERS_GONE),
        }
    }

    fn hear(&mut self) -> DriverResult<()> {
        let landed = self.landed.recv().map_err(|_| COPIERS_GONE)?;
        self.take_in(landed)
    }

    fn take_in(&mut self, landed: Landed) -> DriverResult<()> {
        let Landed { job, outcome } = landed;
        self.events.push((job.device, job.event));
        outcome?;
        self.free.push(job.slot);
        self.under_way.remove(&job.mark);
        Ok(())
    }
}

impl<D: Driver> Ring<D> {
    /// Lets the copiers finish what they were given, joins them and ends the events. Returns those that the
    /// driver kept, for the next ring.
    pub(super) fn end(mut self) -> Vec<DeviceEvent> {
        self.wind_up()
    }

    fn wind_up(&mut self) -> Vec<DeviceEvent> {
        self.jobs = None;
        for copier in self.copiers.drain(..) {
            if copier.join().is_err() {
                tracing::error!("a copier panicked");
            }
        }
        self.events.extend(self.landed.try_iter().map(|done| (done.job.device, done.job.event)));
        let mut kept = Vec::new();
        for (device, event) in self.events.drain(..) {
            let ended = self
                .driver
                .make_current(device)
                // SAFETY: the event is ours, and nobody waits for it any more.
                .and_then(|()| unsafe { self.driver.event_destroy(event) });
            if let Err(error) = ended {
                tracing::error!(%error, device = device.0, "an event stays until the next ring");
                kept.push((device, event));
            }
        }
        kept
    }
}

impl<D: Driver> Drop for Ring<D> {
    fn drop(&mut self) {
        self.wind_up();
    }
}

/// Copiers live as long as the ring, unless one panicked.
const COPIERS_GONE: DriverError =
    DriverError { op: DriverOp::EventSynchronize, code: DriverCode::UNKNOWN };

/// What a copier does until no more jobs come.
fn copy_out<D: Driver>(driver: &D, jobs: &Receiver<Job>, landed: &Sender<Landed>) {
    let mut current = None;
    for job in jobs {
        let made_current = match current {
            Some(device) if device == job.device => Ok(()),
            _ => driver.make_current(job.device),
        };
        current = made_current.is_ok().then_some(job.device);
        let outcome = made_current.and_then(|()| driver.event_synchronize(job.event));
        if outcome.is_ok() {
            // SAFETY: the device has filled the slot, which is ours until it is handed back; the target is
            // valid for the job's length and touched by nobody else (contract of `Ring::pass`); the two lie
            // in different chunks.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    job.slot.0.as_ptr(),
                    job.target.0.as_ptr(),
                    job.length,
                );
            }
        }
        if landed.send(Landed { job, outcome }).is_err() {
            return;
        }
    }
}
