//! NCCL's public calls as increments of the consistent cut (`tenants::cut`).
//!
//! | call | counts on |
//! | --- | --- |
//! | a collective, `ncclCommWindowRegister`, `ncclCommSuspend` and its reverse, `ncclDevCommCreate`, `ncclCommSplit` | the communicator's collectives |
//! | `ncclSend`, `ncclRecv` | the pair's lane; to oneself, nothing |
//! | `ncclPutSignal`, `ncclSignal`, `ncclWaitSignal` | the signals of that index and context between the two; to oneself, nothing |
//! | `ncclCommInitRank` and its variants, `ncclCommShrink`, `ncclCommGrow` | the making of the new communicator |
//! | `ncclCommFinalize`, `ncclCommDestroy` | the communicator's end, once |
//! | `ncclCommAbort`, `ncclCommRevoke` | nothing, and are never held |
//! | `ncclEpDispatch`, `ncclEpCombine` and others of NCCL EP | see `experts.rs` |
//!
//! Between `ncclGroupStart` and the outermost `ncclGroupEnd` calls are gathered, and counted as one launch
//! at the end: NCCL itself starts nothing earlier (`ncclGroupEndInternal` in its `src/group.cc`). `PyTorch`
//! brackets sends, receives, coalesced collectives and every call of a non-blocking communicator so, and
//! then asks for the state until the call is over (`AutoNcclGroup` in its `torch/csrc/cuda/nccl.cpp`); it ends
//! its open groups before it makes a communicator (`initNCCLComm` in `ProcessGroupNCCL.cpp`). On a stream
//! under capture nothing is launched: the increments go to the capture, and count at each launch of its graph.
//!
//! A thread that is held while another ends its communicator must not go on to NCCL with what has been freed: it is
//! turned back, with `ncclInvalidUsage`. Where it holds a group of NCCL's open that names the communicator, it ends that
//! group in failure, while the thread that ends the communicator waits for it ([`Collectives::abort`]).
//!
//! Nothing here calls NCCL but through the caller's closures and [`Process`], so all of it is tested
//! without.

mod communicators;
mod experts;
mod group;
mod identity;
mod lifecycle;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenants::cut::{CommunicatorId, Cut, Increment, Launch, Series, TurnedBack, Withdrawal};

pub use identity::of_unique_ids;

