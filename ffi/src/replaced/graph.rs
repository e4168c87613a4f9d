//! Graphs: a launch of a graph is counted and held like the work in it. The work in a graph is followed from the capture on.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use sublet_cuda_graph::Counted;
use sublet_pager::In;
use tenants::cut::{Increment, TurnedBack, Withdrawal};
use vmm_pool::driver::{DriverCode, RawStream};
use vmm_pool::gate::Passage;

use super::{STREAM_PER_THREAD, SUCCESS, stream_value};
use crate::driver::call_driver;
use crate::look;
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

/// `CU_STREAM_LEGACY`; 0 means the same here.
const STREAM_LEGACY: usize = 1;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
const CAPTURE_ACTIVE: c_int = 1;
/// `CU_GRAPH_NODE_TYPE_GRAPH`, first in `CUgraphNodeParams`; the child graph is 16 bytes in.
const NODE_TYPE_GRAPH: c_int = 4;
const NODE_CHILD_OFFSET: usize = 16;
/// The offset of `CUgraphChildGraphNodeOwnership`, after it. The value below moves the child into the graph.
const NODE_OWNERSHIP_OFFSET: usize = 24;
const OWNERSHIP_MOVED: c_int = 1;
/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`: 16 bytes in its handle, then its kind, how many bodies, and where they are.
const NODE_TYPE_CONDITIONAL: c_int = 13;
const NODE_BODY_COUNT_OFFSET: usize = 28;
const NODE_BODIES_OFFSET: usize = 32;

/// Returns the driver's number of the capture that records work for `stream` now. It queries the driver only while a capture is
/// under way in the process. It never queries the legacy stream, which cannot be captured and would return an error.
pub(crate) fn capture_of(stream: usize) -> Option<u64> {
    if runtime::CAPTURES.counts().under_way() == 0 || stream <= STREAM_LEGACY {
        return None;
    }
    let mut status: c_int = 0;
    let mut id: c_ulonglong = 0;
    let stream: Pointer = std::ptr::with_exposed_provenance_mut(stream);
    let (status_out, id_out, none) = (&raw mut status, &raw mut id, std::ptr::null_mut());
    // CUDA 13 headers name the third form; drivers keep the second for older programs.
    let mut code = call_driver!(cuStreamGetCaptureInfo_v2(
        stream => Pointer, status_out => *mut c_int, id_out => *mut c_ulonglong,
        none => Pointer, none => Pointer, none => Pointer
    ));
    if code == DriverCode::NOT_INITIALIZED.0 {
        code = call_driver!(cuStreamGetCaptureInfo_v3(
            stream => Pointer, status_out => *mut c_int, id_out => *mut c_ulonglong,
            none => Pointer, none => Pointer, none => Pointer, none => Pointer
        ));
    }
    (code == SUCCESS && status == CAPTURE_ACTIVE).then_some(id)
}

/// Returns the place of work for a stream with this value.
pub(crate) fn place_of(stream: usize) -> In {
    let raw = RawStream(stream as u64);
    if capture_of(stream).is_some() {
        In::Graph
    } else if stream == STREAM_PER_THREAD {
        In::OwnStream(raw)
    } else {
        In::Stream(raw)
    }
}

/// Returns the handle that the driver has written to an out-pointer, as a number.
fn written(place: Pointer) -> Option<u64> {
    if place.is_null() {
        return None;
    }
    // SAFETY: the caller's out-pointer for one handle, which the driver has just written.
    let value = unsafe { place.cast::<Pointer>().read() };
    (!value.is_null()).then(|| value.expose_provenance() as u64)
}

fn value(handle: Pointer) -> u64 {
    handle.addr() as u64
}

/// Ends a capture with `end`, and follows the work that it recorded.
pub(super) fn end_capture(
    stream: usize,
    key: u64,
    graph: Pointer,
    is_capturing: impl FnOnce() -> bool,
    end: impl FnOnce() -> c_int,
) -> c_int {
    let graphs = &runtime::GRAPHS;
    let capture = graphs.is_used().then(|| capture_of(stream)).flatten();
    let code = end();
    // A failed end ends the capture too, unless it failed because this thread may not end it.
    if code != SUCCESS && is_capturing() {
        return code;
    }
    let target = runtime::CAPTURES.ended(key);
    if let Some(capture) = capture {
        let made = if code == SUCCESS { written(graph) } else { None };
        let had_other_work = target == Some(sublet_cuda_graph::Target::Existing);
        if graphs.capture_ended(capture, made, had_other_work) == Counted::NotInBody
            && let Some(member) = runtime::member()
        {
            // Sublet does not count this collective, so a pause cannot wait for it. The job runs on. Pause between two
            // launches of this graph.
            member.notes().add(
                "a collective was captured into a part of a graph that is not followed, such as the body of a conditional \
                 node: a pause in the middle of its launches may time out"
                    .to_owned(),
            );
        }
    }
    code
}

macro_rules! launch_graph {
    ($symbol:ident) => {
        /// Launches a graph. Collectives in it are counted, and held, like others.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(executable: Pointer, stream: Pointer) -> c_int {
            let driver = || call_driver!($symbol(executable, stream));
            let Some(member) = runtime::member() else {
                return driver();
            };
            let symbol = stringify!($symbol);
            let on = stream_value(stream, symbol);
            let launch = || {
                let _seen = look::begin_graph(|| place_of(on));
                let _pass = member.gate().pass_for(symbol, Passage::Use);
                driver()
            };
            let Some(increments) = runtime::GRAPHS.increments_of(value(executable)) else {
                return apart(launch);
            };
            launch_counted(member, &increments, on, launch)
        }
    };
}

/// Makes the launch in a separate frame, for cancelled threads: see `hooks`.
#[inline(never)]
fn apart(launch: impl FnOnce() -> c_int) -> c_int {
    launch()
}

/// Launches a graph with collectives, by `launch`. It is a separate function, so that other launches need no stack space for it.
#[inline(never)]
fn launch_counted(
    member: &Member,
    increments: &[Increment],
    stream: usize,
    launch: impl FnOnce() -> c_int,
) -> c_int {
    if let Some(capture) = capture_of(stream) {
        let code = launch();
        if code == SUCCESS {
            runtime::GRAPHS.recorded(capture, increments.to_vec());
        }
        return code;
    }
    // The launch is held outside of the gate, which a pause shuts.
    let counted = match member.cut().enter_if_there("cuGraphLaunch", increments, &[]) {
        Ok(counted) => counted,
        Err(withdrawal) => return turned_back(member, &withdrawal),
    };
    let code = launch();
    if code != SUCCESS {
        counted.not_launched();
    }
    code
}

/// Returns the code for a launch that must not be made.
fn turned_back(member: &Member, withdrawal: &Withdrawal<'_>) -> c_int {
    let (text, code) = match withdrawal.why() {
        TurnedBack::RankLeft => (
            "cuGraphLaunch was held for a pause while another thread ended a communicator that its graph uses: it failed as \
             for a graph that is gone, and launched nothing. Capture the graph again",
            DriverCode::INVALID_HANDLE,
        ),
        TurnedBack::Away => (
            "cuGraphLaunch was called for a graph with collectives while NCCL's memory was paused: it failed and \
             launched nothing, because of SUBLET_NCCL_AWAY=fail. Resume NCCL first, or unset this setting: then calls \
             wait for the resume",
            DriverCode::NOT_PERMITTED,
        ),
    };
    member.notes().add(text.to_owned());
    code.0
}

launch_graph!(cuGraphLaunch);
launch_graph!(cuGraphLaunch_ptsz);

macro_rules! followed {
    ($(#[$doc:meta])* $symbol:ident ( $($arg:ident : $ty:ty),* ) then |$graphs:ident| $follow:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            let code = call_driver!($symbol($($arg),*));
            if code == SUCCESS && runtime::GRAPHS.is_used() {
                let $graphs = &runtime::GRAPHS;
                $follow;
            }
            code
        }
    };
}

fn instantiated(executable: Pointer, graph: Pointer) {
    if let Some(made) = written(executable) {
        runtime::GRAPHS.instantiated(made, value(graph));
    }
}

followed! {
    /// Makes an executable graph.
    cuGraphInstantiate(
        executable: Pointer, graph: Pointer, error_node: Pointer, log: *mut c_char, size: usize
    ) then |_graphs| instantiated(executable, graph)
}
followed! {
    /// Makes an executable graph.
    cuGraphInstantiate_v2(
        executable: Pointer, graph: Pointer, error_node: Pointer, log: *mut c_char, size: usize
    ) then |_graphs| instantiated(executable, graph)
}
followed! {
    /// Makes an executable graph.
    cuGraphInstantiateWithFlags(executable: Pointer, graph: Pointer, flags: c_ulonglong)
        then |_graphs| instantiated(executable, graph)
}
followed! {
    /// Makes an executable graph.
    cuGraphInstantiateWithParams(executable: Pointer, graph: Pointer, parameters: Pointer)
        then |_graphs| instantiated(executable, graph)
}
followed! {
    /// Makes an executable graph.
    cuGraphInstantiateWithParams_ptsz(executable: Pointer, graph: Pointer, parameters: Pointer)
        then |_graphs| instantiated(executable, graph)
}
followed! {
    /// Copies a graph.
    cuGraphClone(copy: Pointer, original: Pointer) then |graphs| {
        if let Some(made) = written(copy) {
            graphs.cloned(made, value(original));
        }
    }
}
followed! {
    /// Puts a copy of a graph into another as a node.
    cuGraphAddChildGraphNode(
        node: Pointer, graph: Pointer, dependencies: Pointer, count: usize, child: Pointer
    ) then |graphs| {
        if let Some(made) = written(node) {
            graphs.child_added(value(graph), made, value(child));
        }
    }
}
macro_rules! add_node {
    ($symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        /// Adds a node, which may be a graph or contain some.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            node: Pointer, graph: Pointer, $($arg: $ty,)* parameters: Pointer
        ) -> c_int {
            let code = call_driver!($symbol(node, graph, $($arg,)* parameters));
            if code == SUCCESS {
                node_added(node, graph, parameters);
            }
            code
        }
    };
}

add_node!(cuGraphAddNode(dependencies: Pointer, count: usize));
add_node!(cuGraphAddNode_v2(dependencies: Pointer, data: Pointer, count: usize));
add_node!(cuGraphAddNode_v3(dependencies: Pointer, data: Pointer, count: usize));

fn node_added(node: Pointer, graph: Pointer, parameters: Pointer) {
    // SAFETY: the driver has accepted these parameters, whose first field is the kind of node.
    match unsafe { parameters.cast::<c_int>().read() } {
        // Bodies exist before work is captured into one.
        NODE_TYPE_CONDITIONAL => bodies_added(parameters),
        NODE_TYPE_GRAPH if runtime::GRAPHS.is_used() => child_added(node, graph, parameters),
        _ => {}
    }
}

fn child_added(node: Pointer, graph: Pointer, parameters: Pointer) {
    let Some(made) = written(node) else { return };
    let place = parameters.wrapping_byte_add(NODE_CHILD_OFFSET).cast::<Pointer>();
    // SAFETY: parameters of this kind hold the child graph there.
    let child = value(unsafe { place.read() });
    runtime::GRAPHS.child_added(value(graph), made, child);
    let place = parameters.wrapping_byte_add(NODE_OWNERSHIP_OFFSET).cast::<c_int>();
    // SAFETY: behind it who owns the child, or bytes of the union that must be 0 (before CUDA 12.9).
    if unsafe { place.read() } == OWNERSHIP_MOVED {
        runtime::GRAPHS.is_body(child);
    }
}

/// Notes the bodies of a conditional node. The driver has written their addresses to the node's parameters.
fn bodies_added(parameters: Pointer) {
    let count = parameters.wrapping_byte_add(NODE_BODY_COUNT_OFFSET).cast::<c_uint>();
    let bodies = parameters.wrapping_byte_add(NODE_BODIES_OFFSET).cast::<*const Pointer>();
    // SAFETY: parameters of this kind hold how many bodies there are.
    let count = unsafe { count.read() } as usize;
    // SAFETY: and where the driver has put them.
    let bodies = unsafe { bodies.read() };
    if bodies.is_null() {
        return;
    }
    // SAFETY: the driver's array of this many graphs, which lives as long as the node.
    for body in unsafe { std::slice::from_raw_parts(bodies, count) } {
        runtime::GRAPHS.is_body(value(*body));
    }
}

followed! {
    /// Changes an executable graph to what another graph does.
    cuGraphExecUpdate(
        executable: Pointer, graph: Pointer, error_node: Pointer, result: *mut c_uint
    ) then |graphs| graphs.updated(value(executable), value(graph))
}
followed! {
    /// Changes an executable graph to what another graph does.
    cuGraphExecUpdate_v2(executable: Pointer, graph: Pointer, info: Pointer)
        then |graphs| graphs.updated(value(executable), value(graph))
}
followed! {
    /// Changes the child graph of a node in an executable graph.
    cuGraphExecChildGraphNodeSetParams(executable: Pointer, node: Pointer, child: Pointer)
        then |graphs| graphs.child_replaced(value(executable), value(node), value(child))
}
/// Ends a graph.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: Pointer) -> c_int {
    let mut code = SUCCESS;
    runtime::GRAPHS.destroy_graph(value(graph), || {
        code = call_driver!(cuGraphDestroy(graph));
        code == SUCCESS
    });
    code
}

/// Ends an executable graph.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: Pointer) -> c_int {
    let mut code = SUCCESS;
    runtime::GRAPHS.destroy_executable(value(executable), || {
        code = call_driver!(cuGraphExecDestroy(executable));
        code == SUCCESS
    });
    code
}
