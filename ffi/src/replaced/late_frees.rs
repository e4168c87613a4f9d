//! Blocks that `cuMemFreeAsync` frees: each is freed when its stream reaches that point, and no caller waits for that.
//!
//! The stream runs a callback. A callback may not call the driver, so a thread of Sublet's frees the block. The next allocation
//! first waits until that thread has freed the due blocks.
//!
//! A block may end with its context before its stream reaches that point, and another block may get its address. So the table
//! identifies blocks by identity, never by address.
//!
//! Lock order: `TABLE` is a leaf, and never held across a driver call.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use sublet_cuda_driver::{Answer, blocks};
use vmm_pool::driver::{DeviceAddress, Driver as _, DriverCode};
use vmm_pool::gate::Gate;
use vmm_pool::sync::lock;
use vmm_pool::{Block, VirtualHandle};

use super::{Address, SUCCESS};
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

/// The longest wait of an allocation for the thread, which has a few blocks to free.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

static TABLE: Mutex<Table> = Mutex::new(Table::new());
/// Notified when a block is due or freed.
static CHANGED: Condvar = Condvar::new();
/// The length of [`Table::going`], so that callers need no lock if it is empty.
static GOING: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Table {
    /// Blocks that the application has freed and that still exist.
    going: BTreeMap<VirtualHandle, Block>,
    /// Blocks among them whose stream has reached the point of the free.
    due: BTreeSet<VirtualHandle>,
    /// Blocks that the driver refused to free. They are due again with the next block, and at the next allocation.
    refused: BTreeSet<VirtualHandle>,
    has_thread: bool,
}

impl Table {
    const fn new() -> Self {
        Self {
            going: BTreeMap::new(),
            due: BTreeSet::new(),
            refused: BTreeSet::new(),
            has_thread: false,
        }
    }

    fn offer_again(&mut self) {
        self.due.append(&mut self.refused);
        CHANGED.notify_all();
    }
}

/// Has the application already freed the block at `address`? A second free is an error.
pub(super) fn is_going(member: &Member, address: Address) -> bool {
    GOING.load(Ordering::Relaxed) > 0
        && member
            .pool()
            .holdings()
            .block_at(DeviceAddress(address))
            .is_some_and(|block| lock(&TABLE).going.contains_key(&block.identity()))
}

/// Waits until due blocks are freed. It waits for no stream.
pub(crate) fn settle() {
    if GOING.load(Ordering::Relaxed) == 0 {
        return;
    }
    // At a shut gate that thread waits, and a caller inside the gate would itself be waited for.
    if Gate::is_inside() || runtime::member().is_none_or(|member| member.gate().is_shut()) {
        return;
    }
    let is_any_due = |table: &mut Table| !table.due.is_empty();
    let done = |table| {
        let waited = CHANGED.wait_timeout_while(table, SETTLED_WITHIN, is_any_due);
        waited.unwrap_or_else(PoisonError::into_inner).0
    };
    let mut table = done(lock(&TABLE));
    if !table.refused.is_empty() {
        table.offer_again();
        drop(done(table));
    }
}

/// Frees the block at `address` when its stream reaches this point. `launch` queues a callback on that stream.
pub(super) fn free(
    member: &'static Member,
    address: Address,
    launch: impl FnOnce(extern "C" fn(*mut c_void), Pointer) -> c_int,
) -> Answer<()> {
    if is_going(member, address) {
        return Answer::Refused(DriverCode::INVALID_VALUE);
    }
    blocks::free_later(member, DeviceAddress(address), |block| DriverCode(arrange(block, launch)))
}

fn arrange(
    block: Block,
    launch: impl FnOnce(extern "C" fn(*mut c_void), Pointer) -> c_int,
) -> c_int {
    let identity = block.identity();
    {
        let mut table = lock(&TABLE);
        if !table.has_thread {
            let thread = vmm_pool::threads::spawn("sublet-frees", give_up_what_is_due, |_| {
                // The next free starts the thread again.
                lock(&TABLE).has_thread = false;
            });
            if let Err(error) = thread {
                tracing::warn!(%error, "no thread for frees in the order of a stream");
                return DriverCode::OPERATING_SYSTEM.0;
            }
            table.has_thread = true;
        }
        // This comes before the stream can reach the point.
        table.going.insert(identity, block);
        GOING.store(table.going.len(), Ordering::Relaxed);
    }
    let data = std::ptr::without_provenance_mut(usize::try_from(identity.raw()).unwrap_or(0));
    let code = launch(is_due, data);
    if code != SUCCESS {
        forget(identity);
    }
    code
}

/// The callback, which the driver runs on its own thread when the stream has reached the point.
extern "C" fn is_due(data: *mut c_void) {
    let Some(identity) = VirtualHandle::from_raw(data.addr() as u64) else { return };
    let mut table = lock(&TABLE);
    table.due.insert(identity);
    table.offer_again();
}

fn forget(identity: VirtualHandle) {
    let mut table = lock(&TABLE);
    table.due.remove(&identity);
    table.going.remove(&identity);
    GOING.store(table.going.len(), Ordering::Relaxed);
    CHANGED.notify_all();
}

fn give_up_what_is_due() {
    // A free in the order of a stream must not disturb a capture of another stream.
    if let Some(member) = runtime::member()
        && let Err(error) = member.pool().driver().stand_beside_captures()
    {
        tracing::warn!(%error, "frees in the order of a stream may disturb captures");
    }
    loop {
        let (identity, block) = {
            let is_none_due = |table: &mut Table| table.due.is_empty();
            let waited = CHANGED.wait_while(lock(&TABLE), is_none_due);
            let mut table = waited.unwrap_or_else(PoisonError::into_inner);
            let Some(identity) = table.due.first().copied() else { continue };
            let Some(block) = table.going.get(&identity).copied() else {
                table.due.remove(&identity);
                CHANGED.notify_all();
                continue;
            };
            (identity, block)
        };
        let address = block.start();
        // The next blocks are freed, whatever happens to this one.
        match catch_unwind(|| give_up(block)) {
            Ok(Answer::Refused(code)) => {
                tracing::warn!(?code, %address, "a block that its stream has passed stays for now");
                let mut table = lock(&TABLE);
                table.due.remove(&identity);
                table.refused.insert(identity);
                CHANGED.notify_all();
            }
            // Its context may have ended meanwhile, and the block with it.
            Ok(Answer::Done(()) | Answer::AskDriver) => forget(identity),
            Err(_) => {
                tracing::error!(%address, "a block that its stream has passed stays: a panic");
                forget(identity);
            }
        }
    }
}

fn give_up(block: Block) -> Answer<()> {
    let Some(member) = runtime::member() else { return Answer::AskDriver };
    blocks::free_now(member, block)
}
