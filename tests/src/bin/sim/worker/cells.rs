//! A library's own small allocations, as NCCL makes and frees them: parts of slabs, where this process has those, and allocations
//! of their own where not. What is in them is compared as everything else.

use std::sync::Arc;

use fastrand::Rng;
use sublet_suballoc::Slabs;
use sublet_tests::{Outcome, Trouble};
use vmm_pool::driver::sim::GRANULARITY_BYTES;
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::gate::Passage;
use vmm_pool::{Class, Contents, LIBRARY_TAGS, NewMemory, PoolError, PoolReport, VirtualHandle};

use super::calls::{device_refused, fired, insist, judged};
use super::memory::Paint;
use super::{Charter, Sim, memory};

/// So many together at most.
const CELLS_MAX: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Cell {
    handle: VirtualHandle,
    range: VaRange,
    device: DeviceOrdinal,
    pattern: u64,
}

fn class() -> Class {
    Class { library: "nccl", tag: LIBRARY_TAGS[0].to_owned(), contents: Contents::Keep }
}

/// See the head of this module.
pub(super) struct Cells {
    member: Arc<Sim>,
    slabs: Arc<Slabs>,
    random: Rng,
    devices: Vec<DeviceOrdinal>,
    list: Vec<Cell>,
    number: u64,
    patterns: u64,
    is_used: bool,
}

/// What is held by cells.
pub(super) struct CellAccount {
    /// Mappings; more may be there once the driver has refused something.
    pub(super) places: usize,
    pub(super) is_exact: bool,
}

impl Cells {
    /// Half of the processes that keep contents have some, and three in four of these slabs.
    pub(super) fn new(member: Arc<Sim>, charter: &Charter) -> Self {
        let mut random = Rng::with_seed(charter.seed ^ 0xce11);
        let is_used = charter.is_keeper && random.bool();
        let slabs = Arc::<Slabs>::default();
        slabs.use_slabs(random.u8(..4) > 0);
        member.pool().set_front(Arc::clone(&slabs) as _);
        let devices = charter.devices.iter().map(|device| DeviceOrdinal(*device)).collect();
        let number = charter.number;
        Self { member, slabs, random, devices, list: Vec::new(), number, patterns: 0, is_used }
    }

    pub(super) fn wants_a_change(&mut self) -> bool {
        self.is_used && self.random.u8(..4) == 0
    }

    /// Does something random; says whether the driver let it.
    pub(super) fn change(&mut self) -> Outcome<bool> {
        let any = (!self.list.is_empty()).then(|| self.random.usize(..self.list.len()));
        match (self.random.u8(..12), any) {
            (0..6, _) if self.list.len() < CELLS_MAX => self.allocate(),
            (0..8, Some(index)) => self.free_one(index).map(|()| true),
            (8..10, Some(index)) => self.renew(index),
            (10, Some(index)) => self.rewrite(index).map(|()| true),
            (11, _) => {
                // As a library that is loaded again with another setting: those that are stay as they are.
                self.slabs.use_slabs(!self.slabs.uses_slabs());
                Ok(true)
            }
            _ => Ok(true),
        }
    }

    fn create(&self, bytes: u64, device: DeviceOrdinal) -> Outcome<Option<VirtualHandle>> {
        let before = fired(&self.member);
        let prop = AllocationProp::pinned_on(device);
        let new = NewMemory { size_bytes: bytes, prop, class: class(), is_alone: false };
        let made = self.member.pool().front().create(&self.member.pool().enter(), new);
        judged(&self.member, before, made)
    }

    /// Create, reserve, map, give access.
    fn allocate(&mut self) -> Outcome<bool> {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let bytes = self.random.u64(1..=2) * GRANULARITY_BYTES;
        let device = self.devices[self.random.usize(..self.devices.len())];
        let Some(handle) = self.create(bytes, device)? else {
            return Ok(false);
        };
        let range = self.addresses(bytes)?;
        self.enter(handle, range, device)
    }

    /// Its own, or the driver's.
    fn addresses(&self, bytes: u64) -> Outcome<VaRange> {
        let pool = self.member.pool();
        let own =
            pool.front().take_addresses(&pool.enter(), bytes, GRANULARITY_BYTES, LIBRARY_TAGS[0]);
        let of_driver = || pool.driver().core().reserve(bytes, 0, DeviceAddress(0));
        let start = own.map_or_else(of_driver, Ok).map_err(device_refused)?;
        Ok(VaRange::new(start, bytes))
    }

    /// Maps what is new, which must be empty, and writes it. Nothing is left where that is refused.
    fn enter(
        &mut self,
        handle: VirtualHandle,
        range: VaRange,
        device: DeviceOrdinal,
    ) -> Outcome<bool> {
        let pool = Arc::clone(self.member.pool());
        let before = fired(&self.member);
        let mapped = pool.front().map(&pool.enter(), range, 0, handle);
        if judged(&self.member, before, mapped)?.is_none() {
            self.release(handle)?;
            self.free_addresses(range)?;
            return Ok(false);
        }
        let access = [AccessDesc::read_write(device)];
        let allowed = pool.front().set_access(&pool.enter(), range, &access);
        if judged(&self.member, before, allowed)?.is_none() {
            self.give_up(Cell { handle, range, device, pattern: 0 })?;
            return Ok(false);
        }
        let core = self.member.pool().driver().core();
        if !core.is_clear(device, range).map_err(device_refused)? {
            return Err(Trouble::new(format!("new memory at {range:?} is not empty")));
        }
        self.list.push(Cell { handle, range, device, pattern: 0 });
        self.rewrite(self.list.len() - 1)?;
        Ok(true)
    }

