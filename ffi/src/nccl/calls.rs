//! The functions that count launches. They convert C arguments for `sublet_nccl::collectives`.

#![expect(unsafe_code, reason = "exports functions under NCCL's names and calls NCCL")]
#![expect(non_snake_case, reason = "named as NCCL names them")]

use std::ffi::{c_int, c_uint};

use sublet_nccl::collectives::{
    Awaited, Collectives, NcclResult, Operation, Process, Signal, of_unique_ids,
};
use tenants::cut::{Cut, Increment};
use tenants::region;

use super::{Function, NCCL};
use crate::peers;
use crate::replaced::graph;
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

/// `ncclUniqueId` is passed by value: 128 bytes, which the ABI puts on the stack.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UniqueId([u8; 128]);

/// `ncclWaitSignalDesc_t`, which has no size or version in it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WaitSignalDesc {
    count: c_int,
    peer: c_int,
    index: c_int,
    context: c_int,
}

/// A length above any communicator's ranks and signals. NCCL refuses a call with a longer list.
const LISTED_MAX: usize = 1 << 20;

/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// Returns the caller's list of `count` values, or an empty one if `count` is not valid.
///
/// # Safety
/// `first` is null, or the first of `count` values, if they are not more than [`LISTED_MAX`].
unsafe fn listed<'a, T>(first: *const T, count: c_int) -> &'a [T] {
    match usize::try_from(count) {
        // SAFETY: the caller promises that there are as many.
        Ok(count) if !first.is_null() && count <= LISTED_MAX => unsafe {
            std::slice::from_raw_parts(first, count)
        },
        _ => &[],
    }
}

/// Calls the library's own function; the `NCCL` and `Function` in scope say which library.
macro_rules! call_nccl {
    ($symbol:ident ( $($value:expr),* $(,)? )) => {
        ::sublet_interpose::call_own!(NCCL, $symbol($($value),*))
            .map_or(NcclResult::SYSTEM_ERROR, NcclResult)
    };
}

/// Calls a function of the watched NCCL that writes a property of a communicator through a pointer.
fn told(symbol: &std::ffi::CStr, communicator: usize) -> Result<c_int, NcclResult> {
    let address = NCCL.watched().and_then(|nccl| nccl.symbol(symbol));
    let address = address.ok_or(NcclResult::SYSTEM_ERROR)?;
    // SAFETY: callers name functions of this signature.
    let function = unsafe {
        std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, *mut c_int) -> c_int>(address)
    };
    let mut value: c_int = 0;
    let communicator = std::ptr::with_exposed_provenance_mut(communicator);
    // SAFETY: the communicator is alive: its maker has just returned it, or its table entry is there.
    let result = NcclResult(unsafe { function(communicator, &raw mut value) });
    if result == NcclResult::SUCCESS { Ok(value) } else { Err(result) }
}

fn state_of(communicator: usize) -> NcclResult {
    told(c"ncclCommGetAsyncError", communicator).map_or_else(|code| code, NcclResult)
}

