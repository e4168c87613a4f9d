//! Host memory for saved contents, with the file: what is held, what a pause would take, and what is brought in ahead of
//! it while the application runs.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::{Devices, Holdings};
use crate::driver::Driver;
use crate::error::{Describe, PoolResult};
use crate::gate::Gate;
use crate::journal::StepLog;
use crate::ledger::{Layout, Placed, Rows, Selection, Survey};
use crate::store::{Ahead, Copies, Copying, HostArena, HostDemand, Store};
use crate::sync::lock;

/// Threads that touch memory while the application runs.
const TOUCHERS_MAX: usize = 2;

/// Host memory of one process, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStanding {
    /// Held for saved contents, in bytes.
    pub held_bytes: u64,
    /// The host memory that a pause of everything would hold, in bytes: as much as is kept of device memory. After a
    /// pause it is what that pause used, and what has come to it since.
    pub wanted_bytes: u64,
    /// The size of what is brought in next, in bytes; 0 when nothing is missing.
    pub next_bytes: u64,
}

/// The outcome of [`HostMemory::bring_in`].
#[derive(Debug, PartialEq, Eq)]
pub enum BroughtIn {
    /// Nothing is missing.
    Enough,
    /// One chunk more is held, or on its way to a pause that waited for it.
    Chunk {
        /// Its size.
        size_bytes: u64,
        /// The steps that were taken for it.
        log: StepLog,
    },
    /// A pause or resume is under way, or another thread brings a chunk in.
    NotNow,
}

/// See the head of this module.
#[derive(Debug)]
pub struct HostMemory<D: Driver> {
    pub(crate) holdings: Arc<Holdings>,
    pub(crate) devices: Arc<Devices<D>>,
    arena: Mutex<HostArena<D>>,
    /// The arena's figures, and what is on its way there.
    pub(crate) ahead: Arc<Ahead>,
}

impl<D: Driver> HostMemory<D> {
    pub(super) fn new(
        holdings: Arc<Holdings>,
        devices: Arc<Devices<D>>,
        toucher_threads: usize,
    ) -> Self {
        let arena = HostArena::new(Arc::clone(&devices.driver), toucher_threads);
        let ahead = Arc::clone(arena.ahead());
        Self { holdings, devices, arena: Mutex::new(arena), ahead }
    }

