//! What is to be copied, in one queue.
//!
//! Lock order: `state` is a leaf, and never held across a driver call.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceAddress, DriverCode, DriverError, DriverOp, VaRange};
use crate::error::PoolError;

/// Parcels that wait at most. More would only take memory.
const QUEUE_MAX: usize = 256;

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// An exposed address.
    host: usize,
    pub(super) device: VaRange,
}

impl Piece {
    /// Its place on the host.
    pub(super) fn host(self) -> NonNull<u8> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.host))
            .unwrap_or(NonNull::dangling())
    }

    /// Its first `bytes`, and what is beyond them.
    fn split(self, bytes: u64) -> (Option<Self>, Option<Self>) {
        let VaRange { start, size_bytes } = self.device;
        let own = size_bytes.min(bytes);
        let part = |from: u64, size_bytes: u64| Self {
            // Part of a piece of host memory, whose length is a `usize`.
            host: self.host + usize::try_from(from).unwrap_or(usize::MAX),
            device: VaRange::new(DeviceAddress(start.0 + from), size_bytes),
        };
        let first = (own > 0).then(|| part(0, own));
        (first, (own < size_bytes).then(|| part(own, size_bytes - own)))
    }
}

/// Copies that the lane makes together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Parcel {
    pub(super) pieces: Vec<Piece>,
    pub(super) bytes: u64,
}

impl Parcel {
    /// Cuts what is beyond `bytes` off, where there is something.
    fn cut(&mut self, bytes: u64) -> Option<Self> {
        if self.bytes <= bytes {
            return None;
        }
        let (mut rest, mut room) = (Self::default(), bytes);
        let mut kept = Vec::new();
        for piece in self.pieces.drain(..) {
            let (own, beyond) = piece.split(room);
            room -= own.map_or(0, |own| own.device.size_bytes);
            kept.extend(own);
            rest.pieces.extend(beyond);
        }
        rest.bytes = self.bytes - bytes;
        (self.pieces, self.bytes) = (kept, bytes);
        Some(rest)
    }
}

/// Puts copies together to parcels, and cuts large ones.
#[derive(Debug)]
pub(crate) struct Parcels {
    parcel_bytes: u64,
    full: Vec<Parcel>,
    open: Parcel,
}

impl Parcels {
    /// None yet.
    pub(crate) fn new(parcel_bytes: u64) -> Self {
        Self { parcel_bytes: parcel_bytes.max(1), full: Vec::new(), open: Parcel::default() }
    }

    /// Adds a copy between `host`, which is as long as that, and `device`.
    pub(crate) fn add(&mut self, host: NonNull<u8>, device: VaRange) {
        let mut left = Some(Piece { host: host.as_ptr().expose_provenance(), device });
        while let Some(piece) = left {
            let (own, beyond) = piece.split(self.parcel_bytes - self.open.bytes);
            self.open.bytes += own.map_or(0, |own| own.device.size_bytes);
            self.open.pieces.extend(own);
            if self.open.bytes == self.parcel_bytes {
                self.full.push(std::mem::take(&mut self.open));
            }
            left = beyond;
        }
    }

    /// Bytes of all.
    pub(crate) fn bytes(&self) -> u64 {
        self.full.len() as u64 * self.parcel_bytes + self.open.bytes
    }

    /// All of them; none are left.
    fn take(&mut self) -> Vec<Parcel> {
        let open = std::mem::take(&mut self.open);
        let mut all = std::mem::take(&mut self.full);
        all.extend((open.bytes > 0).then_some(open));
        all
    }
}

/// What the lane gets when it asks for more.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Parcel(Parcel),
    /// There is none now.
    Nothing,
    /// There will be none: all is done, or has failed.
    Over,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Haul {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Parcel>,
    /// Parcels that are not done.
    unfinished: usize,
    /// Nothing is added any more.
    is_closed: bool,
    /// Nobody takes any more.
    has_failed: bool,
    /// Why, until somebody is told.
    error: Option<PoolError>,
    /// What a kernel has copied.
    kernel_bytes: u64,
    driver_calls: u64,
}

/// What came of a haul.
pub(super) struct Outcome {
    /// What went wrong, if anything did, and nobody was told.
    pub(super) carried: Result<(), PoolError>,
    pub(super) kernel_bytes: u64,
    pub(super) driver_calls: u64,
}

