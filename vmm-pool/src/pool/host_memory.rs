//! Host memory for saved contents, with the file: the amount that is held, and the amount that a pause would need.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::{Devices, Holdings};
use crate::driver::Driver;
use crate::error::{Describe, PoolResult};
use crate::gate::Gate;
use crate::journal::StepLog;
use crate::ledger::{Layout, Placed, Rows, Selection, Survey};
use crate::store::{
    Copies, Copying, HeldFigures, HostArena, HostBudget, HostDemand, Incoming, MakeFile, Store,
};
use sublet_sync::sync::lock;

/// The time that a pause waits for a chunk that another thread populates, before it populates one itself. The driver
/// may be pinning the chunk, and be busy with something else.
const COMES_WITHIN: Duration = Duration::from_secs(2);

/// The host memory of one process: see the head of this module.
#[derive(Debug)]
pub struct HostMemory<D: Driver> {
    pub(crate) holdings: Arc<Holdings>,
    pub(crate) devices: Arc<Devices<D>>,
    arena: Mutex<HostArena<D>>,
    /// The arena's sizes, and the chunk that is being populated for it.
    pub(crate) incoming: Arc<Incoming>,
}

impl<D: Driver> HostMemory<D> {
    pub(super) fn new(
        holdings: Arc<Holdings>,
        devices: Arc<Devices<D>>,
        toucher_threads: usize,
    ) -> Self {
        let arena = HostArena::new(Arc::clone(&devices.driver), toucher_threads);
        let incoming = Arc::clone(arena.incoming());
        Self { holdings, devices, arena: Mutex::new(arena), incoming }
    }