/// This process, in the form that the adapter needs.
pub(super) struct Here(&'static Member);

impl Process for Here {
    fn cut(&self) -> &Cut {
        self.0.cut()
    }

    fn note(&self, text: &str) {
        self.0.notes().add(text.to_owned());
    }

    fn seed(&self) -> u64 {
        self.0.presence().id().0
    }

    fn capture_of(&self, stream: usize) -> Option<u64> {
        graph::capture_of(stream)
    }

    fn add_to_capture(&self, capture: u64, increments: Vec<Increment>) {
        runtime::GRAPHS.recorded(capture, increments);
    }

    fn communicator_at(&self, place: usize) -> usize {
        let place = std::ptr::with_exposed_provenance::<Pointer>(place);
        if place.is_null() {
            return 0;
        }
        // SAFETY: the caller's out-pointer, which NCCL's interface has it keep until the communicator is made.
        unsafe { place.read() }.expose_provenance()
    }

    fn rank_of(&self, communicator: usize) -> Option<(u32, u32)> {
        let ask = |symbol| u32::try_from(told(symbol, communicator).ok()?).ok();
        Some((ask(c"ncclCommUserRank")?, ask(c"ncclCommCount")?))
    }

    fn state_of(&self) -> fn(usize) -> NcclResult {
        state_of
    }

    fn spoil_group(&self) {
        // A call in a group without a communicator is refused immediately, and the group's end is then its failure
        // (`ncclEnqueueCheck` and `ncclGroupErrCheck` in NCCL's `src/enqueue.cc` and `src/group.h`, 2.27 to 2.30; tried
        // with 2.31.2 and 2.32.3).
        let none: Pointer = std::ptr::null_mut();
        let refused = call_nccl!(ncclAllReduce(none, none, 0, 0, 0, none, none));
        tracing::debug!(?refused, "a group of NCCL's is given up");
    }
}

/// Runs `count`, or `plain` if this process is in no tenant.
pub(super) fn counted(
    find: fn() -> Option<&'static Member>,
    count: impl FnOnce(&'static Collectives, &Here) -> NcclResult,
    plain: impl FnOnce() -> NcclResult,
) -> c_int {
    let Some(member) = find() else {
        return plain().0;
    };
    let here = Here(member);
    if let Ok(result) = runtime::netted(|| count(&runtime::COLLECTIVES, &here)) {
        return result.0;
    }
    // A fault of Sublet. The call failed with an internal error of NCCL.
    member.notes().add("Sublet failed inside a call of NCCL. Please report this".to_owned());
    NcclResult::INTERNAL_ERROR.0
}

macro_rules! function {
    ($symbol:ident ( $($arg:ident : $ty:ty),* $(,)? ) by $find:ident |$all:ident, $here:ident, $call:ident| $count:expr) => {
        #[doc = concat!("`", stringify!($symbol), "`, counted.")]
        ///
        /// # Safety
        /// As NCCL's function of this name.
        pub(crate) unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            let $call = || call_nccl!($symbol($($arg),*));
            counted(runtime::$find, |$all, $here| $count, $call)
        }
    };
}

pub(super) use {call_nccl, function};

macro_rules! collective {
    ($symbol:ident ( $($arg:ident : $ty:ty),* ) $($settings:ident)?) => {
        function! {
            $symbol($($arg: $ty,)* communicator: Pointer, stream: Pointer $(, $settings: Pointer)?) by member
                |all, here, call| {
                    let what = (communicator.expose_provenance(), Operation::Collective);
                    all.launch(here, stringify!($symbol), what, stream.expose_provenance(), call)
                }
        }
    };
}

macro_rules! message {
    ($symbol:ident, $operation:ident) => {
        function! {
            $symbol(
                buffer: Pointer, count: usize, kind: c_int, peer: c_int, communicator: Pointer,
                stream: Pointer
            ) by member |all, here, call| {
                let what = (communicator.expose_provenance(), Operation::$operation { peer });
                all.launch(here, stringify!($symbol), what, stream.expose_provenance(), call)
            }
        }
    };
}

macro_rules! of_communicator {
    ($symbol:ident ( $($arg:ident : $ty:ty),* ), $method:ident) => {
        function! {
            $symbol(communicator: Pointer $(, $arg: $ty)*) by member |all, here, call| {
                all.$method(here, communicator.expose_provenance(), call)
            }
        }
    };
}

// After the stream, some functions have settings of the single call.
collective!(ncclAllGather(send: Pointer, receive: Pointer, count: usize, kind: c_int));
collective!(ncclAllReduce(send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int));
collective!(ncclAlltoAll(send: Pointer, receive: Pointer, count: usize, kind: c_int));
collective!(ncclBcast(buffer: Pointer, count: usize, kind: c_int, root: c_int));
collective!(ncclBroadcast(send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int));
collective!(ncclGather(send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int));
collective!(ncclReduce(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int, root: c_int
));
collective!(ncclReduceScatter(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int
));
collective!(ncclScatter(send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int));
collective!(ncclAllGatherConfig(send: Pointer, receive: Pointer, count: usize, kind: c_int) settings);
collective!(ncclAllReduceConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int
) settings);
collective!(ncclAlltoAllConfig(send: Pointer, receive: Pointer, count: usize, kind: c_int) settings);
collective!(ncclBroadcastConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int
) settings);
collective!(ncclGatherConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int
) settings);
collective!(ncclReduceConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int, root: c_int
) settings);
collective!(ncclReduceScatterConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, operator: c_int
) settings);
collective!(ncclScatterConfig(
    send: Pointer, receive: Pointer, count: usize, kind: c_int, root: c_int
) settings);
message!(ncclRecv, Receive);
message!(ncclSend, Send);

