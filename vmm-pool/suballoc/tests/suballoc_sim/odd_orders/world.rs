//! Two processes of one node, called as the library's hooks call.

use std::collections::BTreeSet;
use std::sync::Arc;

use sublet_suballoc::Slabs;
use vmm_pool::driver::sim::{SimDriver, SimOptions};
use vmm_pool::driver::{
    AccessDesc, DeviceAddress, DeviceOrdinal, Driver, DriverCode, Location, VaRange,
};
use vmm_pool::{
    AllocationId, Export, ImportSource, Known, PeerId, PoolError, PoolResult, StayReason,
    VirtualHandle,
};

use crate::slabbed::{nccl, reserved_range, right_at};
use crate::stage::{DEVICE, SimPool, UNLIMITED, WHOLE, node};

pub(super) fn device(other: bool) -> DeviceOrdinal {
    DeviceOrdinal(i32::from(other))
}

/// Two processes of one node.
#[derive(Debug)]
pub(super) struct World {
    pub(super) pools: [SimPool; 2],
}

/// The answer that a caller gets.
pub(super) type Heard<T> = Result<T, Option<DriverCode>>;

pub(super) fn heard<T>(outcome: PoolResult<T>) -> Heard<T> {
    outcome.map_err(|error| error.code())
}

impl World {
    pub(super) fn new(has_slabs: bool) -> Self {
        let node = node();
        let pools = [(); 2].map(|()| {
            let driver = SimDriver::new(node.clone(), SimOptions::default());
            driver.make_current(DEVICE).expect("device 0");
            // There is no host memory except that for contents.
            let pool = SimPool::new(Arc::new(driver), 0);
            let slabs = Arc::<Slabs>::default();
            slabs.use_slabs(has_slabs);
            assert!(pool.set_front(slabs as _));
            pool
        });
        Self { pools }
    }

    pub(super) fn reserve(&self, process: usize, size_bytes: u64) -> VaRange {
        let pool = &self.pools[process];
        let start = match pool.front().take_addresses(&pool.enter(), size_bytes, 0, "nccl") {
            Some(start) => start,
            None => pool.driver().reserve(size_bytes, 0, DeviceAddress(0)).expect("addresses"),
        };
        VaRange::new(start, size_bytes)
    }

    /// Frees addresses, as the hook does.
    pub(super) fn free(&self, process: usize, range: VaRange) -> Heard<()> {
        let pool = &self.pools[process];
        match pool.front().free_addresses(&pool.enter_giving_up(), range) {
            Err(PoolError::NotOurs) => pool.driver().free_addresses(range).map_err(Some),
            outcome => heard(outcome),
        }
    }

    pub(super) fn unmap(&self, process: usize, range: VaRange) -> Heard<()> {
        let pool = &self.pools[process];
        match pool.front().unmap(&pool.enter_giving_up(), range) {
            // The driver refuses this call, because it has nothing there.
            Err(PoolError::NotOurs) => Err(Some(DriverCode::INVALID_VALUE)),
            outcome => heard(outcome),
        }
    }

    pub(super) fn set_access(
        &self,
        process: usize,
        range: VaRange,
        access: AccessDesc,
    ) -> Heard<()> {
        match self.pools[process].front().set_access(&self.pools[process].enter(), range, &[access])
        {
            Err(PoolError::NotOurs) => Err(Some(DriverCode::INVALID_VALUE)),
            outcome => heard(outcome),
        }
    }

    pub(super) fn retain(&self, process: usize, address: DeviceAddress) -> Heard<VirtualHandle> {
        match self.pools[process].front().retain_at(&self.pools[process].enter_giving_up(), address)
        {
            Err(PoolError::NotOurs) => Err(Some(DriverCode::INVALID_VALUE)),
            outcome => heard(outcome),
        }
    }

