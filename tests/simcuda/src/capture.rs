//! Stream capture and graphs: a graph is the list of recorded work, replayed in its order.
//!
//! The order of recording respects every dependency that the capture could express, so replaying the
//! list on one stream is a correct schedule of the graph.
//!
//! What a capture forbids, and whom, is as NVIDIA documents it (`cuThreadExchangeStreamCaptureMode`, and the programming
//! guide on prohibited operations), and as `gpu-tests/captured_calls.py` has seen it on an H100 with driver 580:
//!
//! | call | is refused | while |
//! | --- | --- | --- |
//! | one that may be unsafe, such as `cuMemAlloc`, `cuMemFree`, and questions and waits for any stream or event | by the mode of the calling thread | it captures itself, or another thread does so in global mode |
//! | waiting for a context | always | any of its streams is captured, in any mode, by anybody |
//! | waiting for a captured stream, or asking it | always | it is captured |
//! | the legacy stream | always | a stream that is ordered against it is captured |
//!
//! A refused call invalidates the captures that are the reason. They still have to be ended, and end with an error.

mod nodes;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use vmm_pool::driver::sim::{SimContext, StreamKind, Work};
use vmm_pool::driver::{DriverCode, RawStream};

use crate::abi::Coded;
use crate::sim::{Sim, lock};

const FIRST: u64 = 0x6300_0000;
const STEP: u64 = 0x10;
pub(crate) const MODE_GLOBAL: i32 = 0;
const MODE_THREAD_LOCAL: i32 = 1;
const MODE_RELAXED: i32 = 2;
const STREAM_CAPTURE_INVALIDATED: DriverCode = DriverCode(901);
const GRAPH_EXEC_UPDATE_FAILURE: DriverCode = DriverCode(910);
const STREAM_CAPTURE_UNMATCHED: DriverCode = DriverCode(903);
const STREAM_CAPTURE_WRONG_THREAD: DriverCode = DriverCode(908);

thread_local! {
    /// `CUstreamCaptureMode` of this thread.
    static THREAD_MODE: Cell<i32> = const { Cell::new(MODE_GLOBAL) };
}

/// One capture under way.
pub(crate) struct Capture {
    pub(crate) id: u64,
    origin: RawStream,
    mode: i32,
    thread: ThreadId,
    context: SimContext,
    /// The graph that its work is added to, where that was there before.
    into: Option<u64>,
    recorded: Mutex<Recorded>,
    ended: AtomicBool,
    invalid: AtomicBool,
}

/// What a graph holds: its work, and the addresses of memory that nodes of its own take. That memory goes back to the
/// device's pool with the last graph and executable that hold it.
#[derive(Clone, Default)]
struct Recorded {
    work: Vec<Work>,
    memory: Arc<Vec<u64>>,
    children: nodes::Children,
}

impl Recorded {
    /// The memory that nobody else holds.
    fn into_memory(self) -> Vec<u64> {
        Arc::into_inner(self.memory).unwrap_or_default()
    }
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture")
            .field("id", &self.id)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

impl Capture {
    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Has a call that was refused spoilt it?
    pub(crate) fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Acquire)
    }

    fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    /// Does it forbid calls that may be unsafe to the calling thread, which is in `mode`?
    fn forbids(&self, mode: i32) -> bool {
        let is_own = self.thread == thread::current().id();
        match mode {
            MODE_RELAXED => false,
            MODE_THREAD_LOCAL => is_own && self.mode != MODE_RELAXED,
            _ => (is_own && self.mode != MODE_RELAXED) || (!is_own && self.mode == MODE_GLOBAL),
        }
    }
}

/// Captures by stream, graphs, and executable graphs.
#[derive(Default)]
pub(crate) struct Captures {
    by_stream: BTreeMap<u64, Arc<Capture>>,
    graphs: BTreeMap<u64, Recorded>,
    executables: BTreeMap<u64, Recorded>,
    made: u64,
    nodes: u64,
}

impl std::fmt::Debug for Captures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captures")
            .field("by_stream", &self.by_stream)
            .field("graphs", &self.graphs.len())
            .field("executables", &self.executables.len())
            .finish_non_exhaustive()
    }
}

