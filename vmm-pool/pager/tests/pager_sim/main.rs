//! Windows over the simulated driver: every byte, through pauses, with driver calls failing, and next to other memory that wants room.

#![expect(
    clippy::expect_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod at_random;
mod checked;
#[path = "../../../tests/pool_sim/counting.rs"]
mod counting;
mod giving;
mod looked;
#[path = "../../../tests/pool_sim/paged.rs"]
mod paged;
#[path = "../../../tests/pool_sim/process.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod process;
mod program;
#[path = "../../../tests/pool_sim/random.rs"]
mod random;
#[path = "../../../tests/pool_sim/stage.rs"]
#[expect(dead_code, reason = "the pool's tests use the rest")]
mod stage;
mod unsure;
mod ways;
mod windows;
