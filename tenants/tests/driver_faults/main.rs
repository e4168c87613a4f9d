//! Every driver call of every protocol fails, one at a time and in pairs, in real members that speak over real
//! sockets and stand on simulated drivers.
//!
//! What is asked of each protocol is in `docs/fault-model.md`. Members share memory in both directions, with
//! windows mapped twice, plain blocks, blocks opened by `cudaIpc`, contents kept and discarded, memory mapped
//! nowhere, and a ticket that nobody has redeemed.

#![expect(clippy::expect_used, reason = "a test fails by panicking, helpers of it too")]

mod calls;
mod lost_context;
mod pairs;
mod saving;
mod scene;
mod sharing;
mod shortage;
mod singles;
mod stage;
