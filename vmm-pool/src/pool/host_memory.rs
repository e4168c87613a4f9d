//! Host memory for saved contents, with the file: what is held, and what a pause would take.

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

/// The time that a pause waits for a chunk that is on its way, before it brings one in itself: the driver may have the chunk,
/// and be busy with something else.
const COMES_WITHIN: Duration = Duration::from_secs(2);

/// See the head of this module.
#[derive(Debug)]
pub struct HostMemory<D: Driver> {
    pub(crate) holdings: Arc<Holdings>,
    pub(crate) devices: Arc<Devices<D>>,
    arena: Mutex<HostArena<D>>,
    /// The arena's figures, and what is on its way there.
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

    /// Taken before the ledger where both are. Waits while host memory grows.
    pub(crate) fn arena(&self) -> MutexGuard<'_, HostArena<D>> {
        lock(&self.arena)
    }

    /// Sets the directory where contents of [`crate::Contents::File`] go, `/tmp` at first. It counts from the next
    /// pause on that begins while no such contents are saved. That pause fails if the directory cannot be used.
    /// Waits while host memory grows.
    pub fn set_file_dir(&self, dir: PathBuf) {
        self.arena().disk.dir = dir;
    }

    /// Has `make` make the next file there. Until this is called, a pause with contents for a file fails. Waits while host memory grows.
    pub fn make_files_by(&self, make: MakeFile) {
        self.arena().disk.make = make;
    }

    /// Returns the directory that [`HostMemory::set_file_dir`] last set. Waits while host memory grows.
    pub fn file_dir(&self) -> PathBuf {
        self.arena().disk.dir.clone()
    }

    /// For a forked child: closes its copy of the file, which holds disk space that the parent believes to have given back.
    /// Passes over a file that a thread was changing at the fork.
    pub fn close_file_in_child(&self) {
        if let Ok(mut arena) = self.arena.try_lock() {
            arena.disk.file = None;
        }
    }

    /// Has what contents that end there need come in during the copies, behind the chunk that is on its way, if they need that.
    /// [`HostArena::end_growth`] ends it.
    pub(crate) fn begin_growth(&self, end_bytes: u64, is_file_used: bool) {
        let nodes = self.devices.nodes_of(&self.holdings.devices());
        let is_short = |held: HeldFigures| held.missing(end_bytes, is_file_used).is_some();
        self.incoming.wait(COMES_WITHIN, is_short);
        let bring_in = self.arena().begin_growth(nodes, end_bytes);
        // The lock is let go: to start a thread may take the system long.
        if let Some(bring_in) = bring_in
            && let Err(error) = sublet_sync::threads::spawn("sublet-arena", bring_in, |_| {})
        {
            tracing::debug!(%error, "no thread to bring host memory in ahead");
        }
    }

    /// Gives the pins of host memory up, or takes them again. What cannot be pinned again is copied slower, until a pause pins it.
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

    /// Refuses contents that end at `end_bytes` of host memory if that is not held, and `budget` does not give it. That is told how
    /// much is held, in bytes.
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

    /// Is host memory held that may be idle? Waits for nothing.
    pub fn holds_idle_memory(&self) -> bool {
        let saved_bytes = self.holdings.ledger().rows.end_in(Store::Host);
        let held = self.incoming.figures();
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
    pub fn give_idle_chunk_back(&self, gate: &Gate) -> PoolResult<u64> {
        let devices = self.holdings.devices();
        let mut arena = self.arena();
        // Looked at behind the lock: a pause takes its host memory under it, and has no other behind the point of no return.
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

    /// Gives disk space back that no saved contents need. The file itself, when it is empty, is for the caller to
    /// close.
    pub(crate) fn give_disk_back(&self, arena: &mut HostArena<D>) -> Option<OwnedFd> {
        let places = self.holdings.ledger().places_in(Store::File);
        arena.disk.keep_only(&places)
    }

    /// Host memory that a pause of `selection` would take now that copies everything, with what is saved there already.
    /// Waits while host memory grows.
    pub fn demand(&self, selection: &Selection) -> HostDemand {
        self.demand_of(selection, &Survey::default())
    }

    /// As [`HostMemory::demand`], of a pause that copies what `survey` says.
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
        // Where that takes nothing, nothing less can be requested.
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

    /// Has `give_back` give host memory back, which is told where saved contents and copies end. What does not go stays for the next
    /// pause.
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

    /// The same, of `arena`.
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