    /// Locks the arena. Lock it before the ledger, if you need both. Waits while host memory grows.
    pub(crate) fn arena(&self) -> MutexGuard<'_, HostArena<D>> {
        lock(&self.arena)
    }

    /// Sets the directory for contents of [`crate::Contents::File`]. The default is `/tmp`. The setting counts from the
    /// next pause on that begins while no such contents are saved. That pause fails if the directory cannot be used.
    /// Waits while host memory grows.
    pub fn set_file_dir(&self, dir: PathBuf) {
        self.arena().disk.dir = dir;
    }

    /// Sets the function that makes the next file. Until this is called, a pause with contents for a file fails. Waits
    /// while host memory grows.
    pub fn make_files_by(&self, make: MakeFile) {
        self.arena().disk.make = make;
    }

    /// Returns the directory that [`HostMemory::set_file_dir`] last set. Waits while host memory grows.
    pub fn file_dir(&self) -> PathBuf {
        self.arena().disk.dir.clone()
    }

    /// Closes a forked child's copy of the file, which holds disk space that the parent may have given back. Skips a
    /// file that a thread was changing at the fork.
    pub fn close_file_in_child(&self) {
        if let Ok(mut arena) = self.arena.try_lock() {
            arena.disk.file = None;
        }
    }

    /// Starts a thread that populates host memory for contents that end at `end_bytes`, during the copies, if any is
    /// missing. First waits for a chunk that is being populated, if it is needed. [`HostArena::end_growth`] ends the
    /// growth.
    pub(crate) fn begin_growth(&self, end_bytes: u64, is_file_used: bool) {
        let nodes = self.devices.nodes_of(&self.holdings.devices());
        let is_short = |held: HeldFigures| held.missing(end_bytes, is_file_used).is_some();
        self.incoming.wait(COMES_WITHIN, is_short);
        let bring_in = self.arena().begin_growth(nodes, end_bytes);
        // The lock is released here, because starting a thread may take long.
        if let Some(bring_in) = bring_in
            && let Err(error) = sublet_sync::threads::spawn("sublet-arena", bring_in, |_| {})
        {
            tracing::debug!(%error, "no thread to bring host memory in ahead");
        }
    }

    /// Unpins host memory, or pins it again. Memory that cannot be pinned again is copied slower, until a pause pins
    /// it.
    pub(crate) fn set_pinned(&self, is_pinned: bool) -> StepLog {
        let (mut log, devices) = (StepLog::default(), self.holdings.devices());
        let mut arena = self.arena();
        let done = self.devices.pins_beside_work(&devices, 0).and_then(|pins| {
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

    /// Refuses contents that end at `end_bytes` of host memory, if more must be allocated than `budget` allows.
    /// `budget` gets the size of the host memory that is held, in bytes.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfHostMemory`].
    pub fn check_growth(
        &self,
        end_bytes: u64,
        budget: &dyn Fn(u64) -> HostBudget,
    ) -> PoolResult<()> {
        let held = self.incoming.figures();
        let wanted_bytes = held.wanted_bytes(end_bytes, false);
        let grow_bytes = wanted_bytes.saturating_sub(held.chunk_bytes);
        if grow_bytes == 0 {
            return Ok(());
        }
        HostArena::<D>::check_budget(end_bytes, grow_bytes, budget(held.bytes()))
    }

    /// Is host memory held that may be idle? Does not block.
    pub fn holds_idle_memory(&self) -> bool {
        let saved_bytes = self.holdings.ledger().rows.end_in(Store::Host);
        let held = self.incoming.figures();
        let last_start_bytes = held.chunk_bytes - held.last_chunk_bytes;
        held.has_ring || (held.last_chunk_bytes > 0 && last_start_bytes >= saved_bytes)
    }

    /// Gives back one chunk of host memory without contents or copies for readers. Returns its size in bytes: 0 if
    /// there is no such chunk, or if a pause or resume is under way. Call it on a thread of Sublet's that does nothing
    /// else.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`]: the chunk stays.
    ///
    /// # Driver calls
    /// `cuThreadExchangeStreamCaptureMode`, `cuDevicePrimaryCtxGetState`, `cuCtxSetCurrent`, `cuMemHostUnregister`.
    pub fn give_idle_chunk_back(&self, gate: &Gate) -> PoolResult<u64> {
        let devices = self.holdings.devices();
        let mut arena = self.arena();
        // Checked under the lock: a pause allocates its host memory under it, and cannot get more after the point of no
        // return.
        if gate.is_shut() || self.incoming.is_held() {
            return Ok(0);
        }
        let (end_bytes, is_file_used) = {
            let ledger = self.holdings.ledger();
            (ledger.rows.end_in(Store::Host), ledger.rows.end_in(Store::File) > 0)
        };
        self.devices.pins_beside_work(&devices, 0)?;
        arena.shrink_by_one(end_bytes, !is_file_used)
    }

    pub(crate) fn layouts(&self, rows: &Rows, survey: &Survey, copies: Copies) -> [Layout; 2] {
        let ledger = self.holdings.ledger();
        let layout = |store| Layout::of(&ledger.rows, rows, store, survey, copies);
        [Store::Host, Store::File].map(layout)
    }

    /// Gives back disk space that no saved contents need. Returns the file if it is empty, for the caller to close.
    pub(crate) fn give_disk_back(&self, arena: &mut HostArena<D>) -> Option<OwnedFd> {
        let places = self.holdings.ledger().places_in(Store::File);
        arena.disk.keep_only(&places)
    }

    /// Returns the host memory that a pause of `selection` would need now if it copies everything, including contents
    /// that are saved there already. Waits while host memory grows.
    pub fn demand(&self, selection: &Selection) -> HostDemand {
        self.demand_of(selection, &Survey::default())
    }

    /// As [`HostMemory::demand`], for a pause that leaves out the pieces that `survey` shows to be zero or unchanged.
    pub(crate) fn demand_of(&self, selection: &Selection, survey: &Survey) -> HostDemand {
        let arena = self.arena();
        let rows = self.holdings.ledger().rows.choose(selection);
        let growth =
            |[kept, filed]: &[Layout; 2]| arena.growth(kept.end_bytes, filed.end_bytes > 0);
        let with_all = self.layouts(&rows, survey, Copies::All);
        let grow_with_all_bytes = growth(&with_all);
        let [kept, filed] = with_all;
        let to_memory_bytes = kept.placed.iter().map(Placed::copied_bytes).sum();
        let to_file_bytes = filed.placed.iter().map(Placed::copied_bytes).sum();
        let copying = Copying { to_memory_bytes, to_file_bytes };
        // If that needs nothing more, no smaller value is possible.
        let least = |copies, more: u64| match more {
            0 => 0,
            more => growth(&self.layouts(&rows, survey, copies)).min(more),
        };
        let grow_with_needed_bytes = least(Copies::Needed, grow_with_all_bytes);
        let grow_bytes = least(Copies::None, grow_with_needed_bytes);
        let held_bytes = arena.held_bytes();
        HostDemand {
            saved_bytes: kept.end_bytes + filed.end_bytes,
            copying,
            held_bytes,
            grow_bytes,
            grow_with_needed_bytes,
            grow_with_all_bytes,
        }
    }

    /// Gives host memory back with `give_back`, which gets the end of saved contents and copies. Memory that cannot be
    /// given back stays for the next pause.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub(crate) fn give_back_by(
        &self,
        give_back: impl FnOnce(&mut HostArena<D>, u64) -> PoolResult<()>,
    ) {
        if let Err(error) = self.try_give_back_by(&mut self.arena(), give_back) {
            tracing::error!(%error, "host memory stays for the next pause");
        }
    }

    /// As [`HostMemory::give_back_by`], for the locked `arena`.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    pub(crate) fn try_give_back_by(
        &self,
        arena: &mut HostArena<D>,
        give_back: impl FnOnce(&mut HostArena<D>, u64) -> PoolResult<()>,
    ) -> PoolResult<()> {
        let Some(&device) = self.holdings.devices().first() else { return Ok(()) };
        let end_bytes = self.holdings.ledger().rows.end_in(Store::Host);
        let about = || "giving host memory back".to_owned();
        self.devices.driver.make_current(device).about(about, 0, Some(device))?;
        give_back(arena, end_bytes)
    }
}
