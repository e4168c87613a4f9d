//! The slots of a tenant's processes, in a file that all of them have mapped.
//!
//! ```text
//! 0                 what the file is
//! 8                 how many slots have ever been used
//! 16                how many GPUs are known
//! 64                GPUs: identity (16 bytes), budget, index + 1, total; 40 bytes each
//! 4096 .. 8192      for the owner of the file: not mapped memory's business
//! 8192              for each GPU all slots, 16 bytes each
//! ```
//!
//! The file belongs to the caller: this module does not name it, lock it, or assign slots.

#![expect(unsafe_code, reason = "reads and writes memory that other processes share")]

use std::ffi::c_void;
use std::fs::File;
use std::io;

use memmap2::MmapRaw;

use sublet_sync::sync::{AtomicU64, Ordering};
use vmm_pool::budget::{Figure, OverBudget};
use vmm_pool::driver::DeviceUuid;

use super::slots::{self, Full, Slot};

/// The most GPUs for which a tenant can have budgets.
pub(crate) const GPUS_MAX: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"sublet\x01b");
const MAGIC_AT: usize = 0;
const SLOTS_USED_AT: usize = 8;
const GPUS_USED_AT: usize = 16;
const GPUS_AT: usize = 64;
const GPU_BYTES: usize = 40;
const SLOTS_AT: usize = 8192;
const NO_BUDGET: u64 = u64::MAX;

/// A GPU that some process of the tenant has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Its identity, from the driver.
    pub(crate) uuid: DeviceUuid,
    /// Its number on this machine, if it is known.
    pub(crate) index: Option<u32>,
    /// Its total memory, in bytes; 0 if it is not known.
    pub(crate) total_bytes: u64,
    /// The budget of the tenant on this GPU, and the amount it holds there.
    pub(crate) figure: Figure,
}

/// The mapped file. Every access is atomic, so no write of another process can cause a data race here.
#[derive(Debug)]
pub(crate) struct Shared {
    map: MmapRaw,
}

impl Shared {
    /// The most slots, and so processes, of one tenant.
    pub(crate) const SLOTS_MAX: usize = 1024;
    /// The part of the file that is left to the caller: offset and size in bytes.
    pub(crate) const CALLERS: (u64, usize) = (4096, 4096);
    /// The size that the file must have, in bytes. All of it must have disk space: a write to a page without disk space kills the
    /// process.
    pub(crate) const BYTES: usize = SLOTS_AT + GPUS_MAX * Self::SLOTS_MAX * size_of::<Slot>();