function! {
    ncclPutSignal(
        data: Pointer, count: usize, kind: c_int, peer: c_int, window: Pointer, offset: usize, index: c_int,
        context: c_int, flags: c_uint, communicator: Pointer, stream: Pointer
    ) by member |all, here, call| {
        let signal = Signal { peer, index, context };
        let what = (communicator.expose_provenance(), Operation::Signal { signal });
        all.launch(here, "ncclPutSignal", what, stream.expose_provenance(), call)
    }
}
function! {
    ncclSignal(
        peer: c_int, index: c_int, context: c_int, flags: c_uint, communicator: Pointer, stream: Pointer
    ) by member |all, here, call| {
        let signal = Signal { peer, index, context };
        let what = (communicator.expose_provenance(), Operation::Signal { signal });
        all.launch(here, "ncclSignal", what, stream.expose_provenance(), call)
    }
}
function! {
    ncclWaitSignal(
        count: c_int, descriptors: *const WaitSignalDesc, communicator: Pointer, stream: Pointer
    ) by member |all, here, call| {
        // SAFETY: the caller's array of this many descriptors, as NCCL's function takes it.
        let signals: Vec<Awaited> = unsafe { listed(descriptors, count) }
            .iter()
            .map(|WaitSignalDesc { count, peer, index, context }| Awaited {
                signal: Signal { peer: *peer, index: *index, context: *context },
                count: *count,
            })
            .collect();
        let what = (communicator.expose_provenance(), Operation::Wait { signals: &signals });
        all.launch(here, "ncclWaitSignal", what, stream.expose_provenance(), call)
    }
}

function! {
    ncclCommWindowRegister(
        communicator: Pointer, buffer: Pointer, size: usize, window: Pointer, flags: c_int
    ) by member |all, here, call| {
        all.agree(here, "ncclCommWindowRegister", communicator.expose_provenance(), call)
    }
}
// All ranks suspend and resume together. Driver calls release and restore the memory itself.
function! {
    ncclCommSuspend(communicator: Pointer, flags: c_int) by member |all, here, call| {
        // All ranks release the shared addresses of each other before any creates its own again.
        runtime::SLABS.take_shared_addresses_again();
        all.agree(here, "ncclCommSuspend", communicator.expose_provenance(), call)
    }
}
function! {
    ncclCommResume(communicator: Pointer) by member |all, here, call| {
        all.agree(here, "ncclCommResume", communicator.expose_provenance(), call)
    }
}
function! {
    ncclDevCommCreate(communicator: Pointer, requirements: Pointer, made: Pointer)
        by member |all, here, call| {
            let made = all.agree(here, "ncclDevCommCreate", communicator.expose_provenance(), call);
            if made == NcclResult::SUCCESS {
                super::note_unseen(|| {
                    "a communicator for kernels (ncclDevCommCreate) is in use, and such kernels are not held back".to_owned()
                });
            }
            made
        }
}

/// `ncclMemAlloc`. The memory belongs to the caller, which also uses it without NCCL.
///
/// # Safety
/// As NCCL's function of this name.
pub(crate) unsafe extern "C" fn ncclMemAlloc(address: Pointer, bytes: usize) -> c_int {
    region::for_caller(|| call_nccl!(ncclMemAlloc(address, bytes))).0
}

// The first communicator may be created inside a group, so the start of the group must have been counted.
function!(ncclGroupStart() by join |all, _here, call| all.group_start(call));
function!(ncclGroupEnd() by join |all, here, call| all.group_end(here, call));
function!(ncclGroupSimulateEnd(info: Pointer) by join |all, here, call| {
    all.group_simulate_end(here, call)
});

