//! Graphs.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::DriverCode;

use crate::abi::{Coded, Exchange, In, Out, Symbol, driver_api};
use crate::sim;

/// `CU_GRAPH_NODE_TYPE_GRAPH` and `_EMPTY`.
const NODE_GRAPH: i32 = 4;
const NODE_EMPTY: i32 = 5;
/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`.
const OWNERSHIP_MOVED: i32 = 1;

/// The part of `CUgraphNodeParams` that matters here, at its place.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct NodeParams {
    kind: i32,
    _reserved: [i32; 3],
    child: u64,
    ownership: i32,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct InstantiateParams {
    flags: u64,
    upload_stream: u64,
    error_node: u64,
    result: i32,
}

fn add_node(node: Out<u64>, graph: u64, params: In<NodeParams>) -> Coded<()> {
    let (sim, params) = (sim::get()?, params.get()?);
    node.put(match params.kind {
        NODE_GRAPH => sim.add_child(graph, params.child, params.ownership == OWNERSHIP_MOVED)?,
        NODE_EMPTY => sim.add_empty(graph)?,
        _ => return Err(DriverCode::NOT_SUPPORTED),
    })
}

/// From 12.0 on, the name of the oldest form of instantiation is that of the one with flags.
pub(crate) fn renamed() -> Symbol {
    Symbol {
        name: "cuGraphInstantiate",
        since: 12_000,
        address: cuGraphInstantiateWithFlags as *const () as usize,
        per_thread: None,
    }
}

driver_api! {
    fn cuGraphInstantiateWithFlags = "cuGraphInstantiateWithFlags" since 11040
        (executable: Out<u64>, graph: u64, _flags: u64)
    {
        executable.put(sim::get()?.instantiate(graph)?)
    }

    fn cuGraphInstantiate = "cuGraphInstantiate" since 10000
        (executable: Out<u64>, graph: u64, error_node: Out<u64>, _log: u64, _log_bytes: usize)
    {
        error_node.put_if_wanted(0);
        executable.put(sim::get()?.instantiate(graph)?)
    }

    fn cuGraphInstantiate_v2 = "cuGraphInstantiate" since 11000
        (executable: Out<u64>, graph: u64, error_node: Out<u64>, _log: u64, _log_bytes: usize)
    {
        error_node.put_if_wanted(0);
        executable.put(sim::get()?.instantiate(graph)?)
    }

    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz
        = "cuGraphInstantiateWithParams" since 12_000
        (executable: Out<u64>, graph: u64, params: Exchange<InstantiateParams>)
    {
        executable.put(sim::get()?.instantiate(graph)?)?;
        // `CUDA_GRAPH_INSTANTIATE_SUCCESS`.
        params.replace(|params| Ok(InstantiateParams { error_node: 0, result: 0, ..params }))
    }

    fn cuGraphCreate = "cuGraphCreate" since 10000 (graph: Out<u64>, _flags: u32) {
        graph.put(sim::get()?.create_graph())
    }

    fn cuGraphAddChildGraphNode = "cuGraphAddChildGraphNode" since 10000
        (node: Out<u64>, graph: u64, _dependencies: In<u64>, _count: u64, child: u64)
    {
        node.put(sim::get()?.add_child(graph, child, false)?)
    }

    fn cuGraphAddNode = "cuGraphAddNode" since 12_020
        (node: Out<u64>, graph: u64, _dependencies: In<u64>, _count: u64, params: In<NodeParams>)
    {
        add_node(node, graph, params)
    }

    fn cuGraphAddNode_v2 = "cuGraphAddNode" since 12_030
        (
            node: Out<u64>,
            graph: u64,
            _dependencies: In<u64>,
            _data: In<u8>,
            _count: u64,
            params: In<NodeParams>,
        )
    {
        add_node(node, graph, params)
    }

    fn cuGraphExecChildGraphNodeSetParams
        = "cuGraphExecChildGraphNodeSetParams" since 11_010
        (executable: u64, node: u64, child: u64)
    {
        sim::get()?.replace_child(executable, node, child)
    }

    fn cuGraphExecUpdate = "cuGraphExecUpdate" since 10_020
        (executable: u64, graph: u64, error_node: Out<u64>, result: Out<i32>)
    {
        let updated = sim::get()?.update_executable(executable, graph);
        error_node.put_if_wanted(0);
        result.put(if updated.is_ok() { 0 } else { 2 })?;
        updated
    }

    fn cuGraphClone = "cuGraphClone" since 10000 (clone: Out<u64>, graph: u64) {
        clone.put(sim::get()?.clone_graph(graph)?)
    }

    fn cuGraphExecUpdate_v2 = "cuGraphExecUpdate" since 12000
        (executable: u64, graph: u64, result: Out<u64>)
    {
        let updated = sim::get()?.update_executable(executable, graph);
        // `CU_GRAPH_EXEC_UPDATE_SUCCESS`, or `CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED`.
        result.put(if updated.is_ok() { 0 } else { 2 })?;
        updated
    }

    fn cuGraphLaunch / cuGraphLaunch_ptsz = "cuGraphLaunch" since 10000
        (executable: u64, stream: u64)
    {
        let sim = sim::get()?;
        sim.launch_graph(executable, sim.stream(stream)?)
    }

    fn cuGraphGetNodes = "cuGraphGetNodes" since 10000
        (graph: u64, nodes: Out<u64>, count: Out<u64>)
    {
        // Nodes are counted but not shown.
        nodes.put_if_wanted(0);
        count.put(sim::get()?.graph_length(graph)?)
    }

    fn cuGraphDestroy = "cuGraphDestroy" since 10000 (graph: u64) {
        sim::get()?.destroy_graph(graph)
    }

    fn cuGraphExecDestroy = "cuGraphExecDestroy" since 10000 (executable: u64) {
        sim::get()?.destroy_executable(executable)
    }
}
