//! `cudaIpc` handles of pool memory.
//!
//! The driver cannot make a legacy IPC handle of virtual memory, so a block that another process is to
//! open gets a ticket in the handle's 64 bytes. The opener's mapping is an import like any other: it
//! leaves at a pause and comes back at its address.
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

/// A handle for the whole block that holds `address`, when one of this process's own does.
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

/// Opens a handle made by [`handle_of`] in another process of the tenant, or of its family, for `accessor` and the devices that reach
/// its plain memory. The driver opens others. What comes is the block's first address, and the same one as long as it is open.
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

/// As [`open`], with the reason where it is refused; `None` for the driver's own handles.
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
        // Who enables peer access from here on finds it.
        entered.block_admit(address, &accessors.of(accessor));
        Ok(address)
    });
    Some(opened)
}

/// The ticket that a handle stands for, and the size that was requested. `None` for the driver's own handles.
fn read<D: Driver>(member: &Member<D>, handle: &[u8; HANDLE_BYTES]) -> Option<(Ticket, u64)> {
    let rest = handle.strip_prefix(&MAGIC)?;
    let (id, rest) = rest.split_first_chunk::<16>()?;
    let (owner, rest) = rest.split_first_chunk::<8>()?;
    let (asked, rest) = rest.split_first_chunk::<8>()?;
    let (size, _) = rest.split_first_chunk::<8>()?;
    let owner = MemberId(u64::from_le_bytes(*owner));
    let (asked_bytes, size_bytes) = (u64::from_le_bytes(*asked), u64::from_le_bytes(*size));
    // None that we have made: the application would be told of more memory than there is.
    if asked_bytes > size_bytes {
        return None;
    }
    let tenant = member.sharing().tenant_of(owner);
    let ticket = Ticket::uncounted(AllocationId(*id), size_bytes, owner, tenant);
    Some((ticket, asked_bytes))
}

/// Closes what [`open`] opened at `address`, which goes with its last close. `settle` waits for the work that
/// may still use it; it is not called while the memory is away, when no work can. The driver closes
/// what is not ours.
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
