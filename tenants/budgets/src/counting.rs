//! This process's part of its tenant's memory on each GPU, counted against the tenant's budget.
//!
//! Memory that a pause has released does not count. A whole resume is charged even if it does not fit, because it was within the
//! budget before the pause. A resume by tag is refused if it does not fit. Imports count for their owner. Counting begins when
//! the process joins, if budgets are given or other processes count, or by a request of `sublet budget`. The memory that exists
//! then is charged.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use sublet_member::{Counted, Counting, PID};
use sublet_protocol::error_text::chain;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::RunDirError;
use sublet_protocol::run_dir::files::COUNTS_NAME;
use sublet_protocol::wire::{FailureKind, Reply};
use vmm_pool::Pool;
use vmm_pool::budget::{Account, Entry, Figure, OverBudget};
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid, Driver, PciAddress};
use vmm_pool::sync::lock;

use super::Budgets;
use super::file::BudgetFile;
use super::shared::{Gpu, Shared};

/// The memory that this process holds, counted in the tenant's file. The share lives as long as the process.
#[derive(Debug)]
struct Share {
    tenant: TenantName,
    /// The slot where the memory is counted. It changes when the file has been removed. A leaf, held for moments.
    seat: RwLock<Seat>,
    /// Bytes that this process holds on each counted device. If the file is replaced, they are copied into the next one.
    held: Vec<AtomicU64>,
    /// Serializes the threads that take memory, because a slot requests one size at a time. A leaf, held for moments.
    turn: Mutex<()>,
    /// Devices on which a refusal was reported, as bits.
    said: AtomicU64,
}

/// A slot in a file.
#[derive(Debug)]
struct Seat {
    file: BudgetFile,
    slot: usize,
    /// The place in the file of each device of this process, by its ordinal.
    places: Vec<Option<usize>>,
}

impl Seat {
    fn place(&self, device: usize) -> Option<usize> {
        self.places.get(device).copied().flatten()
    }

    /// Returns the count of all processes. None if somebody has shortened the file, until there is another one.
    fn shared(&self) -> Option<&Shared> {
        self.file.is_whole().then(|| self.file.shared())
    }
}

impl Share {
    fn seat(&self) -> RwLockReadGuard<'_, Seat> {
        self.seat.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is the file still where joining processes look for it?
    fn is_named(&self) -> bool {
        self.seat().file.is_named()
    }

    /// Takes another seat, in a file that has replaced the one before.
    fn move_to(&self, seat: Seat) {
        let mut present = self.seat.write().unwrap_or_else(PoisonError::into_inner);
        for (held, to) in self.held.iter().zip(&seat.places) {
            if let Some(to) = *to {
                seat.file.shared().take_anyway(to, seat.slot, held.load(Ordering::Relaxed));
            }
        }
        *present = seat;
    }

    fn note_taken(&self, index: usize, size_bytes: u64) -> Entry {
        if let Some(held) = self.held.get(index) {
            held.fetch_add(size_bytes, Ordering::Relaxed);
        }
        Entry(index)
    }

    /// Reports a refusal, once for each GPU.
    fn say(&self, device: DeviceOrdinal, asked_bytes: u64, over: OverBudget) {
        let bit = 1_u64 << (device.0 % 64);
        if self.said.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            tracing::warn!(
                tenant = %self.tenant,
                %device,
                asked_bytes,
                held_bytes = over.held_bytes,
                budget_bytes = over.budget_bytes,
                "an allocation does not fit the tenant's budget, and is answered as if memory were used up; this is said once"
            );
        }
    }
}

/// Returns the index of a device, which is its ordinal. A place in the file would not do: the file may be replaced.
fn index_of(device: DeviceOrdinal) -> Option<usize> {
    usize::try_from(device.0).ok()
}

impl Account for Share {
    fn take(&self, device: DeviceOrdinal, size_bytes: u64) -> Result<Option<Entry>, OverBudget> {
        let (_turn, seat) = (lock(&self.turn), self.seat());
        let counted = index_of(device).and_then(|index| Some((index, seat.place(index)?)));
        let Some((index, place)) = counted else {
            return Ok(None);
        };
        if let Some(shared) = seat.shared() {
            let taken = shared.take(place, seat.slot, size_bytes).or_else(|_| {
                seat.file.forget_dead(Some(seat.slot));
                shared.take(place, seat.slot, size_bytes)
            });
            if let Err(over) = taken {
                self.say(device, size_bytes, over);
                return Err(over);
            }
        }
        Ok(Some(self.note_taken(index, size_bytes)))
    }