    pub(super) fn import(&self, from: usize, to: usize, export: &Export) -> Heard<VirtualHandle> {
        let (owner, importer) = (&self.pools[from], &self.pools[to]);
        let held = |serial| {
            heard(importer.front().import_held(&importer.enter(), &Export { serial, ..*export }))
        };
        if from == to {
            return held(export.serial)?.ok_or(None);
        }
        let peer = PeerId(to as u64);
        let fd = heard(owner.redeem(export.id, export.serial, peer))?;
        if let Some(held) = held(0)? {
            return Ok(held);
        }
        let source = ImportSource {
            id: export.id,
            size_bytes: export.size_bytes,
            owner: PeerId(from as u64),
        };
        heard(importer.front().import(&importer.enter(), source, fd.into(), nccl(), export.part))
    }

    /// Returns the right of a device, as `cuMemGetAccess` does.
    pub(super) fn right(
        &self,
        process: usize,
        address: DeviceAddress,
        of: DeviceOrdinal,
    ) -> Heard<i32> {
        let (pool, place) = (&self.pools[process], Location::device(of));
        match pool.who_answers(address) {
            Known::Nobody => Err(Some(DriverCode::INVALID_VALUE)),
            Known::Away(facts) => {
                let found = facts.access.iter().find(|desc| desc.location == place);
                Ok(found.map_or(0, |desc| desc.flags))
            }
            Known::Here(_) | Known::Elsewhere => {
                let told = pool.driver().core().access_of(address, place).map_err(Some);
                told.map(|right| right_at(pool, address, place).unwrap_or(right))
            }
        }
    }

    /// Returns the start and end of the mapping at `address`, as `cuMemGetAddressRange` does, by offset to `place`.
    pub(super) fn range(
        &self,
        process: usize,
        place: VaRange,
        address: DeviceAddress,
    ) -> Option<(u64, u64)> {
        let pool = &self.pools[process];
        if pool.who_answers(address) == Known::Nobody {
            return None;
        }
        let drivers = || pool.driver().core().mapping_at(address).map(|mapping| mapping.range);
        let range = pool.range_seen(address).or_else(drivers)?;
        Some((range.start.0 - place.start.0, range.size_bytes))
    }

    /// Returns the reservation at `address`, as a caller sees it.
    pub(super) fn reserved(&self, process: usize, address: DeviceAddress) -> Option<VaRange> {
        let pool = &self.pools[process];
        reserved_range(pool, address).or_else(|| pool.driver().core().reservation_at(address))
    }

    /// What all processes hold of what others have made, and of their own.
    pub(super) fn pause(&self) {
        for pool in &self.pools {
            pool.holdings().freeze();
        }
        let [first, second] = [0, 1].map(|index| self.pools[index].holdings().references(&WHOLE));
        for (pool, mine, theirs) in
            [(&self.pools[0], &first, &second), (&self.pools[1], &second, &first)]
        {
            let given: BTreeSet<AllocationId> = theirs.given.iter().map(|held| held.id).collect();
            let taken = mine.taken.values().flatten().map(|held| held.id);
            let stays: Vec<_> =
                taken.filter(|id| !given.contains(id)).map(|id| (id, StayReason::LetGo)).collect();
            pool.leave(&stays);
        }
        for pool in &self.pools {
            pool.save(&WHOLE, UNLIMITED).expect("saved");
        }
        for pool in &self.pools {
            pool.release_selected().expect("released");
        }
    }

    pub(super) fn resume(&self) {
        for pool in &self.pools {
            pool.create_own(&WHOLE).expect("memory");
            pool.restore_own(usize::MAX).expect("contents");
        }
        for (index, pool) in self.pools.iter().enumerate() {
            let mut descriptors = std::collections::HashMap::new();
            for request in pool.import_requests() {
                let owner = &self.pools[usize::try_from(request.owner.0).expect("0 or 1")];
                for id in request.ids {
                    let fd = owner.hand_out(id, PeerId(index as u64)).expect("a descriptor");
                    descriptors.insert(id, fd);
                }
            }
            pool.import_batch(descriptors).expect("imported");
        }
        for pool in &self.pools {
            drop(pool.commit_resume());
        }
    }
}
