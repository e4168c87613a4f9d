//! What the tests of several crates stand on.
//!
//! ```text
//!   Place      a directory that goes when it is dropped: a simulated node and a run directory
//!     join       a process of a tenant, here a member over a driver of its own
//!   fake       members that misbehave as a script tells them
//!   job        real members, as the ranks of a job, and a connection that leads one
//!   redeem     imports what another process has given a ticket of
//!   memory     creates, maps, writes and looks at memory of such a process
//!   apart      a part of a test in a process of its own, or on a thread that may wait for ever
//!   programs   builds C programs
//! ```
//!
//! What can fail because of the system says so; what can fail only because a test is wrong panics.

#![expect(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "the head of the crate says it of all"
)]

pub mod apart;
pub mod fake;
pub mod job;
pub mod memory;
mod place;
pub mod programs;
pub mod script;

pub use place::{Place, Process, redeem};
