//! NCCL's public calls as increments of the consistent cut (`tenants::cut`).
//!
//! | call | counts on |
//! | --- | --- |
//! | a collective, `ncclCommWindowRegister`, `ncclCommSuspend` and its reverse, `ncclDevCommCreate`, `ncclCommSplit` | the communicator's collectives |
//! | `ncclSend`, `ncclRecv` | the pair's lane; to oneself, nothing |
//! | `ncclPutSignal`, `ncclSignal`, `ncclWaitSignal` | the signals of that index and context between the two; to oneself, nothing |
//! | `ncclCommInitRank` and its variants, `ncclCommShrink`, `ncclCommGrow` | the creation of the new communicator |
//! | `ncclCommFinalize`, `ncclCommDestroy` | the communicator's end, once |
//! | `ncclCommAbort`, `ncclCommRevoke` | nothing, and are never held |
//! | `ncclEpDispatch`, `ncclEpCombine` and others of NCCL EP | see `experts.rs` |
//!
//! Between `ncclGroupStart` and the outermost `ncclGroupEnd` calls are gathered, and counted as one launch at the end: NCCL
//! itself starts nothing earlier (`ncclGroupEndInternal` in its `src/group.cc`). `PyTorch` brackets sends, receives, coalesced
//! collectives and every call of a non-blocking communicator so. Then it queries the state until the call is over
//! (`AutoNcclGroup` in its `torch/csrc/cuda/nccl.cpp`). It ends its open groups before it makes a communicator (`initNCCLComm`
//! in `ProcessGroupNCCL.cpp`). On a stream under capture nothing is launched: the increments go to the capture, and count at
//! each launch of its graph.
//!
//! A thread may be held while another ends its communicator. It must not go on to NCCL with a freed communicator, so its call
//! is refused with `ncclInvalidUsage`. If the thread has an open NCCL group that names the communicator, it ends that group in
//! failure. The thread that ends the communicator waits for that ([`Collectives::abort`]).
//!
//! This code calls NCCL only through the caller's closures and [`Process`], so all of it is tested without NCCL.

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
    /// `ncclSystemError`: NCCL's code when something outside NCCL is missing.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// `ncclInternalError`.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// `ncclInvalidUsage`: NCCL's code for a communicator that has been revoked.
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclInProgress`: the call continues in a thread of NCCL's.
    pub const IN_PROGRESS: Self = Self(7);

    fn is_accepted(self) -> bool {
        self == Self::SUCCESS || self == Self::IN_PROGRESS
    }
}

/// The services of the process that the calls need.
pub trait Process {
    /// Returns the cut in which launches are counted.
    fn cut(&self) -> &Cut;

    /// Shows people a text, once.
    fn note(&self, text: &str);

    /// Returns a number that no other process has.
    fn seed(&self) -> u64;

    /// Returns the capture that records work on `stream` now; `None` if the work would run.
    fn capture_of(&self, stream: usize) -> Option<u64>;

    /// Records that `capture` has recorded these launches.
    fn add_to_capture(&self, capture: u64, increments: Vec<Increment>);

    /// Returns the communicator that NCCL has written to `place`, or 0 if there is none. `place` is an out-pointer of the
    /// caller's, which the caller keeps until NCCL has written it.
    fn communicator_at(&self, place: usize) -> usize;

    /// Returns the rank that a finished communicator reports, and the number of its ranks.
    fn rank_of(&self, communicator: usize) -> Option<(u32, u32)>;

    /// Returns NCCL's `ncclCommGetAsyncError`, which is called from other threads too.
    fn state_of(&self) -> fn(communicator: usize) -> NcclResult;

    /// Makes NCCL fail the group that this thread has open: its end launches nothing, and forgets the communicators that the
    /// group names.
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
        /// The signal, among those of the rank.
        signal: Signal,
    },
    /// A wait for signals.
    Wait {
        /// The signals and their counts.
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
    /// The number of signals to wait for, in addition to those waited for before.
    pub count: i32,
}

/// The state of NCCL in this process. A process has one: groups belong to threads.
#[derive(Debug, Default)]
pub struct Collectives {
    communicators: Communicators,
    made_here: AtomicU64,
    /// Has any call ever returned `ncclInProgress`?
    has_non_blocking: AtomicBool,
    /// Communicators of calls that are still in progress; their pointers are not written yet.
    forming: Mutex<Vec<Newcomer>>,
    /// For each identity and rank: the number of communicators that this process has made. Under `NCCL_COMM_ID` all
    /// `ncclUniqueId`s are the same.
    uses: Mutex<HashMap<(CommunicatorId, u32), u64>>,
    experts: Experts,
    has_noted_unknown: AtomicBool,
    has_noted_given_up: AtomicBool,
}

impl Collectives {
    /// Makes a call that launches `operation` on a stream now, or at the end of the group. `call` is NCCL's own function. Waits
    /// while the rank is held.
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

    /// As [`Self::launch`], for a collective without a stream.
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

    /// Launches `increments` outside of any group, or for a call that no group defers.
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

    /// `ncclGroupEnd`. The outermost end launches all calls that the group has gathered. It first waits while the rank is held.
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
                // NCCL's own group names the communicator: the group must be over before the communicator is freed.
                process.spoil_group();
                group::inside(call);
                self.group_ended(process, group, NcclResult::INVALID_USAGE);
                return turned_back(process, "ncclGroupEnd", withdrawal);
            }
        };
        group::leave_room(increments, touched);
        result
    }

    /// Records that NCCL has ended `group` with `result`. Returns the communicators of the group.
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

    /// `ncclCommGetAsyncError`: `ask` returns NCCL's state of the communicator.
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

    /// Returns the communicator of a call that may be counted. The call is not one of NCCL's own, and we have seen the
    /// communicator's creation.
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
            // NCCL refuses calls that would launch work.
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

    /// Records the end of a call in the cut.
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

/// Returns the increments that an operation adds. A message or a signal to oneself adds none: it waits for nobody else.
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

/// Returns the answer to a call that must not be made.
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
