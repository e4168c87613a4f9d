//! Contents in files over the simulated driver: a pause saves them there, or they move there to make room, and a resume
//! restores them. Also named files of contents.

#![expect(
    clippy::expect_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod files;
#[path = "../../../tests/pool_sim/paged.rs"]
mod paged;
#[path = "../../../tests/pool_sim/process.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod process;
mod spill;
#[path = "../../../tests/pool_sim/stage.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod stage;
mod writeout;