    /// Taken before the ledger where both are. Waits while host memory grows.
    pub(crate) fn arena(&self) -> MutexGuard<'_, HostArena<D>> {
        lock(&self.arena)
    }

    /// As [`HostMemory::arena`], unless somebody has it.
    pub(crate) fn try_arena(&self) -> Option<MutexGuard<'_, HostArena<D>>> {
        match self.arena.try_lock() {
            Ok(arena) => Some(arena),
            Err(TryLockError::Poisoned(arena)) => Some(arena.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sets the directory where contents of [`crate::Contents::File`] go, `/tmp` at first. It counts from the next
    /// pause on that begins while no such contents are saved. That pause fails if the directory cannot be used, which
    /// [`crate::check_file_dir`] tells in advance. Waits while host memory grows.
    pub fn set_file_dir(&self, dir: PathBuf) {
        self.arena().disk.set_dir(dir);
    }

    /// Returns the directory that [`HostMemory::set_file_dir`] last set. Waits while host memory grows.
    pub fn file_dir(&self) -> PathBuf {
        self.arena().disk.dir().to_owned()
    }

    /// For a forked child: closes its copy of the file, which holds disk space that the parent believes to have given back.
    /// Passes over a file that a thread was changing at the fork.
    pub fn close_file_in_child(&self) {
        if let Ok(mut arena) = self.arena.try_lock() {
            arena.disk.close_in_child();
        }
    }

    /// Returns the host memory that is held, and that which a pause would hold. Waits for nothing.
    pub fn standing(&self) -> HostStanding {
        let (kept, filed) = self.wanted_places();
        let held = self.ahead.figures();
        HostStanding {
            held_bytes: held.bytes(),
            wanted_bytes: held.wanted_bytes(kept, filed > 0),
            next_bytes: held.missing_chunk_bytes(kept, filed > 0),
        }
    }

    /// Computes the ends of the contents of a pause of everything, in arena and file.
    fn wanted_places(&self) -> (u64, u64) {
        let (whole, kept_bytes) = {
            let ledger = self.holdings.ledger();
            (ledger.rows.choose(&Selection::Whole), ledger.rows.kept_bytes())
        };
        let layouts = self.layouts(&whole, &Survey::default(), Copies::All);
        let [kept, filed] = layouts.map(|layout| layout.end_bytes);
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
    pub fn bring_in(&self, gate: &Gate, most_bytes: u64) -> PoolResult<BroughtIn> {
        if self.ahead.is_held() || gate.is_shut() {
            return Ok(BroughtIn::NotNow);
        }
        let (kept, filed) = self.wanted_places();
        let devices = self.holdings.devices();
        let nodes = self.devices.nodes_of(&devices);
        let claimed = {
            let Some(mut arena) = self.try_arena() else { return Ok(BroughtIn::NotNow) };
            let held = self.ahead.figures();
            let next_bytes = held.missing_chunk_bytes(kept, filed > 0);
            if next_bytes == 0 || held.bytes() + next_bytes > most_bytes {
                return Ok(BroughtIn::Enough);
            }
            arena.set_nodes(nodes);
            arena.claim(kept, filed > 0)
        };
        let Some((claim, mut how)) = claimed else { return Ok(BroughtIn::NotNow) };
        how.toucher_threads = how.toucher_threads.clamp(1, TOUCHERS_MAX);
        let size_bytes = claim.size_bytes();
        let pins = self.devices.pins_beside_work(&devices, size_bytes)?;
        let mut log = StepLog::default();
        claim.bring_in(&mut log, &*self.devices.driver, &how, pins)?;
        if let Some(mut arena) = self.try_arena() {
            arena.take_delivered();
        }
        Ok(BroughtIn::Chunk { size_bytes, log })
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

    /// Is host memory held that may be idle? Waits for nothing.
    pub fn holds_idle_memory(&self) -> bool {
        let saved_bytes = self.holdings.ledger().rows.end_in(Store::Host);
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
    pub fn give_idle_chunk_back(&self, gate: &Gate) -> PoolResult<u64> {
        let devices = self.holdings.devices();
        let Some(mut arena) = self.try_arena() else { return Ok(0) };
        // Looked at behind the lock: a pause takes its host memory under it, and has no other behind the point of no return.
        if gate.is_shut() || self.ahead.is_held() {
            return Ok(0);
        }
        let (end_bytes, is_file_used) = {
            let ledger = self.holdings.ledger();
            (ledger.rows.end_in(Store::Host), ledger.rows.end_in(Store::File) > 0)
        };
        self.devices.pins_beside_work(&devices, 0)?;
        arena.shrink_by_one(end_bytes, !is_file_used)
    }

    /// Nothing is brought in from now on, because the process ends. Waits for the driver call under way, at most for
    /// as long as this.
    pub fn stop(&self, timeout: Duration) {
        self.ahead.end(timeout);
    }

    /// Has the process's end come?
    pub fn has_stopped(&self) -> bool {
        self.ahead.has_ended()
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
        let Some(&device) = self.holdings.devices().first() else { return };
        let mut arena = self.arena();
        let end_bytes = self.holdings.ledger().rows.end_in(Store::Host);
        let about = || "giving host memory back".to_owned();
        let current = self.devices.driver.make_current(device).about(about, 0, Some(device));
        if let Err(error) = current.and_then(|()| give_back(&mut arena, end_bytes)) {
            tracing::error!(%error, "host memory stays for the next pause");
        }
    }
}
