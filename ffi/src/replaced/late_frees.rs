//! Blocks that `cuMemFreeAsync` gives up: each goes when its stream has come there, and nobody waits for that.
//!
//! The stream calls us back. A callback may not call the driver, so a thread of ours gives the block up. Who asks for memory next
//! lets that thread have done first with what is due.
//!
//! A block may go before its stream has come there, with its context, and another one may lie at its address by then. So the
//! table knows blocks by their identity and never by their address.
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

/// The longest wait of an allocation for the thread to be done: the thread gives up a few blocks.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

static TABLE: Mutex<Table> = Mutex::new(Table::new());
/// A block is due, or gone.
static CHANGED: Condvar = Condvar::new();
/// As many as [`Table::going`] has, for callers that would find none.
static GOING: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Table {
    /// Blocks that were given up and are still there.
    going: BTreeMap<VirtualHandle, Block>,
    /// Those of them whose stream has come there.
    due: BTreeSet<VirtualHandle>,
    /// Those that the driver would not take back. They are due again with the next one, and when somebody asks for memory.
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

/// Was the block at `address` already freed? Who frees it once more is wrong.
pub(super) fn is_going(member: &Member, address: Address) -> bool {
    GOING.load(Ordering::Relaxed) > 0
        && member
            .pool()
            .holdings()
            .block_at(DeviceAddress(address))
            .is_some_and(|block| lock(&TABLE).going.contains_key(&block.identity()))
}

/// Waits until what is due is gone. It waits for no stream.
pub(crate) fn settle() {
    if GOING.load(Ordering::Relaxed) == 0 {
        return;
    }
    // Behind a shut gate that thread waits, and a caller that is inside would be waited for.
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

/// Gives the block at `address` up once the stream has come here that `launch` has a function called back on.
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
                // The next one begins it again.
                lock(&TABLE).has_thread = false;
            });
            if let Err(error) = thread {
                tracing::warn!(%error, "no thread for frees in the order of a stream");
                return DriverCode::OPERATING_SYSTEM.0;
            }
            table.has_thread = true;
        }
        // Before the stream can come there.
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

/// Called by the driver, on a thread of its own, when the stream has come there.
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
    // A free in the order of a stream disturbs no capture of another.
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
        // The next ones go, whatever becomes of this one.
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