impl Captures {
    /// The number of a capture, which never comes again.
    fn next_capture(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    /// A value for a graph or an executable: that of one that has ended comes again immediately, as the real driver's do.
    fn next_value(&self) -> u64 {
        let is_used = |id: &u64| self.graphs.contains_key(id) || self.executables.contains_key(id);
        let mut values = (1..).map(|number| FIRST + number * STEP);
        values.find(|id| !is_used(id)).unwrap_or(FIRST)
    }
}

/// Sets the capture mode of this thread and returns the one before.
pub(crate) fn exchange_thread_mode(mode: i32) -> Coded<i32> {
    if !(MODE_GLOBAL..=MODE_RELAXED).contains(&mode) {
        return Err(DriverCode::INVALID_VALUE);
    }
    Ok(THREAD_MODE.replace(mode))
}

impl Sim {
    /// Begins a capture, into a graph that is there where one is named.
    pub(crate) fn begin_capture(
        &self,
        stream: RawStream,
        mode: i32,
        into: Option<u64>,
    ) -> Coded<()> {
        if !(MODE_GLOBAL..=MODE_RELAXED).contains(&mode) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let context = self.core.stream_context(stream)?;
        if self.core.default_stream(context)? == stream {
            return Err(DriverCode::STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut captures = lock(&self.captures);
        if captures.by_stream.contains_key(&stream.0) {
            return Err(DriverCode::ILLEGAL_STATE);
        }
        if into.is_some_and(|graph| !captures.graphs.contains_key(&graph)) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let capture = Arc::new(Capture {
            id: captures.next_capture(),
            origin: stream,
            mode,
            thread: thread::current().id(),
            context,
            into,
            recorded: Mutex::default(),
            ended: AtomicBool::new(false),
            invalid: AtomicBool::new(false),
        });
        captures.by_stream.insert(stream.0, capture);
        Ok(())
    }

    pub(crate) fn end_capture(&self, stream: RawStream) -> Coded<u64> {
        let mut captures = lock(&self.captures);
        let capture =
            captures.by_stream.get(&stream.0).cloned().ok_or(DriverCode::ILLEGAL_STATE)?;
        if capture.origin != stream {
            return Err(STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != MODE_RELAXED && capture.thread != thread::current().id() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        capture.ended.store(true, Ordering::Release);
        captures.by_stream.retain(|_, other| !Arc::ptr_eq(other, &capture));
        if capture.is_invalid() {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let recorded = std::mem::take(&mut *lock(&capture.recorded));
        if let Some(graph) = capture.into {
            let there = captures.graphs.get_mut(&graph).ok_or(DriverCode::INVALID_VALUE)?;
            there.work.extend(recorded.work);
            Arc::make_mut(&mut there.memory).extend(recorded.memory.iter());
            return Ok(graph);
        }
        let id = captures.next_value();
        captures.graphs.insert(id, recorded);
        Ok(id)
    }

    /// Ends a stream, and what is known of it: its value may be another's immediately.
    pub(crate) fn end_stream(&self, stream: RawStream) -> Coded<()> {
        self.core.end_stream(stream)?;
        lock(&self.captures).by_stream.remove(&stream.0);
        Ok(())
    }

    /// The capture that `stream` takes part in.
    pub(crate) fn capture_of(&self, stream: RawStream) -> Option<Arc<Capture>> {
        lock(&self.captures).by_stream.get(&stream.0).cloned()
    }

    pub(crate) fn join_capture(&self, stream: RawStream, capture: &Arc<Capture>) -> Coded<()> {
        let mut captures = lock(&self.captures);
        let joined = captures.by_stream.entry(stream.0).or_insert_with(|| capture.clone());
        if Arc::ptr_eq(joined, capture) { Ok(()) } else { Err(DriverCode(904)) }
    }

    /// Submits work to `stream`, or records it when the stream is being captured.
    pub(crate) fn submit(&self, stream: RawStream, work: Work) -> Coded<()> {
        match self.capture_of(stream) {
            Some(capture) if capture.is_invalid() => Err(STREAM_CAPTURE_INVALIDATED),
            Some(capture) => {
                lock(&capture.recorded).work.push(work);
                Ok(())
            }
            None => {
                self.forbid_implicit(stream)?;
                self.core.enqueue(stream, work)
            }
        }
    }

    /// Gives memory that was just allocated on `stream` to the graph that is being captured there, if one is.
    pub(crate) fn hold_for_graph(&self, stream: RawStream, address: u64) {
        if let Some(capture) = self.capture_of(stream) {
            Arc::make_mut(&mut lock(&capture.recorded).memory).push(address);
        }
    }

    /// Invalidates the captures that `choose` picks, and fails with `code` where there is one.
    fn spoil(&self, code: DriverCode, choose: impl Fn(RawStream, &Capture) -> bool) -> Coded<()> {
        let captures = lock(&self.captures);
        let streams = captures.by_stream.iter();
        let chosen = streams.filter(|(stream, capture)| choose(RawStream(**stream), capture));
        let mut outcome = Ok(());
        for (_, capture) in chosen {
            capture.invalidate();
            outcome = Err(code);
        }
        outcome
    }

    /// Refuses calls that may be unsafe in a capture to this thread.
    pub(crate) fn forbid_in_capture(&self) -> Coded<()> {
        let mode = THREAD_MODE.get();
        self.spoil(DriverCode::STREAM_CAPTURE_UNSUPPORTED, |_, capture| capture.forbids(mode))
    }

    /// Refuses to wait for a context while any of its streams is captured, by any thread and in any mode.
    pub(crate) fn forbid_wait_for_context(&self, context: SimContext) -> Coded<()> {
        self.spoil(DriverCode::STREAM_CAPTURE_UNSUPPORTED, |_, capture| capture.context == context)
    }

    /// Refuses a call on a stream that is being captured, or that waits for such a stream.
    pub(crate) fn forbid_on_captured(&self, stream: RawStream) -> Coded<()> {
        self.spoil(DriverCode::STREAM_CAPTURE_UNSUPPORTED, |captured, _| captured == stream)?;
        self.forbid_implicit(stream)
    }

    /// Refuses the legacy stream while a stream that is ordered against it is captured.
    fn forbid_implicit(&self, stream: RawStream) -> Coded<()> {
        let is_in_the_way = self.what_the_default_waits_for(stream)?;
        self.spoil(DriverCode::STREAM_CAPTURE_IMPLICIT, is_in_the_way)
    }

    /// The capture of `stream`, as a question: about the legacy stream it is refused as work is, and spoils nothing.
    pub(crate) fn capture_shown_of(&self, stream: RawStream) -> Coded<Option<Arc<Capture>>> {
        let is_in_the_way = self.what_the_default_waits_for(stream)?;
        let captures = lock(&self.captures);
        let mut all = captures.by_stream.iter();
        if all.any(|(captured, capture)| is_in_the_way(RawStream(*captured), capture)) {
            return Err(DriverCode::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(captures.by_stream.get(&stream.0).cloned())
    }

    /// Which captured streams `stream` waits for where it is a default one.
    fn what_the_default_waits_for(
        &self,
        stream: RawStream,
    ) -> Coded<impl Fn(RawStream, &Capture) -> bool> {
        let context = self.core.stream_context(stream)?;
        let is_default = self.core.stream_kind(stream)? == StreamKind::Default;
        Ok(move |captured, capture: &Capture| {
            let kind = self.core.stream_kind(captured);
            is_default && capture.context == context && kind == Ok(StreamKind::Blocking)
        })
    }

    pub(crate) fn instantiate(&self, graph: u64) -> Coded<u64> {
        let mut captures = lock(&self.captures);
        let recorded = captures.all_of(graph)?;
        let id = captures.next_value();
        captures.executables.insert(id, recorded);
        Ok(id)
    }

    pub(crate) fn clone_graph(&self, graph: u64) -> Coded<u64> {
        let mut captures = lock(&self.captures);
        let recorded = captures.graphs.get(&graph).cloned().ok_or(DriverCode::INVALID_VALUE)?;
        // The manual (13.0, cuGraphAddMemAllocNode): such a graph cannot be cloned.
        if !recorded.memory.is_empty() {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let id = captures.next_value();
        captures.graphs.insert(id, recorded);
        Ok(id)
    }

    /// Puts the work of `graph` in the place of an executable's, where there is as much of it. What is launched already
    /// runs as it was.
    pub(crate) fn update_executable(&self, executable: u64, graph: u64) -> Coded<()> {
        let mut captures = lock(&self.captures);
        let after = captures.all_of(graph)?;
        let before = captures.executables.get_mut(&executable).ok_or(DriverCode::INVALID_VALUE)?;
        if before.work.len() != after.work.len() {
            return Err(GRAPH_EXEC_UPDATE_FAILURE);
        }
        *before = after;
        Ok(())
    }

    pub(crate) fn launch_graph(&self, executable: u64, stream: RawStream) -> Coded<()> {
        let recorded = lock(&self.captures)
            .executables
            .get(&executable)
            .cloned()
            .ok_or(DriverCode::INVALID_VALUE)?;
        recorded.work.into_iter().try_for_each(|step| self.submit(stream, step))
    }

    /// How many pieces of work a graph holds.
    pub(crate) fn graph_length(&self, graph: u64) -> Coded<u64> {
        lock(&self.captures)
            .graphs
            .get(&graph)
            .map(|recorded| recorded.work.len() as u64)
            .ok_or(DriverCode::INVALID_VALUE)
    }

    pub(crate) fn destroy_graph(&self, graph: u64) -> Coded<()> {
        for removed in lock(&self.captures).remove_graph(graph)? {
            self.give_back(removed);
        }
        Ok(())
    }

    pub(crate) fn destroy_executable(&self, executable: u64) -> Coded<()> {
        let removed = lock(&self.captures).executables.remove(&executable);
        self.give_back(removed.ok_or(DriverCode::INVALID_VALUE)?);
        Ok(())
    }

    fn give_back(&self, recorded: Recorded) {
        for address in recorded.into_memory() {
            // A program may have freed it by a call of its own.
            let _freed_before = self.pool_keep(address);
        }
    }
}
