//! `libsublet.so`: the preload object and the C interface.
//!
//! A call of NCCL to `cuMemMap` arrives here. [`replaced`] turns C arguments into Rust ones, `sublet_cuda_driver::vmm::map`
//! passes the gate, and `vmm_pool::Pool::map` maps the memory. The engine [`sublet_interpose`] leads NCCL's call to Sublet's
//! function instead of the driver's.
//!
//! * [`interposed`]: the tables of the engine: the driver's functions of [`hooks`], NCCL's of [`nccl`], and `dlsym`.
//! * [`replaced`]: the driver's functions that the pool answers; those that only wait are in [`hooks`].
//! * [`nccl`]: NCCL's own public functions, counted for the consistent cut.
//! * `registrations`: libraries' functions that register memory with network cards and GDRCopy.
//! * `nvml`: NVML's answers about memory and processes, within a tenant's budget.
//! * [`attach`]: the attach of a running process to Sublet.
//! * `environment`: the settings in the environment, by Sublet's names and by other projects'.
//! * `runtime`: all process-wide state: joining the tenant, fork, exit.
//! * `saver`, [`pluggable`], [`compat`]: the functions of `torch_memory_saver`, and what torch's `CUDAPluggableAllocator` calls.
//!   `sublet_torch_allocator` decides about them.
//! * [`c_api`]: `include/sublet.h` and the `ncclPause` family.
//! * [`last_call`]: the error and the report of each thread's last call.
//!
//! The crates below decide about memory, collectives and pauses. This crate decides which function a caller gets. Nothing here
//! prints, exits or unwinds.

/// Declares a type for each function of the C interface, with the name of the function, from `bindings`.
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $answer:ty)?;)*) => {
        $(pub type $name = unsafe extern "C" fn($($type),*) $(-> $answer)?;)*
    };
}

pub mod attach;
mod bindings;
pub mod c_api;
pub mod command;
pub mod compat;
mod contexts;
mod driver;
mod environment;
pub mod hooks;
pub mod interposed;
pub mod last_call;
mod look;
pub mod nccl;
mod nvml;
mod peers;
pub mod pluggable;
mod records;
mod registrations;
pub mod replaced;
mod runtime;
mod saver;
#[cfg(test)]
mod tests;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "libsublet.so is written for x86-64: another processor needs its own assembly in four functions (`dlsym` and `versioned` of \
     interposed.rs, `with_caller` of replaced/mod.rs, `exported` of sublet-interpose's library.rs)"
);

/// Returns why work of this process may reach a device past the gate, if it may.
const UNGATED: fn() -> Option<String> = attach::ungated;

/// Returns why device memory may be pinned unseen by Sublet, if it may.
const UNSEEN_PINS: fn() -> Option<String> = attach::unseen_pins;

/// Returns why NCCL's memory cannot leave this process while it runs on. A member calls it.
const UNSEEN_NCCL: fn() -> Option<String> = nccl::unseen_work;

/// Returns why the driver could not restore this process from a deep pause. A member calls it.
const UNFREEZABLE: fn() -> Option<String> = replaced::unfreezable;
