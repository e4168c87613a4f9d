//! Tenants: the processes of a job, which pause and resume together. One name for what its crates have, for those that use
//! them: [`member`] is a process's part, [`coordinator`] leads all processes, and they meet by what `sublet-protocol` says.

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
