//! A member against clients and owners that send what they should not, or nothing at all.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, whose failure to set a stage up is the test's"
)]

mod clients;
mod families;
mod owners;
mod replies;
mod stage;