impl Haul {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues all of `parcels`. Waits while many are queued, which the lane takes, or ends.
    ///
    /// # Errors
    /// The failure of the lane.
    pub(crate) fn add(&self, parcels: &mut Parcels) -> Result<(), PoolError> {
        for parcel in parcels.take() {
            let mut state = self.state();
            while state.queue.len() >= QUEUE_MAX && !state.has_failed {
                state = self.wait(state);
            }
            if state.has_failed {
                return Err(state.failure());
            }
            state.unfinished += 1;
            state.queue.push_back(parcel);
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits until all that was added is copied.
    ///
    /// # Errors
    /// The failure of the lane.
    pub(crate) fn finish(&self) -> Result<(), PoolError> {
        let mut state = self.state();
        while state.unfinished > 0 && !state.has_failed {
            state = self.wait(state);
        }
        if state.has_failed { Err(state.failure()) } else { Ok(()) }
    }

    /// Nothing is added any more: the lane ends with what there is.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// The lane ends as soon as its copies have.
    pub(crate) fn call_off(&self) {
        self.state().has_failed = true;
        self.changed.notify_all();
    }

    /// The lane has ended before its time.
    pub(super) fn fail(&self, error: PoolError) {
        let mut state = self.state();
        state.has_failed = true;
        state.error.get_or_insert(error);
        drop(state);
        self.changed.notify_all();
    }

    /// The next parcel, or so much of it. The lane, if it `waits`, gets one, or hears that it is over.
    pub(super) fn next(&self, waits: bool, bytes_max: u64) -> Next {
        let mut state = self.state();
        loop {
            if state.has_failed || (state.is_closed && state.unfinished == 0) {
                return Next::Over;
            }
            if let Some(mut parcel) = state.queue.pop_front() {
                if let Some(rest) = parcel.cut(bytes_max) {
                    state.unfinished += 1;
                    state.queue.push_front(rest);
                }
                drop(state);
                self.changed.notify_all();
                return Next::Parcel(parcel);
            }
            if !waits {
                return Next::Nothing;
            }
            state = self.wait(state);
        }
    }

    /// All of one parcel is copied.
    pub(super) fn done(&self) {
        self.state().unfinished -= 1;
        self.changed.notify_all();
    }

    /// So many driver calls more.
    pub(super) fn called(&self, driver_calls: u64) {
        self.state().driver_calls += driver_calls;
    }

    /// So many bytes of what is done were a kernel's.
    pub(super) fn by_kernel(&self, bytes: u64) {
        self.state().kernel_bytes += bytes;
    }

    /// What came of it.
    pub(super) fn into_outcome(self) -> Outcome {
        let mut state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let carried = if state.has_failed { Err(state.failure()) } else { Ok(()) };
        let State { kernel_bytes, driver_calls, .. } = state;
        Outcome { carried, kernel_bytes, driver_calls }
    }
}

impl State {
    fn failure(&mut self) -> PoolError {
        self.error.take().unwrap_or_else(|| PoolError::Driver {
            object: "copies that were called off".to_owned(),
            size_bytes: 0,
            device: None,
            source: DriverError { op: DriverOp::StreamSynchronize, code: DriverCode::UNKNOWN },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host(at: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut(at)).unwrap()
    }

    fn device(at: u64, size_bytes: u64) -> VaRange {
        VaRange::new(DeviceAddress(at), size_bytes)
    }

    proptest! {
        #[test]
        fn parcels_hold_every_byte_once_in_order_and_are_full_but_the_last(
            sizes in prop::collection::vec(1_u64..100, 0..40),
            parcel_bytes in 1_u64..64,
        ) {
            let mut parcels = Parcels::new(parcel_bytes);
            let mut at = 1000;
            let mut wanted = Vec::new();
            for size in &sizes {
                parcels.add(host(usize::try_from(at).unwrap()), device(2 * at, *size));
                wanted.extend((0..*size).map(|byte| (at + byte, 2 * at + byte)));
                at += size + 7;
            }
            prop_assert_eq!(parcels.bytes(), sizes.iter().sum::<u64>());
            let all = parcels.take();
            for (index, parcel) in all.iter().enumerate() {
                prop_assert_eq!(parcel.bytes, parcel.pieces.iter().map(|piece| piece.device.size_bytes).sum::<u64>());
                prop_assert!(parcel.bytes == parcel_bytes || index + 1 == all.len());
            }
            let pieces = all.iter().flat_map(|parcel| &parcel.pieces);
            let found = pieces.flat_map(|piece| {
                (0..piece.device.size_bytes).map(|byte| (piece.host as u64 + byte, piece.device.start.0 + byte))
            });
            prop_assert!(found.eq(wanted));
            prop_assert!(parcels.take().is_empty());
        }
    }

    #[test]
    fn a_lane_that_asks_for_less_than_a_parcel_gets_it_piece_by_piece_and_all_of_it_counts() {
        let (haul, mut parcels) = (Haul::default(), Parcels::new(10));
        parcels.add(host(100), device(1000, 4));
        parcels.add(host(200), device(2000, 6));
        haul.add(&mut parcels).unwrap();
        haul.close();
        let mut taken = Vec::new();
        while let Next::Parcel(parcel) = haul.next(false, 3) {
            taken.push(parcel);
        }
        let found = |parcel: &Parcel| {
            let pieces = parcel.pieces.iter();
            pieces
                .map(|piece| (piece.host, piece.device.start.0, piece.device.size_bytes))
                .collect()
        };
        let found: Vec<Vec<_>> = taken.iter().map(found).collect();
        let wanted = [
            vec![(100, 1000, 3)],
            vec![(103, 1003, 1), (200, 2000, 2)],
            vec![(202, 2002, 3)],
            vec![(205, 2005, 1)],
        ];
        assert_eq!(found, wanted);
        for _ in &taken {
            assert_eq!(haul.next(false, 3), Next::Nothing);
            haul.done();
        }
        assert!(haul.finish().is_ok());
        assert!(haul.into_outcome().carried.is_ok());
    }

    #[test]
    fn a_failure_ends_every_wait_and_is_told_once() {
        let haul = Haul::default();
        let mut parcels = Parcels::new(1);
        parcels.add(host(1), device(0, 1));
        haul.add(&mut parcels).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| haul.finish());
            haul.fail(PoolError::NotOurs);
            assert!(matches!(waits.join().unwrap(), Err(PoolError::NotOurs)));
        });
        parcels.add(host(1), device(0, 1));
        assert!(matches!(haul.add(&mut parcels), Err(PoolError::Driver { .. })));
        assert_eq!(haul.next(true, u64::MAX), Next::Over);
        assert!(haul.into_outcome().carried.is_err());
    }
}