    fn take_anyway(&self, device: DeviceOrdinal, size_bytes: u64) -> Option<Entry> {
        let (seat, index) = (self.seat(), index_of(device)?);
        let place = seat.place(index)?;
        if let Some(shared) = seat.shared() {
            shared.take_anyway(place, seat.slot, size_bytes);
        }
        Some(self.note_taken(index, size_bytes))
    }

    fn give_back(&self, Entry(index): Entry, size_bytes: u64) {
        let seat = self.seat();
        if let Some(held) = self.held.get(index) {
            held.fetch_sub(size_bytes, Ordering::Relaxed);
        }
        if let (Some(place), Some(shared)) = (seat.place(index), seat.shared()) {
            shared.give_back(place, seat.slot, size_bytes);
        }
    }

    fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        let (_turn, seat) = (lock(&self.turn), self.seat());
        let (place, shared) = (seat.place(index_of(device)?)?, seat.shared()?);
        seat.file.forget_dead(Some(seat.slot));
        Some(shared.figure(place))
    }
}

/// Returns the place of each of `gpus` in a file.
fn places_in(file: &BudgetFile, gpus: &[Option<Gpu>]) -> Result<Vec<Option<usize>>, RunDirError> {
    let known: Vec<Gpu> = gpus.iter().flatten().copied().collect();
    let mut places = file.places(&known)?.into_iter();
    let place = |gpu: &Option<Gpu>| gpu.as_ref().and_then(|_| places.next().flatten());
    Ok(gpus.iter().map(place).collect())
}

/// Is there a file in `run_dir` in which processes of `tenant` count their memory? It may be of dead processes.
pub fn may_count(run_dir: &Path, tenant: &TenantName) -> bool {
    run_dir.join(tenant.as_str()).join(COUNTS_NAME).exists()
}

/// Returns the tenant's figure for a GPU, from the account of `pool`: the budget and the held bytes. None if nothing counts, or
/// the process does not see that GPU. Queries the driver for the identities of its devices.
pub fn figure_of<D: Driver>(pool: &Pool<D>, uuid: DeviceUuid) -> Option<Figure> {
    if !pool.budget().counts() {
        return None;
    }
    let driver = pool.driver();
    let is_it = |device: &DeviceOrdinal| driver.device_uuid(*device) == Ok(uuid);
    let device = (0..driver.device_count().ok()?).map(DeviceOrdinal).find(is_it)?;
    pool.budget().figure(device)
}

/// A function that returns the number of a device on this machine, if it is known.
type GpuIndex = fn(DeviceOrdinal, Option<PciAddress>) -> Option<u32>;

/// This process's share of the tenant's budgets, if it counts. The lock is held while counting begins, which waits for other
/// processes.
#[derive(Debug)]
pub struct Counts {
    budgets: Option<Budgets>,
    gpu_index: GpuIndex,
    device_bytes: fn(DeviceOrdinal) -> u64,
    share: Mutex<Option<Arc<Share>>>,
}

impl Counting for Counts {
    /// Begins to count at the first allocation, if budgets are given or other processes of the tenant count.
    fn begin(&self, process: &dyn Counted) {
        match self.count(process) {
            Ok(true) => self.note_other_budgets(process),
            Ok(false) => {}
            Err(error) => {
                let budgets = self.budgets.clone().unwrap_or_default();
                // The tenant's file of budgets cannot be used, and this process holds what it likes: see to the file, and run `sublet budget`.
                process.notes().add(format!("no budget is kept to ({budgets}): {error}"));
            }
        }
    }

    fn is_due(&self, process: &dyn Counted) -> bool {
        self.share.try_lock().is_ok_and(|share| {
            share.as_ref().map_or_else(|| others_count(process), |share| !share.is_named())
        })
    }

    fn run(&self, process: &dyn Counted) -> Reply {
        match self.count(process) {
            Ok(true) => Reply::Counts,
            Ok(false) => Reply::Failed(
                // The tenant has no budget, so nothing counts its memory. Nothing was changed. `sublet budget TENANT
                // 0=60GiB` sets a budget.
                FailureKind::Unknown.because(format!("process {PID}: nobody counts in its tenant")),
            ),
            Err(error) => Reply::Failed(
                FailureKind::Driver.because(format!("process {PID}: {}", chain(&error))),
            ),
        }
    }
}