    fn holds(&self, device: DeviceOrdinal, range: VaRange, pattern: u64) -> Outcome<bool> {
        let driver = self.member.pool().driver();
        memory::holds(driver, device, range, Paint::plain(pattern)).map_err(device_refused)
    }

    fn rewrite(&mut self, index: usize) -> Outcome {
        self.patterns += 1;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let cell = &mut self.list[index];
        cell.pattern = (self.number << 32) | (1 << 30) | self.patterns;
        let paint = Paint::plain(cell.pattern);
        memory::write(member.pool().driver(), cell.device, cell.range, paint)
            .map_err(device_refused)
    }

    /// Also possible while the tenant stands paused.
    fn free_one(&mut self, index: usize) -> Outcome {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        let cell = self.list.swap_remove(index);
        // As NCCL does, which keeps addresses alone.
        let pool = member.pool();
        let before = fired(&member);
        let retained = pool.front().retain_at(&pool.enter_giving_up(), cell.range.start);
        if let Some(handle) = judged(&member, before, retained)? {
            self.release(handle)?;
        }
        self.give_up(cell)
    }

    /// Its memory goes, and new memory comes at the same addresses, as `ncclCommSuspend` and `ncclCommResume` have it.
    fn renew(&mut self, index: usize) -> Outcome<bool> {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let Cell { handle, range, device, .. } = self.list.swap_remove(index);
        insist(&member, || member.pool().front().unmap(&member.pool().enter_giving_up(), range))?;
        self.release(handle)?;
        let Some(handle) = self.create(range.size_bytes, device)? else {
            self.free_addresses(range)?;
            return Ok(false);
        };
        self.enter(handle, range, device)
    }

    fn give_up(&self, cell: Cell) -> Outcome {
        let pool = self.member.pool();
        insist(&self.member, || pool.front().unmap(&pool.enter_giving_up(), cell.range))?;
        self.release(cell.handle)?;
        self.free_addresses(cell.range)
    }

    fn release(&self, handle: VirtualHandle) -> Outcome {
        let before = fired(&self.member);
        let released =
            self.member.pool().front().release(&self.member.pool().enter_giving_up(), handle);
        judged(&self.member, before, released).map(drop)
    }

    fn free_addresses(&self, range: VaRange) -> Outcome {
        let pool = self.member.pool();
        let before = fired(&self.member);
        match pool.front().free_addresses(&pool.enter_giving_up(), range) {
            Err(PoolError::NotOurs) => {
                pool.driver().core().free_addresses(range).map_err(device_refused)
            }
            freed => judged(&self.member, before, freed).map(drop),
        }
    }

    /// Compares all of them, and what the pool has on record for them. Adds what was compared.
    pub(super) fn check(
        &self,
        report: &PoolReport,
        checked_bytes: &mut u64,
    ) -> Outcome<CellAccount> {
        for cell in &self.list {
            if !self.holds(cell.device, cell.range, cell.pattern)? {
                return Err(Trouble::new(format!("another pattern in {cell:?}")));
            }
            *checked_bytes += cell.range.size_bytes;
        }
        self.account(report)
    }

    /// What the pool has on record for them.
    fn account(&self, report: &PoolReport) -> Outcome<CellAccount> {
        let slabs = &report.slabs;
        let held: u64 = self.list.iter().map(|cell| cell.range.size_bytes).sum();
        let own = own_bytes(report);
        let is_exact = !self.is_used || fired(&self.member) == 0;
        let wanted = held + slabs.slab_bytes - slabs.live_bytes;
        let parts = usize::try_from(slabs.cells)?;
        if parts > self.list.len() || own < wanted || (is_exact && own != wanted) {
            return Err(Trouble::new(format!(
                "{} cells of {held} bytes are held, and {own} bytes are on record: {slabs:?}",
                self.list.len()
            )));
        }
        let places = usize::try_from(slabs.slabs)? + self.list.len() - parts;
        Ok(CellAccount { places, is_exact })
    }

    /// Lets everything go.
    pub(super) fn free_all(&mut self) -> Outcome {
        while !self.list.is_empty() {
            self.free_one(0)?;
        }
        Ok(())
    }
}

/// Own bytes of the library, slabs and others.
pub(super) fn own_bytes(report: &PoolReport) -> u64 {
    report.devices.iter().map(own_bytes_on).sum()
}

/// The same on one device.
pub(super) fn own_bytes_on(row: &vmm_pool::DeviceReport) -> u64 {
    let own = row.classes.iter().filter(|class| class.tag == LIBRARY_TAGS[0]);
    own.map(|class| class.own_bytes).sum()
}
