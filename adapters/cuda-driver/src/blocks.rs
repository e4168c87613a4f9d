//! Plain device allocations made pausable: `cuMemAlloc` and `cuMemFree` on pool memory, and the devices that may reach it.
//!
//! `cuMemAlloc` of [`BLOCK_BYTES_MIN`] and more becomes pool memory with a range of its own. Smaller allocations stay with the
//! driver and are counted, because every pool allocation takes a whole granule of 2 MiB. `PyTorch` loses nothing by that: the
//! segments of its caching allocator are 2 MiB and more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use sublet_turns::{Allocation, with_room};
use tenants::member::Member;
use tenants::region;
use vmm_pool::budget::Counted;
use vmm_pool::driver::{
    AllocationFlags, AllocationProp, DeviceAddress, DeviceAttribute, DeviceOrdinal, Driver,
    DriverCode, RawContext,
};
use vmm_pool::{Block, Class, Inside, PlainMemory, PoolError, PoolResult};

use crate::{Answer, caller};

/// Smallest allocation that becomes pool memory.
pub const BLOCK_BYTES_MIN: u64 = 1 << 20;

/// Why a plain allocation stays with the driver.
const TOO_SMALL: &str = "plain allocations under 1 MiB stay with the driver";
const FOR_OUTSIDE: &str = "NCCL may share it by CUDA IPC with a process that is not of this tenant or family: start that \
                           one with `sublet run` too, or this one with NCCL_CUMEM_ENABLE=1";

/// Why memory that `cuMemAlloc` did not allocate stays with the driver.
pub mod stays {
    /// `cuMemAllocAsync` and `cuMemAllocFromPoolAsync`.
    pub const STREAM_ORDERED: &str = "stream-ordered memory is the driver's; what its pools do not use is given \
                                      back at a pause";
    /// `cuMemAllocManaged`.
    pub const MANAGED: &str =
        "managed memory: the driver moves it between device and host by itself";
    /// `cuMemAllocPitch`.
    pub const PITCHED: &str = "pitched memory stays with the driver";
    /// `cuArrayCreate` and `cuArray3DCreate`.
    pub const ARRAYS: &str = "arrays have no address that could be kept; their bytes are reckoned";
}

/// The devices that were given access to other devices' plain memory, by `cuCtxEnablePeerAccess`.
#[derive(Debug, Default)]
pub struct Accessors {
    /// Owner to accessors.
    by_owner: Mutex<BTreeMap<DeviceOrdinal, BTreeSet<DeviceOrdinal>>>,
    /// Pairs of owner and accessor between which the driver gives no access.
    apart: Mutex<BTreeSet<(DeviceOrdinal, DeviceOrdinal)>>,
}

impl Accessors {
    pub(crate) fn of(&self, owner: DeviceOrdinal) -> Vec<DeviceOrdinal> {
        let by_owner = self.by_owner.lock().unwrap_or_else(PoisonError::into_inner);
        let others = by_owner.get(&owner).into_iter().flatten().copied();
        std::iter::once(owner).chain(others).collect()
    }

    /// Makes new plain memory of `owner` reachable by `accessor` from now on.
    pub fn record(&self, owner: DeviceOrdinal, accessor: DeviceOrdinal) {
        let mut by_owner = self.by_owner.lock().unwrap_or_else(PoisonError::into_inner);
        by_owner.entry(owner).or_default().insert(accessor);
    }

    /// Makes the present plain memory of `owner` reachable by `accessor`.
    ///
    /// # Errors
    /// The error of the pool.
    pub fn open<D: Driver>(
        &self,
        member: &Member<D>,
        owner: DeviceOrdinal,
        accessor: DeviceOrdinal,
    ) -> PoolResult<()> {
        member.pool().enter().open_blocks_to(owner, accessor)
    }