fn others_count(process: &dyn Counted) -> bool {
    let presence = process.presence();
    may_count(presence.run_dir().path(), presence.tenant())
}

impl Counts {
    /// Creates the counts of one process, for its [`sublet_member::MemberConfig`]. `budgets` apply if it is the first to count.
    /// `device_bytes` returns the total bytes of a device, or 0. It is called once for each device, when counting begins.
    pub fn of(
        budgets: Option<Budgets>,
        gpu_index: GpuIndex,
        device_bytes: fn(DeviceOrdinal) -> u64,
    ) -> Arc<Self> {
        Arc::new(Self { budgets, gpu_index, device_bytes, share: Mutex::default() })
    }

    /// Begins to count this process's memory, for good, if any process of its tenant counts. Returns whether it counts. If it
    /// needs a place in the file, it queries the driver, with no lock held, and waits briefly for other processes.
    fn count(&self, process: &dyn Counted) -> Result<bool, RunDirError> {
        let budgets = self.budgets.as_ref();
        let has_place = lock(&self.share).as_ref().map(|share| share.is_named());
        if has_place.unwrap_or_else(|| budgets.is_none() && !others_count(process)) {
            return Ok(has_place.is_some());
        }
        let gpus = self.gpus(process);
        let mut present = lock(&self.share);
        if let Some(share) = &*present {
            if !share.is_named() {
                self.count_again(process, share, &gpus)?;
            }
            return Ok(true);
        }
        let Some((file, slot)) = BudgetFile::join(process.presence().dir(), budgets)? else {
            return Ok(false);
        };
        let places = places_in(&file, &gpus)?;
        let share = Arc::new(Share {
            tenant: process.presence().tenant().clone(),
            held: places.iter().map(|_| AtomicU64::new(0)).collect(),
            seat: RwLock::new(Seat { file, slot, places }),
            turn: Mutex::default(),
            said: AtomicU64::new(0),
        });
        if process.count_against(Arc::clone(&share) as Arc<dyn Account>) {
            *present = Some(share);
        }
        Ok(present.is_some())
    }

    /// Counts in a new file, because somebody has removed or shortened the old one. Joining processes would not find the old
    /// file, nor would a command that changes budgets. If the budgets are lost, those from this process's start apply.
    fn count_again(
        &self,
        process: &dyn Counted,
        share: &Share,
        gpus: &[Option<Gpu>],
    ) -> Result<(), RunDirError> {
        let found = share.seat().file.budgets();
        let budgets = found.or_else(|error| self.budgets.clone().ok_or(error))?;
        let Some((file, slot)) = BudgetFile::join(process.presence().dir(), Some(&budgets))? else {
            return Ok(());
        };
        if file.budgets()?.is_empty() {
            // The process that created the file knew no budgets.
            file.change(&budgets)?;
        }
        let places = places_in(&file, gpus)?;
        share.move_to(Seat { file, slot, places });
        process.notes().add(
            "the file of the tenant's budgets had been removed or made shorter, and was made again"
                .to_owned(),
        );
        Ok(())
    }

    /// Returns the devices of this process, by ordinal, as far as the driver identifies them.
    fn gpus(&self, process: &dyn Counted) -> Vec<Option<Gpu>> {
        let figure = Figure { budget_bytes: None, held_bytes: 0 };
        let gpu = |(device, known): (DeviceOrdinal, Option<_>)| {
            let (uuid, address) = known?;
            let index = (self.gpu_index)(device, address);
            let total_bytes = (self.device_bytes)(device);
            Some(Gpu { uuid, index, total_bytes, figure })
        };
        (0..).map(DeviceOrdinal).zip(process.gpus()).map(gpu).collect()
    }

    /// Adds a note if this process was given other budgets than its tenant has. Those of the first process apply, or their later
    /// changes.
    fn note_other_budgets(&self, process: &dyn Counted) {
        let Some(wanted) = &self.budgets else { return };
        let file = BudgetFile::existing(process.presence().dir()).ok().flatten();
        let found = file.and_then(|file| file.budgets().ok());
        if let Some(found) = found.filter(|found| found != wanted) {
            let tenant = process.presence().tenant();
            tracing::info!(%tenant, %found, %wanted, "the tenant's budgets are others by now");
        }
    }
}
