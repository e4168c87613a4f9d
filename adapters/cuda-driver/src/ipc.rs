//! `cudaIpc` handles of pool memory.
//!
//! The driver cannot make a legacy IPC handle of virtual memory. So a block that another process is to open gets a ticket in
//! the 64 bytes of the handle. The opener's mapping is an import like any other: a pause unmaps it, and a resume maps it at its
//! address again.
//!
//! ```text
//!   0        8          24       32           40        48     64
//!   | magic  | alloc id | owner  | size asked | size    | zero |
//! ```

use tenants::identity::MemberId;
use tenants::member::{ImportError, Member};
use tenants::ticket::Ticket;
use vmm_pool::AllocationId;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverCode};

use crate::blocks::give_up;
use crate::{Accessors, Answer};

/// Length of a `CUipcMemHandle`.
pub const HANDLE_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"SUBLETIP";

/// Returns a handle for the whole block that holds `address`, if this process made the block.
#[doc(alias = "cuIpcGetMemHandle")]
pub fn handle_of<D: Driver>(
    member: &Member<D>,
    address: DeviceAddress,
) -> Answer<[u8; HANDLE_BYTES]> {
    let identity = member.pool().enter_giving_up().block_identity(address);
    let Some((id, asked_bytes, size_bytes)) = identity else {
        return Answer::AskDriver;
    };
    let mut handle = [0; HANDLE_BYTES];
    handle[..8].copy_from_slice(&MAGIC);
    handle[8..24].copy_from_slice(&id.0);
    handle[24..32].copy_from_slice(&member.presence().id().0.to_le_bytes());
    handle[32..40].copy_from_slice(&asked_bytes.to_le_bytes());
    handle[40..48].copy_from_slice(&size_bytes.to_le_bytes());
    Answer::Done(handle)
}

/// Opens a handle made by [`handle_of`] in another process of the tenant, or of its family. `accessor` and the devices that
/// reach its plain memory get access. The driver opens other handles. Returns the block's first address, which stays the same
/// while the block is open.
#[doc(alias = "cuIpcOpenMemHandle")]
pub fn open<D: Driver>(
    member: &Member<D>,
    accessors: &Accessors,
    handle: &[u8; HANDLE_BYTES],
    accessor: DeviceOrdinal,
    library: &'static str,
) -> Answer<DeviceAddress> {
    try_open(member, accessors, handle, accessor, library)
        .map_or(Answer::AskDriver, Answer::of_import)
}

/// As [`open`], with the reason for a refusal; `None` for the driver's own handles.
pub fn try_open<D: Driver>(
    member: &Member<D>,
    accessors: &Accessors,
    handle: &[u8; HANDLE_BYTES],
    accessor: DeviceOrdinal,
    library: &'static str,
) -> Option<Result<DeviceAddress, ImportError>> {
    let (ticket, asked_bytes) = read(member, handle)?;
    let entered = member.pool().enter();
    let opened = member.sharing().redeem_ticket(&entered, &ticket, library).and_then(|handle| {
        let address = entered.block_open(handle, asked_bytes, accessor)?;
        // A thread that enables peer access from here on finds the block.
        entered.block_admit(address, &accessors.of(accessor));
        Ok(address)
    });
    Some(opened)
}

/// Returns the ticket that a handle stands for, and the size that was requested. `None` for the driver's own handles.
fn read<D: Driver>(member: &Member<D>, handle: &[u8; HANDLE_BYTES]) -> Option<(Ticket, u64)> {
    let rest = handle.strip_prefix(&MAGIC)?;
    let (id, rest) = rest.split_first_chunk::<16>()?;
    let (owner, rest) = rest.split_first_chunk::<8>()?;
    let (asked, rest) = rest.split_first_chunk::<8>()?;
    let (size, _) = rest.split_first_chunk::<8>()?;
    let owner = MemberId(u64::from_le_bytes(*owner));
    let (asked_bytes, size_bytes) = (u64::from_le_bytes(*asked), u64::from_le_bytes(*size));
    // We have made no such handle: the application would see more memory than there is.
    if asked_bytes > size_bytes {
        return None;
    }
    let tenant = member.sharing().tenant_of(owner);
    let ticket = Ticket::uncounted(AllocationId(*id), size_bytes, owner, tenant);
    Some((ticket, asked_bytes))
}

/// Closes the block that [`open`] opened at `address`. The last close removes it. `settle` waits for the work that may still
/// use the block. It is not called while the memory is away, when no work can use it. The driver closes memory that is not
/// ours.
#[doc(alias = "cuIpcCloseMemHandle")]
pub fn close<D: Driver>(
    member: &Member<D>,
    address: DeviceAddress,
    settle: impl FnOnce() -> DriverCode,
) -> Answer<()> {
    let entered = member.pool().enter_giving_up();
    if !entered.is_block(address) {
        return Answer::AskDriver;
    }
    give_up(&entered, settle, || entered.block_close(address))
}