    /// Opens memory for copies after the driver has refused one. The driver copies plain memory between any two devices. It
    /// copies mapped memory, which ours is, only if the current context's device has access (driver 580). So all devices with
    /// blocks, and `current`, get access to each other's blocks. Returns whether any did: the copy is then worth another try.
    pub fn open_for_copies<D: Driver>(
        &self,
        member: &Member<D>,
        current: Option<DeviceOrdinal>,
    ) -> bool {
        let owners = member.pool().holdings().block_devices();
        let accessors: BTreeSet<_> = owners.iter().copied().chain(current).collect();
        let mut is_any_open = false;
        for &owner in &owners {
            for &accessor in accessors.iter().filter(|accessor| **accessor != owner) {
                let apart = || self.apart.lock().unwrap_or_else(PoisonError::into_inner);
                let is_known = self.of(owner).contains(&accessor);
                if is_known || apart().contains(&(owner, accessor)) {
                    continue;
                }
                // It is recorded before the present blocks are opened, so that no block is made in between without access.
                self.record(owner, accessor);
                match self.open(member, owner, accessor) {
                    Ok(()) => is_any_open = true,
                    Err(error) => {
                        tracing::debug!(%error, %owner, %accessor, "no copies between the two");
                        self.disable(owner, accessor);
                        apart().insert((owner, accessor));
                    }
                }
            }
        }
        is_any_open
    }

    /// Ends the access of `accessor` to future memory of `owner`. Present memory stays open: to take access away could only
    /// break a program that works.
    pub fn disable(&self, owner: DeviceOrdinal, accessor: DeviceOrdinal) {
        let mut by_owner = self.by_owner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(accessors) = by_owner.get_mut(&owner) {
            accessors.remove(&accessor);
        }
    }
}

/// Returns the reason why a plain allocation of `size_bytes` stays with the driver, for [`vmm_pool::Natives`]; `None` if it
/// becomes pool memory. `is_outside` says whether NCCL may share memory with a process that cannot open our handles.
pub fn stays_native(
    size_bytes: u64,
    library: &str,
    is_outside: impl FnOnce() -> bool,
) -> Option<&'static str> {
    if size_bytes < BLOCK_BYTES_MIN {
        return Some(TOO_SMALL);
    }
    // NCCL requests plain memory only when its cuMem path is off (NCCL_CUMEM_ENABLE=0), and then shares it by CUDA IPC. A rank
    // outside Sublet cannot open our ticket.
    (library == caller::NCCL && is_outside()).then_some(FOR_OUTSIDE)
}

/// Allocates pool memory on `device` for `library`, however small: the size is rounded up to a granule. `context` is the
/// caller's context, if it has one.
#[doc(alias = "cuMemAlloc")]
pub fn allocate<D: Driver>(
    member: &Member<D>,
    accessors: &Accessors,
    device: DeviceOrdinal,
    context: Option<RawContext>,
    size_bytes: u64,
    library: &'static str,
) -> Answer<DeviceAddress> {
    let driver = member.pool().driver();
    let mut prop = AllocationProp::pinned_on(device);
    let rdma = DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED;
    let rdma_capable = driver.device_attribute(device, rdma).is_ok_and(|value| value != 0);
    prop.flags = AllocationFlags { gpu_direct_rdma_capable: u8::from(rdma_capable), ..prop.flags };
    let class = region::class_of(library, Some(device));
    let allocation = room_of(Some(device), size_bytes, &class);
    let made = with_room(member, allocation, || {
        let (entered, class) = (member.pool().enter(), class.clone());
        let address = entered.block_allocate(size_bytes, &prop, &accessors.of(device), class)?;
        // A thread that has enabled peer access meanwhile did not find this block.
        entered.block_admit(address, &accessors.of(device));
        Ok(address)
    });
    match made {
        Ok(address) => {
            if let Some(context) = context {
                member.pool().holdings().set_block_context(address, context);
            }
            Answer::Done(address)
        }
        Err(error) => {
            tracing::debug!(%error, "allocation refused");
            Answer::Refused(error.code().unwrap_or(DriverCode::UNKNOWN))
        }
    }
}

/// Describes an allocation of a class, and its way to wait for room. PyTorch frees its cached memory after a refusal, and
/// requests again. It does not do so in a pool of its own, which a region is. NCCL requests memory while other ranks wait for
/// this one.
pub(crate) fn room_of(device: Option<DeviceOrdinal>, size_bytes: u64, class: &Class) -> Allocation {
    let is_asked_twice = class.library == caller::TORCH && class.tag.is_empty();
    let may_wait = !class.library.starts_with(caller::NCCL);
    Allocation { device, size_bytes, is_asked_twice, may_wait }
}

