//! Graphs.

#![expect(unsafe_code, reason = "exports C functions")]

use crate::abi::{Out, Symbol, driver_api};
use crate::sim;

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

    fn cuGraphInstantiate_v2 = "cuGraphInstantiate" since 11000
        (executable: Out<u64>, graph: u64, error_node: Out<u64>, _log: u64, _log_bytes: usize)
    {
        error_node.put_if_wanted(0);
        executable.put(sim::get()?.instantiate(graph)?)
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
