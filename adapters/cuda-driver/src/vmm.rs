//! The driver's virtual memory calls, answered from the pool.
//!
//! Each function enters the gate first. Calls that make or use memory wait until all memory is there. Calls that free memory or
//! query it are answered from the ledger while the memory is away.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};

use sublet_turns::with_room;
use tenants::member::Member;
use tenants::region;
use tenants::ticket::Ticket;
use vmm_pool::asking::Asking;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceAttribute, Driver, DriverCode,
    HANDLE_TYPE_FABRIC, LocationKind, VaRange,
};
use vmm_pool::{Class, NewMemory, VirtualHandle};

use crate::Answer;
use crate::blocks::room_of;
use crate::caller::NCCL;

thread_local! {
    /// The host memory of NCCL that this thread has made or imported last, until it reserves addresses. NCCL 2.23 to 2.30
    /// reserves them next (`ncclCuMemHostAlloc`, `ncclShmImportShareableBuffer`). If the calls come in another order, the pool
    /// hears nothing of it.
    static WITHOUT_ADDRESSES: Cell<Option<VirtualHandle>> = const { Cell::new(None) };
}

/// Records memory that `library` has made or imported, and may want addresses for.
fn note_made<D: Driver>(member: &Member<D>, library: &'static str, handle: VirtualHandle) {
    let waits = WITHOUT_ADDRESSES.take().is_some();
    let is_host = || {
        let made = member.pool().enter_giving_up().properties(handle);
        made.is_ok_and(|prop| prop.location.kind == LocationKind::HOST_NUMA)
    };
    // Two pieces of memory without addresses mean another order: the next addresses may be for either.
    WITHOUT_ADDRESSES.set((library == NCCL && !waits && is_host()).then_some(handle));
}

/// Returns the handle that a caller gave, if it is one of ours. The driver knows all others.
fn ours(handle: u64) -> Answer<VirtualHandle> {
    Answer::of_found(VirtualHandle::from_raw(handle))
}

/// The purpose of the memory that a caller requests, if it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// No known purpose.
    Any,
    /// A second mapping, inside addresses that hold much else. NCCL maps memory so that it has registered as a window.
    Window,
}

/// Creates memory, and returns a handle of ours for it.
#[doc(alias = "cuMemCreate")]
pub fn create<D: Driver>(
    member: &Member<D>,
    size_bytes: u64,
    prop: &AllocationProp,
    library: &'static str,
    purpose: Purpose,
) -> Answer<u64> {
    if prop.requested_handle_types & HANDLE_TYPE_FABRIC != 0 {
        // References must not leave the node. Callers fall back to descriptors.
        return Answer::Refused(DriverCode::NOT_SUPPORTED);
    }
    if !prop.location.kind.is_known() {
        tracing::warn!(
            kind = prop.location.kind.0,
            size_bytes,
            "memory of a kind of place that Sublet does not know is refused"
        );
        return Answer::Refused(DriverCode::NOT_SUPPORTED);
    }
    let device = prop.location.as_device();
    let class = region::class_of(library, device);
    let made = with_room(member, room_of(device, size_bytes, &class), || {
        let (prop, class, is_alone) = (*prop, class.clone(), purpose == Purpose::Window);
        let new = NewMemory { size_bytes, prop, class, is_alone };
        member.pool().front().create(&member.pool().enter(), new)
    });
    let made = made.inspect(|handle| note_made(member, library, *handle));
    Answer::of(made).map(VirtualHandle::raw)
}

/// Gives back one reference of a handle.
#[doc(alias = "cuMemRelease")]
pub fn release<D: Driver>(member: &Member<D>, handle: u64) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    ours(handle).and_then(|handle| {
        // NCCL 2.26 and newer make a handle to test whether they can, and release it.
        WITHOUT_ADDRESSES.set(WITHOUT_ADDRESSES.get().filter(|other| *other != handle));
        Answer::of(member.pool().front().release(&entered, handle))
    })
}

/// Returns the handle that is mapped at an address, with one more reference.
#[doc(alias = "cuMemRetainAllocationHandle")]
pub fn retain<D: Driver>(member: &Member<D>, address: DeviceAddress) -> Answer<u64> {
    let entered = member.pool().enter_giving_up();
    Answer::of(member.pool().front().retain_at(&entered, address)).map(VirtualHandle::raw)
}

/// Returns the properties that a handle was created with.
#[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
pub fn properties<D: Driver>(member: &Member<D>, handle: u64) -> Answer<AllocationProp> {
    let entered = member.pool().enter_giving_up();
    ours(handle).and_then(|handle| Answer::of(member.pool().front().properties(&entered, handle)))
}

/// Maps a handle.
#[doc(alias = "cuMemMap")]
pub fn map<D: Driver>(
    member: &Member<D>,
    range: VaRange,
    offset_bytes: u64,
    handle: u64,
) -> Answer<()> {
    let entered = member.pool().enter();
    ours(handle).and_then(|handle| {
        Answer::of(member.pool().front().map(&entered, range, offset_bytes, handle))
    })
}

