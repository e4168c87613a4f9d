//! Tenants: the processes of a job, which pause and resume together. This crate gathers the crates of tenants under one name.
//! [`member`] is a process's part, and [`coordinator`] leads all processes. Both speak the protocol of `sublet-protocol`.

#![forbid(unsafe_code)]

pub mod requests;
pub mod settings;

pub use sublet_budgets as budget;
pub use sublet_coordinator as coordinator;
pub use sublet_keep::{self as keep, numa};
pub use sublet_member as member;
pub use sublet_protocol::{
    checkpoints, class, code, cut, descriptors, error_text, family, host_memory, identity, phase,
    references, region, run_dir, saving, scope, size, state, stepping, ticket, time, transport,
    wire,
};
pub use sublet_swap as swap;
