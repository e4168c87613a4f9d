//! The real preload object in processes of their own, over the simulated driver.

#![expect(
    clippy::expect_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod attach;
mod escapes;
mod forks;
mod header;
mod hooks;
mod loader;
mod lookup;
mod memory;
mod nccl;
mod next;
mod passed;
mod pins;
mod processes;
mod ring;
mod stage;
mod transcripts;
