//! Slabs over the simulated driver: the views of a library and of the driver, through pauses, and with driver calls failing.

#![expect(
    clippy::expect_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod odd_orders;
#[path = "../../../tests/pool_sim/process.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod process;
mod slab_holds;
mod slab_threads;
mod slabbed;
mod slabs;
#[path = "../../../tests/pool_sim/stage.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod stage;