use communicators::{Communicator, Communicators, Derived, UseLeft};
use experts::Experts;
use group::{Group, Rare};
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
    /// `ncclInvalidUsage`: what NCCL says of a communicator that has been revoked.
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclInProgress`: the call goes on in a thread of NCCL's.
    pub const IN_PROGRESS: Self = Self(7);

    fn is_accepted(self) -> bool {
        self == Self::SUCCESS || self == Self::IN_PROGRESS
    }
}

/// The process around the calls, as far as they need it.
pub trait Process {
    /// Returns the cut in which launches are counted.
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

    /// Returns the rank that a finished communicator reports, and the number of its ranks.
    fn rank_of(&self, communicator: usize) -> Option<(u32, u32)>;

    /// NCCL's `ncclCommGetAsyncError`; asked from other threads too.
    fn state_of(&self) -> fn(communicator: usize) -> NcclResult;

    /// Has NCCL fail the group that this thread has open: its end will launch nothing and forget what the group names.
    fn spoil_group(&self);
}

/// The operation that a call launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// An operation of all ranks.
    Collective,
    /// A message to a rank.
    Send {
        /// The rank that gets the message.
        peer: i32,
    },
    /// A message from a rank.
    Receive {
        /// The rank that sends the message.
        peer: i32,
    },
    /// A signal to a rank, with or without data before it.
    Signal {
        /// The signal, of those that the rank has.
        signal: Signal,
    },
    /// A wait for signals.
    Wait {
        /// For how many of which.
        signals: &'a [Awaited],
    },
}

/// One of a rank's signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The other rank.
    pub peer: i32,
    /// `sigIdx`.
    pub index: i32,
    /// `ctx`.
    pub context: i32,
}

/// Signals that are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The signal that is waited for.
    pub signal: Signal,
    /// The number to wait for, beyond those waited for before.
    pub count: i32,
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
    /// The number of communicators that this process has made of each identity as each rank. Under `NCCL_COMM_ID` all
    /// `ncclUniqueId`s are the same.
    uses: Mutex<HashMap<(CommunicatorId, u32), u64>>,
    experts: Experts,
    has_noted_unknown: AtomicBool,
    has_noted_given_up: AtomicBool,
}

impl Collectives {
    /// A call that launches `operation` on a stream, or, in a group, will. `call` is NCCL's own function.
    /// Waits while the rank is held.
    pub fn launch<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        (communicator, operation): (usize, Operation<'_>),
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
        (pointer, operation): (usize, Operation<'_>),
        stream: Option<usize>,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        let Some(communicator) = self.known(process, pointer) else {
            return call();
        };
        communicator.application_goes_on();
        let others;
        let increments: &[Increment] = if operation == Operation::Collective {
            &communicator.collective
        } else {
            others = increments_of(&communicator, process.cut(), operation);
            &others
        };
        if increments.is_empty() {
            return call();
        }
        let capture = stream.and_then(|stream| process.capture_of(stream));
        if group::is_open() {
            let result = call();
            if result.is_accepted() {
                group::gather(|group| {
                    match capture {
                        Some(capture) => group.rare().captured.push((capture, increments.to_vec())),
                        None => group.increments.extend_from_slice(increments),
                    }
                    group.touch(&communicator);
                });
            }
            return result;
        }
        self.launched(process, what, (&communicator, increments), capture, call)
    }

    /// A launch of `increments` outside of any group, or one that no group defers.
    fn launched<P: Process>(
        &self,
        process: &P,
        what: &'static str,
        (communicator, increments): (&Arc<Communicator>, &[Increment]),
        capture: Option<u64>,
        call: impl FnOnce() -> NcclResult,
    ) -> NcclResult {
        if let Some(capture) = capture {
            let result = group::inside(call);
            if result.is_accepted() {
                process.add_to_capture(capture, increments.to_vec());
            }
            return result;
        }
        let seat = std::slice::from_ref(communicator.seat());
        let launch = match process.cut().enter_if_there(what, increments, seat) {
            Ok(launch) => launch,
            Err(withdrawal) => return turned_back(process, what, withdrawal),
        };
        let result = group::inside(call);
        self.settle(process, launch, result, std::slice::from_ref(communicator));
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
        let entered = (!increments.is_empty()).then(|| {
            let seats = group.other_seats(&increments);
            process.cut().enter_if_there("ncclGroupEnd", &increments, &seats)
        });
        let (result, touched) = match entered.transpose() {
            Ok(launch) => {
                let result = group::inside(call);
                let touched = self.group_ended(process, group, result);
                match launch {
                    Some(launch) => self.settle(process, launch, result, &touched),
                    None => self.note_progress(result, &touched),
                }
                (result, touched)
            }
            Err(withdrawal) => {
                // NCCL's own group names the communicator: it must be over before that is freed.
                process.spoil_group();
                group::inside(call);
                self.group_ended(process, group, NcclResult::INVALID_USAGE);
                return turned_back(process, "ncclGroupEnd", withdrawal);
            }
        };
        group::leave_room(increments, touched);
        result
    }

    /// NCCL has ended `group`, and said `result`. Returns the communicators that it is about.
    fn group_ended<P: Process>(
        &self,
        process: &P,
        Group { mut touched, rare, .. }: Group,
        result: NcclResult,
    ) -> Vec<Arc<Communicator>> {
        let Some(rare) = rare else {
            return touched;
        };
        let Rare { captured, splits, newcomers, leaving } = *rare;
        if result.is_accepted() {
            for (capture, increments) in captured {
                process.add_to_capture(capture, increments);
            }
        } else {
            for communicator in splits {
                communicator.numbers.give_back(Derived::Split);
            }
        }
        for newcomer in newcomers {
            touched.extend(self.arrived(process, newcomer, result));
        }
        for communicator in leaving {
            self.left(process, communicator, result);
        }
        touched
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
        if let Some(group) = group {
            self.group_ended(process, group, NcclResult::INTERNAL_ERROR);
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
        let found = found?;
        match found.use_left() {
            UseLeft::All => Some(found),
            // NCCL refuses what would launch.
            UseLeft::Ending => None,
            UseLeft::Uncounted => {
                if !self.has_noted_given_up.swap(true, Ordering::Relaxed) {
                    process.note(
                        "a communicator is used on after ncclCommShrink has aborted what was under way on it: its \
                         ranks no longer stand at the same place, so a pause in the middle of its collectives may \
                         time out",
                    );
                }
                None
            }
        }
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

/// Returns the increments that an operation adds. There are none for a message or a signal to oneself, which waits for
/// nobody else.
fn increments_of(
    communicator: &Communicator,
    cut: &Cut,
    operation: Operation<'_>,
) -> Vec<Increment> {
    let own = communicator.local.rank;
    let other = |peer: i32| u32::try_from(peer).ok().filter(|peer| *peer != own);
    let one = |series: Option<Series>| {
        series.map(|series| communicator.increment(cut, series)).into_iter().collect()
    };
    match operation {
        Operation::Collective => one(Some(Series::Collectives)),
        Operation::Send { peer } => one(other(peer).map(|to| Series::Pair { from: own, to })),
        Operation::Receive { peer } => one(other(peer).map(|from| Series::Pair { from, to: own })),
        Operation::Signal { signal: Signal { peer, index, context } } => {
            one(other(peer).map(|to| Series::Signal { from: own, to, index, context }))
        }
        Operation::Wait { signals } => {
            let increment = |awaited: &Awaited| {
                let Signal { peer, index, context } = awaited.signal;
                let series = Series::Signal { from: other(peer)?, to: own, index, context };
                let launches = u64::try_from(awaited.count).ok()?;
                Some(Increment { launches, ..communicator.increment(cut, series) })
            };
            signals.iter().filter_map(increment).collect()
        }
    }
}

/// The answer to a call that must not be made.
fn turned_back<P: Process>(
    process: &P,
    what: &'static str,
    withdrawal: Withdrawal<'_>,
) -> NcclResult {
    let why = withdrawal.why();
    drop(withdrawal);
    process.note(&match why {
        TurnedBack::RankLeft => format!(
            "{what} was held for a pause while another thread ended its communicator (by ncclCommAbort, ncclCommRevoke, \
             ncclCommDestroy or ncclCommShrink): it returned ncclInvalidUsage and launched nothing. Make a new \
             communicator"
        ),
        TurnedBack::Away => format!(
            "{what} was called while NCCL's memory was away: it returned ncclInvalidUsage and launched nothing, as \
             SUBLET_NCCL_AWAY=fail says. Resume NCCL first, or unset that, and calls wait for the resume"
        ),
    });
    NcclResult::INVALID_USAGE
}
