//! NCCL's public calls as increments of the consistent cut (`tenants::cut`).
//!
//! | call | counts on |
//! | --- | --- |
//! | a collective, `ncclCommWindowRegister` and its reverse, `ncclCommSuspend` and its reverse, `ncclDevCommCreate`, `ncclCommSplit` | the communicator's collectives |
//! | `ncclSend`, `ncclRecv` | the pair's lane; to oneself, nothing |
//! | `ncclCommInitRank` and its variants, `ncclCommShrink` | the making of the new communicator |
//! | `ncclCommFinalize`, `ncclCommDestroy` | the communicator's end, once |
//! | `ncclCommAbort`, `ncclCommRevoke` | nothing, and are never held |
//!
//! Between `ncclGroupStart` and the outermost `ncclGroupEnd` calls are gathered, and counted as one launch
//! at the end: NCCL itself starts nothing earlier (`ncclGroupEndInternal` in its `src/group.cc`). `PyTorch`
//! brackets sends, receives, coalesced collectives and every call of a non-blocking communicator so, and
//! then asks for the state until the call is over (`AutoNcclGroup` in its `torch/csrc/cuda/nccl.cpp`); it ends
//! its open groups before it makes a communicator (`initNCCLComm` in `ProcessGroupNCCL.cpp`). On a stream
//! under capture nothing is launched: the increments go to the capture, and count at each launch of its graph.
//!
//! Nothing here calls NCCL but through the caller's closures and [`Process`], so all of it is tested
//! without.

mod communicators;
mod group;
mod identity;
mod lifecycle;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenants::cut::{Cut, Increment, Launch, Series};

pub use identity::of_unique_ids;

use communicators::{Communicator, Communicators};
use lifecycle::Newcomer;

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclResult(pub i32);

impl NcclResult {
    /// `ncclSuccess`.
    pub const SUCCESS: Self = Self(0);
    /// `ncclSystemError`: what NCCL says when something outside of it is missing.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// `ncclInternalError`.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// `ncclInProgress`: the call goes on in a thread of NCCL's.
    pub const IN_PROGRESS: Self = Self(7);

    fn is_accepted(self) -> bool {
        self == Self::SUCCESS || self == Self::IN_PROGRESS
    }
}

/// What the calls need of the process around them.
pub trait Process {
    /// Where launches are counted.
    fn cut(&self) -> &Cut;

    /// Tells people something, once.
    fn note(&self, text: &str);

    /// A number that no other process has.
    fn seed(&self) -> u64;

    /// The capture that work on `stream` is recorded by now; `None` when it would run.
    fn capture_of(&self, stream: usize) -> Option<u64>;

    /// These launches are recorded by `capture`.
    fn add_to_capture(&self, capture: u64, increments: Vec<Increment>);

    /// The communicator that NCCL has written to `place`, an out-pointer of the caller's which the caller
    /// keeps until NCCL has; 0 when none.
    fn communicator_at(&self, place: usize) -> usize;

    /// What a finished communicator says of its rank, and of how many it is.
    fn rank_of(&self, communicator: usize) -> Option<(u32, u32)>;

    /// NCCL's `ncclCommGetAsyncError`; asked from other threads too.
    fn state_of(&self) -> fn(communicator: usize) -> NcclResult;
}

/// What a call launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// What all ranks do.
    Collective,
    /// A message to a rank.
    Send {
        /// Which.
        peer: i32,
    },
    /// A message from a rank.
    Receive {
        /// Which.
        peer: i32,
    },
}

/// NCCL in this process. One a process: groups belong to threads.
#[derive(Debug, Default)]
pub struct Collectives {
    communicators: Communicators,
    made_here: AtomicU64,
    /// Has any call ever returned `ncclInProgress`?
    has_non_blocking: AtomicBool,
    /// Made by calls that go on; their pointers are not there yet.
    forming: Mutex<Vec<Newcomer>>,
    has_noted_unknown: AtomicBool,
}