    /// Maps `file`.
    ///
    /// # Errors
    /// The error of the system; `InvalidData` where the file is too short.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() < Self::BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { map: memmap2::MmapOptions::new().len(Self::BYTES).map_raw(file)? })
    }

    /// Was this file set up by [`Shared::begin`]?
    pub(crate) fn is_begun(&self) -> bool {
        self.word(MAGIC_AT).load(Ordering::SeqCst) == MAGIC
    }

    /// Sets up a new file, which no other process has open.
    pub(crate) fn begin(&self) {
        self.word(MAGIC_AT).store(MAGIC, Ordering::SeqCst);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let at = at.min(Self::BYTES - 8) & !7;
        // SAFETY: inside the mapping, which has `BYTES`.
        let pointer = unsafe { self.map.as_mut_ptr().add(at) };
        // SAFETY: the mapping begins at a page and `at` is a multiple of 8; it lives as long as `self`, and every access to
        // it, in any process, is atomic.
        unsafe { AtomicU64::from_ptr(pointer.cast()) }
    }

    fn all_slots(&self, gpu: usize) -> &[Slot] {
        let at = SLOTS_AT + gpu.min(GPUS_MAX - 1) * Self::SLOTS_MAX * size_of::<Slot>();
        // SAFETY: inside the mapping, which has `BYTES`.
        let pointer: *const c_void = unsafe { self.map.as_mut_ptr().add(at) }.cast();
        // SAFETY: `SLOTS_MAX` slots of that GPU, each two atomic words, aligned to 16 bytes in a mapping that lives as long
        // as `self`.
        unsafe { std::slice::from_raw_parts(pointer.cast::<Slot>(), Self::SLOTS_MAX) }
    }

    /// Returns the slots of one GPU that were ever used.
    fn slots(&self, gpu: usize) -> &[Slot] {
        let slots = self.all_slots(gpu);
        &slots[..self.slots_used().min(slots.len())]
    }

    /// Returns the number of slots that have ever been used.
    pub(crate) fn slots_used(&self) -> usize {
        let used = self.word(SLOTS_USED_AT).load(Ordering::SeqCst);
        usize::try_from(used).unwrap_or(Self::SLOTS_MAX).min(Self::SLOTS_MAX)
    }

    /// Gives `slot` to a process, and clears the memory of its last owner. Called under the lock of the caller's file.
    pub(crate) fn open_slot(&self, slot: usize) {
        self.clear_slot(slot);
        self.word(SLOTS_USED_AT).fetch_max(slot as u64 + 1, Ordering::SeqCst);
    }

    /// Does `slot` hold or request memory on any GPU?
    pub(crate) fn is_slot_used(&self, slot: usize) -> bool {
        let mut of_gpus = (0..self.gpus_used()).filter_map(|gpu| self.all_slots(gpu).get(slot));
        of_gpus.any(slots::is_used)
    }

    /// Clears the slot of a process that has ended.
    pub(crate) fn clear_slot(&self, slot: usize) {
        for gpu in 0..self.gpus_used() {
            self.all_slots(gpu).get(slot).into_iter().for_each(slots::clear);
        }
    }

    fn gpus_used(&self) -> usize {
        let used = self.word(GPUS_USED_AT).load(Ordering::SeqCst);
        usize::try_from(used).unwrap_or(GPUS_MAX).min(GPUS_MAX)
    }

    /// Returns the known GPUs, in the order of their places.
    pub(crate) fn gpus(&self) -> Vec<Gpu> {
        (0..self.gpus_used()).map(|gpu| self.gpu(gpu)).collect()
    }

    fn gpu(&self, gpu: usize) -> Gpu {
        let at = GPUS_AT + gpu * GPU_BYTES;
        let word = |index: usize| self.word(at + 8 * index).load(Ordering::SeqCst);
        let uuid = (u128::from(word(0)) << 64) | u128::from(word(1));
        Gpu {
            uuid: DeviceUuid(uuid.to_be_bytes()),
            index: word(3).checked_sub(1).and_then(|index| u32::try_from(index).ok()),
            total_bytes: word(4),
            figure: self.figure(gpu),
        }
    }

    /// Returns the place of a GPU.
    pub(crate) fn find(&self, uuid: DeviceUuid) -> Option<usize> {
        self.gpus().iter().position(|gpu| gpu.uuid == uuid)
    }

    /// Adds a GPU and returns its place; `None` if there is no room. Called under the lock of the caller's file.
    pub(crate) fn add(&self, gpu: &Gpu) -> Option<usize> {
        let place = self.gpus_used();
        if place >= GPUS_MAX {
            return None;
        }
        let at = GPUS_AT + place * GPU_BYTES;
        let put = |index: usize, value: u64| {
            self.word(at + 8 * index).store(value, Ordering::SeqCst);
        };
        let uuid = u128::from_be_bytes(gpu.uuid.0);
        let [high, low] = [uuid >> 64, uuid & u128::from(u64::MAX)];
        put(0, u64::try_from(high).unwrap_or_default());
        put(1, u64::try_from(low).unwrap_or_default());
        put(3, gpu.index.map_or(0, |index| u64::from(index) + 1));
        put(4, gpu.total_bytes);
        self.set_budget(place, gpu.figure.budget_bytes);
        self.word(GPUS_USED_AT).store(place as u64 + 1, Ordering::SeqCst);
        Some(place)
    }

    /// Sets the budget, in bytes, of the GPU at place `gpu`. Memory that is held already stays.
    pub(crate) fn set_budget(&self, gpu: usize, budget_bytes: Option<u64>) {
        let value = budget_bytes.unwrap_or(NO_BUDGET);
        self.word(GPUS_AT + gpu * GPU_BYTES + 16).store(value, Ordering::SeqCst);
    }

    fn budget(&self, gpu: usize) -> u64 {
        self.word(GPUS_AT + gpu * GPU_BYTES + 16).load(Ordering::SeqCst)
    }

    /// Returns the budget of the GPU at `gpu`, and the amount held on it.
    pub(crate) fn figure(&self, gpu: usize) -> Figure {
        let budget_bytes = self.budget(gpu);
        Figure {
            budget_bytes: (budget_bytes != NO_BUDGET).then_some(budget_bytes),
            held_bytes: slots::held_bytes(self.slots(gpu)),
        }
    }

    /// Takes `size_bytes` for `slot` if they fit. Only one thread of a process may call this at a time.
    ///
    /// # Errors
    /// [`OverBudget`]; nothing is taken.
    pub(crate) fn take(&self, gpu: usize, slot: usize, size_bytes: u64) -> Result<(), OverBudget> {
        let budget_bytes = self.budget(gpu);
        if budget_bytes == NO_BUDGET {
            self.take_anyway(gpu, slot, size_bytes);
            return Ok(());
        }
        let over = |Full { held_bytes }| OverBudget { budget_bytes, held_bytes };
        slots::take(self.slots(gpu), slot, size_bytes, budget_bytes).map_err(over)
    }

    /// Takes `size_bytes` as [`Shared::take`] does, whether they fit or not.
    pub(crate) fn take_anyway(&self, gpu: usize, slot: usize, size_bytes: u64) {
        slots::take_anyway(self.slots(gpu), slot, size_bytes);
    }

    /// Returns bytes that `slot` has taken.
    pub(crate) fn give_back(&self, gpu: usize, slot: usize, size_bytes: u64) {
        slots::give_back(self.slots(gpu), slot, size_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> (File, Shared) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(Shared::BYTES as u64).unwrap();
        let shared = Shared::map(&file).unwrap();
        assert!(!shared.is_begun());
        shared.begin();
        (file, shared)
    }

    fn gpu(last: u8, budget_bytes: Option<u64>) -> Gpu {
        let mut uuid = [0x9f; 16];
        uuid[15] = last;
        let figure = Figure { budget_bytes, held_bytes: 0 };
        Gpu { uuid: DeviceUuid(uuid), index: Some(u32::from(last)), total_bytes: 80, figure }
    }

    #[test]
    fn what_one_process_writes_another_reads() {
        let (file, one) = shared();
        let other = Shared::map(&file).unwrap();
        assert!(other.is_begun());
        assert_eq!(one.add(&gpu(0, Some(50))), Some(0));
        assert_eq!(one.add(&gpu(1, None)), Some(1));
        assert_eq!(other.gpus(), [gpu(0, Some(50)), gpu(1, None)]);
        assert_eq!(other.find(gpu(1, None).uuid), Some(1));
        assert_eq!(other.find(DeviceUuid([0; 16])), None);
        one.open_slot(0);
        other.open_slot(1);
        one.take(0, 0, 30).unwrap();
        let over = OverBudget { budget_bytes: 50, held_bytes: 30 };
        assert_eq!(other.take(0, 1, 21), Err(over));
        other.take(0, 1, 20).unwrap();
        other.take(1, 1, 1 << 40).unwrap();
        assert_eq!(one.figure(0), Figure { budget_bytes: Some(50), held_bytes: 50 });
        assert_eq!(one.figure(1), Figure { budget_bytes: None, held_bytes: 1 << 40 });
        one.set_budget(0, Some(10));
        assert!(other.take(0, 1, 1).is_err());
        assert!(one.is_slot_used(1));
        one.clear_slot(1);
        assert!(!one.is_slot_used(1));
        assert_eq!(other.figure(0).held_bytes, 30);
    }

    #[test]
    fn a_file_that_is_too_short_is_refused_and_places_are_bounded() {
        let file = tempfile::tempfile().unwrap();
        let refused = Shared::map(&file).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        let (_file, shared) = shared();
        for last in 0..GPUS_MAX {
            assert_eq!(shared.add(&gpu(u8::try_from(last).unwrap(), None)), Some(last));
        }
        assert_eq!(shared.add(&gpu(200, None)), None);
        shared.open_slot(Shared::SLOTS_MAX - 1);
        shared.take(GPUS_MAX - 1, Shared::SLOTS_MAX - 1, 5).unwrap();
        assert_eq!(shared.figure(GPUS_MAX - 1).held_bytes, 5);
        shared.give_back(GPUS_MAX - 1, Shared::SLOTS_MAX - 1, 5);
        assert_eq!(shared.figure(GPUS_MAX - 1).held_bytes, 0);
    }

    #[test]
    #[ignore = "a measurement, in a release build: cargo test -p sublet-budgets --release taking_and_giving -- --ignored --nocapture"]
    #[expect(clippy::print_stdout, reason = "prints what it measures")]
    fn what_taking_and_giving_back_costs() {
        const TURNS: u32 = 1_000_000;
        for processes in [1, 8, 64] {
            let (_file, shared) = shared();
            shared.add(&gpu(0, Some(1 << 40)));
            (0..processes).for_each(|slot| shared.open_slot(slot));
            let started = std::time::Instant::now();
            for _ in 0..TURNS {
                shared.take(0, 0, 2 << 20).unwrap();
                shared.give_back(0, 0, 2 << 20);
            }
            println!("{processes} slots: {:?} a pair", started.elapsed() / TURNS);
        }
    }
}
