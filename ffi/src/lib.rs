//! `libsublet.so`: the preload object and the C interface.
//!
//! A call that NCCL makes to `cuMemMap` ends up here: [`hooks`] declares every function that we stand in
//! for, [`replaced`] turns C arguments into Rust ones, `sublet_cuda_driver::vmm::map` passes the gate, and
//! `vmm_pool::Pool::map` does it. How NCCL came to call us instead of the driver is in [`lookup`].
//!
//! * [`attach`]: the same for a process that runs already, whose libraries are bound elsewhere.
//! * [`nccl`]: NCCL's own public functions, counted for the consistent cut.
//! * `guards`: what is asked before memory is made.
//! * `real`: the loader's and the driver's own functions, past our hooks.
//! * `runtime`: the one place of process-wide state: joining the tenant, fork, exit.
//! * [`pluggable`]: what torch's `CUDAPluggableAllocator` calls.
//! * [`c_api`]: `include/sublet.h` and the `ncclPause` family.
//! * [`compat`]: what callers of other projects know by other names.
//!
//! Nothing here decides anything; nothing here prints, exits or unwinds.

pub mod attach;
mod bindings;
pub mod c_api;
pub mod compat;
mod guards;
pub mod hooks;
pub mod lookup;
pub mod nccl;
pub mod pluggable;
mod real;
pub mod replaced;
mod runtime;

/// The drop-ins that are asked before memory is made.
const DROP_INS: &[guards::Guard] = &[compat::saver::GUARD];