impl Collectives {
    /// A call that launches `operation` on a stream, or, in a group, will. `call` is NCCL's own function.
    /// Waits while the rank is held.
    pub fn launch<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        (communicator, operation): (usize, Operation),
        stream: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        self.counted(process, what, (communicator, operation), Some(stream), call)
    }

    /// As [`Self::launch`], for what is collective and has no stream.
    pub fn agree<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        communicator: usize,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        self.counted(process, what, (communicator, Operation::Collective), None, call)
    }

    fn counted<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        (pointer, operation): (usize, Operation),
        stream: Option<usize>,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            return call();
        };
        communicator.application_goes_on();
        let Some(series) = series_of(&communicator, operation) else {
            return call();
        };
        let capture = stream.and_then(|stream| process.capture_of(stream));
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                let increment = communicator.increment(process.cut(), series);
                group::gather(|group| {
                    match capture {
                        Some(capture) => group.captured.push((capture, increment)),
                        None => group.increments.push(increment),
                    }
                    group.touch(communicator);
                });
            }
            return result;
        }
        if let Some(capture) = capture {
            let result = call();
            if result.is_accepted() {
                let increment = communicator.increment(process.cut(), series);
                process.add_to_capture(capture, vec![increment]);
            }
            return result;
        }
        let increment;
        let increments = if series == Series::Collectives {
            &communicator.collective
        } else {
            increment = [communicator.increment(process.cut(), series)];
            &increment
        };
        let launch = process.cut().enter(what, increments);
        let result = group::inside(call);
        self.settle(process, launch, result, std::slice::from_ref(&communicator));
        result
    }

    /// `ncclGroupStart`.
    pub fn group_start(&self, call: impl FnOnce() -> NcclResult) -> NcclResult {
        let result = call();
        if !group::is_inside() && result == NcclResult::SUCCESS {
            group::start();
        }
        result
    }

    /// `ncclGroupEnd`. The outermost launches all that the group has gathered, after waiting while the rank
    /// is held.
    pub fn group_end<P: Process>(
        &self,
        process: &P,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        let Some(mut group) = group::end() else {
            return call();
        };
        let increments = group.merged_increments();
        let launch =
            (!increments.is_empty()).then(|| process.cut().enter("ncclGroupEnd", &increments));
        let result = group::inside(call);
        let mut touched = std::mem::take(&mut group.touched);
        if result.is_accepted() {
            for (capture, increment) in group.captured.drain(..) {
                process.add_to_capture(capture, vec![increment]);
            }
        }
        for newcomer in group.newcomers.drain(..) {
            touched.extend(self.arrived(process, newcomer, result));
        }
        for communicator in group.leaving.drain(..) {
            process.cut().remove_rank(communicator.id(), communicator.local.rank);
        }
        match launch {
            Some(launch) => self.settle(process, launch, result, &touched),
            None => self.note_progress(result, &touched),
        }
        result
    }

    /// `ncclGroupSimulateEnd`: ends the group and launches nothing.
    pub fn group_simulate_end<P: Process>(
        &self,
        process: &P,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() {
            return call();
        }
        let group = group::end();
        let result = group::inside(call);
        for newcomer in group.into_iter().flat_map(|group| group.newcomers) {
            self.arrived(process, newcomer, NcclResult::INTERNAL_ERROR);
        }
        result
    }

    /// `ncclCommGetAsyncError`: `ask` returns what NCCL says of the communicator.
    pub fn state<P: Process>(
        &self,
        process: &P,
        pointer: usize,
        ask: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if group::is_inside() || !self.has_non_blocking.load(Ordering::Relaxed) {
            return ask();
        }
        let Some(communicator) = self.communicators.find(pointer) else {
            return ask();
        };
        let state = communicator.asked_by_application(ask);
        if state != NcclResult::IN_PROGRESS {
            self.formed(process, &communicator, state);
        }
        state
    }

    /// The communicator of a call that may be counted: not one of NCCL's own, and of a communicator that we
    /// have seen coming to be.
    fn known<P: Process>(&self, process: &P, pointer: usize) -> Option<Arc<Communicator>> {
        if group::is_inside() {
            return None;
        }
        let found = self.communicators.find(pointer);
        let is_news = found.is_none() && pointer != 0;
        if is_news && !self.has_noted_unknown.swap(true, Ordering::Relaxed) {
            process.note(
                "a communicator of NCCL's was made in a way that is not watched; a pause in the middle of \
                 its collectives times out",
            );
        }
        found.filter(|communicator| !communicator.is_revoked())
    }

    /// The call is back: tells the cut what came of it.
    fn settle<P: Process>(
        &self,
        process: &P,
        launch: Launch<'_>,
        result: NcclResult,
        touched: &[Arc<Communicator>],
    ) {
        match result {
            NcclResult::SUCCESS => drop(launch),
            NcclResult::IN_PROGRESS => {
                self.note_progress(result, touched);
                let (touched, ask) = (touched.to_vec(), process.state_of());
                launch.unfinished(Box::new(move || {
                    touched.iter().all(|communicator| communicator.is_finished(ask))
                }));
            }
            _ => launch.not_launched(),
        }
    }

    fn note_progress(&self, result: NcclResult, touched: &[Arc<Communicator>]) {
        if result == NcclResult::IN_PROGRESS {
            self.has_non_blocking.store(true, Ordering::Relaxed);
            for communicator in touched {
                communicator.begin_progress();
            }
        }
    }
}

/// Where an operation counts; `None` for a message to oneself, which waits for nobody else.
fn series_of(communicator: &Communicator, operation: Operation) -> Option<Series> {
    let own = communicator.local.rank;
    let other = |peer: i32| u32::try_from(peer).ok().filter(|peer| *peer != own);
    match operation {
        Operation::Collective => Some(Series::Collectives),
        Operation::Send { peer } => Some(Series::Pair { from: own, to: other(peer)? }),
        Operation::Receive { peer } => Some(Series::Pair { from: other(peer)?, to: own }),
    }
}
