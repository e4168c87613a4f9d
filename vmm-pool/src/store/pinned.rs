//! Host memory of a step's own that devices write to, for as long as the step lasts.

#![expect(unsafe_code, reason = "hands host memory to the driver")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::driver::{Driver, PieceSlot, PinnedFor};
use crate::error::{Describe, PoolError, PoolResult};

/// See the head of this module. Dropped, it goes, unless the driver keeps it.
///
/// # Invariants
/// 1. `map` is registered with the driver, zeros at first, and no part of it is handed out beyond a borrow.
#[derive(Debug)]
pub(crate) struct Pinned<D: Driver> {
    driver: Arc<D>,
    /// None once it has been given up.
    map: Option<MmapRaw>,
}

impl<D: Driver> Pinned<D> {
    /// So many bytes, for devices of all contexts. A context must be current on this thread.
    pub(crate) fn new(driver: &Arc<D>, length: usize) -> PoolResult<Self> {
        let size_bytes = length as u64;
        let refused = |source| PoolError::HostMemoryRefused { size_bytes, source };
        let map = MmapOptions::new().len(length).populate().map_anon().map_err(refused)?;
        let map = MmapRaw::from(map);
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::debug!(%error, "a fork of this process copies a little pinned memory");
        }
        let driver = Arc::clone(driver);
        // SAFETY: it stays mapped until it is unregistered below, or for good.
        unsafe { driver.host_register(start_of(&map), length, PinnedFor::AllContexts) }.about(
            || "pinning of host memory".to_owned(),
            size_bytes,
            None,
        )?;
        // INVARIANT: registered above.
        Ok(Self { driver, map: Some(map) })
    }

    /// For the driver.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.map.as_ref().map_or(NonNull::dangling(), start_of)
    }

    /// A part of it as slots, as far as there are so many. No device may be writing there.
    pub(crate) fn slots(&mut self, part: Range<usize>) -> &mut [PieceSlot] {
        let Some(map) = &self.map else { return &mut [] };
        let count = map.len() / size_of::<PieceSlot>();
        let end = part.end.min(count);
        let start = part.start.min(end);
        // SAFETY: within the map, or at its end.
        let first = unsafe { start_of(map).cast::<PieceSlot>().add(start) };
        // SAFETY: live, aligned to a page and then to a slot, zeros or slots, and this value's own (invariant 1); any bits are a
        // slot.
        unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), end - start) }
    }

    /// The first bytes. No device may be writing there.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: live and written to by nobody now (invariant 1).
        unsafe { std::slice::from_raw_parts(start_of(map).as_ptr(), length.min(map.len())) }
    }

    /// A device may be writing there still: it stays for good.
    pub(crate) fn keep_for_good(mut self) {
        if let Some(map) = self.map.take() {
            let _kept = std::mem::ManuallyDrop::new(map);
        }
    }
}

fn start_of(map: &MmapRaw) -> NonNull<u8> {
    NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling())
}

impl<D: Driver> Drop for Pinned<D> {
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        // SAFETY: the thread that drops it has waited for the devices; see `keep_for_good`.
        if let Err(error) = unsafe { self.driver.host_unregister(start_of(&map)) } {
            tracing::error!(%error, size_bytes = map.len(), "host memory stays pinned");
            // Unmapping pinned memory would pull it from under the driver.
            let _kept = std::mem::ManuallyDrop::new(map);
        }
    }
}
