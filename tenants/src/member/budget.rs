//! This process's part in what its tenant holds on each GPU, and may.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_pool::budget::{Account, Figure, Gpu, OverBudget, Place};
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid, Driver};

use super::Member;
use crate::descriptors::Noted;
use crate::error_text::chain;
use crate::identity::TenantName;
use crate::run_dir::{BudgetFile, RunDirError, locks};
use crate::wire::{Failure, FailureKind, Reply};

/// A slot in the tenant's file. It lives as long as the process.
#[derive(Debug)]
struct Share {
    tenant: TenantName,
    /// For a forked child to close. Goes before the file does.
    _noted: Noted,
    file: BudgetFile,
    slot: usize,
    /// Where each device of this process is counted, by its ordinal.
    places: Vec<Option<usize>>,
    /// Whose turn it is among threads that take: one slot asks for one thing at a time. A leaf; held for moments.
    turn: Mutex<()>,
    /// Places at which something was refused, as bits.
    said: AtomicU64,
}

impl Share {
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, device: DeviceOrdinal) -> Option<usize> {
        self.places.get(usize::try_from(device.0).ok()?).copied().flatten()
    }

    /// Says once for each GPU what was refused.
    fn say(&self, place: usize, device: DeviceOrdinal, asked_bytes: u64, over: OverBudget) {
        let bit = 1_u64 << (place % 64);
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

impl Account for Share {
    fn take(&self, device: DeviceOrdinal, size_bytes: u64) -> Result<Option<Place>, OverBudget> {
        let Some(place) = self.place(device) else {
            return Ok(None);
        };
        let (shared, _turn) = (self.file.shared(), self.turn());
        let taken = shared.take(place, self.slot, size_bytes).or_else(|_| {
            self.file.forget_dead(Some(self.slot));
            shared.take(place, self.slot, size_bytes)
        });
        if let Err(over) = taken {
            self.say(place, device, size_bytes, over);
            return Err(over);
        }
        Ok(Some(Place(place)))
    }

    fn take_anyway(&self, device: DeviceOrdinal, size_bytes: u64) -> Option<Place> {
        let place = self.place(device)?;
        self.file.shared().take_anyway(place, self.slot, size_bytes);
        Some(Place(place))
    }

    fn give_back(&self, place: Place, size_bytes: u64) {
        self.file.shared().give_back(place.0, self.slot, size_bytes);
    }

    fn figure(&self, device: DeviceOrdinal) -> Option<Figure> {
        let place = self.place(device)?;
        let _turn = self.turn();
        self.file.forget_dead(Some(self.slot));
        Some(self.file.shared().figure(place))
    }
}

impl<D: Driver> Member<D> {
    /// Counts from its first allocation on, where budgets are given or others of its tenant count.
    pub(super) fn count_from_the_start(&self) {
        match self.count() {
            Ok(true) => self.note_other_budgets(),
            Ok(false) => {}
            Err(error) => {
                let budgets = self.config.budgets.as_ref().map(ToString::to_string);
                let budgets = budgets.unwrap_or_default();
                self.note(format!("no budget is kept to ({budgets}): {error}"));
            }
        }
    }

    /// Counts what this process holds, from now on and for good, where anybody of its tenant does. Says whether it does.
    /// Asks the driver; waits for other processes for moments.
    pub(super) fn count(&self) -> Result<bool, RunDirError> {
        let mut counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        if *counting {
            return Ok(true);
        }
        let Some((file, slot)) = BudgetFile::join(&self.dir, self.config.budgets.as_ref())? else {
            return Ok(false);
        };
        let places = self.places_in(&file)?;
        let share = Share {
            tenant: self.config.tenant.clone(),
            _noted: locks::HELD.note(file.file()),
            file,
            slot,
            places,
            turn: Mutex::default(),
            said: AtomicU64::new(0),
        };
        *counting = self.pool.count_against(Arc::new(share));
        Ok(*counting)
    }

    /// Does this process count what it holds? Not while it begins to; does not block.
    pub fn counts(&self) -> bool {
        self.counting.try_lock().is_ok_and(|counting| *counting)
    }

    /// What the tenant may hold of a GPU, and holds. None where this process does not count, or does not see that GPU. Asks the
    /// driver for its devices' identities.
    pub fn figure_of(&self, uuid: DeviceUuid) -> Option<Figure> {
        if !self.counts() {
            return None;
        }
        let driver = self.pool.driver();
        let count = driver.device_count().ok()?;
        let is_it = |device: &DeviceOrdinal| driver.device_uuid(*device) == Ok(uuid);
        let device = (0..count).map(DeviceOrdinal).find(is_it)?;
        self.pool.budget_figure(device)
    }

    /// See [`crate::wire::Count`].
    pub(super) fn run_count(&self) -> Reply {
        match self.count() {
            Ok(true) => Reply::Counts,
            Ok(false) => Reply::Failed(Failure {
                kind: FailureKind::Unknown,
                message: format!("process {}: nobody counts in its tenant", std::process::id()),
            }),
            Err(error) => Reply::Failed(Failure {
                kind: FailureKind::Driver,
                message: format!("process {}: {}", std::process::id(), chain(&error)),
            }),
        }
    }

    fn places_in(&self, file: &BudgetFile) -> Result<Vec<Option<usize>>, RunDirError> {
        let driver = self.pool.driver();
        let count = driver.device_count().unwrap_or(0);
        let gpu = |ordinal: i32| {
            let device = DeviceOrdinal(ordinal);
            let uuid = driver.device_uuid(device).ok()?;
            let index = (self.config.gpu_index)(device, self.pool.pci_address(device));
            let total_bytes = (self.config.device_bytes)(device);
            let figure = Figure { budget_bytes: None, held_bytes: 0 };
            Some(Gpu { uuid, index, total_bytes, figure })
        };
        let gpus: Vec<Option<Gpu>> = (0..count).map(gpu).collect();
        let known: Vec<Gpu> = gpus.iter().flatten().copied().collect();
        let mut places = file.places(&known)?.into_iter();
        let place = |gpu: &Option<Gpu>| gpu.as_ref().and_then(|_| places.next().flatten());
        Ok(gpus.iter().map(place).collect())
    }

    /// The tenant's budgets are those of its first process, or what they were changed to since.
    fn note_other_budgets(&self) {
        let Some(wanted) = &self.config.budgets else { return };
        let found =
            BudgetFile::existing(&self.dir).ok().flatten().and_then(|file| file.budgets().ok());
        if let Some(found) = found.filter(|found| found != wanted) {
            tracing::info!(tenant = %self.config.tenant, %found, %wanted, "the tenant's budgets are others by now");
        }
    }
}
