//! Graphs.

#![expect(unsafe_code, reason = "exports C functions")]

use crate::abi::{Out, driver_api};
use crate::sim;

driver_api! {
    fn cuGraphInstantiateWithFlags = "cuGraphInstantiate" since 11040
        (executable: Out<u64>, graph: u64, _flags: u64)
    {
        executable.put(sim::get()?.instantiate(graph)?)
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