/// Takes room in the tenant's budget for memory that the driver is about to make, for [`vmm_pool::Native`].
///
/// # Errors
/// [`DriverCode::OUT_OF_MEMORY`] if it does not fit.
pub fn take_room<D: Driver>(
    member: &Member<D>,
    device: DeviceOrdinal,
    size_bytes: u64,
) -> Result<Counted, DriverCode> {
    let charge = member.pool().budget().charge(Some(device), size_bytes);
    charge.map(Counted::Yes).map_err(|error| {
        tracing::debug!(%error, "allocation refused");
        error.code().unwrap_or(DriverCode::OUT_OF_MEMORY)
    })
}

/// The plain memory that ends with a context. While this lives, no pause or resume begins.
#[derive(Debug)]
#[must_use = "the driver's call comes between"]
pub struct Ending<'a, D: Driver> {
    member: &'a Member<D>,
    entered: Inside<'a, D>,
    context: RawContext,
    /// `None` once the context has ended.
    memory: Option<PlainMemory>,
}

/// Takes the plain memory that ends with `context`. Call this before the driver ends the context: the value may name another
/// context immediately afterwards. Until the answer is dropped, that memory belongs to no context. If the driver has not ended
/// the context by then, the context gets its memory back. `prepare` is called before the memory is looked for. It may take
/// long: no pause or resume begins meanwhile.
#[doc(alias = "cuCtxDestroy")]
pub fn ending<D: Driver>(
    member: &Member<D>,
    context: RawContext,
    prepare: impl FnOnce(),
) -> Ending<'_, D> {
    let entered = member.pool().enter_giving_up();
    prepare();
    let memory = Some(member.pool().take_plain_memory(context));
    Ending { member, entered, context, memory }
}

impl<D: Driver> Ending<'_, D> {
    /// Returns the context that is to end.
    pub fn context(&self) -> RawContext {
        self.context
    }

    /// Records that the driver has ended the context.
    pub fn ended(mut self) {
        if let Some(memory) = self.memory.take() {
            self.entered.plain_memory_ends(memory);
        }
    }
}

impl<D: Driver> Drop for Ending<'_, D> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.member.pool().plain_memory_stays(self.context, memory);
        }
    }
}

/// Frees the block at `address`. `settle` waits for the work that may still use the block, as `cuMemFree` does. It is not
/// called while the memory is away, when no work can use it. If no block starts there, the driver frees the memory.
#[doc(alias = "cuMemFree")]
pub fn free<D: Driver>(
    member: &Member<D>,
    address: DeviceAddress,
    settle: impl FnOnce() -> DriverCode,
) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    let Some(block) = member.pool().holdings().block_at(address) else {
        member.pool().natives().freed(address);
        return Answer::AskDriver;
    };
    give_up(&entered, settle, || entered.block_give_up(block))
}

/// Frees the block at `address` later. `arrange` makes [`free_now`] run once the work that may still use the block has ended.
/// While the memory is away no work can use it, so it is freed now. If no block starts there, the driver frees the memory.
#[doc(alias = "cuMemFreeAsync")]
pub fn free_later<D: Driver>(
    member: &Member<D>,
    address: DeviceAddress,
    arrange: impl FnOnce(Block) -> DriverCode,
) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    let Some(block) = member.pool().holdings().block_at(address) else {
        member.pool().natives().freed(address);
        return Answer::AskDriver;
    };
    if entered.is_offloaded() {
        return give_up(&entered, || DriverCode::SUCCESS, || entered.block_give_up(block));
    }
    arrange(block).ok().map_or_else(Answer::Refused, Answer::Done)
}

/// Frees `block`, whose work has ended. [`Answer::AskDriver`] if the block is gone, whatever is at its address by now.
pub fn free_now<D: Driver>(member: &Member<D>, block: Block) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    give_up(&entered, || DriverCode::SUCCESS, || entered.block_give_up(block))
}

/// Frees, by `give`, memory that work may still use. `settle` waits for that work, unless the memory is away.
pub(crate) fn give_up<D: Driver>(
    entered: &Inside<'_, D>,
    settle: impl FnOnce() -> DriverCode,
    give: impl FnOnce() -> PoolResult<()>,
) -> Answer<()> {
    if !entered.is_offloaded()
        && let Err(code) = settle().ok()
    {
        return Answer::Refused(code);
    }
    match give() {
        Ok(()) => Answer::Done(()),
        Err(PoolError::NotOurs) => Answer::AskDriver,
        Err(error) => {
            tracing::warn!(%error, "giving memory up was refused");
            Answer::Refused(error.code().unwrap_or(DriverCode::UNKNOWN))
        }
    }
}
