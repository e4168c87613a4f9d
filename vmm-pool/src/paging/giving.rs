//! How many frames a window has: as many as its caller allows, and as memory gives. If other memory of the process finds no room, the window
//! gives frames up; some time later it tries to have them again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::table::Table;
use super::thread::{LOOK_LATER, Worker};
use super::{PageError, PageResult, Shared};
use crate::deferred::Physical;
use crate::driver::{DeviceOrdinal, Driver};
use crate::error::PoolError;
use crate::pool::{Entered, Lender, Use};

/// A window with less takes memory from one that has more, in bytes.
const FLOOR_BYTES: u64 = 2 << 30;
/// When what was given up, or refused, is tried again.
const TRIED_AGAIN: Duration = Duration::from_secs(10);

impl<D: Driver> Lender for Shared<D> {
    fn spare_bytes(&self, device: DeviceOrdinal) -> u64 {
        let table = self.table();
        let is_other = device != self.device || table.is_ending || table.broken.is_some();
        if is_other { 0 } else { table.resident().saturating_sub(1) as u64 * self.chunk_bytes }
    }

    fn ask(&self, bytes: u64) {
        let mut table = self.table();
        let resident = table.resident();
        if resident <= table.frames_now() {
            let chunks = usize::try_from(bytes.div_ceil(self.chunk_bytes)).unwrap_or(usize::MAX);
            table.given = Some(resident.saturating_sub(chunks).max(1));
            self.changed.notify_all();
        }
    }

    fn wait(&self, limit: Duration) {
        let what = |_: &Table| "frames to be given up".to_owned();
        // Who asked tries again in any case.
        let _given = self.wait_for(limit, what, |table| {
            (table.resident() <= table.frames_now()).then_some(Ok(()))
        });
    }
}

impl<D: Driver> Worker<'_, D> {
    /// Device memory for one more chunk. If another could leave for `newcomer`, it leaves free what is to stay free.
    pub(super) fn new_frame(
        &self,
        entered: &Entered<'_, D, Use>,
        newcomer: usize,
    ) -> PageResult<Physical> {
        let (device, needed_bytes) = (self.shared.device, self.shared.chunk_bytes);
        let leaves_bytes = self.shared.leaves_bytes;
        if leaves_bytes > 0 && !self.shared.table().victims(newcomer).is_empty() {
            // A question that fails refuses nothing: the driver does that by itself.
            let info = self.shared.pool.driver.memory_info();
            let free_bytes = info.map_or(u64::MAX, |info| info.free_bytes);
            if free_bytes < leaves_bytes + needed_bytes {
                let short = PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes };
                return Err(short.into());
            }
        }
        Ok(entered.make_frame(device, needed_bytes)?)
    }

    /// There is no device memory for another frame. Another window that has more gives one, or what there is has to do.
    pub(super) fn without_room(&self, newcomer: usize, error: PageError) {
        let shared = self.shared;
        let (has_others, is_awaited, own_bytes) = {
            let table = shared.table();
            let own_bytes = table.resident() as u64 * shared.chunk_bytes;
            let is_awaited = table.chunks[newcomer].holders > 0;
            (!table.victims(newcomer).is_empty(), is_awaited, own_bytes)
        };
        let own = Arc::as_ptr(shared);
        let is_richer = |spare: u64| {
            let is_poor = own_bytes < FLOOR_BYTES && spare > own_bytes;
            is_poor || (is_awaited && !has_others)
        };
        let others = shared.pool.lenders.on(shared.device);
        let mut others = others.iter().filter(|(_, it)| !std::ptr::addr_eq(Arc::as_ptr(it), own));
        if let Some((_, richest)) = others.next().filter(|(spare, _)| is_richer(*spare)) {
            richest.ask(shared.chunk_bytes);
            // It gives one when a use is over.
            let _waited = shared.changed.wait_timeout(shared.table(), LOOK_LATER);
            return;
        }
        let mut table = shared.table();
        if has_others {
            table.given = Some(table.resident());
        } else {
            table.failed(newcomer, Arc::new(error));
        }
    }

    /// Forgets after some time that there was no room.
    pub(super) fn widen(&mut self) {
        let mut table = self.shared.table();
        if table.given.is_none() {
            self.narrowed = None;
        } else if self.narrowed.get_or_insert_with(Instant::now).elapsed() >= TRIED_AGAIN {
            table.given = None;
            self.narrowed = None;
        }
    }
}