function! {
    ncclCommInitRank(place: Pointer, ranks: c_int, id: UniqueId, rank: c_int)
        by join |all, here, call| {
            let who = (of_unique_ids(&id.0), rank, ranks);
            peers::note(here.0, who);
            all.create(here, "ncclCommInitRank", who, place.expose_provenance(), call)
        }
}
function! {
    ncclCommInitRankConfig(
        place: Pointer, ranks: c_int, id: UniqueId, rank: c_int, config: Pointer
    ) by join |all, here, call| {
        let who = (of_unique_ids(&id.0), rank, ranks);
        peers::note(here.0, who);
            all.create(here, "ncclCommInitRankConfig", who, place.expose_provenance(), call)
    }
}
function! {
    ncclCommInitRankScalable(
        place: Pointer, ranks: c_int, rank: c_int, id_count: c_int, ids: *const UniqueId,
        config: Pointer
    ) by join |all, here, call| {
        // SAFETY: the caller's array of this many ids, as NCCL's function takes it.
        let ids = unsafe { listed(ids, id_count) };
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.0).collect();
        let who = (of_unique_ids(&bytes), rank, ranks);
        peers::note(here.0, who);
            all.create(here, "ncclCommInitRankScalable", who, place.expose_provenance(), call)
    }
}
function! {
    ncclCommInitAll(places: Pointer, ranks: c_int, devices: *const c_int)
        by join |all, here, call| {
            all.create_all(here, ranks, places.expose_provenance(), call)
        }
}
function! {
    ncclCommSplit(
        parent: Pointer, color: c_int, key: c_int, place: Pointer, config: Pointer
    ) by member |all, here, call| {
        let place = place.expose_provenance();
        all.split(here, parent.expose_provenance(), color, place, call)
    }
}
function! {
    ncclCommShrink(
        parent: Pointer, excluded: *const c_int, excluded_count: c_int, place: Pointer,
        config: Pointer, flags: c_int
    ) by member |all, here, call| {
        // SAFETY: the caller's list of this many ranks, as NCCL's function takes it.
        let excluded = unsafe { listed(excluded, excluded_count) };
        let place = place.expose_provenance();
        let parent = (parent.expose_provenance(), flags & SHRINK_ABORT != 0);
        all.shrink(here, parent, excluded, place, call)
    }
}
// A new rank has made no launches before.
function! {
    ncclCommGrow(
        parent: Pointer, ranks: c_int, id: *const UniqueId, rank: c_int, place: Pointer, config: Pointer
    ) by join |all, here, call| {
        // SAFETY: null, or the caller's id, as NCCL's function takes it.
        let id = unsafe { id.as_ref() }.map(|id| of_unique_ids(&id.0));
        let parent = (parent.expose_provenance(), ranks);
        peers::note_unknown();
        all.grow(here, parent, (id, rank), place.expose_provenance(), call)
    }
}
of_communicator!(ncclCommFinalize(), finalize);
of_communicator!(ncclCommDestroy(), destroy);
of_communicator!(ncclCommAbort(), abort);
of_communicator!(ncclCommRevoke(flags: c_int), revoke);

/// `ncclCommGetAsyncError`. Its result is also Sublet's information about a non-blocking call.
///
/// # Safety
/// As NCCL's function of this name.
pub(crate) unsafe extern "C" fn ncclCommGetAsyncError(
    communicator: Pointer,
    state: *mut c_int,
) -> c_int {
    let call = || call_nccl!(ncclCommGetAsyncError(communicator, state));
    let Some(member) = runtime::member().filter(|_| !state.is_null()) else {
        return call().0;
    };
    let mut result = NcclResult::SUCCESS;
    let ask = || {
        result = call();
        if result == NcclResult::SUCCESS {
            // SAFETY: the caller's out-pointer, not null, which NCCL has just written.
            NcclResult(unsafe { state.read() })
        } else {
            result
        }
    };
    let all = &runtime::COLLECTIVES;
    let _state = all.state(&Here(member), communicator.expose_provenance(), ask);
    result.0
}
