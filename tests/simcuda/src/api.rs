//! The functions of the driver's interface, by family.

mod checkpoint;
mod context;
mod copy;
mod device;
mod graph;
mod launch;
mod lookup;
mod memory;
mod older;
mod pointer;
mod shaped;
mod stream;
mod values;
mod vmm;

use crate::abi::Symbol;

/// Every function that `cuGetProcAddress` knows.
fn symbols() -> Vec<Symbol> {
    [
        checkpoint::symbols(),
        context::symbols(),
        copy::symbols(),
        device::symbols(),
        graph::symbols(),
        vec![graph::renamed()],
        launch::symbols(),
        lookup::symbols(),
        memory::symbols(),
        older::symbols(),
        pointer::symbols(),
        shaped::symbols(),
        stream::symbols(),
        values::symbols(),
        vmm::symbols(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