/// Unmaps a range.
#[doc(alias = "cuMemUnmap")]
pub fn unmap<D: Driver>(member: &Member<D>, range: VaRange) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    let _asking = back_in(member);
    Answer::of(member.pool().front().unmap(&entered, range))
}

/// Waits while the contexts are off the devices. Host memory of ours is unregistered with its mapping, and the driver's
/// behaviour then is untested. It waits inside the gate: a resume opens the door before it waits for threads inside.
fn back_in<D: Driver>(member: &Member<D>) -> Asking<'_> {
    member.pool().door().pass()
}

/// Frees a reservation. Refused while something of ours is in it, as the driver would.
#[doc(alias = "cuMemAddressFree")]
pub fn address_free<D: Driver>(member: &Member<D>, range: VaRange) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    let _asking = back_in(member);
    if let Some(freed) = member.pool().driver().free_of_host_file(range) {
        return freed.map_or_else(|error| Answer::Refused(error.code), Answer::Done);
    }
    Answer::of(member.pool().front().free_addresses(&entered, range))
}

/// Records that this thread reserves addresses that the pool does not see. Memory that it made before is for them, if for any.
pub fn reserves_elsewhere() {
    WITHOUT_ADDRESSES.set(None);
}

/// Reserves addresses for memory that `library` has allocated, or may allocate there. The driver reserves all others.
#[doc(alias = "cuMemAddressReserve")]
pub fn address_reserve<D: Driver>(
    member: &Member<D>,
    size_bytes: u64,
    alignment: u64,
    library: &'static str,
) -> Answer<u64> {
    if let Some(handle) = WITHOUT_ADDRESSES.take().filter(|_| library == NCCL) {
        let entered = member.pool().enter();
        if let Some(start) = entered.reserve_for_host(handle, size_bytes, alignment) {
            return Answer::Done(start.0);
        }
    }
    let front = member.pool().front();
    if !front.has_addresses(size_bytes, alignment, library) {
        return Answer::AskDriver;
    }
    let entered = member.pool().enter();
    Answer::of_found(front.take_addresses(&entered, size_bytes, alignment, library))
        .map(|start| start.0)
}

/// Sets access rights to a range.
#[doc(alias = "cuMemSetAccess")]
pub fn set_access<D: Driver>(
    member: &Member<D>,
    range: VaRange,
    access: &[AccessDesc],
) -> Answer<()> {
    let entered = member.pool().enter();
    Answer::of(member.pool().front().set_access(&entered, range, access))
}

/// Exports a ticket instead of the driver's descriptor.
#[doc(alias = "cuMemExportToShareableHandle")]
pub fn export<D: Driver>(member: &Member<D>, handle: u64) -> Answer<OwnedFd> {
    let entered = member.pool().enter();
    ours(handle)
        .and_then(|handle| Answer::of_import(member.sharing().issue_ticket(&entered, handle)))
}

/// Imports the memory that a ticket stands for. Another descriptor becomes memory that is never paused.
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import<D: Driver>(
    member: &Member<D>,
    fd: BorrowedFd<'_>,
    library: &'static str,
) -> Answer<u64> {
    let entered = member.pool().enter();
    match Ticket::read(fd) {
        Ok(Some(ticket)) => {
            let redeemed = member.sharing().redeem_ticket(&entered, &ticket, library);
            let redeemed = redeemed.inspect(|handle| note_made(member, library, *handle));
            Answer::of_import(redeemed).map(VirtualHandle::raw)
        }
        Ok(None) => {
            let class = Class { library, ..Class::default() };
            let handle = entered.import_foreign(fd, class);
            Answer::of(handle).map(VirtualHandle::raw)
        }
        Err(error) => {
            member.notes().add(error.to_string());
            Answer::Refused(DriverCode::INVALID_VALUE)
        }
    }
}

/// Keeps the pages of a range in place: a device outside the driver's view is about to hold them.
#[doc(alias = "cuMemGetHandleForAddressRange")]
pub fn pin_for_rdma<D: Driver>(member: &Member<D>, range: VaRange) {
    let entered = member.pool().enter();
    let bytes = entered.pin(
        range,
        "registered with a network card, which holds its pages; set NCCL_NET_GDR_LEVEL=LOC to avoid it",
    );
    if bytes > 0 {
        tracing::info!(address = %range.start, bytes, "pinned by RDMA");
    }
}

/// `CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_*` of CUDA 13.3.
const LOGICAL_ENDPOINTS: RangeInclusive<i32> = 153..=156;

/// Must the ability be hidden from applications, because a pause could not undo it?
///
/// Multicast objects, logical endpoints and fabric handles hold references to memory in ways that are not replayed yet. Callers
/// query these attributes first, and do without the abilities.
#[doc(alias = "cuDeviceGetAttribute")]
pub fn hidden_attribute(attribute: i32) -> bool {
    attribute == DeviceAttribute::MULTICAST_SUPPORTED.0
        || attribute == DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED.0
        || LOGICAL_ENDPOINTS.contains(&attribute)
}
