//! This process's part in what its tenant holds on each GPU, and may.
//!
//! Memory that is away does not count. A whole resume takes its room whether it fits or not, for it was within the
//! budget when it left. A resume by tag is refused if it does not fit. Imports count at their owner. Counting begins at
//! joining, if budgets are given or others count, or when `sublet budget` asks. When counting begins, the memory that
//! is there already is charged.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use vmm_pool::Pool;
use vmm_pool::budget::{Account, Entry, Figure, Gpu, OverBudget, Shared};
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid, Driver};
use vmm_pool::sync::lock;

use super::failures::PID;
use super::{notes::Notes, presence::Presence};
use sublet_protocol::error_text::chain;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{self, BudgetFile, RunDirError};
use sublet_protocol::wire::{FailureKind, Reply};

/// The memory that this process holds, counted in the tenant's file. The share lives as long as the process.
#[derive(Debug)]
struct Share {
    tenant: TenantName,
    /// The slot where the memory is counted. It changes when the file has been removed. A leaf, held for moments.
    seat: RwLock<Seat>,
    /// Bytes that this process holds of each device that is counted. It says them in the next file.
    held: Vec<AtomicU64>,
    /// The turn among threads that take memory, since one slot asks for one thing at a time. A leaf, held for moments.
    turn: Mutex<()>,
    /// Devices on which something was refused, as bits.
    said: AtomicU64,
}

/// A slot in a file.
#[derive(Debug)]
struct Seat {
    file: BudgetFile,
    slot: usize,
    /// The place where each device of this process is counted, by its ordinal.
    places: Vec<Option<usize>>,
}

impl Seat {
    fn place(&self, device: usize) -> Option<usize> {
        self.places.get(device).copied().flatten()
    }

    /// The count of all; none where somebody has made the file shorter, until there is another one.
    fn shared(&self) -> Option<&Shared> {
        self.file.is_whole().then(|| self.file.shared())
    }
}

impl Share {
    fn seat(&self) -> RwLockReadGuard<'_, Seat> {
        self.seat.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is the file where processes look for it that join?
    fn is_named(&self) -> bool {
        self.seat().file.is_named()
    }

    /// Takes another seat, in a file that has come in the place of the one before.
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

    /// Says once for each GPU what was refused.
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

/// The place of a device is the device itself, since it is counted in another file when the tenant's has been removed.
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

/// The place of each of `gpus` in a file.
fn places_in(file: &BudgetFile, gpus: &[Option<Gpu>]) -> Result<Vec<Option<usize>>, RunDirError> {
    let known: Vec<Gpu> = gpus.iter().flatten().copied().collect();
    let mut places = file.places(&known)?.into_iter();
    let place = |gpu: &Option<Gpu>| gpu.as_ref().and_then(|_| places.next().flatten());
    Ok(gpus.iter().map(place).collect())
}

/// This process's share of the tenant's budgets, if it counts. Its lock is held while it begins to count, which waits for
/// other processes.
#[derive(Debug)]
pub struct Counting<D: Driver> {
    pool: Arc<Pool<D>>,
    presence: Arc<Presence>,
    notes: Arc<Notes>,
    share: Mutex<Option<Arc<Share>>>,
}

impl<D: Driver> Counting<D> {
    pub(super) fn new(pool: Arc<Pool<D>>, presence: Arc<Presence>, notes: Arc<Notes>) -> Self {
        Self { pool, presence, notes, share: Mutex::default() }
    }

    /// Counts from its first allocation on, where budgets are given or others of its tenant count.
    pub(super) fn begin(&self) {
        match self.count() {
            Ok(true) => self.note_other_budgets(),
            Ok(false) => {}
            Err(error) => {
                let budgets = self.presence.config().budgets.as_ref().map(ToString::to_string);
                let budgets = budgets.unwrap_or_default();
                self.notes.add(format!("no budget is kept to ({budgets}): {error}"));
            }
        }
    }

