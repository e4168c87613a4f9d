//! The pool over the simulated driver: against a model, through pauses, and with driver calls failing.

#![expect(
    clippy::expect_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod ahead;
mod budgets;
mod calls;
mod copies;
mod counting;
mod devices;
mod drops;
mod faults;
mod host_memory;
mod leases;
mod model;
mod offload;
mod orphans;
mod paged;
mod pieces;
mod process;
mod questions;
mod random;
mod stage;
mod staged;
mod tags;
mod ways;
