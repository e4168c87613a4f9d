//! A `libcuda.so.1` without a GPU: the C interface of the CUDA driver over the simulated driver.
//!
//! Programs written against the driver's interface load it as they load the real one. Device memory is
//! the simulated node's, so several processes share it; streams are threads; kernels are a few functions
//! known by name (module `kernels`). What the real driver refuses is refused with the same code.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SIMCUDA_NODE` | directory of the node; without it, a private one of 2 devices of 1 GiB |
//! | `SIMCUDA_DRIVER_VERSION` | version to claim instead of the node's 13000 |
//! | `SIMCUDA_NO_P2P` | `1`: no device reaches another's memory |
//! | `SIMCUDA_NO_VMM` | `1`: no virtual memory management |
//! | `SIMCUDA_CONTEXT_BYTES` | device memory that a context costs |
//! | `SIMCUDA_FAULTS` | `symbol:nth:code,...`; `*` for any symbol, `nth+` for that call and all later |
//! | `SIMCUDA_KEEP_DESCRIPTOR_LIMIT` | `1`: the soft limit of open files is not raised |
//! | `SIMCUDA_LATENCY` | `symbol:microseconds,...` |
//! | `CUDA_VISIBLE_DEVICES` | list of device numbers |
//! | `CUDA_LOG_FILE` | a file that each refused call is added to |
//!
//! `simcuda_make_node` makes a node, for programs that bring this library along: `sublet simulate`.
//!
//! Deliberately absent: textures, the shape of arrays (they are bytes in a row), memory that moves by itself, multicast, fabric
//! handles, compilation. Of the functions that Sublet hooks, `tests/tests/preload_object/hooks.rs` lists those that are absent.

mod abi;
mod allocations;
mod api;
mod capture;
mod codes;
mod contexts;
mod errors;
mod events;
mod kernels;
mod node;
mod sim;
mod work;