    /// Counts what this process holds, from now on and for good, where anybody of its tenant does. Says whether it does.
    /// Asks the driver, with no lock held, where it has a place to take; waits for other processes for moments.
    fn count(&self) -> Result<bool, RunDirError> {
        let budgets = self.presence.config().budgets.as_ref();
        let has_place = lock(&self.share).as_ref().map(|share| share.is_named());
        if has_place.unwrap_or_else(|| budgets.is_none() && !self.others_count()) {
            return Ok(has_place.is_some());
        }
        let gpus = self.gpus();
        let mut present = lock(&self.share);
        if let Some(share) = &*present {
            if !share.is_named() {
                self.count_again(share, &gpus)?;
            }
            return Ok(true);
        }
        let Some((file, slot)) = BudgetFile::join(self.presence.dir(), budgets)? else {
            return Ok(false);
        };
        let places = places_in(&file, &gpus)?;
        let share = Arc::new(Share {
            tenant: self.presence.tenant().clone(),
            held: places.iter().map(|_| AtomicU64::new(0)).collect(),
            seat: RwLock::new(Seat { file, slot, places }),
            turn: Mutex::default(),
            said: AtomicU64::new(0),
        });
        if self.pool.count_against(Arc::clone(&share) as Arc<dyn Account>) {
            *present = Some(share);
        }
        Ok(present.is_some())
    }

    /// Somebody has removed the file in which this process counts, or made it shorter: those that join would not find it, nor would a
    /// command that changes budgets. What is not there any more says no budgets; those that this process was started with count then.
    fn count_again(&self, share: &Share, gpus: &[Option<Gpu>]) -> Result<(), RunDirError> {
        let found = share.seat().file.budgets();
        let budgets = found.or_else(|error| self.presence.config().budgets.clone().ok_or(error))?;
        let Some((file, slot)) = BudgetFile::join(self.presence.dir(), Some(&budgets))? else {
            return Ok(());
        };
        if file.budgets()?.is_empty() {
            // The process that made it knew of none.
            file.change(&budgets)?;
        }
        let places = places_in(&file, gpus)?;
        share.move_to(Seat { file, slot, places });
        self.notes.add(
            "the file of the tenant's budgets had been removed or made shorter, and was made again"
                .to_owned(),
        );
        Ok(())
    }

    /// Is there a file of the tenant's budgets that this process is to count in, and does not; or none, and it does? Does not block.
    pub(super) fn is_due(&self) -> bool {
        self.share.try_lock().is_ok_and(|share| {
            share.as_ref().map_or_else(|| self.others_count(), |share| !share.is_named())
        })
    }

    fn others_count(&self) -> bool {
        run_dir::may_count(self.presence.run_dir().path(), self.presence.tenant())
    }

    /// Does this process count what it holds? Not while it begins to; does not block.
    pub fn is_on(&self) -> bool {
        self.share.try_lock().is_ok_and(|share| share.is_some())
    }

    /// Returns the tenant's figure for a GPU: what it may hold, and what it holds. None where this process does not
    /// count, or does not see that GPU. Asks the driver for its devices' identities.
    pub fn figure_of(&self, uuid: DeviceUuid) -> Option<Figure> {
        if !self.is_on() {
            return None;
        }
        let driver = self.pool.driver();
        let count = driver.device_count().ok()?;
        let is_it = |device: &DeviceOrdinal| driver.device_uuid(*device) == Ok(uuid);
        let device = (0..count).map(DeviceOrdinal).find(is_it)?;
        self.pool.budget().figure(device)
    }

    /// See [`sublet_protocol::wire::Count`].
    pub(super) fn run(&self) -> Reply {
        match self.count() {
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

    /// The devices of this process, by their ordinals, as far as the driver says which they are.
    fn gpus(&self) -> Vec<Option<Gpu>> {
        let driver = self.pool.driver();
        let count = driver.device_count().unwrap_or(0);
        let gpu = |ordinal: i32| {
            let device = DeviceOrdinal(ordinal);
            let uuid = driver.device_uuid(device).ok()?;
            let index =
                (self.presence.config().gpu_index)(device, self.pool.devices().pci_address(device));
            let total_bytes = (self.presence.config().device_bytes)(device);
            let figure = Figure { budget_bytes: None, held_bytes: 0 };
            Some(Gpu { uuid, index, total_bytes, figure })
        };
        (0..count).map(gpu).collect()
    }

    /// The tenant's budgets are those of its first process, or what they were changed to since.
    fn note_other_budgets(&self) {
        let Some(wanted) = &self.presence.config().budgets else { return };
        let file = BudgetFile::existing(self.presence.dir()).ok().flatten();
        let found = file.and_then(|file| file.budgets().ok());
        if let Some(found) = found.filter(|found| found != wanted) {
            let tenant = self.presence.tenant();
            tracing::info!(%tenant, %found, %wanted, "the tenant's budgets are others by now");
        }
    }
}
